"""What the library claims about its speed, and whether a run shows it.

Each claim is a function of the results that gives the figures it is about, the worst one first in
mind: None where the run has no row for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bench import results as of
from bench.cases import SETS
from bench.masks import tile_share
from bench.results import Results, Row

Figure = float | None


class Claim(NamedTuple):
    text: str
    figure: Callable[[Results], Figure]
    least: float | None = None
    most: float | None = None
    unit: str = "x"

    def holds(self, results: Results) -> bool | None:
        value = self.figure(results)
        if value is None:
            return None
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def measured(self, results: Results) -> str:
        value = self.figure(results)
        if value is None:
            return "not measured"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f}{self.unit}"


def lowest(values: list[Figure]) -> Figure:
    return min((x for x in values if x is not None), default=None)


def mean(values: list[Figure]) -> Figure:
    return of.geometric_mean(x for x in values if x is not None)


def best_of(*sets: str) -> Callable[[Results], list[Figure]]:
    """The ratio to the best rival of each row of the sets."""
    return lambda results: [of.best(row) for row in of.rows_of(results, *sets)]


def to(rival: str, kind: str, start: str = "") -> Callable[[Results], list[Figure]]:
    """The ratio to that rival of each row of a kind whose name begins so."""
    return lambda results: [
        of.ratio(row, rival)
        for row in results["rows"]
        if row["kind"] == kind and row["case"].startswith(start)
    ]


def at(name: str, figure: Callable[[Row, Results], Figure]) -> Callable[[Results], Figure]:
    """A figure of the row of that name."""

    def of_row(results: Results) -> Figure:
        row = of.row_named(results, name)
        return None if row is None else figure(row, results)

    return of_row


def best(row: Row, results: Results) -> Figure:
    return of.best(row)


def best_named(row: Row, results: Results) -> Figure:
    """The same without onnxruntime's GroupQueryAttention, an operator of its generation loop."""
    _, heads, kv_heads, *_ = row["options"]["shape"]
    grouped = {"ORT contrib"} if heads != kv_heads else set()
    return lowest([value for name, value in of.rivals(row).items() if name not in grouped])


def share(row: Row, results: Results, label: str = of.OURS) -> Figure:
    """The share of the limit, where it counts."""
    found = of.share(row, results, label)
    return found.value if found is not None and found.counts else None


def beside(label: str) -> Callable[[Row, Results], Figure]:
    return lambda row, results: of.ratio(row, label)


def least_share(choose: Callable[[Row], bool], label: str = of.OURS) -> Callable[[Results], Figure]:
    return lambda results: lowest([share(r, results, label) for r in results["rows"] if choose(r)])


def long_d64(row: Row) -> bool:
    options = row["options"]
    if row["kind"] != "Attention" or set(options) != {"shape", "dtype"}:
        return False
    *_, length, _, d = options["shape"]
    return bool(d == 64 and length >= 2048 and options["dtype"] == "float32")


def over_share(row: Row) -> Figure:
    """The time over that without a mask, as a multiple of the share of tiles that have a key."""
    ratio = of.ratio(row, "no mask")
    if ratio is None or row["kind"] != "Masked":
        return None
    options = row["options"]
    return 1 / ratio / tile_share(options["pattern"], options["shape"][4])


def farthest_over_share(results: Results) -> Figure:
    values = [over_share(row) for row in results["rows"]]
    return max((x for x in values if x is not None), default=None)


def faster_than_one_thread(results: Results) -> Figure:
    """Of the rows whose call takes 5 ms or more."""
    rows = [row for row in results["rows"] if (of.median(row) or 0) >= 5e-3]
    return lowest([of.ratio(row, "one thread") for row in rows])


def causal_cost(row: Row, results: Results) -> Figure:
    ratio = of.ratio(row, "not causal")
    return None if ratio is None else 1 / ratio


def microseconds(row: Row, results: Results) -> Figure:
    return of.rate(row)


