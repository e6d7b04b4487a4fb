"""D9 and point 12: the same row has the same bits, whatever is beside it and whoever computes it.

(pytorch/pytorch#136338, numpy/numpy#25100, vllm-project/vllm#51902.)  That is a promise of the
compiled backends, for fixed (L, S, D, Dv, H/Hkv, options).  NumPy's rows depend on the BLAS: there
the same tests allow for rounding.
"""

import threading

import numpy as np
import pytest
from tolerance import assert_same

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention

SHAPES = {  # (B, H, Hkv, L, S, D, Dv)
    "tiny": (8, 4, 4, 4, 4, 8, 8),
    "short": (8, 4, 2, 33, 33, 20, 12),
    "tiles": (3, 4, 2, 50, 300, 32, 20),
    "long": (2, 2, 2, 200, 700, 32, 32),
    "decode": (8, 4, 2, 1, 40, 64, 64),
    "decode-splits": (3, 8, 2, 1, 5000, 64, 48),
    "few-queries": (3, 4, 1, 3, 2100, 32, 32),
    "few-rows": (3, 2, 2, 7, 300, 20, 12),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "bool-mask": {"mask": bool},
    "float-mask": {"mask": np.float32},
    "all": {"causal": True, "mask": np.float32, "scale": 0.3},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def draw(rng, shape, options):
    """(q, k, v, options) with a mask (B, H, L, S) where the options name its dtype."""
    b, h, hkv, length, s, d, dv = shape
    shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv)
    q, k, v = (rng.standard_normal(each, np.float32) for each in shapes)
    if "mask" in options:
        x = rng.standard_normal((b, h, length, s), np.float32)
        mask = x < 1 if options["mask"] is bool else np.where(x < 1, x, np.float32(-np.inf))
        options = options | {"mask": mask}
    return q, k, v, options


def part(options, index):
    return options | {"mask": options["mask"][index]} if "mask" in options else options


@every_shape
@every_option
def test_batch_and_alone(options, shape, backend, rng):
    q, k, v, options = draw(rng, shape, options)
    together = sdpa(q, k, v, return_weights=True, return_lse=True, backend=backend, **options)
    for b in (0, len(q) - 1):
        one = np.s_[b : b + 1]
        alone = sdpa(q[one], k[one], v[one], return_weights=True, return_lse=True,
                     backend=backend, **part(options, one))  # fmt: skip
        for x, y in zip(alone, together, strict=True):
            assert_same(x, y[one], backend)


@every_shape
@every_option
def test_heads_alone(options, shape, backend, rng):
    """One key head with its group of query heads, by itself."""
    q, k, v, options = draw(rng, shape, options)
    together = sdpa(q, k, v, backend=backend, **options)
    group = q.shape[1] // k.shape[1]
    for g in (0, k.shape[1] - 1):
        heads, one = np.s_[:, g * group : (g + 1) * group], np.s_[:, g : g + 1]
        alone = sdpa(q[heads], k[one], v[one], backend=backend, **part(options, heads))
        assert_same(alone, together[heads], backend)


@every_shape
@every_option
def test_place_in_the_batch(options, shape, backend, rng):
    q, k, v, options = draw(rng, shape, options)
    order = np.roll(np.arange(len(q)), 1)[::-1]
    expected = sdpa(q, k, v, backend=backend, **options)[order]
    actual = sdpa(q[order], k[order], v[order], backend=backend, **part(options, order))
    assert_same(actual, expected, backend)


@every_shape
@every_option
def test_threads(options, shape, backend, rng):
    q, k, v, options = draw(rng, shape, options)
    expected = sdpa(q, k, v, threads=1, return_lse=True, backend=backend, **options)
    for threads in (2, 4, 64):
        actual = sdpa(q, k, v, threads=threads, return_lse=True, backend=backend, **options)
        for x, y in zip(actual, expected, strict=True):
            assert_same(x, y, backend)


