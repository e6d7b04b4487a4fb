"""Attention with its projections: Q = X W_Q, K = X W_K, V = X W_V, heads, and W_O."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext import _layers
from qkv_ext._layers import Projections
from qkv_ext._packed import PackedWeight
from qkv_ext.attention import Options, scaled_dot_product_attention
from qkv_ext.linear import linear_projection, pack_weight

Array = NDArray[Any]
Weight = ArrayLike | PackedWeight

__all__ = ["MultiHeadAttention", "ProjectedKV", "cross_attention", "self_attention"]


class ProjectedKV(NamedTuple):
    """Keys (..., Hkv, S, D) and values (..., Hkv, S, Dv) of a context, projected once."""

    k: Array
    v: Array


def _project(layer: Projections, part: str, x: Array, options: Options) -> Array:
    """X W + b for W_Q, W_K or W_V, heads before the length: (..., L, d_in) -> (..., H, L, D)."""
    heads = layer.num_heads if part == "q" else layer.num_kv_heads
    w, b = layer.weights[part], layer.biases[part]
    flat = linear_projection(
        x, w, b, threads=options.get("threads"), backend=options.get("backend")
    )
    return flat.reshape(*flat.shape[:-1], heads, w.shape[1] // heads).swapaxes(-3, -2)


def _project_kv(layer: Projections, context: ArrayLike, name: str, options: Options) -> ProjectedKV:
    context = _layers.sequence(context, name, layer, "k")
    return ProjectedKV(
        _project(layer, "k", context, options), _project(layer, "v", context, options)
    )


def _attend(
    layer: Projections,
    x: ArrayLike,
    kv: ProjectedKV,
    return_weights: bool,
    return_lse: bool,
    options: Options,
    name: str = "x",
) -> Any:
    """Project x to Q, attend to kv, lay the heads side by side, and project by W_O if there is one.

    Everything has a head axis here, also for x (L, d_in): a batch axis is put before it, and taken
    off what is returned.
    """
    x = _layers.sequence(x, name, layer, "q")
    out, rest = _layers.projected_call(x, kv.k, kv.v, layer, dict(options), name)
    q, k, v = _project(layer, "q", x, options), kv.k, kv.v
    if single := x.ndim == 2:
        q, k, v = q[None], k[None], v[None]
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    heads, length, dv = layer.num_heads, q.shape[-2], v.shape[-1]
    merged = np.empty((*lead, length, heads, dv), q.dtype)
    rest |= {"return_weights": return_weights, "return_lse": return_lse}
    extras: Any = scaled_dot_product_attention(q, k, v, out=merged.swapaxes(-3, -2), **rest)
    output = merged.reshape(*lead, length, heads * dv)
    if single:
        output = output[0]
        extras = tuple(extra[0] for extra in extras) if isinstance(extras, tuple) else extras
    if layer.weights["o"] is not None:
        output = linear_projection(
            output, layer.weights["o"], layer.biases["o"], out=out,
            threads=options.get("threads"), backend=options.get("backend"),
        )  # fmt: skip
    elif out is not None:
        out[...] = output
        output = out
    return (output, *extras[1:]) if isinstance(extras, tuple) else output


class MultiHeadAttention:
    """A multi-head attention layer, its weights packed once.

    ``softmax(Q Kᵀ / √D) V`` per head with Q = X W_Q + b_Q and so on, the heads side by side, then
    W_O.

    Parameters
    ----------
    w_q : array or PackedWeight (d_in, H·D)
    w_k : array or PackedWeight (d_ctx, Hkv·D)
    w_v : array or PackedWeight (d_ctx, Hkv·Dv)
    w_o : array or PackedWeight (H·Dv, d_out), optional
    b_q, b_k, b_v, b_o : array, optional
        Biases of the four projections.
    num_heads, num_kv_heads : int
        H and Hkv; Hkv is H by default, and divides it.

    Raises
    ------
    TypeError, ValueError
        Weights whose dtypes or shapes do not fit each other or the heads.

    Notes
    -----
    A layer holds no state beyond its weights: it can be called from several threads and pickled.
    Numerics are those of ``linear_projection`` and ``scaled_dot_product_attention``.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> w = rng.standard_normal((4, 8, 8), "f4")
    >>> mha = qkv_ext.MultiHeadAttention(*w, num_heads=2)
    >>> x = rng.standard_normal((3, 5, 8), "f4")
    >>> mha(x, causal=True).shape
    (3, 5, 8)

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2.
    """

    __slots__ = ("_layer",)

    def __init__(
        self,
        w_q: Weight,
        w_k: Weight,
        w_v: Weight,
        w_o: Weight | None = None,
        *,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        num_heads: int,
        num_kv_heads: int | None = None,
    ) -> None:
        layer = _layers.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
        packed = {
            part: w if w is None or isinstance(w, PackedWeight) else pack_weight(w)
            for part, w in layer.weights.items()
        }
        self._layer = layer._replace(weights=packed)

    @classmethod
    def from_fused(
        cls,
        w_qkv: ArrayLike,
        w_o: Weight | None = None,
        *,
        b_qkv: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        num_heads: int,
        num_kv_heads: int | None = None,
    ) -> MultiHeadAttention:
        """A layer from one matrix (d_in, (H + 2 Hkv)·D) with the columns of Q, then K, then V.

        Parameters
        ----------
        w_qkv : array (d_in, (H + 2 Hkv)·D)
            H·D columns of W_Q, Hkv·D of W_K, Hkv·D of W_V: no equal thirds under GQA.
        b_qkv : array ((H + 2 Hkv)·D,), optional
        w_o, b_o, num_heads, num_kv_heads
            As for the class.

        Raises
        ------
        ValueError
            A width that the heads do not divide, or that w_o contradicts, with the width expected.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> w = np.zeros((8, 32), "f4")
        >>> qkv_ext.MultiHeadAttention.from_fused(w, num_heads=2, num_kv_heads=1)
        MultiHeadAttention(d_in=8, num_heads=2, num_kv_heads=1, head_dim=8, d_out=16)
        """
        w, b = _layers.fused(w_qkv, b_qkv, w_o, num_heads, num_kv_heads)
        (w_q, w_k, w_v), (b_q, b_k, b_v) = w, b
        biases = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
        return cls(w_q, w_k, w_v, w_o, **biases, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def project_kv(
        self, context: ArrayLike, *, threads: int | None = None, backend: str | None = None
    ) -> ProjectedKV:
        """K and V of a context (..., S, d_ctx), to be passed as ``kv=`` to many calls.

        Returns
        -------
        ProjectedKV
            k (..., Hkv, S, D) and v (..., Hkv, S, Dv).
        """
        options: Options = {"threads": threads, "backend": backend}
        return _project_kv(self._layer, context, "context", options)

    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        kv: ProjectedKV | None = None,
        return_weights: bool = False,
        return_lse: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Self-attention of x, or attention of x to a context.

        Parameters
        ----------
        x : array (..., L, d_in)
        context : array (..., S, d_ctx), optional
            What keys and values are projected from; x by default.
        kv : ProjectedKV, optional
            Keys and values that are projected already, instead of a context.
        return_weights, return_lse : bool
            Return the weights (..., H, L, S) and the log-sum-exp (..., H, L) as well.
        **options
            mask, causal, align, scale, threads, backend as in ``scaled_dot_product_attention``.
            out is the final (..., L, d_out).

        Returns
        -------
        output : array (..., L, d_out)
            d_out is H·Dv without w_o.  With extras, a tuple in the order output, weights, lse.

        Raises
        ------
        TypeError, ValueError
            As ``scaled_dot_product_attention`` does; both context and kv.
        """
        if kv is None:
            name = "x" if context is None else "context"
            kv = _project_kv(self._layer, x if context is None else context, name, options)
        elif context is not None:
            raise ValueError("context and kv are both given; expected one of them")
        else:
            kv = ProjectedKV(*_layers.projected_kv(kv, self._layer))
        return _attend(self._layer, x, kv, return_weights, return_lse, options)

    def __repr__(self) -> str:
        layer = self._layer
        d_in, width = layer.weights["q"].shape
        d_out = (layer.weights["o"] or layer.weights["v"]).shape[1]
        if layer.weights["o"] is None:
            d_out = d_out // layer.num_kv_heads * layer.num_heads
        return (
            f"MultiHeadAttention(d_in={d_in}, num_heads={layer.num_heads}, "
            f"num_kv_heads={layer.num_kv_heads}, head_dim={width // layer.num_heads}, "
            f"d_out={d_out})"
        )


