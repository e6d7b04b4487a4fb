"""Where PackedWeight was, by which older pickles name it."""

from qkv_ext._core._packed import PackedWeight as PackedWeight
