"""Copies of the package, whole and without its compiled modules, and code that imports them."""

import shutil
from pathlib import Path

import qkv_ext


def whole_copy(tmp_path, *without):
    """A folder with the package as it is, without the files of the patterns, and its metadata."""
    folder = tmp_path / "copy"
    shutil.copytree(
        Path(qkv_ext.__file__).parent,
        folder / "qkv_ext",
        ignore=shutil.ignore_patterns("__pycache__", *without),
    )
    info = folder / "qkv_ext-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qkv_ext\nVersion: 0.0\n")
    return folder


def bare_copy(tmp_path, **modules):
    """A folder with the package's Python files, and the given text as modules in place of C."""
    folder = whole_copy(tmp_path, "*.so", "*.pyd")
    for name, text in modules.items():
        (folder / "qkv_ext" / "_core" / f"{name}.py").write_text(text)
    return folder


# an editable installation finds modules of the package whatever its folder is
ALONE = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in getattr(x, "__module__", "")]
"""
USE = """
import numpy as np, qkv_ext
x = np.ones((3, 4), "f4")
print(qkv_ext.backends(), qkv_ext.scaled_dot_product_attention(x, x, x).sum())
qkv_ext.show_config()
"""
SERVED = "('numpy',) 12.0"
CAUGHT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import qkv_ext
for one in caught:
    print(one.category.__name__, one.message)
print(len(caught))
"""
