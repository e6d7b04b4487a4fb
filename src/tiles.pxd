# cython: language_level=3, cdivision=True
"""The key tiles of a task: scores, weights, and the walk over the tiles."""

from libc.math cimport INFINITY
from libc.string cimport memset

from qkv_ext._kernels cimport (
    LANES, PANEL, QKV_FLOAT32, TILE, qkv_prefetch, qkv_row, qkv_run, stopped,
)

from src.types cimport AS_IT_IS, Call, Desk, EXACT, LARGE, Place, SCORES_ALONE
from src.rules cimport any_to_do, extent, is_small
from src.keys cimport (
    Tile, add_values, clean_tile, rows_of, scale_panels, score_panel, take_keys, take_values,
)
from src.nonfinite cimport add_nonfinite, weigh_rows


cdef inline void find_columns(const Call *call, const Place *at, Desk *desk, Py_ssize_t tile,
                              Py_ssize_t n, Py_ssize_t step, bint whole, int how) noexcept nogil:
    """The columns start <= c < end of a tile that each step rows need, from a panel on; or none.

    whole: all rows see all of it.
    """
    cdef Py_ssize_t r, lo, hi, start, end
    for r from 0 <= r < at.m by step:
        start, end = 0, n
        if not whole:
            extent(desk.rows + r, min(step, at.m - r), &lo, &hi)
            end = min(n, hi - tile)
            start = max(lo - tile, 0) // PANEL * PANEL
        if how != AS_IT_IS and not any_to_do(at, desk, r, min(step, at.m - r), how):
            end = 0
        desk.start[r] = start
        desk.end[r] = end if start < end else 0


cdef inline void score_tile(const Call *call, const Place *at, Desk *desk, Py_ssize_t tile,
                            Py_ssize_t n, Py_ssize_t step) noexcept nogil:
    """scores[m, n] = Q Kᵀ of a tile, for step rows at a time and no further than they see."""
    cdef Py_ssize_t lds = TILE + LANES, r, c, ld
    cdef const float *k
    cdef Tile keys
    if at.item.direct:
        step = n if call.stored == QKV_FLOAT32 else 2 * LANES  # what is widened stays in the cache
        for c from 0 <= c < n by step:
            k = rows_of(call, at.k, call.k_row, tile + c, min(step, n - c), call.D, desk.k_rows,
                        &ld)
            call.ops.dots(desk.q, call.D, k, ld, desk.scores + c, lds, at.m, min(step, n - c),
                          call.D)
        return
    take_keys(call, at, desk, tile, &keys)
    if at.scaled and keys.scale != NULL:
        scale_panels(call, desk, n, &keys)
    elif (keys.scale != NULL and (call.large_scales or not is_small(desk.reach))
            and not call.ops.scaled(keys.scale, n, &desk.reach, desk.v_scale, n, 1, n)):
        for r in range(at.m):
            desk.part.nonfinite_v[r] |= LARGE
    for c from 0 <= c < n by PANEL:
        for r from 0 <= r < at.m by step:
            if desk.start[r] <= c < desk.end[r]:
                score_panel(call, &keys, c, desk.q + r * call.D, min(step, at.m - r),
                            desk.scores + r * lds + c, lds, min(PANEL, desk.end[r] - c), desk.ones)


cdef inline void fetch(const Call *call, const Place *next, Py_ssize_t first,
                       Py_ssize_t last) noexcept nogil:
    """Prefetch those rows of the Q, K and V of a task to come."""
    cdef Py_ssize_t r, h, i, size = 4 if call.kind == QKV_FLOAT32 else 2
    for r in range(first, last):
        if r < next.m:
            h = next.kv_head * call.group + (next.first_row + r) % call.group
            i = (next.first_row + r) // call.group
            qkv_prefetch(next.item.q + h * call.q_head + i * call.q_row, call.D * size)
            qkv_prefetch(next.item.out + h * call.out_head + i * call.out_row, call.Dv * size)
        if r < next.item.S:
            qkv_prefetch(next.k + r * call.k_row, call.D * size)
            qkv_prefetch(next.v + r * call.v_row, call.Dv * size)


