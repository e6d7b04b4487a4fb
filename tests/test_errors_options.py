"""What is refused of the options of attention, and of packed batches; see test_errors.py.

B7 (microsoft/onnxruntime#28031, #29447): lengths and cumulative lengths are checked before any
pointer is made of them, in whatever integer dtype they come.
"""

import re

import numpy as np
import pytest

import qkv_ext
from qkv_ext import varlen_attention as varlen

sdpa = qkv_ext.scaled_dot_product_attention


def f32(*shape):
    return np.ones(shape, np.float32)


Q, K, V = f32(2, 4, 5, 8), f32(2, 2, 7, 8), f32(2, 2, 7, 3)
PAIR = "expected a pair (left, right) of integers or None for open"
SIDES = "expected no negative side: None is open"
CAP = "expected a positive finite number or None"
SLOPES = "expected (4,) or (2, 4)"
OFFSETS = f"expected {-(1 << 60)} to {1 << 60}"


def lengths(name, most):
    """Rows for q_lengths or kv_lengths of two items."""
    return [
        ({name: [-1, 2]}, ValueError, f"{name} holds -1; expected 0 to {most}"),
        ({name: [2, most + 1]}, ValueError, f"{name} holds {most + 1}; expected 0 to {most}"),
        ({name: np.array([2, 2**64 - 1], np.uint64)}, ValueError,
         f"{name} holds {2**64 - 1}; expected 0 to {most}"),
        ({name: np.array([-(2**63), 2])}, ValueError,
         f"{name} holds {-(2**63)}; expected 0 to {most}"),
        ({name: np.array([2, -1], np.int8)}, ValueError, f"{name} holds -1; expected 0 to {most}"),
        ({name: [2, 2, 2]}, ValueError, f"{name} has shape (3,); expected shape (2,)"),
        ({name: [2]}, ValueError, f"{name} has shape (1,); expected shape (2,)"),
        ({name: 2}, ValueError, f"{name} has shape (); expected shape (2,)"),
        ({name: [[2, 2]]}, ValueError, f"{name} has shape (1, 2); expected shape (2,)"),
        ({name: [2.0, 2.0]}, TypeError, f"{name} has dtype float64; expected integers"),
        ({name: f32(2)}, TypeError, f"{name} has dtype float32; expected integers"),
        ({name: [True, False]}, TypeError, f"{name} has dtype bool; expected integers"),
        ({name: True}, TypeError, f"{name} has dtype bool; expected integers"),
        ({name: [2, None]}, TypeError, f"{name} is [2, None]; expected integers"),
        ({name: np.ma.masked_array([2, 2])}, TypeError,
         f"{name} is a numpy.ma.MaskedArray; expected integers (2,)"),
        ({name: "22"}, TypeError, f"{name} has dtype <U2; expected integers"),
    ]  # fmt: skip


def segments(name, n):
    """Rows for q_segments or kv_segments of two items, beside right ones of the other."""
    right = {"q_segments": np.zeros((2, 5), int), "kv_segments": np.zeros((2, 7), int)}
    wrong = [
        (np.zeros((2, n + 1), int), ValueError, f"has shape (2, {n + 1}); expected (2, {n})"),
        (np.zeros((1, n), int), ValueError, f"has shape (1, {n}); expected (2, {n})"),
        (np.zeros(n, int), ValueError, f"has shape ({n},); expected (2, {n})"),
        (0, ValueError, f"has shape (); expected (2, {n})"),
        (f32(2, n), TypeError, "has dtype float32; expected integers"),
        (np.ones((2, n), bool), TypeError, "has dtype bool; expected integers"),
    ]
    return [(right | {name: x}, error, f"{name} {message}") for x, error, message in wrong]


def blocks(*shape, size=(2, 4)):
    return {"block_mask": qkv_ext.BlockMask(np.ones(shape, bool), size)}


