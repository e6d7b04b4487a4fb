"""Calls the whole public API with random arguments, right ones and wrong ones.

    python tests/fuzz_api.py [--calls N] [--seconds N] [--seed SEED] [--only NUMBER]

Call NUMBER of a SEED is the same in every run, whatever came before it.  Arrays have any strides,
alignment and byte order, some are read-only, broadcast or empty, out may overlap an input, and
some sizes are beyond any memory.  What must hold of each call:

    it returns, or raises ValueError, TypeError or MemoryError, and warns of nothing but float64;
    the NumPy backend raises the same error, or returns the same numbers within rounding;
    no input has changed, unless out lies over it.

Meant for builds with sanitizers, see .ci/fuzz: they see what Python does not.
"""

import argparse
import signal
import sys
import time
import traceback
import warnings

import fuzz_calls
import numpy as np
from fuzz_arrays import HUGE, Draw

import qkv_ext
from qkv_ext._core import _backends

ALLOWED = (ValueError, TypeError, MemoryError)
COMPILED = [name for name in qkv_ext.backends() if name != "numpy"]


class Count:
    """How many calls did what."""

    def __init__(self):
        self.calls = self.reached = self.compared = self.returned = 0
        self.raised = dict.fromkeys((error.__name__ for error in ALLOWED), 0)
        self.kernels = 0  # uses of compiled code so far
        for name in COMPILED:
            backend = _backends._TABLE[name]
            functions = {x: getattr(backend, x) for x in backend._fields[2:]}
            counted = {x: self.counting(x, f) for x, f in functions.items() if callable(f)}
            _backends._TABLE[name] = backend._replace(**counted)
        _backends.DEFAULT = _backends._TABLE[_backends.DEFAULT.name]

    def counting(self, name, function):
        def counted(*arguments):
            result = function(*arguments)
            short = name.startswith("plain")  # which says by None that it is not for it
            self.kernels += not short or result is not None
            return result

        return counted

    def __str__(self):
        raised = ", ".join(f"{n} {name}" for name, n in self.raised.items())
        share = 100 * self.reached / max(1, self.calls)
        return (
            f"{self.calls} calls, {self.reached} of them ({share:.1f} %) reached a kernel, "
            f"{self.returned} returned, {self.compared} were compared with NumPy, {raised}"
        )


def result_of(call):
    """("returned", result) or ("raised", error)."""
    try:
        return "returned", call()
    except ALLOWED as error:
        return "raised", error


def arrays_in(x):
    """All arrays of an argument or a result, in order."""
    if isinstance(x, np.ndarray):
        return [x]
    if isinstance(x, dict):
        x = tuple(x.values())
    return (
        [array for each in x for array in arrays_in(each)] if isinstance(x, (tuple, list)) else []
    )


def as_numbers(x):
    return x.astype(np.float64)  # bfloat16 too


def compare(actual, expected):
    """Within rounding, and not finite in the same places."""
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape, (x.shape, y.shape)
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        if x.dtype.kind not in "fV":
            continue
        x, y, rough = as_numbers(x), as_numbers(y), 3e-2 if x.dtype.itemsize == 2 else 2e-3
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        room = rough * (np.abs(y[finite]).max(initial=0) + 1e-3)
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=room)


def one_call(seed, number, count):
    draw = Draw(seed, number)
    call = fuzz_calls.draw_call(draw)
    spoilt = draw.one_in(7) and fuzz_calls.spoil(draw, call)
    backend = draw.choice([None, None, *COMPILED, *COMPILED, "numpy"])
    threads = draw.choice([None, 1, 2, 3, np.int64(2), 64])
    if call.computes and not spoilt:
        call.options |= {"backend": backend, "threads": threads}
    out = call.options.get("out")
    inputs = [
        x for x in arrays_in([call.arguments, call.options])
        if x is not out and x.size < 1e5 and x.dtype != object
        and not (isinstance(out, np.ndarray) and np.may_share_memory(x, out))
    ]  # fmt: skip
    before = [x.tobytes() for x in inputs]
    used = count.kernels
    reference = None
    if call.comparable and not call.huge and draw.one_in(3):
        reference = result_of(call.on_numpy())  # first, since out may lie over an input
    how, result = result_of(call)
    count.calls += 1
    count.reached += count.kernels > used
    for x, kept in zip(inputs, before, strict=True):
        assert x.tobytes() == kept, "an input has changed"
    if how == "raised":
        count.raised[next(e.__name__ for e in ALLOWED if isinstance(result, e))] += 1
    else:
        count.returned += 1
    if reference is not None:
        compare_ends(call, (how, result), reference)
        count.compared += 1
    return how, result


def compare_ends(call, actual, expected):
    if "raised" in (actual[0], expected[0]):
        ends = [f"{type(x).__name__}: {x}" if how == "raised" else how
                for how, x in (actual, expected)]  # fmt: skip
        refused = "computes float32; float64 needs" in ends[0]  # a compiled backend by its name
        assert ends[0] == ends[1] or refused, "\n".join(ends)
    elif call.tame:
        compare(arrays_in(actual[1]), arrays_in(expected[1]))


def too_long(*_):
    raise TimeoutError("the call does not end")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=lambda text: int(text, 0), default=1)
    parser.add_argument("--only", type=int, help="the number of one call, which is shown")
    options = parser.parse_args()
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", qkv_ext.PerformanceWarning)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, too_long)
    count, start = Count(), time.monotonic()
    numbers = range(options.calls) if options.only is None else [options.only]
    for number in numbers:
        if time.monotonic() - start > options.seconds:
            break
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 60)  # of CPU time: no call here takes a second
        try:
            end = one_call(options.seed, number, count)
        except BaseException:
            traceback.print_exc()
            sys.exit(f"call {number} of seed {options.seed}: {fuzz_calls.last}\n{count}")
        if options.only is not None:
            print(fuzz_calls.last, *end, sep="\n")
    print(count)
    if options.only is None and COMPILED and count.calls > 1000:
        assert count.reached >= 0.6 * count.calls, "too few calls reach a kernel"


if __name__ == "__main__":
    assert HUGE.size >= 2**50
    main()
