"""Inverse frequencies of rotary embedding from what a config says of their scaling.

    f[t] = base^(-2t / dim)        of pair t, before any scaling

A kind of scaling is a function of ``_Scaling``, and the keys that it knows, in ``_KINDS``.  A key
that it does not know is refused: what changes the result elsewhere must not be lost here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from qkv_ext._core import _arrays, _rules
from qkv_ext._core._arrays import LARGEST_FLOAT64, Array, shown

BASE = 10000.0
MOST = 1 << 40  #: rows and columns that a table may be asked for; memory ends before that
_LARGEST_FACTOR = float(np.finfo(np.float32).max)
_ORIGINAL = "original_max_position_embeddings"
_EVERY_KIND = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


# ---- one number at a time -----------------------------------------------------------------------


def positive(value: Any, name: str, most: float = LARGEST_FLOAT64) -> float:
    number = _arrays.real(value, name, "a positive number")
    if not 0 < number <= most:
        kind = "positive finite" + " float32" * (most < LARGEST_FLOAT64)
        raise ValueError(f"{name} is {shown(value)}; expected a {kind} number")
    return float(number)


def amplitude(value: Any, name: str) -> float:
    """An attention factor: what tables of float32 can be multiplied by."""
    return positive(value, name, _LARGEST_FACTOR)


def even(dim: Any) -> int:
    """How many elements of a row are turned."""
    width = int(_rules.integers(dim, "dim", None, 2, MOST))
    if width % 2:
        raise ValueError(f"dim is {width}; expected an even number")
    return width


def vector(value: Any, name: str, count: int, expected: str) -> Array:
    """Real numbers (count,), as float64."""
    array = _arrays.array_of(value, name, expected)
    kind = array.dtype.kind
    if not (kind in "iuf" or (kind == "V" and np.can_cast(array.dtype, np.float64))):
        raise TypeError(f"{name} has dtype {array.dtype}; expected {expected}")
    if array.shape != (count,):
        wanted = f"({count},), half of dim = {2 * count}"
        raise ValueError(f"{name} has shape {array.shape}; expected {wanted}")
    return array.astype(np.float64)


def unscaled(base: float, dim: int) -> Array:
    """f (dim / 2,)."""
    with np.errstate(all="ignore"):
        frequencies: Array = base ** (np.arange(0, dim, 2) / -dim)
    return frequencies


# ---- what a config says -------------------------------------------------------------------------


class _Scaling(NamedTuple):
    """The keys of a config that are not null, checked to be known, and what stands beside them."""

    keys: Mapping[str, Any]
    kind: str
    dim: int
    base: float
    original: int | None  #: the length of training
    longest: int | None  #: max_position_embeddings
    length: int | None

    @property
    def frequencies(self) -> Array:
        return unscaled(self.base, self.dim)

    def missing(self, key: str, instead: str = "") -> ValueError:
        message = f"scaling has no {key!r}, which rope_type {self.kind!r} needs"
        return ValueError(message + (f"; expected it there or {instead}" if instead else ""))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, which the kind needs unless there is a default."""
        if key in self.keys:
            return positive(self.keys[key], f"scaling[{key!r}]")
        if default is None:
            raise self.missing(key)
        return default

    def factors(self, key: str) -> Array:
        """A positive number for each frequency."""
        if key not in self.keys:
            raise self.missing(key)
        name = f"scaling[{key!r}]"
        expected = "positive finite numbers"
        factors = vector(self.keys[key], name, self.dim // 2, expected)
        wrong = factors[~((factors > 0) & (factors < np.inf))]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong[0]}; expected {expected}")
        return factors

    def needed(self, value: int | None, name: str) -> int:
        """An integer that is not among the keys."""
        if value is None:
            raise ValueError(f"{name} is None; expected an integer for rope_type {self.kind!r}")
        return value

    def trained(self) -> int:
        if self.original is None:
            raise self.missing(_ORIGINAL, f"as {_ORIGINAL}=")
        return self.original

    def stretch(self) -> float:
        """How many times the length of training the context is."""
        if "factor" in self.keys:
            return self.number("factor")
        if self.longest is None:
            raise self.missing("factor", f"max_position_embeddings=, which is over {_ORIGINAL}")
        return self.longest / self.trained()

    def attention(self) -> float | None:
        """The attention factor where the config has one, in place of what the others give."""
        key = "attention_factor"
        return amplitude(self.keys[key], f"scaling[{key!r}]") if key in self.keys else None


