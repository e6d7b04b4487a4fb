"""One random call of each public function, for fuzz_api.py.

A new one is drawn as public_calls.py has it, until it has a function here that draws its arguments.

Arguments are right ones; spoil() puts something else in the place of one.
"""

import math
import pickle

import numpy as np
import public_calls
from fuzz_arrays import HUGE, JUNK

import qkv_ext
import qkv_ext.onnx
from qkv_ext._core._storage import ENTRIES

last = ""  #: the latest call as text, for the report of a finding


class Call:
    """A function and its arguments, and what a test may expect of them."""

    def __init__(self, function, arguments, options, *, tame=True, computes=True):
        self.function, self.arguments, self.options = function, list(arguments), dict(options)
        self.tame = tame  # the numbers of two backends are close
        self.computes = computes  # takes backend= and threads=
        self.huge = False

    def __call__(self):
        global last
        last = str(self)
        return self.function(*self.arguments, **self.options)

    @property
    def comparable(self):
        return self.computes and self.options.get("backend") != "numpy"

    def on_numpy(self):
        """The same call of the NumPy backend, with nothing to write to."""
        options = self.options | {"backend": "numpy"}
        if isinstance(options.get("out"), np.ndarray):
            options["out"] = np.zeros_like(options["out"], subok=False)
        return lambda: self.function(*self.arguments, **options)

    def __str__(self):
        given = [*map(show, self.arguments), *(f"{k}={show(v)}" for k, v in self.options.items())]
        return f"{getattr(self.function, '__qualname__', self.function)}({', '.join(given)})"


def show(x):
    if isinstance(x, np.ndarray) and x.size > 8:
        return f"<{x.dtype.str if x.dtype.kind != 'V' else x.dtype} {x.shape}, strides {x.strides}>"
    return repr(x)[:300]


def spoil(draw, call):
    """Put junk, or an array beyond any memory, in the place of one argument; returns True."""
    junk = draw.choice(JUNK)
    names = [*range(len(call.arguments)), *call.options]
    name = draw.choice(names) if names else 0
    place = call.arguments if isinstance(name, int) else call.options
    if names and draw.one_in(3) and isinstance(name, int):
        junk = grown(draw, place[name])
    if names:
        place[name] = junk
    call.huge = any(
        getattr(x, "size", 0) > 2**40 for x in (*call.arguments, *call.options.values())
    )
    call.tame = False
    return True


def grown(draw, x):
    """The array with one axis more, one less, one longer by one, or one beyond any memory."""
    x = np.asarray(x) if isinstance(x, np.ndarray) else np.ones((2, 3), np.float32)
    kind = draw.between(0, 3 if x.dtype.kind == "f" else 2)  # reading 2^50 integers takes weeks
    if kind == 0 or not x.size or x.size > 1e6:
        return x[None]
    axis = draw.between(0, x.ndim - 1)
    if kind == 1:
        return x.take(0, axis) if x.shape[axis] else x
    shape = list(x.shape)
    shape[axis] += 1
    if kind == 2:
        return np.resize(x, shape)
    shape[axis] = 2**50 // (math.prod(shape) // shape[axis])
    return np.broadcast_to(x.flat[0], shape)


# ---- attention ----------------------------------------------------------------------------------


