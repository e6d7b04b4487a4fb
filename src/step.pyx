# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""A layer's decode step, of few rows without options, from the projections to the output.

Everything is that of the other modules, with their bits; here it is called without an array, a
check or a step of Python between.  _forward.py has the general way.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport isnan
from libc.string cimport memset

cimport cython

from qkv_ext._core._append cimport append_rows
from qkv_ext._core._attention cimport attend_rows, is_simple
from qkv_ext._core._kernels cimport (
    QKV_FLOAT32, qkv_build, qkv_enter_float_mode, qkv_float_mode, qkv_kernels,
    qkv_leave_float_mode, table,
)
from qkv_ext._core._matmul cimport plain_product
from qkv_ext._core._norm cimport norm_rows

import numpy

BUILD = qkv_build.decode()


cdef object float32 = numpy.dtype("float32")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty


cdef enum:
    FEW_ROWS = 64  # up to which the general way would take longer than what is computed


# Rows (B, heads, L, width) that lie side by side in an array (B, L, n).
cdef struct Rows:
    Py_buffer view
    Py_ssize_t shape[4]
    Py_ssize_t strides[4]


cdef void lay_rows(Rows *rows, char *start, Py_ssize_t batch, Py_ssize_t heads, Py_ssize_t length,
                   Py_ssize_t width, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t size = sizeof(float)
    memset(&rows.view, 0, sizeof(Py_buffer))
    rows.shape[0], rows.shape[1], rows.shape[2], rows.shape[3] = batch, heads, length, width
    rows.strides[0], rows.strides[1] = length * n * size, width * size
    rows.strides[2], rows.strides[3] = n * size, size
    rows.view.buf, rows.view.ndim, rows.view.itemsize = start, 4, size
    rows.view.len = batch * heads * length * width * size
    rows.view.shape, rows.view.strides = rows.shape, rows.strides


cdef int norm_heads(int isa, const Rows *rows, Py_ssize_t n, weight, double eps) except -1:
    """RMS norm in place, of each head or of the whole width of all, as long as the weight is."""
    cdef Py_buffer w
    cdef Py_ssize_t width = rows.shape[1] * rows.shape[3], many = rows.shape[0] * rows.shape[2], i
    cdef char *x = <char *> rows.view.buf
    if weight is None:
        return 0
    PyObject_GetBuffer(weight, &w, PyBUF_STRIDES)
    n *= sizeof(float)
    if w.shape[0] == width:
        norm_rows(isa, QKV_FLOAT32, False, x, n, <const float *> w.buf, NULL, eps, x, n, many,
                  width)
    else:
        for i in range(many):
            norm_rows(isa, QKV_FLOAT32, False, x + i * n, rows.strides[1], <const float *> w.buf,
                      NULL, eps, x + i * n, rows.strides[1], rows.shape[1], rows.shape[3])
    PyBuffer_Release(&w)
    return 0


# The tables of rotary embedding, [rows, columns]; no columns where there are none.
cdef struct Tables:
    Py_buffer cos, sin
    Py_ssize_t columns
    bint interleaved


cdef inline bint readable(const Py_buffer *x) noexcept nogil:
    """Whether it is aligned, and of contiguous rows."""
    cdef Py_ssize_t size = sizeof(float)
    return ((<size_t> x.buf | <size_t> x.strides[0]) % size == 0
            and (x.strides[1] == size or x.shape[1] <= 1))


cdef bint take_tables(Tables *tables, rotary, interleaved, rotary_dim, Py_ssize_t d) except -1:
    """False where the tables want a look from _check_layer.py."""
    cdef Py_ssize_t width = d
    if rotary is None:
        return interleaved is False and rotary_dim is None
    if type(rotary) is not tuple or len(<tuple> rotary) != 2:
        return False
    cos, sin = <tuple> rotary
    if (type(cos) is not ndarray or cos.dtype is not float32
            or type(sin) is not ndarray or sin.dtype is not float32
            or interleaved is not False and interleaved is not True):
        return False
    if rotary_dim is not None:
        if type(rotary_dim) is not int or not 0 <= rotary_dim <= d:
            return False
        width = rotary_dim
    PyObject_GetBuffer(cos, &tables.cos, PyBUF_STRIDES)
    PyObject_GetBuffer(sin, &tables.sin, PyBUF_STRIDES)
    if (tables.cos.ndim != 2 or tables.sin.ndim != 2 or tables.cos.shape[0] != tables.sin.shape[0]
            or tables.cos.shape[1] != tables.sin.shape[1] or 2 * tables.cos.shape[1] != width
            or not (readable(&tables.cos) and readable(&tables.sin))):
        return False
    tables.columns, tables.interleaved = tables.cos.shape[1], interleaved is True
    return True


cdef void rotate(const qkv_kernels *ops, const Tables *tables, const Rows *rows, Py_ssize_t b,
                 Py_ssize_t position) noexcept nogil:
    """The rows of an item, in place; the first stands at that position."""
    cdef Py_ssize_t i, head, columns = tables.columns, at
    cdef const float *cos
    cdef const float *sin
    cdef float *x
    for i in range(rows.shape[2]):
        at = position + i
        cos = <const float *> (<const char *> tables.cos.buf + at * tables.cos.strides[0])
        sin = <const float *> (<const char *> tables.sin.buf + at * tables.sin.strides[0])
        for head in range(rows.shape[1]):
            x = <float *> (<char *> rows.view.buf + b * rows.strides[0] + head * rows.strides[1]
                           + i * rows.strides[2])
            if tables.interleaved:
                ops.rotate_pairs(QKV_FLOAT32, x, cos, sin, x, columns, False)
            else:
                ops.rotate_halves(QKV_FLOAT32, x, x + columns, cos, sin, x, x + columns, columns,
                                  False)


@cython.auto_pickle(False)
cdef class Step:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    @cython.binding(False)  # which takes a bound method less
    def plain(self, x, layer, rotary, interleaved, rotary_dim, pages, list until, given,
              int threads):
        """(output, lengths, whether the scale of a key is large), or None where it wants a look.

        layer is that of _weights.py; the rest is what the layer's call was given, unchecked.
        pages and until are of _store.py.  Nothing has changed if this fails: keys are written
        behind those that are there, and count when the caller keeps the lengths.
        """
        cdef Tables tables
        cdef Py_buffer view, of_heads
        cdef Rows q, k, v, out
        cdef bint causal, large
        cdef double scale
        cdef Py_ssize_t h, hkv, d, dv, k_start, v_start, n, n_o, batch, length, b, most = 0
        cdef list lengths, grown = []
        cdef qkv_float_mode found
        if (layer.plain is None or type(x) is not ndarray
                or not is_simple(<tuple> given, &causal, &scale)):
            return None
        (w, bias, n, k_start, v_start, w_o, bias_o, n_o, h, hkv, d, dv, q_norm, k_norm, eps,
         own_scale, sinks) = <tuple> layer.plain
        if own_scale is not None and isnan(scale):
            scale = own_scale
        layout, lengths, _, _, _, _ = <tuple> pages
        _, _, heads, head_dim, v_dim = <tuple> layout
        shape = <tuple> x.shape
        if heads != hkv or head_dim != d or v_dim != dv or not 2 <= len(shape) <= 3:
            return None
        batch, length = 1 if len(shape) == 2 else shape[0], shape[len(shape) - 2]
        if batch != len(lengths) or not 1 <= batch * length <= FEW_ROWS:
            return None
        for b in range(batch):
            grown.append(<Py_ssize_t> lengths[b] + length)
            most = max(most, <Py_ssize_t> grown[b])
            if <Py_ssize_t> until[b] < <Py_ssize_t> grown[b]:
                return None
        memset(&tables, 0, sizeof(Tables))
        memset(&view, 0, sizeof(Py_buffer))
        memset(&of_heads, 0, sizeof(Py_buffer))
        found = qkv_enter_float_mode()
        try:
            if not take_tables(&tables, rotary, interleaved, rotary_dim, d):
                return None
            if rotary is not None and most > tables.cos.shape[0]:
                return None
            flat = plain_product(self.isa, x, w, bias, n, 2, threads)
            if flat is None:
                return None
            PyObject_GetBuffer(flat, &view, PyBUF_STRIDES | PyBUF_WRITABLE)
            lay_rows(&q, <char *> view.buf, batch, h, length, d, n)
            lay_rows(&k, <char *> view.buf + k_start * sizeof(float), batch, hkv, length, d, n)
            lay_rows(&v, <char *> view.buf + v_start * sizeof(float), batch, hkv, length, dv, n)
            norm_heads(self.isa, &q, n, q_norm, eps)
            norm_heads(self.isa, &k, n, k_norm, eps)
            if tables.columns:
                for b in range(batch):
                    rotate(table(self.isa), &tables, &q, b, lengths[b])
                    rotate(table(self.isa), &tables, &k, b, lengths[b])
            large = append_rows(self.isa, QKV_FLOAT32, &k.view, &v.view, None, pages, threads)
            if large:  # whose products with q may be beyond float32, in this very step
                pages = (*(<tuple> pages)[:5], True)
            side_by_side = empty((*shape[:len(shape) - 1], h * dv), float32)
            PyObject_GetBuffer(side_by_side, &of_heads, PyBUF_STRIDES | PyBUF_WRITABLE)
            lay_rows(&out, <char *> of_heads.buf, batch, h, length, dv, h * dv)
            attend_rows(self.isa, &q.view, &out.view, pages, grown, causal, scale, sinks,
                        threads)
            if w_o is None:
                return side_by_side, grown, large
            return (plain_product(self.isa, side_by_side, w_o, bias_o, n_o, 2, threads), grown,
                    large)
        finally:
            PyBuffer_Release(&of_heads)
            PyBuffer_Release(&view)
            PyBuffer_Release(&tables.sin)
            PyBuffer_Release(&tables.cos)
            qkv_leave_float_mode(found)
