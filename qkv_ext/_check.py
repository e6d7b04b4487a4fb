"""The single front door: arguments become a checked problem, or an error that names the argument.

Every public function calls one function here and then a backend.  What comes out is ready to be
read by every backend, and no backend questions it: shapes agree, dtypes agree, each row of each
array is contiguous and aligned, and the output arrays are there.  Copies are made only of what the
kernels cannot read in place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext import _backends
from qkv_ext._packed import PackedWeight

Array: TypeAlias = NDArray[Any]

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
_COMPUTED = {FLOAT32, FLOAT64}


class Problem(NamedTuple):
    """One attention call.  Leading axes broadcast; every array has the rank of out, at least 4."""

    q: Array  # (..., H, L, D)
    k: Array  # (..., Hkv, S, D)
    v: Array  # (..., Hkv, S, Dv)
    mask: Array | None  # bool, or the dtype of q; broadcasts to (..., H, L, S)
    scale: float
    causal: bool
    offset: int  # query i stands at position i + offset on the axis of the keys
    out: Array  # (..., H, L, Dv)
    weights: Array | None  # (..., H, L, S)
    lse: Array | None  # (..., H, L)
    threads: int


class Product(NamedTuple):
    """One product out = a b + bias; leading axes broadcast, unless b is packed: then a is (M, K)."""

    a: Array  # (..., M, K)
    b: Array  # (..., K, N), or panels (P, K, 64)
    packed: bool
    bias: Array | None  # (N,)
    out: Array  # (..., M, N)
    threads: int


class Rows(NamedTuple):
    """Rows to be softmaxed: x (..., n) into out of the same shape."""

    x: Array
    out: Array
    threads: int


class Results(NamedTuple):
    """What the caller gets, and the array computed in place of an out that cannot be written yet."""

    arrays: tuple[Array, ...]
    staged: Array | None

    def deliver(self) -> Any:
        """The output alone, or the tuple (output, weights, lse) of what was asked for."""
        if self.staged is not None:
            self.arrays[0][...] = self.staged
        return self.arrays[0] if len(self.arrays) == 1 else self.arrays


# ---- arrays ---------------------------------------------------------------------------------------


def _array(x: ArrayLike, name: str) -> Array:
    """Anything array-like as an ndarray; without a copy where it speaks DLPack or has a buffer."""
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray) if not isinstance(x, np.ma.MaskedArray) else _no_masked(name)
    if hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)  # type: ignore[arg-type]
    return np.asarray(x)


def _no_masked(name: str) -> Array:
    raise TypeError(f"{name} is a numpy.ma.MaskedArray; expected a plain array and mask=")


def _operand(x: ArrayLike, name: str, least: int) -> Array:
    """A float array of at least that rank whose rows the kernels can read in place."""
    if type(x) is not np.ndarray:
        x = _array(x, name)
    dtype = x.dtype
    if dtype is not FLOAT32:
        native = dtype.newbyteorder("=")
        if native not in _COMPUTED:
            raise TypeError(f"{name} has dtype {dtype}; expected float32 or float64")
        if native is not dtype:
            x = x.astype(FLOAT64 if native == FLOAT64 else FLOAT32)
    if x.ndim < least:
        raise ValueError(f"{name} has shape {x.shape}; expected at least {least} axes")
    if not x.flags.c_contiguous and least and (
        x.strides[-1] != x.itemsize or not x.flags.aligned
    ):
        x = np.array(x, order="C")
    elif not x.flags.aligned:
        x = np.array(x, order="C")
    return x


def _same_dtype(**arrays: Array) -> None:
    dtypes = {name: x.dtype for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        got = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{', '.join(dtypes)} have different dtypes ({got}); expected one dtype")


def _overlaps_itself(x: Array) -> bool:
    """Whether two elements of x share memory."""
    span = x.itemsize
    for step, n in sorted((abs(step), n) for step, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if step < span:  # nested strides never do this; the rest is decided element by element
            offsets = np.zeros(x.shape, np.intp)
            for axis, (by, count) in enumerate(zip(x.strides, x.shape, strict=True)):
                along = [1] * x.ndim
                along[axis] = count
                offsets += (np.arange(count) * by).reshape(along)
            return bool((np.diff(np.sort(offsets, axis=None)) < x.itemsize).any())
        span += (n - 1) * step
    return False


def _target(
    out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], *inputs: Array | None
) -> tuple[Array, Array | None]:
    """The caller's output array, and the array to compute in its place, if it needs one.

    out may be strided and may overlap an input.  Where the kernels cannot write its rows, or would
    overwrite what they still have to read, the result is computed elsewhere and copied.
    """
    if out is None:
        return np.empty(shape, dtype), None
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is a {type(out).__name__}; expected a numpy.ndarray")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; expected {shape}")
    if out.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {out.dtype}; expected {dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; expected a writeable array")
    if out.size and _overlaps_itself(out):
        raise ValueError("out has elements that overlap each other; expected separate elements")
    if (
        out.dtype is dtype
        and out.flags.aligned
        and (not out.ndim or out.strides[-1] == out.itemsize or out.shape[-1] <= 1)
        and type(out) is np.ndarray
        and not any(x is not None and np.may_share_memory(out, x) for x in inputs)
    ):
        return out, None
    return out, np.empty(shape, dtype)


# ---- small arguments ------------------------------------------------------------------------------


def _switch(value: object, name: str) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; expected True or False")


def _scale(scale: object, d: int) -> float:
    if scale is None:
        if d == 0:
            raise ValueError("scale is None, but D is 0 and 1/√0 is no number; give a scale")
        return 1.0 / math.sqrt(d)
    number = scale
    if isinstance(number, np.ndarray) and number.ndim == 0:
        number = number[()]
    if isinstance(number, (bool, np.bool_)) or not isinstance(
        number, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"scale is {scale!r}; expected a real number or None")
    if not math.isfinite(number):
        raise ValueError(f"scale is {scale!r}; expected a finite number or None")
    return float(number)


def _choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} is {value!r}; expected {' or '.join(map(repr, choices))}")


def _mask(mask: ArrayLike, scores: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The mask in the kernels' terms: bool, or floats of the compute dtype where only −inf excludes.

    It keeps its size-1 axes: nothing is expanded in memory.
    """
    mask = _array(mask, "mask")
    kind = mask.dtype
    if kind != bool and kind.kind != "f" and kind.name != "bfloat16":
        hint = "mask.astype(bool), True keeps a key" if kind.kind in "iu" else "bool or a float dtype"
        raise TypeError(f"mask has dtype {kind}; expected bool or floating point: {hint}")
    if mask.ndim > len(scores) or any(
        n not in (1, full) for n, full in zip(mask.shape[::-1], scores[::-1], strict=False)
    ):
        raise ValueError(f"mask has shape {mask.shape}; expected one that broadcasts to {scores}")
    if kind != bool and kind is not dtype:
        given = mask
        with np.errstate(over="ignore"):
            mask = given.astype(dtype)
        if kind.itemsize > dtype.itemsize:  # a finite value stays finite: only −inf excludes
            beyond = np.isinf(mask) & np.isfinite(given)
            mask[beyond] = np.copysign(np.finfo(dtype).max, given[beyond])
    if mask.ndim < len(scores):
        mask = mask[(None,) * (len(scores) - mask.ndim)]
    if not mask.flags.aligned or (mask.shape[-1] > 1 and mask.strides[-1] not in (0, mask.itemsize)):
        mask = np.array(mask, order="C")
    return mask