OPTIONS = [
    *segments("q_segments", 5), *segments("kv_segments", 7),
    ({"q_segments": np.zeros((2, 5), int)}, ValueError,
     "q_segments is given without kv_segments; expected both"),
    ({"kv_segments": np.zeros((2, 7), int)}, ValueError,
     "kv_segments is given without q_segments, and L = 5 is not S = 7; expected both"),
    ({"block_mask": np.ones((3, 2), bool)}, TypeError,
     "block_mask is a numpy.ndarray; expected a qkv_ext.BlockMask"),
    (blocks(2, 2), ValueError,
     "block_mask has (2, 2) blocks of (2, 4); expected (3, 2) for L = 5 and S = 7"),
    (blocks(1, 1), ValueError,
     "block_mask has (1, 1) blocks of (2, 4); expected (3, 2) for L = 5 and S = 7"),
    (blocks(3, 3, 2), ValueError,
     "block_mask has leading axes (3,); expected some that broadcast to (2, 4)"),
    (blocks(1, 1, 1, 3, 2), ValueError,
     "block_mask has leading axes (1, 1, 1); expected some that broadcast to (2, 4)"),
    # B6: a pair, and nothing that other libraries mean by a window
    ({"window": 2}, ValueError, f"window is 2; {PAIR}"),
    ({"window": -1}, ValueError, f"window is -1; {PAIR}"),
    ({"window": (1,)}, ValueError, f"window is (1,); {PAIR}"),
    ({"window": (1, 2, 3)}, ValueError, f"window is (1, 2, 3); {PAIR}"),
    ({"window": "ab"}, ValueError, f"window is 'ab'; {PAIR}"),
    ({"window": (-1, 0)}, ValueError, f"window is (-1, 0); {SIDES}"),
    ({"window": (-1, -1)}, ValueError, f"window is (-1, -1); {SIDES}"),
    ({"window": [0, -2]}, ValueError, f"window is [0, -2]; {SIDES}"),
    ({"window": (1.0, 0)}, TypeError, "window is (1.0, 0); expected integers or None for open"),
    ({"window": (True, 0)}, TypeError, "window is (True, 0); expected integers or None for open"),
    ({"window": (None, "0")}, TypeError,
     "window is (None, '0'); expected integers or None for open"),
    # softcap
    ({"softcap": 0}, ValueError, f"softcap is 0; {CAP}"),
    ({"softcap": 0.0}, ValueError, f"softcap is 0.0; {CAP}"),
    ({"softcap": -1.5}, ValueError, f"softcap is -1.5; {CAP}"),
    ({"softcap": float("nan")}, ValueError, f"softcap is nan; {CAP}"),
    ({"softcap": float("inf")}, ValueError, f"softcap is inf; {CAP}"),
    ({"softcap": 1e39}, ValueError, f"softcap is 1e+39; {CAP}"),
    ({"softcap": 1e-50}, ValueError, f"softcap is 1e-50; {CAP}"),
    ({"softcap": 10**400}, ValueError, f"softcap is {10**400}; {CAP}"),
    ({"softcap": "2"}, TypeError, "softcap is '2'; expected a positive number or None"),
    ({"softcap": True}, TypeError, "softcap is True; expected a positive number or None"),
    ({"softcap": [2.0]}, TypeError, "softcap is [2.0]; expected a positive number or None"),
    # slopes and sinks
    ({"alibi_slopes": f32(3)}, ValueError, f"alibi_slopes has shape (3,); {SLOPES}"),
    ({"alibi_slopes": f32(2)}, ValueError, f"alibi_slopes has shape (2,); {SLOPES}"),
    ({"alibi_slopes": f32(3, 4)}, ValueError, f"alibi_slopes has shape (3, 4); {SLOPES}"),
    ({"alibi_slopes": f32(4, 2)}, ValueError, f"alibi_slopes has shape (4, 2); {SLOPES}"),
    ({"alibi_slopes": f32(1, 4)}, ValueError, f"alibi_slopes has shape (1, 4); {SLOPES}"),
    ({"alibi_slopes": 0.5}, ValueError, f"alibi_slopes has shape (); {SLOPES}"),
    ({"alibi_slopes": [1, 1, 1, 1]}, TypeError,
     "alibi_slopes has dtype int64; expected floating point"),
    ({"alibi_slopes": "a"}, TypeError, "alibi_slopes has dtype <U1; expected floating point"),
    ({"alibi_slopes": f32(4).astype("c8")}, TypeError,
     "alibi_slopes has dtype complex64; expected floating point"),
    ({"sinks": f32(3)}, ValueError, "sinks has shape (3,); expected (4,)"),
    ({"sinks": f32(2, 4)}, ValueError, "sinks has shape (2, 4); expected (4,)"),
    ({"sinks": 1.0}, ValueError, "sinks has shape (); expected (4,)"),
    ({"sinks": np.ones(4, int)}, TypeError, "sinks has dtype int64; expected floating point"),
    ({"sinks": np.ones(4, bool)}, TypeError, "sinks has dtype bool; expected floating point"),
    # lengths
    *lengths("q_lengths", 5),
    *lengths("kv_lengths", 7),
    # offsets
    ({"query_offset": 1.0}, TypeError, "query_offset has dtype float64; expected integers"),
    ({"query_offset": [1.0, 2]}, TypeError, "query_offset has dtype float64; expected integers"),
    ({"query_offset": "1"}, TypeError, "query_offset has dtype <U1; expected integers"),
    ({"query_offset": True}, TypeError, "query_offset has dtype bool; expected integers"),
    ({"query_offset": [1, 2, 3]}, ValueError,
     "query_offset has shape (3,); expected shape (2,)"),
    ({"query_offset": [[1, 2]]}, ValueError,
     "query_offset has shape (1, 2); expected shape (2,)"),
    ({"query_offset": 1 << 61}, ValueError, f"query_offset holds {1 << 61}; {OFFSETS}"),
    ({"query_offset": [0, -(1 << 61)]}, ValueError, f"query_offset holds {-(1 << 61)}; {OFFSETS}"),
    ({"key_offset": 1.0}, TypeError, "key_offset has dtype float64; expected integers"),
    ({"key_offset": 0.0}, TypeError, "key_offset has dtype float64; expected integers"),
    ({"key_offset": None}, TypeError, "key_offset is None; expected integers"),
    ({"key_offset": True}, TypeError, "key_offset has dtype bool; expected integers"),
    ({"key_offset": False}, TypeError, "key_offset has dtype bool; expected integers"),
    ({"key_offset": [1, 2]}, ValueError, "key_offset has shape (2,); expected an integer"),
    ({"key_offset": -(1 << 61)}, ValueError, f"key_offset holds {-(1 << 61)}; {OFFSETS}"),
]  # fmt: skip

