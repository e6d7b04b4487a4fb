# The key tiles of a task: a worker's memory, scores, and the walk over the tiles.
# Part of attention.pyx.

# ---- memory -------------------------------------------------------------------------------------

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
    part.nonfinite_v = <uint8_t *> carve(&at, call.block, sizeof(uint8_t))
    return at - memory


cdef size_t lay_desk(const Call *call, char *memory, Desk *desk) noexcept nogil:
    """Lay out a worker's memory from there on; returns what it takes."""
    cdef char *at = memory
    at += lay_part(call, at, &desk.part)
    at += lay_part(call, at, &desk.total)
    desk.head = <Py_ssize_t *> carve(&at, 1, sizeof(Py_ssize_t))
    desk.rows = <qkv_row *> carve(&at, call.block, sizeof(qkv_row))
    desk.q = <float *> carve(&at, call.block * call.D, sizeof(float))
    desk.scores = <float *> carve(&at, call.block * (TILE + LANES), sizeof(float))
    desk.factor = <float *> carve(&at, call.block, sizeof(float))
    desk.ones = <float *> carve(&at, call.block, sizeof(float))
    desk.scales = <float *> carve(&at, call.block, sizeof(float))
    desk.values = <float *> carve(&at, call.block * call.Dv if call.kind else 0, sizeof(float))
    desk.start = <Py_ssize_t *> carve(&at, call.block, sizeof(Py_ssize_t))
    desk.end = <Py_ssize_t *> carve(&at, call.block, sizeof(Py_ssize_t))
    desk.packed = <uint8_t *> carve(&at, call.keys // TILE, sizeof(uint8_t))
    desk.panels = <float *> carve(&at, call.keys * call.D, sizeof(float))
    desk.k_rows = <float *> carve(&at, TILE * call.D, sizeof(float))
    desk.v_rows = <float *> carve(&at, TILE * call.Dv, sizeof(float))
    desk.v_scale = <float *> carve(&at, TILE + LANES, sizeof(float))
    # from here on what most calls never touch
    desk.todo = <uint8_t *> carve(&at, call.block, sizeof(uint8_t))
    desk.top = <float *> carve(&at, call.block, sizeof(float))
    desk.inverse = <float *> carve(&at, call.block, sizeof(float))
    desk.v_codes = <float *> carve(&at, TILE * call.Dv, sizeof(float))
    desk.admitted = <float *> carve(&at, call.block * (TILE + LANES), sizeof(float))
    desk.met = <float *> carve(&at, call.block * call.Dv, sizeof(float))
    return at - memory


# ---- a task: tiles of keys ----------------------------------------------------------------------

# How a walk takes V and the weights.
cdef enum:
    AS_IT_IS             # running maximum and sums
    CLEAN                # the same, the entries of V that are not finite read as 0
    EXACT                # final maximum and denominator, such entries as the formula has them
    SCORES_ALONE         # running maximum and sum of the weights, without V


cdef void find_columns(const Call *call, const Place *at, Desk *desk, Py_ssize_t tile,
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


cdef void score_tile(const Call *call, const Place *at, Desk *desk, Py_ssize_t tile, Py_ssize_t n,
                     Py_ssize_t step) noexcept nogil:
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
    elif (keys.scale != NULL and (call.large_scales or not desk.reach < LARGE_REACH)
            and not call.ops.scaled(keys.scale, n, &desk.reach, desk.v_scale, n, 1, n)):
        for r in range(at.m):
            desk.part.nonfinite_v[r] |= LARGE
    for c from 0 <= c < n by PANEL:
        for r from 0 <= r < at.m by step:
            if desk.start[r] <= c < desk.end[r]:
                score_panel(call, &keys, c, desk.q + r * call.D, min(step, at.m - r),
                            desk.scores + r * lds + c, lds, min(PANEL, desk.end[r] - c), desk.ones)


cdef void fetch(const Call *call, const Place *next, Py_ssize_t first,
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


cdef void soften(const Call *call, Desk *desk, Py_ssize_t r, Py_ssize_t m, Py_ssize_t tile,
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


cdef void start_walk(const Call *call, const Place *at, Desk *desk, Py_ssize_t step,
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


cdef bint walk(const Call *call, const Place *at, Desk *desk, int how, const Place *next,
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