def rules(draw, first, heads, length, s):
    """Options of order, lengths and heads; first is B, None at rank 2."""

    def per_item(low, high):
        if first is None:
            return draw.between(low, high)
        kind = draw.choice([np.int64, np.int32, np.uint8 if low >= 0 and high < 256 else np.int16])
        return draw.view(draw.rng.integers(low, high + 1, first).astype(kind))

    each = first is not None and draw.one_in(2)
    sides = [None, 0, 1, 5, 300, 2**40]
    choices = {
        "causal": lambda: True,
        "align": lambda: draw.choice(["bottom-right", "top-left"]),
        "scale": lambda: draw.choice([0.3, -0.5, 0.0, np.float32(1.5), None, 2]),
        "window": lambda: (draw.choice(sides), draw.choice(sides)),
        "softcap": lambda: draw.choice([0.5, 20, np.float64(3), None]),
        "alibi_slopes": lambda: draw.view(
            draw.rng.random((first, heads) if each else heads, np.float32)),
        "sinks": lambda: draw.view(draw.rng.standard_normal(heads, np.float32)),
        "kv_lengths": lambda: per_item(0, s),
        "q_lengths": lambda: per_item(0, length),
        "query_offset": lambda: per_item(-5, s + 5),
        "key_offset": lambda: draw.between(-9, 9),
    }  # fmt: skip
    made = {name: make() for name, make in choices.items() if draw.one_in(5)}
    items = () if first is None else (first,)
    if draw.one_in(8):
        made |= {
            name: draw.view(np.sort(draw.rng.integers(-1, draw.choice([1, 3, 300]), (*items, n))))
            for name, n in (("q_segments", length), ("kv_segments", s))
        }
    if draw.one_in(8):
        size = draw.choice([(1, 1), (64, 128), (100, 7), (3, 300)])
        shape = (-(-length // size[0]), -(-s // size[1]))
        shape = ((1,) if first is not None and draw.one_in(9) else ()) + shape
        keep = draw.rng.random(shape) < draw.choice([0.1, 0.6, 1.0])
        made["block_mask"] = qkv_ext.BlockMask(keep, size)
    return made


def mask(draw, shape):
    shape = draw.broadcast(shape)
    keep = draw.rng.random(shape) < draw.choice([0.0, 0.5, 0.9, 1.0])
    if draw.one_in(2):
        return draw.view(np.asarray(keep))
    dtype = draw.choice([np.float16, np.float32, np.float64])
    excluded = draw.choice([-np.inf, float(np.finfo(dtype).min)])
    x = np.where(keep, draw.rng.standard_normal(shape), excluded)
    return draw.view(np.asarray(x, dtype))


def extras(draw):
    return {name: True for name in ("return_weights", "return_lse") if draw.one_in(4)}


def attention(draw):
    dtype, rank = draw.dtype(), draw.choice([2, 3, 4, 4, 4, 4, 5])
    hkv, group = (draw.between(1, 3), draw.between(1, 4)) if rank > 3 else (1, 1)
    length, s, d, dv = draw.size(), draw.keys(), draw.size(1), draw.size()
    length = 1 if draw.one_in(3) else length
    lead = [draw.between(1, 3) for _ in range(rank - (3 if rank > 3 else 2))]
    if draw.one_in(30) and lead:
        lead[0] = 0

    def shape(heads, n, width):
        own = [1 if draw.one_in(6) else n for n in lead]
        return [*own, *([heads] if rank > 3 else []), n, width]

    shapes = [shape(hkv * group, length, d), shape(hkv, s, d), shape(hkv, s, dv)]
    arrays = [draw.array(x, dtype) for x in shapes]
    whole = list(np.broadcast_shapes(*(x[: len(lead)] for x in shapes)))
    heads = [hkv * group] if rank > 3 else []
    options = rules(draw, whole[0] if whole else None, hkv * group, length, s) | extras(draw)
    if draw.one_in(3):
        options["mask"] = mask(draw, [*whole, *heads, length, s])
    output = [*whole, *heads, length, dv]
    if rank > 3 and draw.one_in(4):
        arrays = [x.swapaxes(-3, -2) if isinstance(x, np.ndarray) else x for x in arrays]
        if all(isinstance(x, np.ndarray) for x in arrays):
            options["layout"] = "blhd"
            output[-3], output[-2] = output[-2], output[-3]
    if draw.one_in(4):
        options["out"] = draw.out(output, dtype, *arrays)
    return Call(qkv_ext.scaled_dot_product_attention, arrays, options)


def cached(draw):
    """Attention to a KVCache that was filled in steps, perhaps shared, mixed, cut, copied."""
    batch, hkv, group = draw.between(1, 3), draw.between(1, 3), draw.between(1, 4)
    d, dv, length = draw.size(1), draw.size(1), 1 if draw.one_in(2) else draw.size()
    kind = draw.choice([*ENTRIES])
    cache = qkv_ext.KVCache(batch, hkv, d, dv, dtype=kind, _page=draw.choice([256, 512]))
    for _ in range(draw.between(0, 3)):
        n, dtype = draw.keys(), draw.choice([np.float32, np.float16])
        k, v = (draw.rng.standard_normal((batch, hkv, n, x)).astype(dtype) for x in (d, dv))
        if n and draw.one_in(8):
            (k if draw.one_in(2) else v)[:, :, draw.between(0, n - 1)] = draw.choice(
                [np.nan, np.inf]
            )
        cache.append(k, v, draw.rng.integers(0, n + 1, batch) if draw.one_in(2) else None)
    if draw.one_in(3):
        cache = cache.fork()
    if draw.one_in(3):
        cache.reorder(draw.rng.integers(0, batch, batch))
    if draw.one_in(3):
        cache.truncate(cache.lengths * 2 // 3)
    dropped = draw.one_in(3)
    if dropped:
        cache.drop(np.maximum(cache.lengths - draw.choice([0, 9, 300]), 0))
    if draw.one_in(4):
        cache = pickle.loads(pickle.dumps(cache))
    s = int(cache.lengths.max())
    q = draw.array([batch, hkv * group, length, d], draw.choice([np.float32, np.float16]))
    options = rules(draw, batch, hkv * group, length, s) | extras(draw)
    if "kv_lengths" in options:
        options["kv_lengths"] = np.minimum(options["kv_lengths"], cache.lengths)
    if draw.one_in(4):
        options["mask"] = mask(draw, [batch, hkv * group, length, s])
    if dropped and not draw.one_in(4):  # not always refused
        options |= {"window": (draw.choice([0, 5, 200]), 0)}
    return Call(cache.attend, [q], options)


def varlen(draw):
    dtype, items = draw.dtype(), draw.between(0, 4)
    hkv, group, d, dv = draw.between(1, 3), draw.between(1, 3), draw.size(1), draw.size()
    lengths = np.array([[draw.size(0, 40), draw.keys()] for _ in range(items)], int).reshape(-1, 2)
    cu = np.zeros((items + 1, 2), draw.choice([np.int64, np.int32]))
    cu[1:] = np.cumsum(lengths, axis=0)
    if draw.one_in(3):  # rows past the last sequence
        lengths = np.vstack([lengths, [[3, 2]]])
    tq, tk = (int(n) for n in lengths.sum(axis=0))
    q = draw.array((tq, hkv * group, d), dtype)
    k, v = (draw.array((tk, hkv, n), dtype) for n in (d, dv))
    names = ("causal", "align", "scale", "window", "softcap", "alibi_slopes", "sinks")
    options = rules(draw, max(items, 1), hkv * group, 1, 1)
    options = {name: x for name, x in options.items() if name in names}
    if items == 0:
        options.pop("alibi_slopes", None)
    if items and draw.one_in(4):
        options["kv_lengths"] = draw.rng.integers(0, lengths[:items, 1] + 1)
    if draw.one_in(3):
        options["return_lse"] = True
    if draw.one_in(4):
        options["out"] = draw.out((tq, hkv * group, dv), dtype, q)
    cu_q, cu_k = draw.view(cu[:, 0].copy()), draw.view(cu[:, 1].copy())
    tame = np.array_equal(cu_q, cu[:, 0]) and np.array_equal(cu_k, cu[:, 1])  # broadcast: no more
    return Call(qkv_ext.varlen_attention, [q, k, v, cu_q, cu_k], options, tame=tame)


def weights(draw, d_in, d_ctx, h, hkv, d, dv):
    """(w_q, w_k, w_v, w_o) and biases."""
    shapes = [(d_in, h * d), (d_ctx, hkv * d), (d_ctx, hkv * dv), (h * dv, draw.size(1, 20))]
    w = [draw.array(shape) for shape in shapes]
    if draw.one_in(2):
        w[3] = None
    biases = {
        f"b_{part}": draw.numbers(x.shape[1] if isinstance(x, np.ndarray) else shape[1])
        for part, x, shape in zip("qkvo", w, shapes, strict=True)
        if x is not None and draw.one_in(4)
    }
    return w, biases


def projected(draw):
    """self_attention, cross_attention, or a layer."""
    hkv = draw.between(1, 2)
    h, d, dv = hkv * draw.between(1, 3), 2 * draw.between(1, 12), draw.between(1, 20)
    d_in, length, s = draw.size(1, 40), draw.size(), draw.keys()
    crossed = draw.one_in(2)
    d_ctx = draw.size(1, 40) if crossed else d_in
    lead = [draw.between(1, 3) for _ in range(draw.choice([0, 1, 1, 1, 2]))]
    x, context = draw.array([*lead, length, d_in]), draw.array([*lead, s, d_ctx])
    w, biases = weights(draw, d_in, d_ctx, h, hkv, d, dv)
    s = s if crossed else length
    heads = {"num_heads": h, "num_kv_heads": draw.choice([hkv, hkv if h != hkv else None])}
    options = rules(draw, lead[0] if lead else None, h, length, s) | extras(draw)
    if draw.one_in(3):
        options["mask"] = mask(draw, [*lead, h, length, s])
    if draw.one_in(2):
        if crossed:
            return Call(qkv_ext.cross_attention, [x, context, *w], heads | biases | options)
        return Call(qkv_ext.self_attention, [x, *w], heads | biases | options)
    layer = qkv_ext.MultiHeadAttention(*w, **biases, **heads)
    if draw.one_in(3):
        tables = qkv_ext.rotary_tables(max(length, s) + 30, d)
        options |= {"rotary": tables, "interleaved": bool(draw.one_in(2))}
    if crossed and draw.one_in(3):
        return Call(layer, [x], options | {"kv": layer.project_kv(context)})
    return Call(layer, [x, context] if crossed else [x], options)


def decoding(draw):
    """A step of a layer with a cache, which goes on from a fork each time it is called."""
    hkv, batch = draw.between(1, 2), draw.between(1, 3)
    h, d, dv, d_in = hkv * draw.between(1, 3), 2 * draw.between(1, 40), draw.size(1), draw.size(1)
    w, biases = weights(draw, d_in, d_in, h, hkv, d, dv)
    layer = qkv_ext.MultiHeadAttention(*w, **biases, num_heads=h, num_kv_heads=hkv)
    kind, n = draw.choice(["float32", "float16", "bfloat16", "int8"]), draw.choice([0, 1, 63, 254])
    cache = qkv_ext.KVCache(batch, hkv, d, dv, dtype=kind)
    lengths = draw.rng.integers(0, n + 1, batch) if draw.one_in(2) else None
    cache.append(*(draw.numbers((batch, hkv, n, m)) for m in (d, dv)), lengths)
    length = 1 if draw.one_in(2) else draw.between(0, 9)
    options = {"causal": bool(draw.one_in(2))}
    if draw.one_in(3):
        options = rules(draw, batch, h, length, n + length) | extras(draw)
        options.pop("kv_lengths", None)
    if draw.one_in(2):
        options["rotary"] = qkv_ext.rotary_tables(n + draw.choice([0, 9, 9]), d)
        options["interleaved"] = bool(draw.one_in(2))

    def step(x, **options):
        return layer(x, cache=cache.fork(), **options)

    x = draw.array([batch, length, d_in])
    tame = kind in ("float32", "float16")  # what else differs by a rounding is stored far apart
    return Call(step, [x], options, tame=tame)


def merge(draw):
    dtype, rank = draw.dtype(), draw.between(2, 4)
    shape = [draw.size(0, 20) for _ in range(rank)]
    count = draw.between(1, 4)
    outputs = [draw.array(shape, dtype) for _ in range(count)]
    wide = np.float64 if dtype == np.float64 else np.float32
    lses = [draw.array(shape[:-1], wide) for _ in range(count)]
    return Call(qkv_ext.merge_attention, [outputs, lses], {}, tame=False)


# ---- products, softmax, rotary ------------------------------------------------------------------


def matmul(draw):
    dtype = draw.dtype()
    m, k, n = draw.size(), draw.keys(), draw.size(0, 65)
    lead = [draw.between(1, 3) for _ in range(draw.choice([0, 0, 1, 2]))]
    a = draw.array([*lead, m, k], dtype)
    b = draw.array([*([] if draw.one_in(2) else lead), k, n], dtype)
    options = {"out": draw.out([*lead, m, n], dtype, a, b)} if draw.one_in(3) else {}
    return Call(qkv_ext.matmul, [a, b], options)


def linear(draw):
    dtype = np.dtype(np.float32) if draw.one_in(2) else draw.dtype()
    lead = [draw.size(0, 20) for _ in range(draw.choice([1, 1, 2]))]
    k, n = draw.keys(), draw.size(0, 65)
    x, w = draw.array([*lead, k], dtype), draw.array((k, n), dtype)
    b = None if draw.one_in(2) else draw.array((n,), dtype)
    options = {"out": draw.out([*lead, n], dtype, x)} if draw.one_in(3) else {}
    if draw.one_in(2):
        options["activation"] = draw.choice(["relu", "gelu", "gelu_tanh", "silu"])
    if draw.one_in(3):
        options["residual"] = draw.array([*lead, n], dtype)
    if draw.one_in(2) and dtype == np.float32:
        w = qkv_ext.pack_weight(w, dtype=draw.choice([None, "float16", "bfloat16"]))
    return Call(qkv_ext.linear_projection, [x, w, b], options)


def pack(draw):
    return Call(
        qkv_ext.pack_weight, [draw.array((draw.keys(), draw.size()), draw.dtype())], {},
        tame=False, computes=False,
    )  # fmt: skip


def softmax(draw):
    dtype = draw.dtype()
    shape = [draw.size(0, 40) for _ in range(draw.between(1, 3))]
    if draw.one_in(6):
        shape[-1] = draw.keys()
    x, options = draw.array(shape, dtype), {}
    if draw.one_in(2):
        options["axis"] = draw.between(-len(shape), len(shape) - 1)
    if draw.one_in(3):
        options["out"] = draw.out(shape, dtype, x)
    return Call(qkv_ext.softmax, [x], options)


def rotary(draw):
    dtype, d, length = draw.dtype(), 2 * draw.between(1, 20), draw.size()
    lead = [draw.between(1, 3) for _ in range(draw.between(0, 2))]
    tables = qkv_ext.rotary_tables(length + 5, d)
    x, options = draw.array([*lead, length, d], dtype), {}
    if draw.one_in(2):
        options["positions"] = draw.rng.integers(0, length + 5, length)
    if draw.one_in(3):
        options["out"] = draw.out([*lead, length, d], dtype, x)
    return Call(qkv_ext.apply_rotary, [x, *tables], options | {"interleaved": bool(draw.one_in(2))})


def norm(draw):
    dtype = draw.dtype()
    shape = [draw.size(0, 40) for _ in range(draw.between(1, 4))]
    if draw.one_in(6):
        shape[-1] = draw.keys()
    x, vectors = draw.array(shape, dtype), [draw.array(shape[-1:], dtype)]
    options = {"eps": draw.choice([0.0, 1e-5, 1e-30, np.float32(1e-6), 1])}
    if draw.one_in(3):
        options["out"] = draw.out(shape, dtype, x)
    function = draw.choice([qkv_ext.layer_norm, qkv_ext.rms_norm])
    if function is qkv_ext.layer_norm and draw.one_in(2):
        vectors.append(draw.array(shape[-1:], dtype))
    # the root of a small variance, with a small eps, is far from that of another order of sums
    return Call(function, [x, *vectors], options, tame=False)


# ---- ONNX, and the steps ------------------------------------------------------------------------


def onnx_attention(draw):
    dtype, b, hkv, group = draw.dtype(), draw.between(1, 2), draw.between(1, 2), draw.between(1, 2)
    length, s, past, d, dv = draw.size(1), draw.size(1), draw.size(), draw.size(1), draw.size(1)
    q = draw.numbers((b, hkv * group, length, d), dtype)
    k, v = (draw.numbers((b, hkv, s, n), dtype) for n in (d, dv))
    options = {"is_causal": draw.between(0, 1)}
    if draw.one_in(2):
        options["past_key"], options["past_value"] = (
            draw.numbers((b, hkv, past, n), dtype) for n in (d, dv))  # fmt: skip
    elif draw.one_in(2):
        options["nonpad_kv_seqlen"] = draw.rng.integers(0, s + 1, b)
    if draw.one_in(3):
        total = s + (past if "past_key" in options else 0)
        options["attn_mask"] = mask(draw, (b, hkv * group, length, total))
    if draw.one_in(3):
        options["left_window_size"] = draw.between(-1, 9)
    if draw.one_in(3):
        options |= {"return_qk_matmul_output": True, "qk_matmul_output_mode": draw.between(0, 3)}
    if draw.one_in(3):
        options |= {"q_num_heads": hkv * group, "kv_num_heads": hkv}
        q, k, v = (x.swapaxes(1, 2).reshape(b, x.shape[2], -1) for x in (q, k, v))
    return Call(qkv_ext.onnx.attention, [draw.view(x) for x in (q, k, v)], options)


def onnx_rotary(draw):
    b, h, length, d = draw.between(1, 2), draw.between(1, 3), draw.size(1), 2 * draw.between(1, 9)
    cos, sin = qkv_ext.rotary_tables(length + 3, d)
    x = draw.array((b, h, length, d), draw.dtype())
    ids = draw.rng.integers(0, length + 3, (b, length))
    return Call(qkv_ext.onnx.rotary_embedding, [x, cos, sin, ids], {})


def trace(draw):
    call = attention(draw)
    for name in ("out", "return_weights", "return_lse"):
        call.options.pop(name, None)
    call.function, call.computes = qkv_ext.trace, False
    return call


def listed(draw):
    """Any public call with the small arguments that the table of them has."""
    function, given, kinds = draw.choice([*public_calls.CALLS.values()])
    return Call(function, [], given, computes="backend" in kinds)


def beyond(draw):
    """Sizes beyond any memory, of arguments that are right otherwise: MemoryError."""
    one = np.float32(1)
    tall, wide = np.broadcast_to(one, (1 << 50, 1)), np.broadcast_to(one, (1, 1 << 50))
    call = draw.choice([
        lambda: Call(qkv_ext.matmul, [tall, wide[:, :9]], {}),
        lambda: Call(qkv_ext.softmax, [HUGE], {}),
        lambda: Call(qkv_ext.pack_weight, [tall], {}, computes=False),
        lambda: Call(qkv_ext.linear_projection, [tall, np.ones((1, 3), np.float32)], {}),
        lambda: Call(qkv_ext.scaled_dot_product_attention, [tall, tall[:3], tall[:3]], {}),
        lambda: Call(qkv_ext.scaled_dot_product_attention, [tall[:3], tall[:3], wide[[0] * 3]], {})
        if draw.one_in(1 << 30) else
        Call(qkv_ext.scaled_dot_product_attention, [tall[:3], tall[:9], tall[:9]],
             {"alibi_slopes": tall[:, 0]}),
        lambda: Call(qkv_ext.rotary_tables, [1 << 60, 64], {}, computes=False),
        lambda: Call(qkv_ext.alibi_slopes, [1 << 60], {}, computes=False),
    ])()  # fmt: skip
    call.huge, call.tame = True, False
    return call


CALLS = (  #: each with how often it is drawn
    (attention, 40), (cached, 12), (varlen, 12), (matmul, 10), (linear, 10), (softmax, 9),
    (projected, 14), (decoding, 6), (merge, 1), (rotary, 1), (norm, 3), (onnx_attention, 4),
    (onnx_rotary, 1), (pack, 1), (trace, 1), (listed, 2), (beyond, 1),
)  # fmt: skip
OFTEN = np.cumsum([often for _, often in CALLS])


def draw_call(draw):
    which = np.searchsorted(OFTEN, draw.between(0, int(OFTEN[-1]) - 1), side="right")
    call = CALLS[which][0](draw)
    call.tame = call.tame and not draw.overflows
    return call