# ---- attention ------------------------------------------------------------------------------------


def _attention_shapes(q: Array, k: Array, v: Array, given: str) -> tuple[int, ...]:
    """The broadcast leading axes of q (..., H, L, D), k (..., Hkv, S, D) and v (..., Hkv, S, Dv)."""
    hkv = k.shape[-3]
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"q and k differ in D, {q.shape[-1]} and {k.shape[-1]} ({given})")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v differ in S, {k.shape[-2]} and {v.shape[-2]} ({given})")
    if hkv != v.shape[-3]:
        raise ValueError(f"k and v differ in heads, {hkv} and {v.shape[-3]} ({given})")
    if q.shape[-3] % hkv if hkv else q.shape[-3]:
        raise ValueError(f"H = {q.shape[-3]} query heads are no multiple of Hkv = {hkv} ({given})")
    lead = q.shape[:-3]
    if lead != k.shape[:-3] or lead != v.shape[:-3]:
        try:
            lead = np.broadcast_shapes(lead, k.shape[:-3], v.shape[:-3])
        except ValueError:
            raise ValueError(f"leading axes of q, k and v do not broadcast ({given})") from None
    return lead


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: ArrayLike | None,
    causal: bool,
    align: str,
    scale: float | None,
    layout: str,
    return_weights: bool,
    return_lse: bool,
    out: Array | None,
    threads: int | None,
    backend: str | None,
) -> tuple[_backends.Backend, Problem, Results]:
    """Check a call of scaled_dot_product_attention; see there for the arguments."""
    q, k, v = _operand(q, "q", 2), _operand(k, "k", 2), _operand(v, "v", 2)
    dtype, rank = q.dtype, q.ndim
    if k.dtype is not dtype or v.dtype is not dtype:
        _same_dtype(q=q, k=k, v=v)
    chosen = _backends.choose(backend, dtype)
    given = q.shape, k.shape, v.shape
    if k.ndim != rank or v.ndim != rank:
        raise ValueError(f"q, k and v have shapes {given}; expected equal ranks")
    if layout != "bhld":
        _choice(layout, "layout", ("bhld", "blhd"))
        if rank < 4:
            raise ValueError(f"layout is 'blhd', but q has shape {q.shape}; expected rank 4 or more")
        q, k, v = q.swapaxes(-3, -2), k.swapaxes(-3, -2), v.swapaxes(-3, -2)
    elif rank < 4:  # (L, D) has no batch and one head, (B, L, D) has one head
        index = (None, None) if rank == 2 else (slice(None), None)
        q, k, v = q[index], k[index], v[index]

    h, length, d = q.shape[-3:]
    s, dv = v.shape[-2:]
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and (h, s, d) == (
        k.shape[-3], k.shape[-2], k.shape[-1]
    ) and h == v.shape[-3]:
        lead = q.shape[:-3]
    else:
        lead = _attention_shapes(q, k, v, f"q, k and v have shapes {given}")

    # as the caller sees them: no head axis below rank 4, no batch axis at rank 2
    front = (*lead, h) if rank > 3 else lead if rank == 3 else ()
    if mask is not None:
        mask = _mask(mask, (*front, length, s), dtype)
        if rank == 3:
            mask = mask[:, None]
        elif rank == 2:
            mask = mask[None, None]
    scale = _scale(scale, d)
    causal = _switch(causal, "causal")
    _choice(align, "align", ("bottom-right", "top-left"))
    want_weights = _switch(return_weights, "return_weights")
    want_lse = _switch(return_lse, "return_lse")

    shape = (*lead, length, h, dv) if layout == "blhd" else (*front, length, dv)
    output, staged = _target(out, shape, dtype, q, k, v, mask)
    results = [output]
    target = output if staged is None else staged
    if layout == "blhd":
        target = target.swapaxes(-3, -2)
    elif rank < 4:
        target = target[index]
    weights = lse = None
    if want_weights:
        weights = np.empty((*lead, h, length, s), dtype)
        results.append(weights.reshape(*front, length, s))
    if want_lse:
        lse = np.empty((*lead, h, length), dtype)
        results.append(lse.reshape(*front, length))

    offset = s - length if align == "bottom-right" else 0
    count = _backends.threads_of(threads)
    problem = Problem(q, k, v, mask, scale, causal, offset, target, weights, lse, count)
    return chosen, problem, Results(tuple(results), staged)


