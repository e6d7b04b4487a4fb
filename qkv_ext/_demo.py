"""What ``python -m qkv_ext`` shows: the configuration, a walk through attention, speed and error.

The walk-through computes every step from the primitives, so that it can be read beside the formula;
the last line of each part checks it against the one call that does it all.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.random import default_rng  # a ^C while this loads is lost: better before the output
from numpy.typing import NDArray

import qkv_ext
from qkv_ext._core._config import config
from qkv_ext._core._threads import DEFAULT

Array = NDArray[Any]

TOKENS, D_MODEL, D_K = 4, 8, 8
SECONDS = 0.25  #: per backend and shape, for the timing


def walk_through(x: Array, context: Array, w_q: Array, w_k: Array, w_v: Array) -> dict[str, Array]:
    """Every step of ``softmax(Q Kᵀ / √d_k) V`` with Q from x, K and V from the context."""
    q = qkv_ext.linear_projection(x, w_q)
    k = qkv_ext.linear_projection(context, w_k)
    v = qkv_ext.linear_projection(context, w_v)
    scores = qkv_ext.matmul(q, k.T)
    scaled = scores / np.float32(math.sqrt(q.shape[-1]))
    weights = qkv_ext.softmax(scaled)
    output = qkv_ext.matmul(weights, v)
    return {
        "Q": q,
        "K": k,
        "V": v,
        "scores": scores,
        "scaled scores": scaled,
        "weights": weights,
        "output": output,
    }


def both_walks() -> dict[str, dict[str, Array]]:
    """The walk for self-attention, and for cross-attention to another sequence."""
    rng = default_rng(0)
    x = rng.standard_normal((TOKENS, D_MODEL), np.float32)
    x_enc = rng.standard_normal((TOKENS + 2, D_MODEL), np.float32)
    w_q, w_k, w_v = rng.standard_normal((3, D_MODEL, D_K), np.float32)
    self_steps = walk_through(x, x, w_q, w_k, w_v)
    cross_steps = walk_through(x, x_enc, w_q, w_k, w_v)
    self_steps["in one call"] = qkv_ext.self_attention(x, w_q, w_k, w_v)
    cross_steps["in one call"] = qkv_ext.cross_attention(x, x_enc, w_q, w_k, w_v)
    return {
        "self-attention": {"X": x, "W_Q": w_q, "W_K": w_k, "W_V": w_v, **self_steps},
        "cross-attention": {"X_dec": x, "X_enc": x_enc, **cross_steps},
    }


class Case(NamedTuple):
    """A shape to measure, named after who computes it."""

    name: str
    b: int
    h: int
    hkv: int
    length: int
    s: int
    d: int
    causal: bool = False

    def arrays(self) -> tuple[Array, Array, Array]:
        rng = default_rng(1)
        q = rng.standard_normal((self.b, self.h, self.length, self.d), np.float32)
        k = rng.standard_normal((self.b, self.hkv, self.s, self.d), np.float32)
        v = rng.standard_normal((self.b, self.hkv, self.s, self.d), np.float32)
        return q, k, v

    def rate(self, seconds: float) -> tuple[float, str]:
        """GB/s of keys and values for a decode step, else 10^9 additions and multiplications."""
        if self.length == 1:
            return 8 * self.b * self.hkv * self.s * self.d / seconds / 1e9, "GB/s"
        flop = 4 * self.b * self.h * self.length * self.s * self.d
        return flop / (2 if self.causal else 1) / seconds / 1e9, "GFLOP/s"


CASES = (
    Case("MiniLM, one sentence", 1, 12, 12, 128, 128, 32),
    Case("ViT", 1, 12, 12, 197, 197, 64),
    Case("causal 1k, GQA 4", 1, 8, 2, 1024, 1024, 128, True),
    Case("decode 4k, GQA 4", 1, 32, 8, 1, 4096, 128),
)


def _seconds_of_a_call(case: Case, arrays: tuple[Array, Array, Array], backend: str) -> float:
    """The median of as many calls as fit in the time, two at least, after one to warm up.

    Every backend is given the same threads, so that NumPy's BLAS takes no more where it can be held
    to them.
    """
    times: list[float] = []
    options: dict[str, Any] = {"causal": case.causal, "backend": backend, "threads": int(DEFAULT)}
    qkv_ext.scaled_dot_product_attention(*arrays, **options)
    while sum(times) < SECONDS or len(times) < 2:
        start = time.perf_counter()
        qkv_ext.scaled_dot_product_attention(*arrays, **options)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure() -> list[dict[str, Any]]:
    """Speed and largest error, against float64, of every runnable backend on every case."""
    rows = []
    for case in CASES:
        arrays = case.arrays()
        exact = qkv_ext.scaled_dot_product_attention(
            *(x.astype(np.float64) for x in arrays), causal=case.causal, backend="numpy"
        )
        for backend in qkv_ext.backends():
            output = qkv_ext.scaled_dot_product_attention(
                *arrays, causal=case.causal, backend=backend
            )
            rate, unit = case.rate(_seconds_of_a_call(case, arrays, backend))
            rows.append(
                {
                    "case": case.name,
                    "shape (B, H, Hkv, L, S, D)": case[1:7],
                    "backend": backend,
                    "rate": rate,
                    "unit": unit,
                    "largest error": float(np.abs(output - exact).max()),
                }
            )
    return rows


def _print_walk(title: str, steps: dict[str, Array]) -> None:
    print(f"\n{title}")
    for name, value in steps.items():
        note = ""
        if name == "weights":
            note = f"   rows sum to {', '.join(f'{s:.6f}' for s in value.sum(-1))}"
        elif name == "in one call":
            difference = np.abs(value - steps["output"]).max()
            note = f"   largest difference to the steps above {difference:.1e}"
        print(f"  {name:14}{value.shape!s:9}{note}".rstrip())
        if name in ("scores", "scaled scores", "weights", "output"):
            for row in value:
                print("      " + " ".join(f"{number:8.3f}" for number in row))


def _print_speed(rows: list[dict[str, Any]]) -> None:
    names = qkv_ext.backends()
    print("\nspeed, and largest error against float64")
    print(f"  {'':22}{'':9}" + "".join(f"{name:>20}" for name in names))
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["backend"]: row for row in rows if row["case"] == case}
        cells = (f"{own[name]['rate']:.1f}  {own[name]['largest error']:.0e}" for name in names)
        unit = own[names[0]]["unit"]
        print(f"  {case:22}{unit:9}" + "".join(f"{cell:>20}" for cell in cells))


def show() -> None:
    """Print everything."""
    qkv_ext.show_config()
    walks = both_walks()
    _print_walk("self-attention: softmax(Q Kᵀ / √d_k) V, Q = X W_Q, K = X W_K, V = X W_V",
                walks["self-attention"])  # fmt: skip
    _print_walk("cross-attention: Q = X_dec W_Q, K = X_enc W_K, V = X_enc W_V",
                walks["cross-attention"])  # fmt: skip
    _print_speed(measure())


def as_data() -> dict[str, Any]:
    """The same for machines: everything as JSON can hold it."""
    walks = {
        title: {name: value.tolist() for name, value in steps.items()}
        for title, steps in both_walks().items()
    }
    return {"config": config(), "walks": walks, "speed": measure()}
