# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Stable softmax over contiguous rows, shared out by blocks of rows: y = exp(x - max) / sum.

A row that is long is computed piece by piece, its sums added up from left to right, so that a
signal does not wait for it.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)

cimport cython
from libc.math cimport INFINITY, isnan

from qkv_ext._core._kernels cimport (
    parallel_for, qkv_build, qkv_enter_float_mode, qkv_float_mode, qkv_kernels,
    qkv_leave_float_mode, qkv_run, stopped, table,
)

import numpy

from qkv_ext._core._arrays import MAX_NDIM as MOST_AXES

BUILD = qkv_build.decode()


cdef int MAX_NDIM = MOST_AXES
cdef object float32 = numpy.dtype("float32")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty


cdef enum:
    PER_TASK = 16384     # numbers of a task, about 20 us
    SMALL_WORK = 32768   # numbers below which no other thread is woken up
    PIECE = 262144       # numbers of a row between two looks at the signals


cdef struct Call:
    const qkv_kernels *ops
    const float *x       # [rows, n]
    float *out           # [rows, n]
    Py_ssize_t rows, n, per_task


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t first = index * call.per_task, row
    for row in range(first, min(first + call.per_task, call.rows)):
        if call.n > PIECE:
            long_row(call, call.x + row * call.n, call.out + row * call.n, worker, run)
        else:
            call.ops.softmax(call.x + row * call.n, call.out + row * call.n, call.n)


cdef void long_row(const Call *call, const float *x, float *out, int worker,
                   qkv_run *run) noexcept nogil:
    """The softmax of one row, unless the run is stopped."""
    cdef Py_ssize_t j
    cdef float top = -INFINITY, sum = 0.0, part, factor
    for j from 0 <= j < call.n by PIECE:  # pass 1: the maximum; once NaN, nothing is larger
        if stopped(run, worker):
            return
        part = call.ops.largest(x + j, min(PIECE, call.n - j))
        top = part if part > top or isnan(part) else top
    for j from 0 <= j < call.n by PIECE:  # pass 2: exp(x - max), and their sum
        if stopped(run, worker):
            return
        sum += call.ops.exp_and_sum(x + j, top, out + j, min(PIECE, call.n - j))
    factor = 1.0 / sum
    for j from 0 <= j < call.n by PIECE:  # pass 3: the weights
        if stopped(run, worker):
            return
        call.ops.scale_rows(out + j, 0, &factor, out + j, 0, 1, min(PIECE, call.n - j))


cdef int run(Call *call, const Py_buffer *x, const Py_buffer *out, int threads, int isa) except -1:
    cdef Py_ssize_t count
    if x.len == 0:
        return 0
    call.ops = table(isa)
    call.x = <const float *> x.buf
    call.out = <float *> out.buf
    call.n = x.shape[x.ndim - 1]
    call.rows = x.len // <Py_ssize_t> sizeof(float) // call.n
    call.per_task = max(1, PER_TASK // call.n)
    if call.rows * call.n < SMALL_WORK:
        threads = 1
    count = (call.rows + call.per_task - 1) // call.per_task
    with nogil:
        parallel_for(run_task, call, count, 1, threads)
    return 0


cdef compute(int isa, problem):
    """Write problem.out, the softmax of the rows of problem.x; both are contiguous."""
    cdef Call call
    cdef Py_buffer x, out
    cdef qkv_float_mode found
    x_array, out_array, threads = problem
    PyObject_GetBuffer(x_array, &x, PyBUF_STRIDES)
    found = qkv_enter_float_mode()
    try:
        PyObject_GetBuffer(out_array, &out, PyBUF_STRIDES | PyBUF_WRITABLE)
        try:
            run(&call, &x, &out, threads, isa)
        finally:
            PyBuffer_Release(&out)
    finally:
        PyBuffer_Release(&x)
        qkv_leave_float_mode(found)


cdef plain(int isa, array, int threads):
    """The softmax over the last axis where the array can be taken as it is, else None."""
    cdef Call call
    cdef Py_buffer x, out
    cdef qkv_float_mode found
    if type(array) is not ndarray or array.dtype is not float32:
        return None
    PyObject_GetBuffer(array, &x, PyBUF_STRIDES)
    found = qkv_enter_float_mode()
    try:
        if (not 0 < x.ndim <= MAX_NDIM or x.len == 0 or <size_t> x.buf % sizeof(float)
                or not PyBuffer_IsContiguous(&x, b"C")):
            return None
        output = empty(array.shape, float32)
        PyObject_GetBuffer(output, &out, PyBUF_STRIDES | PyBUF_WRITABLE)
        try:
            run(&call, &x, &out, threads, isa)
        finally:
            PyBuffer_Release(&out)
        return output
    finally:
        PyBuffer_Release(&x)
        qkv_leave_float_mode(found)


@cython.auto_pickle(False)
cdef class Softmax:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, problem):
        """Write problem.out."""
        compute(self.isa, problem)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, array, int threads):
        """The softmax over the last axis where the array can be taken as it is, else None."""
        return plain(self.isa, array, threads)
