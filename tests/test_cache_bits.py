"""Equal bits within a KVCache, in every compiled backend and for every storage type.

One order for every number of rows: tiles of 256 keys inside splits of 1024, both counted from the
item's first key.  So decode is prefill, however it was cut.
"""

import numpy as np
import pytest
from caches import STORAGE, filled
from cases import dtype_of
from test_nonfinite import EXTRAS, plain_rows
from tolerance import assert_same_bits

import qkv_ext

every_kind = pytest.mark.parametrize("kind", STORAGE)
LENGTHS = (1, 63, 255, 256, 257, 1023, 1024, 1025, 2500)
OPTIONS = (
    {},
    {"window": (300, 0)},
    {"window": (1024, 0), "softcap": 5.0},
    {"alibi_slopes": np.float32([0.1, 0.02, 0.3, 0.01]), "scale": -0.3},
    {"sinks": np.float32([0.5, -3, 40, -np.inf])},
)


def draw(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def attend(cache, q, backend, **options):
    """(output, lse), and where weights are asked for too the same of both."""
    return cache.attend(q, return_lse=True, backend=backend, **options)


def assert_all_same_bits(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert_same_bits(x, y)


@every_kind
@pytest.mark.parametrize("s", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_at_once_are_rows_one_by_one(kind, s, options, compiled, rng):
    """Prefill is decode: also where the later keys were not there yet."""
    k, v, q = draw(rng, 1, 2, s, 24), draw(rng, 1, 2, s, 17), draw(rng, 1, 4, min(s, 150), 24)
    cache, length = filled(k, v, kind), q.shape[2]
    together = attend(cache, q, compiled, causal=True, **options)
    for i in {0, 1, 2, 3, 5, 6, 7, 47, 48, 100, length - 2, length - 1} & set(range(length)):
        at = s - length + i
        row = q[:, :, i : i + 1]
        alone = attend(cache, row, compiled, causal=True, query_offset=at, **options)
        assert_all_same_bits([x[:, :, i : i + 1] for x in together], alone)
        then = cache.fork()
        then.truncate(at + 1)
        assert_all_same_bits(alone, attend(then, row, compiled, **options))


@every_kind
@pytest.mark.parametrize("length", [2, 3, 8, 9, 31, 64, 200])
def test_any_number_of_rows(kind, length, compiled, rng):
    """No path by the number of rows: each of them alone, without causal order."""
    cache = filled(draw(rng, 1, 1, 1500, 32), draw(rng, 1, 1, 1500, 32), kind)
    q = draw(rng, 1, 4, length, 32)
    together = attend(cache, q, compiled)
    for i in range(0, length, max(1, length // 7)):
        alone = attend(cache, q[:, :, i : i + 1], compiled)
        assert_all_same_bits([x[:, :, i : i + 1] for x in together], alone)


@every_kind
@pytest.mark.parametrize("step", [1, 7, 64, 300])
def test_prefill_in_chunks_is_prefill_at_once(kind, step, compiled, rng):
    n = 40 if step == 1 else 1300
    x, q = draw(rng, 2, 1, n, 16), draw(rng, 2, 2, n, 16)
    whole = attend(filled(x, x, kind), q, compiled, causal=True)
    cache, parts = qkv_ext.KVCache(2, 1, 16, dtype=kind), []
    for start in range(0, n, step):
        part = slice(start, start + step)
        cache.append(x[:, :, part], x[:, :, part])
        parts.append(attend(cache, q[:, :, part], compiled, causal=True))
    outputs, lses = zip(*parts, strict=True)
    assert_all_same_bits((np.concatenate(outputs, axis=2), np.concatenate(lses, axis=2)), whole)


@every_kind
@pytest.mark.parametrize("length", [1, 3, 70])
def test_a_fork_is_its_parent(kind, length, compiled, rng):
    x, q = draw(rng, 2, 1, 1400, 16), draw(rng, 2, 4, length, 16)
    cache = filled(x, x, kind)
    expected = attend(cache, q, compiled, causal=True)
    fork = cache.fork()
    assert_all_same_bits(attend(fork, q, compiled, causal=True), expected)
    fork.append(x[:, :, :5], x[:, :, :5])
    fork.truncate(1400)
    assert_all_same_bits(attend(fork, q, compiled, causal=True), expected)
    assert_all_same_bits(attend(cache, q, compiled, causal=True), expected)
    cache.reorder([1, 0, 1])
    again = attend(cache, q[[1, 0, 1]], compiled, causal=True)
    assert_all_same_bits(again, [x[[1, 0, 1]] for x in expected])


@every_kind
@pytest.mark.parametrize("length", [1, 3, 70])
def test_pages_and_threads_change_nothing(kind, length, compiled, rng):
    x, q = draw(rng, 3, 2, 3000, 16), draw(rng, 3, 4, length, 16)
    expected = attend(filled(x, x, kind), q, compiled, causal=True, threads=1)
    for page, threads, step in ((256, 2, None), (512, 1, 1000), (768, 4, 999), (4096, 3, 1)):
        step = 500 if step == 1 else step
        cache = filled(x, x, kind, step=step, page=page)
        actual = attend(cache, q, compiled, causal=True, threads=threads)
        assert_all_same_bits(actual, expected)


@every_kind
@pytest.mark.parametrize("length", [1, 5, 40])
def test_other_items_change_nothing(kind, length, compiled, rng):
    """The place in the batch, the other items, and the padding of shorter ones."""
    lengths = np.array([700, 1, 2100, 0, 1024])
    cache = qkv_ext.KVCache(5, 2, 16, 9, dtype=kind)
    k, v, q = draw(rng, 5, 2, 2100, 16), draw(rng, 5, 2, 2100, 9), draw(rng, 5, 4, length, 16)
    cache.append(k, v, lengths=lengths)
    rows = np.minimum(lengths, length)
    together = attend(cache, q, compiled, causal=True, q_lengths=rows)
    for b in range(5):
        alone = cache.fork()
        alone.reorder([b])
        n = rows[b]
        expected = attend(alone, q[b : b + 1, :, :n], compiled, causal=True)
        assert_all_same_bits([x[b : b + 1, :, :n] for x in together], expected)
        shorter = filled(k[b : b + 1, :, : lengths[b]], v[b : b + 1, :, : lengths[b]], kind)
        expected = attend(shorter, q[b : b + 1, :, :n], compiled, causal=True)
        assert_all_same_bits([x[b : b + 1, :, :n] for x in together], expected)


@every_kind
def test_lengths_of_a_call_are_a_shorter_cache(kind, compiled, rng):
    """kv_lengths, masks of later keys, and keys that are NaN there: the bits of what is seen."""
    x, q = draw(rng, 1, 1, 1500, 16), draw(rng, 1, 2, 3, 16)
    expected = attend(filled(x[:, :, :700], x[:, :, :700], kind), q, compiled)
    x[:, :, 700:1000] = np.nan
    cache = filled(x, x, kind)
    assert_all_same_bits(attend(cache, q, compiled, kv_lengths=[700]), expected)
    seen = np.arange(1500) < 700
    assert_all_same_bits(attend(cache, q, compiled, mask=seen), expected)


@every_kind
def test_dropped_pages_change_nothing(kind, compiled, rng):
    """Tiles and splits are counted from the first key, dropped ones too."""
    x = draw(rng, 1, 1, 3000, 16)
    cache = filled(x, x, kind)
    for left in (100, 1000, 1500):
        for length in (1, 4, 60):
            q = draw(rng, 1, 2, length, 16)
            expected = attend(cache, q, compiled, causal=True, window=(left, 0))
            cut = cache.fork()
            cut.drop(3000 - length - left)
            actual = attend(cut, q, compiled, causal=True, window=(left, 0))
            assert_all_same_bits(actual, expected)


@every_kind
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_queries_are_rounded_once(kind, dtype, compiled, rng):
    x = draw(rng, 1, 2, 1300, 16)
    cache, q = filled(x, x, kind), draw(rng, 1, 4, 5, 16).astype(dtype_of(dtype))
    output, lse = attend(cache, q, compiled, causal=True)
    wide, wide_lse = attend(cache, q.astype(np.float32), compiled, causal=True)
    assert_same_bits(output, wide.astype(output.dtype))
    assert_same_bits(lse, wide_lse)
    out = np.full((1, 5, 4, 16), 7, q.dtype)
    blhd = np.ascontiguousarray(q.swapaxes(1, 2))
    cache.attend(blhd, causal=True, layout="blhd", out=out, backend=compiled)
    assert_same_bits(out.swapaxes(1, 2), output)


@pytest.mark.slow_beside_fastest
@pytest.mark.parametrize("kind", STORAGE)
def test_rows_that_see_what_is_not_finite(kind, compiled, rng):
    """They too are the same at once and one by one, and as the formula has them."""
    for scale in (1.0, 3e36):  # of Q: integer scores that overflow where the formula's do not
        k, v = draw(rng, 1, 2, 2300, 24), draw(rng, 1, 2, 2300, 70)
        k *= np.float32(1 / scale)  # which float16 has not
        if kind == "float16" and scale > 1:
            continue
        v[:, :, 40:60, 3:7] = [np.nan, np.inf, -np.inf, np.inf]
        v[:, 0, rng.random(2300) < 0.01] = np.inf
        k[:, 1, 2000:2002, 5] = np.inf
        cache = filled(k, v, kind)
        q = draw(rng, 1, 4, 150, 24) * np.float32(scale)
        keep = rng.random((1, 4, 150, 2300)) < 0.9
        keep[..., 40:60] &= rng.random((150, 1)) < 0.3
        for options in ({"mask": keep}, {"causal": True}, {}):
            whole = cache.attend(q, backend=compiled, **EXTRAS, **options)
            for i in (0, 1, 77, 149):
                row = dict(options)
                if "mask" in row:
                    row["mask"] = keep[:, :, i : i + 1]
                if "causal" in row:
                    row["query_offset"] = 2150 + i
                one = cache.attend(q[:, :, i : i + 1], backend=compiled, **EXTRAS, **row)
                for x, y in zip(whole, one, strict=True):
                    assert_same_bits(x[:, :, i : i + 1], y)
            keys, values = (f(0)[None].repeat(2, axis=1) for f in (cache.keys, cache.values))
            allowed = np.broadcast_to(options.get("mask", True), (1, 4, 150, 2300))
            if "causal" in options:
                allowed = np.broadcast_to(np.tri(150, 2300, 2150, bool), allowed.shape)
            for h in range(4):
                expected = plain_rows(q[0, h], keys[0, h], values[0, h], allowed[0, h], {})
                for x, y in zip(whole, expected, strict=True):
                    np.testing.assert_allclose(x[0, h], y, rtol=2e-3, atol=2e-4)