@pytest.mark.parametrize("shape", [(24, 8, 2, 1, 2100, 32, 32), (8, 2, 1, 40, 300, 16, 16)])
def test_threads_of_a_busy_machine(shape, backend, rng):
    """Threads that are held up at any point, since others want the CPUs too."""
    q, k, v, _ = draw(rng, shape, {})
    expected = sdpa(q, k, v, threads=1, backend=backend)
    done = threading.Event()

    def keep_busy():
        a = np.ones((300, 300), np.float32)
        while not done.is_set():
            a @ a

    others = [threading.Thread(target=keep_busy) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for n in range(40):
            actual = sdpa(q, k, v, threads=2 + n % 3, backend=backend)
            assert_same(actual, expected, backend)
    finally:
        done.set()
        for other in others:
            other.join()


@every_shape
@every_option
def test_twice(options, shape, backend, rng):
    q, k, v, options = draw(rng, shape, options)
    first = sdpa(q, k, v, backend=backend, **options)
    assert_same(sdpa(q, k, v, backend=backend, **options), first, backend)


@every_shape
def test_other_rows_do_not_matter(shape, backend, rng):
    """Other queries of the same head, and all of the other items, hold something else."""
    q, k, v, _ = draw(rng, shape, {})
    expected = sdpa(q, k, v, causal=True, backend=backend)
    row = shape[3] // 2
    others = [rng.standard_normal(x.shape, np.float32) * 100 for x in (q, k, v)]
    others[0][-1, :, row], others[1][-1], others[2][-1] = q[-1, :, row], k[-1], v[-1]
    actual = sdpa(*others, causal=True, backend=backend)
    assert_same(actual[-1, :, row], expected[-1, :, row], backend)


@every_shape
def test_order_of_the_queries(shape, backend, rng):
    """Where a query stands among the others of its head, without causal order."""
    q, k, v, options = draw(rng, shape, {"mask": np.float32})
    order = rng.permutation(shape[3])
    expected = sdpa(q, k, v, backend=backend, **options)[:, :, order]
    options["mask"] = options["mask"][:, :, order]
    assert_same(sdpa(q[:, :, order], k, v, backend=backend, **options), expected, backend)


@every_shape
def test_equal_queries_of_one_group(shape, backend, rng):
    """Heads that share keys and ask the same get the same."""
    q, k, v, _ = draw(rng, shape, {})
    group = q.shape[1] // k.shape[1]
    q[:] = np.repeat(q[:, ::group], group, axis=1)
    output = sdpa(q, k, v, causal=True, backend=backend)
    for head in range(q.shape[1]):
        assert_same(output[:, head], output[:, head // group * group], backend)


@every_shape
def test_keys_after_a_causal_row(shape, backend, rng):
    """What stands in the keys that a row does not see yet."""
    q, k, v, _ = draw(rng, shape, {})
    length, s = shape[3:5]
    align = "bottom-right" if length > 1 else "top-left"
    expected = sdpa(q, k, v, causal=True, align=align, backend=backend)
    seen = 1 + (s - length if align == "bottom-right" else 0) + length // 2
    k[:, :, seen:], v[:, :, seen:] = 1e9, -1e9
    actual = sdpa(q, k, v, causal=True, align=align, backend=backend)
    rows = np.s_[:, :, : length // 2 + 1]
    assert_same(actual[rows], expected[rows], backend)


@every_shape
def test_ranks_and_leading_axes(shape, backend, rng):
    """More axes, broadcast ones, and fewer, by the same rows."""
    q, k, v, _ = draw(rng, (4, *shape[1:]), {})
    expected = sdpa(q, k, v, causal=True, backend=backend)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    actual = sdpa(*split, causal=True, backend=backend)
    assert_same(actual.reshape(expected.shape), expected, backend)
    shared = [np.broadcast_to(x, (4, *x.shape[1:])).copy() for x in (k[:1], v[:1])]
    expected = sdpa(q, *shared, causal=True, backend=backend)
    assert_same(sdpa(q, k[:1], v[:1], causal=True, backend=backend), expected, backend)
    q, k, v = q[:, :1], k[:, :1], v[:, :1]
    expected = sdpa(q, k, v, causal=True, backend=backend)
    actual = sdpa(q[:, 0], k[:, 0], v[:, 0], causal=True, backend=backend)
    assert_same(actual, expected[:, 0], backend)
    actual = sdpa(q[0, 0], k[0, 0], v[0, 0], causal=True, backend=backend)
    assert_same(actual, expected[0, 0], backend)


@every_shape
def test_shared_heads_equal_repeated_ones(shape, backend, rng):
    """GQA: another H/Hkv may take another path, so here within rounding."""
    q, k, v, _ = draw(rng, shape, {})
    repeated = [np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v)]
    expected = sdpa(q, *repeated, causal=True, backend=backend)
    actual = sdpa(q, k, v, causal=True, backend=backend)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# ---- products -----------------------------------------------------------------------------------

PRODUCTS = [(40, 33, 20), (7, 300, 70), (130, 64, 200), (257, 600, 65), (8, 2100, 100), (600, 7, 3)]


@pytest.mark.parametrize(("m", "k", "n"), PRODUCTS)
def test_product_rows_and_columns_alone(m, k, n, backend, rng):
    """One order of K per element, whatever M, N and the position; packed equals unpacked."""
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    whole = qkv_ext.matmul(a, b, threads=1, backend=backend)
    for rows in (np.s_[:1], np.s_[1:4], np.s_[-1:], np.s_[: m // 2], np.s_[::2]):
        assert_same(qkv_ext.matmul(a[rows], b, backend=backend), whole[rows], backend)
    for columns in (np.s_[:, :1], np.s_[:, 1:], np.s_[:, -1:], np.s_[:, ::2]):
        assert_same(qkv_ext.matmul(a, b[columns], backend=backend), whole[columns], backend)
    for threads in (2, 4):
        assert_same(qkv_ext.matmul(a, b, threads=threads, backend=backend), whole, backend)
    packed = qkv_ext.pack_weight(b)
    assert_same(qkv_ext.linear_projection(a, b, backend=backend), whole, backend)
    assert_same(qkv_ext.linear_projection(a, packed, backend=backend), whole, backend)
    for row in (0, m - 1):
        alone = qkv_ext.linear_projection(a[row], packed, backend=backend)
        assert_same(alone, whole[row], backend)
    bias = rng.standard_normal(n, np.float32)
    for w in (b, packed):
        actual = qkv_ext.linear_projection(a, w, bias, backend=backend)
        assert_same(actual, whole + bias, backend)  # the bias is added last


@pytest.mark.parametrize(("m", "k", "n"), PRODUCTS)
def test_product_batch_and_alone(m, k, n, backend, rng):
    a, b = rng.standard_normal((3, m, k), np.float32), rng.standard_normal((3, k, n), np.float32)
    together = qkv_ext.matmul(a, b, backend=backend)
    for i in range(3):
        assert_same(qkv_ext.matmul(a[i], b[i], backend=backend), together[i], backend)
    shared = qkv_ext.matmul(a, b[0], backend=backend)
    assert_same(shared[0], together[0], backend)
    by_projection = qkv_ext.linear_projection(a, qkv_ext.pack_weight(b[0]), backend=backend)
    assert_same(by_projection, shared, backend)


@pytest.mark.parametrize("n", [1, 7, 33, 300, 2100])
def test_softmax_rows_alone(n, backend, rng):
    x = rng.standard_normal((40, n), np.float32)
    whole = qkv_ext.softmax(x, threads=1, backend=backend)
    for row in (0, 17, 39):
        assert_same(qkv_ext.softmax(x[row], backend=backend), whole[row], backend)
    assert_same(qkv_ext.softmax(x, threads=4, backend=backend), whole, backend)
    assert_same(qkv_ext.softmax(x.T, axis=0, backend=backend).T, whole, backend)


# ---- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 70])
def test_layer_batch_and_alone(length, backend, rng):
    """Packed weights equal arrays, a batch equals its items, and kv= equals its context."""
    w = [rng.standard_normal(s, np.float32) / 8 for s in ((48, 64), (48, 32), (48, 32), (64, 40))]
    x = rng.standard_normal((3, length, 48), np.float32)
    heads = {"num_heads": 8, "num_kv_heads": 4}
    layer = qkv_ext.MultiHeadAttention(*w, **heads)
    options = {"causal": True, "backend": backend}
    together = layer(x, **options)
    assert_same(layer(x[1:2], **options)[0], together[1], backend)
    assert_same(layer(x[1], **options), together[1], backend)
    assert_same(layer(x, threads=3, **options), together, backend)
    assert_same(qkv_ext.self_attention(x, *w, **heads, **options), together, backend)
    context = rng.standard_normal((3, 20, 48), np.float32)
    crossed = layer(x, context, **options)
    kv = layer.project_kv(context, backend=backend)
    assert_same(layer(x, kv=kv, **options), crossed, backend)
    actual = qkv_ext.cross_attention(x, context, *w, **heads, **options)
    assert_same(actual, crossed, backend)
