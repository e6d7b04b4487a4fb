"""Options that a call does not have: what other libraries call them, and what they are here.

A call takes what it does not know as ``**unknown`` (some 15 ns of a call, where a wrapper takes ten
times that) and gives it to ``refuse``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import update_wrapper
from types import FunctionType
from typing import Any, TypeVar

PROJECTION = "a projection call"  #: self_attention, cross_attention, a layer, and their traces

CO_VARKEYWORDS = 0x08  #: of inspect: the function takes **keywords
F = TypeVar("F", bound=Callable[..., Any])

_NOT_HERE = "inference has none, leave it out"
_IMPLIED = "the shapes imply it, leave it out"
#: Names of torch, flash-attention, transformers and JAX: our option, or None, and what to write.
_OTHERS: dict[str, tuple[str | None, str]] = {
    "attn_mask": ("mask", "mask=, where True keeps a key as in torch's function"),
    "attn_bias": ("mask", "mask=, of floats"),
    "bias": ("mask", "mask=, of floats"),
    "attention_mask": ("mask", "mask=attention_mask[:, None, None, :].astype(bool)"),
    "key_padding_mask": (
        "mask",
        "mask=~key_padding_mask[:, None, None, :], since True keeps a key",
    ),
    "is_causal": ("causal", "causal=, and align='top-left' for the order that torch has"),
    "use_causal_mask": ("causal", "causal=, and align='top-left' for its order"),
    "softmax_scale": ("scale", "scale="),
    "sm_scale": ("scale", "scale="),
    "scaling": ("scale", "scale="),
    "logits_soft_cap": ("softcap", "softcap="),
    "logit_cap": ("softcap", "softcap="),
    "window_size": ("window", "window=(left, right), where None is open"),
    "local_window_size": ("window", "window=(left, right), where None is open"),
    "sliding_window": ("window", "window=(sliding_window - 1, 0)"),
    "s_aux": ("sinks", "sinks="),
    "query_seq_lengths": ("q_lengths", "q_lengths="),
    "key_value_seq_lengths": ("kv_lengths", "kv_lengths="),
    "seqused_k": ("kv_lengths", "kv_lengths="),
    "cache_seqlens": ("kv_lengths", "kv_lengths="),
    "need_weights": ("return_weights", "return_weights="),
    "return_attention_scores": ("return_weights", "return_weights="),
    "output_attentions": ("return_weights", "return_weights="),
    "return_softmax_lse": ("return_lse", "return_lse="),
    "past_key_value": ("cache", "cache=, a KVCache"),
    "past_key_values": ("cache", "cache=, a KVCache"),
    "average_attn_weights": (None, "weights are per head, leave it out"),
    "enable_gqa": (None, _IMPLIED),
    "max_seqlen_q": (None, _IMPLIED),
    "max_seqlen_k": (None, _IMPLIED),
    "dropout_p": (None, _NOT_HERE),
    "dropout": (None, _NOT_HERE),
    "training": (None, _NOT_HERE),
    "deterministic": (None, _NOT_HERE),
}


def refuse(
    given: Collection[str], call: str, options: Collection[str], more: Collection[str] = ()
) -> TypeError:
    """The error for options that a call does not have; it has those, and more to be hinted at."""
    name = min(given)
    message = f"{call}() got an unexpected keyword argument {name!r}"
    if call == PROJECTION:
        message = f"{name!r} is no option of {call}"
    ours, hint = _OTHERS.get(name, ("", ""))
    if hint and (ours is None or ours in options or ours in more):
        return TypeError(f"{message}; {hint if ours is None else f'here it is {hint}'}")
    return TypeError(f"{message}; expected {', '.join(options)}")


def named_options(function: F) -> F:
    """Leave **unknown out of the signature that help() and inspect show.

    They ask what a function wraps: a twin without it, never called.  (A Signature would do too, but
    importing inspect takes as long as all the rest.)
    """
    of: Any = function
    code = of.__code__.replace(co_flags=of.__code__.co_flags & ~CO_VARKEYWORDS)
    twin = FunctionType(code, of.__globals__, argdefs=of.__defaults__, closure=of.__closure__)
    twin.__kwdefaults__ = of.__kwdefaults__
    of.__wrapped__ = update_wrapper(twin, of)
    del twin.__dict__["__wrapped__"]
    return function
