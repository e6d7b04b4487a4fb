"""The path of a layer's call: project, rotate, append, attend, project out.

    Q = X W_Q     K = C W_K     V = C W_V          C is a context, or X itself
    Q and K normed, where the layer does that, and turned by the angles of their positions, where
    there are rotary tables
    K and V appended to a cache, where there is one, and taken from it
    heads = softmax(scale Q Kᵀ) V
    output = heads side by side, times W_O

Everything is checked once, before anything is computed; then the inner doors are called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qkv_ext._cache import _check_cache
from qkv_ext._cache._store import Pages
from qkv_ext._core import _backends, _check, _problem, _rules
from qkv_ext._core._arrays import FLOAT32, Array
from qkv_ext._core._backends import Backend
from qkv_ext._core._check import Checked
from qkv_ext._core._check_rotary import rounded
from qkv_ext._core._options import Given
from qkv_ext._core._packed import PackedWeight
from qkv_ext._core._problem import Norm, Problem, Rotation, Scoring, Sizes
from qkv_ext._core._threads import threads_of
from qkv_ext._layers import _check_layer
from qkv_ext._layers._check_layer import GivenRotary, ProjectedKV, Rotary
from qkv_ext._layers._weights import Projections

new = tuple.__new__  #: makes a NamedTuple in half the time
FEW_ROWS = 64  #: up to which one product is faster than three


class Call(NamedTuple):
    """A checked call of a layer."""

    layer: Projections
    given: Given
    x: Array  # (..., L, d_in)
    sizes: Sizes
    scoring: Scoring
    backend: Backend
    threads: int

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of the output; a packed batch (T, d_in) has none."""
        return self.sizes.lead if self.sizes.packed is None else ()


def with_own(layer: Projections, given: Given) -> Given:
    """The options with the scale and the sinks of the layer where the call gives none."""
    if given.scale is None and layer.scale is not None:
        given = given._replace(scale=layer.scale)
    if given.sinks is None and layer.sinks is not None:
        given = given._replace(sinks=layer.sinks)
    return given


def prepare(layer: Projections, given: Given, x: Array, sizes: Sizes) -> Call:
    """Check the options of a call, whose arrays are checked."""
    if layer.scale is not None or layer.sinks is not None:
        given = with_own(layer, given)
    scoring = _rules.options(given, sizes)
    _check.feasible(sizes, scoring.rules.spans)
    if given.out is not None:
        _check_layer.output(given.out, layer, sizes)
    backend = _backends.choose(given.backend, x.dtype)
    return new(Call, (layer, given, x, sizes, scoring, backend, threads_of(given.threads)))


# ---- the parts ----------------------------------------------------------------------------------


def linear(
    x: Array, w: Any, b: Array | None, backend: Backend, threads: int, out: Array | None = None
) -> Array:
    """X W + b, of arrays that are checked."""
    if out is None and x.dtype is FLOAT32:  # most arrays can be taken as they are
        matrix, columns = (w.panels, w.shape[1]) if isinstance(w, PackedWeight) else (w, 0)
        plain: Array | None = backend.plain_product(x, matrix, b, columns, 1, threads)
        if plain is not None:
            return plain
    product, arrays, copies = _check.product(x, w, b, out, threads)
    backend.product(product)
    output: Array = _backends.finish(arrays, copies)
    return output


def project(layer: Projections, part: str, x: Array, backend: Backend, threads: int) -> Array:
    """X W + b for W_Q, W_K or W_V, heads before the length: (..., L, d_in) -> (..., H, L, D)."""
    flat = linear(x, layer.weights[part], layer.biases[part], backend, threads)
    return by_head(layer, part, flat, backend, threads)


def by_head(layer: Projections, part: str, flat: Array, backend: Backend, threads: int) -> Array:
    """(..., L, H·D) as (..., H, L, D), and normed in place where the layer does that."""
    heads = layer.num_heads if part == "q" else layer.num_kv_heads
    width = layer.v_dim if part == "v" else layer.head_dim
    norm = layer.norms.get(part)
    if norm is not None and len(norm) != width:
        backend.norm(Norm(flat, norm, None, layer.norm_eps, False, flat, threads))
    rows = flat.reshape(*flat.shape[:-1], heads, width).swapaxes(-3, -2)
    if norm is not None and len(norm) == width:
        backend.norm(Norm(rows, norm, None, layer.norm_eps, False, rows, threads))
    return rows


