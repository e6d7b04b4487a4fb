"""What the figures of a run say: functions of the results as --json writes them.

results = {"settings", "date", "machine", "versions", "absent", "rows"}; a row has entrants by
label, ours being "qkv_ext", and each of them its seconds per call in every round.  race.py writes
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from bench.rivals import RIVALS

Row = dict[str, Any]
Results = dict[str, Any]

OURS = "qkv_ext"
WIDE = 0.15  #: a spread that says the machine was not quiet
CACHES = 4  #: bandwidth counts where what is read is larger than that many third-level caches


def median(row: Row, label: str = OURS) -> float | None:
    """Seconds of a call: the median over the rounds; None where it was not measured."""
    times = row["entrants"].get(label, {}).get("seconds")
    return float(np.median(times)) if times else None


def minimum(row: Row, label: str = OURS) -> float | None:
    times = row["entrants"].get(label, {}).get("minimum")
    return float(min(times)) if times else None


def spread(row: Row, label: str = OURS) -> float | None:
    """From the fastest round to the slowest, as a share of the median."""
    middle = median(row, label)
    if middle is None:
        return None
    times = row["entrants"][label]["seconds"]
    return float((max(times) - min(times)) / middle)


def rate(row: Row, label: str = OURS, seconds: float | None = None) -> float | None:
    """In the unit of the row: GF/s, GB/s, or microseconds."""
    seconds = median(row, label) if seconds is None else seconds
    if seconds is None:
        return None
    if row["unit"] == "us":
        return seconds * 1e6
    return float(row["entrants"][label]["work"] / seconds / 1e9)


def ratio(row: Row, label: str) -> float | None:
    """How many times as long as ours that call takes."""
    ours, theirs = median(row), median(row, label)
    return None if ours is None or theirs is None else theirs / ours


def rivals(row: Row) -> dict[str, float]:
    """The ratio of each rival in its own column."""
    found = {name: ratio(row, name) for name in RIVALS if name != OURS}
    return {name: value for name, value in found.items() if value is not None}


def beside(row: Row) -> list[str]:
    """The labels of what was measured beside the rivals."""
    return [label for label in row["entrants"] if label not in RIVALS]


def best(row: Row) -> float | None:
    """The ratio to the fastest rival."""
    return min(rivals(row).values(), default=None)


def limit(row: Row, label: str = OURS) -> float | None:
    """What the machine could do in the minutes of the row: the FMA peak, or the bandwidth."""
    values = row["entrants"].get(label, {}).get("limit")
    if not values:
        return None
    return float(max(values) if row["bound"] == "fma" else np.median(values))


class Share(NamedTuple):
    value: float
    counts: bool  #: False where caches help, so that it is no share of what the memory gives


def share(row: Row, results: Results, label: str = OURS) -> Share | None:
    """The part of the limit that a call of ours reached."""
    most, reached = limit(row, label), rate(row, label)
    if most is None or reached is None:
        return None
    cache = results["machine"].get("l3")
    size = row["entrants"][label]["work"]
    counts = row["bound"] == "fma" or (cache is not None and size > CACHES * cache)
    return Share(reached / most, counts)


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def row_named(results: Results, name: str) -> Row | None:
    return next((row for row in results["rows"] if row["case"] == name), None)


def rows_of(results: Results, *sets: str) -> list[Row]:
    return [row for row in results["rows"] if set(row["sets"]) & set(sets)]


def length(row: Row) -> int:
    """L of a growth row."""
    return int(row["options"]["shape"][3])
