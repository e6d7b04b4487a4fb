from qkv_ext._arrays import Array
from qkv_ext._check import Problem

BUILD: str
NO_LIMIT: int

def attention(problem: Problem, isa: int) -> None: ...
def plain(
    q: object, k: object, v: object, causal: bool, threads: int, isa: int
) -> Array | None: ...
