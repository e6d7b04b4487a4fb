# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Parts of split keys merged: lse = log Σ exp lse_n, output = Σ exp(lse_n - lse) output_n.

    call      blocks of rows
      task      one of each: the weights of all parts, many rows at a time
        row       the weighted sum of the parts that have a key, from the first to the last

A row's bits are those of the row alone.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.string cimport memcpy, memset

cimport cython

from qkv_ext._core._kernels cimport (
    QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, parallel_for, qkv_build, qkv_enter_float_mode,
    qkv_float_mode, qkv_kernels, qkv_leave_float_mode, qkv_run, release, scratch, stopped, table,
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
    ROWS = 64            # of a task at most, a multiple of LANES
    PER_TASK = 65536     # numbers of a task that it reads, about 10 us
    SMALL_WORK = 131072  # numbers below which no other thread is woken up
    MOST_AT_ONCE = 1 << 22  # numbers between two looks at the signals,
    FEW_COLUMNS = 64     # but of no fewer columns than these
    LARGE = 1 << 24      # bytes of parts that no cache holds
    HUGE = 1 << 21       # bytes of a huge page


# Where the rows of a part lie, or those of the result.
cdef struct Part:
    char *x              # [..., n]
    char *lse            # [...]
    Py_ssize_t x_step[AXES]
    Py_ssize_t lse_step[AXES]


cdef struct Call:
    const qkv_kernels *ops
    int kind             # of x: QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16
    int axes             # of rows; those that follow each other in all parts are one
    Py_ssize_t shape[AXES]
    Py_ssize_t count, n, rows, per_task
    Py_ssize_t size      # of a number of x
    Py_ssize_t piece     # columns at a time
    bint large           # no cache holds the parts
    Part *parts          # [count + 1], the last of which is the result
    char *workspaces     # one Workspace per worker
    size_t workspace_size


# A worker's memory.
cdef struct Workspace:
    const char **base    # [count], the first row of a run in each part,
    Py_ssize_t *step     # [count], and from one to the next
    const char **x       # [count], a piece of a long row
    float *s             # [count, ROWS], logarithms, then weights of all parts
    float *lse           # [ROWS]


cdef void bind_workspace(const Call *call, Py_ssize_t worker, Workspace *ws) noexcept nogil:
    cdef char *at = call.workspaces + worker * call.workspace_size
    ws.s = <float *> at
    ws.lse = ws.s + call.count * ROWS
    ws.base = <const char **> (ws.lse + ROWS)
    ws.step = <Py_ssize_t *> (ws.base + call.count)
    ws.x = <const char **> (ws.step + call.count)


cdef inline double size_of_workspace(Py_ssize_t count) noexcept nogil:
    cdef double size = (count * <double> ROWS + ROWS) * sizeof(float)
    return (size + 3.0 * count * sizeof(void *)) // 64 * 64 + 64


cdef Py_ssize_t find_run(const Call *call, Py_ssize_t row, Py_ssize_t end,
                         Py_ssize_t *index) noexcept nogil:
    """The index of a row, and how many rows follow on the last axis, itself included."""
    cdef int axis
    for axis in range(call.axes - 1, -1, -1):
        index[axis] = row % call.shape[axis]
        row //= call.shape[axis]
    return min(end, call.shape[call.axes - 1] - index[call.axes - 1])


cdef inline char *place(char *at, const Py_ssize_t *step, const Py_ssize_t *index,
                        int axes) noexcept nogil:
    cdef int axis
    for axis in range(axes):
        at += index[axis] * step[axis]
    return at


cdef void run_task(void *job, Py_ssize_t task, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t first = task * call.per_task, m = min(call.per_task, call.rows - first)
    cdef Py_ssize_t r, i, j, length, step
    cdef Py_ssize_t index[AXES]
    cdef int last = call.axes - 1
    cdef const Part *part
    cdef const Part *result = call.parts + call.count
    cdef char *at
    cdef Workspace ws
    bind_workspace(call, worker, &ws)
    r = 0
    while r < m:  # pass 1: the logarithms
        length = find_run(call, first + r, m - r, index)
        for i in range(call.count):
            part = call.parts + i
            at = place(part.lse, part.lse_step, index, call.axes)
            step = part.lse_step[last]
            if step == sizeof(float):
                memcpy(ws.s + i * ROWS + r, at, length * sizeof(float))
            else:
                for j in range(length):
                    ws.s[i * ROWS + r + j] = (<const float *> (at + j * step))[0]
        r += length
    call.ops.merge_weights(ws.s, ROWS, call.count, m, ws.lse)
    r = 0
    while r < m:  # pass 2: the rows
        length = find_run(call, first + r, m - r, index)
        for i in range(call.count):
            part = call.parts + i
            ws.base[i] = place(part.x, part.x_step, index, call.axes)
            ws.step[i] = part.x_step[last]
        at = place(result.lse, result.lse_step, index, call.axes)
        for j in range(length):
            (<float *> (at + j * result.lse_step[last]))[0] = ws.lse[r + j]
        at = place(result.x, result.x_step, index, call.axes)
        step = result.x_step[last]
        if call.n <= call.piece:
            call.ops.merge_rows(call.kind, ws.base, ws.step, ws.s + r, ROWS, call.count, at,
                                step, length, call.n, call.large)
        elif not merge_long(call, &ws, r, length, at, step, worker, run):
            return
        r += length


cdef bint merge_long(const Call *call, Workspace *ws, Py_ssize_t row, Py_ssize_t length, char *out,
                     Py_ssize_t out_step, int worker, qkv_run *run) noexcept nogil:
    """The same for rows that take long, piece by piece; False where the run is stopped."""
    cdef Py_ssize_t i, j, start
    for j in range(length):
        for start from 0 <= start < call.n by call.piece:
            if stopped(run, worker):
                return False
            for i in range(call.count):
                ws.x[i] = ws.base[i] + j * ws.step[i] + start * call.size
            call.ops.merge_rows(call.kind, ws.x, ws.step, ws.s + row + j, ROWS, call.count,
                                out + j * out_step + start * call.size, 0, 1,
                                min(call.piece, call.n - start), call.large)
    return True


cdef void lay_part(Part *part, const Py_buffer *x, const Py_buffer *lse, bint blhd) noexcept nogil:
    """The axes of rows are those of the lse; of x the last two of them are swapped in blhd."""
    cdef int axis, axes = lse.ndim
    part.x, part.lse = <char *> x.buf, <char *> lse.buf
    for axis in range(axes):
        part.x_step[axis] = x.strides[axis]
        part.lse_step[axis] = lse.strides[axis]
    if blhd:
        part.x_step[axes - 2], part.x_step[axes - 1] = x.strides[axes - 1], x.strides[axes - 2]


cdef bint follow(const Call *call, int before, int axis) noexcept nogil:
    """Whether an axis goes on where another ends, in every array."""
    cdef Py_ssize_t i, n = call.shape[axis]
    for i in range(call.count + 1):
        if (call.parts[i].x_step[before] != n * call.parts[i].x_step[axis]
                or call.parts[i].lse_step[before] != n * call.parts[i].lse_step[axis]):
            return False
    return True


cdef void join_axes(Call *call, const Py_buffer *lse) noexcept nogil:
    """As few axes of rows as will do, at least one."""
    cdef Py_ssize_t i
    cdef int axis, at, kept = 0
    for axis in range(lse.ndim):
        call.shape[axis] = lse.shape[axis]
        if call.shape[axis] == 1 and (kept or axis < lse.ndim - 1):
            continue
        at = kept
        if kept and follow(call, kept - 1, axis):
            at = kept - 1
            call.shape[at] *= call.shape[axis]
        else:
            call.shape[at] = call.shape[axis]
            kept += 1
        for i in range(call.count + 1):
            call.parts[i].x_step[at] = call.parts[i].x_step[axis]
            call.parts[i].lse_step[at] = call.parts[i].lse_step[axis]
    call.axes = kept


cdef int run(Call *call, const Py_buffer *views, bint blhd, int threads) except -1:
    """Views are those of the parts and the result, x and lse in turn."""
    cdef Py_ssize_t i, tasks, grain = 1
    cdef const Py_buffer *x = views + 2 * call.count
    cdef const Py_buffer *lse = x + 1
    cdef double size = size_of_workspace(call.count)
    call.rows = lse.len // <Py_ssize_t> sizeof(float)
    call.n = x.shape[x.ndim - 1]
    if call.rows == 0:
        return 0
    call.per_task = PER_TASK // max(1, call.count * call.n)
    call.per_task = max(1, min(ROWS, call.per_task))
    tasks = (call.rows + call.per_task - 1) // call.per_task
    if <double> call.rows * call.n * call.count < SMALL_WORK:
        threads = 1
    threads = <int> min(threads, tasks)
    call.size = x.itemsize
    call.piece = max(FEW_COLUMNS, MOST_AT_ONCE // call.count // 64 * 64)
    call.large = <double> x.len * call.count >= LARGE
    if call.large:  # a thread fills whole huge pages of a result that nobody touched before
        grain = max(1, min(HUGE // max(1, call.per_task * call.n * call.size),
                           tasks // (4 * threads)))
    call.workspaces = <char *> scratch(size * threads + (call.count + 1.0) * sizeof(Part))
    try:
        call.workspace_size = <size_t> size
        call.parts = <Part *> (call.workspaces + call.workspace_size * threads)
        for i in range(call.count + 1):
            lay_part(call.parts + i, views + 2 * i, views + 2 * i + 1, blhd)
        join_axes(call, lse)
        with nogil:
            parallel_for(run_task, call, tasks, grain, threads)
    finally:
        release(call.workspaces)
    return 0


cdef bint fit(const Py_buffer *views, Py_ssize_t count) noexcept:
    """Whether all is aligned and contiguous."""
    cdef Py_ssize_t i
    for i in range(count):
        if <size_t> views[i].buf % sizeof(float) or not PyBuffer_IsContiguous(&views[i], b"C"):
            return False
    return True


cdef bint merge(int isa, int kind, list arrays, bint blhd, bint known, int threads) except -1:
    """arrays are x and lse of each part in turn, then of the result.

    False where it is not known that the kernels can read them, and they cannot.
    """
    cdef Call call
    cdef Py_ssize_t i, count = len(arrays)
    cdef Py_buffer *views = <Py_buffer *> scratch(<double> count * sizeof(Py_buffer))
    memset(views, 0, count * sizeof(Py_buffer))
    try:
        for i in range(count):
            PyObject_GetBuffer(arrays[i], &views[i],
                               PyBUF_STRIDES | (PyBUF_WRITABLE if i >= count - 2 else 0))
        if not known and not fit(views, count):
            return False
        call.ops, call.kind, call.count = table(isa), kind, count // 2 - 1
        run(&call, views, blhd, threads)
        return True
    finally:
        for i in range(count):
            PyBuffer_Release(&views[i])  # does nothing for a view that was not taken
        release(views)


cdef list in_turn(outputs, lses):
    """The parts of a plain call, x and lse in turn; None where they want a look from merge.py."""
    cdef list arrays = []
    cdef tuple shape = None
    cdef Py_ssize_t n
    if (type(outputs) is not list and type(outputs) is not tuple
            or type(lses) is not list and type(lses) is not tuple
            or len(outputs) == 0 or len(outputs) != len(lses)):
        return None
    for n in range(len(outputs)):
        output, lse = outputs[n], lses[n]
        if (type(output) is not ndarray or output.dtype is not float32
                or type(lse) is not ndarray or lse.dtype is not float32):
            return None
        if n == 0:
            shape = output.shape
            if not 2 <= len(shape) <= MAX_NDIM:
                return None
        if output.shape != shape or lse.shape != shape[:len(shape) - 1]:
            return None
        arrays.append(output)
        arrays.append(lse)
    return arrays


@cython.auto_pickle(False)
cdef class Merge:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, outputs, lses, output, lse, bint blhd, int threads):
        """Write output and lse, the merge of lists of parts that are checked.

        outputs are (..., H, L, Dv), or (..., L, H, Dv) where blhd, of contiguous rows; lses are
        float32 (..., H, L).
        """
        cdef int kind = QKV_FLOAT32
        cdef list arrays = []
        cdef qkv_float_mode found
        if output.itemsize == 2:
            kind = QKV_FLOAT16 if output.dtype.kind == "f" else QKV_BFLOAT16
        for pair in (*zip(outputs, lses), (output, lse)):
            # bfloat16 is a dtype that the buffer protocol has no name for
            arrays.append(pair[0].view("u2") if kind == QKV_BFLOAT16 else pair[0])
            arrays.append(pair[1])
        found = qkv_enter_float_mode()
        try:
            merge(self.isa, kind, arrays, blhd, True, threads)
        finally:
            qkv_leave_float_mode(found)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, outputs, lses, int threads):
        """(output, lse) of parts in bhld that can be taken as they are, else None."""
        cdef list arrays = in_turn(outputs, lses)
        cdef qkv_float_mode found
        if arrays is None:
            return None
        result = empty(arrays[0].shape, float32), empty(arrays[1].shape, float32)
        arrays.extend(result)
        found = qkv_enter_float_mode()
        try:
            return result if merge(self.isa, QKV_FLOAT32, arrays, False, False, threads) else None
        finally:
            qkv_leave_float_mode(found)
