# cython: language_level=3, cdivision=True
"""The query rows of a task: which they are, what each may see, and what is to be done for it."""

from libc.math cimport isfinite
from libc.stdint cimport uint8_t

from qkv_ext._core._kernels cimport (
    MASK_AHEAD, QKV_ALLOWS, QKV_CHANGES, QKV_EXCLUDES, TILE, qkv_byte, qkv_is_kept, qkv_magnitude,
    qkv_prefetch_mask, qkv_row, qkv_set_byte,
)

from src.contract cimport ADDRESSES, K_SCALE_ADDRESS
from src.types cimport (
    CLEAN, Call, Item, LARGE, MET, PENDING, TO_SCORE, TO_WEIGH, Task, V_BITS, Workspace,
)
from src.plan cimport tiles_of


cdef inline void find_row(const Call *call, const Task *task, Py_ssize_t r, Py_ssize_t *h,
                          Py_ssize_t *i) noexcept nogil:
    """Head and position in the item of row r of a task."""
    h[0] = task.kv_head * call.shape.group + (task.first_row + r) % call.shape.group
    i[0] = (task.first_row + r) // call.shape.group


cdef inline void next_row(const Call *call, const Task *task, Py_ssize_t r, Py_ssize_t *h,
                          Py_ssize_t *i) noexcept nogil:
    """The same for one row after the other from r = 0 on: h and i are those of the row before."""
    if r == 0:
        find_row(call, task, 0, h, i)
        return
    h[0] += 1
    if h[0] == (task.kv_head + 1) * call.shape.group:  # the first head at the next position
        h[0] -= call.shape.group
        i[0] += 1


cdef inline Py_ssize_t contiguous_run(const Call *call, const Task *task,
                                      Py_ssize_t r) noexcept nogil:
    """How many rows of a task lie evenly from row r on: all, or those of the heads of a group."""
    if call.shape.group == 1:
        return task.m - r
    return min(task.m - r, call.shape.group - (task.first_row + r) % call.shape.group)


cdef inline bint allowed(const qkv_row *row, Py_ssize_t j) noexcept nogil:
    """Whether the row may see key j: the rules that softmax_tile applies, for one key."""
    return row.lo <= j < row.hi and qkv_is_kept(row, j)


cdef inline bint sees_any(const qkv_row *row) noexcept nogil:
    """Whether the row is allowed a key."""
    cdef Py_ssize_t j
    if not row.modifiers & QKV_EXCLUDES:
        return row.lo < row.hi
    for j in range(row.lo, row.hi):
        if allowed(row, j):
            return True
    return False


cdef inline void key_range(const qkv_row *rows, Py_ssize_t m, Py_ssize_t *lo,
                           Py_ssize_t *hi) noexcept nogil:
    """The keys lo <= j < hi that any of m rows may see; lo == hi where there are none."""
    cdef Py_ssize_t r
    lo[0] = hi[0] = 0
    for r in range(m):
        if rows[r].lo < rows[r].hi:
            lo[0] = rows[r].lo if hi[0] == 0 else min(lo[0], rows[r].lo)
            hi[0] = max(hi[0], rows[r].hi)


cdef inline bint sees_as(const qkv_row *row, const qkv_row *other) noexcept nogil:
    """Whether two rows have the same masks: in one segment or block, or where one is broadcast."""
    return (row.lo == other.lo and row.hi == other.hi and row.keep == other.keep
            and row.bias == other.bias and row.segment == other.segment
            and row.blocks == other.blocks)


cdef inline int look_at_masks(const Call *call, const qkv_row *rows, Py_ssize_t m,
                              Py_ssize_t first, Py_ssize_t n) noexcept nogil:
    """QKV_ALLOWS, QKV_CHANGES, both or neither: what the masks of m rows do to those keys."""
    cdef Py_ssize_t r, lo, hi
    cdef const qkv_row *row
    cdef int seen = 0
    for r in range(m):
        row = rows + r
        if r and sees_as(row, row - 1):
            continue
        if r + MASK_AHEAD < m:
            qkv_prefetch_mask(row + MASK_AHEAD, first, n)
        lo, hi = max(row.lo, first), min(row.hi, first + n)
        if lo < hi:
            seen |= call.ops.look_at_mask(row, lo, hi - lo)
        if seen == QKV_ALLOWS | QKV_CHANGES:
            break
    return seen


cdef inline int look_at_tile(const Call *call, const Task *task, const Workspace *ws,
                             Py_ssize_t tile, Py_ssize_t n) noexcept nogil:
    """The same for all rows of a task and a tile: remembered for the other heads that share it."""
    cdef const Item *item = task.item
    cdef uint8_t *known = NULL
    cdef int seen
    if item.looked != NULL:
        known = item.looked + task.first_row // item.block * tiles_of(item) + tile // TILE
        seen = qkv_byte(known)
        if seen:
            return seen - 1
    seen = look_at_masks(call, ws.rows, task.m, tile, n)
    if known != NULL:
        qkv_set_byte(known, seen + 1)
    return seen


cdef inline float reach_of(const Call *call, const float *q, Py_ssize_t m) noexcept nogil:
    """More than the products of m query rows with a key of integers can add up to."""
    return 128.0 * call.shape.D * qkv_magnitude(q, m * call.shape.D)


cdef inline bint is_small(float reach) noexcept nogil:
    """Whether only scales that are large could take the products of a query beyond float32."""
    return reach < 1152921504606846976.0  # 2 ** 60


cdef inline const char *in_page(const Call *call, const Task *task, Py_ssize_t j,
                                int column) noexcept nogil:
    """One of the addresses of the page that has key j."""
    return <const char *> task.item.pages[ADDRESSES * (j // call.shape.page) + column]


cdef inline bint overflows(const Call *call, const Task *task, const Workspace *ws,
                           Py_ssize_t r) noexcept nogil:
    """Whether products with an int8 key that the row is allowed may be beyond float32.

    What integers make finite, by taking each other away, the formula may not.
    """
    cdef const qkv_row *row = &ws.rows[r]
    cdef const float *scale
    cdef float reach
    cdef Py_ssize_t j
    if not ws.partial.nonfinite_v[r] & LARGE or task.scaled:
        return False
    reach = reach_of(call, ws.q + r * call.shape.D, 1)
    for j in range(row.lo, row.hi):
        scale = <const float *> in_page(call, task, j, K_SCALE_ADDRESS)
        if allowed(row, j) and not isfinite(
                reach * scale[task.kv_head * call.shape.page + j % call.shape.page]):
            return True
    return False


cdef inline bint any_to_do(const Task *task, const Workspace *ws, Py_ssize_t first, Py_ssize_t m,
                           int how) noexcept nogil:
    """Whether one of m rows is what the pass is made for."""
    cdef Py_ssize_t r
    for r in range(first, first + m):
        if how == CLEAN:
            if ws.todo[r] == PENDING and ws.partial.nonfinite_v[r] & V_BITS == MET:
                return True
        elif ws.todo[r] == (TO_SCORE if task.scaled else TO_WEIGH):
            return True
    return False
