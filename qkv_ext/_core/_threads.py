"""How many threads a call may use where it does not say.

QKV_EXT_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that this process may run on, and no more
than the quota of its control group, rounded up.  Read once, at import.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from qkv_ext._core._arrays import shown

MAX_THREADS = 256  #: what the pool of the compiled backends starts at most


class Unasked(int):
    """A default that nobody asked of this library: NumPy's BLAS, which has its own, keeps it."""


def _positive(text: str) -> int | None:
    """A number above 0 that is written in digits; of thousands of them the first few will do."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text.lstrip("0")[:18] or 0) or None


def _from_environment(environment: Mapping[str, str]) -> tuple[int, str] | None:
    for name in ("QKV_EXT_NUM_THREADS", "OMP_NUM_THREADS"):
        value = environment.get(name, "").partition(",")[0].strip()  # OpenMP: a number a level
        number = _positive(value)
        if number is not None:
            number = min(number, MAX_THREADS)
            return number if name.startswith("QKV_EXT") else Unasked(number), name
        if value and name == "QKV_EXT_NUM_THREADS":  # OpenMP's has other forms: not ours to judge
            raise ValueError(f"{name} is {reprlib.repr(value)}; expected a positive integer")
    return None


def _lines(path: Path) -> list[str]:
    """The lines of a text of the system, whatever bytes they hold; none where it is not to read."""
    try:
        return os.fsdecode(path.read_bytes()).split("\n")
    except (OSError, ValueError):  # the latter of a NUL in the path
        return []


#: Of each kind of control groups: where they lie below sys/fs/cgroup, and the files that hold the
#: quota and its period.
_KINDS = {
    "cgroup2": (("", "unified"), ("cpu.max",)),
    "cgroup": (
        ("cpu", "cpu,cpuacct", "cpuacct,cpu"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ),
}  # fmt: skip


def _groups(root: Path, kind: str, path: str) -> Iterator[Path]:
    """The folders of a control group and its parents, wherever they are mounted."""
    mounts = [root / "sys/fs/cgroup" / name for name in _KINDS[kind][0]]
    for line in _lines(root / "proc/self/mountinfo"):  # ids root point ... - type device options
        where, _, what = line.partition(" - ")
        point, words = where.split(" ")[4:5], what.split(" ")
        if point and words[0] == kind and (kind == "cgroup2" or "cpu" in words[-1].split(",")):
            mounts.append(root / point[0].lstrip("/"))
    parts = [part for part in path.split("/") if part]
    for group in dict.fromkeys(mounts):
        yield group
        for part in parts:
            group /= part
            if part == ".." or not os.path.isdir(group):  # outside of what is mounted here
                break
            yield group


def _quota(root: Path) -> float:
    """CPUs that the control group grants, cgroup v2 or v1, of this process and of its parents."""
    quota = math.inf
    for line in _lines(root / "proc/self/cgroup"):  # number:controllers:path
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            kind = "cgroup2"
        elif "cpu" in controllers.split(","):
            kind = "cgroup"
        else:
            continue
        for group in _groups(root, kind, path):
            numbers = " ".join(text for name in _KINDS[kind][1] for text in _lines(group / name))
            limit, period = map(_positive, [*numbers.split(), "", ""][:2])
            if limit and period:
                quota = min(quota, limit / period)
    return quota


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def default_threads(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), cpus: int | None = None
) -> tuple[int, str]:
    """The default number of threads, and where it came from."""
    asked = _from_environment(environment)
    if asked:
        return asked
    cpus = _cpus() if cpus is None else cpus
    quota = _quota(root)
    if quota < cpus:
        return Unasked(max(1, math.ceil(quota))), "the control group's CPU quota"
    return Unasked(min(cpus, MAX_THREADS)), "the CPUs that this process may run on"


DEFAULT, SOURCE = default_threads()


def threads_of(threads: int | None) -> int:
    """The upper bound on threads of one call, from its threads= argument."""
    if threads is None:
        return DEFAULT
    if type(threads) is int and 0 < threads <= MAX_THREADS:
        return threads
    if not isinstance(threads, (int, np.integer)) or isinstance(threads, bool):
        raise TypeError(f"threads is {shown(threads)}; expected a positive integer or None")
    if threads < 1:
        raise ValueError(f"threads is {shown(threads)}; expected a positive integer or None")
    return min(int(threads), MAX_THREADS)