LOW_RANKS = [  # shape of q, k and v; the option; the message
    ((5, 8), {"kv_lengths": [3]}, "kv_lengths has shape (1,); expected an integer"),
    ((5, 8), {"kv_lengths": 6}, "kv_lengths holds 6; expected 0 to 5"),
    ((5, 8), {"q_lengths": -1}, "q_lengths holds -1; expected 0 to 5"),
    ((5, 8), {"query_offset": [1]}, "query_offset has shape (1,); expected an integer"),
    ((5, 8), {"alibi_slopes": f32(5)}, "alibi_slopes has shape (5,); expected (1,) or (1, 1)"),
    ((5, 8), {"sinks": f32(2)}, "sinks has shape (2,); expected (1,)"),
    ((2, 5, 8), {"kv_lengths": [3]}, "kv_lengths has shape (1,); expected shape (2,)"),
    ((2, 5, 8), {"kv_lengths": 3}, "kv_lengths has shape (); expected shape (2,)"),
    ((2, 5, 8), {"q_lengths": [5, 6]}, "q_lengths holds 6; expected 0 to 5"),
    ((2, 5, 8), {"alibi_slopes": f32(2)}, "alibi_slopes has shape (2,); expected (1,) or (2, 1)"),
    ((2, 5, 8), {"sinks": f32(2)}, "sinks has shape (2,); expected (1,)"),
    ((2, 3, 4, 5, 8), {"kv_lengths": [1] * 6}, "kv_lengths has shape (6,); expected shape (2,)"),
    ((2, 3, 4, 5, 8), {"alibi_slopes": f32(6, 4)},
     "alibi_slopes has shape (6, 4); expected (4,) or (2, 4)"),
]  # fmt: skip

PACKED = f32(9, 4, 8), f32(7, 2, 8), f32(7, 2, 3), [0, 4, 9], [0, 7, 7]
AXES = "expected (Tq, H, D), (Tk, Hkv, D) and (Tk, Hkv, Dv)"
RUN_Q = "expected it to start at 0, never to fall, and to end at 9"
RUN_K = "expected it to start at 0, never to fall, and to end at 7"


def shaped(*shapes):
    return "q, k and v have shapes {}, {} and {}".format(*shapes)


