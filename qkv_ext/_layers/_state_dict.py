"""The weights of an attention layer out of a state dict, by the names that models give them.

The one table below has a line for each family of names.  Adding one is adding a line.  What else
the module of the projections holds is known to change nothing, or the layer is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv_ext._core._arrays import array_of, shown

Array = NDArray[Any]


class Found(NamedTuple):
    """Weights (d_in, d_out) and biases; where fused, those of Q, K and V are one array each."""

    fused: bool
    weights: dict[str, Any]  # by "qkv" and "o", or by "q", "k", "v" and "o"
    biases: dict[str, Any]


class _Names(NamedTuple):
    """The names of the modules of Q, K and V under the prefix, and of W_O: the first there is."""

    q: str
    k: str
    v: str
    o: tuple[str, ...]
    norms: tuple[str, ...] = ()  # before the projections or after W_O, no part of the attention
    needs_o: bool = True  # if not, the module may end before W_O
    scope: str = ""  # where the module starts, all of whose tensors have to be known


_W_O = ("o_proj", "out_proj", "dense")
#: Norms after W_O in BERT, before the projections in ESM, Megatron-BERT and XLM-RoBERTa-XL.
_NORMS = ("output.LayerNorm", "LayerNorm", "ln", "self_attn_layer_norm")
_LAYER_NORMS = tuple(f"attention.{name}" for name in _NORMS)

_MODULES = (
    _Names("q_proj", "k_proj", "v_proj", _W_O),  # Llama, Whisper, CLIP; Phi
    _Names("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
           tuple(f"self_attn.{name}" for name in _W_O), scope="self_attn."),
    _Names("query", "key", "value", ("dense", "out_proj", "proj", "output"),
           ("LayerNorm",), needs_o=False),  # BertSelfAttention, without W_O; AlbertAttention
    _Names("self.query", "self.key", "self.value", ("output.dense",), _NORMS),  # BertAttention
    _Names("attention.self.query", "attention.self.key", "attention.self.value",
           ("attention.output.dense",), _LAYER_NORMS, scope="attention."),  # BertLayer
    _Names("attention.attention.query", "attention.attention.key", "attention.attention.value",
           ("attention.output.dense",), _LAYER_NORMS, scope="attention."),  # ViTLayer, BLIP-2
)  # fmt: skip
_TORCH_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")

#: Tensors of an attention module that change nothing: what the options of a call stand for.
_HARMLESS = ("*inv_freq", "*.cos_cached", "*.sin_cached", "*masked_bias")
_CAUSAL = ("bias", "mask", "causal_mask")  # if they are masks (1, 1, n, n) of zeros and ones
#: What is not of the attention, where a layer has its projections at its top.
_BESIDE = ("mlp.*", "output.LayerNorm.*")
#: What is of the attention, where a layer has it beside the module: BEiT.
_OF_SCORES = ("relative_position_bias*", "relative_attention_bias*", "rel_pos_bias*")
#: What the layer cannot do, by what is in the names, in lower case.
_REASONS = (
    ("*sink*", "sinks are an option of the call, sinks="),
    ("*bias_[kv]", "it joins no key and value of its own to those of the sequence"),
    ("*lora_*|*base_layer*|*adapter*", "adapters are to be merged into the weights first"),
    ("*weight_scale*|*input_scale*|*.scales|*qweight|*zeros|*zero_point|*quant*|*absmax|*scb|"
     "*g_idx", "quantised weights are to be made floats first"),
    ("*weight_[gv]|*parametriz*", "weights in parts are to be put together first"),
    ("*norm*|*ln.*", "it has no norms of Q, K, V or the heads"),
    ("*gate*", "it has no gates"),
    ("*relative*|*rel_*|*rpb*|*distance*|*position*|*attention_bias*",
     "it has no relative positions; a bias of the scores is an option of the call, mask="),
    ("*scale*|*lambda*|*gamma*", "it has no learned factors"),
)  # fmt: skip


def find(mapping: Mapping[str, Any], prefix: str, ignore: str | Iterable[str] = ()) -> Found:
    """The weights of the one layer whose names start with the prefix."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping is a {type(mapping).__name__}; expected names and arrays")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {shown(prefix)}; expected a str")
    patterns = _patterns(ignore)
    at = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    if f"{at}in_proj_weight" in mapping or any(at + name in mapping for name in _TORCH_SEPARATE):
        return _torch(mapping, at, patterns)
    for names in _MODULES:
        if any(f"{at}{name}.weight" in mapping for name in names[:3]):
            return _modules(mapping, at, names, patterns)
    tried = ["in_proj_weight", ", ".join(_TORCH_SEPARATE)]
    tried += [", ".join(f"{name}.weight" for name in names[:3]) for names in _MODULES]
    there = sorted(name for name in mapping if isinstance(name, str) and name.startswith(at))
    some = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
    raise ValueError(
        f"mapping has no attention weights under prefix {at!r}; looked for {'; '.join(tried)}; "
        f"{f'there are {some}' if there else f'none of its {len(mapping)} names starts so'}"
    )


