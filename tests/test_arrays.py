"""Arrays in and out: any strides, alignment and byte order are read, any out is written."""

import numpy as np
import pytest
from cases import CASES
from tolerance import assert_same

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention

SHAPES = {  # (B, H, Hkv, L, S, D, Dv): few keys, several tiles, one query
    "small": (2, 4, 2, 9, 33, 20, 20),
    "tiles": (1, 2, 1, 40, 300, 37, 21),
    "decode": (2, 4, 2, 1, 300, 20, 24),
}


def qkv(rng, shape):
    b, h, hkv, length, s, d, dv = shape
    shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv)
    return tuple(rng.standard_normal(each, np.float32) for each in shapes)


def within(x, shape, *index):
    """The values of x as a view of a larger array of NaN, or of True."""
    big = np.full(shape, np.nan, x.dtype)
    big[index] = x
    return big[index]


def misaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def as_field(x):
    """x as a field of records whose size is no multiple of its itemsize."""
    records = np.zeros(x.shape[:-1], [("x", x.dtype, x.shape[-1:]), ("y", np.uint8)])
    records["x"] = x
    return records["x"]


class Wrapped:
    """Something that speaks DLPack and is no ndarray."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class Subclass(np.ndarray):
    def __array_finalize__(self, other):
        pass

    def __getitem__(self, index):
        raise AssertionError("the library reads plain arrays")


class Elsewhere:
    """Something whose memory the CPU cannot read."""

    def __dlpack__(self, **options):
        raise BufferError("the memory is on another device")

    def __dlpack_device__(self):
        return 2, 0


@pytest.mark.parametrize("q", [Elsewhere(), [[1.0], [1.0, 2.0]]], ids=["device", "ragged"])
def test_no_array_for_the_cpu(q, backend):
    with pytest.raises(TypeError, match=r"^q cannot be read as an array: "):
        sdpa(q, q, q, backend=backend)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


EVERY = slice(None)
VIEWS = {  # C4 (pytorch/pytorch#187506, #181133), C9 (cython/cython#1605), C10 (OpenBLAS#171)
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "Fortran order": np.asfortranarray,
    "heads after length": lambda x: np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2),
    "all axes reversed in memory": lambda x: np.ascontiguousarray(x.T).T,
    "rows reversed": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "columns reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "batch reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every other column": lambda x: within(
        x, (*x.shape[:-1], 2 * x.shape[-1]), ..., slice(None, None, 2)
    ),
    "every third row": lambda x: within(
        x, (*x.shape[:-2], 3 * x.shape[-2], x.shape[-1]), ..., slice(None, None, 3), EVERY
    ),
    "rows followed by NaN": lambda x: within(
        x, (*x.shape[:-1], x.shape[-1] + 3), ..., slice(0, x.shape[-1])
    ),
    "rows between rows of NaN": lambda x: within(
        x, (*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 2), ..., slice(1, -1), slice(1, -1)
    ),
    "read-only": read_only,
    "of bytes": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "misaligned": misaligned,
    "misaligned, other byte order": lambda x: misaligned(x.astype(x.dtype.newbyteorder())),
    "field of records": as_field,
    "subclass": lambda x: x.view(Subclass),
    "DLPack": Wrapped,
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_equal_contiguous(view, shape, backend, rng):
    """C4, C9, C10: what the kernels cannot read in place is copied, never misread."""
    arrays = dict(zip("qkv", qkv(rng, shape), strict=True))
    expected = sdpa(*arrays.values(), causal=True, backend=backend)
    for which in ("q", "k", "v", "qkv"):
        seen = {name: view(x) if name in which else x for name, x in arrays.items()}
        actual = sdpa(*seen.values(), causal=True, backend=backend)
        assert type(actual) is np.ndarray
        assert_same(actual, expected, backend)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_masks_equal_contiguous(view, shape, backend, rng):
    q, k, v = qkv(rng, shape)
    drawn = rng.standard_normal((*q.shape[:-1], k.shape[-2]))
    bias = np.where(drawn < 0.5, drawn, -np.inf)
    for mask in (drawn < 0.5, bias.astype(np.float32), bias):
        expected = sdpa(q, k, v, mask=mask, backend=backend)
        assert_same(sdpa(q, k, v, mask=view(mask), backend=backend), expected, backend)


@pytest.mark.parametrize("dtype", [bool, np.float32, np.float64, np.float16])
@pytest.mark.parametrize("shape", [(2, 1, 5, 1), (1, 1, 1, 7), (5, 1), (1,), (2, 3, 1, 7), ()])
def test_size_1_axes_of_masks(shape, dtype, backend, rng):
    """A6 (pytorch/pytorch#128816): the stride of an axis of length 1 means nothing."""
    q, k, v = qkv(rng, (2, 3, 3, 5, 7, 8, 8))
    drawn = rng.standard_normal(shape)
    mask = np.asarray(drawn < 0.5 if dtype is bool else drawn, dtype)
    expected = sdpa(q, k, v, mask=np.broadcast_to(mask, (2, 3, 5, 7)).copy(), backend=backend)
    strange = np.lib.stride_tricks.as_strided(
        mask, shape, [1 << 40 if n == 1 else by for n, by in zip(shape, mask.strides, strict=True)]
    )
    for given in (mask, strange, np.broadcast_to(mask, (2, 3, 5, 7)), np.broadcast_to(mask, (5, 7))
                  if len(shape) < 3 else mask):  # fmt: skip
        assert_same(sdpa(q, k, v, mask=given, backend=backend), expected, backend)


def test_any_byte_but_0_is_true(backend, rng):
    q, k, v = qkv(rng, (1, 2, 2, 5, 70, 8, 8))
    keep = rng.random((5, 70)) < 0.5
    strange = np.where(keep, rng.integers(1, 256, keep.shape), 0).astype(np.uint8).view(bool)
    expected = sdpa(q, k, v, mask=keep, backend=backend)
    assert_same(sdpa(q, k, v, mask=strange, backend=backend), expected, backend)


def test_fused_buffer(backend, rng):
    """C4: Q, K and V as views of one (B, L, 3, H, D) buffer, in both layouts."""
    fused = rng.standard_normal((2, 70, 3, 4, 20), np.float32)
    q, k, v = (fused[:, :, i] for i in range(3))
    apart = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    expected = sdpa(*apart, backend=backend)
    views = [x.swapaxes(1, 2) for x in (q, k, v)]
    assert_same(sdpa(*views, backend=backend), expected, backend)
    actual = sdpa(q, k, v, layout="blhd", backend=backend)
    assert_same(actual, expected.swapaxes(1, 2), backend)


def test_mapped_file(backend, rng, tmp_path):
    """C9: np.load(mmap_mode="r")."""
    q, k, v = qkv(rng, SHAPES["small"])
    for name, x in zip("qkv", (q, k, v), strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "qkv"]
    assert_same(sdpa(*mapped, backend=backend), sdpa(q, k, v, backend=backend), backend)


def test_broadcast_inputs(backend, rng):
    """C9: np.broadcast_to, along the batch, the heads, the rows and the columns."""
    q, k, v = qkv(rng, (1, 1, 1, 5, 70, 8, 8))
    for x, full in ((q, (2, 3, 5, 8)), (q[..., :1, :], (2, 3, 5, 8)), (q[..., :1], (2, 3, 5, 8))):
        wide = np.broadcast_to(x, full)
        keys, values = np.broadcast_to(k, (2, 3, 70, 8)), np.broadcast_to(v[..., :1], (2, 3, 70, 8))
        expected = sdpa(wide.copy(), keys.copy(), values.copy(), backend=backend)
        assert_same(sdpa(wide, keys, values, backend=backend), expected, backend)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_rows_that_are_all_one_row(shape, dtype, backend, rng):
    """A distance of 0 between rows, of each array; and of a distance backwards."""
    q, k, v = (x.astype(dtype) for x in qkv(rng, shape))
    for n in range(3):
        arrays = [q, k, v]
        for rows in (
            np.broadcast_to(arrays[n][..., :1, :], arrays[n].shape),
            arrays[n][..., ::-1, :],
        ):
            arrays[n] = rows
            plain = [x.copy() for x in arrays]
            for options in ({}, {"causal": True}):
                expected = sdpa(*plain, **options, backend=backend)
                assert_same(sdpa(*arrays, **options, backend=backend), expected, backend)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 37, 100])
