"""python -m qkv_ext: the walk is the formula, and every backend is measured and right."""

import json
import sys

import numpy as np
import pytest

import qkv_ext
from qkv_ext import __main__ as program
from qkv_ext import _demo

STEPS = ["Q", "K", "V", "scores", "scaled scores", "weights", "output", "in one call"]


@pytest.fixture
def printed(monkeypatch, capsys):
    """What it prints with arguments; small shapes and no more than two calls of each."""
    cases = (_demo.CASES[0], _demo.Case("causal", 1, 4, 2, 40, 40, 16, True),
             _demo.Case("decode", 2, 4, 2, 1, 300, 32))  # fmt: skip
    monkeypatch.setattr(_demo, "CASES", cases)
    monkeypatch.setattr(_demo, "SECONDS", 0.0)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qkv_ext", *arguments])
        program.main()
        return capsys.readouterr().out

    return run


def test_for_machines(printed):
    said = json.loads(printed("--json"))
    assert said["config"]["backends"] == list(qkv_ext.backends())
    for title, given in (("self-attention", "X"), ("cross-attention", "X_enc")):
        steps = {name: np.array(x) for name, x in said["walks"][title].items()}
        assert list(steps)[-len(STEPS) :] == STEPS
        w_k, w_v = (np.array(said["walks"]["self-attention"][name]) for name in ("W_K", "W_V"))
        np.testing.assert_allclose(steps["K"], steps[given] @ w_k, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(steps["V"], steps[given] @ w_v, rtol=1e-4, atol=1e-5)
        terms = np.exp(steps["Q"] @ steps["K"].T / 8**0.5)
        weights = terms / terms.sum(-1, keepdims=True)
        np.testing.assert_allclose(steps["weights"], weights, rtol=1e-4)
        for name in ("output", "in one call"):
            np.testing.assert_allclose(steps[name], weights @ steps["V"], rtol=1e-3, atol=1e-5)
    assert len(said["speed"]) == 3 * len(qkv_ext.backends())
    for row in said["speed"]:
        assert row["rate"] > 0
        assert row["unit"] == ("GB/s" if row["case"] == "decode" else "GFLOP/s")
        assert 0 <= row["largest error"] < 1e-5


def test_for_people(printed):
    said = printed()
    assert said.startswith("qkv_ext ")
    assert said.count("rows sum to 1.000000") == 2
    assert said.count("largest difference to the steps above") == 2
    *_, heads, first, second, third = said.splitlines()
    assert heads.split() == list(qkv_ext.backends())
    for line, name in ((first, "MiniLM, one sentence"), (second, "causal"), (third, "decode")):
        assert line.startswith(f"  {name} ")
        assert len(line.partition("/s")[2].split()) == 2 * len(qkv_ext.backends())