def kv_heads(found: Found, num_heads: Any) -> int | None:
    """Hkv by the widths of Q and K, or None where they leave a doubt."""
    if not isinstance(num_heads, (int, np.integer)) or num_heads < 1:
        return None
    if found.fused:  # H·D rows of W_O tell the columns of Q among those of Q, K and V
        q = found.weights["o"].shape[0]
        k, odd = divmod(found.weights["qkv"].shape[1] - q, 2)
    else:
        q, k, odd = found.weights["q"].shape[1], found.weights["k"].shape[1], 0
    d, rest = divmod(q, num_heads)
    if rest or odd or d == 0 or k <= 0 or k % d or num_heads % (k // d):
        return None
    return int(k // d)


def _torch(mapping: Mapping[str, Any], at: str, ignore: tuple[str, ...]) -> Found:
    """nn.MultiheadAttention: one in_proj_weight, or three weights where kdim or vdim differ."""
    fused = f"{at}in_proj_weight" in mapping
    names = ("in_proj_weight",) if fused else _TORCH_SEPARATE
    used = {*names, "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    _reject_unknown(mapping, at, "", used, _BESIDE, ignore)
    w_o, b_o = _take(mapping, f"{at}out_proj.weight", 2), _maybe(mapping, f"{at}out_proj.bias")
    bias = _maybe(mapping, f"{at}in_proj_bias")
    if fused:
        w = _take(mapping, f"{at}in_proj_weight", 2)
        return Found(True, {"qkv": w.T, "o": w_o.T}, {"qkv": bias, "o": b_o})
    q, k, v = (_take(mapping, at + name, 2) for name in _TORCH_SEPARATE)
    thirds: Any = (None, None, None)
    if bias is not None:
        thirds = np.split(bias, np.cumsum([len(q), len(k)]))
    b = dict(zip("qkv", thirds, strict=True))
    _check_context({at + name: w for name, w in zip(_TORCH_SEPARATE[1:], (k, v), strict=True)})
    return Found(False, {"q": q.T, "k": k.T, "v": v.T, "o": w_o.T}, b | {"o": b_o})


def _modules(mapping: Mapping[str, Any], at: str, names: _Names, ignore: tuple[str, ...]) -> Found:
    """A module for each of Q, K, V and O, with a weight and perhaps a bias."""
    w_o = next((name for name in names.o if f"{at}{name}.weight" in mapping), None)
    module = {"q": names.q, "k": names.k, "v": names.v, "o": w_o}
    used = {f"{name}.{kind}" for name in module.values() if name for kind in ("weight", "bias")}
    beside = (*_BESIDE, *(f"{name}.*" for name in names.norms if w_o))
    _reject_unknown(mapping, at, names.scope, used, beside, ignore)
    if w_o is None and names.needs_o:
        looked_for = " or ".join(f"{at}{name}.weight" for name in names.o)
        raise ValueError(f"mapping has no {looked_for}, but {at}{names.q}.weight")
    weights: dict[str, Any] = {"o": None}
    biases: dict[str, Any] = {"o": None}
    for part, name in module.items():
        if name is not None:
            weights[part] = _take(mapping, f"{at}{name}.weight", 2).T
            biases[part] = _maybe(mapping, f"{at}{name}.bias")
    _check_context({f"{at}{module[part]}.weight": weights[part].T for part in "kv"})
    return Found(False, weights, biases)


def _check_context(weights: dict[str, Array]) -> None:
    """Weights (out, in) of K and V, by their names, project rows of one width."""
    (k, v), (w_k, w_v) = weights, weights.values()
    if w_k.shape[1] != w_v.shape[1]:
        raise ValueError(
            f"{k} takes rows of {w_k.shape[1]} and {v} of {w_v.shape[1]}, as with kdim and vdim in "
            "torch; expected one width: the layer projects keys and values from one context"
        )


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

    used holds names under the prefix, and beside patterns of such names.
    """
    module = at + scope
    layer = module[: module[:-1].rfind(".") + 1]  # of which it is a part
    unknown = []
    for name in mapping:
        if not isinstance(name, str) or not name.startswith(layer):
            continue
        if not name.startswith(module) and not _matches(name[len(layer) :], _OF_SCORES):
            continue
        under, inside = name.removeprefix(at), name.removeprefix(module)
        if not (
            under in used
            or _matches(under, (*_HARMLESS, *beside))
            or any(_matches(x, ignore) for x in (name, under, inside, name.removeprefix(layer)))
            or mapping[name] is None
            or (inside.rpartition(".")[2] in _CAUSAL and _is_mask(mapping[name]))
            or (at == "" and _of_another_layer(mapping, name, used))
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
    for patterns, reason in _REASONS:
        if _matches(name.lower(), tuple(patterns.split("|"))):
            return reason
    return "nothing is known of their meaning"


def _is_mask(x: Any) -> bool:
    """A buffer that says which keys come later, (1, 1, n, n)."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) != 4 or shape[:2] != (1, 1) or shape[2] != shape[3]:
        return False
    array = np.asarray(x)
    return bool(((array == 0) | (array == 1)).all())


def _of_another_layer(mapping: Mapping[str, Any], name: str, used: set[str]) -> bool:
    """Whether a module that the name belongs to has projections of Q, K and V of its own.

    Without a prefix, the mapping may hold more than the one layer.
    """
    every = [("in_proj_weight",), _TORCH_SEPARATE]
    every += [tuple(f"{module}.weight" for module in names[:3]) for names in _MODULES]
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


def _maybe(mapping: Mapping[str, Any], name: str) -> Array | None:
    """A bias, or None where it is not there."""
    return _take(mapping, name, 1) if mapping.get(name) is not None else None


def _take(mapping: Mapping[str, Any], name: str, rank: int) -> Array:
    """An array of the mapping; float16 and bfloat16 become float32 here, once."""
    if name not in mapping:
        raise ValueError(f"mapping has no {name}; expected it beside the other weights")
    array = array_of(mapping[name], name)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}; expected floating point")
    if array.ndim != rank:
        wanted = "(out, in)" if rank == 2 else "(out,)"
        raise ValueError(f"{name} has shape {array.shape}; expected {wanted}")
    return array if array.dtype.itemsize > 2 else array.astype(np.float32)
