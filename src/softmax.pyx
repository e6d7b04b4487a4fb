# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Stable softmax over contiguous rows, shared out by blocks of rows: y = exp(x - max) / sum."""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from qkv_ext._kernels cimport parallel_for, qkv_kernels, qkv_run, table


cdef enum:
    PER_TASK = 16384     # numbers of a task, about 20 us
    SMALL_WORK = 32768   # numbers below which no other thread is woken up


cdef struct Call:
    const qkv_kernels *ops
    const float *x       # [rows, n]
    float *out           # [rows, n]
    Py_ssize_t rows, n, per_task


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t first = index * call.per_task, row
    for row in range(first, min(first + call.per_task, call.rows)):
        call.ops.softmax(call.x + row * call.n, call.out + row * call.n, call.n)


def softmax(problem, int isa):
    """Write problem.out, the softmax of the rows of problem.x; both are contiguous."""
    cdef Call call
    cdef Py_buffer x, out
    cdef Py_ssize_t count
    cdef int most
    x_array, out_array, threads = problem
    PyObject_GetBuffer(x_array, &x, PyBUF_STRIDES)
    try:
        PyObject_GetBuffer(out_array, &out, PyBUF_STRIDES | PyBUF_WRITABLE)
        try:
            if x.len == 0:
                return
            call.ops = table(isa)
            call.x = <const float *> x.buf
            call.out = <float *> out.buf
            call.n = x.shape[x.ndim - 1]
            call.rows = x.len // <Py_ssize_t> sizeof(float) // call.n
            call.per_task = max(1, PER_TASK // call.n)
            if call.rows * call.n < SMALL_WORK:
                threads = 1
            count = (call.rows + call.per_task - 1) // call.per_task
            most = threads
            with nogil:
                parallel_for(run_task, &call, count, 1, most)
        finally:
            PyBuffer_Release(&out)
    finally:
        PyBuffer_Release(&x)