def project_all(
    layer: Projections, x: Array, values: Array, backend: Backend, threads: int
) -> list[Array]:
    """Q, K and V of a sequence; those of few rows by one product, with the same bits."""
    joined = layer.joined
    if joined is None or values is not x or x.size > FEW_ROWS * x.shape[-1]:
        each = zip("qkv", (x, x, values), strict=True)
        return [project(layer, part, of, backend, threads) for part, of in each]
    flat = linear(x, joined.weight, joined.bias, backend, threads)
    return [
        by_head(layer, part, flat[..., joined.columns[part]], backend, threads) for part in "qkv"
    ]


def project_kv(
    layer: Projections, context: Array, values: Array, backend: Backend, threads: int
) -> ProjectedKV:
    """K and V of checked contexts (..., S, d_ctx), which may be one."""
    k = project(layer, "k", context, backend, threads)
    return ProjectedKV(k, project(layer, "v", values, backend, threads))


def rotate(
    call: Call,
    rotary: Rotary,
    q: Array,
    k: Array,
    *,
    own_k: bool,
    of_x: bool,
    before: list[int] | None = None,
) -> tuple[Array, Array]:
    """Q and K, with a batch axis, turned by the angles of their positions.

    Q is written over, and so is K where own_k says that it is the call's own.  of_x: K is of the
    same sequence as Q.
    """
    at_q, at_k = _rules.positions(call.scoring, call.sizes, before)
    tables_q = tables_k = rotary
    if rotary.positions is not None:
        there = _rules.rows_there(call.scoring, call.sizes)
        tables_q, at_q = _check_layer.own_positions(rotary, call.lead, call.sizes.length, there)
        if of_x:
            tables_k, at_k = tables_q, at_q
    _check_layer.covered(len(tables_q.cos), "queries", at_q)
    _check_layer.covered(len(tables_k.cos), "keys", at_k)
    own_q = True
    if isinstance(at_q, np.ndarray) and at_q.ndim > 1 and len(q) != len(at_q):
        q, own_q = np.broadcast_to(q, (len(at_q), *q.shape[1:])), False  # items that share one x
    of_q, of_k = _angles(tables_q, at_q, q), _angles(tables_k, at_k, k)
    out_q = q if own_q else np.empty(q.shape, q.dtype)
    out_k = k if own_k else np.empty(k.shape, k.dtype)
    call.backend.rotary_step(
        new(Rotation, (q, *of_q, rotary.interleaved, out_q, call.threads)),
        new(Rotation, (k, *of_k, rotary.interleaved, out_k, call.threads)),
    )
    return out_q, out_k


def _angles(rotary: Rotary, at: range | Array, x: Array) -> tuple[Array, Array, Array | None]:
    """The tables for x (..., L, D), and the rows of them that its own are turned by."""
    cos, sin = rotary.cos, rotary.sin
    if not isinstance(at, range):
        return rounded(cos, sin, at, x.shape[-2], x.dtype)
    rows = slice(at.start, max(at.stop, 0))
    return rounded(cos[rows], sin[rows], None, x.shape[-2], x.dtype)


def attention(
    call: Call, q: Array, k: Array | None, v: Array | None, pages: Pages | None = None
) -> tuple[Checked[Problem], Array]:
    """The problem, and the heads (..., L, H, Dv) that are its output."""
    sizes = call.sizes
    heads = np.empty((*(call.lead or (1,)), sizes.length, sizes.h, sizes.dv), q.dtype)
    out = heads.swapaxes(-3, -2)
    return _check.problem(q, k, v, out, sizes, call.given, call.scoring, pages), heads


def output_projection(call: Call, heads: Array) -> Array:
    """The heads (..., L, H, Dv) side by side, times W_O if there is one."""
    layer, sizes = call.layer, call.sizes
    out: Array | None = call.given.out
    flat = heads.reshape(*call.lead, sizes.length, sizes.h * sizes.dv)
    if layer.weights["o"] is None:
        if out is None:
            return flat
        out[...] = flat
        return out
    output = linear(flat, layer.weights["o"], layer.biases["o"], call.backend, call.threads, out)
    if call.given.q_lengths is not None:
        _clear_padding(output, call)
    return output


def _clear_padding(output: Array, call: Call) -> None:
    """Padding rows are 0: W_O would make b_o of their zeros."""
    spans, lead = call.scoring.rules.spans, call.sizes.lead
    assert spans is not None
    lengths = spans[:, _problem.Q_LENGTH].tolist()
    for index, length in zip(np.ndindex(lead), lengths, strict=True):
        output[index][length:] = 0


