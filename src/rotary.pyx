# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Rotary embedding: the pairs of each row turned by the angles of its position.

    call      items (of the leading axes) x blocks of heads x blocks of positions
      task      one of each: its heads find the rows of the tables in the second-level cache
        row       whole, or in pieces where it is long

A row may lie anywhere, and the result on it.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

cimport cython

from qkv_ext._core._kernels cimport (
    QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, parallel_for, qkv_build, qkv_enter_float_mode,
    qkv_float_mode, qkv_kernels, qkv_leave_float_mode, qkv_prefetch, qkv_run, qkv_stream_end,
    stopped, table,
)

import numpy

from qkv_ext._core._arrays import MAX_NDIM as MOST_AXES

BUILD = qkv_build.decode()


cdef int MAX_NDIM = MOST_AXES
cdef object float16 = numpy.dtype("float16")
cdef object float32 = numpy.dtype("float32")
cdef object int64 = numpy.dtype("int64")
cdef object ndarray = numpy.ndarray
cdef object array = numpy.array
cdef object empty = numpy.empty


cdef enum:
    AXES = 32            # of any array
    PER_TASK = 65536     # numbers of a task, about 20 us
    POSITIONS = 128      # of a task whose heads share them
    SMALL_WORK = 65536   # numbers below which no other thread is woken up
    LONG = 65536         # pairs of a row between two looks at the signals
    LARGE = 1 << 24      # bytes of a result that is written past the caches
    AHEAD = 4096         # bytes that are asked for before they are read, where all is as large


cdef struct Views:
    Py_buffer x, out, cos, sin, at


cdef struct Call:
    const qkv_kernels *ops
    int kind             # of x and out: QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16
    const char *x        # [items..., heads, positions, n]; strides in bytes
    char *out
    const char *cos      # [rows of the tables, columns]
    const char *sin
    const int64_t *at    # [items, positions], which of these rows; NULL for the first ones
    Py_ssize_t at_item, at_row
    Py_ssize_t cos_row, sin_row, x_head, x_row, out_head, out_row
    int axes             # of items
    Py_ssize_t shape[AXES]
    Py_ssize_t x_step[AXES]
    Py_ssize_t out_step[AXES]
    Py_ssize_t heads, positions, n, columns, size
    bint interleaved
    # the plan
    Py_ssize_t head_block, position_block, head_blocks, position_blocks
    bint heads_inside    # they lie closer together than positions
    bint streams         # the result goes past the caches
    Py_ssize_t ahead     # rows from the one that is rotated to the one that is asked for; 0 is none


# Where a task stands.
cdef struct Task:
    const char *x
    char *out
    const int64_t *at
    Py_ssize_t head, end_head, position, end_position


# ---- rows ---------------------------------------------------------------------------------------

cdef bint rotate_row(const Call *call, const char *x, Py_ssize_t position, const int64_t *at,
                     char *out, int worker, qkv_run *run) noexcept nogil:
    """False where the run is stopped."""
    cdef Py_ssize_t row = at[position * call.at_row] if at != NULL else position
    cdef const float *cos = <const float *> (call.cos + row * call.cos_row)
    cdef const float *sin = <const float *> (call.sin + row * call.sin_row)
    cdef Py_ssize_t half = call.columns * call.size, tail = 2 * half, j, place
    for j from 0 <= j < call.columns by LONG:
        if j and stopped(run, worker):
            return False
        place = j * call.size
        if call.interleaved:
            call.ops.rotate_pairs(call.kind, x + 2 * place, cos + j, sin + j, out + 2 * place,
                                  min(LONG, call.columns - j), call.streams)
        else:
            call.ops.rotate_halves(call.kind, x + place, x + half + place, cos + j, sin + j,
                                   out + place, out + half + place,
                                   min(LONG, call.columns - j), call.streams)
    if tail < call.n * call.size and x != out:
        memcpy(out + tail, x + tail, call.n * call.size - tail)
    return True


# ---- tasks --------------------------------------------------------------------------------------

