"""Which backends there are, which one serves a call, and why one does not.

A backend is the functions that read a checked problem and write its output arrays.  The compiled
modules serve every instruction set that this machine can run, each under its own name; "numpy" is
simply the slowest of them and is always there.  Nothing here is changed after import.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv_ext._core import _build, _numpy, _numpy_rows
from qkv_ext._core._arrays import Array, shown

if TYPE_CHECKING:
    from qkv_ext._core._check import Checked, Copies
    from qkv_ext._core._problem import Norm, Problem, Product, Rotation, Rows

_FLOAT64 = np.dtype(np.float64)


class PerformanceWarning(UserWarning):
    """The call is right, but a compiled backend could not serve it."""


def _nothing(*_: Any) -> None:
    """No call is plain where nothing is compiled."""


class Backend(NamedTuple):
    """What computes, by an instruction set; and the short ways for calls that need no check.

    A plain function takes what its call was given, and returns None where it wants a look.
    """

    name: str
    isa: int  # the place of the table in compiled(), or -1
    attention: Callable[[Problem], None]
    product: Callable[[Product], None]
    softmax: Callable[[Rows], None]
    rotary: Callable[[Rotation], None]
    rotary_step: Callable[[Rotation, Rotation], None]  # queries and keys
    merge: Callable[..., None]  # (outputs, lses, output, lse, whether BLHD, threads)
    norm: Callable[[Norm], None]
    append: Callable[..., bool] | None = None  # of src/append.pyx; None: _store.py itself
    plain_attention: Callable[..., Any] = _nothing  # (q, k, v, given, threads)
    plain_append: Callable[..., Any] = _nothing  # (k, v, pages, until, threads)
    plain_attend: Callable[..., Any] = _nothing  # (q, pages, given, threads)
    plain_step: Callable[..., Any] = _nothing  # of src/step.pyx, a layer's decode step
    plain_product: Callable[..., Any] = _nothing
    # (a, b, bias, columns of panels, rank, threads), and of linear_projection activation, residual
    plain_softmax: Callable[..., Any] = _nothing  # (x, threads)
    plain_rotary: Callable[..., Any] = _nothing  # the arguments of apply_rotary, but for backend
    plain_merge: Callable[..., Any] = _nothing  # (outputs, lses, threads)
    plain_norm: Callable[..., Any] = _nothing  # (x, weight, bias, eps, whether centered, threads)


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}; expected 1, 0 or nothing")
    return value == "1"


def _fail_or_warn(required: bool, message: str, cause: BaseException | None) -> None:
    if required:
        raise ImportError(f"{message} (QKV_EXT_REQUIRE_C=1 forbids the fallback)") from cause
    warnings.warn(f"{message}; the NumPy backend serves instead", RuntimeWarning, stacklevel=2)


def _installed() -> bool:
    from importlib import metadata  # as slow to import as all the rest together: only if asked

    try:
        metadata.distribution("qkv_ext")
    except metadata.PackageNotFoundError:
        return False
    return True


def _compiled_modules() -> Iterator[Any]:
    """Import them one after the other: spelt out, for the tools that freeze an application."""
    import qkv_ext._core._kernels

    yield qkv_ext._core._kernels
    import qkv_ext._core._matmul

    yield qkv_ext._core._matmul
    import qkv_ext._core._softmax

    yield qkv_ext._core._softmax
    import qkv_ext._core._rotary

    yield qkv_ext._core._rotary
    import qkv_ext._core._merge

    yield qkv_ext._core._merge
    import qkv_ext._core._norm

    yield qkv_ext._core._norm
    import qkv_ext._core._append

    yield qkv_ext._core._append
    import qkv_ext._core._attention

    yield qkv_ext._core._attention
    import qkv_ext._core._step

    yield qkv_ext._core._step


def _why_missing(full: str) -> tuple[str, bool]:
    """Why there is no such module, and whether that is to be expected of an installation."""
    loader: Any = sys.modules[__name__].__loader__
    archive = getattr(loader, "archive", None)
    if getattr(sys, "frozen", False) or "__compiled__" in globals():  # the latter is Nuitka's
        missing = "it was not collected, or not built where the application was made"
        return f"{full} is not in this frozen application: {missing}", _installed()
    if archive is not None:
        reason = f"{full} cannot be loaded: qkv_ext is imported from the zip archive {archive}, "
        reason += "and compiled modules load from folders only"
        return reason, _installed() and not _holds(loader, full)
    if _installed():
        return f"{full} was not built: no C compiler at install time, or its build failed", True
    return f"{full} was not built: this is an unbuilt clone, see 'pip install -e .'", False


def _holds(loader: Any, full: str) -> bool:
    """Whether an archive holds a compiled module of this package."""
    from importlib.machinery import EXTENSION_SUFFIXES  # for an archive alone

    for suffix in EXTENSION_SUFFIXES:
        try:
            loader.get_data(str(Path(__file__).with_name(full.rpartition(".")[2] + suffix)))
            return True
        except OSError:
            pass
    return False


def _load(required: bool) -> tuple[dict[str, Any], str]:
    """The compiled modules by name, or none of them and the reason.

    A module that was never built is silent where the package is installed (an installation without
    a compiler).  One that is there and does not load, or is of another build than the others or
    the Python files, is told once; any other exception in it is a bug and propagates.
    """
    modules: dict[str, Any] = {}
    python, imports = _build.of_python(), _compiled_modules()
    for name in _build.MODULES:
        full = f"{__package__}.{name}"
        try:
            modules[name] = next(imports)
            _build.check(modules, name == _build.MODULES[-1], python)
        except (ImportError, OSError, TypeError) as error:
            expected = False
            if isinstance(error, ModuleNotFoundError) and error.name == full:
                reason, expected = _why_missing(full)
            elif "C function" in str(error):  # Cython's own check of what _kernels declares
                reason = f"{full} does not load: {error}; {_build.REINSTALL}"
            elif isinstance(error, TypeError):
                raise
            else:
                reason = f"{full} does not load: {error}"
            if required or not expected:
                _fail_or_warn(required, reason, error)
            return {}, reason
    return modules, ""


_modules, NOT_COMPILED = _load(_flag("QKV_EXT_REQUIRE_C"))  #: modules, or why there are none


def _compiled(name: str, isa: int) -> Backend:
    """The functions of an instruction set."""
    attention, product = _modules["_attention"].Attention(isa), _modules["_matmul"].Product(isa)
    softmax, rotary = _modules["_softmax"].Softmax(isa), _modules["_rotary"].Rotary(isa)
    merge, append = _modules["_merge"].Merge(isa), _modules["_append"].Append(isa)
    norm = _modules["_norm"].Normalization(isa)
    return Backend(
        name,
        isa,
        attention=attention.compute,
        product=product.compute,
        softmax=softmax.compute,
        rotary=rotary.compute,
        rotary_step=rotary.step,
        merge=merge.compute,
        norm=norm.compute,
        append=append.compute,
        plain_attention=attention.plain,
        plain_append=append.plain,
        plain_attend=attention.plain_attend,
        plain_step=_modules["_step"].Step(isa).plain,
        plain_product=product.plain,
        plain_softmax=softmax.plain,
        plain_rotary=rotary.plain,
        plain_merge=merge.plain,
        plain_norm=norm.plain,
    )


_TABLE: dict[str, Backend] = {
    "numpy": Backend(
        "numpy",
        -1,
        attention=_numpy.attention,
        product=_numpy.product,
        softmax=_numpy.softmax,
        rotary=_numpy.rotary,
        rotary_step=_numpy.rotary,
        merge=_numpy.merge,
        norm=_numpy_rows.norm,
    )
}
COMPILED_IN: tuple[str, ...] = ()  #: instruction sets of this build, runnable here or not
COMPILER = ""
if _modules:
    COMPILED_IN = _modules["_kernels"].compiled()
    COMPILER = _modules["_kernels"].compiler()
    for _name in _modules["_kernels"].runnable():
        _TABLE[_name] = _compiled(_name, COMPILED_IN.index(_name))


def backends() -> tuple[str, ...]:
    """The names that ``backend=`` takes on this machine, slowest first.

    ``"numpy"`` is always there.  ``"scalar"``, ``"neon"``, ``"avx2"`` and ``"avx512"`` are there
    where the compiled modules were built with them and the CPU and the operating system can run
    them.  A call takes the last one unless it, or ``QKV_EXT_BACKEND``, names another.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> import qkv_ext
    >>> qkv_ext.backends()[0]
    'numpy'
    """
    return tuple(_TABLE)


def _unknown(name: object, source: str) -> Exception:
    message = f"{source} is {shown(name)}; runnable on this machine: {', '.join(_TABLE)}"
    if not isinstance(name, str):
        return TypeError(message)
    if name in COMPILED_IN:
        message += f" ({name} is compiled in, but this CPU or operating system cannot run it)"
    elif NOT_COMPILED:
        message += f" ({NOT_COMPILED})"
    return ValueError(message)


ASKED_FOR = os.environ.get("QKV_EXT_BACKEND") or None
if ASKED_FOR is not None and ASKED_FOR not in _TABLE:
    raise _unknown(ASKED_FOR, "QKV_EXT_BACKEND")
DEFAULT = _TABLE[ASKED_FOR] if ASKED_FOR else list(_TABLE.values())[-1]

_warned = False


def _levels_to_caller() -> int:
    """How far up from whoever asks the first frame outside this package is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("qkv_ext."):
        level, frame = level + 1, frame.f_back
    return level


