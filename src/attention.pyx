# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Batched attention: tasks, key tiles, the online softmax, and the merging of split keys.

    call      batch items x key/value heads x blocks of query rows x splits of the keys
      task      one of each: a block of rows against a split of the keys
        tile      256 keys: scores = Q Kᵀ; weights = exp(scores - max); sums = factor sums + weights V

The query rows of all heads that share a key/value head are one list, row r being head r % group at
position r // group: one pass over the keys serves them all.  A task works on contiguous copies of
its rows, [rows, D] and [rows, Dv], that fit the cache; keys become panels, once per head and
thread, where enough rows use them.

Long keys with few rows are cut into splits of 1024 keys, each with its own maximum and sums.  Parts
are merged from left to right, so that the threads change no bit.

What is chosen by shape (blocks, splits, panels or not) never depends on the batch, on the other
items or on the number of threads.  See kernels.h for the arithmetic of a tile.
"""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport INFINITY, NAN, expf, isfinite, isnan, logf
from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memset

from qkv_ext._kernels cimport (
    LANES, PANEL, TILE, free_order, new_order, parallel_for, qkv_kernels, qkv_order, qkv_row,
    qkv_run, release, scratch, stopped, table, take_turn, wait_turn,
)


cdef enum:
    SPLIT = 1024         # keys of a split, a multiple of TILE
    FEW_ROWS = 8         # up to here dot products with the rows of K beat packing them
    ROWS = 132           # query rows of a task: their scores stay in the second-level cache,
    CAUSAL_ROWS = 48     # fewer where rows end at different keys
    SLOTS = 4            # parts that may wait for their left neighbour, per thread
    SMALL_WORK = 400000  # multiplications below which no other thread is woken up


cdef double MOST_FLOATS = 1e17


cdef struct Call:
    const qkv_kernels *ops
    # the problem
    Py_buffer q, k, v, out, mask
    bint has_mask, bool_mask
    float *weights
    float *lse
    Py_ssize_t heads, kv_heads, group, L, S, D, Dv
    Py_ssize_t offset
    bint causal
    float scale
    # the plan
    Py_ssize_t block, blocks, splits
    bint direct          # dot products with the rows of K, no panels
    # working memory: one Desk per worker, and the parts that wait
    char *desks
    size_t desk_size
    char *parts
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
    float *clean         # [TILE, Dv], a tile of V with its non-finite entries read as 0
    float *line          # [S], the scores of one row, for the plain formula
    uint8_t *packed      # [tiles], which tiles of the head are in panels
    qkv_row *rows        # [block]
    Py_ssize_t *head     # the head that panels belongs to, -1 for none


# Where a task stands.
cdef struct Place:
    Py_ssize_t item, kv_head, first_row, m, split
    const char *k
    const char *v


# ---- memory ---------------------------------------------------------------------------------------

cdef inline void *carve(char **at, size_t count, size_t size) noexcept nogil:
    """The next count elements, on a cache line of their own."""
    cdef char *start = at[0]
    at[0] = start + (count * size + 63) // 64 * 64
    return start


cdef size_t lay_part(const Call *call, char *memory, Part *part) noexcept nogil:
    cdef char *at = memory
    part.sums = <float *> carve(&at, call.block * call.Dv, sizeof(float))
    part.max = <float *> carve(&at, call.block, sizeof(float))
    part.sum = <float *> carve(&at, call.block, sizeof(float))
    part.spoilt = <uint8_t *> carve(&at, call.block, sizeof(uint8_t))
    return at - memory


cdef size_t lay_desk(const Call *call, char *memory, Desk *desk) noexcept nogil:
    """Lay out a worker's memory from there on; returns what it takes."""
    cdef Py_ssize_t keys = TILE if call.blocks == 1 else (call.S + TILE - 1) // TILE * TILE
    cdef char *at = memory
    at += lay_part(call, at, &desk.part)
    desk.head = <Py_ssize_t *> carve(&at, 1, sizeof(Py_ssize_t))
    desk.rows = <qkv_row *> carve(&at, call.block, sizeof(qkv_row))
    desk.q = <float *> carve(&at, call.block * call.D, sizeof(float))
    desk.scores = <float *> carve(&at, call.block * (TILE + LANES), sizeof(float))
    desk.factor = <float *> carve(&at, call.block, sizeof(float))
    desk.ones = <float *> carve(&at, call.block, sizeof(float))
    desk.packed = <uint8_t *> carve(&at, keys // TILE, sizeof(uint8_t))
    desk.panels = <float *> carve(&at, 0 if call.direct else keys * call.D, sizeof(float))
    desk.clean = <float *> carve(&at, TILE * call.Dv, sizeof(float))
    desk.line = <float *> carve(&at, call.S, sizeof(float))
    return at - memory


cdef inline const char *item_of(const Call *call, const Py_buffer *x, Py_ssize_t item) noexcept nogil:
    """The start of a batch item; leading axes of length 1 broadcast."""
    cdef const char *at = <const char *> x.buf
    cdef Py_ssize_t axis, n
    for axis in range(call.out.ndim - 4, -1, -1):
        n = call.out.shape[axis]
        if x.shape[axis] != 1:
            at += item % n * x.strides[axis]
        item //= n
    return at


cdef inline Py_ssize_t head_stride(const Py_buffer *x) noexcept nogil:
    return x.strides[x.ndim - 3] if x.shape[x.ndim - 3] != 1 else 0


cdef inline Py_ssize_t row_stride(const Py_buffer *x) noexcept nogil:
    return x.strides[x.ndim - 2] if x.shape[x.ndim - 2] != 1 else 0


# ---- rows and their rules -------------------------------------------------------------------------

cdef void start_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    """Gather the scaled query rows of a task, and what each of them is allowed to see."""
    cdef const char *q = item_of(call, &call.q, at.item)
    cdef const char *mask = item_of(call, &call.mask, at.item) if call.has_mask else NULL
    cdef const char *mask_row
    cdef const float *source
    cdef qkv_row *row
    cdef Py_ssize_t r, i, h
    for r in range(at.m):
        i = (at.first_row + r) // call.group
        h = at.kv_head * call.group + (at.first_row + r) % call.group
        source = <const float *> (q + h * head_stride(&call.q) + i * row_stride(&call.q))
        call.ops.scaled(source, call.scale, desk.q + r * call.D, call.D)

        row = &desk.rows[r]
        row.lo = 0
        row.hi = min(max(i + call.offset + 1, 0), call.S) if call.causal else call.S
        row.keep = NULL
        row.bias = NULL
        row.mask_step = 0
        if call.has_mask:
            mask_row = mask + h * head_stride(&call.mask) + i * row_stride(&call.mask)
            if call.mask.shape[call.mask.ndim - 1] != 1 and call.mask.strides[call.mask.ndim - 1]:
                row.mask_step = 1
            if call.bool_mask:
                row.keep = <const uint8_t *> mask_row
            else:
                row.bias = <const float *> mask_row
        row.scores = NULL
        if call.weights != NULL:
            row.scores = call.weights + ((at.item * call.heads + h) * call.L + i) * call.S


cdef inline bint allowed(const qkv_row *row, Py_ssize_t j) noexcept nogil:
    """Whether the row may see key j: the rules that softmax_tile applies, for one key."""
    return (row.lo <= j < row.hi
            and (row.keep == NULL or row.keep[j * row.mask_step])
            and (row.bias == NULL or row.bias[j * row.mask_step] != -INFINITY))


cdef Py_ssize_t furthest(const qkv_row *rows, Py_ssize_t m) noexcept nogil:
    """The end of the keys that any of m rows may see."""
    cdef Py_ssize_t r, hi = 0
    for r in range(m):
        hi = max(hi, rows[r].hi)
    return hi


# ---- a task: tiles of keys ------------------------------------------------------------------------

cdef const float *packed_tile(const Call *call, const Place *at, Desk *desk,
                              Py_ssize_t tile) noexcept nogil:
    """The panels of the tile's keys: packed when first used, kept while the head stays."""
    cdef Py_ssize_t n = min(TILE, call.S - tile), stride = row_stride(&call.k), c
    cdef bint kept = call.blocks > 1
    cdef float *panels = desk.panels + (tile * call.D if kept else 0)
    if kept and desk.packed[tile // TILE]:
        return panels
    for c from 0 <= c < n by PANEL:
        call.ops.pack(<const float *> (at.k + (tile + c) * stride), stride // <Py_ssize_t> sizeof(float),
                      panels + c * call.D, min(PANEL, n - c), call.D)
    if kept:
        desk.packed[tile // TILE] = 1
    return panels


cdef void score_tile(const Call *call, const Place *at, Desk *desk, Py_ssize_t tile, Py_ssize_t n,
                     Py_ssize_t step) noexcept nogil:
    """scores[m, n] = Q Kᵀ of a tile, for step rows at a time and no further than they see."""
    cdef Py_ssize_t lds = TILE + LANES, stride = row_stride(&call.k), r, c, d, cols, depth
    cdef const float *panels
    if call.direct:
        call.ops.dots(desk.q, call.D, <const float *> (at.k + tile * stride),
                      stride // <Py_ssize_t> sizeof(float), desk.scores, lds, at.m, n, call.D,
                      <const float *> (at.v + tile * row_stride(&call.v)),
                      row_stride(&call.v) // <Py_ssize_t> sizeof(float))
        return
    panels = packed_tile(call, at, desk, tile)
    for c from 0 <= c < n by PANEL:
        for r from 0 <= r < at.m by step:
            cols = min(PANEL, n - c, furthest(desk.rows + r, min(step, at.m - r)) - tile - c)
            cols = (cols + LANES - 1) // LANES * LANES  # panels have whole vectors
            for d from 0 <= d < (max(call.D, 1) if cols > 0 else 0) by TILE:  # D may be 0
                depth = min(TILE, call.D - d)
                call.ops.product(desk.q + r * call.D + d, call.D, panels + c * call.D + d * PANEL,
                                 PANEL, desk.scores + r * lds + c, lds,
                                 desk.ones if d else NULL, min(step, at.m - r), cols, depth, NULL, 0)


cdef void clean_tile(const Call *call, const Place *at, Desk *desk, Py_ssize_t tile,
                     Py_ssize_t n) noexcept nogil:
    """Copy a tile of V with non-finite entries read as 0, and mark the rows that may see one."""
    cdef Py_ssize_t j, d, r, stride = row_stride(&call.v)
    cdef const float *source
    cdef float *target
    cdef bint spoilt
    for j in range(n):
        source = <const float *> (at.v + (tile + j) * stride)
        target = desk.clean + j * call.Dv
        spoilt = False
        for d in range(call.Dv):
            target[d] = source[d] if isfinite(source[d]) else 0.0
            spoilt = spoilt or not isfinite(source[d])
        if spoilt:
            for r in range(at.m):
                desk.part.spoilt[r] |= allowed(desk.rows + r, tile + j)


cdef bint walk(const Call *call, const Place *at, Desk *desk, bint clean, int worker,
               qkv_run *run) noexcept nogil:
    """The task's rows over the key tiles of its split; False where the run was stopped.

    clean: with the non-finite entries of V read as 0, in the same order and by the same kernels.
    """
    cdef Py_ssize_t lds = TILE + LANES, start = at.split * SPLIT, end = furthest(desk.rows, at.m)
    cdef Py_ssize_t tile, n, step, r, cols, least = call.S, ldv
    cdef const float *v
    cdef const float *next
    for r in range(at.m):
        desk.rows[r].max = -INFINITY
        desk.rows[r].sum = 0.0
        least = min(least, desk.rows[r].hi)
    memset(desk.part.sums, 0, at.m * call.Dv * sizeof(float))
    memset(desk.part.spoilt, 0, at.m)
    if call.splits > 1:
        end = min(end, start + SPLIT)
    for tile from start <= tile < end by TILE:
        if stopped(run, worker):
            return False
        n = min(TILE, end - tile)
        step = at.m if least >= tile + n or call.direct else call.ops.rows
        score_tile(call, at, desk, tile, n, step)
        next = NULL
        if call.direct and tile + TILE < end:
            next = <const float *> (at.k + (tile + TILE) * row_stride(&call.k))
        if clean:
            clean_tile(call, at, desk, tile, n)
            v = desk.clean
            ldv = call.Dv
        else:
            v = <const float *> (at.v + tile * row_stride(&call.v))
            ldv = row_stride(&call.v) // <Py_ssize_t> sizeof(float)
        for r from 0 <= r < at.m by step:
            cols = min(n, furthest(desk.rows + r, min(step, at.m - r)) - tile)
            if cols <= 0:
                continue
            call.ops.softmax_tile(desk.scores + r * lds, lds, min(step, at.m - r), cols, tile,
                                  desk.rows + r, desk.factor + r)
            call.ops.product(desk.scores + r * lds, lds, v, ldv, desk.part.sums + r * call.Dv,
                             call.Dv, desk.factor + r, min(step, at.m - r), call.Dv, cols, next,
                             row_stride(&call.k) // <Py_ssize_t> sizeof(float))
    return True


# ---- the end of a row -----------------------------------------------------------------------------

cdef void plain_row(const Call *call, const Place *at, Desk *desk, Py_ssize_t r, float *out,
                    float *lse) noexcept nogil:
    """The plain formula over the allowed keys of one row, in key order; zeros where there are none.

    Weights are divided by the denominator before they meet V, as the formula has it, so that what
    is finite there is finite here.
    """
    cdef qkv_row *row = &desk.rows[r]
    cdef float *line = desk.line
    cdef Py_ssize_t tile, j, d, n, count = 0, stride = row_stride(&call.k)
    cdef float top = -INFINITY, sum = 0.0, weight
    cdef const float *v
    for tile from row.lo // TILE * TILE <= tile < row.hi by TILE:
        n = min(TILE, row.hi - tile)
        call.ops.dots(desk.q + r * call.D, call.D, <const float *> (at.k + tile * stride),
                      stride // <Py_ssize_t> sizeof(float), line + tile, TILE, 1, n, call.D,
                      NULL, 0)
    for j in range(row.lo, row.hi):
        if not allowed(row, j):
            line[j] = -INFINITY
            continue
        count += 1
        if row.bias != NULL:
            line[j] += row.bias[j * row.mask_step]
        if line[j] > top or isnan(line[j]):
            top = line[j]  # once NaN, nothing is larger
    if count == 0:
        memset(out, 0, call.Dv * sizeof(float))
        if row.scores != NULL:
            memset(row.scores, 0, call.S * sizeof(float))
        lse[0] = -INFINITY
        return
    call.ops.weights(line + row.lo, top, 1.0, line + row.lo, row.hi - row.lo)
    for j in range(row.lo, row.hi):
        if allowed(row, j):
            sum += line[j]
    lse[0] = top + logf(sum)
    if row.scores != NULL:
        for j in range(call.S):
            row.scores[j] = line[j] / sum if allowed(row, j) else 0.0
    for d in range(call.Dv):
        out[d] = NAN if isnan(sum) else 0.0
    for j in range(row.lo, row.hi if not isnan(sum) else row.lo):
        if allowed(row, j):
            weight = line[j] / sum
            v = <const float *> (at.v + j * row_stride(&call.v))
            for d in range(call.Dv):
                out[d] += weight * v[d]


cdef bint finish_rows(const Call *call, const Place *at, Desk *desk, bint last) noexcept nogil:
    """out = sums / sum, with weights and lse; returns whether every row came out right.

    A row whose sums are not finite, or that summed up nothing, is left to the plain formula where
    this is the last try.
    """
    cdef char *out = <char *> item_of(call, &call.out, at.item)
    cdef Part *part = &desk.part
    cdef Py_ssize_t r, i, h
    cdef float *target
    cdef float lse, inverse
    cdef qkv_row *row
    cdef bint fine, all_fine = True
    for r in range(at.m):
        i = (at.first_row + r) // call.group
        h = at.kv_head * call.group + (at.first_row + r) % call.group
        target = <float *> (out + h * head_stride(&call.out) + i * row_stride(&call.out))
        row = &desk.rows[r]
        inverse = 1.0 / part.sum[r]
        fine = part.sum[r] > 0.0 and not part.spoilt[r]
        fine = fine and call.ops.scaled(part.sums + r * call.Dv, inverse, target, call.Dv)
        if fine:
            lse = part.max[r] + logf(part.sum[r])
            if row.scores != NULL:
                call.ops.weights(row.scores + row.lo, part.max[r], inverse, row.scores + row.lo,
                                 row.hi - row.lo)
                memset(row.scores, 0, row.lo * sizeof(float))
                memset(row.scores + row.hi, 0, (call.S - row.hi) * sizeof(float))
        elif last:
            plain_row(call, at, desk, r, target, &lse)
        else:
            all_fine = False
            continue
        if call.lse != NULL:
            call.lse[(at.item * call.heads + h) * call.L + i] = lse
    return all_fine


# ---- tasks ----------------------------------------------------------------------------------------

cdef void find_place(const Call *call, Py_ssize_t index, Place *at) noexcept nogil:
    cdef Py_ssize_t unit = index // call.splits
    cdef Py_ssize_t head = unit // call.blocks, block = unit % call.blocks
    if call.causal:
        block = call.blocks - 1 - block  # the longest first
    at.split = index % call.splits
    at.item = head // call.kv_heads
    at.kv_head = head % call.kv_heads
    at.first_row = block * call.block
    at.m = min(call.block, call.L * call.group - at.first_row)
    at.k = item_of(call, &call.k, at.item) + at.kv_head * head_stride(&call.k)
    at.v = item_of(call, &call.v, at.item) + at.kv_head * head_stride(&call.v)


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Place at
    cdef Desk desk
    cdef Part waiting
    cdef Py_ssize_t r, head
    cdef bint fine = True
    # first of all: while it waits, this worker may finish the rows of another task on its desk
    if call.splits > 1 and wait_turn(call.order, index, worker, run):
        return
    find_place(call, index, &at)
    lay_desk(call, call.desks + worker * call.desk_size, &desk)
    head = at.item * call.kv_heads + at.kv_head
    if call.blocks > 1 and desk.head[0] != head:
        memset(desk.packed, 0, (call.S + TILE - 1) // TILE)
        desk.head[0] = head
    start_rows(call, &at, &desk)
    if not walk(call, &at, &desk, False, worker, run):
        return

    if call.splits == 1:
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
    lay_part(call, call.parts + (1 + index % call.slots) * call.part_size, &waiting)
    copy_part(call, &desk.part, &waiting, at.m)
    take_turn(call.order, index, worker)


cdef inline void keep_sums(Desk *desk, Py_ssize_t m) noexcept nogil:
    cdef Py_ssize_t r
    for r in range(m):
        desk.part.max[r] = desk.rows[r].max
        desk.part.sum[r] = desk.rows[r].sum


cdef void copy_part(const Call *call, const Part *source, Part *target, Py_ssize_t m) noexcept nogil:
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
    find_place(call, index, &at)
    lay_part(call, call.parts, &total)
    lay_part(call, call.parts + (1 + index % call.slots) * call.part_size, &part)
    if at.split == 0:
        copy_part(call, &part, &total, at.m)
    else:
        merge_part(call, &part, &total, at.m)
    if at.split == call.splits - 1:
        lay_desk(call, call.desks + worker * call.desk_size, &desk)
        start_rows(call, &at, &desk)
        desk.part = total
        finish_rows(call, &at, &desk, True)


# ---- the call -------------------------------------------------------------------------------------

cdef void plan(Call *call) noexcept nogil:
    """Blocks and splits, from the shape of a head alone: never from the batch or the threads."""
    cdef Py_ssize_t rows = call.L * call.group
    cdef Py_ssize_t most = CAUSAL_ROWS if call.causal else ROWS
    call.direct = rows <= FEW_ROWS
    call.blocks = (rows + most - 1) // most
    call.block = (rows + call.blocks - 1) // call.blocks
    if not call.direct:  # whole register tiles
        call.block = (call.block + call.ops.rows - 1) // call.ops.rows * call.ops.rows
        call.blocks = (rows + call.block - 1) // call.block
    call.splits = 1
    if call.blocks == 1 and call.S > SPLIT:
        call.splits = (call.S + SPLIT - 1) // SPLIT


cdef int run(Call *call, Py_ssize_t items, int threads) except -1:
    cdef Py_ssize_t tasks, grain = 1, heads = items * call.kv_heads, worker, r
    cdef double work = <double> items * call.heads * call.L * call.S * (call.D + call.Dv)
    cdef Desk desk
    cdef Part part
    if <double> call.S * (call.D + 1) > MOST_FLOATS:  # a broadcast axis can be that long
        raise MemoryError(f"no memory to work on S = {call.S} keys of D = {call.D}")
    plan(call)
    tasks = heads * call.blocks * call.splits
    if work < SMALL_WORK:
        threads = 1
    threads = <int> min(threads, tasks)
    if call.splits == 1 and heads >= 4 * threads:
        grain = call.blocks  # a head stays with its thread: it is packed once
    call.slots = SLOTS * threads
    call.desk_size = lay_desk(call, NULL, &desk)
    call.part_size = lay_part(call, NULL, &part) if call.splits > 1 else 0
    call.desks = <char *> scratch(<double> call.desk_size * threads
                                  + <double> call.part_size * (1 + call.slots))
    call.parts = call.desks + call.desk_size * threads
    try:
        if call.splits > 1:
            call.order = new_order(call.slots, retire_part, call)
        for worker in range(threads):
            lay_desk(call, call.desks + worker * call.desk_size, &desk)
            desk.head[0] = -1
            for r in range(call.block):
                desk.ones[r] = 1.0
        with nogil:
            parallel_for(run_task, call, tasks, grain, threads)
    finally:
        if call.order != NULL:
            free_order(call.order)
        release(call.desks)
    return 0


def attention(problem, int isa):
    """Write problem.out, and weights and lse where the problem has them."""
    cdef Call call
    cdef Py_buffer weights, lse
    cdef Py_ssize_t items = 1, axis
    cdef int nd
    q, k, v, mask, scale, causal, offset, out, problem_weights, problem_lse, threads = problem
    memset(&call, 0, sizeof(Call))
    memset(&weights, 0, sizeof(Py_buffer))
    memset(&lse, 0, sizeof(Py_buffer))
    try:
        PyObject_GetBuffer(q, &call.q, PyBUF_STRIDES)
        PyObject_GetBuffer(k, &call.k, PyBUF_STRIDES)
        PyObject_GetBuffer(v, &call.v, PyBUF_STRIDES)
        PyObject_GetBuffer(out, &call.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        if mask is not None:
            PyObject_GetBuffer(mask, &call.mask, PyBUF_STRIDES)
            call.has_mask = True
            call.bool_mask = call.mask.itemsize == 1
        if problem_weights is not None:
            PyObject_GetBuffer(problem_weights, &weights, PyBUF_STRIDES | PyBUF_WRITABLE)
            call.weights = <float *> weights.buf
        if problem_lse is not None:
            PyObject_GetBuffer(problem_lse, &lse, PyBUF_STRIDES | PyBUF_WRITABLE)
            call.lse = <float *> lse.buf
        nd = call.q.ndim
        call.ops = table(isa)
        call.scale = scale
        call.causal = causal
        call.offset = offset
        call.heads = call.q.shape[nd - 3]
        call.L = call.q.shape[nd - 2]
        call.D = call.q.shape[nd - 1]
        call.kv_heads = call.k.shape[nd - 3]
        call.S = call.k.shape[nd - 2]
        call.Dv = call.v.shape[nd - 1]
        for axis in range(nd - 3):
            items *= call.out.shape[axis]
        if items == 0 or call.heads == 0 or call.L == 0:
            return
        call.group = call.heads // call.kv_heads
        run(&call, items, threads)
    finally:
        PyBuffer_Release(&call.q)
        PyBuffer_Release(&call.k)
        PyBuffer_Release(&call.v)
        PyBuffer_Release(&call.out)
        PyBuffer_Release(&call.mask)
        PyBuffer_Release(&weights)
        PyBuffer_Release(&lse)
