"""The single front door: arguments become a checked problem, or an error that names the argument.

Every public function calls one function here and then a backend.  What comes out is ready to be
read by every backend, and no backend questions it: shapes agree, dtypes agree, each row of each
array is contiguous and aligned, and the output arrays are there.  Copies are made only of what the
kernels cannot read in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from qkv_ext import _arrays, _problem, _rules
from qkv_ext._arrays import (
    BHLD,
    BOTTOM_RIGHT,
    FLOAT32,
    Array,
    Later,
    operand,
    same_dtype,
    shown,
)
from qkv_ext._packed import PackedWeight
from qkv_ext._problem import CAUSAL, PLAIN, Problem, Product, Rows
from qkv_ext._store import Pages
from qkv_ext._threads import threads_of

T = TypeVar("T")
#: Copies to be made after the computation: (to, from).
Copies: TypeAlias = tuple[tuple[Array, Array], ...]
#: What a check hands on: the problem, what the caller gets, and the copies that fill it.
Checked: TypeAlias = tuple[T, tuple[Array, ...], Copies]


# ---- attention ----------------------------------------------------------------------------------


def _shapes(given: tuple[Array, ...]) -> str:
    return "q, k and v have shapes {}, {} and {}".format(*(x.shape for x in given))


def _misfit(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> str:
    """Why (..., H, L, D), (..., Hkv, S, D), (..., Hkv, S, Dv) do not fit; nothing where they do."""
    (*lead, h, _, d), (*lead_k, hkv, s, d_k), (*lead_v, hkv_v, s_v, _) = q, k, v
    if d_k != d:
        return f"expected one D, got {d} and {d_k}"
    if s_v != s:
        return f"expected one S, got {s} and {s_v}"
    if hkv_v != hkv:
        return "expected as many heads in k as in v"
    if h != hkv and (hkv == 0 or h % hkv):
        return f"expected H = {h} to be a multiple of Hkv = {hkv}"
    try:
        np.broadcast_shapes(tuple(lead), tuple(lead_k), tuple(lead_v))
    except ValueError:
        return "their leading axes do not broadcast"
    return ""


def _misfits(given: tuple[Array, ...], *arrays: Array) -> ValueError:
    """The error for q, k and v, heads before lengths, and the other layout where they fit in it."""
    message = f"{_shapes(given)}; {_misfit(*(x.shape for x in arrays))}"
    if given[0].ndim > 3 and not _misfit(*(x.swapaxes(-3, -2).shape for x in arrays)):
        other = "blhd" if given[0].shape == arrays[0].shape else "bhld"
        message += f'; they fit with layout="{other}"'
    return ValueError(message)


def _feasible(given: tuple[Array, ...], pairs: float, products: int) -> None:
    """Refuse so many products for each pair of a query and a key, where that takes years."""
    if pairs * products >= _arrays.MOST_PRODUCTS:
        raise _arrays.infeasible(_shapes(given), pairs * products)


NO_OFFSET = 0  #: the default itself: any other 0 is checked like every number


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    causal: Any,
    align: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    kv_lengths: Any,
    q_lengths: Any,
    query_offset: Any,
    key_offset: Any,
    layout: Any,
    return_weights: Any,
    return_lse: Any,
    out: Any,
    threads: Any,
    given: tuple[Array, ...] | None = None,
    pages: Pages | None = None,
    packed: bool = False,
) -> Checked[Problem]:
    """Check a call of scaled_dot_product_attention; see there for the arguments.

    given is q, k and v as the caller has them, for the errors, where they were changed already.
    Where pages hold the keys and values, q is checked and k and v tell their shapes only.  packed
    says that the caller has more to say of the rows: the one item is a packed batch.
    """
    later = None
    if pages is None and not (
        type(q) is type(k) is type(v) is np.ndarray
        and q.dtype is k.dtype is v.dtype is FLOAT32
        and q.flags.carray
        and k.flags.carray
        and v.flags.carray
        and q.size
        and k.size
        and v.size
        and _arrays.MOST >= q.ndim == k.ndim == v.ndim >= 2
    ):  # what each of them is, unless they are all plain
        later = _later(q_lengths is not None or kv_lengths is not None)
        of_q, of_kv = later
        q, k, v = operand(q, "q", 2, of_q), operand(k, "k", 2, of_kv), operand(v, "v", 2, of_kv)
        same_dtype(q=q, k=k, v=v)
        if not q.ndim == k.ndim == v.ndim:
            raise ValueError(f"{_shapes(given or (q, k, v))}; expected equal ranks")
    dtype, rank, given = q.dtype, q.ndim, given or (q, k, v)

    # q (..., H, L, D), k (..., Hkv, S, D), v (..., Hkv, S, Dv)
    blhd = layout is not BHLD and _arrays.is_blhd(layout)
    if blhd:
        if rank < 4:
            raise ValueError(f"layout is 'blhd', but {_shapes(given)}; expected rank 4 or more")
        q, k, v = q.swapaxes(-3, -2), k.swapaxes(-3, -2), v.swapaxes(-3, -2)
    elif rank < 4:  # (L, D) has no batch and one head, (B, L, D) has one head
        view = (None, None) if rank == 2 else (slice(None), None)
        q, k, v = q[view], k[view], v[view]
    *lead, h, length, d = q.shape
    *lead_k, hkv, s, d_k = k.shape
    lead_v, dv = lead_k, d_k
    fit = d_k == d and (h == hkv or (hkv > 0 and h % hkv == 0))
    if v.shape != k.shape:
        *lead_v, hkv_v, s_v, dv = v.shape
        fit = fit and hkv_v == hkv and s_v == s
    if not fit:
        raise _misfits(given, q, k, v)
    if lead_k != lead or lead_v != lead:
        try:
            lead = list(np.broadcast_shapes(tuple(lead), tuple(lead_k), tuple(lead_v)))
        except ValueError:
            raise _misfits(given, q, k, v) from None

    # options
    bottom_right = type(align) is str and align == BOTTOM_RIGHT  # an array is compared with nothing
    if not bottom_right:
        bottom_right = _arrays.choice(align, "align", _arrays.ALIGNS) == BOTTOM_RIGHT
    compute = dtype if dtype is FLOAT32 else _arrays.compute_dtype(dtype)
    scale = 1.0 / math.sqrt(d) if scale is None and d else _arrays.scale(scale, d, compute)
    inner = 1 if rank < 5 else math.prod(lead[1:])
    if window is softcap is alibi_slopes is sinks is None and (causal is False or causal is True):
        rules = CAUSAL if causal else PLAIN
    else:
        rules = _rules.rules(
            causal, window, softcap, alibi_slopes, sinks, lead[0], inner, h, compute
        )
    if q_lengths is kv_lengths is query_offset is None and key_offset is NO_OFFSET:
        shift = s - length if bottom_right else 0
    else:
        batch = lead[0] if rank > 2 else None
        shift, spans = _rules.spans(
            align, q_lengths, kv_lengths, query_offset, key_offset, batch, inner, length, s
        )
        rules = rules if spans is None else rules._replace(spans=spans)
        if later is not None and spans is not None:
            copy_rows(later, layout, lead, spans)
    if rules.spans is not None:
        _feasible(given, _rules.pairs(rules.spans), h * (d + dv))
    elif not packed:
        _feasible(given, lead[0] * inner * length * s, h * (d + dv))
    if mask is not None:  # below rank 4 the caller's scores have no head axis
        own = (*lead, h, length, s) if rank > 3 else (*lead, length, s)[3 - rank :]
        mask = _arrays.mask(mask, own, compute)
        if rank < 4:
            mask = mask[view]
    count = threads_of(threads)

    # what comes back, as the caller and as the backend see it
    shape = (*lead, length, h, dv) if blhd else (*lead, h, length, dv)
    if rank < 4:
        shape = (*lead, length, dv)[3 - rank :]
    copies: Copies = ()
    if out is None:
        target = output = np.empty(shape, dtype)
    else:
        output, staged = _arrays.target(out, shape, dtype, q, k, v, mask)
        target = output
        if staged is not None:
            target, copies = staged, ((output, staged),)
    if blhd:
        target = target.swapaxes(-3, -2)
    elif rank < 4:
        target = target[view]
    weights = lse = None
    arrays: tuple[Array, ...] = (output,)
    if return_weights is not False and _arrays.switch(return_weights, "return_weights"):
        weights = np.empty((*lead, h, length, s), compute)
        own_weights = weights if rank > 3 else weights[_HEADLESS[rank]]
        if compute is not dtype:
            copies = (*copies, (np.empty(own_weights.shape, dtype), own_weights))
            own_weights = copies[-1][0]
        arrays = (output, own_weights)
    if return_lse is not False and _arrays.switch(return_lse, "return_lse"):
        lse = np.empty((*lead, h, length), compute)
        arrays = (*arrays, lse if rank > 3 else lse[_HEADLESS[rank]])
    fields = (q, k, v, mask, scale, shift, rules, target, weights, lse, count, pages)
    return tuple.__new__(Problem, fields), arrays, copies  # Problem(...) in half the time


def _later(lengths: bool) -> tuple[Later | None, Later | None]:
    """Lists for copies of q, and of k and v, that are put off where lengths leave out rows."""
    return ([], []) if lengths else (None, None)


def copy_rows(
    later: tuple[Later | None, Later | None], layout: str, lead: Sequence[int], spans: Any
) -> None:
    """Make them now, of the rows of q, and of k and v, that the spans say are there.

    layout is that of the caller's arrays, or "packed" for (T, H, D).
    """
    columns = (_problem.Q_START, _problem.Q_LENGTH), (_problem.K_START, _problem.K_LENGTH)
    for copies, (start, length) in zip(later, columns, strict=True):
        if copies:
            rows = map(tuple, spans[:, [_problem.ITEM, start, length]].tolist())
            by_head = [(_by_head(to, layout), _by_head(of, layout)) for to, of in copies]
            _arrays.copy_rows(by_head, lead, rows)


def _by_head(x: Array, layout: str) -> Array:
    """x with the axes that an array of a Problem has: (..., heads, rows, width)."""
    if layout == "packed":
        return x.swapaxes(0, 1)[None]
    if x.ndim < 4:  # (rows, width) has no batch and one head, (batch, rows, width) has one head
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.swapaxes(-3, -2) if layout == "blhd" else x


_HEADLESS: dict[int, Any] = {2: (0, 0), 3: (slice(None), 0)}  # takes off the axes of a low rank


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    causal: Any,
    align: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    kv_lengths: Any,
    return_lse: Any,
    out: Any,
    threads: Any,
) -> Checked[Problem]:
    """Check a call of varlen_attention: one item, whose spans are the sequences."""
    later = of_q, of_kv = _later(kv_lengths is not None)
    q, k, v = operand(q, "q", 3, of_q), operand(k, "k", 3, of_kv), operand(v, "v", 3, of_kv)
    given = q, k, v
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"{_shapes(given)}; expected (Tq, H, D), (Tk, Hkv, D) and (Tk, Hkv, Dv)")
    cu_q = _rules.cumulative(cu_seqlens_q, "cu_seqlens_q", q.shape[0])
    cu_k = _rules.cumulative(cu_seqlens_k, "cu_seqlens_k", k.shape[0])
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q has shape {cu_q.shape} and cu_seqlens_k {cu_k.shape}; expected one shape"
        )
    if out is not None:
        _arrays.target(out, (*q.shape[:2], v.shape[2]), q.dtype)
    problem, arrays, copies = attention(
        q[None], k[None], v[None], None, causal, align, scale, window, softcap, None, sinks,
        None, None, None, 0, "blhd", False, False, None if out is None else out[None], threads,
        given, packed=True,
    )  # fmt: skip
    spans = _rules.packed_spans(align, cu_q, cu_k, kv_lengths)
    _feasible(given, _rules.pairs(spans), q.shape[1] * (q.shape[2] + v.shape[2]))
    copy_rows(later, "packed", (1,), spans)
    rules = problem.rules._replace(spans=spans)
    compute = _arrays.compute_dtype(q.dtype)
    if alibi_slopes is not None:
        shapes = ((q.shape[1],), (len(cu_q) - 1, q.shape[1]))
        slopes = _rules.per_head(alibi_slopes, "alibi_slopes", shapes, compute)
        rules = rules._replace(slopes=np.atleast_2d(slopes))
    arrays = (arrays[0][0] if out is None else out,)
    if _arrays.switch(return_lse, "return_lse"):
        arrays = (*arrays, np.empty(q.shape[:2], compute))
        problem = problem._replace(lse=arrays[1].T[None])
    return problem._replace(rules=rules), arrays, copies


# ---- matmul and its kin --------------------------------------------------------------------------


def _result(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *inputs: Array | None
) -> tuple[Array, Array, Copies]:
    """The caller's output, the array to compute, and the copy between them where they differ."""
    output, staged = _arrays.target(out, shape, dtype, *inputs)
    compute = _arrays.compute_dtype(dtype)
    if compute != dtype:
        staged = np.empty(shape, compute)
    if staged is None:
        return output, output, ()
    return output, staged, ((output, staged),)


