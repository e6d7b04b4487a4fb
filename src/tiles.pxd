# cython: language_level=3, cdivision=True
"""The key tiles of a task: scores, weights, and the pass over the tiles."""

from libc.math cimport INFINITY
from libc.string cimport memset

from qkv_ext._core._kernels cimport (
    LANES, PANEL, QKV_ALLOWS, QKV_CHANGES, QKV_EXCLUDES, QKV_FLOAT32, TILE, qkv_prefetch, qkv_row,
    stopped,
)

from src.types cimport AS_IT_IS, Call, EXACT, LARGE, SCORES_ALONE, Task, Workspace, row_at
from src.rules cimport any_to_do, find_row, is_small, key_range, look_at_masks, look_at_tile
from src.keys cimport (
    Tile, add_values, clean_tile, rows_of, scale_panels, score_panel, take_keys, take_values,
)
from src.nonfinite cimport add_nonfinite, weigh_rows


cdef inline bint find_columns(const Call *call, const Task *task, Workspace *ws, Py_ssize_t tile,
                              Py_ssize_t n, Py_ssize_t step, bint whole, int masks,
                              int how) noexcept nogil:
    """The columns start <= c < end of a tile that each step rows need, from a panel on; or none.

    whole: all rows see all of it, but for their masks, which do that to it.  Returns whether any
    rows need any columns.
    """
    cdef Py_ssize_t r, m, lo, hi, start, end
    cdef bint needed = False
    cdef int own = masks
    for r from 0 <= r < task.m by step:
        m = min(step, task.m - r)
        start, end = 0, n
        if not whole:
            key_range(ws.rows + r, m, &lo, &hi)
            end = min(n, hi - tile)
            start = max(lo - tile, 0) // PANEL * PANEL
        if how != AS_IT_IS and not any_to_do(task, ws, r, m, how):
            end = 0
        if masks & QKV_CHANGES and m < task.m and start < end:
            own = look_at_masks(call, ws.rows + r, m, tile + start, end - start)
            if not own & QKV_ALLOWS:
                deny_columns(ws, r, m, tile + start, tile + end)
                end = 0
        ws.start[r] = start
        ws.end[r] = end if start < end else 0
        ws.unmasked[r] = not own & QKV_CHANGES
        needed = needed or start < end
    return needed


cdef inline void deny_columns(Workspace *ws, Py_ssize_t first, Py_ssize_t m, Py_ssize_t start,
                              Py_ssize_t end) noexcept nogil:
    """What softmax_tile would keep of the scores, of keys that m rows are denied."""
    cdef Py_ssize_t r, j
    for r in range(first, first + m):
        if ws.rows[r].scores != NULL:
            for j in range(start, end):
                ws.rows[r].scores[j] = -INFINITY


cdef inline void score_tile(const Call *call, const Task *task, Workspace *ws, Py_ssize_t tile,
                            Py_ssize_t n, Py_ssize_t step) noexcept nogil:
    """scores[m, n] = Q Kᵀ of a tile, for step rows at a time and no further than they see."""
    cdef Py_ssize_t lds = TILE + LANES, r, c, ld, D = call.shape.D
    cdef const float *k
    cdef Tile keys
    if task.item.use_dot_kernel:
        # what is widened stays in the cache
        step = n if call.shape.stored == QKV_FLOAT32 else 2 * LANES
        for c from 0 <= c < n by step:
            k = rows_of(call, task.k, call.strides.k.row, tile + c, min(step, n - c), D, ws.k_rows,
                        &ld)
            call.ops.dots(ws.q, D, k, ld, ws.scores + c, lds, task.m, min(step, n - c), D)
        return
    take_keys(call, task, ws, tile, &keys)
    if task.scaled and keys.scale != NULL:
        scale_panels(call, ws, n, &keys)
    elif (keys.scale != NULL and (call.rules.large_scales or not is_small(ws.reach))
            and not call.ops.scale_rows(keys.scale, n, &ws.reach, ws.v_scale, n, 1, n)):
        for r in range(task.m):
            ws.partial.nonfinite_v[r] |= LARGE
    for c from 0 <= c < n by PANEL:
        for r from 0 <= r < task.m by step:
            if ws.start[r] <= c < ws.end[r]:
                score_panel(call, &keys, c, ws.q + r * D, min(step, task.m - r),
                            ws.scores + r * lds + c, lds, min(PANEL, ws.end[r] - c), ws.ones)


cdef inline void prefetch_task(const Call *call, const Task *next, Py_ssize_t first,
                               Py_ssize_t last) noexcept nogil:
    """Prefetch those rows of the Q, K and V of a task to come."""
    cdef Py_ssize_t r, h, i, size = 4 if call.shape.kind == QKV_FLOAT32 else 2
    for r in range(first, last):
        if r < next.m:
            find_row(call, next, r, &h, &i)
            qkv_prefetch(row_at(next.item.q, call.strides.q, h, i), call.shape.D * size)
            qkv_prefetch(row_at(next.item.out, call.strides.out, h, i), call.shape.Dv * size)
        if r < next.item.S:
            qkv_prefetch(row_at(next.k, call.strides.k, 0, r), call.shape.D * size)
            qkv_prefetch(row_at(next.v, call.strides.v, 0, r), call.shape.Dv * size)


