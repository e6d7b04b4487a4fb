"""mypy tells what each call returns from its return_* arguments, and takes what the checks take."""

import pytest
from conftest import ROOT

api = pytest.importorskip("mypy.api")

CALLS = {
    "qkv_ext.scaled_dot_product_attention": "x, x, x, key_offset=np.int64(1)",
    "qkv_ext.varlen_attention": "x, x, x, [0, 1], [0, 1]",
    "qkv_ext.self_attention": "x, x, x, x, x, num_heads=2, num_kv_heads=1, b_q=x, b_o=x",
    "qkv_ext.cross_attention": "x, x, x, x, x, x, num_heads=2, b_k=x, b_v=x",
    "cache.attend": "x, key_offset=np.int64(1), layout='blhd'",
    "layer": "x, rotary=(x, x), interleaved=True, rotary_dim=2",
}
RETURNS = {
    "": "A",
    "return_lse=False": "A",
    "return_lse=True": "tuple[A, A]",
    "return_lse=either": "A | tuple[A, ...]",
    "return_weights=True": "tuple[A, A]",
    "return_weights=True, return_lse=False": "tuple[A, A]",
    "return_weights=True, return_lse=True": "tuple[A, A, A]",
    "return_weights=either, return_lse=True": "A | tuple[A, ...]",
}
TAKEN = (
    "threads=1, align='top-left', causal=True, window=(1, None), scale=1, softcap=2.0",
    "causal=either, window=[1, np.int64(2)], scale=np.float32(1), softcap=np.float32(1)",
)
REFUSED = ("casual=True", "causal=1", "window=1", "return_lse=1", "align='left'")
HEAD = """\
from typing import Any, assert_type
import numpy as np
from numpy.typing import NDArray
import qkv_ext
A = NDArray[Any]
L = qkv_ext.MultiHeadAttention
def calls(x: A, layer: L, cache: qkv_ext.KVCache, either: np.bool_, some: bool) -> None:
    got: A | tuple[A, ...]  # whichever it is, of one that is not known
"""


def lines(call, arguments):
    for asked, returned in RETURNS.items():
        if "varlen" not in call or "weights" not in asked:
            yield f"assert_type({call}({arguments}, {asked}), {returned})"
    yield f"got = {call}({arguments}, return_lse=some)"
    yield from (f"assert_type({call}({arguments}, {taken}), A)" for taken in TAKEN)
    # an ignore that nothing needs is an error itself
    yield from (f"{call}({arguments}, {it})  # type: ignore[call-overload]" for it in REFUSED)


@pytest.mark.slow
def test_overloads(tmp_path, monkeypatch):
    snippet = tmp_path / "snippet.py"
    body = [f"    {line}\n" for call in CALLS.items() for line in lines(*call)]
    snippet.write_text(HEAD + "".join(body))
    if (ROOT / "pyproject.toml").exists():  # else it is installed, where mypy finds it
        monkeypatch.setenv("MYPYPATH", str(ROOT))
    cache = f"--cache-dir={tmp_path / 'cache'}"
    said, failed, code = api.run(["--strict", "--config-file=", cache, str(snippet)])
    assert code == 0, said + failed
