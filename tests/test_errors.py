"""What is refused, with the exception and the exact message, the same in every backend.

A new rejection is a line of one of these tables.  A row is a call with the keywords that every call
takes (here the backend), the exception, and its whole message.
"""

import re

import numpy as np
import pytest

import qkv_ext
from qkv_ext import KVCache, MultiHeadAttention, linear_projection, matmul, pack_weight, softmax
from qkv_ext._core._options import PROJECTION

sdpa = qkv_ext.scaled_dot_product_attention


def f32(*shape):
    return np.ones(shape, np.float32)


def f64(*shape):
    return np.ones(shape, np.float64)


def read_only(x):
    x.flags.writeable = False
    return x


Q, K, V = f32(2, 4, 5, 8), f32(2, 2, 7, 8), f32(2, 2, 7, 3)
OUT = (2, 4, 5, 3)
SHAPES = "q, k and v have shapes (2, 4, 5, 8), (2, 2, 7, 8) and (2, 2, 7, 3)"
TO = "expected one that broadcasts to (2, 4, 5, 7)"
BOOL = "expected bool or floating point: "
INTS = BOOL + "mask.astype(bool), True keeps a key"
W = f32(8, 8)
MHA = MultiHeadAttention(W, W, W, W, num_heads=2)
COS_SIN = qkv_ext.rotary_tables(6, 4)
KV = MHA.project_kv(f32(6, 8))
NO_SEQUENCE = (
    "is a ProjectedKV; expected a sequence (..., n, d_in): projected keys and values are passed to "
    "a layer as kv="
)
FINITE = "expected a finite float32 number or None"


def transposed(*names):
    """The hint for weights as torch keeps them."""
    return f"; {', '.join(names)} would fit: torch keeps weights as (out, in)"


def cast(*names, to="float32"):
    return f"expected one dtype, as {', '.join(f'{n}.astype(np.{to})' for n in names)} gives"


def shaped(q, k, v):
    return f"q, k and v have shapes {q}, {k} and {v}"


