"""Calls without options go to the compiled modules at once: what is checked in Python is not.

Nothing else would tell: the results are the same, and a call takes four times as long.
"""

import numpy as np
import pytest

import qkv_ext
from qkv_ext._core import _check

#: of no literal's own: what a caller has read from a file is another object of the same value
ALIGN, LAYOUT = "".join(["bottom", "-right"]), "".join(["bh", "ld"])
x = np.ones((1, 1, 4, 8), "f4")
w = np.ones((8, 8), "f4")


def attend(**options):
    return qkv_ext.scaled_dot_product_attention(x, x, x, **options)


CALLS = {
    "attention": lambda **o: attend(**o),
    "attention causal": lambda **o: attend(causal=True, **o),
    "attention not causal": lambda **o: attend(causal=False, **o),
    "attention align": lambda **o: attend(align="bottom-right", **o),
    "attention align of another string": lambda **o: attend(align=ALIGN, **o),
    "attention layout": lambda **o: attend(layout="bhld", **o),
    "attention layout of another string": lambda **o: attend(layout=LAYOUT, causal=True, **o),
    "attention defaults spelled out": lambda **o: attend(
        mask=None, scale=None, window=None, softcap=None, alibi_slopes=None, sinks=None,
        kv_lengths=None, q_lengths=None, query_offset=None, key_offset=0, return_weights=False,
        return_lse=False, out=None, **o,
    ),
    "matmul": lambda **o: qkv_ext.matmul(w, w, **o),
    "linear_projection": lambda **o: qkv_ext.linear_projection(x, w, **o),
    "linear_projection packed": lambda **o: qkv_ext.linear_projection(
        x, qkv_ext.pack_weight(w), **o
    ),
    "softmax": lambda **o: qkv_ext.softmax(x, **o),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_without_options_is_not_checked_in_python(call, compiled, monkeypatch):
    expected = call(backend=compiled)

    def refuse(*_arguments, **_options):
        raise AssertionError("it came to _check.py")

    for name in ("attention", "matmul", "linear", "softmax"):
        monkeypatch.setattr(_check, name, refuse)
    np.testing.assert_array_equal(call(backend=compiled), expected)
    np.testing.assert_array_equal(call(backend=compiled, threads=1), expected)