def to_plain_call(name: str) -> Callable[[Results], Figure]:
    """How many times as long a call takes as one of attention on (1, 1, 4, 8)."""

    def of_rows(results: Results) -> Figure:
        row, plain = of.row_named(results, name), of.row_named(results, "call overhead")
        times = [None if each is None else of.median(each) for each in (row, plain)]
        return None if None in times else times[0] / times[1]  # type: ignore[operator]

    return of_rows


def largest_memory(row: Row, results: Results) -> Figure:
    value = row["memory"].get(of.OURS)
    return None if value is None else value / 1e6


def smaller(*stored: str) -> Callable[[Results], Figure]:
    """How much faster than float32 a step from a cache of these storage types is, at the least."""
    names = [f"cache {name}, {kind}" for name in ("32k, GQA 4", "batch 16, 1k, GQA 4")
             for kind in stored]  # fmt: skip
    rows = {name: at(name, beside("float32")) for name in names}
    return lambda results: lowest([figure(results) for figure in rows.values()])


def with_and_without(name: str, least: float) -> tuple[Claim, Claim]:
    """Against every rival that reads plain arrays, and against those that are named everywhere."""
    text = f"{name}: at least {least} times the best rival"
    return (
        Claim(text, at(name, best), least),
        Claim(f"{text} but GroupQueryAttention", at(name, best_named), least),
    )


PREFILL = best_of("encoder", "causal")
MATMUL, PACKED = to("NumPy", "Product", "matmul"), to("NumPy", "Product", "packed")
SOFTMAX = to("torch", "Softmax")