def _computed(x: Array) -> Array:
    """float16 and bfloat16 as float32; everything else as it is."""
    compute = _arrays.compute_dtype(x.dtype)
    return x if x.dtype == compute else _arrays.converted(x, compute)


def matmul(a: Any, b: Any, out: Any, threads: Any) -> Checked[Product]:
    """Check a call of matmul."""
    a, b = operand(a, "a", 2), operand(b, "b", 2)
    same_dtype(a=a, b=b)
    given = f"a and b have shapes {a.shape} and {b.shape}"
    if a.shape[-1] != b.shape[-2]:
        hint = transposed("b.T") if b.ndim == 2 and a.shape[-1] == b.shape[-1] else ""
        raise ValueError(f"{given}; expected a (..., M, K) and b (..., K, N) with one K{hint}")
    try:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"{given}; their leading axes do not broadcast") from None
    shape = (*lead, a.shape[-2], b.shape[-1])
    products = math.prod(shape) * a.shape[-1]
    if products >= _arrays.MOST_PRODUCTS:
        raise _arrays.infeasible(given, products)
    output, target, copies = _result(out, shape, a.dtype, a, b)
    a, b = _computed(a), _computed(b)
    if b.ndim == 2 and a.ndim > 2 and a.flags.c_contiguous and target.flags.c_contiguous:
        rows = math.prod(shape[:-1])  # a stack against one matrix is one product
        a, target = a.reshape(rows, a.shape[-1]), target.reshape(rows, shape[-1])
    problem = Product(a, b, False, None, target, threads_of(threads))
    return problem, (output,), copies


