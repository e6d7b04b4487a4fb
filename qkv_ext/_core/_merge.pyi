from collections.abc import Sequence

from typing_extensions import disjoint_base

from qkv_ext._core._arrays import Array

BUILD: str
MOST_AXES: int

@disjoint_base
class Merge:
    def __init__(self, isa: int) -> None: ...
    def compute(
        self,
        outputs: Sequence[Array],
        lses: Sequence[Array],
        output: Array,
        lse: Array,
        blhd: bool,
        threads: int,
    ) -> None: ...
    def plain(self, outputs: object, lses: object, threads: int) -> tuple[Array, Array] | None: ...