CLAIMS = (
    Claim("prefill and encoder rows: the lowest ratio to the best rival is at least 0.97",
          lambda r: lowest(PREFILL(r)), 0.97),
    Claim("prefill and encoder rows: geometric mean of the ratios at least 1.2",
          lambda r: mean(PREFILL(r)), 1.2),
    Claim("D = 64, L >= 2048, not causal: at least 85 % of the FMA peak",
          least_share(long_d64), 0.85, unit="%"),
    Claim("causal 4k, D = 128: at least 88 % of the FMA peak",
          at("causal 4k", share), 0.88, unit="%"),
    Claim("MiniLM, one sentence: at least 70 % of the FMA peak",
          at("MiniLM, one sentence", share), 0.70, unit="%"),
    Claim("MiniLM, batch 32: at least 68 % of the FMA peak",
          at("MiniLM, batch 32", share), 0.68, unit="%"),
    Claim("causal 1k, GQA 4: at least 1.5 times the best rival",
          at("causal 1k, GQA 4", best), 1.5),
    Claim("causal costs at most 0.55 of not causal at L = 4096",
          at("causal 4k", causal_cost), most=0.55),
    *with_and_without("decode 32k, GQA 4", 3.5),
    *with_and_without("decode batch 16, 1k, GQA 4", 2.2),
    *with_and_without("decode 4k, GQA 4", 2.2),
    Claim("decode 2k, no GQA: at least 1.7 times the best rival",
          at("decode 2k, no GQA", best), 1.7),
    Claim("decode: at least 60 % of the read bandwidth, where it counts",
          least_share(lambda row: "decode" in row["sets"]), 0.60, unit="%"),
    *with_and_without("cache 32k, GQA 4", 5.0),
    *with_and_without("cache 4k, GQA 4", 3.5),
    *with_and_without("cache batch 16, 1k, GQA 4", 2.5),
    Claim("cache, float32: at least 70 % of the read bandwidth, where it counts",
          least_share(lambda row: row["options"].get("stored") == "float32"), 0.70, unit="%"),
    Claim("cache, float16 and bfloat16: at least 1.7 times float32 at 32k and batch 16",
          smaller("float16", "bfloat16"), 1.7),
    Claim("cache, int8: at least 2 times float32 at 32k and batch 16", smaller("int8"), 2.0),
    Claim("fork of 100k keys: at most 1 ms", at("fork, 100k keys", microseconds), most=1000.0,
          unit=" us"),
    Claim("matmul: the lowest ratio to NumPy is at least 0.95",
          lambda r: lowest(MATMUL(r)), 0.95),
    Claim("matmul: geometric mean of the ratios to NumPy at least 1.0",
          lambda r: mean(MATMUL(r)), 1.0),
    Claim("packed weights: the lowest ratio to NumPy is at least 0.97",
          lambda r: lowest(PACKED(r)), 0.97),
    Claim("packed weights: geometric mean of the ratios to NumPy at least 1.1",
          lambda r: mean(PACKED(r)), 1.1),
    Claim("softmax: the lowest ratio to torch is at least 0.97",
          lambda r: lowest(SOFTMAX(r)), 0.97),
    Claim("call overhead: at most 3 us", at("call overhead", microseconds), most=3.0, unit=" us"),
    Claim("call overhead: at least 2 times less than the best rival",
          at("call overhead", best), 2.0),
    Claim("rotary of one position: at most 2 plain calls",
          to_plain_call("rotary of one position"), most=2.0),
    Claim("append of one key: at most 2.5 plain calls",
          to_plain_call("append 1 short key"), most=2.5),
    Claim("append of one key to each of 16 items: at most 6 plain calls",
          to_plain_call("append 1 short key, batch 16"), most=6.0),
    Claim("attend of one short query: at most 3 plain calls",
          to_plain_call("attend of one short query"), most=3.0),
    Claim("a layer's step at E = 64: at most 14 plain calls",
          to_plain_call("layer's step, E 64"), most=14.0),
    Claim("rotary 2k: at least 80 % of copying", at("rotary 2k", beside("copy")), 0.8, unit="%"),
    Claim("merge 8 parts: at least 80 % of copying",
          at("merge 8 parts", beside("copy")), 0.8, unit="%"),
    Claim("layer norm: at least 80 % of copying",
          at("layer_norm (32768, 1024)", beside("copy")), 0.8, unit="%"),
    Claim("RMS norm: at least 80 % of copying",
          at("rms_norm (32768, 1024)", beside("copy")), 0.8, unit="%"),
    Claim("linear + gelu: at least 0.9 of the rate of the product alone",
          at("linear + gelu (4096, 384, 1536)", beside("product alone")), 0.9),
    Claim("float mask: at least 0.9 of the rate without a mask",
          at("BERT, float mask", beside("no mask")), 0.9),
    Claim("masks: the share of the time without one at most 1.15 of the share of tiles seen",
          farthest_over_share, most=1.15),
    Claim("block mask of 16k: at least 8 times torch with the whole mask",
          at("block mask 16k", lambda row, _: of.ratio(row, "torch")), 8.0),
    Claim("window 1024 of 16k: at least 75 % of the FMA peak, counting what is inside",
          least_share(lambda row: row["case"].startswith("window")), 0.75, unit="%"),
    Claim("weights returned: at least 2 times torch's matmul, softmax, matmul",
          at("BERT, weights returned", lambda row, _: of.ratio(row, "torch")), 2.0),
    Claim("two threads: at least 1.85 times one, in calls of 5 ms or more",
          faster_than_one_thread, 1.85),
    Claim("avx2 asked for: at least 80 % of the avx2 peak on the long rows",
          least_share(lambda row: "avx2" in row["entrants"], "avx2"), 0.80, unit="%"),
    Claim("working memory at L = 32768: below 64 MB",
          at("growth, L 32768", largest_memory), most=64.0, unit=" MB"),
)  # fmt: skip


def verdicts(results: Results) -> list[tuple[str, str, str]]:
    """(claim, measured, "holds" or "does not hold" or "") of each."""
    words = {True: "holds", False: "does not hold", None: ""}
    return [(c.text, c.measured(results), words[c.holds(results)]) for c in CLAIMS]


def summary(results: Results) -> list[str]:
    """Geometric means of the ratios to the best rival, a line per set that has any."""
    lines = []
    for name in SETS:
        ratios = [x for x in (of.best(row) for row in of.rows_of(results, name)) if x is not None]
        if ratios:
            lines.append(
                f"{name}: {of.geometric_mean(ratios):.2f}x the best rival in the geometric mean of "
                f"{len(ratios)} rows, {min(ratios):.2f}x at least"
            )
    return lines
