"""The bench counts and checks right; nothing here passes or fails by time."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import tolerance

import qkv_ext

CLONE = Path(__file__).resolve().parents[1]
if not (CLONE / "bench").is_dir():
    pytest.skip("the bench lies in the clone only", allow_module_level=True)
sys.path.append(str(CLONE))

from bench import against, cases, claims, command, race, table, worker  # noqa: E402
from bench import results as of  # noqa: E402
from bench.caches import CacheUse  # noqa: E402
from bench.kinds import Attention, Product, Skip, Softmax  # noqa: E402
from bench.masks import KEYS, PATTERNS, ROWS, Masked, mask_of, tile_share  # noqa: E402
from bench.report import report  # noqa: E402
from bench.rivals import RIVALS, matching, rival  # noqa: E402
from bench.steps import FeedForward, LayerNorm, Merge, Moving, RMSNorm, Rotary  # noqa: E402

EVERY = [*cases.CASES, *(beside.case for case in cases.CASES for beside in case.beside)]


def tiny(case):
    """A small version and its arrays, on a machine that may have neither avx2 nor ml_dtypes."""
    small = case.tiny().but(backend=None)
    try:
        return small, small.arrays()
    except Skip as missing:
        pytest.skip(str(missing))


def known_to_numpy(case):
    """It is measured in float32 only, and has no cache."""
    return getattr(case, "dtype", "float32") == "float32" and not isinstance(case, CacheUse)


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, "qkv_ext") for case in EVERY),
     *((case, "NumPy") for case in EVERY if known_to_numpy(case))],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_answers(case, name):
    """What a rival computes is the exact answer, on every kind of row."""
    small, arrays = tiny(case)
    prepared = rival(name, 1).prepare(small, arrays)
    outputs = prepared.unpack(prepared.call())
    if name == "NumPy" and getattr(small, "window", None):
        assert small.causal  # so that the formula's mask knows the window
    assert worker.error(small, arrays, outputs) < small.tolerance


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_exact_answers(case):
    """The exact answer is that of the tests' own oracle; a wrong result is told from it."""
    small, arrays = tiny(case)
    exact = small.exact(arrays)
    if isinstance(small, Attention):
        options = {"mask": arrays.get("mask"), "causal": small.causal, "scale": small.scale}
        if small.window:
            options["window"] = (small.window - 1, 0)
        output, weights, _ = oracle.attention(*(arrays[x] for x in "qkv"), **options)
        whole = (output, weights) if small.weights else (output,)
    elif isinstance(small, FeedForward):
        y = arrays["x"].astype(np.float64) @ arrays["w"]
        gelu = y / 2 * (1 + np.vectorize(math.erf)(y / 2**0.5))
        whole = (y + arrays["residual"] if small.residual else gelu,)
    elif isinstance(small, Product):
        whole = (np.matmul(*(x.astype(np.float64) for x in arrays.values())),)
    elif isinstance(small, CacheUse):
        more = small.count if small.use in ("append", "layer") else 0
        whole = (np.full(small.shape[0], small.shape[2] + more),)
    elif isinstance(small, Moving) and small.copy:
        whole = (arrays["x"],)
    elif isinstance(small, Rotary):
        half = small.shape[-1] // 2
        turn = arrays["cos"] + 1j * arrays["sin"]
        turned = (arrays["x"][..., :half] + 1j * arrays["x"][..., half:]) * turn.astype("c16")
        whole = (np.concatenate([turned.real, turned.imag], axis=-1),)
    elif isinstance(small, Merge):
        logs = arrays["lses"].astype(np.float64)
        weights = np.exp(logs - np.logaddexp.reduce(logs))
        whole = (np.einsum("n...,n...d->...d", weights, arrays["outputs"]),)
    elif isinstance(small, LayerNorm):
        x, weight = arrays["x"].astype(np.float64), arrays["weight"]
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        if isinstance(small, RMSNorm):
            scaled = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)
        whole = (scaled * weight + arrays.get("bias", 0.0),)
    else:
        terms = np.exp(arrays["x"].astype(np.float64))
        whole = (terms / terms.sum(-1, keepdims=True),)
    assert tolerance.largest(small.sample(whole), exact) < 1e-12
    assert worker.error(small, arrays, tuple(x * 1.2 for x in whole)) > small.tolerance