cdef inline void softmax_rows(const Call *call, Workspace *ws, Py_ssize_t r, Py_ssize_t m,
                              Py_ssize_t tile, const Task *next) noexcept nogil:
    """Scores of m rows become weights; a vector of rows at a time where there is a next task,
    whose rows are prefetched meanwhile."""
    cdef Py_ssize_t lds = TILE + LANES, i, start = ws.start[r], n = ws.end[r] - start
    cdef Py_ssize_t step = m if next == NULL else LANES
    cdef int masks = ws.rows[r].modifiers & QKV_EXCLUDES if ws.unmasked[r] else 0
    for i in range(r, r + m if masks else r):
        ws.rows[i].modifiers -= masks
    for i from r <= i < r + m by step:
        call.ops.softmax_tile(ws.scores + i * lds + start, lds, min(step, r + m - i), n,
                              tile + start, ws.rows + i, ws.partial.row_max + i,
                              ws.partial.row_sum + i, ws.factor + i)
        if next != NULL:
            prefetch_task(call, next, i, i + step)
    for i in range(r, r + m if masks else r):
        ws.rows[i].modifiers += masks


cdef inline void start_tiles(const Call *call, const Task *task, Workspace *ws, Py_ssize_t step,
                             int how) noexcept nogil:
    """Nothing summed up yet, for the rows that the pass is to compute."""
    cdef Py_ssize_t r, first, m
    if how == AS_IT_IS:
        memset(ws.partial.nonfinite_v, 0, task.m)
    for first from 0 <= first < task.m by step:
        m = min(step, task.m - first)
        if how != AS_IT_IS and not any_to_do(task, ws, first, m, how):
            continue
        memset(ws.partial.acc + first * call.shape.Dv, 0, m * call.shape.Dv * sizeof(float))
        for r in range(first, first + m):
            ws.partial.row_max[r] = -INFINITY
            ws.partial.row_sum[r] = 0.0


cdef inline bint process_tiles(const Call *call, const Task *task, Workspace *ws, int how,
                               const Task *next) noexcept nogil:
    """The task's rows over the key tiles of its split; False where the run was stopped.

    But for AS_IT_IS only the rows that have it to do, and those beside them, in the same order and
    by the same kernels.
    next: a task of another head whose arrays are prefetched during the last tile, or NULL.
    """
    cdef Py_ssize_t lo, hi, tile, n, step, r, m, group
    cdef Py_ssize_t common_lo = 0, common_hi = task.item.S
    cdef bint whole, raw
    cdef int modifiers = 0, masks = QKV_ALLOWS
    cdef Tile values
    cdef const qkv_row *row
    values.finite = True
    for r in range(task.m):
        row = &ws.rows[r]
        common_lo = max(common_lo, row.lo)
        common_hi = min(common_hi, row.hi)
        modifiers |= row.modifiers
    group = task.m if task.item.use_dot_kernel or how == AS_IT_IS else call.ops.rows
    start_tiles(call, task, ws, group, how)
    key_range(ws.rows, task.m, &lo, &hi)
    lo = max(lo, task.first_key)
    hi = min(hi, task.end_key)
    for tile from lo // TILE * TILE <= tile < hi by TILE:
        if stopped(ws.run, ws.worker):
            return False
        n = min(TILE, hi - tile)
        # all rows at once where they all see the whole tile, or a few in any case
        whole = common_lo <= tile and tile + n <= common_hi
        step = group if whole or task.item.use_dot_kernel else call.ops.rows
        if modifiers & QKV_EXCLUDES:
            masks = look_at_tile(call, task, ws, tile, n)
            if not masks & QKV_ALLOWS:
                deny_columns(ws, 0, task.m, tile, tile + n)
                continue
        if not find_columns(call, task, ws, tile, n, step, whole, masks, how):
            continue
        score_tile(call, task, ws, tile, n, step)
        # where no row is denied a key the product does with V what the formula does
        raw = how == AS_IT_IS or (how == EXACT and whole and not modifiers & QKV_EXCLUDES)
        if how != SCORES_ALONE:
            take_values(call, task, ws, tile, n, not raw, &values)
            if not raw:
                clean_tile(call, ws, n, how == EXACT, &values)
        for r from 0 <= r < task.m by step:
            if ws.end[r] == 0:
                continue
            m = min(step, task.m - r)
            if how == EXACT:
                weigh_rows(call, ws, r, m, tile)
                if not raw:
                    add_nonfinite(call, ws, &values, r, m, tile)
            else:
                softmax_rows(call, ws, r, m, tile, next if tile + TILE >= hi else NULL)
            if how != SCORES_ALONE:
                add_values(call, ws, &values, r, m, ws.start[r], ws.end[r])
    return True
