"""Rivals taking turns: each in a process of its own, all but the one whose turn it is stopped.

A library's threads spin for a while after its call, on the cores that the next one needs.  Where
the system can stop a process, a worker is stopped from its answer to its next request; elsewhere
the next turn waits a moment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import qkv_ext
from bench.kinds import Case
from bench.machine import Limits
from bench.worker import serve

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
UNSET = (
    "OPENBLAS_CORETYPE",  # these two were set for broken builds of old; they slow today's down
    "OPENBLAS_L2_SIZE",
    "QKV_EXT_BACKEND",
    "QKV_EXT_NUM_THREADS",
)
CAN_STOP = hasattr(signal, "SIGSTOP")
PATIENCE = 1800.0  #: seconds until a worker that says nothing is given up
LONG = 10.0  #: a rival whose call takes longer than that is measured in one round only


@contextlib.contextmanager
def environment(threads: int) -> Iterator[None]:
    """What a process started inside inherits."""
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    for name in UNSET:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """^C waits for the end, and never reaches a process that is started inside: its parent ends it.

    The mask is for that process; here another thread may take the signal, so the handler waits too.
    """
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    if CAN_STOP:
        resource_tracker.ensure_running()  # its start would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if CAN_STOP:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


class Worker:
    """The process of a rival, started when it is first asked, and again after it died."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.line = ""
        self.absent: str | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log")  # noqa: SIM115
        self._process: Any = None

    def start(self) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self.name, self.threads, self._log.name)
        process = context.Process(target=serve, args=arguments, daemon=True)
        with environment(self.threads), uninterrupted():
            process.start()
            self._process = process
        theirs.close()
        answer = self._answer()
        self.line, self.absent = answer.get("line", ""), answer.get("skipped")
        return answer

    def ask(self, *request: Any) -> dict[str, Any]:
        if self._process is None:
            answer = self.start()
            if "skipped" in answer:
                return answer
        if CAN_STOP:
            os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._connection.send(request)
        except OSError:
            return self._ended()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            if not self._connection.poll(PATIENCE):
                self.close()
                return {"skipped": f"no answer within {PATIENCE:.0f} s"}
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            return self._ended()
        if CAN_STOP:
            os.kill(self._process.pid, signal.SIGSTOP)
        else:
            time.sleep(0.2)
        return answer

    def _ended(self) -> dict[str, Any]:
        self._process.join(5)
        code = self._process.exitcode
        self.close()
        with open(self._log.name, encoding="utf-8", errors="replace") as file:
            last = (file.read().strip().splitlines() or [""])[-1]
        return {"skipped": f"its process ended with {code}: {last}"[:160].rstrip(": ")}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # a stopped one too
            self._process.join(10)
            self._connection.close()
            self._process = None


class Entrant(NamedTuple):
    """One call of a row.  Ours is the first, and has the name of the library for a label."""

    label: str
    rival: str
    case: Case


def entrants(case: Case, rivals: Iterable[str]) -> list[Entrant]:
    wanted = rivals if case.rivals is None else case.rivals
    there = [name for name in rivals if name == "qkv_ext" or name in wanted]
    beside = [Entrant(x.label, x.rival, x.case) for x in case.beside if x.rival in rivals]
    return [*(Entrant(name, name, case) for name in there), *beside]


class Race(NamedTuple):
    """The workers and how long they run."""

    workers: dict[str, Worker]
    limits: Limits
    rounds: int
    seconds: float
    threads: int
    tick: Callable[[str], None] = lambda text: None  #: called with what comes next

    def steps(self, case: Case) -> int:
        """How often tick is called for a row."""
        here = entrants(case, self.workers)
        rounds = min(self.rounds, case.most_rounds)
        return len(here) * (1 + rounds) + (len(here) if case.memory else 0)

    def run(self, case: Case) -> dict[str, Any]:
        """The row of a case, every round of every entrant in it."""
        here = entrants(case, self.workers)
        row: dict[str, Any] = {
            "case": case.name, "sets": list(case.sets), "kind": type(case).__name__,
            "options": options(case), "unit": case.unit, "bound": case.bound,
            "work": case.work, "flop": case.flop, "moved": case.moved,
            "entrants": {}, "skipped": {}, "memory": {},
        }  # fmt: skip
        running = [entrant for entrant in here if self._prepare(entrant, row)]
        for turn in range(min(self.rounds, case.most_rounds)):
            first = turn % max(1, len(running))  # who begins is another one each round
            for entrant in (*running[first:], *running[:first]):
                self._time(entrant, row, turn)
            for entrant in running:
                self._limit(entrant, row)
        for name in {entrant.rival for entrant in running}:
            self.workers[name].ask("drop")
        if case.memory:
            for entrant in here:
                self._memory(entrant, row)
        return row

    def _prepare(self, entrant: Entrant, row: dict[str, Any]) -> bool:
        self.tick(f"{row['case']}: {entrant.label}")
        worker = self.workers[entrant.rival]
        if worker.absent is not None:
            return False
        answer = worker.ask("prepare", entrant.label, entrant.case)
        if worker.absent is None and "skipped" in answer:
            row["skipped"][entrant.label] = answer["skipped"]
        elif worker.absent is None and not answer["error"] < entrant.case.tolerance:
            row["skipped"][entrant.label] = f"wrong by {answer['error']:.1e}: not timed"
        elif worker.absent is None:
            row["entrants"][entrant.label] = {
                "rival": entrant.rival, "work": entrant.case.work, "error": answer["error"],
                "first": answer["seconds"], "seconds": [], "minimum": [], "limit": [],
            }  # fmt: skip
            return True
        return False

    def _time(self, entrant: Entrant, row: dict[str, Any], turn: int) -> None:
        self.tick(f"{row['case']}: {entrant.label}")
        times = row["entrants"].get(entrant.label)
        if times is None or (turn and entrant.rival != "qkv_ext" and times["seconds"][0] > LONG):
            return
        answer = self.workers[entrant.rival].ask("time", entrant.label, self.seconds)
        if "skipped" in answer:
            row["skipped"][entrant.label] = answer["skipped"]
            del row["entrants"][entrant.label]
        else:
            times["seconds"].append(answer["median"])
            times["minimum"].append(answer["minimum"])

    def _limit(self, entrant: Entrant, row: dict[str, Any]) -> None:
        """What the machine can do right now, for our own calls."""
        if entrant.rival != "qkv_ext" or entrant.label not in row["entrants"]:
            return
        case = entrant.case
        isa = case.backend or qkv_ext.backends()[-1]
        limit = self.limits.of(case.bound, isa, case.read, case.threads or self.threads)
        if limit is not None:
            row["entrants"][entrant.label]["limit"].append(limit)

    def _memory(self, entrant: Entrant, row: dict[str, Any]) -> None:
        self.tick(f"{row['case']}: memory of {entrant.label}")
        if entrant.label not in row["entrants"]:
            return
        worker = Worker(entrant.rival, self.threads)
        try:
            answer = worker.ask("memory", entrant.case)
        finally:
            worker.close()
        if "bytes" in answer:
            row["memory"][entrant.label] = answer["bytes"]


def options(case: Case) -> dict[str, Any]:
    """The sizes and options of a case, for whoever reads the JSON."""
    common = set(Case.__dataclass_fields__)
    mine = {name: getattr(case, name) for name in case.__dataclass_fields__ if name not in common}
    return {name: value for name, value in mine.items() if value not in (False, None)}
