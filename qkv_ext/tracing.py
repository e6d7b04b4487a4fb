"""Attention step by step: every intermediate array by its name, to be looked at.

    scores = Q Kᵀ     scaled = scale scores     capped = softcap tanh(scaled / softcap)
    masked = capped - ALiBi + mask, and -inf where a key is excluded
    weights = softmax(masked)     output = weights V

It is plain NumPy in the order of the formula, for learning and debugging, and holds every (L, S)
array at once.  The arguments go through the same front door as those of the fast functions, so that
they mean the same.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _arrays, _backends, _check, _numpy, _problem
from qkv_ext._core._blas import held_to_threads
from qkv_ext._core._check import Checked
from qkv_ext._core._options import PROJECTION, TRACE, Given, LayoutOptions, Options, shows, take
from qkv_ext._core._problem import Problem
from qkv_ext._layers import _forward, _weights
from qkv_ext._layers._weights import Projections
from qkv_ext.projected import Weight

Array = NDArray[Any]

__all__ = ["trace", "trace_cross", "trace_self"]


@shows(LayoutOptions)
def trace(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[LayoutOptions]
) -> dict[str, Array]:
    """Every step of ``scaled_dot_product_attention`` as a named array.

    Parameters
    ----------
    q, k, v : array (..., H, L, D), (..., Hkv, S, D), (..., Hkv, S, Dv)
    **options
        As in ``scaled_dot_product_attention``.
    threads, backend : optional
        Checked as everywhere; the steps are computed in NumPy.

    Returns
    -------
    dict of str to array
        In the order in which they are computed:

        ========  ================  =============================================================
        Q         (..., H, L, D)    q, k and v as they were given
        K         (..., Hkv, S, D)
        V         (..., Hkv, S, Dv)
        scores    (..., H, L, S)    Q Kᵀ; query head h with key head h // (H / Hkv)
        scaled    (..., H, L, S)    (scale Q) Kᵀ
        capped    (..., H, L, S)    softcap · tanh(scaled / softcap); scaled where there is none
        masked    (..., H, L, S)    less ALiBi, plus a float mask; -inf where a key is excluded
        weights   (..., H, L, S)    softmax of masked, sinks in the denominator
        output    (..., H, L, Dv)   weights V
        lse       (..., H, L)       log of the denominator
        ========  ================  =============================================================

        Q, K, V and output have the layout of q; at rank 2 and 3 there is no H.

    Raises
    ------
    TypeError, ValueError
        As ``scaled_dot_product_attention`` does.

    Notes
    -----
    output, weights and lse are those of the fast functions, within rounding, empty rows and
    non-finite numbers included.  The dtypes are theirs too: for float16 and bfloat16 the steps
    before the weights are float32.  Large Q and K may overflow in scores, which nothing else is
    computed from, but not in scaled.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> q = np.float32([[1, 0], [0, 1]])
    >>> steps = qkv_ext.trace(q, q, q, causal=True, scale=1)
    >>> list(steps)
    ['Q', 'K', 'V', 'scores', 'scaled', 'capped', 'masked', 'weights', 'output', 'lse']
    >>> steps["masked"]
    array([[  1., -inf],
           [  0.,   1.]], dtype=float32)
    >>> steps["weights"].sum(axis=-1)
    array([1., 1.], dtype=float32)

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1.
    """
    given = take(options, "trace", TRACE, True, True)
    # as a whole, rows past the lengths too: they are shown
    q, k, v = _arrays.operand(q, "q", 2), _arrays.operand(k, "k", 2), _arrays.operand(v, "v", 2)
    checked = _check.attention(q, k, v, given)
    _backends.choose("numpy" if given.backend is None else given.backend, q.dtype)
    return _named(checked, q.ndim, given.layout == "blhd")


def _named(checked: Checked[Problem], rank: int, blhd: bool = False) -> dict[str, Array]:
    """The steps of a problem with weights and lse, without the axes that a low rank was given."""
    problem, arrays, copies = checked

    def as_given(x: Array, rows: bool = False) -> Array:
        """Rows are in the layout of q."""
        if rank < 4:
            return x[0, 0] if rank == 2 else x[:, 0]
        return x.swapaxes(-3, -2) if rows and blhd else x

    with np.errstate(all="ignore"):  # NaN, inf and underflow are results here, not accidents
        steps = _steps(problem)
    given = {"Q": problem.q, "K": problem.k, "V": problem.v}
    output, weights, lse = _backends.finish(arrays, copies)
    return (
        {name: as_given(x, rows=True) for name, x in given.items()}
        | {name: as_given(x) for name, x in steps.items()}
        | {"weights": weights, "output": output, "lse": lse}
    )


@held_to_threads
def _steps(problem: Problem) -> dict[str, Array]:
    """The steps before the weights; weights, output and lse are written where the problem says."""
    lead, h = problem.out.shape[:-3], problem.out.shape[-3]
    assert problem.weights is not None
    assert problem.lse is not None
    compute = problem.lse.dtype
    q, k, v = (
        np.broadcast_to(x, (*lead, *x.shape[-3:])).astype(compute)
        for x in (problem.q, problem.k, problem.v)
    )
    group = h // max(1, k.shape[-3])  # query head h uses key head h // group
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    allowed, distance = _order(problem)

    scores = q @ k.swapaxes(-1, -2)
    # the scale on Q, not on the product: that may overflow where the scaled one does not
    scaled = (q * compute.type(problem.scale)) @ k.swapaxes(-1, -2)

    capped = _numpy.capped(scaled, problem.rules)
    slopes = problem.rules.slopes
    if slopes is not None:
        slopes = np.broadcast_to(slopes, (math.prod(lead), h)).reshape(*lead, h, 1, 1)
    masked, kept = _numpy.masked(capped.copy(), slopes, distance, problem.mask, allowed)
    assert kept is not None
    allowed = kept

    # softmax over the allowed keys; a sink is one more logit, without a key
    empty = ~allowed.any(axis=-1, keepdims=True)
    top = masked.max(axis=-1, keepdims=True, initial=-np.inf)
    sink: Any = compute.type(-np.inf)
    if problem.rules.sinks is not None:
        sink = problem.rules.sinks.reshape(h, 1, 1)
        top = np.maximum(top, sink)
    terms = np.where(allowed, np.exp(masked - top), 0)
    total = terms.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    weights = np.where(allowed, terms / total, 0)
    lse = np.where(empty, sink, top + np.log(total))
    lse = np.where(_is_row(problem), lse, -np.inf)  # padding has no lse, with sinks too

    problem.out[...] = _weighted_sum(weights, allowed, v)
    problem.weights[...] = weights
    problem.lse[...] = lse[..., 0]
    return {"scores": scores, "scaled": scaled, "capped": capped, "masked": masked}


def _column(problem: Problem, name: int, otherwise: int) -> Any:
    """One column of the spans as (..., 1, 1, 1), or what holds where the items have none."""
    spans = problem.rules.spans
    return otherwise if spans is None else spans[:, name].reshape(*problem.out.shape[:-3], 1, 1, 1)


def _is_row(problem: Problem) -> Any:
    """(..., 1, L, 1) bool: whether a query is there, and no padding."""
    length = problem.out.shape[-2]
    return np.arange(length)[:, None] < _column(problem, _problem.Q_LENGTH, length)


def _order(problem: Problem) -> tuple[Array, Array]:
    """(..., H or 1, L, S): the keys that all but the mask allows, and how far each is behind.

    Both count from the first key of the array: query i stands at i + diagonal, key j at j.
    """
    s = problem.k.shape[-2]
    i, j = np.arange(problem.out.shape[-2])[:, None], np.arange(s)
    distance = i + _column(problem, _problem.DIAGONAL, problem.diagonal) - j
    there = _is_row(problem) & (j < _column(problem, _problem.K_LENGTH, s))
    seen = _numpy.seen_keys(problem, ..., slice(None), slice(0, problem.out.shape[-2]))
    if seen is not None:
        there = there & seen
    return there & _numpy.in_order(problem.rules, distance), distance


def _weighted_sum(weights: Array, allowed: Array, v: Array) -> Array:
    """Weights times V over the allowed keys.

    0 · NaN is NaN, so that an excluded key could be felt.  What is not finite in V is therefore
    left out of the product, and added for those rows that are allowed its key.
    """
    finite = np.isfinite(v)
    output: Array = weights @ np.where(finite, v, 0)
    everywhere = np.asarray(finite.all(axis=(*range(v.ndim - 2), -1)))
    for j in np.nonzero(~everywhere)[0]:
        rest = np.where(finite[..., j, :], 0, v[..., j, :])[..., None, :]
        output += np.where(allowed[..., j, None], weights[..., j, None] * rest, 0)
    return output


@shows(Options)
def trace_self(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    **options: Unpack[Options],
) -> dict[str, Array]:
    """Every step of ``self_attention`` as a named array, the projections included.

    Parameters
    ----------
    x, w_q, w_k, w_v, w_o, num_heads, num_kv_heads, b_q, b_k, b_v, b_o
        As in ``self_attention``.
    **options
        As in ``self_attention``.

    Returns
    -------
    dict of str to array
        X (..., L, d_in), then the steps of ``trace`` with a head axis: Q = X W_Q is (..., H, L, D),
        scores (..., H, L, L) and so on, also for x (L, d_in).  heads (..., H, L, Dv) is what each
        head found, and output (..., L, d_out) all of them side by side, projected by w_o.

    Raises
    ------
    TypeError, ValueError
        As ``self_attention`` does.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((4, 8), "f4"), rng.standard_normal((3, 8, 8), "f4")
    >>> steps = qkv_ext.trace_self(x, *w, num_heads=2)
    >>> {name: steps[name].shape for name in ("X", "Q", "scores", "output")}
    {'X': (4, 8), 'Q': (2, 4, 4), 'scores': (2, 4, 4), 'output': (4, 8)}

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2.
    """
    given = take(options, "trace_self", PROJECTION, True, True)
    layer = _weights.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    return _of_layer(layer, {"X": x}, given)


@shows(Options)
def trace_cross(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    **options: Unpack[Options],
) -> dict[str, Array]:
    """Every step of ``cross_attention`` as a named array, the projections included.

    Parameters
    ----------
    x_dec, x_enc, w_q, w_k, w_v, w_o, num_heads, num_kv_heads, b_q, b_k, b_v, b_o
        As in ``cross_attention``.
    **options
        As in ``cross_attention``.

    Returns
    -------
    dict of str to array
        X_dec (..., L, d_in) and X_enc (..., S, d_enc), then the same as ``trace_self``.

    Raises
    ------
    TypeError, ValueError
        As ``cross_attention`` does.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> x_dec, x_enc, w = np.ones((4, 8), "f4"), np.ones((6, 8), "f4"), np.ones((3, 8, 8), "f4")
    >>> qkv_ext.trace_cross(x_dec, x_enc, *w)["weights"].shape
    (1, 4, 6)

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3.
    """
    given = take(options, "trace_cross", PROJECTION, True, True)
    layer = _weights.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    return _of_layer(layer, {"X_dec": x_dec, "X_enc": x_enc}, given)


def _of_layer(layer: Projections, given: dict[str, ArrayLike], options: Given) -> dict[str, Array]:
    """The steps of a layer, for the names and the arrays of its sequences: one, or two."""
    if options.backend is None:
        options = options._replace(backend="numpy")
    asks, *_, is_asked = *given, *given
    names = (asks.lower(), is_asked.lower(), "")
    other = given[is_asked] if is_asked is not asks else None
    of = _forward.Sequences(given[asks], other, names=names)
    call, context, values = _forward.sequences(layer, of, options)
    assert context is not None
    assert values is not None
    q = _forward.project(layer, "q", call.x, call.backend, call.threads)
    k, v = _forward.project_kv(layer, context, values, call.backend, call.threads)
    if not call.sizes.lead:
        q, k, v = q[None], k[None], v[None]
    (problem, extras, copies), heads = _forward.attention(call, q, k, v)
    steps = _named((problem, (problem.out, *extras), copies), 4)
    if not call.sizes.lead:
        steps = {name: x if x is extras[0] or x is extras[1] else x[0] for name, x in steps.items()}
    attended, lse = steps.pop("output"), steps.pop("lse")
    output = _forward.output_projection(call, heads)
    sequences = {asks: call.x, is_asked: context}
    return {**sequences, **steps, "heads": attended, "output": output, "lse": lse}
