"""Attention on the CPU for NumPy arrays: softmax(Q Kᵀ / √D) V, small, fast, exact about masks."""

from qkv_ext._core._backends import PerformanceWarning, backends
from qkv_ext._core._block_mask import BlockMask
from qkv_ext._core._config import show_config
from qkv_ext._core._packed import PackedWeight
from qkv_ext.attention import alibi_slopes, scaled_dot_product_attention, varlen_attention
from qkv_ext.cache import KVCache
from qkv_ext.linear import linear_projection, matmul, pack_weight, softmax
from qkv_ext.merge import merge_attention
from qkv_ext.multihead import MultiHeadAttention
from qkv_ext.norm import layer_norm, rms_norm
from qkv_ext.projected import ProjectedKV, cross_attention, self_attention
from qkv_ext.rotary import RotaryFrequencies, apply_rotary, rotary_inv_freq, rotary_tables
from qkv_ext.tracing import trace, trace_cross, trace_self

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "KVCache",
    "MultiHeadAttention",
    "PackedWeight",
    "PerformanceWarning",
    "ProjectedKV",
    "RotaryFrequencies",
    "__version__",
    "alibi_slopes",
    "apply_rotary",
    "backends",
    "cross_attention",
    "layer_norm",
    "linear_projection",
    "matmul",
    "merge_attention",
    "pack_weight",
    "rms_norm",
    "rotary_inv_freq",
    "rotary_tables",
    "scaled_dot_product_attention",
    "self_attention",
    "show_config",
    "softmax",
    "trace",
    "trace_cross",
    "trace_self",
    "varlen_attention",
]
