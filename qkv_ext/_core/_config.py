"""show_config(): what was compiled, what can run here, what does run, and why."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from qkv_ext._core import _backends, _blas, _threads
from qkv_ext._core._text import printable


def _cpu_name() -> str:
    """What the system calls this CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_bytes().split(b"\n"):
            name, _, value = line.partition(b":")
            if name.strip() == b"model name" and value.strip():
                return value.strip().decode("utf-8", "backslashreplace")
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _left_out() -> dict[str, str]:
    """Instruction sets of this kind of CPU that the build does not hold, and why."""
    if "avx2" in _backends.COMPILED_IN and "avx512" not in _backends.COMPILED_IN:
        # isa.def excludes it where _MSC_VER is defined, clang-cl too
        return {"avx512": "MSVC is not trusted with 512-bit code"}
    return {}


def config() -> dict[str, Any]:
    """What show_config() prints, as a dictionary that JSON can hold."""
    import qkv_ext

    compiled = bool(_backends.COMPILED_IN)
    default = _backends.DEFAULT
    if _backends.ASKED_FOR:
        why = "QKV_EXT_BACKEND asks for it"
    elif default.isa < 0:
        why = _backends.NOT_COMPILED
    else:
        why = "the fastest that runs here"
    return {
        "version": qkv_ext.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "machine": f"{platform.system()} {platform.machine()}",
        "compiled": compiled,
        "not_compiled_because": _backends.NOT_COMPILED,
        "compiler": _backends.COMPILER,
        "compiled_in": list(_backends.COMPILED_IN),
        "left_out": _left_out(),
        "backends": list(_backends.backends()),
        "default": default.name,
        "default_because": why,
        "threads": _threads.DEFAULT,
        "threads_from": _threads.SOURCE,
        "threads_of_numpy": _blas.describe(),
    }


def show_config(file: TextIO | None = None) -> None:
    """Print what was compiled, what can run here, what does run, and why.

    Three different questions have three lines: the instruction sets that this build holds, those
    that this CPU and operating system can run, and the one that serves a call by default.

    Parameters
    ----------
    file : text file, optional
        Where to print; standard output by default.  What its encoding lacks is spelled in ASCII.

    Examples
    --------
    >>> import io, qkv_ext
    >>> text = io.StringIO()
    >>> qkv_ext.show_config(file=text)
    >>> text.getvalue().startswith("qkv_ext")
    True
    """
    c = config()
    if c["compiled"]:
        built = f"{', '.join(c['compiled_in'])} ({c['compiler']})"
        built += "".join(f"; without {name}: {why}" for name, why in c["left_out"].items())
    else:
        built = f"nothing: {c['not_compiled_because']}"
    missing = [name for name in c["compiled_in"] if name not in c["backends"]]
    here = ", ".join(c["backends"])
    if missing:
        here += f" (not on this CPU or operating system: {', '.join(missing)})"
    lines = [
        f"qkv_ext     {c['version']}, Python {c['python']}, NumPy {c['numpy']}",
        f"machine     {c['cpu']}, {c['machine']}",
        f"compiled    {built}",
        f"backends    {here}",
        f"default     {c['default']} ({c['default_because']})",
        f"threads     at most {c['threads']} ({c['threads_from']}); {c['threads_of_numpy']}",
    ]
    file = sys.stdout if file is None else file
    print(printable("\n".join(lines), file), file=file)
