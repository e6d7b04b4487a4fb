"""The inside of the calls with projections: their weights and checks, and the path of a call."""

from qkv_ext._layers._check_layer import ProjectedKV as ProjectedKV  # by this name in older pickles
