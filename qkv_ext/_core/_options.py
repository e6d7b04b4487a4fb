"""The options of an attention call: their names, types and defaults, in one list.

    Options    for type checkers: the types; each call has those of one class
    Given      for the code: the defaults; what a call was given, by name

``scaled_dot_product_attention`` spells them out in its signature.  Every other call takes
``**options: Unpack[...]`` and is decorated with ``shows``, so that inspect and help() show what
there is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core._block_mask import BlockMask
from qkv_ext._core._unknown import refuse

F = TypeVar("F", bound=Callable[..., Any])
No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]
Flag: TypeAlias = bool | np.bool_


class VarlenOptions(TypedDict, total=False):
    """The options that every attention call has; none changes what it returns."""

    causal: bool | np.bool_
    """A query sees the keys up to its own position."""
    align: Literal["bottom-right", "top-left"]
    """Which query and key stand at the same position: the last ones, or the first ones."""
    scale: float | np.floating[Any] | None
    """What the scores are multiplied by; 1/√D by default."""
    window: Sequence[int | np.integer[Any] | None] | None
    """How many keys to the left and to the right of its position a query sees."""
    softcap: float | np.floating[Any] | None
    """Scores become softcap · tanh(score / softcap)."""
    alibi_slopes: ArrayLike | None
    """slope · |distance| is taken off each score, a slope for each head."""
    sinks: ArrayLike | None
    """A logit for each head that takes part in the denominator only."""
    kv_lengths: ArrayLike | None
    """How many keys of each item are there."""
    out: NDArray[Any] | None
    """Where to write the output."""
    threads: int | None
    """Upper bound on threads."""
    backend: str | None
    """A name of backends()."""


class Options(VarlenOptions, total=False):
    """The options of every call whose items are of one padded length."""

    mask: ArrayLike | None
    """True, or what is added to the scores, for a key that a query sees."""
    block_mask: BlockMask | None
    """Which blocks of keys each block of queries sees."""
    kv_segments: ArrayLike | None
    """Of which segment each key is: a query sees those of its own."""
    q_segments: ArrayLike | None
    """The same of each query; by default as kv_segments."""
    q_lengths: ArrayLike | None
    """How many queries of each item are there."""
    query_offset: ArrayLike | None
    """The position of the first query, in place of what align says."""
    key_offset: int | np.integer[Any]
    """The position of the first key."""


class LayoutOptions(Options, total=False):
    """The options of every call that is given q with its heads."""

    layout: Literal["bhld", "blhd"]
    """Whether heads come before the length, or behind it."""


class Given(NamedTuple):
    """What a call was given, unchecked.

    From window to sinks stand those that _rules.py makes Rules of; threads and backend come last,
    see src/attention.pyx.
    """

    mask: Any = None
    causal: Any = False
    align: Any = "bottom-right"
    scale: Any = None
    window: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    kv_lengths: Any = None
    q_lengths: Any = None
    block_mask: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    query_offset: Any = None
    key_offset: Any = 0
    layout: Any = "bhld"
    return_weights: Any = False
    return_lse: Any = False
    out: Any = None
    threads: Any = None
    backend: Any = None


DEFAULT = Given()
EXTRAS = ("return_weights", "return_lse")  #: options that change what is returned


def names(options: type, *extras: str) -> dict[str, None]:
    """The names of a call's options in their one order, as a set that keeps it."""
    own = {*options.__annotations__, *extras}
    return {name: None for name in Given._fields if name in own}


VARLEN = names(VarlenOptions, "return_lse")
ATTENTION = names(LayoutOptions, *EXTRAS)
TRACE = names(LayoutOptions)
PROJECTION = names(Options)


def take(
    options: Mapping[str, Any],
    call: str,
    known: Mapping[str, None],
    return_weights: Any = False,
    return_lse: Any = False,
) -> Given:
    """The options of a call, or a TypeError for a name that it does not have."""
    if not options and return_weights is False and return_lse is False:
        return DEFAULT
    if options.keys() <= known.keys():
        return Given(return_weights=return_weights, return_lse=return_lse, **options)
    more = EXTRAS if known is PROJECTION else ()  # which are arguments of their own there
    raise refuse(options.keys() - known.keys(), call, known, more)


def shows(options: type, *extras: str) -> Callable[[F], F]:
    """Let inspect and help() show options in the place of ``**options``, and extras among them.

    They ask what a function wraps: a twin with that signature, never called.  (A Signature would do
    too, but importing inspect takes as long as all the rest.)  In the docstring the names that have
    no entry of their own stand for the line ``**options``.
    """
    shown = names(options, *extras)
    types: dict[str, Any] = {name: getattr(of, "__forward_arg__", of)
                             for name, of in options.__annotations__.items()}  # fmt: skip

    def decorate(function: F) -> F:
        of: Any = function
        code = of.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        positional = code.co_varnames[: code.co_argcount]
        own = [n for n in code.co_varnames[code.co_argcount : count] if n not in shown]
        parameters = (*positional, *own, *shown)
        twin = FunctionType(
            _nothing.__code__.replace(
                co_argcount=code.co_argcount, co_kwonlyargcount=len(own) + len(shown),
                co_varnames=parameters, co_nlocals=len(parameters), co_name=code.co_name,
            ),
            {**globals(), **of.__globals__},  # where what is written in either module has a meaning
        )  # fmt: skip
        of.__doc__ = _documented(of.__doc__, shown)
        update_wrapper(twin, of)
        del twin.__dict__["__wrapped__"]
        twin.__defaults__ = of.__defaults__
        defaults = {n: getattr(DEFAULT, n) for n in shown}
        if of.__kwdefaults__:  # the very objects, which the compiled attention looks for
            of.__kwdefaults__.update({n: defaults[n] for n in of.__kwdefaults__ if n in defaults})
        twin.__kwdefaults__ = defaults | (of.__kwdefaults__ or {})
        annotations = {n: of.__annotations__[n] for n in (*own, *positional, *EXTRAS, "return")
                       if n in of.__annotations__}  # fmt: skip
        twin.__annotations__ = types | annotations
        of.__wrapped__ = twin
        return function

    return decorate


def _nothing() -> None:
    pass


def _documented(doc: str | None, shown: Iterable[str]) -> str | None:
    """A docstring with names for its line ``**options``; None under python -OO."""
    before, line, after = (doc or "").partition("**options\n")
    if not line:
        return doc
    indent = before[before.rfind("\n") + 1 :]
    heads = [row for row in (before + after).splitlines() if row[: len(indent) + 1].strip()]
    named = {name.strip() for row in heads for name in row.partition(" :")[0].split(",")}
    rest = ", ".join(name for name in shown if name not in named)
    lines = [line.rstrip(",") for line in textwrap.wrap(rest, 96 - len(indent))]
    return before + f"\n{indent}".join(lines) + "\n" + after