ATTENTION = [
    # dtypes
    (lambda o: sdpa(f32(3, 8).astype("f2"), K, V, **o), TypeError,
     "q, k, v have different dtypes (q float16, k float32, v float32); " + cast("q")),
    (lambda o: sdpa(Q, K.astype(int), V, **o), TypeError,
     "k has dtype int64; expected float32, float64, float16 or bfloat16"),
    (lambda o: sdpa(Q, K, V.astype(bool), **o), TypeError,
     "v has dtype bool; expected float32, float64, float16 or bfloat16"),
    (lambda o: sdpa(Q, K, V.astype(">i4"), **o), TypeError,
     "v has dtype >i4; expected float32, float64, float16 or bfloat16"),
    (lambda o: sdpa(Q.astype("c8"), K, V, **o), TypeError,
     "q has dtype complex64; expected float32, float64, float16 or bfloat16"),
    (lambda o: sdpa([["a"]], K, V, **o), TypeError,
     "q has dtype <U1; expected float32, float64, float16 or bfloat16"),
    (lambda o: sdpa(None, K, V, **o), TypeError,
     "q is None; expected an array"),
    (lambda o: sdpa(Q, f64(2, 2, 7, 8), V, **o), TypeError,
     "q, k, v have different dtypes (q float32, k float64, v float32); " + cast("k")),
    (lambda o: sdpa(Q, K, V.astype(">f8"), **o), TypeError,
     "q, k, v have different dtypes (q float32, k float32, v float64); " + cast("v")),
    (lambda o: sdpa(np.ma.masked_array(Q), K, V, **o), TypeError,
     "q is a numpy.ma.MaskedArray; expected a plain array and mask="),
    # shapes
    (lambda o: sdpa(f32(8), K, V, **o), ValueError,
     "q has shape (8,); expected at least 2 axes"),
    (lambda o: sdpa(np.float32(1), K, V, **o), ValueError,
     "q has shape (); expected at least 2 axes"),
    # NumPy broadcasts 32 axes at most, whatever arrays have: it was its RuntimeError that came out
    (lambda o: sdpa(Q, f32(*(1,) * 38, 7, 8), V, **o), ValueError,
     "k has 40 axes; expected at most 30"),
    (lambda o: sdpa(f32(5, 8), K, V, **o), ValueError,
     shaped((5, 8), K.shape, V.shape) + "; expected equal ranks"),
    (lambda o: sdpa(Q, K, V[0], **o), ValueError,
     shaped(Q.shape, K.shape, V.shape[1:]) + "; expected equal ranks"),
    (lambda o: sdpa(Q, K[..., :6], V, **o), ValueError,
     shaped(Q.shape, (2, 2, 7, 6), V.shape) + "; expected one D, got 8 and 6"),
    (lambda o: sdpa(Q, K[..., :6, :], V, **o), ValueError,
     shaped(Q.shape, (2, 2, 6, 8), V.shape) + "; expected one S, got 6 and 7"),
    (lambda o: sdpa(Q, K, V[:, :1], **o), ValueError,
     shaped(Q.shape, K.shape, (2, 1, 7, 3)) + "; expected as many heads in k as in v"),
    (lambda o: sdpa(f32(2, 6, 5, 8), f32(2, 4, 7, 8), f32(2, 4, 7, 8), **o), ValueError,  # C1
     shaped((2, 6, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))
     + "; expected H = 6 to be a multiple of Hkv = 4"),
    (lambda o: sdpa(Q[:, :1], K, V, **o), ValueError,
     shaped((2, 1, 5, 8), K.shape, V.shape) + "; expected H = 1 to be a multiple of Hkv = 2"),
    (lambda o: sdpa(Q, K[:, :0], V[:, :0], **o), ValueError,
     shaped(Q.shape, (2, 0, 7, 8), (2, 0, 7, 3)) + "; expected H = 4 to be a multiple of Hkv = 0"),
    (lambda o: sdpa(f32(3, 4, 5, 8), K, V, **o), ValueError,
     shaped((3, 4, 5, 8), K.shape, V.shape) + "; their leading axes do not broadcast"),
    (lambda o: sdpa(f32(4, 5, 8), f32(2, 7, 8), f32(2, 7, 8), **o), ValueError,
     shaped((4, 5, 8), (2, 7, 8), (2, 7, 8)) + "; their leading axes do not broadcast"),
    (lambda o: sdpa(f32(2, 3, 4, 5, 8), f32(2, 2, 4, 5, 8), f32(2, 2, 4, 5, 8), **o), ValueError,
     shaped((2, 3, 4, 5, 8), (2, 2, 4, 5, 8), (2, 2, 4, 5, 8))
     + "; their leading axes do not broadcast"),
    (lambda o: sdpa(Q[..., :0], K[..., :0], V, **o), ValueError,  # C12
     "scale is None, but D is 0 and 1/√0 is no number; give a scale"),
    # options
    (lambda o: sdpa(Q, K, V, scale="1", **o), TypeError,
     "scale is '1'; expected a real number or None"),
    (lambda o: sdpa(Q, K, V, scale=True, **o), TypeError,
     "scale is True; expected a real number or None"),
    (lambda o: sdpa(Q, K, V, scale=1j, **o), TypeError,
     "scale is 1j; expected a real number or None"),
    (lambda o: sdpa(Q, K, V, scale=[1.0], **o), TypeError,
     "scale is [1.0]; expected a real number or None"),
    (lambda o: sdpa(Q, K, V, scale=float("nan"), **o), ValueError, f"scale is nan; {FINITE}"),
    (lambda o: sdpa(Q, K, V, scale=float("-inf"), **o), ValueError, f"scale is -inf; {FINITE}"),
    (lambda o: sdpa(Q, K, V, scale=1e39, **o), ValueError, f"scale is 1e+39; {FINITE}"),
    (lambda o: sdpa(Q, K, V, scale=10**400, **o), ValueError, f"scale is {10**400}; {FINITE}"),
    (lambda o: sdpa(Q, K, V, causal=1, **o), TypeError,
     "causal is 1; expected True or False"),
    (lambda o: sdpa(Q, K, V, causal=None, **o), TypeError,
     "causal is None; expected True or False"),
    (lambda o: sdpa(Q, K, V, return_weights="yes", **o), TypeError,
     "return_weights is 'yes'; expected True or False"),
    (lambda o: sdpa(Q, K, V, return_lse=0, **o), TypeError,
     "return_lse is 0; expected True or False"),
    (lambda o: sdpa(Q, K, V, align="top", **o), ValueError,
     "align is 'top'; expected 'bottom-right' or 'top-left'"),
    (lambda o: sdpa(Q, K, V, align=None, **o), TypeError,
     "align is None; expected 'bottom-right' or 'top-left'"),
    (lambda o: sdpa(Q, K, V, layout="BHLD", **o), ValueError,
     "layout is 'BHLD'; expected 'bhld' or 'blhd'"),
    (lambda o: sdpa(f32(3, 5, 8), f32(3, 5, 8), f32(3, 5, 8), layout="blhd", **o), ValueError,
     "layout is 'blhd', but " + shaped(*[(3, 5, 8)] * 3) + "; expected rank 4 or more"),
    (lambda o: sdpa(Q, K, V, threads=0, **o), ValueError,
     "threads is 0; expected a positive integer or None"),
    (lambda o: sdpa(Q, K, V, threads=-2, **o), ValueError,
     "threads is -2; expected a positive integer or None"),
    (lambda o: sdpa(Q, K, V, threads=2.0, **o), TypeError,
     "threads is 2.0; expected a positive integer or None"),
    (lambda o: sdpa(Q, K, V, threads=True, **o), TypeError,
     "threads is True; expected a positive integer or None"),
    # masks
    (lambda o: sdpa(Q, K, V, mask=np.ones((5, 7), np.uint8), **o), TypeError,  # A5
     f"mask has dtype uint8; {INTS}"),
    (lambda o: sdpa(Q, K, V, mask=[[0, 1]], **o), TypeError, f"mask has dtype int64; {INTS}"),
    (lambda o: sdpa(Q, K, V, mask="causal", **o), TypeError,
     f"mask has dtype <U6; {BOOL}bool or a float dtype"),
    (lambda o: sdpa(Q, K, V, mask=f32(5, 7).astype("c8"), **o), TypeError,
     f"mask has dtype complex64; {BOOL}bool or a float dtype"),
    (lambda o: sdpa(Q, K, V, mask=f32(5, 6), **o), ValueError, f"mask has shape (5, 6); {TO}"),
    (lambda o: sdpa(Q, K, V, mask=f32(7, 5), **o), ValueError, f"mask has shape (7, 5); {TO}"),
    (lambda o: sdpa(Q, K, V, mask=f32(2, 1, 7), **o), ValueError,
     f"mask has shape (2, 1, 7); {TO}"),
    (lambda o: sdpa(Q, K, V, mask=f32(1, 2, 4, 5, 7), **o), ValueError,
     f"mask has shape (1, 2, 4, 5, 7); {TO}"),
    (lambda o: sdpa(Q, K, V, mask=f32(5, 0), **o), ValueError, f"mask has shape (5, 0); {TO}"),
    (lambda o: sdpa(f32(2, 5, 8), f32(2, 7, 8), f32(2, 7, 8), mask=f32(2, 1, 5, 7), **o),
     ValueError,
     "mask has shape (2, 1, 5, 7); expected one that broadcasts to (2, 5, 7)"),
    (lambda o: sdpa(f32(5, 8), f32(7, 8), f32(7, 8), mask=f32(1, 5, 7), **o), ValueError,
     "mask has shape (1, 5, 7); expected one that broadcasts to (5, 7)"),
    # out
    (lambda o: sdpa(Q, K, V, out=f32(2, 4, 5, 8), **o), ValueError,
     f"out has shape (2, 4, 5, 8); expected {OUT}"),
    (lambda o: sdpa(Q, K, V, out=f32(5, 3), **o), ValueError,
     f"out has shape (5, 3); expected {OUT}"),
    (lambda o: sdpa(Q, K, V, out=f64(*OUT), **o), TypeError,
     "out has dtype float64; expected float32"),
    (lambda o: sdpa(Q, K, V, out=f32(*OUT).tolist(), **o), TypeError,
     "out is a list; expected a numpy.ndarray"),
    (lambda o: sdpa(Q, K, V, out=read_only(f32(*OUT)), **o), ValueError,  # C9
     "out is read-only; expected a writeable array"),
    (lambda o: sdpa(Q, K, V, out=np.lib.stride_tricks.as_strided(f32(200), OUT, (80, 20, 4, 4)),
                    **o), ValueError,
     "out has elements that overlap each other; expected separate elements"),
    (lambda o: sdpa(Q, K, V, out=np.lib.stride_tricks.as_strided(f32(200), OUT, (0, 60, 12, 4)),
                    **o), ValueError,
     "out has elements that overlap each other; expected separate elements"),
]  # fmt: skip

