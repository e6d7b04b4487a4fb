"""How the Cython modules of src/ are compiled; everything else is said in pyproject.toml.

Each .pyx is a module of qkv_ext._core.  Only _kernels links the C files; the others reach them
through the declarations of qkv_ext/_core/_kernels.pxd.  Each holds the id of its build, which
qkv_ext/_core/_build.py explains.  Without a C compiler the install succeeds all the same, and the
NumPy backend serves.
"""

import os
import re
import runpy
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No -march and no -ffast-math: every kernel file names its own instruction set by a pragma, and
# everything else stays at the baseline of the platform's ABI.  -ffp-contract=off keeps a * b + c
# two roundings on every platform, so that only what the kernels write as a fused product is one.
FLAGS = {
    "unix": [
        "-std=gnu11",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wall",
        "-Wextra",
    ],
    "msvc": ["/std:c11", "/experimental:c11atomics", "/O2", "/fp:precise"],
}
OPTIMISE = ["-O3", "-g0"]  # left to the user where CFLAGS is set: debug, coverage, sanitizers

# What breaks masks, the rules for NaN, or the subnormals of the whole process, in the spelling of
# GCC, Clang, Intel, NVIDIA or Microsoft.  It is taken out wherever it comes from: CFLAGS, LDFLAGS,
# CC, Python's own flags.  What a compiler adds by itself meets an #error in kernels.h.
FAST = re.compile(
    r"""(/clang:)?(
        -f(fast-math|unsafe-math-optimizations|finite-math-only|associative-math|reciprocal-math)
        | -f(no-signed-zeros|no-honor-(nans|infinities)|approx-func|single-precision-constant)
        | -f(cx-limited-range|cx-fortran-rules|denormal-fp-math.*)
        | -f?fp-model[=:](fast|aggressive).* | [-/]fp:(fast|contract).* | [-/]Qf(tz|ast_.*)
        | -m(daz-ftz|recip(=.*)?|low-precision-.*|fpmath=(?!sse$).*)
        | -(ftz|fast|fastsse|no-prec-(div|sqrt)|M(flushz|daz|fprelaxed.*)) | .*crtfastmath\.o
    )""",
    re.VERBOSE,
)
INTEL = {"icx", "icpx", "icc"}  # whose floating point is fast unless they are told
ID = runpy.run_path("qkv_ext/_core/_build.py")  # by its path: the package itself needs NumPy


def strict(command, dropped):
    """A compiler's command line without fast floating point; what was left out is added to dropped.

    -Ofast is -O3 with -ffast-math.
    """
    fast = [flag for flag in command if flag == "-Ofast" or FAST.fullmatch(flag)]
    dropped.update(fast)
    kept = ["-O3" if flag == "-Ofast" else flag for flag in command]
    return [flag for flag in kept if flag not in fast]


class Build(build_ext):
    """build_ext with flags chosen by the compiler that is really there."""

    def build_extensions(self):
        dropped = set()
        for name in self.compiler.executables:
            command = getattr(self.compiler, name, None)
            if isinstance(command, list):
                setattr(self.compiler, name, strict(command, dropped))
        if dropped:
            self.warn(f"left out, for NaN and masks would be wrong: {' '.join(sorted(dropped))}")
        self.asked = self.force
        super().build_extensions()

    def build_extension(self, ext):
        built = Path(self.get_ext_fullpath(ext.name))
        ((_, build),) = ext.define_macros
        stale = built.is_file() and build.encode() not in built.read_bytes()
        self.force = self.asked or stale  # whatever the files' times say
        kind = self.compiler.compiler_type
        flags = FLAGS.get(kind, FLAGS["unix"])
        if INTEL & {Path(word).name for word in getattr(self.compiler, "compiler_so", ())}:
            flags = ["-fp-model=precise", *flags]
        if kind != "msvc" and not os.environ.get("CFLAGS"):
            flags = [*flags, *OPTIMISE]
        ext.extra_compile_args = flags
        ext.cython_include_dirs = ["."]  # lets "from qkv_ext._core._kernels cimport ..." resolve
        super().build_extension(ext)


def module(name):
    """The extension of that name, made of src/<name>.pyx, and of the C files if it links them."""
    c_files = sorted(glob("src/kernels/*.c")) if name == "_kernels" else []
    asked = os.environ.get("QKV_EXT_REQUIRE_C", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"QKV_EXT_REQUIRE_C is {asked!r}; expected 1, 0 or nothing")
    required = os.environ.get("CIBUILDWHEEL") or asked == "1"
    build, files = ID["of_module"](Path(), name)
    return Extension(
        f"qkv_ext._core.{name}",
        sources=[f"src/{name[1:]}.pyx", *c_files],
        depends=[*map(str, files), *(f"qkv_ext/{name}" for name in ID["CONTRACT"])],
        define_macros=[("QKV_BUILD", build)],
        include_dirs=["src/kernels"],
        libraries=[] if sys.platform == "win32" else ["m"],
        optional=not required,
    )


setup(
    ext_modules=[module(name) for name in ID["MODULES"]],
    cmdclass={"build_ext": Build},
)
