"""One argument at a time: arrays as the kernels can read and write them, masks, and options.

Every function takes the name of the argument, for the error that says what it got and what was
expected.  _check.py puts them together.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
#: Copies (to, from) that are put off until it is known which rows are read.
Later: TypeAlias = list[tuple[Array, Array]]

MAX_NDIM = 30  #: axes of an operand; NumPy broadcasts no more than 32, and heads are one more
MOST_NUMBERS = 47  #: 2 to that power, of an operand: what can be addressed
MOST_EMPTY = 36  #: the same where there are none, axes of length 0 counted as 1: minutes
MOST_PRODUCTS = 1 << 62  #: of a call: years

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT16 = np.dtype(np.float16)
LARGEST_FLOAT64 = float(np.finfo(FLOAT64).max)
_LARGEST_FLOAT32 = float(np.finfo(FLOAT32).max)
_KNOWN: dict[Any, np.dtype[Any]] = {FLOAT32: FLOAT32, FLOAT64: FLOAT64, FLOAT16: FLOAT16}


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and not endless."""
    try:
        return " ".join(_REPR.repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        return f"<{type(value).__name__}>"


_REPR = reprlib.Repr()
_REPR.maxlong = _REPR.maxstring = _REPR.maxother = 500


def array_of(x: Any, name: str, expected: str = "an array", objects: bool = False) -> Array:
    """Anything array-like as an ndarray; without a copy where NumPy can read it in place.

    expected is for the errors; objects says whether Python's own, such as wide integers, may stay.
    """
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            wanted = "a plain array and mask=" if expected == "an array" else expected
            raise TypeError(f"{name} is a numpy.ma.MaskedArray; expected {wanted}")
        return x.view(np.ndarray)
    try:
        array = _read(x)
    except (MemoryError, Warning):
        raise
    except Exception as error:  # ragged lists, arrays elsewhere, lazy ones: whatever its owner says
        if objects and isinstance(error, ValueError) and isinstance(x, (list, tuple)):
            raise ValueError(f"{name} is {shown(x)}; expected {expected}") from None
        if not isinstance(error, TypeError) or str(getattr(x, "dtype", "")) != "torch.bfloat16":
            raise TypeError(f"{name} cannot be read as an array: {error}") from error
        array = _bfloat16_of_torch(x, name)
    if array.dtype == object and not objects:
        raise TypeError(f"{name} is {shown(x)}; expected {expected}")
    return array


def _read(x: Any) -> Array:
    """What an object says to NumPy itself comes before DLPack, and its buffer after it.

    DLPack hands out memory as it lies.  Of torch's lazy tensors (negated, fake, masked, zero) that
    is not what they hold: their __array__ knows, and refuses.
    """
    if hasattr(x, "__dlpack__") and not any(hasattr(x, way) for way in _ARRAY_PROTOCOLS):
        try:
            return np.from_dlpack(x)
        except Exception:
            array = np.asarray(x)
            if array.dtype == object:
                raise
            return array
    return np.asarray(x)


_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__")


def _bfloat16_of_torch(x: Any, name: str) -> Array:
    """What torch does not give to NumPy for want of the dtype alone, as a view of its bits."""
    try:
        ml_dtypes: Any = import_module("ml_dtypes")
    except ImportError:
        raise TypeError(
            f"{name} is a torch.bfloat16 tensor, which NumPy reads where ml_dtypes is installed; "
            "expected that (pip install ml_dtypes), or .float()"
        ) from None
    try:
        return np.asarray(x.view(sys.modules["torch"].int16)).view(ml_dtypes.bfloat16)
    except Exception as error:  # on another device, sparse
        raise TypeError(f"{name} cannot be read as an array: {error}") from error


def operand(x: Any, name: str, least: int, later: Later | None = None) -> Array:
    """A native float array of at least that rank whose rows the kernels can read in place.

    What they cannot read is copied, or will be by ``copy_rows`` where there is a list for it.
    """
    if (
        type(x) is np.ndarray
        and x.dtype is FLOAT32
        and x.flags.carray
        and x.size
        and least <= x.ndim <= MAX_NDIM
    ):
        return x  # the plain case, quickly
    array = array_of(x, name)
    dtype = _KNOWN.get(array.dtype.newbyteorder("="))
    if dtype is None:
        if array.dtype.name != "bfloat16":  # ml_dtypes has it; known by its name, not imported
            raise TypeError(f"{name} has dtype {array.dtype}; expected {_FLOATS}")
        dtype = array.dtype
    if array.ndim < least:
        axes = "1 axis" if least == 1 else f"{least} axes"
        raise ValueError(f"{name} has shape {array.shape}; expected at least {axes}")
    if array.ndim > MAX_NDIM:
        raise ValueError(f"{name} has {array.ndim} axes; expected at most {MAX_NDIM}")
    # of rows without a number, and of numbers that are broadcast, there may be any number
    exponent = MOST_NUMBERS if array.size else MOST_EMPTY
    if math.prod(n or 1 for n in array.shape) > 1 << exponent:
        what = "entries" if array.size else "of what has no entries"
        raise ValueError(f"{name} has shape {array.shape}; expected at most 2**{exponent} {what}")
    native = array.dtype.isnative
    if native and array.dtype is not dtype:  # another object for the same dtype
        array = array.view(dtype)
    strided = array.ndim and array.strides[-1] != array.itemsize and array.shape[-1] > 1
    if strided or not native or not array.flags.aligned:
        array = converted(array, dtype, later)
    return array


def converted(x: Array, dtype: np.dtype[Any], later: Later | None = None) -> Array:
    """A native copy in a dtype, with contiguous rows; axes that are broadcast stay so."""
    cut = tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides[:-1])
    source = x[cut]
    if later is None:
        with np.errstate(all="ignore"):
            copy = np.array(source, dtype, order="C")
    else:
        copy = np.empty(source.shape, dtype)
        later.append((copy, source))
    return copy if copy.shape == x.shape else np.broadcast_to(copy, x.shape)