cdef void task_at(const Call *call, Py_ssize_t index, Task *task) noexcept nogil:
    cdef Py_ssize_t i = 0
    cdef int axis
    task.position = index % call.position_blocks * call.position_block
    index //= call.position_blocks
    task.head = index % call.head_blocks * call.head_block
    index //= call.head_blocks
    task.end_position = min(task.position + call.position_block, call.positions)
    task.end_head = min(task.head + call.head_block, call.heads)
    task.x, task.out = call.x, call.out
    for axis in range(call.axes - 1, -1, -1):
        i, index = index % call.shape[axis], index // call.shape[axis]
        task.x += i * call.x_step[axis]
        task.out += i * call.out_step[axis]
    task.at = call.at + i * call.at_item if call.at != NULL else NULL  # of the first axis


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t h, i
    cdef Task task
    task_at(call, index, &task)
    if call.heads_inside:
        for i in range(task.position, task.end_position):
            for h in range(task.head, task.end_head):
                if not rotate_at(call, &task, h, i, call.x_head, worker, run):
                    return
    else:
        for h in range(task.head, task.end_head):
            for i in range(task.position, task.end_position):
                if not rotate_at(call, &task, h, i, call.x_row, worker, run):
                    return
    if call.streams:
        qkv_stream_end()


cdef inline bint rotate_at(const Call *call, const Task *task, Py_ssize_t head,
                           Py_ssize_t position, Py_ssize_t step, int worker,
                           qkv_run *run) noexcept nogil:
    """One row; the next one is a step away."""
    cdef const char *x = task.x + head * call.x_head + position * call.x_row
    cdef char *out = task.out + head * call.out_head + position * call.out_row
    if call.ahead:
        qkv_prefetch(x + call.ahead * step, call.n * call.size)
    return rotate_row(call, x, position, task.at, out, worker, run)


# ---- the call -----------------------------------------------------------------------------------

cdef inline Py_ssize_t stride_of(const Py_buffer *view, int axis) noexcept nogil:
    return view.strides[axis] if view.shape[axis] > 1 else 0


cdef void describe(Call *call, const Views *v, bint blhd) noexcept nogil:
    """Sizes and strides; x and out are (..., positions, heads, n) where blhd."""
    cdef int axis, ndim = v.x.ndim
    cdef int row = ndim - 3 if blhd else ndim - 2, head = ndim - 2 if blhd else ndim - 3
    call.x, call.out = <const char *> v.x.buf, <char *> v.out.buf
    call.cos, call.sin = <const char *> v.cos.buf, <const char *> v.sin.buf
    call.cos_row, call.sin_row = stride_of(&v.cos, 0), stride_of(&v.sin, 0)
    call.n, call.columns, call.size = v.x.shape[ndim - 1], v.cos.shape[1], v.x.itemsize
    call.positions = v.x.shape[row]
    call.x_row, call.out_row = stride_of(&v.x, row), stride_of(&v.out, row)
    call.heads, call.x_head, call.out_head = 1, 0, 0
    if ndim > 3:
        call.heads = v.x.shape[head]
        call.x_head, call.out_head = stride_of(&v.x, head), stride_of(&v.out, head)
    call.axes = 1 if ndim == 3 else max(0, ndim - 3)
    for axis in range(call.axes):
        call.shape[axis] = v.x.shape[axis]
        call.x_step[axis], call.out_step[axis] = v.x.strides[axis], v.out.strides[axis]
    call.at = <const int64_t *> v.at.buf
    call.at_item = call.at_row = 0
    if call.at != NULL:
        call.at_row = stride_of(&v.at, v.at.ndim - 1) // <Py_ssize_t> sizeof(int64_t)
        if v.at.ndim == 2:
            call.at_item = stride_of(&v.at, 0) // <Py_ssize_t> sizeof(int64_t)


cdef inline Py_ssize_t magnitude(Py_ssize_t step) noexcept nogil:
    return -step if step < 0 else step


