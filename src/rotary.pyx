# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Rotary embedding of rows, shared out by blocks of rows; a row may lie anywhere, and out on x."""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

cimport cython

from qkv_ext._kernels cimport (
    parallel_for, qkv_enter_float_mode, qkv_float_mode, qkv_kernels, qkv_leave_float_mode, qkv_run,
    table,
)

import numpy

from qkv_ext._arrays import MOST as MOST_AXES

include "build.pxi"


cdef int MOST = MOST_AXES
cdef object float32 = numpy.dtype("float32")
cdef object int64 = numpy.dtype("int64")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty


cdef enum:
    AXES = 32            # of any array
    PER_TASK = 32768     # numbers of a task, about 10 us
    SMALL_WORK = 65536   # numbers below which no other thread is woken up


cdef struct Views:
    Py_buffer x, out, cos, sin, at


cdef struct Call:
    const qkv_kernels *ops
    const char *x        # [..., n] of any strides
    const char *cos      # [..., columns], broadcast along axes of stride 0
    const char *sin
    char *out
    const int64_t *at    # the row of the tables for each index of the last axis of rows, or NULL
    int axes             # of rows, without their elements
    bint interleaved
    Py_ssize_t n, columns, rows, per_task
    Py_ssize_t shape[AXES]
    Py_ssize_t x_step[AXES]
    Py_ssize_t out_step[AXES]
    Py_ssize_t cos_step[AXES]
    Py_ssize_t sin_step[AXES]


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    """Rows from index * per_task, in runs along the last axis of rows."""
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t row = index * call.per_task, end = min(row + call.per_task, call.rows)
    cdef Py_ssize_t rest, i, j, p, stop, turned = 2 * call.columns
    cdef int last = call.axes - 1, axis
    cdef const char *x
    cdef const char *cos
    cdef const char *sin
    cdef const float *source
    cdef char *out
    cdef float *target
    while row < end:
        x, cos, sin, out = call.x, call.cos, call.sin, call.out
        j, rest = row % call.shape[last], row // call.shape[last]
        for axis in range(last - 1, -1, -1):
            i, rest = rest % call.shape[axis], rest // call.shape[axis]
            x += i * call.x_step[axis]
            out += i * call.out_step[axis]
            cos += i * call.cos_step[axis]
            sin += i * call.sin_step[axis]
        stop = min(call.shape[last], j + end - row)
        row += stop - j
        for j in range(j, stop):
            p = call.at[j] if call.at != NULL else j
            source = <const float *> (x + j * call.x_step[last])
            target = <float *> (out + j * call.out_step[last])
            call.ops.rotate(source, <const float *> (cos + p * call.cos_step[last]),
                            <const float *> (sin + p * call.sin_step[last]), target, call.columns,
                            call.interleaved)
            if turned < call.n and source != target:
                memcpy(target + turned, source + turned, (call.n - turned) * sizeof(float))


cdef inline void steps(const Py_buffer *view, int axes, Py_ssize_t *step) noexcept nogil:
    """Strides of the axes of rows, 0 where the array is broadcast."""
    cdef int axis, own
    for axis in range(axes):
        own = axis + view.ndim - 1 - axes
        step[axis] = view.strides[own] if own >= 0 and view.shape[own] > 1 else 0


cdef struct Both:
    Call q, k
    Py_ssize_t q_tasks


