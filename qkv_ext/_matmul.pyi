from qkv_ext._arrays import Array
from qkv_ext._problem import Product

BUILD: str
MOST_AXES: int

def product(isa: int, problem: Product) -> None: ...
def plain(
    isa: int, a: object, b: object, bias: object, columns: int, least: int, threads: int
) -> Array | None: ...
