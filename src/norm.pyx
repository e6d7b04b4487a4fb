# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Layer norm and RMS norm: y = (x - mean) / sqrt(var + eps) weight + bias, row by row.

    call      the rows of all leading axes, these in the order in which they lie in memory
      task      some of these rows
        run       rows at one distance from each other: a call of the kernel
          piece     of a row, where it is long

A row may lie anywhere, and the result on it.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.string cimport memset

cimport cython

from qkv_ext._core._kernels cimport (
    LANES, QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, parallel_for, qkv_build, qkv_enter_float_mode,
    qkv_float_mode, qkv_kernels, qkv_leave_float_mode, qkv_norm, qkv_norm_factor, qkv_norm_mean,
    qkv_norm_row, qkv_norm_start, qkv_prefetch, qkv_run, qkv_stream_end, stopped, table,
)

import numpy

from qkv_ext._core._arrays import MAX_NDIM as MOST_AXES

BUILD = qkv_build.decode()


cdef int MAX_NDIM = MOST_AXES
cdef object float32 = numpy.dtype("float32")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty


cdef enum:
    AXES = 32            # of any array
    PER_TASK = 32768     # numbers of a task, about 20 us
    SMALL_WORK = 65536   # numbers below which no other thread is woken up
    PIECE = 262144       # numbers of a row between two looks at the signals: whole blocks
    LARGE = 1 << 24      # bytes of a result that is written past the caches
    AHEAD = 8192         # bytes that are asked for before they are read, where all is as large


cdef struct Views:
    Py_buffer x, out, weight, bias


cdef struct Call:
    const qkv_kernels *ops
    qkv_norm norm
    const char *x        # [shape..., n]; strides in bytes
    char *out
    int axes             # which do not follow on each other, the innermost last
    Py_ssize_t shape[AXES]
    Py_ssize_t x_step[AXES]
    Py_ssize_t out_step[AXES]
    Py_ssize_t rows, per_task, size
    Py_ssize_t ahead     # rows from the one that is normed to the one that is asked for; 0 is none


# ---- rows ---------------------------------------------------------------------------------------

cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t at[AXES]
    cdef Py_ssize_t row = index * call.per_task, end = min(row + call.per_task, call.rows), count
    cdef Py_ssize_t place = row
    cdef const char *x = call.x
    cdef char *out = call.out
    cdef int axis, last = call.axes - 1
    for axis in range(last, -1, -1):
        at[axis], place = place % call.shape[axis], place // call.shape[axis]
        x += at[axis] * call.x_step[axis]
        out += at[axis] * call.out_step[axis]
    while True:
        count = min(end - row, call.shape[last] - at[last])
        if not norm_run(call, x, out, count, worker, run):
            return
        row += count
        if row == end:
            break
        at[last] += count  # it is at its end: the next place of the axes before it
        x += count * call.x_step[last]
        out += count * call.out_step[last]
        for axis in range(last, 0, -1):
            if at[axis] < call.shape[axis]:
                break
            x += call.x_step[axis - 1] - call.shape[axis] * call.x_step[axis]
            out += call.out_step[axis - 1] - call.shape[axis] * call.out_step[axis]
            at[axis] = 0
            at[axis - 1] += 1
    if call.norm.streams:
        qkv_stream_end()


cdef bint norm_run(const Call *call, const char *x, char *out, Py_ssize_t count, int worker,
                   qkv_run *run) noexcept nogil:
    """Rows of the last axis; False where the run is stopped."""
    cdef Py_ssize_t x_step = call.x_step[call.axes - 1], out_step = call.out_step[call.axes - 1], i
    if call.norm.n <= PIECE and not call.ahead:
        call.ops.norm(&call.norm, x, x_step, out, out_step, count)
        return True
    for i in range(count):
        if call.norm.n > PIECE:
            if not long_row(call, x + i * x_step, out + i * out_step, worker, run):
                return False
        else:
            qkv_prefetch(x + (i + call.ahead) * x_step, call.norm.n * call.size)
            call.ops.norm(&call.norm, x + i * x_step, 0, out + i * out_step, 0, 1)
    return True


cdef bint add_up(const Call *call, qkv_norm_row *row, const char *x, int worker,
                 qkv_run *run) noexcept nogil:
    cdef Py_ssize_t j
    for j from 0 <= j < call.norm.n by PIECE:
        if stopped(run, worker):
            return False
        call.ops.norm_sums(call.norm.kind, x + j * call.size, min(PIECE, call.norm.n - j), row)
    return True


