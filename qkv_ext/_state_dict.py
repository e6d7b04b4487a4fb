"""The weights of an attention layer out of a state dict, by the names that models give them.

The one table below has a line for each family of names.  Adding one is adding a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    o: tuple[str, ...]  # none: the module ends before W_O


_MODULES = (
    _Names("q_proj", "k_proj", "v_proj", ("o_proj", "out_proj")),  # Llama, Whisper, CLIP
    _Names("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
           ("self_attn.o_proj", "self_attn.out_proj")),
    _Names("query", "key", "value", ()),  # BertSelfAttention
    _Names("self.query", "self.key", "self.value", ("output.dense",)),  # BertAttention
    _Names("attention.self.query", "attention.self.key", "attention.self.value",
           ("attention.output.dense",)),  # BertLayer
    _Names("attention.attention.query", "attention.attention.key", "attention.attention.value",
           ("attention.output.dense",)),  # ViTLayer
)  # fmt: skip
_TORCH_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
#: What stands between the projections and the product in some models, and has no place here.
_UNSERVED = ("bias_k", "bias_v", "q_norm.weight", "k_norm.weight")


def find(mapping: Mapping[str, Any], prefix: str) -> Found:
    """The weights of the one layer whose names start with the prefix."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping is a {type(mapping).__name__}; expected names and arrays")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}; expected a str")
    at = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    if f"{at}in_proj_weight" in mapping or any(at + name in mapping for name in _TORCH_SEPARATE):
        _reject_unserved(mapping, at)
        return _torch(mapping, at)
    for names in _MODULES:
        if any(f"{at}{name}.weight" in mapping for name in names[:3]):
            _reject_unserved(mapping, at + names.q[: names.q.rfind(".") + 1])
            return _modules(mapping, at, names)
    tried = ["in_proj_weight", ", ".join(_TORCH_SEPARATE)]
    tried += [", ".join(f"{name}.weight" for name in names[:3]) for names in _MODULES]
    there = sorted(name for name in mapping if isinstance(name, str) and name.startswith(at))
    shown = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
    raise ValueError(
        f"mapping has no attention weights under prefix {at!r}; looked for {'; '.join(tried)}; "
        f"{f'there are {shown}' if there else f'none of its {len(mapping)} names starts so'}"
    )


def _torch(mapping: Mapping[str, Any], at: str) -> Found:
    """nn.MultiheadAttention: one in_proj_weight, or three weights where kdim or vdim differ."""
    w_o, b_o = _take(mapping, f"{at}out_proj.weight", 2), _maybe(mapping, f"{at}out_proj.bias")
    bias = _maybe(mapping, f"{at}in_proj_bias")
    if f"{at}in_proj_weight" in mapping:
        w = _take(mapping, f"{at}in_proj_weight", 2)
        return Found(True, {"qkv": w.T, "o": w_o.T}, {"qkv": bias, "o": b_o})
    q, k, v = (_take(mapping, at + name, 2) for name in _TORCH_SEPARATE)
    thirds: Any = (None, None, None)
    if bias is not None:
        thirds = np.split(bias, np.cumsum([len(q), len(k)]))
    b = dict(zip("qkv", thirds, strict=True))
    return Found(False, {"q": q.T, "k": k.T, "v": v.T, "o": w_o.T}, b | {"o": b_o})


def _modules(mapping: Mapping[str, Any], at: str, names: _Names) -> Found:
    """A module for each of Q, K, V and O, with a weight and perhaps a bias."""
    module: dict[str, str | None] = {"q": names.q, "k": names.k, "v": names.v, "o": None}
    if names.o:
        there = [name for name in names.o if f"{at}{name}.weight" in mapping]
        if not there:
            looked_for = " or ".join(f"{at}{name}.weight" for name in names.o)
            raise ValueError(f"mapping has no {looked_for}, but {at}{names.q}.weight")
        module["o"] = there[0]
    weights: dict[str, Any] = {"o": None}
    biases: dict[str, Any] = {"o": None}
    for part, name in module.items():
        if name is not None:
            weights[part] = _take(mapping, f"{at}{name}.weight", 2).T
            biases[part] = _maybe(mapping, f"{at}{name}.bias")
    return Found(False, weights, biases)


def _reject_unserved(mapping: Mapping[str, Any], at: str) -> None:
    for name in _UNSERVED:
        if at + name in mapping:
            raise ValueError(
                f"mapping has {at + name}, which changes Q, K or V after their projection; "
                "expected a layer without"
            )


def _maybe(mapping: Mapping[str, Any], name: str) -> Array | None:
    """A bias, or None where it is not there."""
    return _take(mapping, name, 1) if mapping.get(name) is not None else None


def _take(mapping: Mapping[str, Any], name: str, rank: int) -> Array:
    """An array of the mapping; float16 and bfloat16 become float32 here, once."""
    if name not in mapping:
        raise ValueError(f"mapping has no {name}; expected it beside the other weights")
    try:
        array = np.asarray(mapping[name])
    except (TypeError, RuntimeError) as error:  # a tensor in a dtype or a place NumPy cannot read
        raise TypeError(f"{name} is no array for NumPy: {error}") from error
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}; expected floating point")
    if array.ndim != rank:
        wanted = "(out, in)" if rank == 2 else "(out,)"
        raise ValueError(f"{name} has shape {array.shape}; expected {wanted}")
    return array if array.dtype.itemsize > 2 else array.astype(np.float32)
