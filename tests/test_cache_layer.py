"""MultiHeadAttention over a KVCache: decoding step by step is the whole sequence at once."""

import copy
import itertools
import pickle
import re

import numpy as np
import pytest
from caches import STORAGE
from cases import dtype_of
from tolerance import assert_same_bits

import qkv_ext
from qkv_ext import KVCache, MultiHeadAttention
from qkv_ext._core import _backends

H, HKV, D, DV, WIDTH = 4, 2, 8, 6, 20
TABLES = qkv_ext.rotary_tables(400, D)


def layer(rng, dtype=np.float32):
    shapes = (WIDTH, H * D), (WIDTH, HKV * D), (WIDTH, HKV * DV), (H * DV, WIDTH)
    w = [(0.3 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]
    return MultiHeadAttention(*w, b_k=w[1][0], num_heads=H, num_kv_heads=HKV)


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": TABLES},
        {"rotary": (TABLES[0][:, :2], TABLES[1][:, :2]), "rotary_dim": 4, "interleaved": True},
        {"rotary": TABLES, "window": (40, 0), "softcap": 3.0},
        {"rotary": TABLES, "key_offset": 7, "query_offset": "moved"},
        {"alibi_slopes": qkv_ext.alibi_slopes(H), "sinks": np.float32([0, 1, -1, 2])},
    ],
    ids=["plain", "rotary", "interleaved", "window", "offsets", "alibi"],
)
def test_steps_are_the_whole(options, backend, rng):
    """A prompt in two parts, then a step at a time; with weights and lse."""
    mha, x, options = layer(rng), rng.standard_normal((2, 300, WIDTH), np.float32), dict(options)
    options |= {"causal": True, "backend": backend, "return_lse": True, "return_weights": True}
    moved = options.pop("query_offset", None)
    start = {} if moved is None else {"query_offset": 7}
    whole, weights, lse = mha(x, **options, **start)
    cache = KVCache(2, HKV, D, DV)
    cuts = [0, 100, 290, *range(291, 301)]
    for at, stop in itertools.pairwise(cuts):
        start = {} if moved is None else {"query_offset": at + 7}
        part, part_weights, part_lse = mha(x[:, at:stop], cache=cache, **options, **start)
        close(part, whole[:, at:stop])
        close(part_weights, weights[:, :, at:stop, :stop])
        close(part_lse, lse[:, :, at:stop])
    assert cache.lengths.tolist() == [300, 300]


@pytest.mark.parametrize("single", [False, True])
def test_padding_has_no_bias(single, backend, rng):
    """Rows past q_lengths are 0, and not b_o; a row that is there without a key is b_o."""
    w = rng.standard_normal((4, 8, 8), np.float32)
    mha = MultiHeadAttention(*w, b_o=w[0, 0], num_heads=2)
    x, n = rng.standard_normal((2, 5, 8), np.float32), [3, 0]
    whole = mha(x, causal=True, backend=backend)
    given = {"cache": KVCache(2, 2, 4), "q_lengths": n, "causal": True, "backend": backend}
    if single:
        x, n, whole = x[:1], n[:1], whole[:1]
        given |= {"cache": KVCache(1, 2, 4), "q_lengths": n[0], "out": np.full((5, 8), 7, "f4")}
        outputs = [mha(x[0], **given)[None]]
    else:
        outputs = [mha(x, **given)]
        outputs += [mha(x[:, :1], **{**given, "q_lengths": [0, 1]})]
        assert (outputs[1][0] == 0).all()
        assert (outputs[1][1] != 0).all()
    for item, count, expected in zip(outputs[0], n, whole, strict=True):
        assert (item[count:] == 0).all()
        close(item[:count], expected[:count])
    step = mha(x[0, :1] if single else x[:, :1], cache=given["cache"], kv_lengths=0 if single else
               [0, 0], backend=backend)  # fmt: skip
    assert (step == w[0, 0]).all()


@pytest.mark.parametrize("kind", STORAGE)
def test_storage_types(kind, rng):
    mha, x = layer(rng), rng.standard_normal((1, 50, WIDTH), np.float32)
    whole = mha(x, causal=True, rotary=TABLES)
    cache = KVCache(1, HKV, D, DV, dtype=kind)
    parts = [mha(x[:, n : n + 1], cache=cache, rotary=TABLES) for n in range(50)]
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 3e-2}[kind]
    close(np.concatenate(parts, axis=1), whole, tolerance)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_layers(dtype, backend, rng):
    mha = layer(rng, dtype_of(dtype))
    x = rng.standard_normal((2, 9, WIDTH), np.float32).astype(dtype_of(dtype))
    cache = KVCache(2, HKV, D, DV, dtype=dtype)
    mha(x[:, :8], cache=cache, causal=True, backend=backend)
    last = mha(x[:, 8:], cache=cache, backend=backend)
    assert last.dtype == x.dtype
    whole = mha(x, causal=True, backend=backend)[:, 8:]
    close(last.astype(np.float32), whole.astype(np.float32), 1e-2)


