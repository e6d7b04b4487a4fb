"""NumPy's BLAS, held to the threads that a call was given; by threadpoolctl, where it is there.

A BLAS keeps one number of threads for the whole process.  So calls that are given one share it:
while any of them runs, the smallest of their numbers holds, for whatever else uses the BLAS too;
after the last one it is what it was.  (Where a BLAS keeps a number for each thread of Python, as
MKL does, each call has its own.)  No call raises the number that the BLAS has.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

from qkv_ext._core._threads import DEFAULT, Unasked

Compute = TypeVar("Compute", bound=Callable[..., Any])
Library: TypeAlias = Any  #: what threadpoolctl calls a library controller


class Guard:
    """The calls that run, and the libraries that they have changed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call while its thread holds it
        self._libraries: list[Library] | None = None  # those of the process, or of its threads
        self._running: dict[object, int] = {}
        self._changed: dict[Library, tuple[int, int]] = {}  # what it was, and what it was set to

    def libraries(self) -> list[Library]:
        """The BLAS libraries of the process, looked for once; none without threadpoolctl."""
        if self._libraries is None:
            with self._lock:
                if self._libraries is None:
                    found = _loaded()
                    if found and hasattr(os, "register_at_fork"):
                        os.register_at_fork(after_in_child=self.forked)
                    self._libraries = found
        return self._libraries

    def enter(self, call: object, threads: int, own: list[tuple[Library, int]]) -> None:
        """Hold the libraries to that many threads; own takes those that its leave sets back."""
        for library in self.libraries():
            if _per_thread(library) and library.num_threads > threads:
                own.append((library, library.num_threads))
                _set(library, threads)
        with self._lock:
            self._running[call] = threads
            self._hold()

    def leave(self, call: object, own: list[tuple[Library, int]]) -> None:
        """May be called again where it was interrupted."""
        for library, was in own:
            _set(library, was)
        with self._lock:
            self._running.pop(call, None)
            self._hold()

    def _hold(self) -> None:
        """The smallest number that is asked for, or what there was before anyone asked."""
        least = min(self._running.values(), default=None)
        for library in self.libraries():
            if _per_thread(library):
                continue
            there = library.num_threads
            was, ours = self._changed.get(library, (there, there))
            if there != ours:  # somebody else has set it
                was = there
            if least is None:
                if there != was:
                    _set(library, was)
                self._changed.pop(library, None)
            elif there != min(was, least):
                self._changed[library] = was, min(was, least)
                _set(library, min(was, least))

    def forked(self) -> None:
        """In a child no call runs but that of the thread that forked, which is held no longer."""
        self._lock = threading.RLock()
        self._running.clear()
        self._hold()


def _loaded() -> list[Library]:
    control = _threadpoolctl()
    libraries = control.ThreadpoolController().lib_controllers if control else []
    return [library for library in libraries if library.user_api == "blas"]


def _threadpoolctl() -> Any:
    """The module, which is an extra and slow to import; None where it is not there."""
    try:
        import threadpoolctl  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    return threadpoolctl


def _per_thread(library: Library) -> bool:
    """Whether threadpoolctl sets the number for the calling thread only."""
    openmp = getattr(library, "threading_layer", None) == "openmp"
    return library.internal_api == "mkl" or (library.internal_api == "openblas" and openmp)


def _set(library: Library, threads: int) -> None:
    library.set_num_threads(threads)
    if hasattr(library, "clear_controlling_thread"):  # else no other thread could set it back
        library.clear_controlling_thread()


GUARD = Guard()


def held_to_threads(compute: Compute) -> Compute:
    """A function of a problem whose products are held to problem.threads, if they were given."""

    @functools.wraps(compute)
    def run(problem: Any, *rest: Any) -> Any:
        if type(problem.threads) is Unasked or not GUARD.libraries():
            return compute(problem, *rest)
        call = object()
        own: list[tuple[Library, int]] = []
        try:
            GUARD.enter(call, problem.threads, own)
            return compute(problem, *rest)
        finally:
            try:
                GUARD.leave(call, own)
            except BaseException:  # ^C, just now
                GUARD.leave(call, own)
                raise

    return cast(Compute, run)


def describe() -> str:
    """What becomes of the threads of NumPy's BLAS, for show_config()."""
    if _threadpoolctl() is None:
        return "NumPy's BLAS takes its own: without threadpoolctl it cannot be held to them"
    libraries = GUARD.libraries()
    if not libraries:
        return "NumPy's BLAS takes its own: threadpoolctl knows no way to hold it to them"
    if type(DEFAULT) is not Unasked:
        return "NumPy's BLAS is held to them while a call runs"
    names = ", ".join(f"{library.internal_api} {library.num_threads}" for library in libraries)
    return f"NumPy's BLAS takes its own ({names}) and is held to threads= where it is given"
