"""The error rule on inputs that were looked for because they strain it."""

import adversary
import numpy as np
import oracle
import pytest
from tolerance import WAYS, allowed_error, assert_within, plain_attention

import qkv_ext


def assert_rule(q, k, v, backend, **options):
    """The error rule for output, weights and lse."""
    truth = oracle.attention(q, k, v, **options)
    plain = zip(*(plain_attention(q, k, v, way, **options) for way in WAYS), strict=True)
    actual = qkv_ext.scaled_dot_product_attention(
        q, k, v, return_weights=True, return_lse=True, backend=backend, **options
    )
    for what, x, y, z in zip(("output", "weights", "lse"), actual, truth, plain, strict=True):
        assert_within(x, y, allowed_error(y, *z), what)


@pytest.mark.slow_beside_fastest
@pytest.mark.parametrize("length", [1, 140])
@pytest.mark.parametrize("rise", [0.3, 5, 20, 60, 300])
def test_a_maximum_that_rises_in_every_tile(rise, length, backend, rng):
    """Each correction of what came before would round it; V is nothing but in the first tile."""
    s = 24_576
    k, v = np.zeros((2, 1, 1, s, 2), np.float32)
    k[..., 0] = np.linspace(0, rise, s)
    v[:, :, :256] = rng.standard_normal((256, 2))
    q = np.zeros((1, 1, length, 2), np.float32)
    q[..., 0] = rng.uniform(0.5, 1, length)
    assert_rule(q, k, v, backend, scale=1.0)


@pytest.mark.parametrize("gap", [0.5, 5, 13, 20, 41, 60, 79, 80, 81, 84, 88, 95, 102])
def test_a_sink_above_every_score(gap, backend, rng):
    """What all weights of a row have as a factor is exact, and no subnormal number."""
    q, k, v = (rng.standard_normal((1, 2, n, 16), np.float32) for n in (20, 300, 300))
    assert_rule(q, k, v, backend, sinks=np.float32([gap + 3, gap + 3.3]))
    assert_rule(q[:, :, :1], k, v, backend, sinks=np.float32([gap + 2, gap + 3.1]))


@pytest.mark.slow_beside_fastest
def test_a_short_search(backend):
    """python tests/adversary.py is the long one."""
    search = adversary.Search(seed=3, backends=[backend])
    for n in range(400):
        search.step(n)
    assert 0.1 < search.highest() <= 1, search


@pytest.mark.slow_beside_fastest
def test_the_search_finds_a_fault(backend, monkeypatch):
    """Weights and outputs that are off by eight units."""
    true = qkv_ext.scaled_dot_product_attention

    def false(*arguments, **options):
        output, weights, lse = true(*arguments, **options)
        return output * np.float32(1 + 2.0**-20), weights, lse

    monkeypatch.setattr(qkv_ext, "scaled_dot_product_attention", false)
    search = adversary.Search(seed=3, backends=[backend])
    for n in range(400):
        search.step(n)
    assert search.highest() > 1, search
