"""Text from a real trained language model, token by token, on NumPy arrays and a KVCache.

The model is the one of the package glassllm: a decoder of 4 layers with RMSNorm, rotary positions,
4 query and 2 key/value heads of 32, SwiGLU, and a context of 128 tokens, trained on Lewis Carroll
(en) and Machado de Assis (pt). qkv_ext computes its projections and its attention, the rest is
here; of glassllm only the weights and the tokenizer are used.

    pip install -e ".[examples]"                           or: pip install glassllm==0.1.0

    python examples/generate.py                            a greedy and a sampled continuation
    python examples/generate.py "Alice was beginning to" --tokens 60 --temperature 0.6
    python examples/generate.py --dtype int8               keys and values kept in 8 bits
    python examples/generate.py --continuations 4          several at once, from one prompt
    python examples/generate.py --lang pt "Capitu olhou para"
    python examples/generate.py --compare                  every storage type, and every backend
"""

import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
from numpy.random import default_rng

import qkv_ext
from qkv_ext._core._program import Parser, number, run

PROMPTS = {"en": "Alice was beginning to get very tired", "pt": "Capitu olhou para o mar e"}
STORAGE = ("float32", "float16", "bfloat16", "int8")


class RMSNorm:
    """x / √(mean of x² + eps) · gain, over the last axis."""

    def __init__(self, gain, eps):
        self.gain, self.eps = gain, np.float32(eps)

    def __call__(self, x):
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.eps) * self.gain


class Layer:
    """Attention over the cache, then SwiGLU: (silu(x W1) · x W3) W2; each is added to its input."""

    def __init__(self, tensors, prefix, config):
        weights = [tensors[f"{prefix}.attn.W_{part}"] for part in "QKVO"]
        heads = {"num_heads": config["n_heads"], "num_kv_heads": config["n_kv_heads"]}
        self.attention = qkv_ext.MultiHeadAttention(*weights, **heads)
        self.w1, self.w2, self.w3 = (
            qkv_ext.pack_weight(tensors[f"{prefix}.ffn.W{n}"]) for n in (1, 2, 3)
        )
        self.norm1, self.norm2 = (
            RMSNorm(tensors[f"{prefix}.norm{n}.gamma"], config["eps"]) for n in (1, 2)
        )

    def __call__(self, x, cache, rotary, **options):
        x = x + self.attention(
            self.norm1(x), cache=cache, rotary=rotary, interleaved=True, causal=True, **options
        )
        h = self.norm2(x)
        gate = qkv_ext.linear_projection(h, self.w1, **options)
        gate /= 1 + np.exp(-gate)  # silu: x · sigmoid(x)
        gate *= qkv_ext.linear_projection(h, self.w3, **options)
        return x + qkv_ext.linear_projection(gate, self.w2, **options)


class Decoder:
    """Token ids in, the logits of the next token out; keys and values stay in one cache a layer.

    `tensors` and `config` are what the model's npz file holds. The options of its methods, threads=
    and backend=, go to every call of qkv_ext.
    """

    def __init__(self, tensors, config):
        self.words = tensors["E"]  # (vocabulary, d), at the input and at the output
        self.to_words = qkv_ext.pack_weight(self.words.T)
        self.layers = [Layer(tensors, f"blocks.{n}", config) for n in range(config["n_layers"])]
        self.norm = RMSNorm(tensors["norm_f.gamma"], config["eps"])
        self.num_kv_heads = config["n_kv_heads"]
        self.head_dim = config["d_model"] // config["n_heads"]
        self.context = config["max_len"]
        self.rotary = qkv_ext.rotary_tables(self.context, self.head_dim, base=config["rope_base"])

    @classmethod
    def from_file(cls, path):
        with np.load(path) as file:
            tensors = {name: file[name] for name in file if name != "__config__"}
            config = json.loads(str(file["__config__"]))
        return cls({name: x.astype(np.float32) for name, x in tensors.items()}, config)

    def new_caches(self, batch=1, dtype="float32"):
        """Empty caches, one for each layer."""
        sizes = batch, self.num_kv_heads, self.head_dim
        return [qkv_ext.KVCache(*sizes, dtype=dtype) for _ in self.layers]

    def logits(self, ids, caches, **options):
        """Append the tokens (B, L) to the caches; logits (B, vocabulary) of the token that follows.

        Only the last row is multiplied with the vocabulary.
        """
        x = self.words[ids]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, self.rotary, **options)
        return qkv_ext.linear_projection(self.norm(x[:, -1]), self.to_words, **options)


def greedy(logits):
    """The most likely token of each row."""
    return logits.argmax(axis=-1)


class Sampler:
    """Tokens drawn from softmax(logits / temperature)."""

    def __init__(self, temperature, seed):
        self.temperature, self.rng = np.float32(temperature), default_rng(seed)

    def __call__(self, logits):
        sums = qkv_ext.softmax(logits / self.temperature).cumsum(axis=-1, dtype=np.float64)
        drawn = self.rng.random((len(logits), 1)) * sums[:, -1:]
        return (sums <= drawn).sum(axis=-1)


