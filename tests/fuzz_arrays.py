"""Random numbers, shapes and arrays for fuzz_api.py, and what is no argument at all."""

import numpy as np

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = np.float16

HUGE = np.broadcast_to(np.float32(0), (1 << 25, 1 << 25))  #: more than any memory holds

JUNK = (
    None, True, -1, 0, 1, 2**70, -(2**70), 1.5, float("nan"), float("inf"), 1e300, "x", "", b"x",
    [], {}, (), object(), 1j, (None, None), (1,), (1, 2, 3), (-1, 0), (2**70, 0), [1, [2]],
    np.int64(3), np.float16(2), np.bool_(True), np.array(3), np.array("x"), np.array([None, 1]),
    np.ones(3, complex), np.ones((2, 2), int), np.ones((0, 3), np.float32), np.zeros((2, 3), bool),
    np.ones((1,) * 40, np.float32), np.ma.masked_array(np.ones(3, "f4")), np.zeros(2, "M8[s]"),
    np.zeros(2, [("a", "f4")]), memoryview(b"1234"), np.float32([np.nan, np.inf]), HUGE,
    np.full((3, 4), np.nan, np.float32), np.array([2**62, -(2**62)]), range(3), max,
)  # fmt: skip


class Draw:
    """Random choices of one call."""

    def __init__(self, seed, number):
        self.rng = np.random.default_rng([seed, number])
        self.overflows = False  #: where sums do depends on their order

    def one_in(self, n):
        return self.rng.integers(n) == 0

    def choice(self, options):
        return options[self.rng.integers(len(options))]

    def between(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def size(self, least=0, most=70):
        """Small, or at an edge of vectors, panels and blocks."""
        if self.one_in(3):
            return max(least, min(most, self.choice([1, 8, 15, 16, 17, 32, 33, 48, 63, 64, 65])))
        return self.between(least, min(most, least + 9))

    def keys(self):
        """A number of keys: sometimes around tiles and splits."""
        if self.one_in(8):
            return self.choice([127, 255, 256, 257, 300, 513, 1024, 1025, 1300])
        return self.size() if not self.one_in(20) else 0

    def dtype(self):
        names = [np.float32] * 8 + [np.float16, bfloat16, bfloat16, np.float16]
        return np.dtype(np.float64 if self.one_in(25) else self.choice(names))

    # ---- arrays ---------------------------------------------------------------------------------

    def numbers(self, shape, dtype=np.float32):
        """A plain array; now and then with NaN, infinities, zeros of both signs and large ones."""
        x = self.rng.standard_normal(shape, np.float32)
        if self.one_in(12) and x.size:
            special = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 1e30, -3e38])
            self.overflows = self.overflows or bool(self.one_in(2))
            special = special if self.overflows else special[:-2]
            at = self.rng.random(shape) < self.choice([0.01, 0.1, 1.0])
            x = np.where(at, self.rng.choice(special, shape), x)
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(dtype)

    def array(self, shape, dtype=np.float32):
        return self.view(self.numbers(shape, dtype))

    def view(self, x):
        """The same numbers with other strides, byte order, alignment; some axes broadcast."""
        if self.one_in(3):
            return x
        for axis in range(x.ndim):
            x = self._axis(x, axis)
        if x.ndim > 1 and self.one_in(3):
            order = self.rng.permutation(x.ndim)
            x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        kind = self.between(0, 9)
        if kind == 0 and x.dtype.kind in "fiu":
            x = x.astype(x.dtype.newbyteorder())
        elif kind == 1:
            raw = np.empty(x.nbytes + 1, np.uint8)
            raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
            x = raw[1:].view(x.dtype).reshape(x.shape)
        elif kind == 2 and x.dtype.kind == "f" and x.size < 50:
            return x.tolist() if x.dtype == np.float64 else x
        if self.one_in(4):
            x = x.view()
            x.flags.writeable = False
        return x

    def _axis(self, x, axis):
        kind, at = self.between(0, 11), [slice(None)] * x.ndim
        n = x.shape[axis]
        if kind == 0:
            at[axis] = slice(None, None, -1)
            return np.flip(x, axis).copy()[tuple(at)]
        if kind in (1, 2):
            shape = list(x.shape)
            shape[axis] = 2 * n if kind == 1 else n + 3
            at[axis] = slice(0, 2 * n, 2) if kind == 1 else slice(1, n + 1)
            room = np.zeros(shape, x.dtype)
            room[tuple(at)] = x
            return room[tuple(at)]
        if kind == 3 and n:
            at[axis] = slice(0, 1)
            return np.broadcast_to(x[tuple(at)], x.shape)
        return x

    def out(self, shape, dtype, *inputs):
        """An array for a result of that shape: strided, or over an input that has room for it."""
        size = int(np.prod(shape))
        for x in inputs:
            fits = isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.writeable
            if fits and x.dtype == dtype and x.size >= size and self.one_in(2):
                start = self.between(0, x.size - size)
                return x.reshape(-1)[start : start + size].reshape(shape)
        room = np.zeros([n + 2 for n in shape], dtype)
        at = tuple(slice(1, n + 1) for n in shape)
        return room[at][..., :: self.choice([1, -1])] if self.one_in(2) else np.zeros(shape, dtype)

    def broadcast(self, shape):
        """The shape with some axes of length 1, and perhaps fewer of them."""
        shape = [n if self.one_in(2) else 1 for n in shape]
        return tuple(shape[self.between(0, len(shape)) if self.one_in(3) else 0 :])