def test_tails_do_not_read_on(width, backend, rng):
    """C10 (OpenMathLib/OpenBLAS#171): NaN after the end of a row, in each of D, Dv, L and S."""
    for shape in ((1, 2, 1, 5, 33, width, 8), (1, 2, 1, 5, 33, 8, width),
                  (1, 2, 1, width, 33, 8, 8), (1, 2, 1, 5, width, 8, 8),
                  (1, 2, 1, 1, width, width, width)):  # fmt: skip
        q, k, v = qkv(rng, shape)
        expected = sdpa(q, k, v, backend=backend)
        amid = [
            within(x, tuple(n + 2 for n in x.shape), *(slice(1, n + 1) for n in x.shape))
            for x in (q, k, v)
        ]
        assert_same(sdpa(*amid, backend=backend), expected, backend)


WITHOUT_LAYOUT = [c for c in CASES if len(c.q) > 3 and c.work < 1e7 and "layout" not in c.options]


@pytest.mark.parametrize("case", WITHOUT_LAYOUT[::3],
                         ids=lambda case: case.name)  # fmt: skip
def test_layout(case, backend):
    """blhd takes and gives other views of the same numbers; mask, weights and lse stay put."""
    q, k, v, options = case.arrays()
    options |= {"return_weights": True, "return_lse": True, "backend": backend}
    output, *extras = sdpa(q, k, v, **options)
    swapped = [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in (q, k, v)]
    other_output, *other_extras = sdpa(*swapped, layout="blhd", **options)
    assert other_output.flags.c_contiguous
    assert_same(other_output.swapaxes(-3, -2), output, backend)
    for x, y in zip(other_extras, extras, strict=True):
        assert_same(x, y, backend)