PRIMITIVES = [
    (lambda o: matmul(f32(2, 3), f32(4, 5), **o), ValueError,
     "a and b have shapes (2, 3) and (4, 5); expected a (..., M, K) and b (..., K, N) with one K"),
    (lambda o: matmul(f32(2, 2, 3), f32(3, 3, 5), **o), ValueError,
     "a and b have shapes (2, 2, 3) and (3, 3, 5); their leading axes do not broadcast"),
    (lambda o: matmul(f32(3), f32(3, 5), **o), ValueError,
     "a has shape (3,); expected at least 2 axes"),
    (lambda o: matmul(f32(2, 3), f64(3, 5), **o), TypeError,
     "a, b have different dtypes (a float32, b float64); " + cast("b")),
    (lambda o: matmul(f32(2, 3), np.ones((3, 5), int), **o), TypeError,
     "b has dtype int64; expected float32, float64, float16 or bfloat16"),
    (lambda o: matmul(f32(2, 3), f32(3, 5), out=f32(5, 2), **o), ValueError,
     "out has shape (5, 2); expected (2, 5)"),
    (lambda o: matmul(f32(2, 3), f32(3, 5), threads="2", **o), TypeError,
     "threads is '2'; expected a positive integer or None"),
    (lambda o: linear_projection(f32(4, 7), W, **o), ValueError,
     "x has shape (4, 7); expected (..., d_in) with d_in = 8 as w has"),
    (lambda o: linear_projection(f32(4, 7), pack_weight(W), **o), ValueError,
     "x has shape (4, 7); expected (..., d_in) with d_in = 8 as w has"),
    (lambda o: linear_projection(f32(4, 7), f32(8, 7), **o), ValueError,
     "x has shape (4, 7); expected (..., d_in) with d_in = 8 as w has" + transposed("w.T")),
    (lambda o: linear_projection(f32(7), pack_weight(f32(8, 7)), f32(8), **o), ValueError,
     "x has shape (7,); expected (..., d_in) with d_in = 8 as w has"
     + transposed("pack_weight(w.T)")),
    (lambda o: matmul(f32(2, 3, 7), f32(8, 7), **o), ValueError,
     "a and b have shapes (2, 3, 7) and (8, 7); expected a (..., M, K) and b (..., K, N) with one K"
     + transposed("b.T")),
    (lambda o: linear_projection(np.float32(1), W, **o), ValueError,
     "x has shape (); expected at least 1 axis"),
    (lambda o: linear_projection(f32(4, 8), f32(1, 8, 8), **o), ValueError,
     "w has shape (1, 8, 8); expected (d_in, d_out)"),
    (lambda o: linear_projection(f32(4, 8), f32(8), **o), ValueError,
     "w has shape (8,); expected at least 2 axes"),
    (lambda o: linear_projection(f32(4, 8), W, f32(7), **o), ValueError,
     "b has shape (7,); expected (8,), the d_out of w"),
    (lambda o: linear_projection(f32(4, 8), W, f32(1, 8), **o), ValueError,
     "b has shape (1, 8); expected (8,), the d_out of w"),
    (lambda o: linear_projection(f32(4, 8), W, f64(8), **o), TypeError,
     "x, b have different dtypes (x float32, b float64); " + cast("b")),
    (lambda o: linear_projection(f32(4, 8), W, activation="tanh", **o), ValueError,
     "activation is 'tanh'; expected 'relu' or 'gelu' or 'gelu_tanh' or 'silu'"),
    (lambda o: linear_projection(f32(4, 8), W, activation=np.tanh, **o), TypeError,
     "activation is <ufunc 'tanh'>; expected 'relu' or 'gelu' or 'gelu_tanh' or 'silu'"),
    (lambda o: linear_projection(f32(4, 8), W, activation=True, **o), TypeError,
     "activation is True; expected 'relu' or 'gelu' or 'gelu_tanh' or 'silu'"),
    (lambda o: linear_projection(f32(4, 8), W, residual=f32(8), **o), ValueError,
     "residual has shape (8,); expected (4, 8), that of the output"),
    (lambda o: linear_projection(f32(4, 8), pack_weight(W), residual=f32(1, 8), **o), ValueError,
     "residual has shape (1, 8); expected (4, 8), that of the output"),
    (lambda o: linear_projection(f32(8), f32(8, 5), residual=f32(8), **o), ValueError,
     "residual has shape (8,); expected (5,), that of the output"),
    (lambda o: linear_projection(f32(4, 8), W, residual=np.float32(1), **o), ValueError,
     "residual has shape (); expected at least 1 axis"),
    (lambda o: linear_projection(f32(4, 8), W, residual=f64(4, 8), **o), TypeError,
     "x, residual have different dtypes (x float32, residual float64); " + cast("residual")),
    (lambda o: linear_projection(f32(4, 8), pack_weight(f64(8, 8)), **o), TypeError,
     "x, w have different dtypes (x float32, w float64); " + cast("x", to="float64")),
    (lambda o: linear_projection(f32(4, 8), W, out=read_only(f32(4, 8)), **o), ValueError,
     "out is read-only; expected a writeable array"),
    (lambda o: pack_weight(f32(2, 8, 8)), ValueError,
     "w has shape (2, 8, 8); expected (d_in, d_out)"),
    (lambda o: pack_weight(np.ones((8, 8), np.int8)), TypeError,
     "w has dtype int8; expected float32, float64, float16 or bfloat16"),
    (lambda o: softmax(np.float32(1), **o), ValueError, "x has shape (); expected at least 1 axis"),
    (lambda o: softmax(np.arange(3), **o), TypeError,
     "x has dtype int64; expected float32, float64, float16 or bfloat16"),
    (lambda o: softmax(f32(2, 3), 2, **o), ValueError,
     "axis is 2; expected one of the 2 axes of x (2, 3)"),
    (lambda o: softmax(f32(2, 3), -3, **o), ValueError,
     "axis is -3; expected one of the 2 axes of x (2, 3)"),
    (lambda o: softmax(f32(2, 3), (0, 1), **o), TypeError, "axis is (0, 1); expected an integer"),
    (lambda o: softmax(f32(2, 3), None, **o), TypeError, "axis is None; expected an integer"),
    (lambda o: softmax(f32(2, 3), True, **o), TypeError, "axis is True; expected an integer"),
    (lambda o: softmax(f32(2, 3), out=f32(3, 2), **o), ValueError,
     "out has shape (3, 2); expected (2, 3)"),
    (lambda o: softmax(f32(2, 3), out=np.broadcast_to(f32(3), (2, 3)), **o), ValueError,
     "out is read-only; expected a writeable array"),
]  # fmt: skip