def linear(x: Any, w: Any, b: Any, out: Any, threads: Any) -> Checked[Product]:
    """Check a call of linear_projection."""
    x = operand(x, "x", 1)
    packed = isinstance(w, PackedWeight)
    if not packed:
        w = matrix(w, "w")
    same_dtype(x=x, w=w)
    d_in, d_out = w.shape
    if x.shape[-1] != d_in:
        hint = transposed(turned(w, "w")) if x.shape[-1] == d_out else ""
        raise ValueError(
            f"x has shape {x.shape}; expected (..., d_in) with d_in = {d_in} as w has{hint}"
        )
    if b is not None:
        b = np.ascontiguousarray(operand(b, "b", 1))
        if b.shape != (d_out,):
            raise ValueError(f"b has shape {b.shape}; expected ({d_out},), the d_out of w")
        same_dtype(x=x, b=b)
    shape = (*x.shape[:-1], d_out)
    products = math.prod(shape) * d_in
    if products >= _arrays.MOST_PRODUCTS:
        raise _arrays.infeasible(f"x and w have shapes {x.shape} and {w.shape}", products)
    weight = w.panels if packed else w
    output, target, copies = _result(out, shape, x.dtype, x, weight, b)
    rows = math.prod(x.shape[:-1])
    flat = target.reshape(rows, d_out)
    if flat.size and not np.may_share_memory(flat, target):  # no single stride reaches its rows
        copies = ((output, flat.reshape(shape)),)
    b = None if b is None else _computed(b)
    x = _computed(x).reshape(rows, d_in)
    problem = Product(x, _computed(weight), packed, b, flat, threads_of(threads))
    return problem, (output,), copies