# ---- out ----------------------------------------------------------------------------------------


def outs(shape, dtype=np.float32):
    """Arrays that can be written, by what is odd about them."""
    yield "plain", np.full(shape, np.nan, dtype)
    for name in ("transposed", "Fortran order", "heads after length", "all axes reversed in memory",
                 "rows reversed", "columns reversed", "batch reversed", "every other column",
                 "every third row", "rows followed by NaN", "other byte order", "misaligned",
                 "field of records"):  # fmt: skip
        yield name, VIEWS[name](np.full(shape, np.nan, dtype))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_out_is_written_and_returned(shape, backend, rng):
    q, k, v = qkv(rng, shape)
    expected = sdpa(q, k, v, backend=backend)
    for name, out in outs(expected.shape):
        base = out if out.base is None else out.base
        others = int(np.isnan(base).sum()) - out.size if base.dtype == np.float32 else None
        assert sdpa(q, k, v, out=out, backend=backend) is out, name
        assert_same(np.ascontiguousarray(out, np.float32), expected, backend)
        if others is not None:  # nothing around it was touched
            assert np.isnan(base).sum() == others, name
    wide = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    for name, out in outs(expected.swapaxes(1, 2).shape):
        assert sdpa(*wide, layout="blhd", out=out, backend=backend) is out, name
        assert_same(np.ascontiguousarray(out, np.float32), expected.swapaxes(1, 2), backend)


def test_out_comes_first_in_the_tuple(backend, rng):
    q, k, v = qkv(rng, SHAPES["small"])
    out = np.empty_like(q)
    extras = sdpa(q, k, v, out=out, return_lse=True, return_weights=True, backend=backend)
    assert extras[0] is out
    assert [x.shape for x in extras] == [(2, 4, 9, 20), (2, 4, 9, 33), (2, 4, 9)]


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_out_may_be_an_input(name, backend, rng):
    square = (2, 3, 3, 70, 70, 70, 70)
    arrays = dict(zip("qkv", qkv(rng, square), strict=True))
    arrays["mask"] = rng.standard_normal((2, 3, 70, 70), np.float32)
    expected = sdpa(**arrays, causal=True, backend=backend)
    out = arrays[name]
    assert sdpa(**arrays, causal=True, out=out, backend=backend) is out
    assert_same(out, expected, backend)


@pytest.mark.parametrize("shift", [1, 8, 70 * 8, -3])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_may_overlap_an_input(name, shift, backend, rng):
    arrays = dict(zip("qkv", qkv(rng, (2, 3, 3, 70, 70, 8, 8)), strict=True))
    expected = sdpa(**arrays, backend=backend)
    n = expected.size
    room = np.zeros(n + abs(shift), np.float32)
    first, second = (room[:n], room[shift:]) if shift > 0 else (room[-shift:], room[:n])
    first[...] = arrays[name].ravel()
    arrays[name], out = first.reshape(expected.shape), second.reshape(expected.shape)
    sdpa(**arrays, out=out, backend=backend)
    assert_same(out, expected, backend)


@pytest.mark.parametrize("flip", [np.s_[..., ::-1], np.s_[..., ::-1, :], np.s_[::-1]])
def test_out_may_be_an_input_reversed(flip, backend, rng):
    q, k, v = qkv(rng, (2, 3, 3, 70, 70, 8, 8))
    expected = sdpa(q, k, v, backend=backend)
    sdpa(q, k, v, out=q[flip], backend=backend)
    assert_same(np.ascontiguousarray(q[flip]), expected, backend)


def test_out_of_rank_2_and_3(backend, rng):
    q, k, v = (x[:, 0] for x in qkv(rng, (3, 1, 1, 9, 33, 20, 8)))
    for arrays in ((q, k, v), (q[0], k[0], v[0])):
        expected = sdpa(*arrays, backend=backend)
        out = np.full(expected.shape[::-1], np.nan, np.float32).T
        assert sdpa(*arrays, out=out, backend=backend) is out
        assert_same(np.ascontiguousarray(out), expected, backend)
