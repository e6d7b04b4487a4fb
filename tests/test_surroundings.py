"""What happens around a call: signal handlers that run during it, and the errstate it runs in."""

import os
import textwrap

import numpy as np
import pytest

import qkv_ext

FORK = """
import os, signal
import numpy as np, qkv_ext

length, keys = {shape}
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 8, length, 64), np.float32)
k, v = np.broadcast_to(rng.standard_normal((2, 1, 1, keys, 64), np.float32), (2, 1, 8, keys, 64))
call = lambda: qkv_ext.scaled_dot_product_attention(q, k, v, threads=2, backend={backend!r})
expected, forked = call(), []
signal.signal(signal.SIGALRM, lambda *_: forked.append(os.fork()))
signal.setitimer(signal.ITIMER_REAL, 0.005)
try:
    output, refused = call(), False
except RuntimeError as error:
    refused = "forked during this call" in str(error)
while not forked:  # a call that was over before the alarm
    pass
if forked[0] == 0:  # the child: refused or right, never wrong, never stuck; the next call is right
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    right = refused or np.array_equal(output, expected)
    os._exit(0 if right and np.array_equal(call(), expected) else 1)
assert not refused
assert np.array_equal(output, expected)
_, status = os.waitpid(forked[0], 0)
assert status == 0, status
"""


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("shape", [(1, 300_000), (1500, 1500)], ids=["decode", "prefill"])
def test_fork_in_a_handler(shape, compiled, python):
    """The child has no threads to finish the parent's call with: it is told so."""
    python(textwrap.dedent(FORK.format(shape=shape, backend=compiled)))


def test_the_callers_errstate_is_not_obeyed(backend):
    """Rounding to a smaller dtype may underflow: that is a result, whatever NumPy is told."""
    half = np.float16([[0, -20, -15]])
    tiny = np.full((2, 2), 1e-300)
    zeros = np.zeros((2, 2), np.float32)
    with np.errstate(all="raise"):
        assert qkv_ext.softmax(half, backend=backend)[0, 0] == 1
        qkv_ext.matmul(half, half.T * np.float16(0.01), backend=backend)
        qkv_ext.scaled_dot_product_attention(zeros, zeros, zeros, mask=tiny, backend=backend)
