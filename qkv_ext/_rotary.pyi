from typing_extensions import disjoint_base

from qkv_ext._arrays import Array

BUILD: str
MOST_AXES: int

@disjoint_base
class Rotary:
    def __init__(self, isa: int) -> None: ...
    def compute(
        self, x: Array, cos: Array, sin: Array, out: Array, interleaved: bool, threads: int
    ) -> None: ...
    def both(
        self,
        q: Array,
        k: Array,
        q_tables: tuple[Array, Array],
        k_tables: tuple[Array, Array],
        q_out: Array,
        k_out: Array,
        interleaved: bool,
        threads: int,
    ) -> None: ...
    def plain(
        self,
        x: object,
        cos: object,
        sin: object,
        positions: object,
        interleaved: bool,
        threads: int,
    ) -> Array | None: ...
