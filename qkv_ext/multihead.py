"""A multi-head attention layer that keeps its weights: packed once, called many times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _backends, _copies
from qkv_ext._core._options import PROJECTION, Flag, No, Options, Yes, shows, take
from qkv_ext._core._packed import WeightDtype, split
from qkv_ext._core._threads import threads_of
from qkv_ext._layers import _check_layer, _forward, _state_dict, _weights
from qkv_ext._layers._check_layer import GivenRotary
from qkv_ext._layers._forward import CALLED, Sequences, new
from qkv_ext.cache import KVCache
from qkv_ext.projected import ProjectedKV, Weight

Array = NDArray[Any]

__all__ = ["MultiHeadAttention"]


def _both(one: str, other: str) -> ValueError:
    return ValueError(f"{one} and {other} are both given; expected one of them")


class CallOptions(Options, total=False):
    """The options of a layer's call; none changes what it returns."""

    value_context: ArrayLike | None
    kv: ProjectedKV | None
    cache: KVCache | None
    cu_seqlens: ArrayLike | None
    cu_seqlens_context: ArrayLike | None
    rotary: tuple[ArrayLike, ArrayLike] | None
    interleaved: bool
    rotary_dim: int | None
    positions: ArrayLike | None
    rotary_sections: ArrayLike | None


