"""The command line of the bench: options, the run, and where its results go."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import qkv_ext
from bench.against import comparison
from bench.cases import SETS, chosen
from bench.claims import summary, verdicts
from bench.kinds import Case
from bench.machine import Limits, describe
from bench.race import Race, Worker
from bench.report import report
from bench.results import Results
from bench.rivals import RIVALS, matching
from bench.screen import Screen
from bench.table import Table, cells, machine_lines, main_table, memory_table, notes
from qkv_ext._core._program import INTERRUPTED, Parser, number, one_line
from qkv_ext._core._threads import MAX_THREADS

ABOUT = """Measure qkv_ext against its rivals on this machine.

Each rival runs in a process of its own with the same number of threads; they take turns in rounds,
and every result is checked against float64 before it is timed.  The peak of fused multiply-add and
the read bandwidth of the machine are measured in the same rounds, and each row says what share of
them it reached.
"""
NEEDS = """Rivals that are not installed are left out.  pip install -e ".[bench]" brings
onnxruntime, OpenVINO, rich for the table and matplotlib for the pictures; torch and JAX are yours
to install (pip install torch jax), for their builds differ between machines.
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m bench", description=ABOUT, epilog=NEEDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--set", default="", metavar="SETS", help=f"comma-separated: {', '.join(SETS)} (all)")
    add("--cases", default="", metavar="TEXT", help="only those whose name holds this text")
    add("--quick", action="store_true", help="a few rows, under two minutes")
    add("--rivals", default="", help=f"comma-separated: {', '.join(RIVALS)} (all)")
    add("--threads", type=number(int, 1, MAX_THREADS), default=usable_cpus(),
        help="of every rival (%(default)s)")  # fmt: skip
    add("--rounds", type=number(int, 1), help="alternating rounds (5; 3 with --quick)")
    add("--seconds", type=number(float, 1e-6, 3600.0),
        help="per rival and round (0.4; 0.1 with --quick)")  # fmt: skip
    add("--json", metavar="FILE", help="write everything, each round of each rival included")
    add("--markdown", metavar="FILE", help="write a report with the targets")
    add("--plot", metavar="FOLDER", help="write PNGs: ratios, roofline, growth")
    add("--against", metavar="OLD.json", help="compare with an earlier --json file")
    add("--from", dest="source", metavar="FILE", help="measure nothing: take the --json of a run")
    return made


def usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure(options: argparse.Namespace, argv: list[str]) -> Results:
    """The run: the machine first, then row after row."""
    cases = chosen(options.set, options.cases, options.quick)
    if not cases:
        raise ValueError(f"no case holds {options.cases!r} in the sets asked for")
    rounds = options.rounds or (3 if options.quick else 5)
    seconds = options.seconds or (0.1 if options.quick else 0.4)
    limits = Limits()
    workers = {name: Worker(name, options.threads) for name in matching(options.rivals)}
    results: dict[str, Any] = {
        "settings": {
            "command": shlex.join(["python", "-m", "bench", *argv]), "rounds": rounds,
            "seconds": seconds, "threads": options.threads,
        },
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "machine": describe(limits, qkv_ext.backends(), options.threads),
        "versions": {}, "absent": {}, "rows": [],
    }  # fmt: skip
    try:
        for worker in workers.values():
            print(f"{worker.name:12} {worker.start().get('line') or worker.absent}", flush=True)
        results["versions"] = {name: w.line for name, w in workers.items() if w.absent is None}
        results["absent"] = {name: w.absent for name, w in workers.items() if w.absent}
        print("\n".join(machine_lines(results)[:2]), flush=True)
        ready = {name: worker for name, worker in workers.items() if worker.absent is None}
        race = Race(ready, limits, rounds, seconds, options.threads)
        with contextlib.suppress(KeyboardInterrupt):  # ^C keeps the rows that are done
            run_all(race, cases, results)
    finally:
        for worker in workers.values():
            worker.close()
    if not results["rows"]:
        raise KeyboardInterrupt
    return results


def run_all(race: Race, cases: tuple[Case, ...], results: Results) -> None:
    with Screen(sum(race.steps(case) for case in cases)) as screen:
        race = race._replace(tick=screen.tick)
        rivals = [name for name in race.workers if name != "qkv_ext"]
        for case in cases:
            row = race.run(case)
            results["rows"].append(row)
            name, rate, _, spread, share, ratio, *others = cells(row, results, rivals)[0]
            each = ", ".join(f"{n} {x}" for n, x in zip(rivals, others, strict=False) if x)
            own = f"{name:28} {rate:>12}  spread {spread:6}  share {share:6} {ratio:>6}"
            screen.line(f"{own}  {each}")


def show(results: Results, old: Results | None) -> None:
    with Screen(0) as screen:
        screen.table(main_table(results))
        memory = memory_table(results)
        if memory is not None:
            screen.table(memory)
        for line in [*notes(results), "", *machine_lines(results), "", *summary(results)]:
            screen.line(line)
        known = [list(line) for line in verdicts(results) if line[2]]
        if known:
            screen.table(Table("the targets", ["claim", "measured", ""], known))
        if old is not None:
            screen.table(comparison(old, results))


def write(results: Results, options: argparse.Namespace) -> None:
    """The files that were asked for."""
    pictures: list[Path] = []
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from bench.plots import draw

        pictures = draw(results, Path(options.plot))
    if options.markdown:
        page = Path(options.markdown)
        names = [os.path.relpath(picture, page.parent) for picture in pictures]
        page.write_text(report(results, names), encoding="utf-8")


def check(options: argparse.Namespace) -> None:
    """What would fail after a run should fail before it."""
    for name in ("json", "markdown"):
        file = getattr(options, name)
        if file is None:
            continue
        path = Path(file).absolute()
        if not path.parent.is_dir():
            raise ValueError(f"--{name}: no folder for {file!r}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{name}: {file!r} cannot be written")
    if options.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib, which is not installed")
        Path(options.plot).mkdir(parents=True, exist_ok=True)


def read(name: str, file: str | None) -> Results | None:
    """The --json file of an earlier run; that it can be reported says that it is one."""
    if file is None:
        return None
    try:
        results: Results = json.loads(Path(file).read_text("utf-8"))
        report(results, [])
    except OSError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:  # whatever a report of something else stumbles over
        what = f"{file!r} is no --json file of the bench ({one_line(error)})"
        raise ValueError(f"{name}: {what}") from None
    return results


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
    try:
        check(options)
        old = read("--against", options.against)
        results = read("--from", options.source) or measure(options, argv)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(f"python -m bench: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        write(results, options)
    finally:  # what was measured is shown, whatever happens to the files
        show(results, old)
    return 0