# ---- the calls ----------------------------------------------------------------------------------


CALLED = ("x", "context", "value_context")  #: how a layer's call names what it is given


class Sequences(NamedTuple):
    """What a call is given to project, unchecked, and how errors name it."""

    x: Any
    context: Any = None  # None is x itself
    values: Any = None  # None is the context
    kv: ProjectedKV | None = None  # checked, in the place of both
    cu_seqlens: Any = None  # of a packed batch
    cu_seqlens_context: Any = None
    names: tuple[str, str, str] = CALLED


def sequences(
    layer: Projections, of: Sequences, given: Given
) -> tuple[Call, Array | None, Array | None]:
    """Check what a call is given: x in the call, and what K and V are projected from."""
    x_name, context_name, _ = of.names
    context = values = None
    if of.kv is not None:
        k = of.kv.k.shape
        x = _check_layer.sequence(of.x, x_name, layer, "q")
    elif of.context is None:  # errors tell of keys before they do of queries
        x = context = _check_layer.sequence(of.x, x_name, layer, "k")
        x = _check_layer.sequence(x, x_name, layer, "q")
    else:
        context = _check_layer.sequence(of.context, context_name, layer, "k")
        x = _check_layer.sequence(of.x, x_name, layer, "q")
    if context is not None:
        name = context_name if of.context is not None else x_name
        values = _check_layer.values(of.values, of.names[2], context, name, layer)
        k = *context.shape[:-2], layer.num_kv_heads, context.shape[-2], layer.head_dim
    sizes = _check_layer.sizes(layer, x, x_name, k)
    if of.cu_seqlens is not None or of.cu_seqlens_context is not None:
        alone = of.context is None and of.kv is None
        sizes = _check_layer.packed(of.cu_seqlens, of.cu_seqlens_context, alone, sizes, given)
    return prepare(layer, given, x, sizes), context, values


def forward(layer: Projections, of: Sequences, given: Given, rotary: Rotary | None = None) -> Any:
    """Attention of x to a context, or to keys and values that are projected already."""
    call, context, values = sequences(layer, of, given)
    if of.kv is not None:
        k, v = of.kv
    else:
        assert context is not None
        assert values is not None
        k, v = project_kv(layer, context, values, call.backend, call.threads)
    q = project(layer, "q", call.x, call.backend, call.threads)
    if not call.lead:
        q, k, v = q[None], k[None], v[None]
    if rotary is not None:
        of_x = of.kv is None and of.context is None
        q, k = rotate(call, rotary, q, k, own_k=of.kv is None, of_x=of_x)
    (problem, extras, copies), heads = attention(call, q, k, v)
    call.backend.attention(problem)
    return _backends.finish((output_projection(call, heads), *extras), copies)


def step(
    layer: Projections, x: Any, values: Any, cache: Any, given: Given, rotary: GivenRotary
) -> Any:
    """Append the keys and values of x to a KVCache, and attend to all that are there.

    One step for the threads that share the cache; if it fails the cache is as it was.
    """
    with cache._locked():
        store = cache._store
        if rotary.positions is rotary.sections is values is None and not any(store.dropped):
            # most steps are of few rows, and give no option
            pages, plain = store.pages(), _backends.default_backend(given.backend).plain_step
            done = plain(
                x, layer, *rotary[:3], pages, store.until, given, threads_of(given.threads)
            )
            if done is not None:
                output, lengths, large_scales = done
                store.grow(lengths, large_scales)
                return output
        tables = _check_layer.rotary(rotary, layer)
        x, counts, sizes = _check_layer.cached_call(x, cache, layer, given)
        values = _check_layer.values(values, "value_context", x, "x", layer)
        call, before = prepare(layer, given, x, sizes), store.lengths
        if any(store.dropped):
            _check_cache.kept(sizes, call.scoring, store.dropped, [
                there + count for there, count in zip(before, counts, strict=True)
            ])  # fmt: skip
        backend, threads = call.backend, call.threads
        q, k, v = project_all(layer, x, values, backend, threads)
        if not sizes.lead:
            q, k, v = q[None], k[None], v[None]
        if tables is not None:
            q, k = rotate(call, tables, q, k, own_k=True, of_x=True, before=before)
        try:
            store.append(k, v, counts, backend.append, threads)
            (problem, extras, copies), heads = attention(call, q, None, None, store.pages())
            backend.attention(problem)
            output = output_projection(call, heads)
            return _backends.finish((output, *extras), copies)
        except BaseException:
            store.truncate(before)
            raise
