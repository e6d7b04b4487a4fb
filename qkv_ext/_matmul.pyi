from qkv_ext._arrays import Array
from qkv_ext._check import Product

BUILD: str
MOST_AXES: int

def product(problem: Product, isa: int) -> None: ...
def plain(
    a: object, b: object, bias: object, columns: int, least: int, threads: int, isa: int
) -> Array | None: ...
