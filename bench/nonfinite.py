"""What numbers that are not finite cost: python -m bench.nonfinite [BACKEND ...]

The time of a call with NaN or infinities over that of the same call without, on one thread and by
its clock, the least of several runs of each in turns.  Rows that see one are computed by one more
walk over the keys.
"""

import sys
import time

import numpy as np

import qkv_ext
from qkv_ext._core._program import run

RUNS = 15
SHAPES = {  # (B, H, Hkv, L, S, D), options
    "encoder": ((1, 8, 8, 512, 512, 64), {}),
    "causal": ((1, 8, 8, 512, 512, 64), {"causal": True}),
    "random mask": ((1, 8, 8, 512, 512, 64), {"mask": 0.5}),
    "D = 32": ((1, 8, 8, 512, 512, 32), {}),
    "weights": ((1, 8, 8, 512, 512, 64), {"return_weights": True}),
    "decode, GQA": ((1, 32, 8, 1, 4096, 128), {}),
    "decode": ((1, 8, 8, 1, 4096, 64), {}),
}


def variants(q, k, v, options):
    """Arguments and options by name, each with the clean call that it is compared with."""
    middle, odd = v.shape[2] // 2, {"mask": np.arange(v.shape[2]) % 2 == 1}
    clean = ((q, k, v), options)

    def spoilt(x, where, value):
        x = x.copy()
        x[where] = value
        return x

    one = (slice(None), slice(None), middle, 3)
    yield "one NaN in V", ((q, k, spoilt(v, one, np.nan)), options), clean
    yield "V all NaN", ((q, k, spoilt(v, ..., np.nan)), options), clean
    yield "V all inf", ((q, k, spoilt(v, ..., np.inf)), options), clean
    yield "one NaN in K", ((q, spoilt(k, one, np.nan), v), options), clean
    yield "Q all inf", ((spoilt(q, ..., np.inf), k, v), options), clean
    yield "V overflows", ((q, k, spoilt(v, ..., 3e38)), options), clean
    if "mask" not in options:
        every_second = (slice(None), slice(None), slice(None, None, 2))
        masked = spoilt(v, every_second, np.nan)
        clean = ((q, k, v), options | odd)
        yield "NaN masked", ((q, k, masked), options | odd), clean
        one = (slice(None), slice(None), middle + 1)
        yield "... and one seen", ((q, k, spoilt(masked, one, np.nan)), options | odd), clean


def ratio(call, clean, backend):
    """The least time of the one over that of the other."""
    least = [float("inf")] * 2
    for _ in range(RUNS):
        for n, (arrays, options) in enumerate((call, clean)):
            start = time.thread_time()
            qkv_ext.scaled_dot_product_attention(*arrays, backend=backend, threads=1, **options)
            least[n] = min(least[n], time.thread_time() - start)
    return least[0] / least[1]


def main():
    rng = np.random.default_rng(0)
    for backend in sys.argv[1:] or qkv_ext.backends():
        worst = 0.0
        for name, ((b, h, hkv, length, s, d), options) in SHAPES.items():
            q, k, v = (rng.standard_normal((b, n, rows, d), np.float32)
                       for n, rows in ((h, length), (hkv, s), (hkv, s)))  # fmt: skip
            if "mask" in options:
                options = options | {"mask": rng.random((length, s)) < options["mask"]}
            ratios = {what: ratio(*pair, backend) for what, *pair in variants(q, k, v, options)}
            worst = max(worst, *ratios.values())
            said = ", ".join(f"{what} {x:.1f}" for what, x in ratios.items())
            print(f"{backend:7} {name:12} {said}")
        print(f"{backend:7} at most {worst:.1f} times the clean call")


if __name__ == "__main__":
    run(main)