def layer(*w, num_heads=2, **options):
    return MultiHeadAttention(*w, num_heads=num_heads, **options)


LAYERS = [
    (lambda o: layer(W, W, W, num_heads=0), ValueError,
     "num_heads is 0; expected a positive integer"),
    (lambda o: layer(W, W, W, num_heads=2.0), TypeError,
     "num_heads is 2.0; expected a positive integer"),
    (lambda o: layer(W, W, W, num_kv_heads=-1), ValueError,
     "num_kv_heads is -1; expected a positive integer"),
    (lambda o: layer(W, W, W, num_heads=6, num_kv_heads=4), ValueError,
     "num_heads is 6, no multiple of num_kv_heads, 4"),
    (lambda o: layer(W, None, W), TypeError, "w_k is None; expected a weight (d_in, d_out)"),
    (lambda o: layer(f32(8, 9), W, W), ValueError,
     "w_q has shape (8, 9); expected columns that are a multiple of num_heads, 2"),
    (lambda o: layer(W, W, f32(8, 9)), ValueError,
     "w_v has shape (8, 9); expected columns that are a multiple of num_kv_heads, 2"),
    (lambda o: layer(W, f32(8, 6), W), ValueError,
     "w_q has 4 columns for each of 2 heads and w_k 3 for each of 2; expected one D"),
    (lambda o: qkv_ext.self_attention(f32(5, 8), W, W, f32(7, 8), num_heads=2, **o),
     ValueError,
     "w_k has shape (8, 8) and w_v (7, 8); expected one d_in"),
    (lambda o: layer(W, W, W, f32(9, 8)), ValueError,
     "w_o has shape (9, 8); expected (8, d_out), H·Dv rows" + transposed("w_o.T")),
    (lambda o: layer(W, f32(4, 8), f32(4, 8), W, num_heads=4, num_kv_heads=2), ValueError,
     "w_q has 2 columns for each of 4 heads and w_k 4 for each of 2; expected one D"
     + transposed("w_k.T", "w_v.T")),
    (lambda o: layer(f32(16, 8), f32(4, 8), f32(4, 8), f32(8, 16), num_heads=4, num_kv_heads=1),
     ValueError, "w_q has 2 columns for each of 4 heads and w_k 8 for each of 1; expected one D"
     + transposed("w_q.T", "w_k.T", "w_v.T", "w_o.T")),
    (lambda o: layer(W, f32(8, 5), f32(8, 5)), ValueError,  # a context of 5
     "w_k has shape (8, 5); expected columns that are a multiple of num_kv_heads, 2"
     + transposed("w_k.T", "w_v.T")),
    (lambda o: qkv_ext.self_attention(f32(5, 8), W, W, pack_weight(f32(6, 8)), num_heads=2, **o),
     ValueError,
     "w_k has shape (8, 8) and w_v (6, 8); expected one d_in" + transposed("pack_weight(w_v.T)")),
    (lambda o: layer(f32(12, 8), f32(12, 8), f32(12, 8), b_k=f32(12)), ValueError,
     "b_k has shape (12,); expected (8,)" + transposed("w_q.T", "w_k.T", "w_v.T")),
    (lambda o: layer(W, W, W, b_o=f32(8)), ValueError,
     "b_o is given without w_o; expected both or none"),
    (lambda o: layer(W, W, W, b_k=f32(7)), ValueError, "b_k has shape (7,); expected (8,)"),
    (lambda o: layer(W, W, f64(8, 8)), TypeError,
     "w_q, w_k, w_v have different dtypes (w_q float32, w_k float32, w_v float64); "
     + cast("w_v")),
    (lambda o: layer(W, W, W, q_norm=f32(5)), ValueError,
     "q_norm has shape (5,); expected (4,), D, or (8,), that of all heads"),
    (lambda o: layer(W, W, W, k_norm=f32(1, 4)), ValueError,
     "k_norm has shape (1, 4); expected (4,), D, or (8,), that of all heads"),
    (lambda o: layer(W, W, W, num_heads=1, q_norm=f32(9)), ValueError,
     "q_norm has shape (9,); expected (8,), D"),
    (lambda o: layer(W, W, W, k_norm=f64(4)), TypeError,
     "w_q, w_k, w_v, k_norm have different dtypes (w_q float32, w_k float32, w_v float32, k_norm "
     "float64); " + cast("k_norm")),
    (lambda o: layer(W, W, W, norm_eps=-1e-6), ValueError,
     "norm_eps is -1e-06; expected a finite number of at least 0"),
    (lambda o: layer(W, W, W, norm_eps=np.inf), ValueError,
     "norm_eps is inf; expected a finite number of at least 0"),
    (lambda o: layer(W, W, W, norm_eps="0"), TypeError,
     "norm_eps is '0'; expected a finite number of at least 0"),
    (lambda o: layer(W, W, W, scale=np.nan), ValueError,
     "scale is nan; expected a finite float32 number or None"),
    (lambda o: layer(W, W, W, sinks=f32(3)), ValueError, "sinks has shape (3,); expected (2,)"),
    (lambda o: layer(W, W, f32(7, 8))(f32(5, 8), **o), ValueError,
     "x has shape (5, 8); expected (..., 7), the d_in of w_v" + transposed("w_v.T")),
    (lambda o: layer(W, W, f32(7, 8))(f32(5, 8), f32(6, 8), **o), ValueError,
     "context has shape (6, 8); expected (..., 7), the d_in of w_v" + transposed("w_v.T")),
    (lambda o: MHA(f32(5, 8), f32(6, 8), value_context=f32(5, 8), **o), ValueError,
     "value_context has shape (5, 8); expected (6,) before the last axis, as context has"),
    (lambda o: MHA(f32(5, 8), value_context=f32(5, 9), **o), ValueError,
     "value_context has shape (5, 9); expected (..., 8), the d_in of w_v"),
    (lambda o: MHA.project_kv(f32(2, 5, 8), value_context=f32(1, 5, 8), **o), ValueError,
     "value_context has shape (1, 5, 8); expected (2, 5) before the last axis, as context has"),
    (lambda o: MHA(f32(5, 8), kv=MHA.project_kv(f32(5, 8)), value_context=f32(5, 8), **o),
     ValueError, "value_context and kv are both given; expected one of them"),
    (lambda o: qkv_ext.cross_attention(f32(5, 8), f32(6, 8), W, W, W, x_enc_v=f32(7, 8), **o),
     ValueError, "x_enc_v has shape (7, 8); expected (6,) before the last axis, as x_enc has"),
    (lambda o: MHA(f32(2, 5, 8), cu_seqlens=[0, 5], **o), ValueError,
     "cu_seqlens is given, but x has 3 axes; expected (T, d_in)"),
    (lambda o: MHA(f32(5, 8), cu_seqlens=[0, 4], **o), ValueError,
     "cu_seqlens runs from 0 to 4; expected it to start at 0, never to fall, and to end at 5"),
    (lambda o: MHA(f32(5, 8), cu_seqlens_context=[0, 5], **o), ValueError,
     "cu_seqlens_context is given without cu_seqlens; expected both"),
    (lambda o: MHA(f32(5, 8), cu_seqlens=[0, 5], cu_seqlens_context=[0, 5], **o), ValueError,
     "cu_seqlens_context is given, but there is no context; expected it with a context or kv"),
    (lambda o: MHA(f32(5, 8), f32(6, 8), cu_seqlens=[0, 5], **o), ValueError,
     "cu_seqlens_context is None; expected the cumulative lengths of the context, or of kv"),
    (lambda o: MHA(f32(5, 8), f32(6, 8), cu_seqlens=[0, 5], cu_seqlens_context=[0, 1, 6], **o),
     ValueError, "cu_seqlens has shape (2,) and cu_seqlens_context (3,); expected one shape"),
    *[(lambda o, name=name, value=value: MHA(f32(5, 8), cu_seqlens=[0, 5], **{name: value}, **o),
       ValueError, f"{name} and cu_seqlens are both given; expected one of them")
      for name, value in (("mask", np.ones(5, bool)), ("q_lengths", [5]), ("query_offset", 1),
                          ("key_offset", 1), ("return_weights", True))],
    (lambda o: MHA(f32(5, 8), cu_seqlens=[0, 5], cache=KVCache(1, 2, 4), **o), ValueError,
     "cu_seqlens and cache are both given; expected one of them"),
    (lambda o: MHA(f32(5, 8), positions=[0] * 5, **o), ValueError,
     "positions is given without rotary; expected rotary=(cos, sin) too"),
    (lambda o: MHA(f32(5, 8), rotary_sections=[1, 1], **o), ValueError,
     "rotary_sections is given without rotary; expected rotary=(cos, sin) too"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, rotary_sections=[1, 1], **o), ValueError,
     "rotary_sections is given without positions; expected both"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, positions=[0] * 5, rotary_sections=[1, 2], **o),
     ValueError, "rotary_sections is [1, 2], 3 pairs; expected 2, the columns of rotary"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, positions=[0] * 5, rotary_sections=2, **o),
     ValueError, "rotary_sections has shape (); expected (axes,)"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, positions=[0] * 5, rotary_sections=[1, 1], **o),
     ValueError, "positions has shape (5,); expected (2, 5)"),
    (lambda o: MHA(f32(3, 5, 8), rotary=COS_SIN, positions=[0] * 4, **o), ValueError,
     "positions has shape (4,); expected (5,) or (3, 5)"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, positions=[0, 1, 2, 3, -1], **o), ValueError,
     "positions holds -1; expected 0 to 5"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, positions=[0, 1, 2, 3, 6], **o), ValueError,
     "positions holds 6; expected 0 to 5"),
    (lambda o: MHA(f32(5, 8), rotary=COS_SIN, positions=[0.5] * 5, **o), TypeError,
     "positions has dtype float64; expected integers"),
    (lambda o: layer(W, W, np.ones((8, 8), int)), TypeError,
     "w_v has dtype int64; expected float32, float64, float16 or bfloat16"),
    (lambda o: MultiHeadAttention.from_fused(f32(8, 96), f32(64, 8), num_heads=4, num_kv_heads=2),
     ValueError,  # C2
     "w_qkv has 96 columns; expected 128, (H + 2 Hkv)·D with the D = 16 of w_o"),
    (lambda o: MultiHeadAttention.from_fused(f32(8, 24), f32(1, 8), num_heads=2), ValueError,
     "w_o has 1 rows; expected H·D, a multiple of 2" + transposed("w_o.T")),
    (lambda o: MultiHeadAttention.from_fused(f32(8, 127), num_heads=4, num_kv_heads=2), ValueError,
     "w_qkv has 127 columns; expected (H + 2 Hkv)·D, a multiple of 8 such as 120"),
    (lambda o: MultiHeadAttention.from_fused(f32(48, 8), num_heads=6, num_kv_heads=3), ValueError,
     "w_qkv has 8 columns; expected (H + 2 Hkv)·D, a multiple of 12 such as 12"
     + transposed("w_qkv.T")),
    (lambda o: MultiHeadAttention.from_fused(f32(24, 8), f32(9, 8), num_heads=2), ValueError,
     "w_o has 9 rows; expected H·D, a multiple of 2" + transposed("w_qkv.T", "w_o.T")),
    (lambda o: MultiHeadAttention.from_fused(f32(8, 24), num_heads=2, b_qkv=f32(23)), ValueError,
     "b_qkv has shape (23,); expected (24,)"),
    (lambda o: MultiHeadAttention.from_fused(pack_weight(f32(8, 24)), num_heads=2), TypeError,
     "w_qkv is a PackedWeight; expected an array, it is split before packing"),
    (lambda o: MHA(f32(3, 5, 7), **o), ValueError,
     "x has shape (3, 5, 7); expected (..., 8), the d_in of w_k"),
    (lambda o: layer(*f32(3, 8, 12))(f32(5, 12), **o), ValueError,
     "x has shape (5, 12); expected (..., 8), the d_in of w_k" + transposed("w_k.T")),
    (lambda o: qkv_ext.cross_attention(f32(5, 12), f32(5, 8), *f32(3, 8, 12), **o), ValueError,
     "x_dec has shape (5, 12); expected (..., 8), the d_in of w_q" + transposed("w_q.T")),
    (lambda o: MHA(f32(8), **o), ValueError, "x has shape (8,); expected at least 2 axes"),
    (lambda o: MHA(f64(3, 5, 8), **o), TypeError,
     "x, w_k have different dtypes (x float64, w_k float32); " + cast("x")),
    (lambda o: MHA(f32(3, 5, 8), f32(3, 6, 9), **o), ValueError,
     "context has shape (3, 6, 9); expected (..., 8), the d_in of w_k"),
    (lambda o: MHA(f32(3, 5, 8), f32(6, 8), **o), ValueError,
     "x has shape (3, 5, 8), the projected keys (2, 6, 4); expected the same number of leading "
     "axes"),
    (lambda o: MHA(f32(3, 5, 8), f32(2, 6, 8), **o), ValueError,
     "x has shape (3, 5, 8), the projected keys (2, 2, 6, 4); their leading axes do not broadcast"),
    (lambda o: MHA(f32(5, 8), f32(6, 8), kv=MHA.project_kv(f32(6, 8)), **o), ValueError,
     "context and kv are both given; expected one of them"),
    (lambda o: MHA(f32(5, 8), KV, **o), TypeError, f"context {NO_SEQUENCE}"),
    (lambda o: MHA(KV, **o), TypeError, f"x {NO_SEQUENCE}"),
    (lambda o: MHA(KV, KV, **o), TypeError, f"context {NO_SEQUENCE}"),
    (lambda o: MHA(KV, kv=KV, **o), TypeError, f"x {NO_SEQUENCE}"),
    (lambda o: MHA(KV, cache=qkv_ext.KVCache(1, 2, 4), **o), TypeError, f"x {NO_SEQUENCE}"),
    (lambda o: MHA.project_kv(KV, **o), TypeError, f"context {NO_SEQUENCE}"),
    (lambda o: qkv_ext.self_attention(KV, W, W, W, **o), TypeError, f"x {NO_SEQUENCE}"),
    (lambda o: qkv_ext.cross_attention(f32(5, 8), KV, W, W, W, **o), TypeError,
     f"x_enc {NO_SEQUENCE}"),
    (lambda o: qkv_ext.cross_attention(KV, f32(5, 8), W, W, W, **o), TypeError,
     f"x_dec {NO_SEQUENCE}"),
    (lambda o: qkv_ext.trace_cross(f32(5, 8), KV, W, W, W, **o), TypeError,
     f"x_enc {NO_SEQUENCE}"),
    (lambda o: MHA(f32(5, 8), kv=f32(2, 6, 4), **o), TypeError,
     "kv is a ndarray; expected what project_kv returns"),
    (lambda o: MHA(f32(5, 8), kv=(f32(2, 6, 4), f32(2, 6, 5)), **o), ValueError,
     "kv.v has shape (2, 6, 5); expected (..., 2, S, 4)"),
    (lambda o: MHA(f32(5, 8), kv=(f32(2, 6, 4), f32(2, 7, 4)), **o), ValueError,
     "kv.k and kv.v have shapes (2, 6, 4) and (2, 7, 4); expected them to differ in the last axis "
     "only"),
    (lambda o: MHA(f32(5, 8), kv=(f64(2, 6, 4), f64(2, 6, 4)), **o), TypeError,
     "kv.k, kv.v, w_q have different dtypes (kv.k float64, kv.v float64, w_q float32); "
     + cast("kv.k", "kv.v")),
    (lambda o: MHA(f32(5, 8), layout="blhd", **o), TypeError,
     "MultiHeadAttention.__call__() got an unexpected keyword argument 'layout'; expected "
     + ", ".join(PROJECTION)),
    (lambda o: MHA(f32(5, 8), mask=f32(3, 5, 5), **o), ValueError,
     "mask has shape (3, 5, 5); expected one that broadcasts to (2, 5, 5)"),
    (lambda o: MHA(f32(5, 8), mask=np.ones((5, 5), int), **o), TypeError,
     f"mask has dtype int64; {INTS}"),
    (lambda o: MHA(f32(3, 5, 8), out=f32(3, 5, 9), **o), ValueError,
     "out has shape (3, 5, 9); expected (3, 5, 8)"),
    (lambda o: MHA(f32(3, 5, 8), causal="yes", **o), TypeError,
     "causal is 'yes'; expected True or False"),
    (lambda o: MHA.project_kv(f32(5, 9), **o), ValueError,
     "context has shape (5, 9); expected (..., 8), the d_in of w_k"),
    (lambda o: qkv_ext.self_attention(f32(5, 9), W, W, W, **o), ValueError,
     "x has shape (5, 9); expected (..., 8), the d_in of w_k"),
    (lambda o: qkv_ext.cross_attention(f32(5, 8), f32(5, 9), W, W, W, **o), ValueError,
     "x_enc has shape (5, 9); expected (..., 8), the d_in of w_k"),
    (lambda o: qkv_ext.cross_attention(f32(5, 9), f32(5, 8), W, W, W, **o), ValueError,
     "x_dec has shape (5, 9); expected (..., 8), the d_in of w_q"),
]  # fmt: skip

