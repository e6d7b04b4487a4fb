from typing_extensions import disjoint_base

from qkv_ext._core._arrays import Array
from qkv_ext._core._problem import Rows

BUILD: str
MOST_AXES: int

@disjoint_base
class Softmax:
    def __init__(self, isa: int) -> None: ...
    def compute(self, problem: Rows) -> None: ...
    def plain(self, array: object, threads: int) -> Array | None: ...
