from qkv_ext._arrays import Array
from qkv_ext._check import Rows

BUILD: str
MOST_AXES: int

def softmax(problem: Rows, isa: int) -> None: ...
def plain(array: object, threads: int, isa: int) -> Array | None: ...
