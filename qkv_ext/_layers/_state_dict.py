"""The weights of an attention layer out of a state dict, by the names that models give them.

The table of names is in _families.py.  What else the module of the projections holds is known to
change nothing, or the layer is refused; so it is where the names leave open what changes the
result: the order of fused rows, the scale of T5, the epsilon of norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv_ext._core import _arrays
from qkv_ext._core._arrays import array_of, shown
from qkv_ext._core._check_norm import epsilon
from qkv_ext._layers._families import (
    BESIDE,
    CAUSAL,
    FAMILIES,
    HARMLESS,
    OF_SCORES,
    REASONS,
    Family,
    tensor,
)
from qkv_ext._layers._weights import ORDERS

Array = NDArray[Any]


class Found(NamedTuple):
    """Weights (d_in, d_out) and biases, by "q", "k", "v" and "o"; fused ones by "qkv" or "kv"."""

    order: str | None  # of a fused one
    weights: dict[str, Any]
    biases: dict[str, Any]
    more: dict[str, Any]  # norms, their epsilon and sinks, as the layer takes them


class Asked(NamedTuple):
    """What the caller says beside the names."""

    order: Any
    norm_eps: float | None
    norm_offset: float
    scale: Any
    ignore: tuple[str, ...]


def find(
    mapping: Mapping[str, Any],
    prefix: str,
    ignore: str | Iterable[str] = (),
    order: Any = None,
    norm_eps: Any = None,
    norm_offset: Any = 0.0,
    scale: Any = None,
) -> Found:
    """The weights of the one layer whose names start with the prefix."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping is a {type(mapping).__name__}; expected names and arrays")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {shown(prefix)}; expected a str")
    if order is not None:
        _arrays.choice(order, "order", ORDERS)
    eps = None if norm_eps is None else epsilon(norm_eps, "norm_eps")
    offset = _arrays.real(norm_offset, "norm_offset", "a finite number")
    if not abs(offset) <= _arrays.LARGEST_FLOAT64:
        raise ValueError(f"norm_offset is {shown(norm_offset)}; expected a finite number")
    asked = Asked(order, eps, float(offset), scale, _patterns(ignore))
    at = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    family, scope = _family(mapping, at)
    return _read(mapping, at, scope, family, asked)


def _family(mapping: Mapping[str, Any], at: str) -> tuple[Family, str]:
    """The line of the table that fits best, and where in the layer the module stands."""
    places = [
        (family, scope)
        for family in FAMILIES
        for scope in family.at
        if fnmatchcase(at + scope, family.path)
    ]
    some = []
    for family, scope in places:
        there = [at + scope + tensor(name) in mapping for name in family.weights]
        o = not family.needs_o or any(at + scope + tensor(name) in mapping for name in family.o)
        if any(there):
            some.append((all(there) + (all(there) and o), family, scope))
    if some:
        _, family, scope = max(some, key=lambda each: each[0])
        return family, scope
    tried = dict.fromkeys(", ".join(map(tensor, family.weights)) for family in FAMILIES)
    scopes = dict.fromkeys(scope for family in FAMILIES for scope in family.at if scope)
    names = sorted(name for name in mapping if isinstance(name, str) and name.startswith(at))
    first = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise ValueError(
        f"mapping has no attention weights under prefix {at!r}; looked for {'; '.join(tried)}, "
        f"some under {' '.join(scopes)} too; "
        f"{f'there are {first}' if names else f'none of its {len(mapping)} names starts so'}"
    )


