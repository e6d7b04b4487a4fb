"""Two runs compared: how much longer each of our calls takes than in an earlier --json file."""

from __future__ import annotations

from bench import results as of
from bench.results import OURS, Results, Row
from bench.table import Table, number, spread, times


def changed(old: Row, new: Row, label: str = OURS) -> str:
    """Whether it is faster or slower: where the rounds of the two runs have no time in common."""
    before, after = old["entrants"][label]["seconds"], new["entrants"][label]["seconds"]
    if max(after) < min(before):
        return "faster"
    return "slower" if min(after) > max(before) else ""


def rivals_changed(old: Row, new: Row) -> float | None:
    """The same for what was not changed: the rivals say how the machine differed."""
    both = [(of.median(old, name), of.median(new, name)) for name in of.rivals(new)]
    return of.geometric_mean(after / before for before, after in both if before and after)


def comparison(old: Results, new: Results) -> Table:
    rows = []
    for row in new["rows"]:
        before = of.row_named(old, row["case"])
        for label in [OURS, *of.beside(row)]:
            if before is None or not of.median(before, label) or not of.median(row, label):
                continue
            first, second = of.median(before, label), of.median(row, label)
            assert first is not None
            assert second is not None
            rows.append(
                [
                    row["case"] if label == OURS else f"  {label}",
                    f"{number(of.rate(before, label))} {row['unit']}",
                    f"{number(of.rate(row, label))} {row['unit']}",
                    times(second / first),
                    spread(of.spread(before, label)),
                    spread(of.spread(row, label)),
                    times(rivals_changed(before, row)) if label == OURS else "",
                    changed(before, row, label),
                ]
            )
    header = ["case", "old", "new", "time", "spread", "spread", "rivals", "outside both spreads"]
    return Table(f"against the run of {old['date']}: new time over old", header, rows)