def default_backend(name: str | None) -> Backend:
    """choose for the plain functions of a backend, which look at the dtype themselves."""
    return DEFAULT if name is None else choose(name, None)


def choose(name: str | None, dtype: np.dtype[Any] | None) -> Backend:
    """The backend of one call on arrays of a dtype: the one that is named, or the default.

    float64 is computed by NumPy: a compiled backend that is named for this very call rejects it,
    and one that is merely the default steps aside with a warning, once.
    """
    global _warned
    if name is None:
        if dtype is not _FLOAT64 or DEFAULT.isa < 0:
            return DEFAULT
        if not _warned:
            _warned = True
            warnings.warn(
                f"float64 is computed by the NumPy backend; {DEFAULT.name} computes float32 only",
                PerformanceWarning,
                stacklevel=_levels_to_caller(),
            )
        return _TABLE["numpy"]
    try:
        backend = _TABLE[name]
    except Exception:  # no such name, or nothing that could be one
        raise _unknown(name, "backend") from None
    if dtype is _FLOAT64 and backend.isa >= 0:
        raise TypeError(f"backend {name!r} computes float32; float64 needs backend 'numpy'")
    return backend


# ---- a checked call -----------------------------------------------------------------------------


def attention(checked: Checked[Problem], backend: str | None) -> Any:
    problem, arrays, copies = checked
    choose(backend, problem.q.dtype).attention(problem)
    return finish(arrays, copies)


def product(checked: Checked[Product], backend: str | None) -> Any:
    problem, arrays, copies = checked
    choose(backend, problem.a.dtype).product(problem)
    return finish(arrays, copies)


def softmax(checked: Checked[Rows], backend: str | None) -> Any:
    problem, arrays, copies = checked
    choose(backend, problem.x.dtype).softmax(problem)
    return finish(arrays, copies)


def rotary(checked: Checked[Rotation], backend: str | None) -> Any:
    problem, arrays, copies = checked
    choose(backend, problem.x.dtype).rotary(problem)
    return finish(arrays, copies)


def norm(checked: Checked[Norm], backend: str | None) -> Any:
    problem, arrays, copies = checked
    choose(backend, problem.x.dtype).norm(problem)
    return finish(arrays, copies)


def finish(arrays: tuple[Array, ...], copies: Copies) -> Any:
    """What the caller gets: the output, or a tuple (output, weights, lse) of what was asked for.

    Copies fill those that could not be computed in place: an out that overlaps an input, or whose
    rows are strided, and arrays of float16 or bfloat16 that are computed in float32.
    """
    for target, computed in copies:
        with np.errstate(all="ignore"):
            target[...] = computed
    return arrays[0] if len(arrays) == 1 else arrays
