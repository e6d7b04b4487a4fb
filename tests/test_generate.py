"""The text generation example: the package's own greedy text, and every step of its traces."""

import functools
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from caches import STORAGE

import qkv_ext

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "generate.py"
if not EXAMPLE.is_file():
    pytest.skip(f"{EXAMPLE} is not here", allow_module_level=True)
PROMPTS = {"en": "Alice was beginning to get very tired", "pt": "Capitu olhou para o mar e"}


class Model(NamedTuple):
    """The package's own model, the example's decoder, a prompt and what the package makes of it."""

    own: Any
    decoder: Any
    ids: list[int]
    greedy: list[int]  # a few tokens beyond the context
    traces: list[Any]  # of its first steps


@functools.cache
def load_example():
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def load_model(lang):
    glassllm = pytest.importorskip("glassllm")
    own, _ = glassllm.load_pretrained(lang)
    decoder, tokenizer = load_example().load(lang)
    ids = tokenizer.encode(PROMPTS[lang])
    tokens = [step.token for step in own.generate(ids, 132 - len(ids), greedy=True)]
    traces = [step.trace for step in own.generate(ids, 20, greedy=True, trace=True)]
    return Model(own, decoder, ids, tokens, traces)


@pytest.fixture
def example():
    return load_example()


@pytest.fixture(params=PROMPTS)
def model(request):
    return load_model(request.param)


@pytest.fixture
def tiny(example):
    """A random decoder of 2 layers that knows 11 words, with a context of 8."""
    rng = np.random.default_rng(0)
    shapes = {"E": (11, 16), "norm_f.gamma": (16,)}
    for n in range(2):
        shapes |= {f"blocks.{n}.norm{i}.gamma": (16,) for i in (1, 2)}
        shapes |= {f"blocks.{n}.attn.W_{part}": (16, 16) for part in "QO"}
        shapes |= {f"blocks.{n}.attn.W_{part}": (16, 8) for part in "KV"}
        shapes |= {f"blocks.{n}.ffn.W{i}": (16, 12) for i in (1, 3)}
        shapes[f"blocks.{n}.ffn.W2"] = (12, 16)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    config = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "max_len": 8,
              "rope_base": 10000.0, "eps": 1e-6}  # fmt: skip
    return example.Decoder(tensors, config)


def test_greedy_text_is_the_packages_own(example, model, backend):
    """Beyond the context too, where the last 128 tokens are read anew."""
    text = example.generate(model.decoder, model.ids, example.greedy, backend=backend)
    tokens = [int(token[0]) for token in itertools.islice(text, len(model.greedy))]
    assert tokens == model.greedy


@pytest.mark.parametrize("kind", STORAGE)
def test_every_traced_step_is_reproduced(model, kind, backend):
    """Weights and mixes of each layer and token, from the queries, keys and values of the trace."""
    tolerance = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2, "int8": 6e-2}[kind]
    caches = [qkv_ext.KVCache(1, 2, 32, dtype=kind) for _ in range(4)]
    for trace in model.traces:
        for layer, cache in enumerate(caches):
            q, k, v, weights, mixed = (
                trace.get(f"attn.{name}", layer=layer).value[None].astype(np.float32)
                for name in ("rope_q", "rope_k", "v", "softmax", "mix")
            )
            cache.append(k, v)
            actual, actual_weights = cache.attend(
                q, causal=True, return_weights=True, backend=backend
            )
            largest = np.abs(v).max()
            np.testing.assert_allclose(actual, mixed, rtol=0, atol=tolerance * largest)
            np.testing.assert_allclose(actual_weights, weights, rtol=0, atol=tolerance)


def test_logits_are_those_of_the_package(example, model, backend):
    decoder = model.decoder
    logits = decoder.logits(np.array([model.ids]), decoder.new_caches(), backend=backend)
    expected = model.own.forward(model.ids).data[:, -1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", STORAGE)
def test_continuations_are_those_of_one(example, tiny, kind, backend):
    """Side by side, by pages that they share, and beyond the context: each as if alone."""
    drawn = iter(np.random.default_rng(0).integers(0, 11, (14, 3)))
    options = {"dtype": kind, "backend": backend}
    seen = []

    def choose(logits):
        seen.append(logits)
        return next(drawn)

    together = example.generate(tiny, [1, 2, 3], choose, continuations=3, **options)
    texts = np.stack(list(itertools.islice(together, 14)), axis=1)
    for n, text in enumerate(texts):
        given, alone = iter(text), []

        def choose_one(logits, given=given, alone=alone):
            alone.append(logits)
            return np.array([next(given)])

        list(itertools.islice(example.generate(tiny, [1, 2, 3], choose_one, **options), 14))
        for one, every in zip(alone, seen, strict=True):
            np.testing.assert_allclose(one[0], every[n], rtol=0, atol=1e-3)


def test_samples_have_the_probabilities_of_the_model(example):
    logits = np.log(np.float32([[0.5, 0.3, 0.2], [0, 0.25, 0.75]]) ** 2 + np.float32(1e-30))
    sampler = example.Sampler(2.0, 0)
    counts = np.zeros((2, 3))
    for _ in range(4000):
        counts[[0, 1], sampler(logits)] += 1
    np.testing.assert_allclose(counts / 4000, [[0.5, 0.3, 0.2], [0, 0.25, 0.75]], atol=0.03)


def test_end_to_end(example, capsys):
    pytest.importorskip("glassllm")
    for arguments, expected in (
        (["--tokens", "5", "--dtype", "int8"], "--- greedy\nAlice was beginning to get very tired"),
        (["So", "--tokens", "5", "--continuations", "3"], "--- 3 continuations at once\nSo"),
        (["--lang", "pt", "--tokens", "4", "--compare"], "\nnumpy     float32 "),
    ):
        example.main([*arguments, "--threads", "1"])
        assert expected in capsys.readouterr().out
    for arguments in ([""], ["--tokens", "0"], ["--temperature", "0"]):
        with pytest.raises(SystemExit):
            example.main(arguments)


def test_help():
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--help"], capture_output=True, encoding="utf-8", timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "--continuations" in run.stdout


def test_says_how_to_get_the_model(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "glassllm", None)
    with pytest.raises(SystemExit, match="pip install glassllm=="):
        example.main([])
