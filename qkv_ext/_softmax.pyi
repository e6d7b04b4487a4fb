from qkv_ext._arrays import Array
from qkv_ext._problem import Rows

BUILD: str
MOST_AXES: int

def softmax(isa: int, problem: Rows) -> None: ...
def plain(isa: int, array: object, threads: int) -> Array | None: ...
