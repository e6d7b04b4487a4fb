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
thread, where enough rows use them.  16-bit numbers become float32 a tile at a time.

Long keys with few rows are cut into splits of 1024 keys, each with its own maximum and sums.  Parts
are merged from left to right, so that the threads change no bit.

What is chosen by shape (blocks, splits, panels or not) is chosen for each item from its own
lengths: never from the batch, the padding or the number of threads.

kernels.h has the arithmetic of a tile, plan.pxi the choices, tiles.pxi the walk over the tiles, and
rows.pxi the beginning and the end of a row.
"""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport INFINITY, NAN, expf, isfinite, isnan, logf
from libc.stdint cimport int64_t, uint8_t, uint16_t
from libc.string cimport memcpy, memset

from qkv_ext._kernels cimport (
    LANES, PANEL, QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, TILE, free_order, new_order, parallel_for,
    qkv_kernels, qkv_order, qkv_row, qkv_run, release, scratch, stopped, table, take_turn,
    wait_turn,
)


cdef enum:
    SPLIT = 1024         # keys of a split, a multiple of TILE
    FEW_ROWS = 8         # up to here dot products with the rows of K beat packing them
    ROWS = 132           # query rows of a task: their scores stay in the second-level cache,
    ORDERED_ROWS = 48    # fewer where rows see different keys
    SLOTS = 4            # parts that may wait for their left neighbour, per thread
    SMALL_WORK = 400000  # multiplications below which no other thread is woken up

cdef double MOST_FLOATS = 1e17


# One item: its arrays from its own first row on, its rules, and its plan.
cdef struct Item:
    const char *q
    const char *k
    const char *v
    const char *mask     # or NULL
    char *out
    char *weights        # or NULL
    char *lse            # or NULL
    const float *slopes  # [heads] or NULL
    Py_ssize_t L, S      # its own lengths
    Py_ssize_t room      # rows that are its own, of which L are there
    Py_ssize_t shift     # query i stands at key i + shift
    Py_ssize_t block, blocks, splits
    bint direct          # dot products with the rows of K, no panels
    Py_ssize_t first_task, first_part


cdef struct Call:
    const qkv_kernels *ops
    # the problem; strides in bytes
    Py_ssize_t heads, kv_heads, group, S, D, Dv
    Py_ssize_t q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row
    Py_ssize_t mask_head, mask_row, mask_step, weights_head, weights_row, lse_head, lse_row
    int kind             # of q, k, v and out: QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16
    bint bool_mask
    const float *sinks   # [heads] or NULL
    float scale, softcap
    Py_ssize_t left, right
    # the plan
    Item *items
    Py_ssize_t count     # of items
    Py_ssize_t block     # the largest block of rows
    Py_ssize_t keys      # keys that panels hold at most
    Py_ssize_t longest   # keys of the longest item
    Py_ssize_t parts     # tasks of items with more than one split
    # working memory: one Desk per worker, and the parts that wait
    char *desks
    size_t desk_size
    char *waiting
    size_t part_size
    Py_ssize_t slots
    qkv_order *order


# What a split leaves behind: unnormalised sums of a block of rows.
cdef struct Part:
    float *sums          # [block, Dv]
    float *max           # [block]
    float *sum           # [block]
    uint8_t *spoilt      # [block], whether the row is allowed a key whose V is not finite


# A worker's memory.
cdef struct Desk:
    Part part
    float *q             # [block, D], scaled
    float *scores        # [block, TILE] TILE + LANES
    float *factor        # [block]
    float *ones          # [block]
    float *panels        # K of a head, or of a tile: [keys / PANEL] panels
    float *k_rows        # [TILE, D], a tile of K that is stored in 16 bits
    float *v_rows        # [TILE, Dv], a tile of V that is, or with its non-finite entries as 0
    float *value         # [Dv], an output row before it is rounded
    float *line          # [longest + LANES], the scores of one row, for the plain formula
    Py_ssize_t *start    # [block], the first column of the tile that a group of rows needs,
    Py_ssize_t *end      # [block], and the end of them, 0 for none; at the group's first row
    uint8_t *packed      # [tiles], which tiles of the head are in panels
    qkv_row *rows        # [block]
    Py_ssize_t *head     # the head that panels belongs to, -1 for none


# Where a task stands.
cdef struct Place:
    const Item *item
    Py_ssize_t head      # item and key/value head as one number
    Py_ssize_t kv_head, first_row, m, split
    Py_ssize_t part      # its number among the tasks of split items
    const char *k
    const char *v


# Rows that come next, to be prefetched while others are read; NOTHING where none are.
cdef struct Ahead:
    const char *rows
    Py_ssize_t stride    # in bytes

cdef Ahead NOTHING = Ahead(NULL, 0)


include "plan.pxi"
include "tiles.pxi"
include "rows.pxi"


# ---- tasks --------------------------------------------------------------------------------------

cdef void find_place(const Call *call, Py_ssize_t index, Place *at) noexcept nogil:
    """The item that holds the task, by bisection, then head, block and split within it."""
    cdef Py_ssize_t low = 0, high = call.count, middle, unit, block
    cdef const Item *item
    while high - low > 1:
        middle = (low + high) // 2
        if call.items[middle].first_task <= index:
            low = middle
        else:
            high = middle
    item = &call.items[low]
    index -= item.first_task
    unit = index // item.splits
    block = unit % item.blocks
    if call.right < item.S:
        block = item.blocks - 1 - block  # in causal order the longest first
    at.item = item
    at.split = index % item.splits
    at.part = item.first_part + index
    at.kv_head = unit // item.blocks
    at.head = low * call.kv_heads + at.kv_head
    at.first_row = block * item.block
    at.m = min(item.block, item.L * call.group - at.first_row)
    at.k = item.k + at.kv_head * call.k_head
    at.v = item.v + at.kv_head * call.v_head


cdef inline void keep_sums(Desk *desk, Py_ssize_t m) noexcept nogil:
    cdef Py_ssize_t r
    for r in range(m):
        desk.part.max[r] = desk.rows[r].max
        desk.part.sum[r] = desk.rows[r].sum


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Place at
    cdef Desk desk
    cdef Part part
    cdef Py_ssize_t r
    cdef bint fine = True
    find_place(call, index, &at)
    # first of all: while it waits, this worker may finish the rows of another task on its desk
    if at.item.splits > 1 and wait_turn(call.order, at.part, worker, run):
        return
    lay_desk(call, call.desks + worker * call.desk_size, &desk)
    if at.item.blocks > 1 and desk.head[0] != at.head:
        memset(desk.packed, 0, call.keys // TILE)
        desk.head[0] = at.head
    start_rows(call, &at, &desk)
    if not walk(call, &at, &desk, False, worker, run):
        return

    if at.item.splits == 1:
        keep_sums(&desk, at.m)
        if not finish_rows(call, &at, &desk, False):
            if not walk(call, &at, &desk, True, worker, run):
                return
            keep_sums(&desk, at.m)
            finish_rows(call, &at, &desk, True)
        return

    for r in range(at.m):  # an accumulator that is not finite: once more, with V cleaned
        fine = call.ops.scaled(desk.part.sums + r * call.Dv, 1.0, desk.part.sums + r * call.Dv,
                               call.Dv) and fine
    if not fine and not walk(call, &at, &desk, True, worker, run):
        return
    keep_sums(&desk, at.m)
    lay_part(call, call.waiting + (1 + at.part % call.slots) * call.part_size, &part)
    copy_part(call, &desk.part, &part, at.m)
    take_turn(call.order, at.part, worker)


cdef void copy_part(const Call *call, const Part *source, Part *target,
                    Py_ssize_t m) noexcept nogil:
    memcpy(target.sums, source.sums, m * call.Dv * sizeof(float))
    memcpy(target.max, source.max, m * sizeof(float))
    memcpy(target.sum, source.sum, m * sizeof(float))
    memcpy(target.spoilt, source.spoilt, m)


cdef void merge_part(const Call *call, const Part *right, Part *left, Py_ssize_t m) noexcept nogil:
    """left becomes left and right together."""
    cdef Py_ssize_t r, d
    cdef float top, base, keep, add
    cdef float *sums
    cdef const float *more
    for r in range(m):
        top = max(left.max[r], right.max[r])
        base = 0.0 if top == -INFINITY else top
        keep = expf(left.max[r] - base)
        add = expf(right.max[r] - base)
        sums = left.sums + r * call.Dv
        more = right.sums + r * call.Dv
        for d in range(call.Dv):
            sums[d] = sums[d] * keep + more[d] * add
        left.sum[r] = left.sum[r] * keep + right.sum[r] * add
        left.max[r] = top
        left.spoilt[r] |= right.spoilt[r]


cdef void retire_part(void *job, Py_ssize_t index, int worker) noexcept nogil:
    """The next part in order joins the total of its rows; the last one finishes them."""
    cdef const Call *call = <const Call *> job
    cdef Place at
    cdef Part total, part
    cdef Desk desk
    cdef Py_ssize_t low = 0, high = call.count, middle
    while high - low > 1:  # items without parts share their first_part with the next: the last wins
        middle = (low + high) // 2
        if call.items[middle].first_part <= index:
            low = middle
        else:
            high = middle
    find_place(call, call.items[low].first_task + index - call.items[low].first_part, &at)
    lay_part(call, call.waiting, &total)
    lay_part(call, call.waiting + (1 + index % call.slots) * call.part_size, &part)
    if at.split == 0:
        copy_part(call, &part, &total, at.m)
    else:
        merge_part(call, &part, &total, at.m)
    if at.split == at.item.splits - 1:
        lay_desk(call, call.desks + worker * call.desk_size, &desk)
        start_rows(call, &at, &desk)
        desk.part = total
        finish_rows(call, &at, &desk, True)


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
    call.slots = SLOTS * threads
    call.desk_size = lay_desk(call, NULL, &desk)
    call.part_size = lay_part(call, NULL, &part) if call.parts else 0
    call.desks = <char *> scratch(<double> call.desk_size * threads
                                  + <double> call.part_size * (1 + call.slots))
    call.waiting = call.desks + call.desk_size * threads
    try:
        if call.parts:
            call.order = new_order(call.slots, retire_part, call)
        for worker in range(threads):
            lay_desk(call, call.desks + worker * call.desk_size, &desk)
            desk.head[0] = -1
            for r in range(call.block):
                desk.ones[r] = 1.0
        with nogil:
            for n in range(call.count):
                if call.items[n].L < call.items[n].room:
                    fill_absent(call, &call.items[n])
            parallel_for(run_task, call, tasks, max(grain, 1), threads)
    finally:
        if call.order != NULL:
            free_order(call.order)
        release(call.desks)
    return 0


cdef struct Views:
    Py_buffer q, k, v, mask, out, weights, lse, slopes, sinks, spans


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
        item.S = call.S
        if x.spans.buf != NULL:
            span = <const int64_t *> x.spans.buf + 7 * n  # the columns of _rules.py
            owner, item.L, item.room, item.S = span[0], span[2], span[3], span[5]
            item.shift = span[6]
        item.q = part_of(&x.q, &x.out, owner)
        item.k = part_of(&x.k, &x.out, owner)
        item.v = part_of(&x.v, &x.out, owner)
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


def attention(problem, int isa):
    """Write problem.out, and weights and lse where the problem has them."""
    cdef Call call
    cdef Views x
    cdef Py_ssize_t axis, n, shift
    cdef int threads
    cdef Item one
    q, k, v, mask, scale, shift, rules, out, weights, lse, threads = <tuple> problem
    left, right, softcap, slopes, sinks, spans = <tuple> rules
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    memset(&one, 0, sizeof(Item))
    if q.itemsize == 2:
        call.kind = QKV_FLOAT16 if q.dtype.kind == "f" else QKV_BFLOAT16
        if call.kind == QKV_BFLOAT16:  # a dtype that the buffer protocol has no name for
            q, k, v, out = (array.view("u2") for array in (q, k, v, out))
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
        call.ops = table(isa)
        call.scale, call.softcap = scale, softcap
        call.left, call.right = left, right
        call.bool_mask = mask is not None and x.mask.itemsize == 1
        call.sinks = <const float *> x.sinks.buf
        call.heads = x.q.shape[x.q.ndim - 3]
        call.D = x.q.shape[x.q.ndim - 1]
        call.kv_heads = x.k.shape[x.k.ndim - 3]
        call.S = x.k.shape[x.k.ndim - 2]
        call.Dv = x.v.shape[x.v.ndim - 1]
        call.count = 1
        for axis in range(x.out.ndim - 3):
            call.count *= x.out.shape[axis]
        if spans is not None:
            call.count = x.spans.shape[0]
        if call.count == 0 or call.heads == 0 or x.out.shape[x.out.ndim - 2] == 0:
            return
        if x.out.len == 0 and weights is None and lse is None:  # Dv is 0: nothing to write
            return
        call.group = call.heads // call.kv_heads
        call.items = &one
        if call.count > 1:
            call.items = <Item *> scratch(<double> call.count * sizeof(Item))
            memset(call.items, 0, call.count * sizeof(Item))
        try:
            for n in range(call.count):
                call.items[n].shift = shift
            describe(&call, &x)
            run(&call, threads)
        finally:
            if call.items != &one:
                release(call.items)
    finally:
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
