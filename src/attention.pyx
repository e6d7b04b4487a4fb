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

Long keys with few rows are cut into splits of 1024 keys, each with its own maximum and sums.
Partials are merged from left to right, so that the threads change no bit.  The keys of a KVCache
are always cut, however many the rows, so that many rows at once have the bits of one row at a time.

What is chosen by shape (blocks, splits, panels or not) is chosen for each item from its own
lengths: never from the batch, the padding or the number of threads.

kernels.h has the arithmetic of a tile, types.pxd the structs and which .pxd has what; here are the
tasks, the call with its arrays and the GIL.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.object cimport PyObject
cimport cython
from libc.float cimport FLT_MAX
from libc.math cimport NAN, isnan, sqrt
from libc.stdint cimport uint8_t
from libc.string cimport memset

from qkv_ext._core._kernels cimport (
    LANES, PANEL, QKV_BFLOAT16, QKV_FLOAT16, QKV_SOFTCAP, TILE, free_sequencer, new_sequencer,
    ordered_commit, ordered_wait, parallel_for, qkv_build, qkv_enter_float_mode, qkv_float_mode,
    qkv_leave_float_mode, qkv_run, release, scratch, table,
)

from src.contract cimport (
    ADDRESSES, COLUMNS, ITEM, K_ADDRESS, K_LENGTH, K_SCALE_ADDRESS, K_START, Q_LENGTH, Q_ROOM,
    Q_START, DIAGONAL, V_ADDRESS, V_SCALE_ADDRESS,
)
from src.types cimport AS_IT_IS, Arena, Call, Item, Partial, Plan, Task, Workspace
from src.plan cimport lay_looked, lay_tasks, task_at
from src.arena cimport bind_leftover, bind_partial, bind_workspace
from src.views cimport (
    Axes, Views, acquire, describe_arrays, describe_items, fit, out_fits, release_buffers,
    view_mask,
)
from src.nonfinite cimport look_at_values
from src.rows cimport fill_absent, finish_rows, start_rows
from src.tiles cimport process_tiles
from src.splits cimport process_split, process_splits, reduce_partial, store_partial
from src.exact cimport redo_rows, redo_unit

import sys

import numpy

from qkv_ext._core import _build, _packed, _problem
from qkv_ext._core._kernels import storage
from qkv_ext._core._options import DEFAULT as NO_OPTIONS

BUILD = qkv_build.decode()


cdef enum:
    SLOTS = 4            # partials that may wait for their left neighbour, per thread
    SMALL_WORK = 400000  # multiplications below which no other thread is woken up