VARLEN = [  # which arguments are others, by position; options; exception; message
    ({0: f32(1, 9, 4, 8)}, {}, ValueError,
     f"{shaped((1, 9, 4, 8), (7, 2, 8), (7, 2, 3))}; {AXES}"),
    ({0: Q, 1: K, 2: V}, {}, ValueError, f"{shaped(Q.shape, K.shape, V.shape)}; {AXES}"),
    ({0: f32(4, 8)}, {}, ValueError, "q has shape (4, 8); expected at least 3 axes"),
    ({1: f32(7, 2, 6)}, {}, ValueError,
     shaped((9, 4, 8), (7, 2, 6), (7, 2, 3)) + "; expected one D, got 8 and 6"),
    ({2: f32(6, 2, 3)}, {}, ValueError,
     shaped((9, 4, 8), (7, 2, 8), (6, 2, 3)) + "; expected one S, got 7 and 6"),
    ({1: f32(7, 1, 8)}, {}, ValueError,
     shaped((9, 4, 8), (7, 1, 8), (7, 2, 3)) + "; expected as many heads in k as in v"),
    ({0: f32(9, 3, 8)}, {}, ValueError,
     shaped((9, 3, 8), (7, 2, 8), (7, 2, 3)) + "; expected H = 3 to be a multiple of Hkv = 2"),
    ({1: f32(7, 2, 8).astype("f2")}, {}, TypeError,
     "q, k, v have different dtypes (q float32, k float16, v float32); expected one dtype, as "
     "k.astype(np.float32) gives"),
    ({0: np.ones((9, 4, 8), int)}, {}, TypeError,
     "q has dtype int64; expected float32, float64, float16 or bfloat16"),
    ({3: [0.0, 4.0, 9.0]}, {}, TypeError, "cu_seqlens_q has dtype float64; expected integers"),
    ({3: [False, True, True]}, {}, TypeError, "cu_seqlens_q has dtype bool; expected integers"),
    ({3: 9}, {}, ValueError, "cu_seqlens_q has shape (); expected (N + 1,)"),
    ({3: []}, {}, ValueError, "cu_seqlens_q has shape (0,); expected (N + 1,)"),
    ({3: [[0, 4, 9]]}, {}, ValueError, "cu_seqlens_q has shape (1, 3); expected (N + 1,)"),
    ({3: [1, 4, 9]}, {}, ValueError, f"cu_seqlens_q runs from 1 to 9; {RUN_Q}"),
    ({3: [0, 4, 8]}, {}, ValueError, f"cu_seqlens_q runs from 0 to 8; {RUN_Q}"),
    ({3: [0]}, {}, ValueError, f"cu_seqlens_q runs from 0 to 0; {RUN_Q}"),
    ({3: [0, 5, 4, 9]}, {}, ValueError, f"cu_seqlens_q runs from 0 to 9, and falls; {RUN_Q}"),
    ({3: np.array([0, 5, 4, 9], np.uint8)}, {}, ValueError,
     f"cu_seqlens_q runs from 0 to 9, and falls; {RUN_Q}"),
    ({3: [0, 4, 10]}, {}, ValueError, "cu_seqlens_q holds 10; expected 0 to 9"),
    ({3: [0, -1, 9]}, {}, ValueError, "cu_seqlens_q holds -1; expected 0 to 9"),
    ({4: [0, 4, 6]}, {}, ValueError, f"cu_seqlens_k runs from 0 to 6; {RUN_K}"),
    ({4: [0, 8, 7]}, {}, ValueError, "cu_seqlens_k holds 8; expected 0 to 7"),
    ({4: [0, 5, 3, 7]}, {}, ValueError, f"cu_seqlens_k runs from 0 to 7, and falls; {RUN_K}"),
    ({4: None}, {}, ValueError, "cu_seqlens_k has shape (); expected (N + 1,)"),
    ({4: [0, 7]}, {}, ValueError,
     "cu_seqlens_q has shape (3,) and cu_seqlens_k (2,); expected one shape"),
    ({}, {"kv_lengths": [8, 0]}, ValueError, "kv_lengths holds 8; expected 0 to 7"),
    ({}, {"kv_lengths": [3, 1]}, ValueError,
     "kv_lengths holds 1 for sequence 1; expected at most its span, 0"),
    ({}, {"kv_lengths": [-1, 0]}, ValueError, "kv_lengths holds -1; expected 0 to 7"),
    ({}, {"kv_lengths": [3]}, ValueError, "kv_lengths has shape (1,); expected shape (2,)"),
    ({}, {"kv_lengths": [1.0, 0]}, TypeError, "kv_lengths has dtype float64; expected integers"),
    ({}, {"alibi_slopes": f32(2)}, ValueError, f"alibi_slopes has shape (2,); {SLOPES}"),
    ({}, {"alibi_slopes": f32(1, 4)}, ValueError, f"alibi_slopes has shape (1, 4); {SLOPES}"),
    ({}, {"alibi_slopes": [1] * 4}, TypeError,
     "alibi_slopes has dtype int64; expected floating point"),
    ({}, {"sinks": f32(2, 4)}, ValueError, "sinks has shape (2, 4); expected (4,)"),
    ({}, {"window": 3}, ValueError, f"window is 3; {PAIR}"),
    ({}, {"softcap": 0}, ValueError, f"softcap is 0; {CAP}"),
    ({}, {"align": "top"}, ValueError, "align is 'top'; expected 'bottom-right' or 'top-left'"),
    ({}, {"causal": 1}, TypeError, "causal is 1; expected True or False"),
    ({}, {"return_lse": 1}, TypeError, "return_lse is 1; expected True or False"),
    ({}, {"scale": "1"}, TypeError, "scale is '1'; expected a real number or None"),
    ({}, {"threads": 0}, ValueError, "threads is 0; expected a positive integer or None"),
    ({}, {"out": f32(9, 4, 8)}, ValueError, "out has shape (9, 4, 8); expected (9, 4, 3)"),
    ({}, {"out": [1.0]}, TypeError, "out is a list; expected a numpy.ndarray"),
    ({}, {"out": np.ones((9, 4, 3))}, TypeError, "out has dtype float64; expected float32"),
]  # fmt: skip


