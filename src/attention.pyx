# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Batched attention: tasks, key tiles, the online softmax, and the merging of split keys.

    call      items (of a batch, or sequences of a packed one) x key/value heads
                x blocks of query rows x splits of the keys
      task      one of each: a block of rows against a split of the keys
        tile      256 keys: scores = Q Kᵀ, weights = exp(scores - max),
                  sums = factor sums + weights V

The query rows of all heads that share a key/value head are one list, row r being head r % group at
position r // group: one pass over the keys serves them all.  A task works on contiguous copies of
its rows, [rows, D] and [rows, Dv], that fit the cache; keys become panels, once per head and
thread, where enough rows use them.  16-bit and 8-bit numbers become float32 a tile at a time, or
as they are multiplied, where few rows use them.

Long keys with few rows are cut into splits of 1024 keys, each with its own maximum and sums.  Parts
are merged from left to right, so that the threads change no bit.  The keys of a KVCache always are,
however many the rows, so that many rows at once have the bits of one row at a time.

What is chosen by shape (blocks, splits, panels or not) is chosen for each item from its own
lengths: never from the batch, the padding or the number of threads.

kernels.h has the arithmetic of a tile, types.pxd the structs and which .pxd has what; here are the
tasks, the call with its arrays and the GIL.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
cimport cython
from libc.float cimport FLT_MAX
from libc.math cimport NAN, isnan, sqrt
from libc.stdint cimport int64_t
from libc.string cimport memset

from qkv_ext._kernels cimport (
    QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, QKV_INT8, TILE, free_order, new_order, parallel_for,
    qkv_build, qkv_enter_float_mode, qkv_float_mode, qkv_leave_float_mode, qkv_run, release,
    scratch, table, take_turn, wait_turn,
)

from src.types cimport AS_IT_IS, Call, Desk, Item, Part, Place
from src.plan cimport find_place, plan
from src.arena cimport lay_desk, lay_left_over, lay_part
from src.nonfinite cimport look_at_values
from src.rows cimport fill_absent, finish_rows, start_rows
from src.tiles cimport walk
from src.splits cimport leave_part, retire_part, walk_split, walk_splits
from src.exact cimport redo_rows, redo_unit

import sys

import numpy

from qkv_ext._options import DEFAULT as NO_OPTIONS
from qkv_ext._problem import OPEN as NO_LIMIT

BUILD = qkv_build.decode()


cdef enum:
    SLOTS = 4            # parts that may wait for their left neighbour, per thread
    SMALL_WORK = 400000  # multiplications below which no other thread is woken up