def copy_rows(later: Later, lead: Sequence[int], rows: Iterable[tuple[int, int, int]]) -> None:
    """Make copies (..., heads, n, width) that were put off: of an item, so many rows from a first.

    Rows that no item has are not read.
    """
    rows = set(rows)
    for copy, source in later:
        for item, first, count in rows:
            index = np.unravel_index(item, lead)
            own = (i if n > 1 else 0 for i, n in zip(index, copy.shape, strict=False))
            first = first if copy.shape[-2] > 1 else 0  # one row that is broadcast
            part = (*own, slice(None), slice(first, first + count))
            with np.errstate(all="ignore"):
                copy[part] = source[part]


_FLOATS = "float32, float64, float16 or bfloat16"


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float16 and bfloat16 are storage: they are computed in float32."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def infeasible(shapes: str, products: float) -> ValueError:
    """The error for what takes years, and whose number of tasks may be beyond an integer."""
    return ValueError(f"{shapes}: {float(products):.3g} products; expected fewer than 2**62")


def cast_to(dtype: np.dtype[Any]) -> str:
    """What makes an array one of that dtype, for errors."""
    return f".astype({'ml_dtypes' if dtype.name == 'bfloat16' else 'np'}.{dtype.name})"


def same_dtype(**arrays: Any) -> None:
    """Arrays, or packed weights, by the names of their arguments."""
    dtypes = {name: x.dtype for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        packed = [x.dtype for x in arrays.values() if not isinstance(x, np.ndarray)]
        goal = packed[0] if packed else FLOAT32  # what is packed stays what it is
        casts = [
            f"{name}{cast_to(goal)}"
            for name, x in arrays.items()
            if x.dtype != goal and isinstance(x, np.ndarray)
        ]
        got = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(
            f"{', '.join(dtypes)} have different dtypes ({got}); expected one dtype"
            + (f", as {', '.join(casts)} gives" if casts else "")
        )


def _overlaps_itself(x: Array) -> bool:
    """Whether two elements of x share memory."""
    span = x.itemsize
    for step, n in sorted(
        (abs(step), n) for step, n in zip(x.strides, x.shape, strict=True) if n > 1
    ):
        if step < span:  # nested strides never do this; the rest is decided element by element
            offsets = np.zeros(x.shape, np.intp)
            for axis, (by, count) in enumerate(zip(x.strides, x.shape, strict=True)):
                along = [1] * x.ndim
                along[axis] = count
                offsets += (np.arange(count) * by).reshape(along)
            return bool((np.diff(np.sort(offsets, axis=None)) < x.itemsize).any())
        span += (n - 1) * step
    return False


def target(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *inputs: Array | None
) -> tuple[Array, Array | None]:
    """The caller's output array, and the array to compute in its place, if it needs one.

    out may be strided and may overlap an input.  Where the kernels cannot write its rows, or would
    overwrite what they still have to read, the result is computed elsewhere and copied.
    """
    if out is None:
        return np.empty(shape, dtype), None
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is a {type(out).__name__}; expected a numpy.ndarray")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; expected {shape}")
    if out.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {out.dtype}; expected {dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; expected a writeable array")
    if out.size and _overlaps_itself(out):
        raise ValueError("out has elements that overlap each other; expected separate elements")
    if (
        out.dtype is dtype
        and out.flags.aligned
        and (not out.ndim or out.strides[-1] == out.itemsize or out.shape[-1] <= 1)
        and type(out) is np.ndarray
        and not any(x is not None and np.may_share_memory(out, x) for x in inputs)
    ):
        return out, None
    return out, np.empty(shape, dtype)


def same_place(x: Array, out: Any) -> bool:
    """Whether each element of out is that of x in memory."""
    return (
        isinstance(out, np.ndarray)
        and (out.shape, out.strides) == (x.shape, x.strides)
        and out.__array_interface__["data"][0] == x.__array_interface__["data"][0]
    )


def finite_as(x: Array, dtype: np.dtype[Any]) -> Array:
    """x in another float dtype, its finite values held at the finite limits of that dtype."""
    with np.errstate(all="ignore"):
        narrow: Array = x.astype(dtype)
    if x.dtype.itemsize > dtype.itemsize:
        beyond = np.isinf(narrow) & np.isfinite(x)
        narrow[beyond] = np.copysign(np.finfo(dtype).max, x[beyond])
    return narrow


def mask(given: Any, scores: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The mask in the kernels' terms: bool, or floats of the compute dtype where -inf excludes.

    It keeps its size-1 axes: nothing is expanded in memory.
    """
    mask = array_of(given, "mask")
    kind = mask.dtype
    if kind.kind not in "bf" and kind.name != "bfloat16":
        hint = (
            "mask.astype(bool), True keeps a key" if kind.kind in "iu" else "bool or a float dtype"
        )
        raise TypeError(f"mask has dtype {kind}; expected bool or floating point: {hint}")
    if mask.ndim > len(scores) or any(
        n not in (1, full) for n, full in zip(mask.shape[::-1], scores[::-1], strict=False)
    ):
        raise ValueError(f"mask has shape {mask.shape}; expected one that broadcasts to {scores}")
    # axes that are broadcast already go back to length 1: nothing is expanded in memory
    short = tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.strides)
    mask = mask[short]
    if mask.ndim < len(scores):
        mask = mask[(None,) * (len(scores) - mask.ndim)]
    if kind.kind != "b" and kind is not dtype:
        mask = finite_as(mask, dtype)
    if not mask.flags.aligned or (mask.shape[-1] > 1 and mask.strides[-1] != mask.itemsize):
        mask = np.array(mask, order="C")
    return mask


def as_bool(value: object, name: str) -> bool:
    """A bool, and nothing that merely looks like one."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {shown(value)}; expected True or False")


def real(given: Any, name: str, expected: str) -> int | float:
    """A real number: of Python, NumPy or ml_dtypes, or any array of rank 0.

    An int stays one, since it may be beyond any float.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return given if isinstance(given, int) else float(given)
    array = array_of(given, name, expected)
    kind = array.dtype.kind
    if array.ndim or not (kind in "iuf" or (kind == "V" and np.can_cast(array.dtype, FLOAT64))):
        raise TypeError(f"{name} is {shown(given)}; expected {expected}")
    return int(array) if kind in "iu" else float(array[()])


def number(given: Any, name: str, kind: str, range_: str, dtype: np.dtype[Any]) -> float:
    """A real number that a dtype can hold."""
    value = real(given, name, f"a {kind} number or None")
    largest = float(np.finfo(dtype).max)
    if not -largest <= value <= largest:
        raise ValueError(f"{name} is {shown(given)}; expected a {range_} number or None")
    return float(value)


def scale(given: Any, d: int, dtype: np.dtype[Any]) -> float:
    """The scale as a float; 1/√D where none is given."""
    if given is None:
        if d == 0:
            raise ValueError("scale is None, but D is 0 and 1/√0 is no number; give a scale")
        return 1.0 / math.sqrt(d)
    if type(given) is float and -_LARGEST_FLOAT32 <= given <= _LARGEST_FLOAT32:
        return given  # the plain case, quickly
    return number(given, "scale", "real", f"finite {dtype}", dtype)


def choice(value: object, name: str, choices: tuple[str, ...]) -> str:
    """One of the choices."""
    if isinstance(value, str) and value in choices:
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{name} is {shown(value)}; expected {' or '.join(map(repr, choices))}")


LAYOUTS = BHLD, BLHD = "bhld", "blhd"
ALIGNS = BOTTOM_RIGHT, TOP_LEFT = "bottom-right", "top-left"


def is_blhd(layout: Any) -> bool:
    return layout is not BHLD and choice(layout, "layout", LAYOUTS) == BLHD