def generate(decoder, ids, choose, *, continuations=1, dtype="float32", **options):
    """Yield the next tokens (continuations,), for ever.

    The prompt is read once, and its caches then serve every continuation: reorder shares their
    pages. Where the context is full, the last tokens that fit are read anew from position 0.
    """
    texts = np.tile(ids[-decoder.context :], (continuations, 1))
    caches = decoder.new_caches(dtype=dtype)
    logits = decoder.logits(texts[:1], caches, **options)
    for cache in caches:
        cache.reorder([0] * continuations)
    logits = np.repeat(logits, continuations, axis=0)
    while True:
        tokens = choose(logits)
        yield tokens
        texts = np.concatenate([texts, tokens[:, None]], axis=1)[:, -decoder.context :]
        new = texts[:, -1:]
        if caches[0].lengths[0] == decoder.context:
            caches, new = decoder.new_caches(continuations, dtype), texts
        logits = decoder.logits(new, caches, **options)


def load(lang):
    """The decoder and the tokenizer of a language, from the installed package."""
    if importlib.util.find_spec("glassllm") is None:
        sys.exit("The model is missing: pip install glassllm==0.1.0")
    import glassllm

    folder = Path(glassllm.__file__).parent / "weights"
    tokenizer = glassllm.Tokenizer.load(folder / f"{lang}.tokenizer.json")
    return Decoder.from_file(folder / f"{lang}.npz"), tokenizer


def stream(title, tokenizer, prompt, tokens):
    """Print a text as it comes, and how fast it came."""
    print(f"--- {title}\n{prompt}", end="", flush=True)
    start = time.perf_counter()
    count = 0
    for token in tokens:
        print(tokenizer.decode([int(token[0])]), end="", flush=True)
        count += 1
    print(f"\n--- {count / (time.perf_counter() - start):.0f} tokens per second\n")


def several(tokenizer, prompt, tokens):
    """Print continuations that grew side by side."""
    start = time.perf_counter()
    rows = np.stack(list(tokens), axis=1)  # (continuations, tokens)
    speed = rows.size / (time.perf_counter() - start)
    print(f"--- {len(rows)} continuations at once")
    for row in rows:
        print(f"{prompt}{tokenizer.decode(row.tolist())}\n")
    print(f"--- {speed:.0f} tokens per second together\n")


def compare(decoder, ids, count, **options):
    """Print each storage type's and backend's speed, and how many greedy tokens stay the same."""
    print("backend   cache       tokens per second   bytes a token   same as the first")
    reference = None
    for backend, dtype in itertools.product(qkv_ext.backends(), STORAGE):
        how = options | {"backend": backend, "dtype": dtype}
        next(generate(decoder, ids, greedy, **how))  # starts threads, fills the CPU's caches
        row = 2 * decoder.head_dim * {"float32": 4, "int8": 1}.get(dtype, 2)  # a key and a value
        row += 8 if dtype == "int8" else 0  # and their scales
        size = len(decoder.layers) * decoder.num_kv_heads * row
        start = time.perf_counter()
        tokens = list(itertools.islice(generate(decoder, ids, greedy, **how), count))
        speed = count / (time.perf_counter() - start)
        tokens = np.concatenate(tokens)
        reference = tokens if reference is None else reference
        same = np.cumprod(tokens == reference).sum()
        print(f"{backend:10}{dtype:9}{speed:20.0f}{size:16}{same:13} of {count}")


def main(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    count, seed = number(int, 1, 10**6), number(int, 0)
    add = parser.add_argument
    add("prompt", nargs="?", help="what the text begins with")
    add("--lang", choices=PROMPTS, default="en", help="which model")
    add("--tokens", type=count, default=60, help="how many tokens to add")
    add("--dtype", choices=STORAGE, default="float32", help="of keys and values")
    add("--temperature", type=number(float, 0.01, 100.0), default=0.8, help="of the sampled text")
    add("--seed", type=seed, default=0, help="of the sampled text")
    add("--continuations", type=number(int, 1, 1000), default=1, help="how many at once")
    add("--threads", type=count, help="how many threads qkv_ext may use")
    add("--compare", action="store_true", help="measure every storage type instead")
    args = parser.parse_args(argv)

    decoder, tokenizer = load(args.lang)
    prompt = PROMPTS[args.lang] if args.prompt is None else args.prompt
    ids = tokenizer.encode(prompt)
    if not ids:
        parser.error("the prompt is empty")
    if args.compare:
        return compare(decoder, ids, args.tokens, threads=args.threads)

    def text(choose, continuations=1):
        tokens = generate(
            decoder,
            ids,
            choose,
            continuations=continuations,
            dtype=args.dtype,
            threads=args.threads,
        )
        return itertools.islice(tokens, args.tokens)

    sampler = Sampler(args.temperature, args.seed)
    if args.continuations > 1:
        return several(tokenizer, prompt, text(sampler, args.continuations))
    stream("greedy", tokenizer, prompt, text(greedy))
    stream(f"sampled at temperature {args.temperature}", tokenizer, prompt, text(sampler))


if __name__ == "__main__":
    run(main)
