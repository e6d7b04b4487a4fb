from typing_extensions import disjoint_base

from qkv_ext._cache._store import Pages
from qkv_ext._core._arrays import Array
from qkv_ext._layers._weights import Projections

BUILD: str

@disjoint_base
class Step:
    def __init__(self, isa: int) -> None: ...
    def plain(
        self,
        x: object,
        layer: Projections,
        rotary: object,
        interleaved: object,
        rotary_dim: object,
        pages: Pages,
        until: list[int],
        given: tuple[object, ...],
        threads: int,
    ) -> tuple[Array, list[int], bool] | None: ...