cdef double MOST_FLOATS = 1e17
cdef Py_ssize_t OPEN = min(_problem.OPEN, sys.maxsize // 4)
cdef dict STORAGE = {name: kind for name, (kind, _, _) in storage().items()}
cdef object float32 = numpy.dtype("float32")
cdef object bool_ = numpy.dtype("bool")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty
cdef tuple DEFAULT = tuple(NO_OPTIONS)
cdef Py_ssize_t MASK = NO_OPTIONS._fields.index("mask")
cdef Py_ssize_t CAUSAL = NO_OPTIONS._fields.index("causal")
cdef Py_ssize_t SCALE = NO_OPTIONS._fields.index("scale")
cdef Py_ssize_t LSE = NO_OPTIONS._fields.index("return_lse")
cdef Py_ssize_t OUT = NO_OPTIONS._fields.index("out")
cdef Py_ssize_t COUNT = NO_OPTIONS._fields.index("threads")  # it and what follows may be anything


cdef int compare(python, dict compiled) except -1:
    """ImportError where a constant that is spelt twice is another one in the module of Python."""
    for name, value in compiled.items():
        found = getattr(python, name, None)
        if found != value:
            raise ImportError(f"{name} is {value} where it is compiled and {found} in "
                              f"{python.__name__}; {_build.REINSTALL}")
    return 0


compare(_packed, {"PANEL": PANEL})
compare(_problem, {
    "ITEM": ITEM, "Q_START": Q_START, "Q_LENGTH": Q_LENGTH, "Q_ROOM": Q_ROOM, "K_START": K_START,
    "K_LENGTH": K_LENGTH, "DIAGONAL": DIAGONAL, "COLUMNS": COLUMNS,
    "TILE": TILE, "SLACK": LANES * sizeof(float), "K_ADDRESS": K_ADDRESS, "V_ADDRESS": V_ADDRESS,
    "K_SCALE_ADDRESS": K_SCALE_ADDRESS, "V_SCALE_ADDRESS": V_SCALE_ADDRESS, "ADDRESSES": ADDRESSES,
})


# ---- tasks --------------------------------------------------------------------------------------

cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Task task
    cdef Task after
    cdef const Task *next = NULL
    cdef Workspace ws
    task_at(call, index, &task)
    # first of all: while it waits, this worker may use its workspace for the rows of another task
    if task.item.splits > 1 and ordered_wait(call.arena.sequencer, task.partial, worker, run):
        return
    bind_workspace(call, worker, run, &ws)
    if task.item.blocks > 1 and ws.head[0] != task.head:
        memset(ws.packed, 0, call.plan.keys // TILE)
        ws.head[0] = task.head
    start_rows(call, &task, &ws)
    if task.item.splits > 1:
        if process_split(call, &task, &ws):
            store_partial(call, &task, &ws)
            ordered_commit(call.arena.sequencer, task.partial, worker, run)
        return
    if task.item.splits_per_task > 1:
        if process_splits(call, &task, &ws, AS_IT_IS) and not finish_rows(call, &task, &ws, False):
            redo_rows(call, &task, &ws)
        return
    if index + call.plan.stride < call.plan.tasks and call.shape.page == 0:
        task_at(call, index + call.plan.stride, &after)
        if after.head != task.head:
            next = &after
    if not process_tiles(call, &task, &ws, AS_IT_IS, next) or finish_rows(call, &task, &ws, False):
        return
    if look_at_values(call, &task, &ws):
        redo_rows(call, &task, &ws)


# ---- the call -----------------------------------------------------------------------------------

cdef void *lay_arena(Call *call, int threads) except NULL:
    """The working memory of so many threads; it starts with their workspaces."""
    cdef Arena *arena = &call.arena
    cdef Workspace ws
    cdef Partial partial
    cdef double waiting = 0.0, leftover = 0.0
    cdef Py_ssize_t r
    cdef int worker
    arena.slots = SLOTS * threads
    arena.workspace_size = bind_workspace(call, 0, NULL, &ws)
    if call.plan.partials:
        arena.partial_size = bind_partial(call, NULL, &partial)
        waiting = <double> arena.partial_size * (1 + arena.slots)
        leftover = <double> bind_leftover(call, NULL)
    lay_looked(call, NULL)
    arena.workspaces = <char *> scratch(<double> arena.workspace_size * threads + waiting
                                        + leftover + call.plan.looked)
    arena.waiting = arena.workspaces + arena.workspace_size * threads
    if call.plan.partials:
        bind_leftover(call, arena.waiting + arena.partial_size * (1 + arena.slots))
    if call.plan.looked:
        lay_looked(call, <uint8_t *> arena.waiting + <size_t> (waiting + leftover))
    for worker in range(threads):
        bind_workspace(call, worker, NULL, &ws)
        ws.head[0] = -1
        for r in range(call.plan.block):
            ws.ones[r] = 1.0
            ws.scales[r] = call.rules.scale
    return arena.workspaces


cdef int run(Call *call, int threads) except -1:
    cdef Plan *plan = &call.plan
    cdef Py_ssize_t grain = 1, n
    cdef double work = 0.0
    cdef void *memory
    lay_tasks(call)
    # a broadcast axis can be that long
    if <double> plan.longest * (call.shape.D + 1) > MOST_FLOATS:
        raise MemoryError(f"no memory to work on {plan.longest} keys of D = {call.shape.D}")
    for n in range(plan.count):
        work += <double> plan.items[n].L * min(plan.items[n].S,
                                               call.rules.left + call.rules.right + 1)
    if work * call.shape.heads * (call.shape.D + call.shape.Dv) < SMALL_WORK:
        threads = 1
    threads = <int> min(threads, max(plan.tasks, 1))
    if plan.partials == 0 and plan.count * call.shape.kv_heads >= 4 * threads:
        grain = plan.items[0].blocks  # where items are alike a head stays with its thread
    plan.stride = 1 + (threads - 1) * grain
    memory = lay_arena(call, threads)
    try:
        if plan.partials:
            call.arena.sequencer = new_sequencer(call.arena.slots, reduce_partial, call)
        with nogil:
            if plan.absent:
                parallel_for(fill_absent, call, plan.count * call.shape.heads, 1, threads)
            parallel_for(run_task, call, plan.tasks, max(grain, 1), threads)
            if call.arena.left_over.count > 0:
                parallel_for(redo_unit, call, call.arena.left_over.count, 1, threads)
    finally:
        if call.arena.sequencer != NULL:
            free_sequencer(call.arena.sequencer)
        release(memory)
    return 0


cdef int compute(Call *call, Views *x, Py_ssize_t diagonal, list lengths, int threads) except -1:
    """Sizes, items and strides from the arrays, then the work.

    diagonal is of items without spans.  Where there are lengths, items have so many keys instead
    of S, and the last of them and the last query stand at the same position.
    """
    cdef Py_ssize_t n
    cdef Item one
    describe_arrays(call, x)
    if call.plan.count == 0 or call.shape.heads == 0 or x.out.shape[x.out.ndim - 2] == 0:
        return 0
    if x.out.len == 0 and x.weights.buf == NULL and x.lse.buf == NULL:  # Dv is 0
        return 0
    call.shape.group = call.shape.heads // call.shape.kv_heads
    call.plan.items = &one
    if call.plan.count > 1:
        call.plan.items = <Item *> scratch(<double> call.plan.count * sizeof(Item))
    try:
        describe_items(call, x, diagonal)
        if lengths is not None:
            for n in range(call.plan.count):
                call.plan.items[n].S = lengths[n]
                call.plan.items[n].diagonal = call.plan.items[n].S - x.out.shape[x.out.ndim - 2]
        run(call, threads)
    finally:
        if call.plan.items != &one:
            release(call.plan.items)
    return 0


# The options that calls without a check in Python know.
cdef struct Simple:
    bint causal, lse
    double scale         # NaN is 1/√D
    PyObject *mask       # borrowed, or NULL
    PyObject *out


cdef bint take_simple(tuple given, Simple *simple):
    """Whether nothing was given but those, which are set; mask and out are not looked at."""
    cdef Py_ssize_t n
    simple.causal, simple.lse, simple.scale = False, False, NAN
    simple.mask = simple.out = NULL
    for n in range(COUNT):
        one, default = given[n], DEFAULT[n]
        if one is default:
            continue
        if n == CAUSAL and one is True:
            simple.causal = True
        elif n == SCALE and type(one) is float and -FLT_MAX <= <double> one <= FLT_MAX:
            simple.scale = one
        elif n == MASK:
            simple.mask = <PyObject *> one
        elif n == LSE and one is True:
            simple.lse = True
        elif n == OUT:
            simple.out = <PyObject *> one
        elif not (type(one) is str and type(default) is str and one == default):
            return False
    return True


cdef bint is_simple(tuple given, bint *causal, double *scale):
    """Whether nothing was given but causal and scale, which are set."""
    cdef Simple simple
    cdef bint known = take_simple(given, &simple)
    causal[0], scale[0] = simple.causal, simple.scale
    return known and not simple.lse and simple.mask == NULL and simple.out == NULL


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
        """What such a call returns, of arrays to be taken as they are; else None.

        The options are those of Simple; given is as Given of _options.py has it.
        """
        cdef Simple simple
        if not take_simple(<tuple> given, &simple):
            return None
        return plain(self.isa, q, k, v, &simple, threads)

    @cython.binding(False)
    def plain_attend(self, q, pages, given, int threads):
        """The same for KVCache.attend, of pages of which nothing was dropped."""
        cdef bint causal = False
        cdef double scale = NAN
        if not is_simple(<tuple> given, &causal, &scale):
            return None
        return plain_attend(self.isa, q, pages, causal, scale, threads)


cdef int take_pages(Call *call, Views *x, pages) except -1:
    """Keys and values that lie in pages of _store.py."""
    layout, lengths, rows, first, _, call.rules.large_scales = <tuple> pages
    kind, call.shape.page, call.shape.kv_heads, _, _ = <tuple> layout
    call.shape.stored = STORAGE[kind]
    call.shape.S = max(<list> lengths) if len(<list> lengths) else 0
    acquire(rows, &x.table, PyBUF_STRIDES)
    acquire(first, &x.first, PyBUF_STRIDES)
    return 0


# Where a Problem and its Rules have each of their fields.
cdef struct Fields:
    int q, k, v, mask, scale, diagonal, rules, out, weights, lse, threads, pages

cdef struct RuleFields:
    int left, right, softcap, slopes, sinks, spans, segments, blocks

cdef Fields FIELD = {name: n for n, name in enumerate(_problem.Problem._fields)}
cdef RuleFields RULE = {name: n for n, name in enumerate(_problem.Rules._fields)}


cdef int attend(problem, int isa) except -1:
    cdef Call call
    cdef Views x
    cdef tuple given = <tuple> problem, rules = <tuple> given[FIELD.rules]
    cdef int writable = PyBUF_STRIDES | PyBUF_WRITABLE
    q, k, v, out = given[FIELD.q], given[FIELD.k], given[FIELD.v], given[FIELD.out]
    pages = given[FIELD.pages]
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    if q.itemsize == 2:
        call.shape.kind = QKV_FLOAT16 if q.dtype.kind == "f" else QKV_BFLOAT16
        if call.shape.kind == QKV_BFLOAT16:  # a dtype that the buffer protocol has no name for
            q, k, v, out = (a if a is None else a.view("u2") for a in (q, k, v, out))
    call.shape.stored = call.shape.kind
    call.ops = table(isa)
    call.rules.scale = given[FIELD.scale]
    call.rules.left, call.rules.right = rules[RULE.left], rules[RULE.right]
    if rules[RULE.softcap]:
        call.rules.row.softcap = rules[RULE.softcap]
        call.rules.row.modifiers |= QKV_SOFTCAP
    try:
        acquire(q, &x.q, PyBUF_STRIDES)
        acquire(k, &x.k, PyBUF_STRIDES)
        acquire(v, &x.v, PyBUF_STRIDES)
        acquire(given[FIELD.mask], &x.mask, PyBUF_STRIDES)
        acquire(out, &x.out, writable)
        acquire(given[FIELD.weights], &x.weights, writable)
        acquire(given[FIELD.lse], &x.lse, writable)
        acquire(rules[RULE.slopes], &x.slopes, PyBUF_STRIDES)
        acquire(rules[RULE.sinks], &x.sinks, PyBUF_STRIDES)
        acquire(rules[RULE.spans], &x.spans, PyBUF_STRIDES)
        if rules[RULE.segments] is not None:
            of_q, of_k = <tuple> rules[RULE.segments]
            acquire(of_q, &x.q_segments, PyBUF_STRIDES)
            acquire(of_k, &x.k_segments, PyBUF_STRIDES)
        if rules[RULE.blocks] is not None:
            keep, call.rules.block_rows, call.rules.row.block = <tuple> rules[RULE.blocks]
            acquire(keep, &x.blocks, PyBUF_STRIDES)
        if pages is not None:
            take_pages(&call, &x, pages)
        compute(&call, &x, given[FIELD.diagonal], None, given[FIELD.threads])
    finally:
        release_buffers(&x)
    return 0


# ---- the plain call -----------------------------------------------------------------------------

cdef inline bint is_plain(array) noexcept:
    return type(array) is ndarray and array.dtype is float32


cdef int attend_rows(int isa, const Py_buffer *q, const Py_buffer *out, pages, list lengths,
                     bint causal, double scale, sinks, int threads) except -1:
    """Write out (B, H, L, Dv) for q (B, H, L, D), of contiguous rows and checked against the pages.

    Items have so many keys there, and the last of them and the last query stand at one position.
    scale may be NaN, for 1/√D, and sinks float32 (H,) or None.
    """
    cdef Call call
    cdef Views x
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    try:
        take_pages(&call, &x, pages)
        acquire(sinks, &x.sinks, PyBUF_STRIDES)
        x.q, x.out = q[0], out[0]
        call.shape.S = max(lengths)
        call.ops = table(isa)
        call.rules.scale = <float> (1.0 / sqrt(<double> q.shape[3]) if isnan(scale) else scale)
        call.rules.left, call.rules.right = OPEN, 0 if causal else OPEN
        compute(&call, &x, 0, lengths, threads)
    finally:
        PyBuffer_Release(&x.table)
        PyBuffer_Release(&x.first)
        PyBuffer_Release(&x.sinks)
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
        attend_rows(isa, &of_q, &of_out, pages, lengths, causal, scale, None, threads)
        return out
    finally:
        PyBuffer_Release(&of_q)
        PyBuffer_Release(&of_out)
        qkv_leave_float_mode(found)


cdef bint take_mask(mask, Views *x, Py_buffer *owner, Axes *axes) except -1:
    """The view of a mask that can be read as it is."""
    if type(mask) is not ndarray or not (mask.dtype is bool_ or mask.dtype is float32):
        return False
    PyObject_GetBuffer(mask, owner, PyBUF_STRIDES)
    return view_mask(x, owner, axes)


cdef bint take_out(out, Views *x) except -1:
    """The view of an out that can be written as it is, beside q, k and v."""
    if not is_plain(out):
        return False
    PyObject_GetBuffer(out, &x.out, PyBUF_STRIDES)
    return out_fits(x)


cdef plain(int isa, q, k, v, const Simple *simple, int threads):
    """What a call with these options returns, of arrays to be taken as they are, else None.

    Three quarters of a small call are the checks in Python; what this recognises needs none.
    """
    cdef Call call
    cdef Views x
    cdef Py_buffer of_mask
    cdef Axes axes
    cdef qkv_float_mode found
    if (not (is_plain(q) and is_plain(k) and is_plain(v))
            or (simple.mask != NULL and simple.out != NULL)):  # which may overlap
        return None
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    memset(&of_mask, 0, sizeof(Py_buffer))
    found = qkv_enter_float_mode()
    try:
        PyObject_GetBuffer(q, &x.q, PyBUF_STRIDES)
        PyObject_GetBuffer(k, &x.k, PyBUF_STRIDES)
        PyObject_GetBuffer(v, &x.v, PyBUF_STRIDES)
        if not fit(&x):
            return None
        if simple.mask != NULL and not take_mask(<object> simple.mask, &x, &of_mask, &axes):
            return None
        if simple.out == NULL:
            out = empty(q.shape, float32)
            PyObject_GetBuffer(out, &x.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        else:
            out = <object> simple.out
            if not take_out(out, &x):
                return None
        if simple.lse:
            lse = empty(q.shape[:3], float32)
            PyObject_GetBuffer(lse, &x.lse, PyBUF_STRIDES | PyBUF_WRITABLE)
        call.ops = table(isa)
        call.rules.scale = <float> (1.0 / sqrt(<double> x.q.shape[3]) if isnan(simple.scale)
                                    else simple.scale)
        call.rules.left, call.rules.right = OPEN, 0 if simple.causal else OPEN
        compute(&call, &x, x.k.shape[2] - x.q.shape[2], None, threads)
        return (out, lse) if simple.lse else out
    finally:
        PyBuffer_Release(&of_mask)
        release_buffers(&x)
        qkv_leave_float_mode(found)