def test_work():
    """Of attention 4 flop per pair, head and component that is computed; bytes of K and V."""
    full = Attention(name="", shape=(2, 4, 2, 6, 6, 8))
    pairs = {"": 36, "causal": 18, "window": 3 + 3 * 4}
    assert full.flop == 4 * 2 * 4 * 8 * pairs[""]
    assert full.but(causal=True).flop == 4 * 2 * 4 * 8 * pairs["causal"]
    assert full.but(causal=True, window=3).flop == 4 * 2 * 4 * 8 * pairs["window"]
    masked = Masked(name="", shape=(2, 4, 2, 6, 6, 8), pattern="prefix")
    assert masked.flop == 4 * 2 * 4 * 8 * (1 + 2 + 3 + 4 + 5 + 6)  # the prefix is the first key
    assert masked.moved == full.moved + 36 == masked.but(form="float").moved - 3 * 36
    assert masked.but(form="segments").moved == full.moved
    step = Attention(name="", shape=(2, 4, 2, 1, 6, 8))
    assert (step.bound, step.unit, step.work) == ("read", "GB/s", 2 * 2 * 2 * 6 * 8 * 4)
    assert step.but(dtype="float16").work == step.work / 2
    product = Product(name="", shape=(2, 3, 5))
    assert (product.bound, product.work, product.moved) == ("fma", 60, 4 * (6 + 15 + 10))
    assert product.but(shape=(1, 3, 5)).work == 60  # bytes of the weight
    assert Softmax(name="", shape=(2, 3)).work == 48
    assert FeedForward(name="", shape=(2, 3, 5)).moved == product.moved
    assert FeedForward(name="", shape=(2, 3, 5), residual=True).moved == product.moved + 40
    assert LayerNorm(name="", shape=(3, 5)).work == 4 * (2 * 15 + 2 * 5)  # weight and bias, too
    assert RMSNorm(name="", shape=(3, 5)).work == 4 * (2 * 15 + 5)
    rotary = Rotary(name="", shape=(1, 2, 3, 4))
    assert (rotary.unit, rotary.work) == ("GB/s", 2 * 4 * 24 + 2 * 4 * 6)  # x, out, and the tables
    assert Merge(name="", shape=(5, 1, 2, 3, 4)).work == 6 * 4 * (24 + 6)
    assert rotary.but(copy=True).arrays()["x"].nbytes == rotary.work / 2  # read, and written


def test_window_row_counts_the_pairs_that_the_library_sees():
    case = cases.chosen("options", "window")[0].tiny()
    length = case.shape[3]
    zeros = np.zeros((length, 1), np.float32)
    eye = np.eye(length, dtype=np.float32)
    seen = qkv_ext.scaled_dot_product_attention(
        zeros, zeros, eye, causal=True, window=(case.window - 1, 0)
    )
    assert case.flop == 4 * case.shape[0] * case.shape[1] * case.shape[5] * (seen > 0).sum()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_share_of_tiles(pattern):
    n = 600
    mask, seen = mask_of(pattern, n), 0
    assert mask.flags.c_contiguous  # or a call would time a copy of it
    assert mask.any(axis=1).all()
    for i in range(0, n, ROWS):
        for j in range(0, n, KEYS):
            tile = mask[i : i + ROWS, j : j + KEYS]
            seen += tile.size if tile.any() else 0
    assert tile_share(pattern, n) == pytest.approx(seen / n**2)


def test_chosen():
    assert cases.chosen() == cases.CASES
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)
    assert {name for case in cases.CASES for name in case.sets} == set(cases.SETS)
    assert [case.name for case in cases.chosen("decode", "32k")] == ["decode 32k, GQA 4"]
    two = cases.chosen("softmax, gemm")
    assert {name for case in two for name in case.sets} == {"gemm", "softmax"}
    quick = cases.chosen(quick=True)
    assert {name for case in quick for name in case.sets} == set(cases.SETS)
    assert len(quick) <= len(cases.SETS) + 3  # in under two minutes
    with pytest.raises(ValueError, match=r"--set is a list of encoder, .*; got 'encoders'"):
        cases.chosen("encoders")