# ---- matmul and its kin ---------------------------------------------------------------------------


def matmul(
    a: ArrayLike, b: ArrayLike, out: Array | None, threads: int | None, backend: str | None
) -> tuple[_backends.Backend, Product, Results]:
    """Check a call of matmul."""
    a, b = _operand(a, "a", 2), _operand(b, "b", 2)
    _same_dtype(a=a, b=b)
    chosen = _backends.choose(backend, a.dtype)
    given = f"a and b have shapes {a.shape} and {b.shape}"
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{given}; expected a (..., M, K) and b (..., K, N) with one K")
    try:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"{given}; their leading axes do not broadcast") from None
    shape = (*lead, a.shape[-2], b.shape[-1])
    output, staged = _target(out, shape, a.dtype, a, b)
    target = output if staged is None else staged
    problem = Product(a, b, False, None, target, _backends.threads_of(threads))
    return chosen, problem, Results((output,), staged)


def linear(
    x: ArrayLike,
    w: ArrayLike | PackedWeight,
    b: ArrayLike | None,
    out: Array | None,
    threads: int | None,
    backend: str | None,
) -> tuple[_backends.Backend, Product, Results]:
    """Check a call of linear_projection."""
    x = _operand(x, "x", 1)
    packed = isinstance(w, PackedWeight)
    if not packed:
        w = weight(w)
    _same_dtype(x=x, w=w)
    chosen = _backends.choose(backend, x.dtype)
    d_in, d_out = w.shape
    if x.shape[-1] != d_in:
        raise ValueError(f"x has shape {x.shape}; expected (..., d_in) with d_in = {d_in} as w has")
    if b is not None:
        b = np.ascontiguousarray(_operand(b, "b", 1))
        if b.shape != (d_out,):
            raise ValueError(f"b has shape {b.shape}; expected ({d_out},), the d_out of w")
        _same_dtype(x=x, b=b)
    shape = (*x.shape[:-1], d_out)
    output, staged = _target(out, shape, x.dtype, x, w.panels if packed else w, b)
    target = output if staged is None else staged
    rows = math.prod(x.shape[:-1])
    flat = target.reshape(rows, d_out)
    if flat.size and not np.may_share_memory(flat, target):  # no single stride reaches its rows
        staged = flat.reshape(shape)
    problem = Product(
        x.reshape(rows, d_in),
        w.panels if packed else w,
        packed,
        b,
        flat,
        _backends.threads_of(threads),
    )
    return chosen, problem, Results((output,), staged)


