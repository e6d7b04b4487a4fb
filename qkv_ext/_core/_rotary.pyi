from typing_extensions import disjoint_base

from qkv_ext._core._arrays import Array
from qkv_ext._core._problem import Rotation

BUILD: str
MOST_AXES: int

@disjoint_base
class Rotary:
    def __init__(self, isa: int) -> None: ...
    def compute(self, problem: Rotation) -> None: ...
    def step(self, queries: Rotation, keys: Rotation) -> None: ...
    def plain(
        self,
        x: object,
        cos: object,
        sin: object,
        positions: object,
        interleaved: object,
        rotary_dim: object,
        layout: object,
        out: object,
        threads: int,
    ) -> Array | None: ...