def kv_heads(found: Found, num_heads: Any) -> int | None:
    """Hkv by the widths of Q and K, or None where they leave a doubt."""
    if not isinstance(num_heads, (int, np.integer)) or num_heads < 1:
        return None
    w, odd = found.weights, 0
    if "qkv" in w:  # H·D rows of W_O tell the columns of Q among those of Q, K and V
        q = w["o"].shape[0]
        k, odd = divmod(w["qkv"].shape[1] - q, 2)
    elif "kv" in w:
        q = w["q"].shape[1]
        k, odd = divmod(w["kv"].shape[1], 2)
    else:
        q, k = w["q"].shape[1], w["k"].shape[1]
    d, rest = divmod(q, num_heads)
    if rest or odd or d == 0 or k <= 0 or k % d or num_heads % (k // d):
        return None
    return int(k // d)


PARTS = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}


def _read(mapping: Mapping[str, Any], at: str, scope: str, family: Family, asked: Asked) -> Found:
    """The tensors of the module, which has one for each projection, or one for several."""
    module = at + scope
    if family.refused:
        names = ", ".join(module + tensor(name) for name in family.weights)
        raise ValueError(f"mapping has {names}: {family.refused}; expected an order of rows known")
    w_o = next((name for name in family.o if module + tensor(name) in mapping), None)
    parts = dict(zip(PARTS[len(family.weights)], family.weights, strict=True))
    if w_o is not None:
        parts["o"] = w_o
    own = [name for name in parts.values() if not name.endswith("_weight")]
    used = {*map(tensor, parts.values()), *(f"{name}.bias" for name in own), family.bias}
    norms = [f"{part}_norm" for part in "qk" if family.rms]
    used |= {f"{name}.weight" for name in norms} | ({"sinks"} if family.sinks else set())
    beside = (*BESIDE, *(f"{name}.*" for name in family.beside if w_o))
    _reject_unknown(mapping, at, scope, used, beside, asked.ignore)
    if w_o is None and family.needs_o:
        looked_for = " or ".join(module + tensor(name) for name in family.o)
        raise ValueError(f"mapping has no {looked_for}, but {module}{tensor(family.weights[0])}")
    order = _order(module, family, asked.order)
    weights: dict[str, Any] = {"o": None}
    biases: dict[str, Any] = {"o": None}
    for part, name in parts.items():
        w = _take(mapping, module + tensor(name), 2, "(in, out)" if family.conv1d else "(out, in)")
        weights[part] = w if family.conv1d else w.T
        biases[part] = _maybe(mapping, f"{module}{name}.bias") if name in own else None
    _one_bias(mapping, module + family.bias if family.bias else "", weights, biases)
    alone = biases["o"] is not None and not any(
        biases[part] is not None for part in parts if part != "o"
    )
    scale = family.scale or (family.scale_if_o_biased if alone else "")
    if scale and asked.scale is None:
        raise ValueError(
            f"scale is None, but the names {', '.join(module + name for name in family.weights)} "
            f"do not tell it; expected scale=: {scale}"
        )
    _check_orientation(module, parts, weights, family)
    more = _norms(mapping, module, norms, asked)
    if family.sinks:
        more["sinks"] = _maybe(mapping, f"{module}sinks", "(H,)")
    return Found(order, weights, biases, more)


def _order(module: str, family: Family, asked: str | None) -> str | None:
    """The order of the rows of a fused weight: what the names say, or the caller."""
    names = ", ".join(module + name for name in family.weights)
    if family.order == "?":
        if asked is None:
            raise ValueError(
                f"order is None, but the name {names} does not tell the order of its rows; expected"
                " 'qkv', all of Q, of K, of V (ChatGLM, timm), or 'grouped', for each key/value "
                "head its queries, key and value (GPT-NeoX, BLOOM, Falcon)"
            )
        return asked
    if asked not in (None, family.order):
        said = f"have the order {family.order!r}" if family.order else "are not fused"
        raise ValueError(f"order is {asked!r}, but {names} {said}; expected no order")
    return family.order or None


def _one_bias(
    mapping: Mapping[str, Any], name: str, weights: dict[str, Any], biases: dict[str, Any]
) -> None:
    """in_proj_bias of torch: that of a fused weight, or cut into those of three."""
    bias = _maybe(mapping, name) if name else None
    if bias is None:
        return
    if "qkv" in weights:
        biases["qkv"] = bias
        return
    q, k = (weights[part].shape[1] for part in "qk")
    biases |= zip("qkv", np.split(bias, [q, q + k]), strict=True)


def _check_orientation(
    module: str, parts: dict[str, str], weights: dict[str, Any], family: Family
) -> None:
    """What would otherwise be an error of the layer that does not name its cause."""
    if weights["o"] is None:
        return
    rows = weights["o"].shape[0]
    name = module + tensor(family.weights[-1])
    fused: Any = weights.get("qkv", weights.get("kv"))
    if family.conv1d:  # GPT-2 has as many key/value heads as heads
        columns = len(family.order) * rows
        if fused.shape[1] != columns:
            raise ValueError(
                f"{name} has shape {fused.shape}; expected (in, out) with {columns} columns beside "
                f"the {rows} rows of {module}{tensor(parts['o'])}, as GPT-2 has it: (out, in), as "
                "in nanoGPT or StarCoder, is to be transposed, and given to from_fused"
            )
        return
    if "k" in weights and weights["k"].shape[1] == weights["v"].shape[1]:
        columns = weights["q"].shape[1]
        if columns == 2 * rows:
            raise ValueError(
                f"{module}{tensor(parts['q'])} has {columns} rows, and "
                f"{module}{tensor(parts['o'])} takes {rows}; expected as many: half of them may "
                "be gates (Qwen3-Next), which the layer has not"
            )


def _norms(
    mapping: Mapping[str, Any], module: str, names: list[str], asked: Asked
) -> dict[str, Any]:
    """The RMS norms of Q and K, or the options that are given for none."""
    there = [name for name in names if mapping.get(f"{module}{name}.weight") is not None]
    if not there:
        for option, given in (
            ("norm_eps", asked.norm_eps),
            ("norm_offset", asked.norm_offset or None),
        ):
            if given is not None:
                raise ValueError(
                    f"{option} is {shown(given)}, but mapping has no {module}q_norm.weight; "
                    "expected norms of Q and K, or no such option"
                )
        return {}
    for name in names:
        if name not in there:
            raise ValueError(f"mapping has no {module}{name}.weight, but {module}{there[0]}.weight")
    if asked.norm_eps is None:
        raise ValueError(
            f"norm_eps is None, but mapping has {module}q_norm.weight; expected the epsilon of the "
            "norms, such as rms_norm_eps of the model's config (and norm_offset=1.0 for Gemma)"
        )
    expected = "(D,) or (heads·D,): a norm with a row for each head is a LayerNorm's (Cohere)"
    more: dict[str, Any] = {"norm_eps": asked.norm_eps}
    for name in names:
        w = _take(mapping, f"{module}{name}.weight", 1, expected)
        more[name] = w
        if asked.norm_offset:
            with np.errstate(over="ignore"):
                more[name] = w + w.dtype.type(asked.norm_offset)
            if np.isinf(more[name]).any() and not np.isinf(w).any():
                raise ValueError(
                    f"norm_offset is {asked.norm_offset}; expected one that makes no weight of "
                    f"{module}{name} infinite"
                )
    return more


# ---- what else there is -------------------------------------------------------------------------


def _reject_unknown(
    mapping: Mapping[str, Any],
    at: str,
    scope: str,
    used: set[str],
    beside: tuple[str, ...],
    ignore: tuple[str, ...],
) -> None:
    """Every tensor of the module is used, or changes nothing, or may be left out.

    used holds names inside the module, and beside patterns of such names.
    """
    module = at + scope
    layer = module[: module[:-1].rfind(".") + 1]  # of which it is a part
    unknown = []
    for name in mapping:
        if not isinstance(name, str) or not name.startswith(layer):
            continue
        if not name.startswith(module) and not _matches(name[len(layer) :], OF_SCORES):
            continue
        under, inside = name.removeprefix(at), name.removeprefix(module)
        if not (
            inside in used
            or _matches(inside, (*HARMLESS, *beside))
            or any(_matches(x, ignore) for x in (name, under, inside, name.removeprefix(layer)))
            or mapping[name] is None
            or (inside.rpartition(".")[2] in CAUSAL and _is_mask(mapping[name], name))
            or (at == "" and _of_another_layer(mapping, name, {scope + each for each in used}))
        ):
            unknown.append(name)
    if not unknown:
        return
    reasons = dict.fromkeys(map(_reason, unknown))
    raise ValueError(
        f"mapping has {', '.join(unknown)}, for which the layer has no use: {'; '.join(reasons)}; "
        "expected a module without, or ignore=, patterns of the names to be left out"
    )


def _reason(name: str) -> str:
    for patterns, reason in REASONS:
        if _matches(name.lower(), tuple(patterns.split("|"))):
            return reason
    return "nothing is known of their meaning"


def _is_mask(x: Any, name: str) -> bool:
    """A buffer that says which keys come later, (1, 1, n, n)."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) != 4 or shape[:2] != (1, 1) or shape[2] != shape[3]:
        return False
    array = array_of(x, name)
    return bool(((array == 0) | (array == 1)).all())


def _of_another_layer(mapping: Mapping[str, Any], name: str, used: set[str]) -> bool:
    """Whether a module that the name belongs to has projections of Q, K and V of its own.

    Without a prefix, the mapping may hold more than the one layer.
    """
    every = [
        tuple(scope + tensor(module) for module in family.weights)
        for family in FAMILIES
        for scope in family.at
    ]
    parts = name.split(".")
    for count in range(1, len(parts)):
        at = ".".join(parts[:count]) + "."
        if any(all(at + each in mapping for each in names) for names in every):
            return not any(each.startswith(at) for each in used)
    return False


def _patterns(ignore: Any) -> tuple[str, ...]:
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    if isinstance(patterns, Iterable):
        patterns = tuple(patterns)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
    raise TypeError(f"ignore is {ignore!r}; expected patterns of names, a str or several")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---- arrays -------------------------------------------------------------------------------------


def _maybe(mapping: Mapping[str, Any], name: str, wanted: str = "(out,)") -> Array | None:
    """A bias, or None where it is not there."""
    return _take(mapping, name, 1, wanted) if mapping.get(name) is not None else None


def _take(mapping: Mapping[str, Any], name: str, rank: int, wanted: str) -> Array:
    """An array of the mapping; float16 and bfloat16 become float32 here, once."""
    if name not in mapping:
        raise ValueError(f"mapping has no {name}; expected it beside the other weights")
    array = array_of(mapping[name], name)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}; expected floating point")
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; expected {wanted}")
    return array if array.dtype.itemsize > 2 else array.astype(np.float32)