def refused(exception, message, call, *given, **options):
    with pytest.raises(exception, match=f"^{re.escape(message)}$") as caught:
        call(*given, **options)
    assert type(caught.value) is exception


def of(row):
    return f"{row[-1][:80]}"


@pytest.mark.parametrize(("option", "exception", "message"), OPTIONS, ids=map(of, OPTIONS))
def test_refused_options(option, exception, message, backend):
    refused(exception, message, sdpa, Q, K, V, backend=backend, **option)


@pytest.mark.parametrize(("shape", "option", "message"), LOW_RANKS, ids=map(of, LOW_RANKS))
def test_refused_at_other_ranks(shape, option, message, backend):
    refused(ValueError, message, sdpa, *[f32(*shape)] * 3, backend=backend, **option)


@pytest.mark.parametrize(("others", "options", "exception", "message"), VARLEN, ids=map(of, VARLEN))
def test_refused_packed_batches(others, options, exception, message, backend):
    given = [others.get(n, x) for n, x in enumerate(PACKED)]
    refused(exception, message, varlen, *given, backend=backend, **options)


BEYOND = [("kv_lengths", [2, 2**70]), ("q_lengths", [-(10**30), 1]), ("query_offset", 10**30),
          ("key_offset", 2**64), ("kv_lengths", [[1], [1, 2]]), ("query_offset", [1, [2]]),
          ("sinks", [[1.0], 2.0]), ("alibi_slopes", [1.0, [2.0]])]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BEYOND, ids=[f"{n}={x}" for n, x in BEYOND])
def test_what_is_no_array_of_numbers(name, value, backend):
    """Integers beyond any dtype, and ragged lists: an error that names the argument."""
    with pytest.raises((TypeError, ValueError), match=f"^{name} "):
        sdpa(Q, K, V, backend=backend, **{name: value})


def test_nothing_is_written_where_a_call_is_refused(backend):
    out = np.full((2, 4, 5, 3), 7, np.float32)
    for option, *_ in OPTIONS:
        with pytest.raises((TypeError, ValueError)):
            sdpa(Q, K, V, out=out, backend=backend, **option)
    assert (out == 7).all()
    out = np.full((9, 4, 3), 7, np.float32)
    for others, options, *_ in VARLEN:
        given = [others.get(n, x) for n, x in enumerate(PACKED)]
        with pytest.raises((TypeError, ValueError)):
            varlen(*given, **({"out": out} | options), backend=backend)
    assert (out == 7).all()


def test_varlen_takes_no_option_of_dense_attention(backend):
    for name in ("mask", "q_lengths", "query_offset", "key_offset", "layout", "return_weights"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            varlen(*PACKED, backend=backend, **{name: None})


@pytest.mark.parametrize(("value", "exception"), [
    (0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError),
    ("4", TypeError), ([4], ValueError)])  # fmt: skip
def test_alibi_slopes_of_no_number_of_heads(value, exception):
    with pytest.raises(exception, match=r"^num_heads "):
        qkv_ext.alibi_slopes(value)
