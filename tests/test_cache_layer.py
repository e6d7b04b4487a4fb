"""MultiHeadAttention over a KVCache: decoding step by step is the whole sequence at once."""

import itertools
import pickle
import re

import numpy as np
import pytest
from caches import STORAGE
from cases import dtype_of

import qkv_ext
from qkv_ext import KVCache, MultiHeadAttention

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
    from qkv_ext import _forward

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