def matrix(w: Any, name: str) -> Array:
    """Check a weight (d_in, d_out)."""
    array = operand(w, name, 2)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}; expected (d_in, d_out)")
    return array


def transposed(*weights: str) -> str:
    """The hint that weights would fit if they were transposed."""
    return f"; {', '.join(weights)} would fit: torch keeps weights as (out, in)"


def turned(w: Any, name: str) -> str:
    """How a weight is transposed."""
    return f"pack_weight({name}.T)" if isinstance(w, PackedWeight) else f"{name}.T"


def softmax(x: Any, axis: Any, out: Any, threads: Any) -> Checked[Rows]:
    """Check a call of softmax."""
    x = operand(x, "x", 0)
    if x.ndim == 0:
        raise ValueError("x has shape (); expected at least 1 axis")
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"axis is {shown(axis)}; expected an integer")
    axis = int(axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {shown(axis)}; expected one of the {x.ndim} axes of x {x.shape}")
    output, target, copies = _result(out, x.shape, x.dtype, x)
    x = np.moveaxis(_computed(x), axis, -1)
    rows = np.ascontiguousarray(x)
    target = np.moveaxis(target, axis, -1)
    if not target.flags.c_contiguous:
        target = np.empty(rows.shape, rows.dtype)
        copies = ((output, np.moveaxis(target, -1, axis)),)
    return Rows(rows, target, threads_of(threads)), (output,), copies