def weight(w: ArrayLike) -> Array:
    """Check a matrix to be packed."""
    return _named_weight(w, "w")


# ---- layers ---------------------------------------------------------------------------------------

_OPTIONS = ("mask", "causal", "align", "scale", "out", "threads", "backend")


class Projections(NamedTuple):
    """The checked weights and biases of a layer, each by "q", "k", "v" and "o"."""

    weights: dict[str, Any]  # array or PackedWeight; "o" may be None
    biases: dict[str, Any]  # array or None
    num_heads: int
    num_kv_heads: int


def _heads(value: object, name: str) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected a positive integer")
    if value < 1:
        raise ValueError(f"{name} is {value}; expected a positive integer")
    return int(value)


def _both_heads(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    h = _heads(num_heads, "num_heads")
    hkv = h if num_kv_heads is None else _heads(num_kv_heads, "num_kv_heads")
    if h % hkv:
        raise ValueError(f"num_heads is {h}, no multiple of num_kv_heads, {hkv}")
    return h, hkv


def _named_weight(w: ArrayLike | PackedWeight, name: str) -> Any:
    if isinstance(w, PackedWeight):
        return w
    w = _operand(w, name, 2)
    if w.ndim != 2:
        raise ValueError(f"{name} has shape {w.shape}; expected (d_in, d_out)")
    return w


def projections(
    w_q: Any, w_k: Any, w_v: Any, w_o: Any, b_q: Any, b_k: Any, b_v: Any, b_o: Any,
    num_heads: int, num_kv_heads: int | None,
) -> Projections:  # fmt: skip
    """Check the weights of a layer against each other and against the heads."""
    h, hkv = _both_heads(num_heads, num_kv_heads)
    given = {"q": w_q, "k": w_k, "v": w_v, "o": w_o}
    weights = {p: None if w is None else _named_weight(w, f"w_{p}") for p, w in given.items()}
    for part, heads, name in (("q", h, "num_heads"), ("k", hkv, "num_kv_heads"), ("v", hkv, "num_kv_heads")):
        if weights[part] is None:
            raise TypeError(f"w_{part} is None; expected a weight (d_in, d_out)")
        if weights[part].shape[1] % heads:
            raise ValueError(
                f"w_{part} has shape {weights[part].shape}; expected columns that are a multiple "
                f"of {name}, {heads}"
            )
    d, d_k, dv = (weights[p].shape[1] // n for p, n in (("q", h), ("k", hkv), ("v", hkv)))
    if d != d_k:
        raise ValueError(
            f"w_q has {d} columns for each of {h} heads and w_k {d_k} for each of {hkv}; "
            "expected one D"
        )
    if weights["k"].shape[0] != weights["v"].shape[0]:
        raise ValueError(
            f"w_k has shape {weights['k'].shape} and w_v {weights['v'].shape}; expected one d_in"
        )
    if weights["o"] is not None and weights["o"].shape[0] != h * dv:
        raise ValueError(f"w_o has shape {weights['o'].shape}; expected ({h * dv}, d_out), H·Dv rows")
    biases = {"q": b_q, "k": b_k, "v": b_v, "o": b_o}
    for part, b in biases.items():
        if b is None:
            continue
        if weights[part] is None:
            raise ValueError("b_o is given without w_o; expected both or none")
        b = biases[part] = np.ascontiguousarray(_operand(b, f"b_{part}", 1))
        if b.shape != (weights[part].shape[1],):
            raise ValueError(f"b_{part} has shape {b.shape}; expected {weights[part].shape[1:]}")
    arrays = {f"w_{p}": w for p, w in weights.items() if w is not None}
    arrays |= {f"b_{p}": b for p, b in biases.items() if b is not None}
    _same_dtype(**arrays)
    return Projections(weights, biases, h, hkv)


def fused(
    w_qkv: ArrayLike, b_qkv: ArrayLike | None, w_o: Any, num_heads: int, num_kv_heads: int | None
) -> tuple[list[Array], list[Any]]:
    """Split a fused weight and bias into those of Q, K and V."""
    h, hkv = _both_heads(num_heads, num_kv_heads)
    w = _named_weight(w_qkv, "w_qkv")
    if isinstance(w, PackedWeight):
        raise TypeError("w_qkv is a PackedWeight; expected an array, it is split before packing")
    parts = h + 2 * hkv
    d, rest = divmod(w.shape[1], parts)
    if w_o is not None:
        d_o = _named_weight(w_o, "w_o").shape[0] // h
        if w.shape[1] != parts * d_o:
            raise ValueError(
                f"w_qkv has {w.shape[1]} columns; expected {parts * d_o}, (H + 2 Hkv)·D with the "
                f"D = {d_o} of w_o"
            )
    elif rest:
        raise ValueError(
            f"w_qkv has {w.shape[1]} columns; expected (H + 2 Hkv)·D, a multiple of {parts} such as "
            f"{parts * max(d, 1)}"
        )
    cuts = [h * d, (h + hkv) * d]
    biases = [None, None, None]
    if b_qkv is not None:
        b = _operand(b_qkv, "b_qkv", 1)
        if b.shape != w.shape[1:]:
            raise ValueError(f"b_qkv has shape {b.shape}; expected {w.shape[1:]}")
        biases = np.split(b, cuts)
    return np.split(w, cuts, axis=1), biases


def sequence(x: ArrayLike, name: str, layer: Projections, part: str) -> Array:
    """Check a sequence (..., L, d_in) against the weight that is to project it."""
    x = _operand(x, name, 2)
    w = layer.weights[part]
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{name} has shape {x.shape}; expected (..., {w.shape[0]}), the d_in of w_{part}"
        )
    _same_dtype(**{name: x, f"w_{part}": w})
    return x


def projected_call(
    x: Array, k: Array, v: Array, layer: Projections, options: dict[str, Any], name: str
) -> tuple[Array | None, dict[str, Any]]:
    """Check what only a layer's call knows; returns its out, and the options of the attention call."""
    unknown = options.keys() - set(_OPTIONS)
    if unknown:
        raise TypeError(
            f"{min(unknown)!r} is no option of a projection call; expected {', '.join(_OPTIONS)}"
        )
    if k.ndim != x.ndim + 1 or v.ndim != k.ndim:
        raise ValueError(
            f"{name} has shape {x.shape}, the projected keys {k.shape}; expected the same number "
            "of leading axes"
        )
    try:
        lead = np.broadcast_shapes(x.shape[:-2], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            f"{name} has shape {x.shape}, the projected keys {k.shape}; their leading axes do not "
            "broadcast"
        ) from None
    scores = (*lead, layer.num_heads, x.shape[-2], k.shape[-2])
    if options.get("mask") is not None:  # the batch axis that x (L, d_in) gets is not the caller's
        options["mask"] = _mask(options["mask"], scores, x.dtype)
    out = options.pop("out", None)
    if out is not None:
        w_o = layer.weights["o"]
        width = layer.num_heads * v.shape[-1] if w_o is None else w_o.shape[1]
        _target(out, (*lead, x.shape[-2], width), x.dtype)
    return out, options


def softmax(
    x: ArrayLike, axis: int, out: Array | None, threads: int | None, backend: str | None
) -> tuple[_backends.Backend, Rows, Results]:
    """Check a call of softmax."""
    x = _operand(x, "x", 0)
    if x.ndim == 0:
        raise ValueError("x has shape (); expected at least 1 axis")
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"axis is {axis!r}; expected an integer")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}; expected one of the {x.ndim} axes of x {x.shape}")
    chosen = _backends.choose(backend, x.dtype)
    output, staged = _target(out, x.shape, x.dtype, x)
    last = axis in (-1, x.ndim - 1)
    if staged is None and not (last and output.flags.c_contiguous):
        staged = np.empty(x.shape, x.dtype)
    rows = np.ascontiguousarray(x if last else np.moveaxis(x, axis, -1))
    target = output if staged is None else staged
    if not last:
        target = np.empty(rows.shape, x.dtype)
        staged = np.moveaxis(target, -1, axis)
    return chosen, Rows(rows, target, _backends.threads_of(threads)), Results((output,), staged)
