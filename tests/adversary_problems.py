"""What adversary.py tries: problems drawn at random, with the truth and the plain formula of each.

A problem has arrays and options by name, which adversary.py changes; kind, how its keys are
stored; prepare(), the arrays that the formula is computed of; compute(backend); and
truth_and_plain(arrays): the truth, the plain formula in NumPy's orders and in those of the
backends, and the sizes of what goes into an entry.
"""

import numpy as np
import oracle
from cases import dtype_of
from orders import ORDERS
from tolerance import WAYS, largest, plain_attention

import qkv_ext
from qkv_ext import KVCache
from qkv_ext._core._storage import ENTRIES, encode

F32 = np.float32
STORAGE = ("float32", "float32", "float16", "bfloat16")
CACHES = tuple(ENTRIES)


class Draw:
    """A problem: arrays and options by name, and how they are stored."""

    def __init__(self, rng):
        self.rng = rng

    def size(self, *choices):
        return int(self.rng.choice(choices))

    def normal(self, *shape):
        return self.rng.standard_normal(shape, F32)

    def power(self, low, high):
        """2 to a random power."""
        return F32(2.0 ** self.rng.uniform(low, high))


# ---- families of attention: each changes q, k, v (1, H, L or S, D) or the options in place -------


def wide_scores(draw, x, options):
    x["q"] *= draw.power(0, 6)


def exact_scores(draw, x, options):
    """Whole numbers: what the plain formula makes no error of."""
    x["q"], x["k"] = np.rint(x["q"] * draw.power(-1, 3)), np.rint(x["k"])
    options["scale"] = 1.0


def one_number(draw, x, options):
    """D = 1: scores without a sum."""
    x["q"], x["k"] = x["q"][..., :1].copy(), x["k"][..., :1] * draw.power(0, 6)
    options["scale"] = 1.0


def ramp(draw, x, options):
    """A maximum that rises from tile to tile, and values in the first of them alone."""
    one_number(draw, x, options)
    x["k"][..., 0] = np.linspace(0, draw.rng.uniform(0, 90), x["k"].shape[-2])
    x["k"] += draw.normal(1) * draw.power(-4, 6)
    if draw.size(0, 1):
        x["v"][..., 40:, :] = 0


def sink(draw, x, options):
    options["sinks"] = (draw.rng.uniform(-5, 100) + draw.normal(x["q"].shape[1])).astype(F32)


def outlier(draw, x, options):
    j = draw.rng.integers(x["k"].shape[-2])
    x["k"][..., j, :] *= draw.power(0, 8)


def two_keys(draw, x, options):
    """Two keys that hardly differ, with opposite values."""
    i, j = draw.rng.integers(x["k"].shape[-2], size=2)
    x["k"][..., j, :] = x["k"][..., i, :] * (1 + draw.power(-20, -1) * draw.normal(1))
    x["v"][..., j, :] = -x["v"][..., i, :]
    x["q"] *= draw.power(0, 5)


def cancelling(draw, x, options):
    """Values whose weighted sum is nearly nothing."""
    x["q"] *= draw.power(-20, 0)
    x["v"] -= x["v"].mean(axis=-2, keepdims=True)


def cancelling_scores(draw, x, options):
    """Products of a score that take each other away."""
    half = x["k"].shape[-1] // 2
    if half:
        x["k"][..., :half] = -x["k"][..., half : 2 * half] * (1 + draw.power(-20, 0))
        x["q"][..., :half] = x["q"][..., half : 2 * half]
        x["q"] *= draw.power(0, 8)


def alibi(draw, x, options):
    options["alibi_slopes"] = np.abs(draw.normal(x["q"].shape[1])) * draw.power(-8, 3)
    options["query_offset"] = draw.size(0, 1, 300, 1000, 1 << 22)


def softcap(draw, x, options):
    options["softcap"] = float(draw.power(-3, 6))
    x["q"] *= draw.power(0, 6)


def float_mask(draw, x, options):
    shape = x["q"].shape[-2], x["k"].shape[-2]
    options["mask"] = draw.normal(*shape) * draw.power(-2, 6)


def few_allowed(draw, x, options):
    shape = x["q"].shape[-2], x["k"].shape[-2]
    options["mask"] = draw.rng.random(shape, F32) < draw.rng.uniform(0.01, 1)
    options["causal"] = bool(draw.size(0, 1))


def magnitudes(draw, x, options):
    for name in "qkv":
        x[name] *= draw.power(-30, 30)
    options["scale"] = float(1 / max(largest(x["q"]) * largest(x["k"]), 1e-30))


def plain(draw, x, options):
    options["causal"] = bool(draw.size(0, 1))


FAMILIES = (
    plain, wide_scores, exact_scores, one_number, ramp, sink, outlier, two_keys, cancelling,
    cancelling_scores, alibi, softcap, float_mask, few_allowed, magnitudes,
)  # fmt: skip