cdef Py_ssize_t plan(Call *call) noexcept nogil:
    """How many tasks there are."""
    cdef Py_ssize_t items = 1, rows = max(1, PER_TASK // call.n), width = call.n * call.size
    cdef bint large
    cdef int axis
    for axis in range(call.axes):
        items *= call.shape[axis]
    call.position_block = min(call.positions, rows if call.heads == 1 else min(rows, POSITIONS))
    call.head_block = min(call.heads, max(1, rows // call.position_block))
    call.position_blocks = (call.positions + call.position_block - 1) // call.position_block
    call.head_blocks = (call.heads + call.head_block - 1) // call.head_block
    call.heads_inside = call.heads > 1 and magnitude(call.x_head) < magnitude(call.x_row)
    large = <double> items * call.heads * call.positions * width >= LARGE
    call.ahead = max(1, AHEAD // width) if large else 0
    call.streams = large and call.kind == QKV_FLOAT32 and call.x != call.out and aligned(call)
    return items * call.head_blocks * call.position_blocks


cdef bint aligned(const Call *call) noexcept nogil:
    """Whether the results of all kernels' calls start at multiples of 16 bytes."""
    cdef size_t odd = <size_t> call.out | <size_t> call.out_head | <size_t> call.out_row
    cdef int axis
    for axis in range(call.axes):
        odd |= <size_t> call.out_step[axis]
    return odd % 16 == 0 and call.columns % 4 == 0


cdef Py_ssize_t prepare(Call *call, int isa, int kind, bint interleaved, const Views *v,
                        bint blhd) noexcept nogil:
    """Fill in a call of views that fit each other; how many tasks it has."""
    if v.x.len == 0:
        return 0
    call.ops, call.kind, call.interleaved = table(isa), kind, interleaved
    describe(call, v, blhd)
    return plan(call)


cdef int run(int isa, int kind, bint interleaved, const Views *v, bint blhd,
             int threads) except -1:
    cdef Call call
    cdef Py_ssize_t count = prepare(&call, isa, kind, interleaved, v, blhd), grain = 1
    if v.x.len < SMALL_WORK * call.size:
        threads = 1
    if count:
        if call.ahead:  # a thread fills whole huge pages of a result that nobody touched before
            grain = max(1, min(call.position_blocks, count // (4 * threads)))
        with nogil:
            parallel_for(run_task, &call, count, grain, threads)
    return 0


cdef inline int kind_of(x) except -1:
    if x.itemsize == 4:
        return QKV_FLOAT32
    return QKV_FLOAT16 if x.dtype.kind == "f" else QKV_BFLOAT16


cdef int view(Views *v, int kind, x, cos, sin, at, out) except -1:
    if kind == QKV_BFLOAT16:  # a dtype that the buffer protocol has no name for
        x, out = x.view("u2"), out.view("u2")
    PyObject_GetBuffer(x, &v.x, PyBUF_STRIDES)
    PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
    PyObject_GetBuffer(cos, &v.cos, PyBUF_STRIDES)
    PyObject_GetBuffer(sin, &v.sin, PyBUF_STRIDES)
    if at is not None:
        PyObject_GetBuffer(at, &v.at, PyBUF_STRIDES)
    return 0


cdef void release_all(Views *v) noexcept:
    PyBuffer_Release(&v.x)  # does nothing for a view that was not taken
    PyBuffer_Release(&v.out)
    PyBuffer_Release(&v.cos)
    PyBuffer_Release(&v.sin)
    PyBuffer_Release(&v.at)


# Queries and keys of one step.
cdef struct Step:
    Call q, k
    Py_ssize_t q_tasks


cdef void run_either(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef Step *step = <Step *> job
    if index < step.q_tasks:
        run_task(&step.q, index, worker, run)
    else:
        run_task(&step.k, index - step.q_tasks, worker, run)


# ---- the plain call -----------------------------------------------------------------------------

cdef inline bint is_plain(given, dtype) noexcept:
    return type(given) is ndarray and given.dtype is dtype


cdef bint readable(const Py_buffer *view, Py_ssize_t size) noexcept nogil:
    """Whether the numbers of that size are aligned, and those of a row next to each other."""
    cdef size_t odd = <size_t> view.buf
    cdef int axis
    for axis in range(view.ndim - 1):
        odd |= <size_t> view.strides[axis]
    axis = view.ndim - 1
    return odd % size == 0 and (view.strides[axis] == size or view.shape[axis] <= 1)


cdef bint apart(const Py_buffer *out, const Py_buffer *x) noexcept nogil:
    """Whether x lies wholly before or after out, which is contiguous."""
    cdef const char *low = <const char *> x.buf
    cdef const char *high = low + x.itemsize
    cdef Py_ssize_t reach
    cdef int axis
    for axis in range(x.ndim):
        reach = (x.shape[axis] - 1) * x.strides[axis]
        if reach < 0:
            low += reach
        else:
            high += reach
    return high <= <const char *> out.buf or low >= <const char *> out.buf + out.len


cdef bint same_place(const Py_buffer *x, const Py_buffer *out) noexcept nogil:
    cdef int axis
    for axis in range(x.ndim):
        if x.shape[axis] > 1 and x.strides[axis] != out.strides[axis]:
            return False
    return x.buf == out.buf


cdef bint fit(const Views *v, bint blhd, rotary_dim) except -1:
    """Whether x and the tables of a plain call go together as they are."""
    cdef Py_ssize_t n, width
    if (not (4 if blhd else 2) <= v.x.ndim <= MAX_NDIM or v.x.len == 0 or v.cos.ndim != 2
            or v.sin.ndim != 2 or v.cos.shape[0] != v.sin.shape[0]
            or v.cos.shape[1] != v.sin.shape[1]
            or not (readable(&v.x, v.x.itemsize) and readable(&v.cos, sizeof(float))
                    and readable(&v.sin, sizeof(float)))):
        return False
    n = width = v.x.shape[v.x.ndim - 1]
    if rotary_dim is not None:
        if type(rotary_dim) is not int or not 0 <= rotary_dim <= n:
            return False
        width = rotary_dim
    return 2 * v.cos.shape[1] == width


cdef bint within(const Views *v, bint blhd) noexcept:
    """Whether positions, where there are any, are rows of the tables."""
    cdef Py_ssize_t length = v.x.shape[v.x.ndim - (3 if blhd else 2)], i
    cdef const int64_t *at = <const int64_t *> v.at.buf
    if at == NULL:
        return length <= v.cos.shape[0]
    if (<size_t> at % sizeof(int64_t) or not PyBuffer_IsContiguous(&v.at, b"C")
            or v.at.shape[v.at.ndim - 1] != length
            or not (v.at.ndim == 1 or v.x.ndim > 2 and v.at.shape[0] == v.x.shape[0])):
        return False
    for i in range(v.at.len // <Py_ssize_t> sizeof(int64_t)):
        if not 0 <= at[i] < v.cos.shape[0]:
            return False
    return True


cdef bint writable(const Views *v) noexcept nogil:
    """Whether the caller's out is where the result can be written at once."""
    cdef int axis
    if v.out.ndim != v.x.ndim or not readable(&v.out, v.out.itemsize):
        return False
    for axis in range(v.x.ndim):
        if v.out.shape[axis] != v.x.shape[axis]:
            return False
    return ((same_place(&v.x, &v.out) or apart(&v.out, &v.x))
            and apart(&v.out, &v.cos) and apart(&v.out, &v.sin)
            and (v.at.buf == NULL or apart(&v.out, &v.at)))


cdef plain_positions(positions):
    """Positions of a plain call as an array, None where they want a look from rotary.py."""
    if type(positions) is list and len(positions) and type((<list> positions)[0]) is int:
        try:
            positions = array(positions)
        except Exception:
            return None
    return positions if is_plain(positions, int64) and 1 <= positions.ndim <= 2 else None


cdef plain(int isa, x, cos, sin, positions, interleaved, rotary_dim, layout, out, int threads,
           Views *v):
    cdef bint blhd
    cdef int kind = QKV_FLOAT32
    if is_plain(x, float16):
        kind = QKV_FLOAT16
    elif not is_plain(x, float32):
        return None
    if (not is_plain(cos, float32) or not is_plain(sin, float32)
            or interleaved is not False and interleaved is not True
            or type(layout) is not str or layout != "bhld" and layout != "blhd"):
        return None
    blhd = layout != "bhld"
    if positions is not None:
        positions = plain_positions(positions)
        if positions is None:
            return None
        PyObject_GetBuffer(positions, &v.at, PyBUF_STRIDES)
    PyObject_GetBuffer(x, &v.x, PyBUF_STRIDES)
    PyObject_GetBuffer(cos, &v.cos, PyBUF_STRIDES)
    PyObject_GetBuffer(sin, &v.sin, PyBUF_STRIDES)
    if not fit(v, blhd, rotary_dim) or not within(v, blhd):
        return None
    if out is None:
        out = empty(x.shape, x.dtype)
        PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
    else:
        if not is_plain(out, x.dtype) or not out.flags.carray:  # which is writable, too
            return None
        PyObject_GetBuffer(out, &v.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        if not writable(v):
            return None
    run(isa, kind, interleaved is True, v, blhd, threads)
    return out


@cython.auto_pickle(False)
cdef class Rotary:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, problem):
        """Write problem.out, the rows of problem.x turned; see Rotation in _problem.py."""
        cdef Views v
        cdef int kind
        cdef qkv_float_mode found
        x, cos, sin, positions, interleaved, out, threads = <tuple> problem
        kind = kind_of(x)
        memset(&v, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            view(&v, kind, x, cos, sin, positions, out)
            run(self.isa, kind, interleaved, &v, False, threads)
        finally:
            release_all(&v)
            qkv_leave_float_mode(found)

    def step(self, queries, keys):
        """compute for the queries and the keys of one step of a layer, in one run of the pool.

        Both are as compute takes them, of one dtype, and nothing is checked: x (..., H, L, D) and
        (..., Hkv, S, D) of any strides with contiguous rows, float32 tables (n, rotary_dim / 2) of
        contiguous rows, int64 positions (L,) or (B, L) below n, or None for 0 to L - 1, and out,
        which is x or shares no memory with anything else.  The threads are those of the queries.
        """
        cdef Step step
        cdef Views q, k
        cdef int kind
        cdef Py_ssize_t k_tasks
        cdef qkv_float_mode found
        x, cos, sin, positions, interleaved, out, threads = <tuple> queries
        kind = kind_of(x)
        memset(&q, 0, sizeof(Views))
        memset(&k, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            view(&q, kind, x, cos, sin, positions, out)
            step.q_tasks = prepare(&step.q, self.isa, kind, interleaved, &q, False)
            x, cos, sin, positions, interleaved, out, _ = <tuple> keys
            view(&k, kind, x, cos, sin, positions, out)
            k_tasks = prepare(&step.k, self.isa, kind, interleaved, &k, False)
            if q.x.len + k.x.len < SMALL_WORK * q.x.itemsize:
                threads = 1
            if step.q_tasks + k_tasks:
                run_step(&step, step.q_tasks + k_tasks, threads)
        finally:
            release_all(&q)
            release_all(&k)
            qkv_leave_float_mode(found)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, x, cos, sin, positions, interleaved, rotary_dim, layout, out, int threads):
        """What apply_rotary returns where all can be taken as it is, else None."""
        cdef Views v
        cdef qkv_float_mode found
        memset(&v, 0, sizeof(Views))
        found = qkv_enter_float_mode()
        try:
            return plain(self.isa, x, cos, sin, positions, interleaved, rotary_dim, layout, out,
                         threads, &v)
        finally:
            release_all(&v)
            qkv_leave_float_mode(found)


cdef int run_step(Step *step, Py_ssize_t count, int threads) except -1:
    with nogil:
        parallel_for(run_either, step, count, 1, threads)
    return 0