cdef bint long_row(const Call *call, const char *x, char *out, int worker,
                   qkv_run *run) noexcept nogil:
    """One row as the kernel norms it, unless the run is stopped."""
    cdef qkv_norm_row row
    cdef Py_ssize_t j, place
    qkv_norm_start(&row, 1.0)
    while True:
        if call.norm.centered:
            if not add_up(call, &row, x, worker, run):
                return False
            qkv_norm_mean(&row, call.norm.n)
        if not add_up(call, &row, x, worker, run):
            return False
        if qkv_norm_factor(&row, &call.norm):
            break
    for j from 0 <= j < call.norm.n by PIECE:
        if stopped(run, worker):
            return False
        place = j * call.size
        call.ops.norm_apply(&call.norm, &row, x + place, out + place, j,
                            min(PIECE, call.norm.n - j))
    return True


cdef void norm_rows(int isa, int kind, bint centered, const char *x, Py_ssize_t ldx,
                    const float *weight, const float *bias, double eps, char *y, Py_ssize_t ldy,
                    Py_ssize_t m, Py_ssize_t n) noexcept nogil:
    cdef qkv_norm norm
    norm.kind, norm.centered, norm.streams, norm.n = kind, centered, False, n
    norm.weight, norm.bias, norm.eps = weight, bias, eps
    table(isa).norm(&norm, x, ldx, y, ldy, m)


# ---- the call -----------------------------------------------------------------------------------

cdef inline Py_ssize_t magnitude(Py_ssize_t step) noexcept nogil:
    return -step if step < 0 else step


cdef inline bint is_outer(const Call *call, int a, Py_ssize_t x_step,
                          Py_ssize_t out_step) noexcept nogil:
    """Whether the rows of axis a lie farther apart."""
    cdef Py_ssize_t own = magnitude(call.x_step[a])
    if own != x_step:
        return own > x_step
    return magnitude(call.out_step[a]) >= out_step


cdef void describe(Call *call, const Py_buffer *x, const Py_buffer *out) noexcept nogil:
    """The leading axes as they lie in memory, and as few as they can be."""
    cdef int axis, place, other
    cdef Py_ssize_t own, theirs
    call.axes = 0
    call.rows = 1
    for axis in range(x.ndim - 1):
        if x.shape[axis] == 1:
            continue
        call.rows *= x.shape[axis]
        own, theirs = magnitude(x.strides[axis]), magnitude(out.strides[axis])
        place = call.axes
        while place and not is_outer(call, place - 1, own, theirs):
            place -= 1
        for other in range(call.axes, place, -1):
            call.shape[other] = call.shape[other - 1]
            call.x_step[other] = call.x_step[other - 1]
            call.out_step[other] = call.out_step[other - 1]
        call.shape[place] = x.shape[axis]
        call.x_step[place], call.out_step[place] = x.strides[axis], out.strides[axis]
        call.axes += 1
    if call.axes == 0:
        call.axes, call.shape[0], call.x_step[0], call.out_step[0] = 1, 1, 0, 0
    place = 0
    for axis in range(1, call.axes):
        if (call.x_step[place] == call.shape[axis] * call.x_step[axis]
                and call.out_step[place] == call.shape[axis] * call.out_step[axis]):
            call.shape[place] *= call.shape[axis]
        else:
            place += 1
            call.shape[place] = call.shape[axis]
        call.x_step[place], call.out_step[place] = call.x_step[axis], call.out_step[axis]
    call.axes = place + 1


cdef bint aligned(const Call *call) noexcept nogil:
    """Whether whole vectors of results start at multiples of 16 bytes."""
    cdef size_t odd = <size_t> call.out
    cdef int axis
    for axis in range(call.axes):
        odd |= <size_t> call.out_step[axis]
    return odd % 16 == 0 and call.norm.n % LANES == 0


