from qkv_ext._arrays import Array
from qkv_ext._problem import Problem

BUILD: str
NO_LIMIT: int

def attention(isa: int, problem: Problem) -> None: ...
def plain(
    isa: int, q: object, k: object, v: object, causal: bool, threads: int
) -> Array | None: ...