class Attention:
    """One call of scaled_dot_product_attention, or of a cache's attend."""

    def __init__(self, draw):
        size = draw.size
        d, dv, s = size(1, 3, 8, 16, 64, 80, 128, 160), size(1, 4, 16), size(2, 5, 12, 40, 64, 300)
        s = size(260, 700, 1100, 2100, 5000) if size(*range(12)) == 0 else s
        length, hkv = size(1, 1, 2, 3, 5, 9, 20), size(1, 1, 2)
        h = hkv * size(1, 1, 2, 5)
        self.arrays = {"q": draw.normal(1, h, length, d), "k": draw.normal(1, hkv, s, d),
                       "v": draw.normal(1, hkv, s, dv)}  # fmt: skip
        self.options = {}
        if size(0, 1):
            self.options["scale"] = float(draw.power(-5, 1))
        self.families = [draw.rng.choice(FAMILIES) for _ in range(size(1, 1, 2))]
        for family in self.families:
            family(draw, self.arrays, self.options)
        self.cached = bool(size(0, 0, 1))
        self.kind = str(draw.rng.choice(CACHES if self.cached else STORAGE))
        self.options = {k: v for k, v in self.options.items() if v is not False}

    def __str__(self):
        shapes = " ".join(f"{name}{x.shape}" for name, x in self.arrays.items())
        where = f"cache of {self.kind}" if self.cached else self.kind
        return f"{'+'.join(f.__name__ for f in self.families)} {shapes} {where}"

    def prepare(self):
        """What is given, what the formula is computed of, and the dtype of the results."""
        q, k, v = self.arrays.values()
        if not self.cached:
            dtype = dtype_of(self.kind)
            most = 65504 if dtype == np.float16 else np.inf
            self.given = [np.clip(x, -most, most).astype(dtype) for x in (q, k, v)]
            return [x.astype(F32) for x in self.given]
        self.given = q
        self.cache = KVCache(1, k.shape[1], k.shape[-1], v.shape[-1], dtype=self.kind)
        most = 65504 if self.kind == "float16" else np.inf
        self.cache.append(np.clip(k, -most, most), np.clip(v, -most, most))
        return [q, self.cache.keys(0)[None], self.cache.values(0)[None]]

    def compute(self, backend):
        rest = {"return_weights": True, "return_lse": True, "backend": backend}
        if self.cached:
            return self.cache.attend(self.given, **self.options, **rest)
        return qkv_ext.scaled_dot_product_attention(*self.given, **self.options, **rest)

    def truth_and_plain(self, arrays):
        truth = oracle.attention(*arrays, **self.options)
        plain = [plain_attention(*arrays, way, **self.options) for way in WAYS]
        own = [in_order(arrays, order, self.options) for order in ORDERS]
        if self.cached and self.kind == "int8":
            (k, of_k), (v, of_v) = (encode(self.arrays[name], "int8") for name in "kv")
            entries = arrays[0], k.astype(F32), v.astype(F32)
            own += [in_order(entries, order, self.options, (of_k, of_v)) for order in ORDERS]
        return truth, plain, own, conditions(arrays, truth, self.options)