def test_ragged_batches(backend, rng):
    """q_lengths of each item: what is appended, what attends, and where rotary goes on."""
    mha, x = layer(rng), rng.standard_normal((3, 12, WIDTH), np.float32)
    cache, lengths = KVCache(3, HKV, D, DV), np.zeros(3, int)
    alone = [[], [], []]
    for n in ([12, 5, 0], [1, 1, 1], [3, 0, 12], [2, 2, 2]):
        x = rng.standard_normal((3, 12, WIDTH), np.float32)
        x[0, n[0] :], x[1, n[1] :] = np.nan, np.inf  # no rows
        given = {"causal": True, "rotary": TABLES, "q_lengths": n, "backend": backend}
        output = mha(x, cache=cache, **given)
        lengths = lengths + n
        assert cache.lengths.tolist() == lengths.tolist()
        for b in range(3):
            alone[b].append(x[b, : n[b]])
            one = np.concatenate(alone[b])
            expected = mha(one, causal=True, rotary=TABLES, backend=backend)
            close(output[b, : n[b]], expected[len(one) - n[b] :])


def test_windows_that_drop(backend, rng):
    """A cache that drops what every window has left behind goes on within its tables and memory."""
    mha, x = layer(rng), rng.standard_normal((1, 390, WIDTH), np.float32)
    options = {"causal": True, "rotary": TABLES, "window": (30, 0), "backend": backend}
    whole = mha(x, **options)
    cache = KVCache(1, HKV, D, DV)
    for at in range(0, 390, 13):
        close(mha(x[:, at : at + 13], cache=cache, **options), whole[:, at : at + 13])
        cache.drop(np.maximum(cache.lengths - 30, 0))
    assert cache.dropped.tolist() == [360]
    assert cache.nbytes < 3 * 256 * HKV * (D + DV) * 4 / 2


def test_without_a_batch(backend, rng):
    """x (L, d_in) for a batch of one: options as for x (L, d_in) everywhere."""
    mha, x = layer(rng), rng.standard_normal((9, WIDTH), np.float32)
    whole, weights = mha(x, causal=True, rotary=TABLES, return_weights=True, backend=backend)
    cache, out = KVCache(1, HKV, D, DV), np.empty((6, WIDTH), np.float32)
    given = {"cache": cache, "rotary": TABLES, "causal": True, "backend": backend}
    padded = np.concatenate([x[:5], np.full((1, WIDTH), np.nan, np.float32)])
    mask = np.ones((H, 6, 5), bool)
    assert mha(padded, q_lengths=5, out=out, mask=mask, **given) is out
    close(out[:5], whole[:5])
    part, part_weights = mha(x[5:], return_weights=True, **given)
    close(part, whole[5:])
    close(part_weights, weights[:, 5:])