cdef double MOST_FLOATS = 1e17
cdef Py_ssize_t OPEN = min(NO_LIMIT, sys.maxsize // 4)
cdef dict STORAGE = {"float32": QKV_FLOAT32, "float16": QKV_FLOAT16, "bfloat16": QKV_BFLOAT16,
                     "int8": QKV_INT8}
cdef object float32 = numpy.dtype("float32")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty
cdef tuple DEFAULT = tuple(NO_OPTIONS)
cdef Py_ssize_t CAUSAL = NO_OPTIONS._fields.index("causal")
cdef Py_ssize_t SCALE = NO_OPTIONS._fields.index("scale")
cdef Py_ssize_t COUNT = NO_OPTIONS._fields.index("threads")  # it and what follows may be anything


# ---- tasks --------------------------------------------------------------------------------------

cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Place at
    cdef Place after
    cdef const Place *next = NULL
    cdef Desk desk
    find_place(call, index, &at)
    # first of all: while it waits, this worker may finish the rows of another task on its desk
    if at.item.splits > 1 and wait_turn(call.order, at.part, worker, run):
        return
    lay_desk(call, call.desks + worker * call.desk_size, &desk)
    if at.item.blocks > 1 and desk.head[0] != at.head:
        memset(desk.packed, 0, call.keys // TILE)
        desk.head[0] = at.head
    start_rows(call, &at, &desk)
    if at.item.splits > 1:
        if walk_split(call, &at, &desk, worker, run):
            leave_part(call, &at, &desk)
            take_turn(call.order, at.part, worker, run)
        return
    if at.item.passes > 1:
        if (walk_splits(call, &at, &desk, worker, run)
                and not finish_rows(call, &at, &desk, False, worker, run)):
            redo_rows(call, &at, &desk, worker, run)
        return
    if index + call.stride < call.tasks and call.page == 0:
        find_place(call, index + call.stride, &after)
        if after.head != at.head:
            next = &after
    if (not walk(call, &at, &desk, AS_IT_IS, next, worker, run)
            or finish_rows(call, &at, &desk, False, worker, run)):
        return
    if look_at_values(call, &at, &desk, worker, run):
        redo_rows(call, &at, &desk, worker, run)


# ---- the call -----------------------------------------------------------------------------------

cdef int run(Call *call, int threads) except -1:
    cdef Py_ssize_t tasks = plan(call), grain = 1, n, worker, r
    cdef double work = 0.0
    cdef Desk desk
    cdef Part part
    if <double> call.longest * (call.D + 1) > MOST_FLOATS:  # a broadcast axis can be that long
        raise MemoryError(f"no memory to work on {call.longest} keys of D = {call.D}")
    for n in range(call.count):
        work += <double> call.items[n].L * min(call.items[n].S, call.left + call.right + 1)
    if work * call.heads * (call.D + call.Dv) < SMALL_WORK:
        threads = 1
    threads = <int> min(threads, max(tasks, 1))
    if call.parts == 0 and call.count * call.kv_heads >= 4 * threads:
        grain = call.items[0].blocks  # where items are alike a head stays with its thread
    call.tasks, call.stride = tasks, 1 + (threads - 1) * grain
    call.slots = SLOTS * threads
    call.desk_size = lay_desk(call, NULL, &desk)
    call.part_size = lay_part(call, NULL, &part) if call.parts else 0
    call.desks = <char *> scratch(<double> call.desk_size * threads
                                  + <double> call.part_size * (1 + call.slots)
                                  + <double> (lay_left_over(call, NULL) if call.parts else 0))
    call.waiting = call.desks + call.desk_size * threads
    if call.parts:
        lay_left_over(call, call.waiting + call.part_size * (1 + call.slots))
    try:
        if call.parts:
            call.order = new_order(call.slots, retire_part, call)
        for worker in range(threads):
            lay_desk(call, call.desks + worker * call.desk_size, &desk)
            desk.head[0] = -1
            for r in range(call.block):
                desk.ones[r] = 1.0
                desk.scales[r] = call.scale
        with nogil:
            if call.absent:
                parallel_for(fill_absent, call, call.count * call.heads, 1, threads)
            parallel_for(run_task, call, tasks, max(grain, 1), threads)
            if call.left_over.count > 0:
                parallel_for(redo_unit, call, call.left_over.count, 1, threads)
    finally:
        if call.order != NULL:
            free_order(call.order)
        release(call.desks)
    return 0


cdef struct Views:
    Py_buffer q, k, v, mask, out, weights, lse, slopes, sinks, spans, table, first


cdef inline char *part_of(const Py_buffer *x, const Py_buffer *out, Py_ssize_t item) noexcept nogil:
    """The start of a batch item; leading axes of length 1 broadcast.  NULL where there is no x."""
    cdef char *at = <char *> x.buf
    cdef Py_ssize_t axis, n
    if x.buf == NULL:
        return NULL
    for axis in range(out.ndim - 4, -1, -1):
        n = out.shape[axis]
        if x.shape[axis] != 1:
            at += item % n * x.strides[axis]
        item //= n
    return at


cdef inline Py_ssize_t stride_of(const Py_buffer *x, int axis) noexcept nogil:
    """The stride of an axis counted from the end, in bytes; 0 where it broadcasts."""
    if x.buf == NULL or x.shape[x.ndim - axis] == 1:
        return 0
    return x.strides[x.ndim - axis]


cdef void describe(Call *call, const Views *x) noexcept nogil:
    """The strides of the arrays, and the items, from the spans where there are any."""
    cdef Py_ssize_t n, owner, rows = x.out.shape[x.out.ndim - 2]
    cdef const int64_t *span = NULL
    cdef Item *item
    call.q_head, call.q_row = stride_of(&x.q, 3), stride_of(&x.q, 2)
    call.k_head, call.k_row = stride_of(&x.k, 3), stride_of(&x.k, 2)
    call.v_head, call.v_row = stride_of(&x.v, 3), stride_of(&x.v, 2)
    call.out_head, call.out_row = stride_of(&x.out, 3), stride_of(&x.out, 2)
    call.mask_head, call.mask_row = stride_of(&x.mask, 3), stride_of(&x.mask, 2)
    call.mask_step = 1 if stride_of(&x.mask, 1) else 0
    call.weights_head, call.weights_row = stride_of(&x.weights, 3), stride_of(&x.weights, 2)
    call.lse_head, call.lse_row = stride_of(&x.lse, 2), stride_of(&x.lse, 1)
    for n in range(call.count):
        item = &call.items[n]
        owner = n
        item.L = item.room = rows
        if x.spans.buf != NULL:
            span = <const int64_t *> x.spans.buf + 7 * n  # the columns of _problem.py
            owner, item.L, item.room, item.S = span[0], span[2], span[3], span[5]
            item.shift = span[6]
        item.q = part_of(&x.q, &x.out, owner)
        item.k = part_of(&x.k, &x.out, owner)
        item.v = part_of(&x.v, &x.out, owner)
        if call.page:
            item.pages = (<const int64_t *> x.table.buf
                          + 4 * (<const int64_t *> x.first.buf)[owner])
        item.mask = part_of(&x.mask, &x.out, owner)
        item.out = part_of(&x.out, &x.out, owner)
        item.weights = part_of(&x.weights, &x.out, owner)
        item.lse = part_of(&x.lse, &x.out, owner)
        if x.slopes.buf != NULL:
            item.slopes = <const float *> x.slopes.buf
            if x.slopes.shape[0] > 1:
                item.slopes += n * call.heads
        if span != NULL:  # a sequence of a packed batch starts at rows of its own
            item.q += span[1] * call.q_row
            item.out += span[1] * call.out_row
            item.lse = item.lse + span[1] * call.lse_row if item.lse != NULL else NULL
            item.k += span[4] * call.k_row
            item.v += span[4] * call.v_row


cdef inline int acquire(array, Py_buffer *view, int flags) except -1:
    if array is not None:
        PyObject_GetBuffer(array, view, flags)
    return 0


cdef int compute(Call *call, Views *x, Py_ssize_t shift, list lengths, int threads) except -1:
    """Sizes, items and strides from the arrays, then the work.

    shift is of items without spans.  Where there are lengths, items have so many keys instead of S,
    and the last of them and the last query stand at the same position.
    """
    cdef Py_ssize_t axis, n
    cdef Item one
    call.sinks = <const float *> x.sinks.buf
    call.bool_mask = x.mask.buf != NULL and x.mask.itemsize == 1
    call.heads = x.q.shape[x.q.ndim - 3]
    call.D = x.q.shape[x.q.ndim - 1]
    call.Dv = x.out.shape[x.out.ndim - 1]
    if call.page == 0:
        call.kv_heads = x.k.shape[x.k.ndim - 3]
        call.S = x.k.shape[x.k.ndim - 2]
    call.count = 1
    for axis in range(x.out.ndim - 3):
        call.count *= x.out.shape[axis]
    if x.spans.buf != NULL:
        call.count = x.spans.shape[0]
    if call.count == 0 or call.heads == 0 or x.out.shape[x.out.ndim - 2] == 0:
        return 0
    if x.out.len == 0 and x.weights.buf == NULL and x.lse.buf == NULL:  # Dv is 0
        return 0
    call.group = call.heads // call.kv_heads
    call.items = &one
    if call.count > 1:
        call.items = <Item *> scratch(<double> call.count * sizeof(Item))
    try:
        memset(call.items, 0, call.count * sizeof(Item))
        for n in range(call.count):
            call.items[n].S, call.items[n].shift = call.S, shift
            if lengths is not None:
                call.items[n].S = lengths[n]
                call.items[n].shift = call.items[n].S - x.out.shape[x.out.ndim - 2]
        describe(call, x)
        run(call, threads)
    finally:
        if call.items != &one:
            release(call.items)
    return 0


cdef void let_go(Views *x) noexcept:
    PyBuffer_Release(&x.q)
    PyBuffer_Release(&x.k)
    PyBuffer_Release(&x.v)
    PyBuffer_Release(&x.mask)
    PyBuffer_Release(&x.out)
    PyBuffer_Release(&x.weights)
    PyBuffer_Release(&x.lse)
    PyBuffer_Release(&x.slopes)
    PyBuffer_Release(&x.sinks)
    PyBuffer_Release(&x.spans)
    PyBuffer_Release(&x.table)
    PyBuffer_Release(&x.first)


cdef bint is_simple(tuple given, bint *causal, double *scale):
    """Whether nothing was given but causal and scale, which are set; NaN is 1/√D."""
    cdef Py_ssize_t n
    causal[0], scale[0] = False, NAN
    for n in range(COUNT):
        one, default = given[n], DEFAULT[n]
        if one is default:
            continue
        if n == CAUSAL and one is True:
            causal[0] = True
        elif n == SCALE and type(one) is float and -FLT_MAX <= <double> one <= FLT_MAX:
            scale[0] = one
        elif not (type(one) is str and type(default) is str and one == default):
            return False
    return True


@cython.auto_pickle(False)
cdef class Attention:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, problem):
        """Write problem.out, and weights and lse where the problem has them."""
        cdef qkv_float_mode found = qkv_enter_float_mode()
        try:
            attend(problem, self.isa)
        finally:
            qkv_leave_float_mode(found)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, q, k, v, given, int threads):
        """The output with causal and scale alone, of arrays to be taken as they are, else None.

        given is as Given of _options.py has it.
        """
        cdef bint causal
        cdef double scale
        if not is_simple(<tuple> given, &causal, &scale):
            return None
        return plain(self.isa, q, k, v, causal, scale, threads)

    @cython.binding(False)
    def plain_attend(self, q, pages, given, int threads):
        """The same for KVCache.attend, of pages of which nothing was dropped."""
        cdef bint causal
        cdef double scale
        if not is_simple(<tuple> given, &causal, &scale):
            return None
        return plain_attend(self.isa, q, pages, causal, scale, threads)