def _default(s: _Scaling) -> tuple[Array, float]:
    return s.frequencies, 1.0


def _linear(s: _Scaling) -> tuple[Array, float]:
    return s.frequencies / s.number("factor"), 1.0


def _dynamic(s: _Scaling) -> tuple[Array, float]:
    """base · growth^(dim / (dim - 2)) in place of base: the lowest frequency is f / growth."""
    factor = s.number("factor")
    longest = s.needed(s.longest, "max_position_embeddings")
    beyond = max(s.needed(s.length, "length") - longest, 0)
    if s.dim == 2:
        raise ValueError("dim is 2; expected at least 4 for rope_type 'dynamic'")
    growth = 1 + factor * beyond / longest
    if growth == math.inf:
        raise ValueError(f"scaling['factor'] is {factor}; expected less for a length of {s.length}")
    return s.frequencies * growth ** (np.arange(0, s.dim, 2) / (2 - s.dim)), 1.0


def _blend(f: Array, factor: float, kept: Array) -> Array:
    """Frequencies divided by the factor, but for the share of each that is kept."""
    kept = np.clip(kept, 0, 1)
    return kept * f + (1 - kept) * (f / factor)


def _llama3(s: _Scaling) -> tuple[Array, float]:
    """By how many times a pair is turned within the length of training."""
    factor, low, high = map(s.number, ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ValueError(
            f"scaling['low_freq_factor'] is {low} and scaling['high_freq_factor'] {high}; "
            "expected the first to be less than the second"
        )
    turns = s.trained() * s.frequencies / (2 * math.pi)
    return _blend(s.frequencies, factor, (turns - low) / (high - low)), 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn(s: _Scaling) -> tuple[Array, float]:
    """A ramp over t, between the pairs that are turned beta_fast and beta_slow times."""
    factor, trained = s.stretch(), s.trained()
    fast, slow = s.number("beta_fast", 32.0), s.number("beta_slow", 1.0)
    if fast < slow:
        raise ValueError(
            f"scaling['beta_fast'] is {fast} and scaling['beta_slow'] {slow}; "
            "expected the first not to be less than the second"
        )
    if s.base <= 1:
        raise ValueError(f"base is {s.base}; expected more than 1 for rope_type 'yarn'")
    first, last = (
        s.dim * (math.log(trained / (2 * math.pi)) - math.log(turns)) / (2 * math.log(s.base))
        for turns in (fast, slow)
    )
    if _arrays.as_bool(s.keys.get("truncate", True), "scaling['truncate']"):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, s.dim - 1)
    if first > last:
        raise ValueError(
            f"{_ORIGINAL} is {trained}, in which no frequency of base {s.base} is turned between "
            f"{slow} and {fast} times; expected another length for rope_type 'yarn'"
        )
    width = last - first or 0.001  # the ramp is then a step, behind its pair
    ramp = (np.arange(s.dim // 2) - first) / width
    return _blend(s.frequencies, factor, 1 - np.clip(ramp, 0, 1)), _yarn_factor(s, factor)


def _yarn_factor(s: _Scaling, factor: float) -> float:
    pair = ("mscale", "mscale_all_dim")
    own, all_dim = (s.number(key, 0.0) for key in pair)
    given = s.attention()
    if given is not None:
        return given
    if not own and not all_dim:
        return _mscale(factor, 1)
    if not own or not all_dim:  # what one means without the other differs between implementations
        one, other = pair if own else pair[::-1]
        raise ValueError(f"scaling holds {one!r} without {other!r}; expected both or neither")
    return _mscale(factor, own) / _mscale(factor, all_dim)


def _longrope(s: _Scaling) -> tuple[Array, float]:
    """Divisors that were searched for, one set for the length of training and one beyond it."""
    short, long = s.factors("short_factor"), s.factors("long_factor")
    trained, length = s.trained(), s.needed(s.length, "length")
    attention = s.attention()
    if attention is None:
        attention = math.sqrt(1 + math.log(max(s.stretch(), 1)) / math.log(trained))
    return s.frequencies / (long if length > trained else short), attention


_KINDS: dict[str, tuple[Callable[[_Scaling], tuple[Array, float]], tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "yarn": (
        _yarn,
        ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        _longrope, ("short_factor", "long_factor", _ORIGINAL, "factor", "attention_factor")
    ),
}  # fmt: skip


# ---- the front door -----------------------------------------------------------------------------


def _given_keys(scaling: Any) -> Mapping[str, Any]:
    """Without those that are null, as configs spell what they leave out."""
    if scaling is None:
        return {}
    if not isinstance(scaling, Mapping):
        raise TypeError(
            f"scaling is {shown(scaling)}; expected the rope_scaling or rope_parameters of a "
            "config, a mapping, or None"
        )
    return {key: value for key, value in scaling.items() if value is not None}


def _kind_of(keys: Mapping[str, Any]) -> str:
    """The kind, by either spelling; every key is one that it knows."""
    kinds = {
        key: _arrays.choice(keys[key], f"scaling[{key!r}]", tuple(_KINDS))
        for key in ("rope_type", "type")
        if key in keys
    }
    if len(set(kinds.values())) > 1:
        raise ValueError(
            "scaling['rope_type'] is {rope_type!r} and scaling['type'] {type!r}; expected one of "
            "them, or the same".format_map(kinds)
        )
    kind = next(iter(kinds.values()), "default")
    known = (*_EVERY_KIND, *_KINDS[kind][1])
    for key in keys:
        if not isinstance(key, str) or key not in known:
            nested = isinstance(keys[key], Mapping)
            raise ValueError(
                f"scaling holds {shown(key)}, which rope_type {kind!r} does not have; expected "
                + (f"scaling[{shown(key)}]" if nested else ", ".join(known))
            )
    return kind


def _agreed(one: Any, one_name: str, other: Any, other_name: str) -> Any:
    """What two places say: either of them, or both the same."""
    if one is not None and other is not None and one != other:
        raise ValueError(
            f"{one_name} is {one} and {other_name} {other}; expected one of them, or the same"
        )
    return other if one is None else one


def _turned(dim: Any, keys: Mapping[str, Any]) -> int:
    """How many elements of a row of dim are turned."""
    if "partial_rotary_factor" not in keys:
        return even(dim)
    name = "scaling['partial_rotary_factor']"
    width = int(_rules.integers(dim, "dim", None, 2, MOST))
    part = positive(keys["partial_rotary_factor"], name)
    if part > 1:
        raise ValueError(f"{name} is {part}; expected at most 1")
    turned = int(width * part)
    if turned < 2 or turned % 2:
        raise ValueError(
            f"{name} is {part} and dim {width}, so {turned} elements are turned; "
            "expected an even number of them"
        )
    return turned


def _length(value: Any, name: str, least: int = 1) -> int | None:
    return None if value is None else int(_rules.integers(value, name, None, least, MOST))


def frequencies(
    dim: Any, base: Any, scaling: Any, length: Any, longest: Any, original: Any
) -> tuple[Array, float]:
    """rotary_inv_freq: f (dim / 2,), scaled, and the attention factor."""
    keys = _given_keys(scaling)
    kind = _kind_of(keys)
    theta = keys.get("rope_theta")
    base = _agreed(
        None if base is None else positive(base, "base"),
        "base",
        None if theta is None else positive(theta, "scaling['rope_theta']"),
        "scaling['rope_theta']",
    )
    trained = f"scaling[{_ORIGINAL!r}]"
    original = _agreed(
        _length(original, _ORIGINAL, 2),
        _ORIGINAL,
        _length(keys.get(_ORIGINAL), trained, 2),
        trained,
    )
    s = _Scaling(
        keys, kind, _turned(dim, keys), BASE if base is None else base, original,
        _length(longest, "max_position_embeddings"), _length(length, "length", 0),
    )  # fmt: skip
    with np.errstate(all="ignore"):
        inv_freq, attention = _KINDS[kind][0](s)
        if not (np.isfinite(inv_freq).all() and 0 < attention <= _LARGEST_FACTOR):
            raise ValueError(
                f"base is {s.base} and scaling {shown(scaling)}; expected what gives finite "
                "frequencies and a finite attention factor"
            )
    return inv_freq, attention
