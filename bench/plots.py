"""Pictures of a run: ratios to the rivals, the roofline, growth in L.  Needs matplotlib.

Colours are those of M. Okabe and K. Ito, which the colour-blind tell apart; the shapes of markers
differ too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench import results as of
from bench.results import OURS, Results, Row
from bench.rivals import RIVALS
from bench.table import number

COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#D55E00")
COLOUR = dict(zip(RIVALS, COLOURS, strict=True))
MARKER = dict(zip(RIVALS, "os^vDPX", strict=True))
STYLE = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 110,
}
#: (file, what the title says, sets)
RATIOS = (
    ("ratios-attention.png", "attention", ("encoder", "causal", "decode", "overhead")),
    ("ratios-linear.png", "products and softmax", ("gemm", "softmax")),
)
plain_number = FuncFormatter(lambda x, _: f"{x:g}")


def draw(results: Results, folder: Path) -> list[Path]:
    """Write every picture that the results have figures for; gives back the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    with plt.rc_context(STYLE):
        made = [(name, ratios(results, what, sets)) for name, what, sets in RATIOS]
        made += [("roofline.png", roofline(results)), ("growth.png", growth(results))]
        for name, figure in made:
            if figure is not None:
                figure.savefig(folder / name, bbox_inches="tight")
                plt.close(figure)
                pictures.append(folder / name)
    return pictures


def titled(text: str, results: Results) -> str:
    """A title, and under it which machine that was."""
    machine, threads = results["machine"], results["settings"]["threads"]
    return f"{text}\n{machine['cpu']}, {threads} threads, {results['date'][:10]}"


def ticks(axis: Any, within: tuple[int, ...] = (1, 2, 5)) -> None:
    """Of a logarithmic axis: those within each power of ten."""
    axis.set_major_locator(LogLocator(subs=within))
    axis.set_major_formatter(plain_number)
    axis.set_minor_formatter(NullFormatter())


def ratios(results: Results, what: str, sets: tuple[str, ...]) -> Any:
    """A group of bars per row: the time of each rival over ours."""
    rows = [row for row in of.rows_of(results, *sets) if of.rivals(row)]
    if not rows:
        return None
    names = [name for name in RIVALS if any(name in of.rivals(row) for row in rows)]
    heights = [len(of.rivals(row)) + 1 for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.14 * sum(heights) + 1.8), layout="constrained")
    top, places, seen = 0.0, [], set()
    for row, height in zip(rows, heights, strict=True):
        found = of.rivals(row)
        for i, name in enumerate(n for n in names if n in found):
            label = None if name in seen else name
            seen.add(name)
            axes.barh(
                top + i, found[name] - 1, left=1, height=0.86, color=COLOUR[name], label=label
            )
            axes.annotate(number(found[name]), (max(found[name], 1), top + i), (4, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        places.append(top + (height - 2) / 2)
        top += height
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_xscale("log")
    ticks(axes.xaxis)
    axes.set_yticks(places, [row["case"] for row in rows])
    axes.set_ylim(top - 0.5, -1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time of the rival over that of qkv_ext; right of 1 qkv_ext is faster")
    axes.set_title(titled(what, results), loc="left")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: names.index(labels[i]))
    figure.legend([handles[i] for i in order], [labels[i] for i in order],
                  loc="outside lower center", ncols=len(order))  # fmt: skip
    return figure


def roofline(results: Results) -> Any:
    """Our rate against additions and multiplications per byte, under the two limits."""
    machine = results["machine"]
    peaks = [peak for peak in machine["fma_peak"].values() if peak]
    rows = [row for row in results["rows"] if row["bound"] and of.median(row)]
    bandwidths = [machine["read_bandwidth"]] if machine["read_bandwidth"] else []
    if not rows or not peaks or not bandwidths:
        return None
    for row in rows:  # the machine of each row's minutes; the best that was seen is the limit
        share, most = of.share(row, results), of.limit(row)
        if share is not None and share.counts and most is not None:
            (peaks if row["bound"] == "fma" else bandwidths).append(most)
    peak, bandwidth = max(peaks), max(bandwidths)
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    intensity = [row["flop"] / row["moved"] for row in rows]
    x = np.geomspace(min(intensity) / 2, max(intensity) * 2, 200)
    axes.plot(x, np.minimum(peak, bandwidth * x), color="black", linewidth=2)
    axes.text(x[-1], peak * 1.08, f"FMA peak {peak:.0f} GF/s", ha="right")
    ridge = peak / bandwidth
    axes.text(ridge * 0.4, peak * 0.46, f"memory {bandwidth:.0f} GB/s", ha="right")
    sets = list(dict.fromkeys(s for row in rows for s in row["sets"]))
    for i, name in enumerate(sets):
        mine = [(f, row) for f, row in zip(intensity, rows, strict=True) if name in row["sets"]]
        axes.plot([f for f, _ in mine], [gigaflops(row) for _, row in mine], linestyle="none",
                  marker="os^vDPX"[i % 7], markersize=9, markeredgecolor="white",
                  color=COLOURS[1:][i % 6], label=name)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(bandwidth * x[0], *map(gigaflops, rows)) / 1.5, 2 * peak)
    ticks(axes.xaxis, (1,))
    ticks(axes.yaxis)
    axes.set_xlabel("additions and multiplications per byte of inputs and output")
    axes.set_ylabel("10⁹ additions and multiplications a second")
    axes.set_title(titled("qkv_ext under the limits of the machine", results), loc="left")
    figure.legend(loc="outside lower center", ncols=8)
    return figure


def gigaflops(row: Row) -> float:
    seconds = of.median(row)
    assert seconds is not None
    return float(row["flop"] / seconds / 1e9)


def growth(results: Results) -> Any:
    """Time and working memory against L."""
    rows = sorted(of.rows_of(results, "growth"), key=of.length)
    if len(rows) < 2:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for name in RIVALS:
        times = [(of.length(row), of.median(row, name)) for row in rows]
        memory = [(of.length(row), row["memory"].get(name)) for row in rows]
        for axes, points, unit in ((left, times, 1.0), (right, memory, 1e6)):
            there = [(at, max(value / unit, 1e-6)) for at, value in points if value]
            axes.plot(*zip(*there, strict=True) if there else ((), ()), color=COLOUR[name],
                      marker=MARKER[name], markersize=7, label=name,
                      linewidth=3 if name == OURS else 1.6)  # fmt: skip
    for axes, title in ((left, "seconds of a call"), (right, "working memory, MB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([of.length(row) for row in rows], [str(of.length(row)) for row in rows],
                        rotation=45)  # fmt: skip
        axes.yaxis.set_major_formatter(plain_number)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("L")
        axes.set_title(title, loc="left")
    b, h, hkv, _, _, d = rows[0]["options"]["shape"]
    what = f"growth in L: (B, H, Hkv, L, S, D) = ({b}, {h}, {hkv}, L, L, {d})"
    figure.suptitle(titled(what, results))
    handles, labels = left.get_legend_handles_labels()
    drawn = [i for i, handle in enumerate(handles) if len(handle.get_xdata())]
    figure.legend([handles[i] for i in drawn], [labels[i] for i in drawn],
                  loc="outside lower center", ncols=len(drawn))  # fmt: skip
    return figure