cdef int take_pages(Call *call, Views *x, pages) except -1:
    """Keys and values that lie in pages of _store.py."""
    layout, lengths, rows, first, _, call.large_scales = <tuple> pages
    kind, call.page, call.kv_heads, _, _ = <tuple> layout
    call.stored = STORAGE[kind]
    call.S = max(<list> lengths) if len(<list> lengths) else 0
    acquire(rows, &x.table, PyBUF_STRIDES)
    acquire(first, &x.first, PyBUF_STRIDES)
    return 0


cdef int attend(problem, int isa) except -1:
    cdef Call call
    cdef Views x
    q, k, v, mask, scale, shift, rules, out, weights, lse, threads, pages = <tuple> problem
    left, right, softcap, slopes, sinks, spans = <tuple> rules
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    if q.itemsize == 2:
        call.kind = QKV_FLOAT16 if q.dtype.kind == "f" else QKV_BFLOAT16
        if call.kind == QKV_BFLOAT16:  # a dtype that the buffer protocol has no name for
            q, k, v, out = (a if a is None else a.view("u2") for a in (q, k, v, out))
    call.stored = call.kind
    call.ops = table(isa)
    call.scale, call.softcap = scale, softcap
    call.left, call.right = left, right
    try:
        acquire(q, &x.q, PyBUF_STRIDES)
        acquire(k, &x.k, PyBUF_STRIDES)
        acquire(v, &x.v, PyBUF_STRIDES)
        acquire(mask, &x.mask, PyBUF_STRIDES)
        acquire(out, &x.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        acquire(weights, &x.weights, PyBUF_STRIDES | PyBUF_WRITABLE)
        acquire(lse, &x.lse, PyBUF_STRIDES | PyBUF_WRITABLE)
        acquire(slopes, &x.slopes, PyBUF_STRIDES)
        acquire(sinks, &x.sinks, PyBUF_STRIDES)
        acquire(spans, &x.spans, PyBUF_STRIDES)
        if pages is not None:
            take_pages(&call, &x, pages)
        compute(&call, &x, shift, None, threads)
    finally:
        let_go(&x)
    return 0


# ---- the plain call -----------------------------------------------------------------------------

cdef inline bint is_plain(array) noexcept:
    return type(array) is ndarray and array.dtype is float32


cdef bint fit(Views *x) noexcept:
    """Whether q, k and v are aligned and contiguous, of rank 4, and of shapes that go together."""
    cdef Py_buffer *views[3]
    cdef int n
    views[0], views[1], views[2] = &x.q, &x.k, &x.v
    for n in range(3):
        if (views[n].ndim != 4 or views[n].len == 0 or <size_t> views[n].buf % sizeof(float)
                or not PyBuffer_IsContiguous(views[n], b"C")):
            return False
    return (x.q.shape[0] == x.k.shape[0] and x.q.shape[3] == x.k.shape[3] > 0
            and x.k.shape[1] > 0 and x.q.shape[1] % x.k.shape[1] == 0
            and x.k.shape[0] == x.v.shape[0] and x.k.shape[1] == x.v.shape[1]
            and x.k.shape[2] == x.v.shape[2] and x.k.shape[3] == x.v.shape[3])


cdef int attend_rows(int isa, const Py_buffer *q, const Py_buffer *out, pages, list lengths,
                     bint causal, double scale, int threads) except -1:
    """Write out (B, H, L, Dv) for q (B, H, L, D), of contiguous rows and checked against the pages.

    Items have so many keys there, and the last of them and the last query stand at one position.
    """
    cdef Call call
    cdef Views x
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    try:
        take_pages(&call, &x, pages)
        x.q, x.out = q[0], out[0]
        call.S = max(lengths)
        call.ops = table(isa)
        call.scale = <float> (1.0 / sqrt(<double> q.shape[3]) if isnan(scale) else scale)
        call.left, call.right = OPEN, 0 if causal else OPEN
        compute(&call, &x, 0, lengths, threads)
    finally:
        PyBuffer_Release(&x.table)
        PyBuffer_Release(&x.first)
    return 0


cdef plain_attend(int isa, q, pages, bint causal, double scale, int threads):
    """The output of a call of KVCache.attend with these options, where q can be taken as it is."""
    cdef Py_buffer of_q, of_out
    cdef Py_ssize_t heads, d, dv
    cdef list lengths
    cdef qkv_float_mode found
    layout, lengths, _, _, _, _ = <tuple> pages
    _, _, heads, d, dv = <tuple> layout
    if not is_plain(q):
        return None
    memset(&of_q, 0, sizeof(Py_buffer))
    memset(&of_out, 0, sizeof(Py_buffer))
    found = qkv_enter_float_mode()
    try:
        PyObject_GetBuffer(q, &of_q, PyBUF_STRIDES)
        if (of_q.ndim != 4 or of_q.len == 0 or <size_t> of_q.buf % sizeof(float)
                or not PyBuffer_IsContiguous(&of_q, b"C") or of_q.shape[0] != len(lengths)
                or of_q.shape[3] != d or heads == 0 or of_q.shape[1] % heads):
            return None
        out = empty(q.shape if dv == d else (*q.shape[:3], dv), float32)
        PyObject_GetBuffer(out, &of_out, PyBUF_STRIDES | PyBUF_WRITABLE)
        attend_rows(isa, &of_q, &of_out, pages, lengths, causal, scale, threads)
        return out
    finally:
        PyBuffer_Release(&of_q)
        PyBuffer_Release(&of_out)
        qkv_leave_float_mode(found)


cdef plain(int isa, q, k, v, bint causal, double scale, int threads):
    """The output of a call with these options, of arrays to be taken as they are, else None.

    Three quarters of a small call are the checks in Python; what this recognises needs none.
    """
    cdef Call call
    cdef Views x
    cdef qkv_float_mode found
    if not (is_plain(q) and is_plain(k) and is_plain(v)):
        return None
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    found = qkv_enter_float_mode()
    try:
        PyObject_GetBuffer(q, &x.q, PyBUF_STRIDES)
        PyObject_GetBuffer(k, &x.k, PyBUF_STRIDES)
        PyObject_GetBuffer(v, &x.v, PyBUF_STRIDES)
        if not fit(&x):
            return None
        out = empty(q.shape, float32)
        PyObject_GetBuffer(out, &x.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        call.ops = table(isa)
        call.scale = <float> (1.0 / sqrt(<double> x.q.shape[3]) if isnan(scale) else scale)
        call.left, call.right = OPEN, 0 if causal else OPEN
        compute(&call, &x, x.k.shape[2] - x.q.shape[2], None, threads)
        return out
    finally:
        let_go(&x)
        qkv_leave_float_mode(found)
