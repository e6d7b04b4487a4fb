from typing_extensions import disjoint_base

from qkv_ext._cache._store import Pages
from qkv_ext._core._arrays import Array
from qkv_ext._core._problem import Problem

BUILD: str

@disjoint_base
class Attention:
    def __init__(self, isa: int) -> None: ...
    def compute(self, problem: Problem) -> None: ...
    def plain(
        self, q: object, k: object, v: object, given: tuple[object, ...], threads: int
    ) -> Array | tuple[Array, Array] | None: ...
    def plain_attend(
        self, q: object, pages: Pages, given: tuple[object, ...], threads: int
    ) -> Array | None: ...