cdef void run_either(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef Both *both = <Both *> job
    if index < both.q_tasks:
        run_task(&both.q, index, worker, run)
    else:
        run_task(&both.k, index - both.q_tasks, worker, run)


cdef Py_ssize_t plan(Call *call, int isa, const Views *v, bint interleaved) noexcept:
    """Fill in a call; how many tasks it has."""
    cdef int axis
    call.rows = 0
    if v.x.len == 0:
        return 0
    call.ops = table(isa)
    call.x, call.out = <const char *> v.x.buf, <char *> v.out.buf
    call.cos, call.sin = <const char *> v.cos.buf, <const char *> v.sin.buf
    call.at = <const int64_t *> v.at.buf
    call.axes, call.interleaved = v.x.ndim - 1, interleaved
    call.n, call.columns = v.x.shape[v.x.ndim - 1], v.cos.shape[v.cos.ndim - 1]
    call.rows = 1
    for axis in range(call.axes):
        call.shape[axis] = v.x.shape[axis]
        call.rows *= v.x.shape[axis]
    steps(&v.x, call.axes, call.x_step)
    steps(&v.out, call.axes, call.out_step)
    steps(&v.cos, call.axes, call.cos_step)
    steps(&v.sin, call.axes, call.sin_step)
    call.per_task = max(1, PER_TASK // call.n)
    return (call.rows + call.per_task - 1) // call.per_task


cdef int run(int isa, const Views *v, bint interleaved, int threads) except -1:
    """Turn what the views hold; that they fit each other is known."""
    cdef Call call
    cdef Py_ssize_t count = plan(&call, isa, v, interleaved)
    if count == 0:
        return 0
    if call.rows * call.n < SMALL_WORK:
        threads = 1
    with nogil:
        parallel_for(run_task, &call, count, 1, threads)
    return 0


cdef int view(Views *v, x, tables, out) except -1:
    cos, sin = tables
    PyObject_GetBuffer(x, &v.x, PyBUF_STRIDES)
    PyObject_GetBuffer(cos, &v.cos, PyBUF_STRIDES)
    PyObject_GetBuffer(sin, &v.sin, PyBUF_STRIDES)
    PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
    return 0


cdef void release_all(Views *v) noexcept:
    PyBuffer_Release(&v.x)  # does nothing for a view that was not taken
    PyBuffer_Release(&v.out)
    PyBuffer_Release(&v.cos)
    PyBuffer_Release(&v.sin)
    PyBuffer_Release(&v.at)


cdef bint fit(const Views *v, bint has_positions) noexcept:
    """Whether contiguous arrays of a plain call go together, with positions within the tables."""
    cdef Py_ssize_t length, j
    cdef const int64_t *at = <const int64_t *> v.at.buf
    if (not 2 <= v.x.ndim <= MOST or v.x.len == 0 or v.cos.ndim != 2 or v.sin.ndim != 2
            or (<size_t> v.x.buf | <size_t> v.cos.buf | <size_t> v.sin.buf) % sizeof(float)
            or not PyBuffer_IsContiguous(&v.x, b"C") or not PyBuffer_IsContiguous(&v.cos, b"C")
            or not PyBuffer_IsContiguous(&v.sin, b"C")):
        return False
    length = v.x.shape[v.x.ndim - 2]
    if (v.cos.shape[0] != v.sin.shape[0] or v.cos.shape[1] != v.sin.shape[1]
            or 2 * v.cos.shape[1] != v.x.shape[v.x.ndim - 1]):
        return False
    if not has_positions:
        return length <= v.cos.shape[0]
    if (v.at.ndim != 1 or v.at.shape[0] != length or <size_t> at % sizeof(int64_t)
            or not PyBuffer_IsContiguous(&v.at, b"C")):
        return False
    for j in range(length):
        if not 0 <= at[j] < v.cos.shape[0]:
            return False
    return True


cdef inline bint is_plain(array, dtype) noexcept:
    return type(array) is ndarray and array.dtype is dtype


@cython.auto_pickle(False)
cdef class Rotary:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, x, cos, sin, out, bint interleaved, int threads):
        """Write out; all are float32, aligned, of contiguous rows, and checked.

        x and out are (..., L, D), cos and sin broadcast to (..., L, rotary_dim / 2).  out is x, or
        shares no memory with it.
        """
        cdef Views v
        cdef qkv_float_mode found
        memset(&v, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            view(&v, x, (cos, sin), out)
            run(self.isa, &v, interleaved, threads)
        finally:
            release_all(&v)
            qkv_leave_float_mode(found)

    def both(self, q, k, q_tables, k_tables, q_out, k_out, bint interleaved, int threads):
        """compute for the queries and keys of one step, in one run of the pool.

        Nothing is checked: each is as compute takes it, and tables are (cos, sin), already of the
        rows' positions.  q_out and k_out share no memory with each other.
        """
        cdef Both both
        cdef Views q_views, k_views
        cdef Py_ssize_t k_tasks
        cdef qkv_float_mode found
        memset(&q_views, 0, sizeof(Views))
        memset(&k_views, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            view(&q_views, q, q_tables, q_out)
            view(&k_views, k, k_tables, k_out)
            both.q_tasks = plan(&both.q, self.isa, &q_views, interleaved)
            k_tasks = plan(&both.k, self.isa, &k_views, interleaved)
            if q_views.x.len + k_views.x.len < SMALL_WORK * <Py_ssize_t> sizeof(float):
                threads = 1
            if both.q_tasks + k_tasks:
                with nogil:
                    parallel_for(run_either, &both, both.q_tasks + k_tasks, 1, threads)
        finally:
            release_all(&q_views)
            release_all(&k_views)
            qkv_leave_float_mode(found)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, x, cos, sin, positions, bint interleaved, int threads):
        """x turned over its whole width where all can be taken as it is, else None."""
        cdef Views v
        cdef qkv_float_mode found
        if not (is_plain(x, float32) and is_plain(cos, float32) and is_plain(sin, float32)
                and (positions is None or is_plain(positions, int64))):
            return None
        memset(&v, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            PyObject_GetBuffer(x, &v.x, PyBUF_STRIDES)
            PyObject_GetBuffer(cos, &v.cos, PyBUF_STRIDES)
            PyObject_GetBuffer(sin, &v.sin, PyBUF_STRIDES)
            if positions is not None:
                PyObject_GetBuffer(positions, &v.at, PyBUF_STRIDES)
            if not fit(&v, positions is not None):
                return None
            out = empty(x.shape, float32)
            PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
            run(self.isa, &v, interleaved, threads)
            return out
        finally:
            release_all(&v)
            qkv_leave_float_mode(found)