def self_attention(
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
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Multi-head self-attention: Q = X W_Q, K = X W_K, V = X W_V, attention, then W_O.

    Parameters
    ----------
    x : array (..., L, d_in)
        The sequence that gives queries, keys and values.
    w_q, w_k, w_v : array or PackedWeight, (d_in, H·D), (d_in, Hkv·D), (d_in, Hkv·Dv)
        Head h owns the columns h·D to (h + 1)·D.
    w_o : array or PackedWeight (H·Dv, d_out), optional
        Without it the heads are laid side by side.
    num_heads, num_kv_heads : int
        H and Hkv; Hkv is H by default.
    b_q, b_k, b_v, b_o : array, optional
        Biases of the four projections.
    return_weights, return_lse : bool
        Return the weights (..., H, L, L) and the log-sum-exp (..., H, L) as well.
    **options
        mask, causal, align, scale, threads, backend as in ``scaled_dot_product_attention``; masks
        broadcast to (..., H, L, L).  out is the final (..., L, d_out).

    Returns
    -------
    output : array (..., L, d_out)
        d_out is H·Dv without w_o.  With extras, a tuple in the order output, weights, lse.

    Raises
    ------
    TypeError, ValueError
        As ``linear_projection`` and ``scaled_dot_product_attention`` do, and where the width of a
        weight is no multiple of its heads.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((4, 8), "f4"), rng.standard_normal((3, 8, 8), "f4")
    >>> output, weights = qkv_ext.self_attention(x, *w, num_heads=2, return_weights=True)
    >>> output.shape, weights.shape
    ((4, 8), (2, 4, 4))

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.
    """
    layer = _layers.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    kv = _project_kv(layer, x, "x", options)
    return _attend(layer, x, kv, return_weights, return_lse, options)


def cross_attention(
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
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Multi-head cross-attention: Q = X_dec W_Q; K = X_enc W_K, V = X_enc W_V; attention, W_O.

    Parameters
    ----------
    x_dec : array (..., L, d_in)
        The sequence that asks.
    x_enc : array (..., S, d_enc)
        The sequence that is asked, of the rank of x_dec.
    w_q, w_k, w_v : array or PackedWeight, (d_in, H·D), (d_enc, Hkv·D), (d_enc, Hkv·Dv)
        Head h owns the columns h·D to (h + 1)·D.
    w_o, num_heads, num_kv_heads, b_q, b_k, b_v, b_o, return_weights, return_lse, **options
        As in ``self_attention``; weights are (..., H, L, S).

    Returns
    -------
    output : array (..., L, d_out)
        With extras, a tuple in the order output, weights, lse.

    Raises
    ------
    TypeError, ValueError
        As in ``self_attention``.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> x_dec, x_enc = rng.standard_normal((4, 8), "f4"), rng.standard_normal((6, 5), "f4")
    >>> w_q, w_k, w_v = (rng.standard_normal((n, 8), "f4") for n in (8, 5, 5))
    >>> qkv_ext.cross_attention(x_dec, x_enc, w_q, w_k, w_v, num_heads=2).shape
    (4, 8)

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3.
    """
    layer = _layers.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    kv = _project_kv(layer, x_enc, "x_enc", options)
    return _attend(layer, x_dec, kv, return_weights, return_lse, options, name="x_dec")
