from typing_extensions import disjoint_base

from qkv_ext._core._arrays import Array
from qkv_ext._core._problem import Norm

BUILD: str
MOST_AXES: int

@disjoint_base
class Normalization:
    def __init__(self, isa: int) -> None: ...
    def compute(self, problem: Norm) -> None: ...
    def plain(
        self,
        x: object,
        weight: object,
        bias: object,
        eps: object,
        centered: bool,
        threads: int,
    ) -> Array | None: ...
