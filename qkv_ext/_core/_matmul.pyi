from typing_extensions import disjoint_base

from qkv_ext._core._arrays import Array
from qkv_ext._core._problem import Product as Problem

BUILD: str
MOST_AXES: int

@disjoint_base
class Product:
    def __init__(self, isa: int) -> None: ...
    def compute(self, problem: Problem) -> None: ...
    def plain(
        self,
        a: object,
        b: object,
        bias: object,
        columns: int,
        least: int,
        threads: int,
        activation: object = None,
        residual: object = None,
    ) -> Array | None: ...
