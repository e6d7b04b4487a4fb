from typing_extensions import disjoint_base

from qkv_ext._arrays import Array
from qkv_ext._layers import Projections
from qkv_ext._store import Pages

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