def test_matching_rivals():
    assert matching("") == list(RIVALS)
    assert matching("numpy,ort") == ["qkv_ext", "NumPy", "ORT", "ORT contrib"]
    with pytest.raises(ValueError, match=r"--rivals is a list of .*; got 'mkl'"):
        matching("mkl")


def entrant(name, work, *seconds, limit=()):
    return {"rival": name if name in RIVALS else "qkv_ext", "work": work, "error": 1e-7,
            "first": 1.0, "seconds": list(seconds), "minimum": [0.9 * min(seconds)],
            "limit": list(limit)}  # fmt: skip


def made_up(scale=1.0):
    """Results of a run that never was: ours takes 1 ms times the scale, NumPy 3 and torch 2."""
    rows = []
    for name in ("encoder 2k", "causal 4k", "decode 32k, GQA 4", "call overhead",
                 "growth, L 512", "growth, L 32768", "block mask 16k"):  # fmt: skip
        case = next(case for case in cases.CASES if case.name == name)
        limit = {"fma": (1.25 * case.flop / 1e6,), "read": (2 * case.read / 1e6,), None: ()}
        ours = [scale * 1e-3 * x for x in (1, 1.02, 0.98)]
        here = {
            "qkv_ext": entrant("qkv_ext", case.work, *ours, limit=limit[case.bound]),
            "NumPy": entrant("NumPy", case.work, 3e-3, 3.1e-3, 2.9e-3),
            "torch": entrant("torch", case.work, 2e-3, 3e-3, 2e-3),
        }
        for beside in case.beside:
            if beside.rival == "qkv_ext":
                here[beside.label] = entrant(beside.label, beside.case.work, 2e-3, limit=(1e9,))
        rows.append(
            {"case": name, "sets": list(case.sets), "kind": type(case).__name__, "unit": case.unit,
             "bound": case.bound, "work": case.work, "flop": case.flop, "moved": case.moved,
             "options": race.options(case), "entrants": here,
             "skipped": {"OpenVINO": "has no call for it"},
             "memory": {"qkv_ext": 5e6, "NumPy": 9e9} if case.memory else {}}
        )  # fmt: skip
    machine = {"cpu": "a CPU", "system": "Linux", "python": "3", "l3": 32 * 2**20,
               "fma_peak": {"avx2": 100.0, "avx512": 200.0}, "read_bandwidth": 30.0}  # fmt: skip
    settings = {"command": "python -m bench", "rounds": 3, "seconds": 0.4, "threads": 2}
    results = {"settings": settings,
            "date": "2026-01-01 00:00 UTC", "machine": machine,
            "versions": {"qkv_ext": "qkv_ext 0"}, "absent": {"JAX": "not installed"},
            "rows": rows}  # fmt: skip
    return json.loads(json.dumps(results))


def test_figures_of_a_row():
    results = made_up()
    row = of.row_named(results, "encoder 2k")
    assert of.median(row) == 1e-3
    assert of.best(row) == 2
    assert of.rivals(row) == {"NumPy": 3, "torch": 2}
    assert of.spread(row) == pytest.approx(0.04)
    assert of.share(row, results) == (pytest.approx(0.8), True)
    assert of.beside(row) == ["one thread", "avx2"]
    step = of.row_named(results, "decode 32k, GQA 4")
    assert of.share(step, results) == (pytest.approx(0.5), True)
    results["machine"]["l3"] = 2**28  # larger than a quarter of K and V
    assert not of.share(step, results).counts
    assert of.rate(of.row_named(results, "call overhead")) == pytest.approx(1000)


def test_tables():
    results = made_up()
    drawn = table.main_table(results)
    assert all(len(row) == len(drawn.header) for row in drawn.rows)
    text = table.plain(drawn)
    line = next(line for line in text.splitlines() if line.startswith("encoder 2k"))
    assert line.split()[2:] == ["17180", "GF/s", "19478", "4%", "80%", "2.00x", "3.00x", "2.00x",
                                "1e-07"]  # fmt: skip
    assert max(map(len, text.splitlines())) < 110
    assert "5.0" in table.plain(table.memory_table(results))
    narrow = table.fitting(drawn, 68)
    assert [name for name in drawn.header if name not in narrow.header] == ["best", "error"]
    assert table.fitting(drawn, 200) == drawn
    assert table.spread(0.2) == "20% !"
    said = "\n".join(table.notes(results))
    assert "JAX is not measured: not installed." in said
    assert "OpenVINO skipped 7 rows: has no call for it." in said


