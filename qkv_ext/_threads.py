"""How many threads a call may use where it does not say.

QKV_EXT_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that this process may run on, and no more
than the quota of its control group, rounded up.  Read once, at import.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

MOST = 256  #: what the pool of the compiled backends starts at most


def _from_environment(environment: Mapping[str, str]) -> tuple[int, str] | None:
    for name in ("QKV_EXT_NUM_THREADS", "OMP_NUM_THREADS"):
        value = environment.get(name, "").partition(",")[0].strip()  # OpenMP: a number a level
        if not value:
            continue
        if value.isascii() and value.isdigit() and int(value) > 0:
            return min(int(value), MOST), name
        if name == "QKV_EXT_NUM_THREADS":  # OpenMP's variable has other forms: not ours to judge
            raise ValueError(f"{name} is {value!r}; expected a positive integer")
    return None


def _quota(root: Path) -> float:
    """CPUs that the control group grants, cgroup v2 (of this process, then its parents) or v1."""
    quota = math.inf
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return quota
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            group = root / "sys/fs/cgroup"
            places = [
                group,
                *(
                    group / "/".join(path.strip("/").split("/")[: i + 1])
                    for i in range(path.strip("/").count("/") + 1)
                ),
            ]
            for place in places:
                try:
                    limit, period = (place / "cpu.max").read_text().split()
                    if limit != "max":
                        quota = min(quota, int(limit) / int(period))
                except (OSError, ValueError, ZeroDivisionError):
                    continue
        elif "cpu" in controllers.split(","):
            for group in (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu" / path.strip("/")):
                try:
                    limit = (group / "cpu.cfs_quota_us").read_text()
                    if int(limit) > 0:
                        period = (group / "cpu.cfs_period_us").read_text()
                        quota = min(quota, int(limit) / int(period))
                except (OSError, ValueError, ZeroDivisionError):
                    continue
    return quota


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
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
        return max(1, math.ceil(quota)), "the control group's CPU quota"
    return min(cpus, MOST), "the CPUs that this process may run on"


DEFAULT, SOURCE = default_threads()


def threads_of(threads: int | None) -> int:
    """The upper bound on threads of one call, from its threads= argument."""
    if threads is None:
        return DEFAULT
    if type(threads) is int and 0 < threads <= MOST:
        return threads
    if not isinstance(threads, (int, np.integer)) or isinstance(threads, bool):
        raise TypeError(f"threads is {threads!r}; expected a positive integer or None")
    if threads < 1:
        raise ValueError(f"threads is {threads}; expected a positive integer or None")
    return min(int(threads), MOST)
