"""Looks for arrays that break the error rule of tolerance.py, by hill-climbing on error / bound.

    python tests/adversary.py [--arrays 100000] [--seconds N] [--seed SEED] [--backend NAME ...]

An array starts in one of the families of adversary_problems.py, or as a change of one of those
that came nearest to the bound so far.  Every backend computes it; families and storage types are
drawn at random.  Printed are the worst ratios for each backend, and what gave them; a ratio above 1
breaks the rule, and the program then ends with 1.
"""

import argparse
import sys
import time

import numpy as np
from adversary_problems import F32, KINDS, Draw
from tolerance import allowed_error, half_unit, largest

import qkv_ext


def changed(problem, draw):
    """A small change of one array or option."""
    other = object.__new__(type(problem))
    other.__dict__ |= problem.__dict__
    other.arrays = {name: x.copy() for name, x in problem.arrays.items()}
    other.options = dict(problem.options)
    numbers = [n for n, value in other.options.items() if isinstance(value, float)]
    floats = [n for n, x in other.options.items() if getattr(x, "dtype", None) == F32]
    rng, how = draw.rng, draw.size(0, 1, 2, 3, 4, 5)
    if numbers and how == 0:
        name = rng.choice(numbers)
        other.options[name] *= float(draw.power(-0.3, 0.3))
        return other
    if floats and how == 1:
        name = rng.choice(floats)
        other.options[name] = (other.options[name] * draw.power(-0.1, 0.1)).astype(F32)
        return other
    x = other.arrays[rng.choice(list(other.arrays))].reshape(-1)
    some = rng.integers(x.size, size=draw.size(1, 1, 3, 10))
    if how == 2:
        x *= draw.power(-0.5, 0.5)
    elif how == 3:
        x[some] = x[rng.permutation(some)]
    elif how == 4:
        x[some] = draw.normal(len(some)) * (np.abs(x).mean() + F32(1e-30))
    else:
        x[some] *= 1 + draw.normal(len(some)) * draw.power(-22, 0)
    return other


def ratios(problem, backends):
    """(error / bound, the same without sizes and our orders) of the worst array of each backend."""
    arrays = problem.prepare()
    truth, plain, own, sizes = problem.truth_and_plain(arrays)
    floor = float(np.finfo(F32).tiny) * max(1.0, largest(arrays[-1]))
    few = [allowed_error(t, *p) + floor for t, *p in zip(truth, *plain, strict=True)]
    bounds = [
        allowed_error(t, *p, size=size) + floor
        for t, size, *p in zip(truth, sizes, *plain, *own, strict=True)
    ]
    result = {}
    for backend in backends:
        pairs = [
            (ratio(x, t, bound), ratio(x, t, narrow))
            for x, t, bound, narrow in zip(
                problem.compute(backend), truth, bounds, few, strict=True
            )
        ]
        result[backend] = tuple(map(max, zip(*pairs, strict=True)))
    return result


def ratio(actual, truth, bound):
    dtype = actual.dtype
    rounded = truth.astype(dtype).astype(np.float64)
    truth = np.where(np.isfinite(rounded), truth, rounded)  # beyond the dtype
    finite = np.isfinite(truth)
    actual = actual.astype(np.float64)
    if not np.array_equal(actual[~finite], truth[~finite], equal_nan=True):
        return np.inf
    if not np.isfinite(actual[finite]).all():
        return np.inf
    error = np.abs(actual[finite] - truth[finite])
    error = np.maximum(error - half_unit(np.abs(truth[finite]) + bound, dtype), 0)
    worst = float(error.max(initial=0))
    return worst / bound if bound else (np.inf if worst else 0.0)


class Search:
    """The arrays that came nearest to the bound so far, and the next to be tried."""

    POOL = 12  #: how many are kept of each kind and storage type

    def __init__(self, seed, backends):
        self.draw, self.backends = Draw(np.random.default_rng(seed)), backends
        self.pools = {}
        self.worst = dict.fromkeys(backends, ((0.0, ""), (0.0, "")))  # by both rules

    def step(self, n):
        """Try one array on every backend."""
        rng = self.draw.rng
        problem = rng.choice(KINDS)(self.draw)
        pool = self.pools.setdefault((type(problem), problem.kind), [])
        if len(pool) == self.POOL and rng.random() < 0.7:
            problem = changed(pool[rng.integers(self.POOL)][1], self.draw)
        with np.errstate(all="ignore"):
            found = ratios(problem, self.backends)
        for name, pair in found.items():
            named = ((value, f"{n} {problem}") for value in pair)
            self.worst[name] = tuple(map(max, self.worst[name], named))
        highest = max(pair[0] for pair in found.values())
        if np.isfinite(highest):
            pool.append((highest, problem))
            pool.sort(key=lambda entry: -entry[0])
            del pool[self.POOL :]

    def highest(self):
        return max(by_rule[0] for by_rule, _ in self.worst.values())

    def __str__(self):
        lines = []
        for name, (rule, plain) in self.worst.items():
            lines.append(f"{name}: {rule[0]:.3g} of the bound, by {rule[1]}")
            lines.append(f"    of that of plain orders and entries: {plain[0]:.3g}, by {plain[1]}")
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arrays", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", nargs="*", default=qkv_ext.backends())
    arguments = parser.parse_args()
    search, start, n = Search(arguments.seed, arguments.backend), time.monotonic(), 0
    while n < arguments.arrays and time.monotonic() - start < arguments.seconds:
        search.step(n)
        n += 1
    print(f"{n} arrays in {time.monotonic() - start:.0f} s\n{search}")
    return search.highest() > 1


if __name__ == "__main__":
    sys.exit(main())
