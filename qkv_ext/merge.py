"""Attention over keys that were split: the parts' outputs and log-sum-exps make the whole.

lse = log Σ exp lse_n        output = Σ exp(lse_n - lse) output_n
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _arrays, _backends
from qkv_ext._core._threads import threads_of

Array = NDArray[Any]

__all__ = ["merge_attention"]


def merge_attention(
    outputs: Iterable[ArrayLike],
    lses: Iterable[ArrayLike],
    *,
    layout: Literal["bhld", "blhd"] = "bhld",
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Merge what the same queries found in separate parts of the keys.

    ``lse = log Σ exp lse_n`` and ``output = Σ exp(lse_n - lse) output_n`` are the attention over
    all the keys, because lse_n is the logarithm of part n's share of the denominator.

    Parameters
    ----------
    outputs : sequence of arrays (..., H, L, Dv), or one array (N, ..., H, L, Dv)
        The output of each part; float32, float64, float16 or bfloat16.  Also (L, Dv), (B, L, Dv)
        and the packed form (Tq, H, Dv) of ``varlen_attention``.
    lses : sequence of arrays (..., H, L), or one array (N, ..., H, L)
        The log-sum-exp of each part as ``return_lse=True`` gives it: the natural logarithm, float32
        (float64 with float64 outputs).  Packed, (Tq, H).
    layout : {"bhld", "blhd"}
        "blhd" takes outputs as (..., L, H, Dv), at rank 4 or more; lse stays (..., H, L).
    threads, backend : optional
        As in ``matmul``.

    Returns
    -------
    output : array (..., H, L, Dv)
        In the dtype and layout of the parts.
    lse : array (..., H, L)
        So that it can be merged again.

    Raises
    ------
    TypeError
        A dtype that is not floating-point, several of them, lses in another dtype than that of
        computation.
    ValueError
        No part, as many outputs as lses are not there, shapes that do not fit each other.

    Notes
    -----
    - A part in which a query found no key is (0, -inf).  It changes nothing, whatever its output
      holds, and the merge of nothing but such parts is (0, -inf) again.
    - Where keys are split, each part is given its ``key_offset``, the queries one and the same
      ``query_offset``, and sinks go to exactly one part.
    - An lse to the base 2, as some libraries return it, is to be multiplied by log 2 before.
    - Parts are added up from the first to the last.  float16 and bfloat16 are merged in float32 and
      rounded once.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 10, 8), "f4")
    >>> whole = qkv_ext.scaled_dot_product_attention(q, k, v, causal=True)
    >>> outputs, lses = zip(*(
    ...     qkv_ext.scaled_dot_product_attention(
    ...         q, k[part], v[part], causal=True, query_offset=0, key_offset=part.start,
    ...         return_lse=True)
    ...     for part in (slice(0, 4), slice(4, 10))))
    >>> output, lse = qkv_ext.merge_attention(outputs, lses)
    >>> bool(np.allclose(output, whole, atol=1e-6))
    True

    References
    ----------
    M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (2018); T. Dao et al.,
    "Flash-Decoding for long-context inference" (2023).
    """
    if layout is _arrays.BHLD:  # the plain case, quickly
        plain = _backends.default_backend(backend).plain_merge
        merged: tuple[Array, Array] | None = plain(outputs, lses, threads_of(threads))
        if merged is not None:
            return merged
    parts, logs, blhd, compute = _checked(outputs, lses, layout, threads, backend)
    output, lse = np.empty(parts[0].shape, parts[0].dtype), np.empty(logs[0].shape, logs[0].dtype)
    compute(parts, logs, output, lse, blhd, threads_of(threads))
    return output, lse


def _parts(given: Any, name: str) -> Any:
    """A list of anything, or an array whose first axis counts the parts."""
    if isinstance(given, (list, tuple)):
        return given
    arraylike = hasattr(given, "__array__") or isinstance(given, memoryview)
    if isinstance(given, Iterable) and not arraylike:
        return list(given)
    array = _arrays.array_of(given, name, "a sequence of arrays", objects=True)
    if array.ndim == 0:
        raise TypeError(f"{name} is a {type(given).__name__}; expected a sequence of arrays")
    return array


def _checked(
    outputs: Any, lses: Any, layout: Any, threads: Any, backend: Any
) -> tuple[list[Array], list[Array], bool, Callable[..., None]]:
    """Check a call of merge_attention: its parts, their layout, and what computes it."""
    blhd = _arrays.is_blhd(layout)
    outputs, lses = _parts(outputs, "outputs"), _parts(lses, "lses")
    if not len(outputs) or len(outputs) != len(lses):
        raise ValueError(
            f"outputs has {len(outputs)} parts and lses {len(lses)}; expected as many, and one at "
            "least"
        )
    parts = [_arrays.operand(x, f"outputs[{n}]", 2) for n, x in enumerate(outputs)]
    logs = [_arrays.operand(x, f"lses[{n}]", 1) for n, x in enumerate(lses)]
    first = parts[0]
    _arrays.same_dtype(**{f"outputs[{n}]": x for n, x in enumerate(parts)})
    merge = _backends.choose(backend, first.dtype).merge
    threads_of(threads)
    if blhd and first.ndim < 4:
        raise ValueError(
            f"layout is 'blhd', but outputs[0] has shape {first.shape}; expected rank 4 or more"
        )
    rows = first.shape[:-1]
    if blhd:
        rows = (*rows[:-2], rows[-1], rows[-2])
    compute = _arrays.compute_dtype(first.dtype)
    for n, (part, log) in enumerate(zip(parts, logs, strict=True)):
        if part.shape != first.shape:
            raise ValueError(
                f"outputs[{n}] has shape {part.shape}; expected {first.shape} as outputs[0] has"
            )
        if log.shape != rows:
            other = "bhld" if blhd else "blhd"
            swapped = part.ndim > 3 and log.swapaxes(-2, -1).shape == rows
            hint = f'; it fits with layout="{other}"' if swapped else ""
            raise ValueError(f"lses[{n}] has shape {log.shape}; expected {rows}{hint}")
        if log.dtype != compute:
            raise TypeError(
                f"lses[{n}] has dtype {log.dtype}; expected {compute}, in which {first.dtype} is "
                f"computed: lses[{n}]{_arrays.cast_to(compute)}"
            )
    return parts, logs, blhd, merge
