"""The single front door: arguments become a checked problem, or an error that names the argument.

Every public function calls one function here and then a backend.  What comes out is ready to be
read by every backend, and no backend questions it: shapes agree, dtypes agree, each row of each
array is contiguous and aligned, and the output arrays are there.  Copies are made only of what the
kernels cannot read in place.  Layers and caches have checked their arrays themselves, and come in
by the inner doors: ``problem`` and ``product``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from qkv_ext._core import _arrays, _problem, _rules
from qkv_ext._core._arrays import (
    BHLD,
    BLHD,
    FLOAT32,
    FLOAT64,
    Array,
    Later,
    operand,
    same_dtype,
    shown,
)
from qkv_ext._core._options import Given
from qkv_ext._core._packed import WEIGHT_DTYPES, PackedWeight
from qkv_ext._core._problem import Problem, Product, Rows, Scoring, Sizes
from qkv_ext._core._threads import threads_of

if TYPE_CHECKING:
    from qkv_ext._cache._store import Pages

T = TypeVar("T")
#: Copies to be made after the computation: (to, from).
Copies: TypeAlias = tuple[tuple[Array, Array], ...]
#: What a check hands on: the problem, what the caller gets, and the copies that fill it.
Checked: TypeAlias = tuple[T, tuple[Array, ...], Copies]


PACKED = "packed"  #: the layout of varlen, (T, H, D), beside BHLD and BLHD

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


def attention(q: Any, k: Any, v: Any, given: Given) -> Checked[Problem]:
    """Check a call of scaled_dot_product_attention."""
    later = None
    if not (
        type(q) is type(k) is type(v) is np.ndarray
        and q.dtype is k.dtype is v.dtype is FLOAT32
        and q.flags.carray
        and k.flags.carray
        and v.flags.carray
        and q.size
        and k.size
        and v.size
        and _arrays.MAX_NDIM >= q.ndim == k.ndim == v.ndim >= 2
    ):  # what each of them is, unless they are all plain
        (q, k, v), later = _operands(q, k, v, 2, given)
        if not q.ndim == k.ndim == v.ndim:
            raise ValueError(f"{_shapes((q, k, v))}; expected equal ranks")
    layout = BHLD
    if given.layout is not BHLD and _arrays.is_blhd(given.layout):
        layout = BLHD
        if q.ndim < 4:
            given_shapes = _shapes((q, k, v))
            raise ValueError(f"layout is 'blhd', but {given_shapes}; expected rank 4 or more")
    return _checked((q, k, v), later, layout, given)


def varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, given: Given
) -> Checked[Problem]:
    """Check a call of varlen_attention: one item, whose spans are the sequences."""
    arrays, later = _operands(q, k, v, 3, given)
    q, k, v = arrays
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"{_shapes(arrays)}; expected (Tq, H, D), (Tk, Hkv, D) and (Tk, Hkv, Dv)")
    cu_q = _rules.cumulative(cu_seqlens_q, "cu_seqlens_q", len(q))
    cu_k = _rules.cumulative(cu_seqlens_k, "cu_seqlens_k", len(k))
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q has shape {cu_q.shape} and cu_seqlens_k {cu_k.shape}; expected one shape"
        )
    return _checked(arrays, later, PACKED, given, (cu_q, cu_k))


def _operands(
    q: Any, k: Any, v: Any, least: int, given: Given
) -> tuple[tuple[Array, Array, Array], tuple[Later | None, Later | None]]:
    """q, k and v, and their copies that are put off where lengths leave out rows."""
    lengths = given.q_lengths is not None or given.kv_lengths is not None
    later: tuple[Later | None, Later | None] = ([], []) if lengths else (None, None)
    of_q, of_kv = later
    q, k, v = (
        operand(q, "q", least, of_q),
        operand(k, "k", least, of_kv),
        operand(v, "v", least, of_kv),
    )
    same_dtype(q=q, k=k, v=v)
    return (q, k, v), later


def _checked(
    arrays: tuple[Array, Array, Array],
    later: tuple[Later | None, Later | None] | None,
    layout: str,
    given: Given,
    packed: tuple[Array, Array] | None = None,
) -> Checked[Problem]:
    """Shapes, options and the output of arrays in a layout."""
    q, k, v = arrays
    if layout is not BHLD or q.ndim < 4:
        q, k, v = (_by_head(x, layout) for x in arrays)
    sizes = _sizes(arrays, q, k, v, packed)
    scoring = _rules.options(given, sizes)
    spans = scoring.rules.spans
    if later is not None and spans is not None:
        copy_rows(later, layout, sizes.lead if packed is None else (1,), spans)
    feasible(sizes, spans, arrays)
    return with_output(q, k, v, layout, sizes, given, scoring)


def with_output(
    q: Array,
    k: Array | None,
    v: Array | None,
    layout: str,
    sizes: Sizes,
    given: Given,
    scoring: Scoring,
    pages: Pages | None = None,
) -> Checked[Problem]:
    """problem with an output in the caller's layout, the first of what the caller gets."""
    if layout is BHLD:
        shape = (*sizes.rows, sizes.dv)
    elif layout is BLHD:
        shape = (*sizes.lead, sizes.length, sizes.h, sizes.dv)
    else:
        shape = (sizes.length, sizes.h, sizes.dv)
    if given.out is None:
        target, staged = np.empty(shape, sizes.dtype), None
        output = target
    else:
        output, staged = _arrays.target(given.out, shape, sizes.dtype, q, k, v, scoring.mask)
        target = output if staged is None else staged
    if layout is not BHLD or sizes.rank < 4:
        target = _by_head(target, layout)
    checked, extras, copies = problem(q, k, v, target, sizes, given, scoring, pages)
    return checked, (output, *extras), copies if staged is None else ((output, staged), *copies)


