"""Calls with few options go to the compiled modules at once: what is checked in Python is not.

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
KEEP = np.tri(4, dtype=bool)
BIAS = np.linspace(0, 1, 16, dtype="f4").reshape(1, 4, 4)


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
    "attention scale": lambda **o: attend(scale=0.5, **o),
    "attention mask": lambda **o: attend(mask=KEEP, causal=True, **o),
    "attention float mask": lambda **o: attend(mask=BIAS, scale=2.0, **o),
    "attention out": lambda **o: attend(out=np.empty_like(x), **o),
    "attention lse": lambda **o: attend(return_lse=True, mask=KEEP, **o)[1],
    "matmul": lambda **o: qkv_ext.matmul(w, w, **o),
    "linear_projection": lambda **o: qkv_ext.linear_projection(x, w, **o),
    "linear_projection packed": lambda **o: qkv_ext.linear_projection(
        x, qkv_ext.pack_weight(w), **o
    ),
    "linear_projection activation": lambda **o: qkv_ext.linear_projection(
        x, w, activation="gelu", residual=x, **o
    ),
    "softmax": lambda **o: qkv_ext.softmax(x, **o),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_simple_call_is_not_checked_in_python(call, compiled, monkeypatch):
    expected = call(backend=compiled)

    def refuse(*_arguments, **_options):
        raise AssertionError("it came to _check.py")

    for name in ("attention", "matmul", "linear", "softmax"):
        monkeypatch.setattr(_check, name, refuse)
    np.testing.assert_array_equal(call(backend=compiled), expected)
    np.testing.assert_array_equal(call(backend=compiled, threads=1), expected)


# ---- what such a call takes as it is, and what it leaves to the checks --------------------------


class Seen(np.ndarray):
    """An array that the checks have to look at."""


def checked(**options):
    """The same call by the general way: q is no plain array."""
    return qkv_ext.scaled_dot_product_attention(q.view(Seen), k, k, **options)


q = np.random.default_rng(1).standard_normal((2, 4, 5, 8), "f4")
k = np.random.default_rng(2).standard_normal((2, 2, 7, 8), "f4")
BASE = np.random.default_rng(3).standard_normal((2, 4, 10, 14), "f4")
BASE[BASE > 0.8] = -np.inf
MASKS = {
    "full": BASE[:, :, :5, :7].copy(),
    "a part of one": BASE[:, :, 2:7, 3:10],
    "rows backwards": BASE[:, :, 4::-1, :7],
    "steps along keys": BASE[:, :, :5, ::2],
    "keys broadcast": BASE[:, :, :5, :1],
    "rows broadcast": BASE[:, :, :1, :7],
    "heads broadcast": BASE[:, :1, :5, :7],
    "items broadcast": BASE[:1, :, :5, :7],
    "rank 3": BASE[0, :, :5, :7],
    "rank 2": BASE[0, 0, :5, :7],
    "rank 1": BASE[0, 0, 0, :7],
    "rank 0": np.array(-np.inf, "f4"),
    "stride 0": np.broadcast_to(BASE[:, :, :1, :7], (2, 4, 5, 7)),
    "stride 0 along keys": np.broadcast_to(BASE[:, :, :5, :1], (2, 4, 5, 7)),
    "other bytes": BASE[:, :, :5, :7].astype(">f4"),
    "float64": BASE[:, :, :5, :7].astype("f8"),
    "unaligned": np.frombuffer(b"x" + BASE[0, 0, :5, :7].tobytes(), "f4", 35, 1).reshape(5, 7),
    "read-only": np.frombuffer(BASE[0, 0, :5, :7].tobytes(), "f4").reshape(5, 7),
}


@pytest.mark.parametrize("boolean", [False, True], ids=["float", "bool"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_have_the_bits_of_the_general_way(mask, boolean, compiled):
    options = {"mask": mask > 0 if boolean else mask, "backend": compiled, "return_lse": True}
    for one, other in zip(
        qkv_ext.scaled_dot_product_attention(q, k, k, causal=True, **options),
        checked(causal=True, **options),
        strict=True,
    ):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("shape", [(5, 8), (3, 7), (2, 2, 5, 7), (2, 4, 7, 5), (1, 2, 4, 5, 7)])
def test_masks_that_do_not_fit(shape, compiled):
    with pytest.raises(ValueError, match=r"^mask has shape .*; expected one that broadcasts"):
        qkv_ext.scaled_dot_product_attention(q, k, k, mask=np.ones(shape, bool), backend=compiled)


def outs():
    """By name, an out of the shape of q, which may lie in q itself."""
    wide = np.empty((2, 4, 5, 16), "f4")
    own = q.copy()
    memory = np.empty(2 * q.size, "f4")
    memory[: q.size] = q.ravel()
    return {
        "plain": (q, np.empty_like(q)),
        "rows apart": (q, wide[..., :8]),
        "strided": (q, wide[..., ::2]),
        "backwards": (q, np.empty_like(q)[::-1]),
        "q": (own, own),
        "overlaps q": (memory[: q.size].reshape(q.shape), memory[8 : q.size + 8].reshape(q.shape)),
        "behind q": (memory[: q.size].reshape(q.shape), memory[q.size :].reshape(q.shape)),
    }


@pytest.mark.parametrize("name", outs())
def test_outs_have_the_bits_of_the_general_way(name, compiled):
    expected = qkv_ext.scaled_dot_product_attention(q, k, k, backend=compiled)
    queries, out = outs()[name]
    found = qkv_ext.scaled_dot_product_attention(queries, k, k, out=out, backend=compiled)
    assert found is out
    assert out.tobytes() == expected.tobytes()


def test_outs_that_are_refused(compiled):
    read_only = np.empty_like(q)
    read_only.flags.writeable = False
    for out, error in (
        (read_only, "out is read-only"),
        (np.empty((2, 4, 5, 7), "f4"), "out has shape"),
        (np.empty(q.size, "f4"), "out has shape"),
        (np.broadcast_to(np.empty(8, "f4"), q.shape), "out is read-only|out has elements"),
    ):
        with pytest.raises(ValueError, match=error):
            qkv_ext.scaled_dot_product_attention(q, k, k, out=out, backend=compiled)