def test_claims():
    results = made_up()
    said = {text: (measured, holds) for text, measured, holds in claims.verdicts(results)}
    assert said["causal costs at most 0.55 of not causal at L = 4096"] == ("0.50x", "holds")
    assert said["decode 32k, GQA 4: at least 3.5 times the best rival"] == (
        "2.00x",
        "does not hold",
    )
    assert said["working memory at L = 32768: below 64 MB"] == ("5.00 MB", "holds")
    assert said["softmax: the lowest ratio to torch is at least 0.97"] == ("not measured", "")
    assert said["block mask of 16k: at least 8 times torch with the whole mask"] == (
        "2.00x",
        "does not hold",
    )
    names = {case.name for case in cases.CASES}
    for claim in claims.CLAIMS:  # those about one row find it
        claim.figure({**results, "rows": []})
    assert {"causal 4k", "BERT, float mask", "BERT, weights returned", "decode 4k, GQA 4"} <= names


def test_against_an_earlier_run():
    table_of = against.comparison(made_up(2.0), made_up())
    lines = {row[0]: row for row in table_of.rows}
    assert lines["encoder 2k"][3] == "0.50x"
    assert lines["encoder 2k"][-2:] == ["1.00x", "faster"]
    assert against.comparison(made_up(), made_up(2.0)).rows[0][-1] == "slower"
    assert against.comparison(made_up(1.01), made_up()).rows[0][-1] == ""


def test_files(tmp_path, capsys):
    """--json, --markdown and --plot of a run, read again by --from and --against."""
    first, again = tmp_path / "run.json", tmp_path / "again.json"
    first.write_text(json.dumps(made_up()))
    arguments = ["--from", first, "--json", again, "--markdown", tmp_path / "page.md",
                 "--against", first]  # fmt: skip
    assert command.main(list(map(str, arguments))) == 0
    assert json.loads(again.read_text()) == made_up()
    page = (tmp_path / "page.md").read_text()
    assert page == report(made_up(), [])
    for part in ("a CPU", "python -m bench", "| encoder 2k |", "does not hold", "not measured"):
        assert part in page
    printed = capsys.readouterr().out
    assert "encoder 2k" in printed
    assert "against the run of 2026-01-01" in printed


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.plots import draw

    pictures = draw(made_up(), tmp_path)
    assert {path.name for path in pictures} == {
        "ratios-attention.png",
        "roofline.png",
        "growth.png",
    }
    assert all(path.read_bytes()[1:4] == b"PNG" for path in pictures)


def test_wrong_arguments(capsys):
    assert command.main(["--set", "x"]) == 2
    assert command.main(["--cases", "no such case"]) == 2
    assert command.main(["--against", "/no/such/file"]) == 2
    assert command.main(["--json", "/no/such/folder/run.json"]) == 2
    said = capsys.readouterr().err
    assert "--set is a list of" in said
    assert "no case holds 'no such case'" in said


@pytest.mark.slow
def test_a_race():
    """Processes of their own, one for a library that is not there: a row of a tiny case."""
    case = cases.chosen("growth", "512")[0].tiny().but(name="tiny", memory=True)
    case = case.but(rivals=("NumPy",), memory=True, beside=(cases.Beside("twice", case),))
    workers = {name: race.Worker(name, 1) for name in ("qkv_ext", "NumPy")}
    missing = race.Worker("no such rival", 1)
    said = []
    try:
        assert "KeyError" in missing.start()["skipped"]
        assert missing.absent
        who = race.Race(workers, race.Limits(), 2, 0.001, 1, said.append)
        row = who.run(case)
        workers["NumPy"]._process.kill()
        assert "its process ended" in workers["NumPy"].ask("drop")["skipped"]
        assert workers["NumPy"].ask("drop") == {}  # another one was started
    finally:
        for one in (*workers.values(), missing):
            one.close()
    assert set(row["entrants"]) == {"qkv_ext", "NumPy", "twice"}
    assert not row["skipped"]
    assert all(len(x["seconds"]) == 2 for x in row["entrants"].values())
    assert len(said) == who.steps(case)
    json.dumps(row)