def in_order(arrays, order, options, scales=None):
    """The plain formula in an order of ours; scales of k and v where these are entries of int8."""
    of_scores, of_outputs, add_up = order
    products = []

    def matmul(a, b):
        first = not products
        way = of_scores if first else of_outputs
        products.append(way)
        if scales is None:
            return way(a, b)
        k, v = (np.repeat(x, b.shape[1] // x.shape[1], axis=1)[..., None, :] for x in scales)
        return way(a, b) * k if first else way(a * v, b)

    return plain_attention(*arrays, (matmul, add_up), fused=True, **options)


def conditions(arrays, truth, options):
    """How large what is rounded on the way to an entry is, for each array.

    A weight is w = exp(score - lse).  The terms of that difference have the size s together: those
    of the score, and |lse|.  If it is off by a unit of rounding of s, the weight is off by as many
    units, and so is what the weights make of V:

        output    sum of w |v| + sum of w |v - output| s
        weights   w (1 + s + sum of w s)
        lse       1 + sum of w s

    The sums run over the keys, and a sink, which has the value 0.
    """
    q, k, v = (x.astype(np.float64) for x in arrays)
    output, weights, lse = truth
    d, group = q.shape[-1], q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    size = np.abs(q * options.get("scale", 1 / np.sqrt(d))) @ np.abs(k).swapaxes(-1, -2)
    if "alibi_slopes" in options:
        offset = options["query_offset"]
        distance = np.arange(q.shape[-2])[:, None] + offset - np.arange(k.shape[-2])
        size += options["alibi_slopes"][:, None, None] * np.abs(distance)
    if getattr(options.get("mask"), "dtype", None) == F32:
        size += np.abs(options["mask"])
    size += np.abs(lse)[..., None]
    mean = (weights * size).sum(axis=-1, keepdims=True)
    distances = np.abs(v[:, :, None] - output[:, :, :, None])  # (B, H, L, S, Dv)
    spread = np.einsum("bhls,bhlsd->bhld", weights * size, distances)
    if "sinks" in options:
        sinks = np.abs(options["sinks"])[:, None] + np.abs(lse)
        of_sink = (np.maximum(1 - weights.sum(axis=-1), 0) * sinks)[..., None]
        mean, spread = mean + of_sink, spread + of_sink * np.abs(output)
    return weights @ np.abs(v) + spread, weights * (1 + size + mean), 1 + mean[..., 0]


class Product:
    """A matmul."""

    def __init__(self, draw):
        size = draw.size
        m, n, k = size(1, 1, 2, 5), size(1, 1, 2, 7, 20), size(2, 5, 16, 64, 256, 300, 700, 1500)
        a, b = draw.normal(m, k), draw.normal(k, n)
        if size(0, 1):
            b[: k // 2] = -b[k // 2 : k // 2 * 2]
            a[:, : k // 2] = a[:, k // 2 : k // 2 * 2] * (1 + draw.power(-24, 0) * draw.normal(1))
        if size(0, 1):
            a *= 2.0 ** draw.rng.uniform(-8, 8, a.shape).astype(F32)
        if size(0, 1):
            b = np.abs(b)
        self.arrays, self.options, self.kind = {"a": a, "b": b}, {}, "float32"

    def __str__(self):
        return "matmul " + " ".join(f"{name}{x.shape}" for name, x in self.arrays.items())

    def prepare(self):
        return list(self.arrays.values())

    def compute(self, backend):
        return (qkv_ext.matmul(*self.arrays.values(), backend=backend),)

    def truth_and_plain(self, arrays):
        a, b = arrays
        truth = (a.astype(np.float64) @ b.astype(np.float64),)
        size = np.abs(a).astype(np.float64) @ np.abs(b)
        own = [(order[0](a, b),) for order in ORDERS]
        return truth, [(way[0](a, b),) for way in WAYS], own, (size,)


class Softmax:
    """A softmax of rows."""

    def __init__(self, draw):
        x = draw.normal(draw.size(1, 3), draw.size(1, 2, 7, 64, 300, 1000, 3000)) * draw.power(
            -2, 7
        )
        if draw.size(0, 1):
            x = np.sort(x, axis=-1)
        if draw.size(0, 1):
            x += draw.power(0, 12)
        self.arrays, self.options, self.kind = {"x": x.astype(F32)}, {}, "float32"

    def __str__(self):
        return f"softmax {self.arrays['x'].shape}"

    def prepare(self):
        return [self.arrays["x"]]

    def compute(self, backend):
        return (qkv_ext.softmax(self.arrays["x"], backend=backend),)

    def truth_and_plain(self, arrays):
        (x,) = arrays

        def formula(x, add_up):
            terms = np.exp(x - x.max(axis=-1, keepdims=True))
            return (terms / add_up(terms)[..., None],)

        truth = formula(x.astype(np.float64), lambda x: x.sum(axis=-1))
        own = [formula(x, order[2]) for order in ORDERS]
        return truth, [formula(x, way[1]) for way in WAYS], own, truth


class Merge:
    """A merge of parts of attention."""

    def __init__(self, draw):
        parts, rows = draw.size(1, 2, 3, 8, 30), draw.size(1, 1, 4)
        lse = draw.normal(parts, rows) * draw.power(-2, 6) + draw.power(0, 7)
        out = draw.normal(parts, rows, draw.size(1, 4)) * draw.power(-20, 20)
        if draw.size(0, 1):
            out -= out.mean(axis=0)
        self.arrays, self.options, self.kind = {"out": out, "lse": lse}, {}, "float32"

    def __str__(self):
        return f"merge {self.arrays['out'].shape}"

    def prepare(self):
        return [self.arrays["lse"], self.arrays["out"]]

    def compute(self, backend):
        return qkv_ext.merge_attention(self.arrays["out"], self.arrays["lse"], backend=backend)

    def truth_and_plain(self, arrays):
        def formula(lse, out, add_up):
            top = lse.max(axis=0)
            terms = np.exp(lse - top)
            total = add_up(terms.T)
            weights = (terms / total)[..., None]
            merged = add_up(np.moveaxis(weights * out, 0, -1))
            return merged, top + np.log(total)

        lse, out = (x.astype(np.float64) for x in arrays)
        truth = formula(lse, out, lambda x: x.sum(axis=-1))
        weights = np.exp(lse - truth[1])[..., None]
        sizes = (weights * np.abs(out)).sum(axis=0), 1 + np.abs(truth[1])
        return truth, [formula(*arrays, way[1]) for way in WAYS], [], sizes


KINDS = (Attention, Attention, Attention, Attention, Product, Softmax, Merge)