def test_a_failed_call_leaves_the_cache(rng):
    mha, x = layer(rng), rng.standard_normal((2, 5, WIDTH), np.float32)
    cache = KVCache(2, HKV, D, DV)
    mha(x, cache=cache, causal=True)
    before = pickle.dumps(cache)
    float64 = layer(rng, np.float64)
    for options, error, message in (
        ({"window": 3}, ValueError, "window is 3; expected a pair"),
        ({"mask": np.ones((5, 9), bool)}, ValueError,
         "mask has shape (5, 9); expected one that broadcasts to (2, 4, 5, 10)"),
        ({"q_lengths": [6, 0]}, ValueError, "q_lengths holds 6; expected 0 to 5"),
        ({"kv_lengths": [11, 0]}, ValueError, "kv_lengths holds 11; expected 0 to 10"),
        ({"q_lengths": [5, 1], "kv_lengths": [10, 7]}, ValueError,
         "kv_lengths holds 7 for item 1; expected at most its length, 6"),
        ({"out": np.empty((2, 5, 1), "f4")}, ValueError, "out has shape (2, 5, 1); expected"),
        ({"rotary": qkv_ext.rotary_tables(9, D)}, ValueError,
         "rotary has 9 rows, but queries stand at positions up to 9"),
        ({"return_lse": 1}, TypeError, "return_lse is 1; expected True or False"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
        ({"scale": np.inf}, ValueError, "scale is inf; expected"),
        ({"context": x}, ValueError, "context and cache are both given; expected one of them"),
        ({"kv": mha.project_kv(x)}, ValueError, "kv and cache are both given; expected one"),
        ({"cache": {}}, TypeError, "cache is a dict; expected a KVCache"),
        ({"cache": KVCache(2, HKV, D)}, ValueError,
         "cache is KVCache(batch=2, num_kv_heads=2, head_dim=8, dtype='float32', lengths=[0, 0]); "
         "expected num_kv_heads=2, head_dim=8 and v_dim=6, as the weights have"),
        ({"x": x[:1]}, ValueError, "x has shape (1, 5, 20); expected (2, L, 20), as the cache has"),
        ({"x": x[0]}, ValueError, "x has shape (5, 20); expected (2, L, 20), as the cache has"),
        ({"x": x[None]}, ValueError, "x has shape (1, 2, 5, 20); expected (2, L, 20), as"),
        ({"x": x[..., :9]}, ValueError, "x has shape (2, 5, 9); expected (..., 20), the d_in of"),
    ):  # fmt: skip
        arguments = {"x": x, "cache": cache} | options
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            mha(**arguments)
        assert pickle.dumps(cache) == before
    with pytest.raises(TypeError, match=r"^x has dtype float64; a cache takes float32, float16"):
        float64(x.astype(float), cache=cache)


def test_a_failure_in_the_last_product(rng, monkeypatch):
    """The cache is as it was also where W_O fails, after everything else."""
    from qkv_ext._layers import _forward

    mha, x = layer(rng), rng.standard_normal((1, 300, WIDTH), np.float32)
    cache = KVCache(1, HKV, D, DV)
    mha(x, cache=cache)
    fork, before = cache.fork(), pickle.dumps(cache)

    def output_projection(*arguments):
        raise MemoryError

    monkeypatch.setattr(_forward, "output_projection", output_projection)
    for one in (cache, fork):
        with pytest.raises(MemoryError):
            mha(x, cache=one)
        assert pickle.dumps(one) == before
    monkeypatch.undo()
    close(mha(x, cache=cache), mha(x, cache=fork))


def decode(mha, prompt, steps, backend, kind, **options):
    """Outputs of a ragged prompt and of steps behind it, and the cache."""
    cache = KVCache(2, HKV, D, mha._layer.v_dim, dtype=kind)
    outputs = [
        mha(prompt, cache=cache, q_lengths=[250, 3], causal=True, backend=backend, **options)
    ]
    outputs += [mha(x, cache=cache, backend=backend, **options) for x in steps]
    return outputs, cache


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize(
    ("dv", "biases", "with_o", "options"),
    [
        (DV, "", True, {"rotary": TABLES}),
        (D, "qkvo", True, {"rotary": TABLES, "interleaved": True, "scale": 0.3}),
        (D, "v", False, {}),
        (70, "k", True, {"rotary": (TABLES[0][:, :2], TABLES[1][:, :2]), "rotary_dim": 4}),
    ],
    ids=["rotary", "biases", "no W_O", "part"],
)
def test_a_step_of_its_own_has_the_bits_of_the_general_one(
    kind, dv, biases, with_o, options, compiled, monkeypatch, rng
):
    """Steps of 1 and 3 rows, from page to page; the second item is at positions of its own."""
    shapes = {"q": (WIDTH, H * D), "k": (WIDTH, HKV * D), "v": (WIDTH, HKV * dv)}
    if with_o:
        shapes["o"] = (H * dv, 9)
    w = [rng.standard_normal(shape, np.float32) for shape in shapes.values()]
    b = {f"b_{part}": rng.standard_normal(shapes[part][1], np.float32) for part in biases}
    mha = MultiHeadAttention(*w, **b, num_heads=H, num_kv_heads=HKV)
    prompt = rng.standard_normal((2, 250, WIDTH), np.float32)
    steps = [rng.standard_normal((2, n, WIDTH), np.float32) for n in (1, 1, 3, 1, 1, 1, 1, 3)]
    taken = []
    own = _backends._TABLE[compiled].plain_step

    def counted(*arguments):
        done = own(*arguments)
        taken.append(done is not None)
        return done

    def use(plain):
        changed = _backends._TABLE[compiled]._replace(plain_step=plain)
        monkeypatch.setitem(_backends._TABLE, compiled, changed)

    use(counted)
    ours, cache = decode(mha, prompt, steps, compiled, kind, **options)
    assert taken.count(True) == len(steps) - 1  # all but the one that needs a page
    use(lambda *_: None)
    expected, other = decode(mha, prompt, steps, compiled, kind, **options)
    for x, y in zip(ours, expected, strict=True):
        assert_same_bits(x, y)
    assert cache.lengths.tolist() == other.lengths.tolist() == [262, 15]
    for n in range(2):
        assert_same_bits(cache.keys(n), other.keys(n))
        assert_same_bits(cache.values(n), other.values(n))


def test_a_step_without_a_batch(compiled, rng):
    mha, x = layer(rng), rng.standard_normal((4, WIDTH), np.float32)
    caches = [KVCache(1, HKV, D, DV) for _ in range(2)]
    for row in x:
        one = mha(row[None], cache=caches[0], rotary=TABLES, backend=compiled)
        other = mha(row[None, None], cache=caches[1], rotary=TABLES, backend=compiled)
        assert one.shape == (1, WIDTH)
        assert_same_bits(one, other[0])


def test_a_layer_keeps_one_weight(rng):
    """W_Q, W_K and W_V lie side by side; copies share them, and pickles hold them once."""
    mha = layer(rng)
    weight = mha._layer.joined.weight
    for part in "qkv":
        assert np.shares_memory(mha._layer.weights[part].panels, weight.panels)
    copied, restored = copy.copy(mha), pickle.loads(pickle.dumps(mha))
    assert copied._layer.joined.weight is weight
    assert len(pickle.dumps(mha)) < 1.5 * sum(w.nbytes for w in mha._layer.weights.values())
    x = rng.standard_normal((3, WIDTH), np.float32)
    for other in (copied, restored):
        assert_same_bits(other(x, causal=True), mha(x, causal=True))
        assert np.shares_memory(other._layer.weights["k"].panels, other._layer.joined.weight.panels)


def test_tables_without_rows(backend, rng):
    """Neither read, nor taken for enough; what has no row needs none."""
    mha, empty = layer(rng), qkv_ext.rotary_tables(0, D)
    for n in (1, 2):
        cache = KVCache(1, HKV, D, DV)
        with pytest.raises(ValueError, match=f"rotary has 0 rows, .* positions up to {n - 1}"):
            mha(np.ones((1, n, WIDTH), "f4"), cache=cache, rotary=empty, backend=backend)
        assert cache.lengths.tolist() == [0]
    nothing = np.ones((1, 0, WIDTH), "f4")
    assert mha(nothing, cache=cache, rotary=empty, backend=backend).shape == (1, 0, WIDTH)


@pytest.mark.parametrize(("dv", "d_out"), [(0, 5), (6, 0), (0, 0), (0, None)])
def test_steps_of_no_width(dv, d_out, compiled):
    shapes = [(WIDTH, H * D), (WIDTH, HKV * D), (WIDTH, HKV * dv)]
    shapes += [] if d_out is None else [(H * dv, d_out)]
    mha = MultiHeadAttention(*(np.ones(s, "f4") for s in shapes), num_heads=H, num_kv_heads=HKV)
    cache = KVCache(2, HKV, D, dv)
    for _ in range(3):
        output = mha(np.ones((2, 1, WIDTH), "f4"), cache=cache, backend=compiled)
        assert output.shape == (2, 1, 0 if d_out is None else d_out)


def test_a_step_that_brings_the_first_large_scale(compiled):
    """Integer keys whose products with q cancel beyond float32 count from their own step on."""
    sign = np.where(np.arange(64) % 2, 1, -1).astype("f4")
    w = np.diag(np.full(64, 2.0**40, "f4")), np.diag(sign * np.float32(2.0**100)), np.eye(64)
    mha = MultiHeadAttention(*(x.astype("f4") for x in w), num_heads=1)
    cache = KVCache(1, 1, 64, dtype="int8")
    cache.append(np.zeros((1, 1, 1, 64), "f4"), np.full((1, 1, 1, 64), 3, "f4"))
    x = np.ones((1, 1, 64), "f4")
    steps = [mha(x, cache=cache, backend=compiled)[0, 0, 0] for _ in range(3)]
    other = KVCache(1, 1, 64, dtype="int8")
    other.append(np.zeros((1, 1, 1, 64), "f4"), np.full((1, 1, 1, 64), 3, "f4"))
    general = [mha(x, cache=other, backend=compiled, window=(99, 0))[0, 0, 0] for _ in range(3)]
    np.testing.assert_array_equal(steps, general)