def _sizes(
    given: tuple[Array, ...], q: Array, k: Array, v: Array, packed: tuple[Array, Array] | None
) -> Sizes:
    """The sizes of q (..., H, L, D), k (..., Hkv, S, D) and v (..., Hkv, S, Dv)."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    h, length, d = of_q[-3:]
    hkv, s, d_k = of_k[-3:]
    lead, dv = of_q[:-3], of_v[-1]
    if d_k != d or of_v[-3:-1] != (hkv, s) or (h != hkv and (hkv == 0 or h % hkv)):
        raise _misfits(given, q, k, v)
    if not lead == of_k[:-3] == of_v[:-3]:
        try:
            lead = np.broadcast_shapes(lead, of_k[:-3], of_v[:-3])
        except ValueError:
            raise _misfits(given, q, k, v) from None
    rank = given[0].ndim
    if rank < 4:
        lead = lead[: rank - 2] if packed is None else (len(packed[0]) - 1,)
    if packed is not None:
        rank = 4
    fields = rank, lead, h, hkv, length, s, d, dv, q.dtype, None, packed
    return tuple.__new__(Sizes, fields)


def feasible(sizes: Sizes, spans: Array | None, arrays: tuple[Array, ...] = ()) -> None:
    """Refuse so many products for each pair of a query and a key, where that takes years."""
    if spans is not None:
        pairs = _rules.pairs(spans)
    else:
        pairs = math.prod(sizes.lead) * sizes.length * sizes.s
    products = pairs * sizes.h * (sizes.d + sizes.dv)
    if products >= _arrays.MOST_PRODUCTS:
        raise _arrays.infeasible(_shapes(arrays) if arrays else f"sizes are {sizes}", products)


def problem(
    q: Array,
    k: Array | None,
    v: Array | None,
    out: Array,
    sizes: Sizes,
    given: Given,
    scoring: Scoring,
    pages: Pages | None = None,
) -> Checked[Problem]:
    """The inner door: arrays, in the axes of a Problem, and scoring are checked already.

    What the caller gets are the extras that were asked for.  k and v are None where pages hold the
    keys and values.
    """
    weights = lse = None
    extras: tuple[Array, ...] = ()
    copies: Copies = ()
    return_weights, return_lse = given.return_weights, given.return_lse
    if return_weights is not False and _arrays.as_bool(return_weights, "return_weights"):
        compute = _arrays.compute_dtype(sizes.dtype)
        own = np.empty((*sizes.rows, sizes.s), compute)
        weights = sizes.by_head(own)
        extras = (own,)
        if compute is not sizes.dtype:
            extras = (np.empty(own.shape, sizes.dtype),)
            copies = ((extras[0], own),)
    if return_lse is not False and _arrays.as_bool(return_lse, "return_lse"):
        compute = _arrays.compute_dtype(sizes.dtype)
        if sizes.packed is None:
            own = np.empty(sizes.rows, compute)
            lse = sizes.by_head(own)
        else:
            own = np.empty((sizes.length, sizes.h), compute)
            lse = own.T[None]
        extras = (*extras, own)
    mask, scale, diagonal, rules, _ = scoring
    count = threads_of(given.threads)
    fields = (q, k, v, mask, scale, diagonal, rules, out, weights, lse, count, pages)
    return tuple.__new__(Problem, fields), extras, copies  # Problem(...) in half the time


def copy_rows(
    later: tuple[Later | None, Later | None], layout: str, lead: Sequence[int], spans: Any
) -> None:
    """Make now what was put off, of the rows of q, and of k and v, that the spans say are there.

    layout is that of the caller's arrays.
    """
    columns = (_problem.Q_START, _problem.Q_LENGTH), (_problem.K_START, _problem.K_LENGTH)
    for copies, (start, length) in zip(later, columns, strict=True):
        if copies:
            rows = map(tuple, spans[:, [_problem.ITEM, start, length]].tolist())
            by_head = [(_by_head(to, layout), _by_head(of, layout)) for to, of in copies]
            _arrays.copy_rows(by_head, lead or (1,), rows)


def _by_head(x: Array, layout: str) -> Array:
    """x with the axes that an array of a Problem has: (..., heads, rows, width)."""
    if layout is PACKED:
        return x.swapaxes(0, 1)[None]
    if x.ndim < 4:  # (rows, width) has no batch and one head, (batch, rows, width) has one head
        return x[None, None] if x.ndim == 2 else x[:, None]
    return x.swapaxes(-3, -2) if layout is BLHD else x


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


def linear(
    x: Any, w: Any, b: Any, activation: Any, residual: Any, out: Any, threads: Any
) -> Checked[Product]:
    """Check a call of linear_projection."""
    x = operand(x, "x", 1)
    if not isinstance(w, PackedWeight):
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
    if activation is not None:
        activation = _arrays.choice(activation, "activation", _problem.ACTIVATIONS)
    if residual is not None:
        residual = operand(residual, "residual", 1)
        shape = (*x.shape[:-1], d_out)
        if residual.shape != shape:
            raise ValueError(
                f"residual has shape {residual.shape}; expected {shape}, that of the output"
            )
        same_dtype(x=x, residual=residual)
    return product(x, w, b, out, threads_of(threads), activation, residual)


def product(
    x: Array,
    w: Any,
    b: Array | None,
    out: Any,
    threads: int,
    activation: str | None = None,
    residual: Array | None = None,
) -> Checked[Product]:
    """The inner door of linear_projection: all but out is checked already."""
    packed = isinstance(w, PackedWeight)
    d_in, d_out = w.shape
    shape = (*x.shape[:-1], d_out)
    products = math.prod(shape) * d_in
    if products >= _arrays.MOST_PRODUCTS:
        raise _arrays.infeasible(f"x and w have shapes {x.shape} and {w.shape}", products)
    weight = w.panels if packed else _computed(w)
    output, target, copies = _result(out, shape, x.dtype, x, weight, b, residual)
    rows = math.prod(x.shape[:-1])
    flat = target.reshape(rows, d_out)
    if flat.size and not np.may_share_memory(flat, target):  # no single stride reaches its rows
        copies = ((output, flat.reshape(shape)),)
    b = None if b is None else _computed(b)
    x = _computed(x).reshape(rows, d_in)
    if residual is not None:
        residual = _computed(residual).reshape(rows, d_out)
    fields = x, weight, packed, b, flat, threads, activation, residual
    return Product(*fields), (output,), copies


def matrix(w: Any, name: str) -> Array:
    """Check a weight (d_in, d_out)."""
    array = operand(w, name, 2)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}; expected (d_in, d_out)")
    return array


def packed(w: Any, dtype: Any, name: str, keyword: str) -> PackedWeight:
    """Check a weight (d_in, d_out), and what it is to be kept as, and pack it."""
    w = matrix(w, name)
    if dtype is not None:
        dtype = _arrays.choice(dtype, keyword, WEIGHT_DTYPES)
        if w.dtype == FLOAT64:
            raise TypeError(
                f"{keyword} is {dtype!r} and {name} is float64, which is kept as it is; "
                f"expected float32, float16 or bfloat16, such as {name}.astype(np.float32)"
            )
    return PackedWeight.from_matrix(w, dtype)


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
