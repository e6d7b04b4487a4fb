from typing_extensions import disjoint_base

from qkv_ext._cache._store import Pages
from qkv_ext._core._arrays import Array

BUILD: str

@disjoint_base
class Append:
    def __init__(self, isa: int) -> None: ...
    def compute(
        self, k: Array, v: Array, counts: list[int], pages: Pages, threads: int
    ) -> bool: ...
    def plain(
        self, k: object, v: object, pages: Pages, until: list[int], threads: int
    ) -> tuple[list[int], bool] | None: ...