class MultiHeadAttention:
    """A multi-head attention layer, its weights packed once.

    ``softmax(scale Q Kᵀ) V`` per head with Q = X W_Q + b_Q and so on, the heads side by side, then
    W_O.

    Parameters
    ----------
    w_q : array or PackedWeight (d_in, H·D)
    w_k : array or PackedWeight (d_ctx, Hkv·D)
    w_v : array or PackedWeight (d_ctx, Hkv·Dv)
        Of another d_ctx than w_k where calls give values a sequence of their own, value_context.
    w_o : array or PackedWeight (H·Dv, d_out), optional
    b_q, b_k, b_v, b_o : array, optional
        Biases of the four projections.
    num_heads, num_kv_heads : int
        H and Hkv; Hkv is H by default, and divides it.
    q_norm, k_norm : array (D,), or (H·D,) and (Hkv·D,), optional
        Weights of an RMS norm of Q and K before rotary: w · x / √(mean x² + norm_eps), over each
        head (Qwen 3, Gemma 3), or over the whole width of all heads (OLMo 2).
    norm_eps : float
        What these norms add to the mean.
    scale : float, optional
        What scores are multiplied by where a call gives no scale; 1/√D by default.
    sinks : array (H,), optional
        The sinks of a call that gives none: see ``scaled_dot_product_attention``.
    weight_dtype : {"float32", "float16", "bfloat16"}, optional
        What the weights are kept as, their own dtype by default: see ``pack_weight``.  For arrays:
        a weight that is packed already is kept as it is.

    Raises
    ------
    TypeError, ValueError
        Weights whose dtypes or shapes do not fit each other or the heads; a weight_dtype of weights
        that are packed already.

    Notes
    -----
    A layer holds no state beyond its weights, and copies of its own: it can be called from several
    threads, and pickled.
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

    __slots__ = ("__weakref__", "_layer")

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
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        norm_eps: float | np.floating[Any] = 1e-6,
        scale: float | np.floating[Any] | None = None,
        sinks: ArrayLike | None = None,
        weight_dtype: WeightDtype | None = None,
    ) -> None:
        layer = _weights.projections(
            w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads, one_context=False,
            q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps, scale=scale, sinks=sinks,
        )  # fmt: skip
        packed: dict[str, Any] = {
            part: w if w is None else _weights.packed(w, weight_dtype, f"w_{part}")
            for part, w in layer.weights.items()
        }
        own = not any(layer.weights[part] is packed[part] for part in "qkv")  # packed here
        layer = layer._replace(weights=packed)
        if own and len({packed[part].shape[0] for part in "qkv"}) == 1:
            layer = _weights.joined(layer)
        self._layer = layer

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
        order: str = "qkv",
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        norm_eps: float | np.floating[Any] = 1e-6,
        scale: float | np.floating[Any] | None = None,
        sinks: ArrayLike | None = None,
        weight_dtype: WeightDtype | None = None,
    ) -> Self:
        """A layer from one matrix (d_in, (H + 2 Hkv)·D) that has the columns of Q, K and V.

        Parameters
        ----------
        w_qkv : array (d_in, (H + 2 Hkv)·D)
            Under GQA Q, K and V are no equal thirds.
        b_qkv : array ((H + 2 Hkv)·D,), optional
            In the order of the columns.
        order : {"qkv", "grouped"}
            Of the columns, for H = 4 and Hkv = 2 with D columns each::

                qkv        q0 q1 q2 q3 k0 k1 v0 v1      torch, GPT-2, Phi-3, MPT, ChatGLM
                grouped    q0 q1 k0 v0 q2 q3 k1 v1      GPT-NeoX, BLOOM, Falcon

            The shapes fit either way.  A model's code tells: grouped is where it makes
            (..., Hkv, H / Hkv + 2, D) of the product before it cuts it (with Hkv = H:
            (..., H, 3, D), or chunks of (..., H, 3 D)).  For Hkv = 1 both are the same.
        w_o, b_o, num_heads, num_kv_heads, q_norm, k_norm, norm_eps, scale, sinks, weight_dtype
            As for the class.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        ValueError
            A width that the heads do not divide, or that w_o contradicts, with the width expected.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> w = np.zeros((8, 32), "f4")
        >>> mha = qkv_ext.MultiHeadAttention.from_fused(w, num_heads=2, num_kv_heads=1)
        >>> mha  # doctest: +NORMALIZE_WHITESPACE
        MultiHeadAttention(d_in=8, num_heads=2, num_kv_heads=1, head_dim=8, d_out=16,
                           w_o=False, biases=())
        """
        w, b = _weights.fused(w_qkv, b_qkv, w_o, num_heads, num_kv_heads, order)
        (w_q, w_k, w_v), (b_q, b_k, b_v) = w, b
        return cls(
            w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, num_heads=num_heads,
            num_kv_heads=num_kv_heads, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
            scale=scale, sinks=sinks, weight_dtype=weight_dtype,
        )  # fmt: skip

    @classmethod
    def from_fused_kv(
        cls,
        w_q: Weight,
        w_kv: ArrayLike,
        w_o: Weight | None = None,
        *,
        b_q: ArrayLike | None = None,
        b_kv: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        num_heads: int,
        num_kv_heads: int | None = None,
        order: str = "kv",
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        norm_eps: float | np.floating[Any] = 1e-6,
        scale: float | np.floating[Any] | None = None,
        sinks: ArrayLike | None = None,
        weight_dtype: WeightDtype | None = None,
    ) -> Self:
        """A layer from W_Q and one matrix (d_ctx, 2 Hkv·D) of K and V: attention to a context.

        Parameters
        ----------
        w_q : array or PackedWeight (d_in, H·D)
        w_kv : array (d_ctx, 2 Hkv·D)
        b_kv : array (2 Hkv·D,), optional
            In the order of the columns.
        order : {"kv", "grouped"}
            Of the columns: those of K, then those of V; or the key and value of each head in turn.
        w_o, b_q, b_o, num_heads, num_kv_heads, q_norm, k_norm, norm_eps, scale, sinks, weight_dtype
            As for the class.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError, ValueError
            A width that is not 2 Hkv·D with the D of w_q, with the width expected.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> w_q, w_kv = np.zeros((8, 16), "f4"), np.zeros((6, 32), "f4")
        >>> mha = qkv_ext.MultiHeadAttention.from_fused_kv(w_q, w_kv, num_heads=2)
        >>> mha(np.ones((5, 8), "f4"), np.ones((3, 6), "f4")).shape
        (5, 16)
        """
        w, b = _weights.fused_kv(w_q, w_kv, b_kv, num_heads, num_kv_heads, order)
        (w_k, w_v), (b_k, b_v) = w, b
        return cls(
            w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, num_heads=num_heads,
            num_kv_heads=num_kv_heads, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
            scale=scale, sinks=sinks, weight_dtype=weight_dtype,
        )  # fmt: skip

    @classmethod
    def from_state_dict(
        cls,
        mapping: Mapping[str, Any],
        prefix: str,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        order: str | None = None,
        norm_eps: float | np.floating[Any] | None = None,
        norm_offset: float | np.floating[Any] = 0.0,
        scale: float | np.floating[Any] | None = None,
        weight_dtype: WeightDtype | None = None,
        ignore: str | Iterable[str] = (),
    ) -> Self:
        """A layer from the named weights of a trained model, as a safetensors file holds them.

        Parameters
        ----------
        mapping : mapping of str to array
            NumPy arrays, as ``safetensors.numpy.load_file`` gives them, or anything that np.asarray
            takes.  Weights are (out, in), as torch keeps them, and are transposed.
        prefix : str
            What the names of the layer start with, such as ``"model.layers.0.self_attn"``; "" for
            none.  Under it there is one of::

                in_proj_weight, in_proj_bias, out_proj          torch.nn.MultiheadAttention
                q_proj_weight, k_proj_weight, ... out_proj      the same with kdim or vdim
                q_proj, k_proj, v_proj, o_proj or out_proj      Llama, Qwen, Gemma 2 and 3, OLMo 2,
                                                                GPT-OSS, BART, Whisper, CLIP, DETR,
                                                                ViT
                qkv_proj, o_proj                                Phi-3
                c_attn, c_proj, q_attn                          GPT-2, weights (in, out)
                query_key_value, dense                          GPT-NeoX, BLOOM, Falcon: order=
                qkv, proj                                       timm: order=
                Wqkv, out_proj or Wo                            MPT, ModernBERT
                q, k, v, o                                      T5: scale=
                q_lin, k_lin, v_lin, out_lin                    DistilBERT
                query, key, value                               BertSelfAttention, no W_O
                query, key, value, dense                        AlbertAttention
                self.query, ... output.dense                    BertAttention
                attention.query, ... output.dense               ViT, in older files

            and all but the first two lines with ``.weight`` and, where there is one, ``.bias``.
            A layer may have them under ``self_attn.``, ``attn.`` or whatever it is in the model.
        num_heads : int
            H, which the names do not tell.
        num_kv_heads : int, optional
            Hkv; by default what the shapes of W_Q and W_K make it with H heads.
        order : {"qkv", "grouped"}, optional
            Of the rows of ``query_key_value`` and ``qkv``, which have to be given it: see
            ``from_fused``.
        norm_eps : float, optional
            Of the RMS norms of Q and K, where there are ``q_norm`` and ``k_norm``, which have to be
            given it.  They are (D,) or (heads·D,).
        norm_offset : float
            What is added to the weights of these norms: 1.0 for Gemma's (1 + w).
        scale : float, optional
            As for the class.  T5's names have to be given it: its scale is 1.
        weight_dtype : {"float32", "float16", "bfloat16"}, optional
            As for the class.
        ignore : str or strings
            Patterns, as of ``fnmatch``, of names that may be left out: whole names, or what follows
            the prefix or the name of the attention module.

        Returns
        -------
        MultiHeadAttention
            Of float32, to which float16 and bfloat16 weights are converted, once; weight_dtype
            says what they are kept as.

        Raises
        ------
        TypeError
            A value that cannot be read as an array of floats.
        ValueError
            No such names, with those that were looked for; some of them missing; shapes that do not
            fit; no order, norm_eps or scale where the names need it, or one that they have no use
            for; anything else in the attention module (LayerNorms of Q and K, gates, relative
            positions, adapters, scales of quantised weights, ...), by its names.

        Notes
        -----
        What stands after W_O (BERT's output.LayerNorm) or beside the attention (norms and MLPs of a
        layer) is not read.  Tables of rotary positions and causal masks are left out: they are
        options of the call.  ``sinks`` of GPT-OSS become the layer's.

        What stands in a model's config or code alone no names tell.  Of the scale:
        query_pre_attn_scalar of Gemma (its -1/2 power), scale_attn_by_inverse_layer_idx of GPT-2,
        attention_multiplier of Granite; GPT-Neo's and Dia's is 1, Zamba's (D / 2)^(-1/2).  Of the
        norms: 1 + w of Gemma and MiniMax M3.  Of the call: softcap (Gemma 2), window, alibi_slopes
        (BLOOM, MPT; Falcon divides them by √D), rotary.

        Not served, and not to be told by names: norms without weights (of V in Gemma 3n and 4),
        norms of what goes into the projections (BLT), which in a square layer look like those of Q
        and K, a LayerNorm without a bias (ESM C), clip_qkv of MPT, add_zero_attn of torch, and
        what is outside of the module, as the position bias of SpeechT5.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> shapes = {"q_proj": (32, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 32)}
        >>> names = {f"layers.0.{name}.weight": np.zeros(s, "f4") for name, s in shapes.items()}
        >>> mha = qkv_ext.MultiHeadAttention.from_state_dict(names, "layers.0", 8)
        >>> mha  # doctest: +NORMALIZE_WHITESPACE
        MultiHeadAttention(d_in=16, num_heads=8, num_kv_heads=2, head_dim=4, d_out=16,
                           w_o=True, biases=())
        """
        found = _state_dict.find(mapping, prefix, ignore, order, norm_eps, norm_offset, scale)
        order, w, b, more = found
        if num_kv_heads is None:
            num_kv_heads = _state_dict.kv_heads(found, num_heads)
        more |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "scale": scale}
        more |= {"weight_dtype": weight_dtype}
        if "qkv" in w:
            more |= {"order": order, "b_qkv": b["qkv"], "b_o": b["o"]}
            return cls.from_fused(w["qkv"], w["o"], **more)
        if "kv" in w:
            more |= {"order": order, "b_q": b["q"], "b_kv": b["kv"], "b_o": b["o"]}
            return cls.from_fused_kv(w["q"], w["kv"], w["o"], **more)
        more |= {f"b_{part}": b[part] for part in "qkvo"}
        return cls(w["q"], w["k"], w["v"], w["o"], **more)

    def project_kv(
        self,
        context: ArrayLike,
        *,
        value_context: ArrayLike | None = None,
        threads: int | None = None,
        backend: str | None = None,
    ) -> ProjectedKV:
        """K and V of a context, to be passed as ``kv=`` to many calls.

        Parameters
        ----------
        context : array (..., S, d_ctx)
        value_context : array (..., S, d_v), optional
            What values are projected from; the context by default.
        threads, backend : optional
            As in ``matmul``.

        Returns
        -------
        ProjectedKV
            k (..., Hkv, S, D) and v (..., Hkv, S, Dv).  k is normed where the layer does that, and
            not turned by rotary yet.

        Raises
        ------
        TypeError, ValueError
            A context that does not fit the weights, an unknown backend.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> w = np.random.default_rng(0).standard_normal((4, 8, 8), "f4")
        >>> mha = qkv_ext.MultiHeadAttention(*w, num_heads=2)
        >>> kv = mha.project_kv(np.ones((6, 8), "f4"))
        >>> kv.k.shape, mha(np.ones((1, 8), "f4"), kv=kv).shape
        ((2, 6, 4), (1, 8))
        """
        layer = self._layer
        array = _check_layer.sequence(context, "context", layer, "k")
        values = _check_layer.values(value_context, "value_context", array, "context", layer)
        chosen = _backends.choose(backend, array.dtype)
        return _forward.project_kv(layer, array, values, chosen, threads_of(threads))

    @overload
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = ..., *,
        return_weights: No = ..., return_lse: No = ..., **options: Unpack[CallOptions],
    ) -> Array: ...  # fmt: skip
    @overload
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = ..., *,
        return_weights: Yes, return_lse: No = ..., **options: Unpack[CallOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = ..., *,
        return_weights: No = ..., return_lse: Yes, **options: Unpack[CallOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = ..., *,
        return_weights: Yes, return_lse: Yes, **options: Unpack[CallOptions],
    ) -> tuple[Array, Array, Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = ..., *,
        return_weights: Flag = ..., return_lse: Flag = ..., **options: Unpack[CallOptions],
    ) -> Array | tuple[Array, ...]: ...  # fmt: skip
    @shows(Options)
    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        value_context: ArrayLike | None = None,
        kv: ProjectedKV | None = None,
        cache: KVCache | None = None,
        cu_seqlens: ArrayLike | None = None,
        cu_seqlens_context: ArrayLike | None = None,
        rotary: tuple[ArrayLike, ArrayLike] | None = None,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        positions: ArrayLike | None = None,
        rotary_sections: ArrayLike | None = None,
        return_weights: Flag = False,
        return_lse: Flag = False,
        **options: Unpack[Options],
    ) -> Any:
        """Self-attention of x, or attention of x to a context.

        Parameters
        ----------
        x : array (..., L, d_in)
        context : array (..., S, d_ctx), optional
            What keys and values are projected from; x by default.
        value_context : array (..., S, d_v), optional
            What values are projected from; the context by default.  It has the leading axes and the
            S of the context, and the d_in of w_v.
        kv : ProjectedKV, optional
            Keys and values that are projected already, instead of a context.
        cache : KVCache, optional
            Where the keys and values of x are appended; x (B, L, d_in), or (L, d_in) for a batch of
            one, then attends to all that are there.  With q_lengths only so many rows of each item
            are appended.  S is the largest length that the cache has then.
        cu_seqlens, cu_seqlens_context : integers (N + 1,), optional
            Cumulative lengths of N sequences laid end to end, x (T, d_in), as in
            ``varlen_attention``, and of the context (T_ctx, d_ctx) or kv where there is one.  Each
            is computed as if it were alone, at positions of its own; lse is (T, H).  Not with mask,
            q_lengths, query_offset, key_offset, return_weights and cache.
        rotary : (cos, sin), optional
            Tables as ``rotary_tables`` makes them.  Q and K are turned as ``apply_rotary`` does it,
            at the positions of causal, window and ALiBi: query i at i + offset, which is i in
            self-attention without more options and i + query_offset where that is given, and key j
            at j + key_offset.  With a cache x goes on where its lengths end.
        interleaved, rotary_dim : optional
            As in ``apply_rotary``.
        positions : integers (L,) or (B, L), optional
            The rows of rotary that x takes, B being its first axis, in place of those positions;
            for causal, window and ALiBi nothing changes.  Keys of a context or kv stand where they
            do without.
        rotary_sections : integers (A,), optional
            For positions (A, L) or (A, B, L) on several axes, such as time, height and width in
            Qwen 2-VL: how many pairs of a row are turned by the position on each, the first axis
            first.  They sum to the columns of rotary.
        return_weights, return_lse : bool
            Return the weights (..., H, L, S) and the log-sum-exp (..., H, L) as well.
        **options
            As in ``scaled_dot_product_attention``.  Masks broadcast to (..., H, L, S); lengths and
            query_offset are (B,) with the first axis of x, integers where x is (L, d_in).  out is
            the final (..., L, d_out).

        Returns
        -------
        output : array (..., L, d_out)
            d_out is H·Dv without w_o.  Rows at or past q_lengths are 0, and not b_o.  With extras,
            a tuple in the order output, weights, lse.

        Raises
        ------
        TypeError, ValueError
            As ``scaled_dot_product_attention`` and ``apply_rotary`` do; two of context, kv and
            cache; positions for which rotary has no row; interleaved or rotary_dim without rotary.
            If a call fails its cache is as it was.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> w = np.random.default_rng(0).standard_normal((4, 8, 8), "f4")
        >>> mha = qkv_ext.MultiHeadAttention(*w, num_heads=2)
        >>> x = np.ones((2, 5, 8), "f4")  # two sequences, of 5 and of 3, padded on the right
        >>> lengths = {"q_lengths": [5, 3], "kv_lengths": [5, 3]}
        >>> mha(x, rotary=qkv_ext.rotary_tables(5, 4), causal=True, **lengths).shape
        (2, 5, 8)
        >>> cache, rotary = qkv_ext.KVCache(2, 2, 4), qkv_ext.rotary_tables(64, 4)
        >>> mha(x, cache=cache, rotary=rotary, causal=True, q_lengths=[5, 3]).shape
        (2, 5, 8)
        >>> mha(x[:, :1], cache=cache, rotary=rotary).shape, cache.lengths
        ((2, 1, 8), array([6, 4]))
        """
        given = take(options, "MultiHeadAttention.__call__", PROJECTION, return_weights, return_lse)
        layer = self._layer
        turned = new(GivenRotary, (rotary, interleaved, rotary_dim, positions, rotary_sections))
        if context is not None and (kv is not None or cache is not None):
            raise _both("context", "cache" if kv is None else "kv")
        if cache is not None:
            if kv is not None:
                raise _both("kv", "cache")
            if not isinstance(cache, KVCache):
                raise TypeError(f"cache is a {type(cache).__name__}; expected a KVCache")
            if cu_seqlens is not None or cu_seqlens_context is not None:
                raise _both("cu_seqlens", "cache")
            return _forward.step(layer, x, value_context, cache, given, turned)
        tables = _check_layer.rotary(turned, layer)
        if kv is not None:
            if value_context is not None:
                raise _both("value_context", "kv")
            kv = ProjectedKV(*_check_layer.projected_kv(kv, layer))
        of = new(Sequences, (x, context, value_context, kv, cu_seqlens, cu_seqlens_context, CALLED))
        return _forward.forward(layer, of, given, tables)

    def __reduce__(self) -> tuple[Any, ...]:
        layer = self._layer
        weights, biases = ([of[part] for part in "qkvo"] for of in (layer.weights, layer.biases))
        joined = None
        if layer.joined is not None:
            joined = layer.joined.weight, [w.shape[1] for w in weights[:3]]
            weights[:3] = [None] * 3
        more: dict[str, Any] = {
            f"{part}_norm": None if w is None else w.astype(layer.weights["q"].dtype)
            for part, w in layer.norms.items()
        }
        more |= {"norm_eps": layer.norm_eps, "scale": layer.scale, "sinks": layer.sinks}
        arguments = (*weights, *biases, layer.num_heads, layer.num_kv_heads, joined, more)
        state = _copies.added_state(self, MultiHeadAttention)
        return _copies.reduced(self._restored, arguments, state)

    @classmethod
    def _restored(cls, *arguments: Any) -> Self:
        """A layer out of a pickle: 4 weights, 4 biases, H, Hkv, W_Q to W_V if they are one, more.

        Older ones end before either of the last.
        """
        parts, (joined, more) = arguments[:10], (*arguments[10:], None, None)[:2]
        if joined is not None:
            parts = (*split(*joined), *parts[3:])
        layer = _weights.projections(*parts, one_context=False, **(more or {}))
        mha = cls.__new__(cls)
        mha._layer = layer if joined is None else _weights.joined(layer, joined[0])
        return mha

    def __repr__(self) -> str:
        layer = self._layer
        d_in, width = layer.weights["q"].shape
        d_out = (layer.weights["o"] or layer.weights["v"]).shape[1]
        if layer.weights["o"] is None:
            d_out = d_out // layer.num_kv_heads * layer.num_heads
        biases = tuple(f"b_{part}" for part in "qkvo" if layer.biases[part] is not None)
        norms = tuple(f"{part}_norm" for part in "qk" if layer.norms[part] is not None)
        more = f", norms={norms}, norm_eps={layer.norm_eps}" if norms else ""
        more += "" if layer.scale is None else f", scale={layer.scale}"
        more += "" if layer.sinks is None else ", sinks=True"
        kept = [w.weight_dtype for w in layer.weights.values() if w is not None]
        if any(kind != layer.weights["q"].dtype.name for kind in kept):
            more += f", weight_dtype={kept[0] if len(set(kept)) == 1 else tuple(kept)}"
        return (
            f"{type(self).__name__}(d_in={d_in}, num_heads={layer.num_heads}, "
            f"num_kv_heads={layer.num_kv_heads}, head_dim={width // layer.num_heads}, "
            f"d_out={d_out}, w_o={layer.weights['o'] is not None}, biases={biases}{more})"
        )


_restored = MultiHeadAttention._restored  # by this name in pickles of 0.1.0
