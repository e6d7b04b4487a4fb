"""The ONNX operators Attention (opsets 23, 24, 25) and RotaryEmbedding (opset 23), by this library.

As functions of arrays with the operators' own names, and as ops for onnx's evaluator:

    session = onnx.reference.ReferenceEvaluator(model, new_ops=qkv_ext.onnx.reference_ops())

An adapter and no second implementation: attributes become options of scaled_dot_product_attention,
and the scores that the operator can give back are steps of ``qkv_ext.trace``.  The package onnx
(extra ``onnx``) is needed for the ops only, and imported by ``reference_ops`` only.

    Q  (B, H, L, D)    or (B, L, H·D)        past_key    (B, Hkv, P, D)
    K  (B, Hkv, S, D)  or (B, S, Hkv·D)      past_value  (B, Hkv, P, Dv)
    V  (B, Hkv, S, Dv) or (B, S, Hkv·Dv)     present_*   the same with P + S keys
    Y  (B, H, L, Dv)   or (B, L, H·Dv)       qk_matmul_output  (B, H, L, P + S)
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _arrays, _backends, _problem, _rules
from qkv_ext._core._arrays import array_of, cast_to
from qkv_ext._core._threads import threads_of
from qkv_ext.attention import Options, scaled_dot_product_attention
from qkv_ext.rotary import apply_rotary
from qkv_ext.tracing import trace

Array = NDArray[Any]

__all__ = ["attention", "reference_ops", "rotary_embedding"]

STEPS = {0: "scaled", 1: "capped", 2: "masked", 3: "weights"}  #: of trace, by qk_matmul_output_mode
PRECISIONS = {1, 10, 11, 16}  #: FLOAT, FLOAT16, DOUBLE and BFLOAT16 of TensorProto
FLOATS = {"float16", "bfloat16", "float32", "float64"}


def attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    opset: int = 25,
    return_qk_matmul_output: bool = False,
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """The ONNX operator Attention.

    A query at position p = offset + i sees the keys up to p where is_causal is 1, and the keys from
    p - left_window_size to p + right_window_size.  The offset is that of the cache::

        past_key and past_value          P, the length of the past
        nonpad_kv_seqlen                 nonpad_kv_seqlen - L, for each item of the batch
        neither                          0: the first query stands at the first key

    Parameters
    ----------
    Q : array (B, H, L, D) or (B, L, H·D)
        Queries; float32, float16 or bfloat16, or float64 for the NumPy backend.
    K, V : array (B, Hkv, S, D) and (B, Hkv, S, Dv), or (B, S, Hkv·D) and (B, S, Hkv·Dv)
        Keys and values, of the rank of Q.  K has the dtype of Q; V may have another one.
    attn_mask : array that broadcasts to (B, H, L, P + S), optional
        bool: True keeps a key.  Floating point: added to the scores, and only -inf excludes.  From
        opset 24 on its last axis may be shorter than P + S: the keys beyond it are excluded.
    past_key, past_value : array (B, Hkv, P, D) and (B, Hkv, P, Dv), optional
        What a cache inside the operator holds; both or none.
    nonpad_kv_seqlen : integers (B,), optional
        How many of the S keys are there, where K and V are a whole cache.  Opset 24.
    is_causal : int
        1 for causal order.
    scale : float, optional
        What the scores are multiplied by; 1/√D by default.
    softcap : float
        Scores become softcap · tanh(score / softcap), before the mask; 0 is off.
    q_num_heads, kv_num_heads : int, optional
        H and Hkv, which three-dimensional arrays do not tell.
    qk_matmul_output_mode : int
        What qk_matmul_output is: 0 the scaled scores, 1 after softcap, 2 after the mask as well,
        where -inf stands for whatever excludes a key, 3 the weights.
    softmax_precision : int, optional
        A float type as TensorProto numbers it, one of 1, 10, 11 and 16.  It changes nothing: all is
        computed in float32, or float64 where Q is.  That is at least what 1, 10 and 16 ask for,
        and what 11 does but for the rounding of sums.
    left_window_size, right_window_size : int
        -1 is open.  Opset 25.
    opset : int
        Whose operator it is: 23, 24, or 25 and later.
    return_qk_matmul_output : bool
        Whether to compute it; it takes memory for all scores.
    threads, backend : optional
        As in ``scaled_dot_product_attention``.

    Returns
    -------
    Y : array (B, H, L, Dv) or (B, L, H·Dv)
        In the dtype and rank of Q.  A query that is allowed no key gives zeros.
    present_key, present_value : array (B, Hkv, P + S, D) and (B, Hkv, P + S, Dv)
        Past and new keys and values; views of K and V where there is no past.
    qk_matmul_output : array (B, H, L, P + S) or None
        In the dtype of Q; None unless asked for.

    Raises
    ------
    TypeError, ValueError
        As ``scaled_dot_product_attention`` does, in its names: mask is attn_mask, window the two
        window sizes, kv_lengths nonpad_kv_seqlen.  Inputs and attributes that do not belong
        together, or not to the opset.

    Notes
    -----
    An excluded key never influences Y, whatever K and V hold there, which the operator leaves open.
    Negative scales are honoured, though the operator is drawn with √scale on Q and on K.

    Examples
    --------
    >>> import numpy as np, qkv_ext.onnx
    >>> Q, past = np.zeros((1, 2, 4), "f4"), np.zeros((1, 1, 3, 4), "f4")
    >>> V = np.float32([[[4], [8]]])
    >>> Y, present_key, *_ = qkv_ext.onnx.attention(
    ...     Q, Q, V, None, past, past[..., :1], is_causal=1, q_num_heads=1, kv_num_heads=1)
    >>> Y.ravel(), present_key.shape
    (array([1. , 2.4], dtype=float32), (1, 1, 5, 4))

    References
    ----------
    ONNX operators, Attention: https://onnx.ai/onnx/operators/onnx__Attention.html
    """
    q, k, v = array_of(Q, "Q"), array_of(K, "K"), array_of(V, "V")
    flat = q.ndim == 3
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        given = f"{q.shape}, {k.shape} and {v.shape}"
        raise ValueError(f"Q, K and V have shapes {given}; expected 3 axes each or 4")
    opset = _attribute(opset, "opset")
    if opset < 23:
        raise ValueError(f"opset is {opset}; expected 23, 24, 25 or later")
    if not flat and opset >= 25 and not q_num_heads is kv_num_heads is None:
        raise ValueError("q_num_heads or kv_num_heads is given; expected neither with 4 axes")
    step = STEPS[_attribute(qk_matmul_output_mode, "qk_matmul_output_mode", 0, max(STEPS))]
    if softmax_precision is not None:
        precision = _attribute(softmax_precision, "softmax_precision")
        if precision not in PRECISIONS:
            raise ValueError(f"softmax_precision is {precision}; expected 1, 10, 11 or 16")
    wants_scores = _arrays.as_bool(return_qk_matmul_output, "return_qk_matmul_output")
    q = _by_head(q, "Q", q_num_heads, "q_num_heads")
    k = _by_head(k, "K", kv_num_heads, "kv_num_heads")
    v = _by_head(v, "V", kv_num_heads, "kv_num_heads")
    present_key, present_value = k, v
    if past_key is not None and past_value is not None:
        present_key = _joined(past_key, k, "past_key")
        present_value = _joined(past_value, v, "past_value")
    elif past_key is not None or past_value is not None:
        raise ValueError("one of past_key and past_value is given; expected both or none")
    past = None if past_key is None else present_key.shape[2] - k.shape[2]
    k, v = present_key, present_value

    options = _position(past, nonpad_kv_seqlen, opset)
    options["threads"], options["backend"] = threads, backend
    options["causal"] = bool(_attribute(is_causal, "is_causal", 0, 1))
    options["scale"] = scale
    cap = _arrays.real(softcap, "softcap", "a number, 0 for none")
    options["softcap"] = softcap if cap else None
    left = _attribute(left_window_size, "left_window_size", -1)
    right = _attribute(right_window_size, "right_window_size", -1)
    if left != -1 or right != -1:
        _since(25, opset, "left_window_size and right_window_size")
        options["window"] = (None if left == -1 else left, None if right == -1 else right)
    if attn_mask is not None:
        options["mask"] = _whole_mask(array_of(attn_mask, "attn_mask"), k.shape[2], opset)

    dtype = q.dtype.newbyteorder("=")
    types = {k.dtype.name, v.dtype.name}
    if q.dtype == k.dtype != v.dtype and types <= FLOATS:  # ONNX lets V have a type of its own
        wide = np.float64 if "float64" in types else np.float32
        q, k, v = q.astype(wide), k.astype(wide), v.astype(wide)
    scores = None
    if not wants_scores:
        y = scaled_dot_product_attention(q, k, v, **options)
    elif step == "weights":
        y, scores = scaled_dot_product_attention(q, k, v, return_weights=True, **options)
    else:
        y = scaled_dot_product_attention(q, k, v, **options)
        scores = trace(q, k, v, **options)[step]
    if flat:
        y = y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3])
    with np.errstate(over="ignore"):
        y = y.astype(dtype, copy=False)
        scores = scores if scores is None else scores.astype(dtype, copy=False)
    return y, present_key, present_value, scores


def rotary_embedding(
    X: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: int = 0,
    rotary_embedding_dim: int = 0,
    num_heads: int | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """The ONNX operator RotaryEmbedding: pairs of X turned by the angles of their positions.

    Parameters
    ----------
    X : array (B, H, L, D) or (B, L, H·D)
        Queries or keys; float32, float64, float16 or bfloat16.
    cos_cache, sin_cache : array (n, R / 2), or (B, L, R / 2) without position_ids
        Cosines and sines of the angles, where R is rotary_embedding_dim or else D.
    position_ids : integers (B, L), optional
        The rows of the tables.
    interleaved : int
        1 turns the pairs (0, 1), (2, 3), ...; 0 the pairs (0, R / 2), (1, R / 2 + 1), ...
    rotary_embedding_dim : int
        How many of the D features are turned; 0 for all of them.
    num_heads : int, optional
        H, which a three-dimensional X does not tell.
    threads, backend : optional
        As in ``apply_rotary``.

    Returns
    -------
    Y : array of the shape and dtype of X

    Raises
    ------
    TypeError, ValueError
        As ``apply_rotary`` does; inputs and attributes that do not belong together.

    Examples
    --------
    >>> import numpy as np, qkv_ext.onnx
    >>> X, zero, one = np.float32([[[[1, 2]]]]), np.float32([[[0]]]), np.float32([[[1]]])
    >>> qkv_ext.onnx.rotary_embedding(X, zero, one)
    array([[[[-2.,  1.]]]], dtype=float32)

    References
    ----------
    ONNX operators, RotaryEmbedding: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html
    """
    x = array_of(X, "X")
    cos, sin = array_of(cos_cache, "cos_cache"), array_of(sin_cache, "sin_cache")
    if x.ndim not in (3, 4):
        raise ValueError(f"X has shape {x.shape}; expected 3 axes or 4")
    y = _by_head(x, "X", num_heads, "num_heads")
    positions = position_ids
    if position_ids is None:  # tables that are in order already, one for each item of the batch
        batch, _, length, _ = y.shape
        for table, name in ((cos, "cos_cache"), (sin, "sin_cache")):
            if table.shape[:-1] != (batch, length):
                raise ValueError(
                    f"{name} has shape {table.shape}; without position_ids expected "
                    f"({batch}, {length}, ...), as X has shape {x.shape}"
                )
        cos, sin = (table.reshape(batch * length, table.shape[-1]) for table in (cos, sin))
        positions = np.arange(batch * length).reshape(batch, length)
    y = apply_rotary(
        y, cos, sin, positions=positions, threads=threads, backend=backend,
        interleaved=bool(_attribute(interleaved, "interleaved", 0, 1)),
        rotary_dim=_attribute(rotary_embedding_dim, "rotary_embedding_dim") or None,
    )  # fmt: skip
    return y if x.ndim == 4 else y.swapaxes(1, 2).reshape(x.shape)


def reference_ops(*, threads: int | None = None, backend: str | None = None) -> list[type[Any]]:
    """The two operators as ops for ``onnx.reference.ReferenceEvaluator(model, new_ops=...)``.

    Parameters
    ----------
    threads, backend : optional
        For every call of the ops, as in ``scaled_dot_product_attention``.

    Returns
    -------
    list of onnx.reference.op_run.OpRun classes
        Attention, of whichever opset the model imports, and RotaryEmbedding.

    Raises
    ------
    ImportError
        The package onnx is not there: ``pip install qkv_ext[onnx]``.
    TypeError, ValueError
        threads or backend that scaled_dot_product_attention would refuse.
    """
    try:
        op_run: Any = import_module("onnx.reference.op_run")
    except ImportError as error:
        raise ImportError("reference_ops needs onnx: pip install qkv_ext[onnx]") from error
    _backends.choose(backend, None)
    threads_of(threads)
    attend: Any = partial(attention, threads=threads, backend=backend)
    rotate: Any = partial(rotary_embedding, threads=threads, backend=backend)

    class Attention(op_run.OpRun):  # type: ignore[misc]
        op_domain = ""

        def _run(self, *inputs: Any, **attributes: Any) -> Any:
            opset = self.run_params["opsets"][self.domain]
            count = len(self.output)  # outputs at the end may be left out
            scores = count > 3
            outputs = attend(*inputs, **attributes, opset=opset, return_qk_matmul_output=scores)
            return outputs[:count]

    class RotaryEmbedding(op_run.OpRun):  # type: ignore[misc]
        op_domain = ""

        def _run(self, *inputs: Any, **attributes: Any) -> Any:
            return (rotate(*inputs, **attributes),)

    return [Attention, RotaryEmbedding]


def _attribute(value: Any, name: str, least: int = 0, most: int = _problem.OPEN) -> int:
    """An integer within bounds; Python's bools are 0 and 1."""
    if isinstance(value, (bool, np.bool_)):
        value = int(value)
    return int(_rules.integers(value, name, None, least, most))


