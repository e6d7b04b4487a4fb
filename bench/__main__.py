"""``python -m bench``: attention against its rivals on this machine, from the clone.

Each rival runs in a process of its own with the same number of threads, they take turns in rounds,
and every result is checked against float64 first.  What is printed is the median over the rounds,
the ratio to each rival, and the share of what the machine could do in that same minute: its FMA
peak, or for a decode step its read bandwidth over as many bytes as K and V have.  The spread is
that of qkv_ext, as a share of its median.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

import qkv_ext
from bench.cases import CASES, Case
from bench.machine import Machine
from bench.rivals import RIVALS

LARGEST_ERROR = 1e-5


class Worker:
    """A rival's process."""

    def __init__(self, rival: str, threads: int) -> None:
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(threads)
        if rival == "NumPy":  # set for broken builds of old; they slow today's down
            for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
                environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", rival, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process ended"}


def limit(case: Case, machine: Machine, threads: int) -> float | None:
    """What the machine could do of the case's unit."""
    if case.decode:
        return machine.read_bandwidth(int(case.work), threads)
    return machine.fma_peak(qkv_ext.backends()[-1], threads)


def run(
    case: Case,
    workers: dict[str, Worker],
    machine: Machine,
    rounds: int,
    seconds: float,
    threads: int,
) -> dict[str, Any]:
    """Seconds of every rival in every round, for those that computed the case right."""
    row: dict[str, Any] = {"case": case.name, "unit": case.unit, "seconds": {}, "notes": []}
    for name, worker in workers.items():
        answer = worker.ask(case=case.name)
        if "failed" in answer:
            row["notes"].append(f"{name}: {answer['failed']}")
        elif not answer["error"] < LARGEST_ERROR:
            row["notes"].append(f"{name}: wrong by {answer['error']:.1e}")
        else:
            row["seconds"][name] = []
            row.setdefault("lines", {})[name] = answer["line"]
    for _ in range(rounds):
        for name, times in row["seconds"].items():
            times.append(workers[name].ask(seconds=seconds)["seconds"])
    row["limit"] = limit(case, machine, threads)
    return row


def show(case: Case, row: dict[str, Any]) -> str:
    medians = {name: float(np.median(times)) for name, times in row["seconds"].items()}
    own = medians.get("qkv_ext")
    cells = []
    for name, seconds in medians.items():
        rate = f"{seconds * 1e6:8.1f} us" if own and case.work < 1e6 else ""
        rate = rate or f"{case.work / seconds / 1e9:7.1f} {case.unit}"
        ratio = f" ({seconds / own:5.2f}x)" if own and name != "qkv_ext" else ""
        cells.append(f"{name} {rate}{ratio}")
    times = row["seconds"].get("qkv_ext", [])
    notes = list(row["notes"])
    if own and row["limit"] and case.work >= 1e6:
        share = case.work / own / 1e9 / row["limit"]
        notes.insert(0, f"{share:4.0%} of {row['limit']:.0f} {case.unit}")
    if own:
        notes.insert(0, f"spread {(max(times) - min(times)) / own:4.0%}")
    return "  ".join([f"{case.name:28}", *cells, *notes])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (5)")
    parser.add_argument("--seconds", type=float, default=0.4, help="per rival and round (0.4)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rivals", default=",".join(RIVALS), help="comma-separated")
    parser.add_argument("--cases", default="", help="only those whose name holds this text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    workers = {name: Worker(name, options.threads) for name in options.rivals.split(",")}
    machine, rows = Machine(), []
    for case in CASES:
        if options.cases not in case.name:
            continue
        rows.append(run(case, workers, machine, options.rounds, options.seconds, options.threads))
        if not options.json:
            print(show(case, rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print("; ".join(dict.fromkeys(line for row in rows for line in row["lines"].values())))


if __name__ == "__main__":
    main()