TABLE = [*ATTENTION, *PRIMITIVES, *LAYERS]


@pytest.mark.parametrize(
    ("call", "exception", "message"), TABLE, ids=[row[2][:80] for row in TABLE]
)
def test_refused(call, exception, message, backend):
    with pytest.raises(exception, match=f"^{re.escape(message)}$") as caught:
        call({"backend": backend})
    assert type(caught.value) is exception


def test_nothing_is_written_where_a_call_is_refused(backend):
    out = np.full(OUT, 7, np.float32)
    for wrong in ({"mask": f32(5, 6)}, {"scale": "1"}, {"causal": 1}, {"threads": 0}, {"align": ""},
                  {"return_lse": None}):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            sdpa(Q, K, V, out=out, backend=backend, **wrong)
    assert (out == 7).all()


CALLS = {
    "attention": lambda b, x: sdpa(x, x, x, backend=b),
    "matmul": lambda b, x: matmul(x, x, backend=b),
    "linear": lambda b, x: linear_projection(x, x, backend=b),
    "softmax": lambda b, x: softmax(x, backend=b),
    "self_attention": lambda b, x: qkv_ext.self_attention(x, x, x, x, backend=b),
    "layer": lambda b, x: MultiHeadAttention(x, x, x, num_heads=2)(x, backend=b),
    "project_kv": lambda b, x: MultiHeadAttention(x, x, x, num_heads=2).project_kv(x, backend=b),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
def test_unknown_backends(call):
    here = ", ".join(qkv_ext.backends())
    with pytest.raises(ValueError, match=f"^backend is 'cuda'; runnable on this machine: {here}"):
        call("cuda", W)
    with pytest.raises(TypeError, match=f"^backend is 2; runnable on this machine: {here}"):
        call(2, W)
    with pytest.raises(TypeError, match=r"^backend is \['numpy'\]; runnable"):
        call(["numpy"], W)


@every_call
def test_float64_in_a_compiled_backend(call, compiled):
    message = f"backend '{compiled}' computes float32; float64 needs backend 'numpy'"
    with pytest.raises(TypeError, match=f"^{message}$"):
        call(compiled, f64(8, 8))
    call("numpy", f64(8, 8))


def test_what_takes_no_positional_option():
    """Options are named: another order of them can be added."""
    with pytest.raises(TypeError):
        sdpa(Q, K, V, None)
    with pytest.raises(TypeError):
        matmul(W, W, None)
    with pytest.raises(TypeError):
        MultiHeadAttention(W, W, W, W, 2)
