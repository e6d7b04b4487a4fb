"""Rotary position embedding: pairs of Q and K turned by angles that grow with their position.

    (a, b)  ->  (a cos - b sin, b cos + a sin)        angle = position / scale · base^(-2t / dim)

for pair t of a row, so that the product of a query and a key depends on their distance alone.  For
contexts beyond that of training a config scales the frequencies base^(-2t / dim), by pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _backends, _check_rotary, _rope_scaling, _rules
from qkv_ext._core._arrays import shown
from qkv_ext._core._threads import threads_of

Array = NDArray[Any]

__all__ = ["RotaryFrequencies", "apply_rotary", "rotary_inv_freq", "rotary_tables"]


class RotaryFrequencies(NamedTuple):
    """What ``rotary_inv_freq`` gives, and ``rotary_tables`` takes by the same names."""

    inv_freq: Array
    """(dim / 2,), float64: the angle by which each pair is turned from one position to the next."""
    attention_factor: float
    """What cosines and sines are multiplied by."""


def rotary_inv_freq(
    dim: int,
    base: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    *,
    length: int | None = None,
    max_position_embeddings: int | None = None,
    original_max_position_embeddings: int | None = None,
) -> RotaryFrequencies:
    """The inverse frequencies of rotary embedding as a model's config scales them.

    From ``f[t] = base^(-2t / dim)`` for pair t, by the ``rope_type`` (or ``type``) of scaling::

        default    f
        linear     f / s
        dynamic    f · a^(-2t / (dim - 2))      a = 1 + s max(0, length - M) / M
        llama3     g f + (1 - g) f / s          g = (L0 f / 2π - low) / (high - low)
        yarn       g f + (1 - g) f / s          g = (t1 - t) / (t1 - t0)
        longrope   f / short_factor             or, where length > L0, f / long_factor

    s is ``factor``, L0 ``original_max_position_embeddings``, M max_position_embeddings, low and
    high are ``low_freq_factor`` and ``high_freq_factor``, and g is held within 0 and 1.  t0 and t1
    are ``dim / (2 log base) · log(L0 / 2πr)`` for r = ``beta_fast`` (32) and ``beta_slow`` (1),
    rounded down and up unless ``truncate`` is false, and held within 0 and dim - 1.

    The attention factor is 1; in yarn 0.1 log s + 1 or, where there are ``mscale`` and
    ``mscale_all_dim``, (0.1 mscale log s + 1) / (0.1 mscale_all_dim log s + 1); in longrope
    √(1 + log s / log L0).  In both it is ``attention_factor`` where scaling has one, and 1 for s
    below 1.

    Parameters
    ----------
    dim : int
        D, or how many elements of each row are turned.  Where scaling has a
        ``partial_rotary_factor``, that part of dim, rounded down, is turned and stands for dim in
        all that is computed; ``rotary_tables`` takes that dim then, ``2 * len(inv_freq)``.
    base : float, optional
        The base of the wavelengths; the ``rope_theta`` of scaling by default, else 10000.
    scaling : mapping, optional
        The ``rope_scaling`` or ``rope_parameters`` of a config, as transformers writes them; a key
        that is None is one that is not there.  None is the kind "default".
    length : int, optional
        How long the sequence is, its cache included; dynamic and longrope need it.
    max_position_embeddings : int, optional
        What the config has by that name.  dynamic needs it; yarn and longrope take its ratio to
        L0 for a factor that is not there; to the other kinds it says nothing.
    original_max_position_embeddings : int, optional
        L0 where the config has it beside scaling and not in it; of llama3, yarn and longrope.

    Returns
    -------
    RotaryFrequencies
        ``(inv_freq, attention_factor)``: array (dim / 2,) of float64, and a float.

    Raises
    ------
    TypeError
        A scaling that is no mapping, a number that is none.
    ValueError
        An unknown kind, a key that is missing or that the kind does not have, a number out of
        range; a base or length that is not the one of scaling; ``mscale`` without
        ``mscale_all_dim`` or the other way round, which implementations read differently.

    Notes
    -----
    Computed in float64, since an angle is a frequency times a position: rounding the frequency to
    float32 moves the angle at position 100,000 by up to 0.003.

    The attention factor belongs to the tables of Q and of K, so the scores of what is turned get
    its square; give it to ``rotary_tables``.  What ``mscale_all_dim`` says of attention itself is
    not in it: the models of DeepSeek, and others built like them, multiply the scale of the softmax
    by ``(0.1 · mscale_all_dim · log(factor) + 1)²`` too, which is for ``scale=`` of attention.

    Tables of dynamic and longrope are those of one length: where a sequence outgrows it, what is in
    a ``KVCache`` was turned by the frequencies of before.

    NTK-aware scaling by a fixed s is another base: ``base · s^(dim / (dim - 2))``.

    Examples
    --------
    >>> import qkv_ext
    >>> llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    ...          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    >>> inv_freq, attention_factor = qkv_ext.rotary_inv_freq(128, 500000.0, llama)
    >>> inv_freq.shape, attention_factor
    ((64,), 1.0)
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> frequencies = qkv_ext.rotary_inv_freq(128, 1e6, yarn)
    >>> cos, sin = qkv_ext.rotary_tables(1024, 128, **frequencies._asdict())
    >>> print(cos[0, 0])
    1.1386294

    References
    ----------
    S. Chen et al., "Extending Context Window of Large Language Models via Position Interpolation"
    (2023), linear; bloc97, "NTK-Aware Scaled RoPE" (2023) and emozilla, "Dynamically Scaled RoPE"
    (2023), dynamic; Llama Team, "The Llama 3 Herd of Models" (2024); B. Peng et al., "YaRN:
    Efficient Context Window Extension of Large Language Models" (2023); Y. Ding et al., "LongRoPE:
    Extending LLM Context Window Beyond 2 Million Tokens" (2024).
    """
    return RotaryFrequencies(
        *_rope_scaling.frequencies(
            dim, base, scaling, length, max_position_embeddings, original_max_position_embeddings
        )
    )


def rotary_tables(
    n: int,
    dim: int,
    *,
    base: float = 10000.0,
    scale: float = 1.0,
    inv_freq: ArrayLike | None = None,
    attention_factor: float = 1.0,
) -> tuple[Array, Array]:
    """The cosines and sines of the positions 0 to n - 1, for ``apply_rotary``.

    ``angle[p, t] = (p / scale) · base^(-2t / dim)``, or ``(p / scale) · inv_freq[t]``

    Parameters
    ----------
    n : int
        How many positions there are; the longest sequence, its cache included.
    dim : int
        How many elements of a row are turned: D, or the rotary_dim of ``apply_rotary``.  Even.
    base : float
        The base of the wavelengths ("rope_theta").
    scale : float
        What positions are divided by (linear scaling, "position interpolation").
    inv_freq : array (dim / 2,), optional
        Frequencies in place of those of base, such as the scaled ones that ``rotary_inv_freq``
        makes of a config.
    attention_factor : float
        What the cosines and sines are multiplied by.

    Returns
    -------
    cos, sin : array (n, dim / 2)
        float32.  A layer takes them as ``rotary=(cos, sin)``, and ``rotary_dim=dim`` where that is
        less than D.

    Raises
    ------
    TypeError, ValueError
        An n or dim that is no integer in range, an odd dim, a base, scale or attention_factor that
        is no positive finite number, an inv_freq of another shape or that is not finite, a base
        other than 10000 beside inv_freq.

    Notes
    -----
    Angles are computed in float64 and only the results are rounded, so that far positions keep
    their accuracy.

    Examples
    --------
    >>> import qkv_ext
    >>> cos, sin = qkv_ext.rotary_tables(1024, 64)
    >>> cos.shape, sin.shape, cos.dtype
    ((1024, 32), (1024, 32), dtype('float32'))

    References
    ----------
    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021);
    S. Chen et al., "Extending Context Window of Large Language Models via Position Interpolation"
    (2023).
    """
    rows = int(_rules.integers(n, "n", None, 0, _rope_scaling.MOST))
    width = _rope_scaling.even(dim)
    own_base = _rope_scaling.positive(base, "base")
    factor = _rope_scaling.amplitude(attention_factor, "attention_factor")
    if inv_freq is None:
        given = f"base is {shown(base)}"
        frequencies = _rope_scaling.unscaled(own_base, width)
    else:
        given = "inv_freq is given"
        frequencies = _rope_scaling.vector(inv_freq, "inv_freq", width // 2, "real numbers")
        if not np.isfinite(frequencies).all():
            wrong = frequencies[~np.isfinite(frequencies)][0]
            raise ValueError(f"inv_freq holds {wrong}; expected finite numbers")
        if own_base != _rope_scaling.BASE:
            raise ValueError(f"base is {shown(base)} and {given}; expected one of them")
    positions = np.arange(rows) / _rope_scaling.positive(scale, "scale")
    with np.errstate(all="ignore"):
        angles = np.outer(positions, frequencies)
        if not np.isfinite(angles).all():
            raise ValueError(f"{given} and scale {shown(scale)}; expected angles below infinity")
        return _table(np.cos(angles), factor), _table(np.sin(angles), factor)


def _table(x: Array, factor: float) -> Array:
    x *= factor
    return x.astype(np.float32)


def apply_rotary(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    positions: ArrayLike | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    layout: Literal["bhld", "blhd"] = "bhld",
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """Turn the pairs of each row of Q or K by the angles of its position.

    Pair t of a row at position p, (a, b), becomes
    ``(a cos[p, t] - b sin[p, t], b cos[p, t] + a sin[p, t])``.

    Parameters
    ----------
    x : array (L, D), (B, L, D), (B, H, L, D) or with more leading axes
        Queries or keys; float32, float64, float16 or bfloat16.
    cos, sin : array (n, rotary_dim / 2)
        A row for each position, as ``rotary_tables`` makes them, of scaled frequencies
        (``rotary_inv_freq``) too, or the caller; any float dtype.  Tables of width rotary_dim,
        whose halves are equal, are to be passed as ``cos[:, : rotary_dim // 2]``.
    positions : integers (L,) or (B, L), optional
        The row of the tables for each row of x, B being the first axis of x; 0 to L - 1 by default.
    interleaved : bool
        Which elements of a row are a pair, the same digit for rotary_dim = 6, D = 8::

            False, half-split           True, neighbours
            0 1 2 0 1 2 . .             0 0 1 1 2 2 . .

        The half-split form is that of GPT-NeoX and of the Llama checkpoints of transformers,
        the other that of GPT-J and of Meta's Llama checkpoints.
    rotary_dim : int, optional
        How many elements of each row take part, D by default; those beyond pass through.
    layout : {"bhld", "blhd"}
        "blhd" takes x and out as (..., L, H, D), at rank 4 or more.
    out : array, optional
        Of the shape and dtype of x; may be strided, and may overlap x: ``out=x`` is in place.
    threads, backend : optional
        As in ``matmul``; every backend gives the same bits, but for those of a NaN.

    Returns
    -------
    array
        Of the shape and dtype of x.

    Raises
    ------
    TypeError
        A dtype that is not floating-point, positions that are no integers.
    ValueError
        Shapes that do not fit, positions beyond the tables, an odd rotary_dim or one beyond D, an
        out that cannot be written, an unknown backend.

    Notes
    -----
    Computed in float32, or in float64 for a float64 x; float16 and bfloat16 are rounded once, at
    the end.  The tables are rounded to the dtype of computation.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> q = np.ones((2, 4, 3, 8), "f4")
    >>> cos, sin = qkv_ext.rotary_tables(16, 8)
    >>> turned = qkv_ext.apply_rotary(q, cos, sin, positions=[5, 6, 7])
    >>> turned.shape
    (2, 4, 3, 8)
    >>> bool(np.allclose((turned**2).sum(-1), 8))  # lengths stay
    True

    References
    ----------
    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    plain = _backends.default_backend(backend).plain_rotary
    turned: Array | None = plain(
        x, cos, sin, positions, interleaved, rotary_dim, layout, out, threads_of(threads)
    )
    if turned is not None:  # the plain case, quickly
        return turned
    checked = _check_rotary.rotary(
        x, cos, sin, positions, interleaved, rotary_dim, layout, out, threads
    )
    result: Array = _backends.rotary(checked, backend)
    return result