def _since(first: int, opset: int, name: str) -> None:
    if opset < first:
        raise ValueError(f"{name} came with opset {first}; got one with opset {opset}")


def _by_head(x: Array, name: str, heads: int | None, attribute: str) -> Array:
    """(B, n, heads width) or (B, heads, n, width) as (B, heads, n, width)."""
    heads = None if heads is None else _attribute(heads, attribute)
    if x.ndim == 4:
        if heads not in (None, x.shape[1]):
            raise ValueError(f"{attribute} is {heads}; expected {x.shape[1]}, as {name} has")
        return x
    batch, n, width = x.shape
    if heads is None:
        raise ValueError(f"{attribute} is None; expected a number, as {name} has shape {x.shape}")
    if heads < 1 or width % heads:
        raise ValueError(f"{attribute} is {heads}; expected a divisor of {width}: {name} {x.shape}")
    return x.reshape(batch, n, heads, width // heads).swapaxes(1, 2)


def _position(past: int | None, nonpad_kv_seqlen: ArrayLike | None, opset: int) -> Options:
    """The options that place the queries on the axis of the keys, by the kind of cache there is."""
    if nonpad_kv_seqlen is None:
        return {"align": "top-left"} if past is None else {"query_offset": past}
    _since(24, opset, "nonpad_kv_seqlen")
    if past is not None:
        raise ValueError("nonpad_kv_seqlen and past_key are given; expected one kind of cache")
    return {"align": "bottom-right", "kv_lengths": nonpad_kv_seqlen}


def _joined(past: ArrayLike, new: Array, name: str) -> Array:
    """Past and new keys or values, (B, Hkv, P + S, width)."""
    past = array_of(past, name)
    batch, hkv, _, width = new.shape
    if past.ndim != 4 or (past.shape[:2], past.shape[3]) != ((batch, hkv), width):
        raise ValueError(f"{name} has shape {past.shape}; expected ({batch}, {hkv}, P, {width})")
    if past.dtype != new.dtype:
        raise TypeError(
            f"{name} has dtype {past.dtype}; expected {new.dtype}: {name}{cast_to(new.dtype)}"
        )
    return np.concatenate((past, new), axis=2)


def _whole_mask(mask: Array, total: int, opset: int) -> Array:
    """The mask, with whatever excludes a key where its last axis ends before the keys do.

    Opset 23 knows no short masks: there an axis of length 1 is one that broadcasts.
    """
    known = mask.dtype.kind in "bf" or mask.dtype.name == "bfloat16"  # others are refused later
    if opset < 24 or mask.ndim == 0 or mask.shape[-1] >= total or not known:
        return mask
    fill = False if mask.dtype.kind == "b" else -np.inf
    whole = np.full((*mask.shape[:-1], total), fill, mask.dtype)
    whole[..., : mask.shape[-1]] = mask
    return whole