cdef inline void soften(const Call *call, Desk *desk, Py_ssize_t r, Py_ssize_t m, Py_ssize_t tile,
                        const Place *next) noexcept nogil:
    """Scores of m rows become weights; a vector of rows at a time where there is a next task,
    whose rows are fetched meanwhile."""
    cdef Py_ssize_t lds = TILE + LANES, i, start = desk.start[r], n = desk.end[r] - start
    cdef Py_ssize_t step = m if next == NULL else LANES
    for i from r <= i < r + m by step:
        call.ops.softmax_tile(desk.scores + i * lds + start, lds, min(step, r + m - i), n,
                              tile + start, desk.rows + i, desk.part.max + i, desk.part.sum + i,
                              desk.factor + i)
        if next != NULL:
            fetch(call, next, i, i + step)


cdef inline void start_walk(const Call *call, const Place *at, Desk *desk, Py_ssize_t step,
                            int how) noexcept nogil:
    """Nothing summed up yet, for the rows that the walk is to compute."""
    cdef Py_ssize_t r, first, m
    if how == AS_IT_IS:
        memset(desk.part.nonfinite_v, 0, at.m)
    for first from 0 <= first < at.m by step:
        m = min(step, at.m - first)
        if how != AS_IT_IS and not any_to_do(at, desk, first, m, how):
            continue
        memset(desk.part.sums + first * call.Dv, 0, m * call.Dv * sizeof(float))
        for r in range(first, first + m):
            desk.part.max[r] = -INFINITY
            desk.part.sum[r] = 0.0


cdef inline bint walk(const Call *call, const Place *at, Desk *desk, int how, const Place *next,
                      int worker, qkv_run *run) noexcept nogil:
    """The task's rows over the key tiles of its split; False where the run was stopped.

    But for AS_IT_IS only the rows that have it to do, and those beside them, in the same order and
    by the same kernels.
    next: a task of another head whose arrays are fetched during the last tile, or NULL.
    """
    cdef Py_ssize_t lo, hi, tile, n, step, r, m, group
    cdef Py_ssize_t common_lo = 0, common_hi = at.item.S
    cdef bint whole, raw
    cdef Tile values
    cdef const qkv_row *row
    values.finite = True
    for r in range(at.m):
        row = &desk.rows[r]
        common_lo = max(common_lo, row.lo)
        common_hi = min(common_hi, row.hi)
    group = at.m if at.item.direct or how == AS_IT_IS else call.ops.rows
    start_walk(call, at, desk, group, how)
    extent(desk.rows, at.m, &lo, &hi)
    lo = max(lo, at.first_key)
    hi = min(hi, at.end_key)
    for tile from lo // TILE * TILE <= tile < hi by TILE:
        if stopped(run, worker):
            return False
        n = min(TILE, hi - tile)
        # all rows at once where they all see the whole tile, or a few in any case
        whole = common_lo <= tile and tile + n <= common_hi
        step = group if whole or at.item.direct else call.ops.rows
        find_columns(call, at, desk, tile, n, step, whole, how)
        score_tile(call, at, desk, tile, n, step)
        # where no row is denied a key the product does with V what the formula does
        raw = how == AS_IT_IS or (how == EXACT and whole and at.item.mask == NULL)
        if how != SCORES_ALONE:
            take_values(call, at, desk, tile, n, not raw, &values)
            if not raw:
                clean_tile(call, desk, n, how == EXACT, &values)
        for r from 0 <= r < at.m by step:
            if desk.end[r] == 0:
                continue
            m = min(step, at.m - r)
            if how == EXACT:
                weigh_rows(call, desk, r, m, tile)
                if not raw:
                    add_nonfinite(call, desk, &values, r, m, tile)
            else:
                soften(call, desk, r, m, tile, next if tile + TILE >= hi else NULL)
            if how != SCORES_ALONE:
                add_values(call, desk, &values, r, m, desk.start[r], desk.end[r])
    return True
