"""One rival in a process of its own: prepares cases, checks them against float64, times them.

It answers one request after the other through a pipe that is its own; whatever a library prints
goes to a log.  Requests are tuples, answers dicts; "skipped" in an answer says why there is none.

    ("prepare", slot, case)      {"error", "seconds"}      the first call, checked
    ("time", slot, seconds)      {"median", "minimum"}     seconds of a call
    ("drop",)                    {}                        forget what was prepared
    ("memory", case)             {"bytes"}                 peak beyond inputs and output; once
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.kinds import Case, Skip
from bench.rivals import Prepared, Rival, rival

Answer = dict[str, Any]
CLEAR_PEAK = "5"  #: what /proc/self/clear_refs takes to start VmHWM anew


def measure(call: Any, seconds: float) -> Answer:
    """Calls for that long, three at least unless one takes longer than that; short ones in lots."""
    clock = time.perf_counter
    begin = clock()
    call()
    once = clock() - begin
    if once > seconds:  # there was nothing to warm up that would show
        return {"median": once, "minimum": once}
    lot = range(max(1, min(1000, int(2e-4 / max(once, 1e-7)))))
    times: list[float] = []
    end = clock() + seconds
    while len(times) < 3 or clock() < end:
        begin = clock()
        for _ in lot:
            call()
        times.append((clock() - begin) / len(lot))
    return {"median": float(np.median(times)), "minimum": min(times)}


def error(case: Case, arrays: dict[str, np.ndarray], outputs: tuple[np.ndarray, ...]) -> float:
    """The largest error of the sample, as a share of its largest number."""
    exact = case.exact(arrays)
    worst = np.abs(case.sample(outputs) - exact).max()
    return float(worst / np.abs(exact).max())


def status(field: str) -> int | None:
    """Bytes that /proc/self/status says of VmRSS or VmHWM, None where there is no such file."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            found = re.search(rf"^{field}:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def peak_memory(who: Rival, case: Case) -> Answer:
    """How far the peak of resident memory rises in a first call, less the size of its output.

    A tiny call comes before, for whatever a library loads or starts once.
    """
    tiny = case.tiny()
    who.prepare(tiny, tiny.arrays()).call()
    arrays = case.arrays()
    prepared = who.prepare(case, arrays)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write(CLEAR_PEAK)
    before = status("VmRSS")
    result = prepared.call()
    after = status("VmHWM")
    if before is None or after is None:
        raise Skip("there is no /proc/self/status to read the memory from")
    return {"bytes": max(0, after - before - sum(x.nbytes for x in prepared.unpack(result)))}


def answer(who: Rival, slots: dict[str, Prepared], request: tuple[Any, ...]) -> Answer:
    what, *rest = request
    if what == "prepare":
        slot, case = rest
        arrays = case.arrays()
        slots[slot] = who.prepare(case, arrays)
        begin = time.perf_counter()
        result = slots[slot].call()
        seconds = time.perf_counter() - begin
        return {"error": error(case, arrays, slots[slot].unpack(result)), "seconds": seconds}
    if what == "time":
        return measure(slots[rest[0]].call, rest[1])
    if what == "memory":
        return peak_memory(who, rest[0])
    slots.clear()
    return {}


def reason(problem: BaseException) -> str:
    """Why there is no answer, in one line."""
    if isinstance(problem, Skip | ModuleNotFoundError):
        return str(problem)
    lines = [line for line in str(problem).splitlines() if line.strip()]
    text = f"{type(problem).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= 160 else f"{text[:60]} ... {text[-95:]}"  # both ends tell something


def quiet(log: str) -> None:
    """Standard output and error, of Python and of C, go to the log; the parent's end is ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    if sys.platform == "linux":  # a stopped process would outlive a parent that was killed
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(connection: Connection, name: str, threads: int, log: str) -> None:
    quiet(log)
    try:
        who = rival(name, threads)
    except Exception as problem:  # not installed, or it does not load here
        traceback.print_exc()
        connection.send({"skipped": reason(problem)})
        return
    connection.send({"line": who.line})
    slots: dict[str, Prepared] = {}
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            request = connection.recv()
            try:
                given = answer(who, slots, request)
            except Exception as problem:
                if not isinstance(problem, Skip):
                    traceback.print_exc()
                given = {"skipped": reason(problem)}
            connection.send(given)
