"""The results as tables: cells are made here, and drawn by rich, as plain text or as Markdown."""

from __future__ import annotations

from typing import Any, NamedTuple

from bench import results as of
from bench.cases import CASES
from bench.results import OURS, Results, Row
from bench.rivals import RIVALS


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 9.95 else f"{value:.1f}" if value < 99.5 else f"{value:.0f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}x"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def spread(value: float | None) -> str:
    return percent(value) + (" !" if value is not None and value > of.WIDE else "")


def share(value: of.Share | None) -> str:
    return "" if value is None else percent(value.value) + ("" if value.counts else " *")


def columns(results: Results) -> list[str]:
    """The rivals that at least one row has."""
    return [n for n in RIVALS if n != OURS and any(n in r["entrants"] for r in results["rows"])]


def cells(row: Row, results: Results, rivals: list[str]) -> list[list[str]]:
    """The line of a row, and one for each call of ours beside it."""
    ratios = of.rivals(row)
    fastest = of.minimum(row)
    ours = row["entrants"].get(OURS, {})
    lines = [
        [
            row["case"],
            f"{number(of.rate(row))} {row['unit']}" if ours else "",
            number(of.rate(row, OURS, fastest)) if fastest else "",
            spread(of.spread(row)),
            share(of.share(row, results)),
            times(of.best(row)),
            *(times(ratios.get(name)) for name in rivals),
            f"{ours['error']:.0e}" if ours else "",
        ]
    ]
    for label in of.beside(row):
        fastest = of.minimum(row, label)
        lines.append(
            [
                f"  {label}",
                f"{number(of.rate(row, label))} {row['unit']}",
                number(of.rate(row, label, fastest)),
                spread(of.spread(row, label)),
                share(of.share(row, results, label)),
                times(of.ratio(row, label)),
                *("" for _ in rivals),
                f"{row['entrants'][label]['error']:.0e}",
            ]
        )
    return lines


def main_table(results: Results) -> Table:
    rivals = columns(results)
    header = ["case", OURS, "best", "spread", "share", "ratio", *rivals, "error"]
    rows = [line for row in results["rows"] for line in cells(row, results, rivals)]
    return Table("qkv_ext against its rivals", header, rows)


def memory_table(results: Results) -> Table | None:
    rows = [row for row in results["rows"] if row["memory"]]
    names = [name for name in RIVALS if any(name in row["memory"] for row in rows)]
    if not rows:
        return None
    body = [
        [row["case"], *(megabytes(row["memory"].get(name)) for name in names)] for row in rows
    ]  # fmt: skip
    return Table("peak working memory of a call, MB", ["case", *names], body)


def megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}" if value < 1e8 else f"{value / 1e6:.0f}"


def error_table(results: Results) -> Table:
    names = [OURS, *columns(results)]
    body = [
        [row["case"], *(f"{row['entrants'][n]['error']:.0e}" if n in row["entrants"] else ""
                        for n in names)]
        for row in results["rows"]
    ]  # fmt: skip
    title = "largest error of a sample, as a share of its largest number"
    return Table(title, ["case", *names], body)


def notes(results: Results) -> list[str]:
    """What the reader of the table has to know."""
    cache = results["machine"].get("l3")
    size = "of unknown size" if cache is None else f"{cache / 2**20:.0f} MB"
    lines = [
        "Rates are medians over the rounds, best is the fastest call; spread is from the fastest "
        f"round to the slowest, ! where it is above {of.WIDE:.0%}.",
        "Columns of rivals hold their time over ours; ratio is that to the fastest of them, and in "
        "an indented line the time of that call over the time of the row.",
        "share is that of the FMA peak or of the read bandwidth, measured in the same rounds; "
        f"* where what is read is not above {of.CACHES} times the third-level cache ({size}), "
        "which then helps.",
    ]
    if len(results["rows"]) < len(CASES):
        lines.append(
            f"These are {len(results['rows'])} of the {len(CASES)} rows; "
            "a target for several rows is held to those that are there."
        )
    for name, why in results["absent"].items():
        lines.append(f"{name} is not measured: {why}.")
    skipped: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        for label, why in row["skipped"].items():
            skipped.setdefault((label, why), []).append(row["case"])
    for (label, why), cases in skipped.items():
        which = ", ".join(cases) if len(cases) < 5 else f"{len(cases)} rows"
        lines.append(f"{label} skipped {which}: {why}.")
    return lines


def machine_lines(results: Results) -> list[str]:
    machine, settings = results["machine"], results["settings"]
    peaks = ", ".join(f"{isa} {number(x)}" for isa, x in machine["fma_peak"].items() if x)
    bandwidth = number(machine["read_bandwidth"])
    return [
        f"{machine['cpu']}, {machine['system']}, Python {machine['python']}, {results['date']}",
        f"{settings['threads']} threads: {peaks or '? '} GF/s of fused multiply-add; "
        f"{bandwidth or '?'} GB/s of reading 256 MB",
        "; ".join(
            line if line.startswith(name) else f"{name}: {line}"
            for name, line in results["versions"].items()
        ),
    ]


def plain(table: Table) -> str:
    """Columns of text: the first to the left, the others to the right."""
    lines = [table.header, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([table.title, text[0], rule, *text[1:]])


def table_width(table: Table) -> int:
    return max(map(len, plain(table).splitlines()))


def fitting(table: Table, width: int) -> Table:
    """The table without the columns that can be missed first, so that it fits, if it can."""
    spared = iter(("error", "best", "spread"))
    while table_width(table) > width:
        name = next(spared, None)
        if name is None:
            return table
        if name in table.header:
            at = table.header.index(name)
            rows = [[*row[:at], *row[at + 1 :]] for row in table.rows]
            table = Table(table.title, [*table.header[:at], *table.header[at + 1 :]], rows)
    return table


def markdown(table: Table) -> str:
    def line(texts: list[str]) -> str:
        first = texts[0].replace("  ", "&nbsp;&nbsp;", 1) if texts[0][:2] == "  " else texts[0]
        return "| " + " | ".join([first, *texts[1:]]) + " |"

    rule = "|---|" + "---:|" * (len(table.header) - 1)
    return "\n".join([line(table.header), rule, *map(line, table.rows)])


def rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as Rich

    drawn = Rich(title=table.title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row, style="dim" if row[0][:2] == "  " else "")
    return drawn