cdef int run(Call *call, int isa, const Views *v, int threads) except -1:
    """norm.kind, centered and eps are there already."""
    cdef Py_ssize_t width, count, grain = 1
    cdef bint large
    if v.x.len == 0:
        return 0
    call.ops = table(isa)
    call.x, call.out, call.size = <const char *> v.x.buf, <char *> v.out.buf, v.x.itemsize
    call.norm.n = v.x.shape[v.x.ndim - 1]
    call.norm.weight, call.norm.bias = <const float *> v.weight.buf, <const float *> v.bias.buf
    describe(call, &v.x, &v.out)
    width = call.norm.n * call.size
    large = <double> call.rows * width >= LARGE
    call.ahead = max(1, AHEAD // width) if large else 0
    call.norm.streams = (large and call.norm.kind == QKV_FLOAT32 and call.x != call.out
                         and aligned(call))
    call.per_task = max(1, PER_TASK // call.norm.n)
    count = (call.rows + call.per_task - 1) // call.per_task
    if <double> call.rows * call.norm.n < SMALL_WORK:
        threads = 1
    if large:  # a thread fills whole huge pages of a result that nobody touched before
        grain = max(1, min((1 << 21) // (call.per_task * width), count // (4 * threads)))
    with nogil:
        parallel_for(run_task, call, count, grain, threads)
    return 0


cdef inline int kind_of(x) except -1:
    if x.itemsize == 4:
        return QKV_FLOAT32
    return QKV_FLOAT16 if x.dtype.kind == "f" else QKV_BFLOAT16


cdef void release_all(Views *v) noexcept:
    PyBuffer_Release(&v.x)  # does nothing for a view that was not taken
    PyBuffer_Release(&v.out)
    PyBuffer_Release(&v.weight)
    PyBuffer_Release(&v.bias)


cdef compute(int isa, problem):
    """Write problem.out, the rows of problem.x normed; see Norm in _problem.py."""
    cdef Call call
    cdef Views v
    cdef qkv_float_mode found
    x, weight, bias, eps, centered, out, threads = <tuple> problem
    call.norm.kind, call.norm.centered, call.norm.eps = kind_of(x), centered, eps
    if call.norm.kind == QKV_BFLOAT16:  # a dtype that the buffer protocol has no name for
        x, out = x.view("u2"), out.view("u2")
    memset(&v, 0, sizeof(Views))
    found = qkv_enter_float_mode()
    try:
        PyObject_GetBuffer(x, &v.x, PyBUF_STRIDES)
        PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        PyObject_GetBuffer(weight, &v.weight, PyBUF_STRIDES)
        if bias is not None:
            PyObject_GetBuffer(bias, &v.bias, PyBUF_STRIDES)
        run(&call, isa, &v, threads)
    finally:
        release_all(&v)
        qkv_leave_float_mode(found)


# ---- the plain call -----------------------------------------------------------------------------

cdef inline bint take(array, Py_buffer *view) except -1:
    """Acquire a float32 array; whether it is aligned and contiguous."""
    if type(array) is not ndarray or array.dtype is not float32:
        return False
    PyObject_GetBuffer(array, view, PyBUF_STRIDES)
    return <size_t> view.buf % sizeof(float) == 0 and PyBuffer_IsContiguous(view, b"C")


cdef plain(int isa, x, weight, bias, eps, bint centered, int threads, Views *v):
    cdef Call call
    cdef Py_ssize_t n
    if type(eps) is not float or not 0 <= <double> eps <= 1:
        return None
    if not (take(x, &v.x) and take(weight, &v.weight)
            and (bias is None or take(bias, &v.bias))):
        return None
    if not 0 < v.x.ndim <= MAX_NDIM or v.x.len == 0 or v.weight.ndim != 1:
        return None
    n = v.x.shape[v.x.ndim - 1]
    if v.weight.shape[0] != n or bias is not None and not (
            v.bias.ndim == 1 and v.bias.shape[0] == n):
        return None
    out = empty(x.shape, float32)
    PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
    call.norm.kind, call.norm.centered, call.norm.eps = QKV_FLOAT32, centered, eps
    run(&call, isa, v, threads)
    return out


@cython.auto_pickle(False)
cdef class Normalization:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, problem):
        """Write problem.out."""
        compute(self.isa, problem)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, x, weight, bias, eps, bint centered, int threads):
        """What layer_norm or rms_norm returns where all can be taken as it is, else None."""
        cdef Views v
        cdef qkv_float_mode found
        memset(&v, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            return plain(self.isa, x, weight, bias, eps, centered, threads, &v)
        finally:
            release_all(&v)
            qkv_leave_float_mode(found)
