"""The id of a build: whether the compiled modules and these Python files were made for each other.

Modules of two builds side by side, or Python files that are newer than the modules, read each
other's memory wrongly.  An upgrade in place of which one module fails to compile leaves the first,
``git pull`` under an editable installation the second.  So setup.py compiles an id into each
module, and _backends.py compares them before anything is called.  It is three hashes:

    OWN        what this module alone is compiled from
    SHARED     what all of them are: how they are compiled, and what they know of each other
    CONTRACT   the Python files that say what the modules are given: problems, rules, pages, panels

The modules have to agree on the last two, and with the Python files on the third, which is taken of
their text at import: an edit of any other Python file needs no new build.  The first tells setup.py
which of them an edit of their sources makes stale.  Contents count, but not times, nor
the newlines that git may change.  Python files that are not there as text, as in a frozen
application, came together with the modules and are not compared.

The hash is Python's own for source files; like the modules, it belongs to one version of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import source_hash
from pathlib import Path
from typing import Any

#: The compiled modules here, in the order in which they are imported; _backends.py spells that out.
MODULES = (
    "_kernels",
    "_matmul",
    "_softmax",
    "_rotary",
    "_merge",
    "_norm",
    "_append",
    "_attention",
    "_step",
)
SHARED = (  # patterns, from the root of the tree; src/*.c is what Cython makes
    "setup.py",
    "qkv_ext/__init__.py",  # with the version: those of two releases never meet
    "qkv_ext/_core/*.pxd",
    *(f"src/kernels/{name}.h" for name in ("build", "float_mode", "kernels", "pool")),
    "src/kernels/storage.def",
)
OWN = {  # beside src/<module>.pyx
    "_kernels": ("src/kernels/*.c", "src/kernels/*.h", "src/kernels/*.def"),
    "_append": ("src/contract.pxd",),
    "_attention": ("src/*.pxd",),
}
CONTRACT = (
    "_cache/_pages.py",
    "_cache/_store.py",
    "_core/_arrays.py",
    "_core/_backends.py",
    "_core/_check.py",
    "_core/_packed.py",
    "_core/_problem.py",
    "_core/_rules.py",
    "_core/_storage.py",
    "merge.py",
    "norm.py",
    "rotary.py",
)
REINSTALL = (
    "install it again: 'pip install -e .' in a clone, else "
    "'pip install --force-reinstall --no-cache-dir qkv_ext'"
)


def _hash(files: Iterable[Path]) -> str:
    texts = (b"%s\0%s\0" % (file.name.encode(), file.read_bytes()) for file in files)
    return source_hash(b"".join(texts).replace(b"\r\n", b"\n")).hex()


def of_python(package: Path = Path(__file__).parents[1]) -> str | None:
    """The hash of the Python files of a package, None where they are not there as text."""
    try:
        return _hash(package / name for name in CONTRACT)
    except OSError:
        return None


def sources(root: Path, *patterns: str) -> list[Path]:
    """The files of a tree that all modules are compiled from, and those of patterns."""
    found = {file for pattern in (*SHARED, *patterns) for file in root.glob(pattern)}
    return sorted(file for file in found if not file.name.startswith("."))


def of_tree(root: Path) -> str:
    """What the modules of a tree have to agree on."""
    return f"s{_hash(sources(root))}_p{of_python(root / 'qkv_ext')}"


def of_module(root: Path, name: str) -> tuple[str, list[Path]]:
    """The id of a build of a module, an identifier of C, and the files that it is compiled from."""
    files = sources(root, f"src/{name[1:]}.pyx", *OWN.get(name, ()))
    return f"o{_hash(files)}_{of_tree(root)}", files


def check(modules: Mapping[str, Any], complete: bool, python: str | None) -> None:
    """ImportError where the last of the modules is of another build than the first, or than python.

    python is what of_python() said.  Modules of a build before there were ids have none; where that
    is true of all of them, the last says so.
    """
    first, last = (list(modules.values())[at] for at in (0, -1))
    shared, build = (getattr(one, "BUILD", "").partition("_")[2] for one in (first, last))
    if build != shared:
        raise ImportError(f"it is of another build than {first.__name__}; {REINSTALL}")
    if not build and complete:
        raise ImportError(f"it has no build id, so its build is an old one; {REINSTALL}")
    if build and python is not None and not build.endswith(f"_p{python}"):
        raise ImportError(f"it was built for other Python files of qkv_ext; {REINSTALL}")
