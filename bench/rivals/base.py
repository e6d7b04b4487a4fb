"""What the rivals share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from bench.kinds import Arrays, Attention, Case, Outputs, Skip


def one_array(result: Any) -> Outputs:
    return (np.asarray(result),)


class Prepared(NamedTuple):
    call: Callable[[], Any]  #: what is timed
    unpack: Callable[[Any], Outputs] = one_array  #: its result as NumPy arrays, in our layout
    keep: Any = None  #: what the call reads without holding it


class Rival:
    """Subclasses set ``line``, what runs in which version, and have a method per operation."""

    line = ""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def copy(self, case: Case, arrays: Arrays) -> Prepared:
        """np.copyto by that many threads."""
        x = arrays["x"]
        y = np.empty_like(x)
        parts = [slice(n * len(x) // self.threads, (n + 1) * len(x) // self.threads)
                 for n in range(self.threads)]  # fmt: skip
        pool = ThreadPoolExecutor(self.threads)

        def call() -> np.ndarray:
            others = [pool.submit(np.copyto, y[part], x[part]) for part in parts[1:]]
            np.copyto(y[parts[0]], x[parts[0]])
            for other in others:
                other.result()
            return y

        return Prepared(call)

    def prepare(self, case: Case, arrays: Arrays) -> Prepared:
        for operation in case.operations:
            method = getattr(self, operation, None)
            if method is not None:
                prepared: Prepared = method(case, arrays)
                return prepared
        raise Skip(f"has no call for {case.operations[0]}")


def grouped(case: Attention) -> bool:
    return case.shape[1] != case.shape[2]


def fold(case: Attention, q: np.ndarray) -> np.ndarray:
    """q (B, H, L, D) as (B, Hkv, H / Hkv · L, D), no data moved; right where no key is excluded."""
    b, h, hkv, length, _, d = case.shape
    return q.reshape(b, hkv, h // hkv * length, d)


def allowed(case: Attention) -> np.ndarray | None:
    """True (L, S) where a key is seen, causal order being that of the last rows; None is all."""
    _, _, _, length, s, _ = case.shape
    if not case.causal:
        return None
    keep = np.tri(length, s, s - length, bool)
    return keep & ~np.tri(length, s, s - length - case.window, bool) if case.window else keep


def room_for_scores(case: Attention, copies: int) -> None:
    """Skip where that many copies of the scores (B, H, L, S) would crowd the memory.

    Some libraries keep what they took, and all of them take their turns in the same machine.
    """
    b, h, _, length, s, _ = case.shape
    needed, there = 4.0 * copies * b * h * length * s, available_memory()
    if there is not None and needed > 0.3 * there:
        raise Skip(f"needs {needed / 1e9:.0f} GB for its scores, and {there / 1e9:.0f} are free")


def available_memory() -> float | None:
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            lines = {name: rest for name, _, rest in (line.partition(":") for line in file)}
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return None
