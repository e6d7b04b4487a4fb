# Rows whose numbers are not all finite.  Part of attention.pyx.
#
#    walk AS_IT_IS      the sums of a row come out NaN or infinite
#      look_at_values   whether it met entries of V that are not finite, and sees one of them
#      redo_rows
#        walk CLEAN     a row that met some and sees none is summed up again with these read as 0,
#                       and keeps the bits that it has with finite values in their place
#        settle_row     of the others the maximum and the denominator, in which V has no part, tell:
#                       no allowed key     zeros
#                       not finite         NaN, as the formula has it
#                       finite             exact_rows
#
# In exact_rows weights are divided by the denominator before they meet V, as the formula has it.  A
# weight w of an allowed key adds w v to the sums where v is finite.  What it makes of other entries
# is found by one more product, of whole numbers: 1 for each allowed key whose weight is not 0,
# UNDERFLOWN for each whose weight is, times the codes of V.  The result says which infinities were
# met, and whether 0 met one, which is NaN.  An excluded key has 0 in both products.
#
# Which of this is done for a row depends on that row alone.

cdef enum:
    UNDERFLOWN = 1 << 22  # more than all codes of a tile together

# What is to be done yet for a row of a desk.
cdef enum:
    DONE
    PENDING              # its sums are not finite
    TO_WEIGH             # top and inverse are known: EXACT
    TO_SCORE             # int8 keys: these first, from keys with their scales

# What V has to do with it that a row's sums are not finite.
cdef enum:
    MET = 1              # a tile of the row has entries that are not,
    SEEN = 2             # and the row is allowed the key of one
    V_BITS = MET | SEEN
    LARGE = 4            # the products with an int8 key may be beyond float32 once it has its scale


cdef bint any_to_do(const Place *at, const Desk *desk, Py_ssize_t first, Py_ssize_t m,
                    int how) noexcept nogil:
    """Whether one of m rows is what the walk is made for."""
    cdef Py_ssize_t r
    for r in range(first, first + m):
        if how == CLEAN:
            if desk.todo[r] == PENDING and desk.part.nonfinite_v[r] & V_BITS == MET:
                return True
        elif desk.todo[r] == (TO_SCORE if at.scaled else TO_WEIGH):
            return True
    return False


cdef bint sees_any(const qkv_row *row) noexcept nogil:
    """Whether the row is allowed a key."""
    cdef Py_ssize_t j
    if row.keep == NULL and row.bias == NULL:
        return row.lo < row.hi
    for j in range(row.lo, row.hi):
        if allowed(row, j):
            return True
    return False


cdef bint overflows(const Call *call, const Place *at, const Desk *desk,
                    Py_ssize_t r) noexcept nogil:
    """Whether products with an int8 key that the row is allowed may be beyond float32.

    What integers make finite, by taking each other away, the formula may not.
    """
    cdef const qkv_row *row = &desk.rows[r]
    cdef const float *scale
    cdef float reach
    cdef Py_ssize_t j
    if not desk.part.nonfinite_v[r] & LARGE or at.scaled:
        return False
    reach = reach_of(call, desk.q + r * call.D, 1)
    for j in range(row.lo, row.hi):
        scale = <const float *> at.item.pages[4 * (j // call.page) + 2]
        if allowed(row, j) and not isfinite(
                reach * scale[at.kv_head * call.page + j % call.page]):
            return True
    return False


# ---- the entries of V that are not finite -------------------------------------------------------

cdef bint look_at_values(const Call *call, const Place *at, Desk *desk, int worker,
                         qkv_run *run) noexcept nogil:
    """What V has to do with the sums of pending rows; False where the run was stopped."""
    cdef Py_ssize_t lo, hi, tile, n, r
    cdef bint open = True
    cdef Tile values
    extent(desk.rows, at.m, &lo, &hi)
    lo = max(lo, at.first_key)
    hi = min(hi, at.end_key)
    for tile from lo // TILE * TILE <= tile < hi by TILE:
        if stopped(run, worker):
            return False
        n = min(TILE, hi - tile)
        take_values(call, at, desk, tile, n, True, &values)
        if is_finite(call, &values, 0, n):
            continue
        mark_rows(call, at, desk, &values, tile, n)
        open = False
        for r in range(at.m):
            open = open or (desk.todo[r] == PENDING and not desk.part.nonfinite_v[r] & SEEN)
        if not open:
            break
    return True


cdef void mark_rows(const Call *call, const Place *at, Desk *desk, const Tile *values,
                    Py_ssize_t tile, Py_ssize_t n) noexcept nogil:
    """nonfinite_v of the pending rows, for a tile that has entries which are not finite."""
    cdef uint8_t *marks = desk.part.nonfinite_v
    cdef Py_ssize_t j, r
    cdef bint known
    for r in range(at.m):
        marks[r] |= MET
    for j in range(n):
        known = False  # that the row of V is not finite: looked at when somebody may see it
        for r in range(at.m):
            if marks[r] & SEEN or desk.todo[r] != PENDING or not allowed(desk.rows + r, tile + j):
                continue
            if not known and is_finite(call, values, j, 1):
                break
            known = True
            marks[r] |= SEEN


cdef void admit_row(const qkv_row *row, const float *weights, float *admitted, Py_ssize_t first,
                    Py_ssize_t n) noexcept nogil:
    """admitted[n]: 0 for an excluded key, UNDERFLOWN where an allowed one has weight 0, else 1."""
    cdef Py_ssize_t lo = min(max(row.lo - first, 0), n), hi = min(max(row.hi - first, lo), n), j
    cdef const uint8_t *keep
    cdef const float *bias
    for j in range(n):
        admitted[j] = 1.0 if weights[j] > 0.0 else <float> UNDERFLOWN
    memset(admitted, 0, lo * sizeof(float))
    memset(admitted + hi, 0, (n - hi) * sizeof(float))
    if row.keep != NULL:
        keep = row.keep + first * row.mask_step
        for j in range(lo, hi):
            admitted[j] = admitted[j] if keep[j * row.mask_step] else 0.0
    if row.bias != NULL:
        bias = row.bias + first * row.mask_step
        for j in range(lo, hi):
            admitted[j] = 0.0 if bias[j * row.mask_step] == -INFINITY else admitted[j]


cdef inline float met_by(float codes) noexcept nogil:
    """What a sum of codes makes of a finite sum: itself, an infinity, or NaN."""
    cdef int all
    if codes >= UNDERFLOWN:
        return NAN
    all = <int> codes
    if all % QKV_MINUS and all >= QKV_MINUS:
        return NAN
    return -INFINITY if all >= QKV_MINUS else INFINITY


cdef void add_nonfinite(const Call *call, Desk *desk, const Tile *values, Py_ssize_t first,
                        Py_ssize_t m, Py_ssize_t tile) noexcept nogil:
    """Add to the sums of m rows what their weights make of the tile's non-finite entries."""
    cdef Py_ssize_t lds = TILE + LANES, r, c, d, width, start = desk.start[first]
    cdef Py_ssize_t n = desk.end[first] - start
    cdef float *sums = desk.part.sums
    cdef float *admitted = desk.admitted + first * lds
    if values.finite:
        return
    for r in range(m):
        admit_row(desk.rows + first + r, desk.scores + (first + r) * lds + start,
                  admitted + r * lds, tile + start, n)
    for c from 0 <= c < call.Dv by values.width:
        width = min(values.width, call.Dv - c)
        call.ops.product(admitted, lds, desk.v_codes + c * TILE + start * width, width,
                         desk.met + c, call.Dv, NULL, m, width, n)
    for r in range(m):
        for d in range(call.Dv):
            if desk.met[r * call.Dv + d] != 0.0:
                sums[(first + r) * call.Dv + d] += met_by(desk.met[r * call.Dv + d])


cdef void weigh_rows(const Call *call, Desk *desk, Py_ssize_t first, Py_ssize_t m,
                     Py_ssize_t tile) noexcept nogil:
    """Scores of m rows become their final weights."""
    cdef Py_ssize_t start = desk.start[first], n = desk.end[first] - start, r, j, lo, hi
    cdef float *scores
    cdef const qkv_row *row
    for r in range(first, first + m):
        row = &desk.rows[r]
        scores = desk.scores + r * (TILE + LANES) + start
        lo = min(max(row.lo - tile - start, 0), n)
        hi = min(max(row.hi - tile - start, lo), n)
        call.ops.adjust(scores, n, tile + start, row)
        for j in range(lo):
            scores[j] = -INFINITY
        for j in range(hi, n):
            scores[j] = -INFINITY
        call.ops.weights(scores, desk.top[r], desk.inverse[r], scores, n)
        desk.factor[r] = 1.0


# ---- rows ---------------------------------------------------------------------------------------

cdef void settle_row(const Call *call, const Place *at, Desk *desk, Py_ssize_t r, Py_ssize_t h,
                     Py_ssize_t i, float *out) noexcept nogil:
    """A row by its maximum and its denominator: done, or what is to be done.

    Its lse and its weights are final with them.
    """
    cdef qkv_row *row = &desk.rows[r]
    cdef float sink = -INFINITY if call.sinks == NULL else call.sinks[h]
    cdef float top = desk.part.max[r], total = desk.part.sum[r], lse, value = 0.0
    cdef Py_ssize_t j
    if overflows(call, at, desk, r):
        desk.todo[r] = TO_SCORE
        return
    desk.todo[r] = DONE
    desk.top[r] = desk.inverse[r] = 0.0
    if total == 0.0 and not sees_any(row):
        lse = sink
        write_weights(call, row, 0.0, 0.0)
    else:
        if call.sinks != NULL:
            top = top if sink < top else sink
            total = total * expf(desk.part.max[r] - top) + expf(sink - top)
        lse = top + logf(total)
        if total > 0.0 and isfinite(top):
            desk.todo[r] = TO_SCORE if at.scaled else TO_WEIGH
            desk.top[r], desk.inverse[r] = top, 1.0 / total
            write_weights(call, row, top, desk.inverse[r])
        elif call.stored == QKV_INT8 and not at.scaled:
            # a score of integers may be infinite where the formula's is not
            desk.todo[r] = TO_SCORE
            return
        else:
            value = lse = NAN
            if row.scores != NULL:
                for j in range(call.S):
                    row.scores[j] = NAN if allowed(row, j) else 0.0
                row.scores = NULL
    if desk.todo[r] == DONE:
        for j in range(call.Dv):
            out[j] = value
    if at.item.lse != NULL:
        lse_of(call, at, h, i)[0] = lse


cdef bint walk_again(const Call *call, Place *at, Desk *desk, int how, int worker,
                     qkv_run *run) noexcept nogil:
    """A walk over all keys, split by split where there are splits; False where it was stopped."""
    cdef Py_ssize_t n, r, d, splits = max(at.item.splits, at.item.passes)
    cdef Part part = desk.part
    if splits == 1:
        return walk(call, at, desk, how, NULL, worker, run)
    for n in range(splits):
        take_split(at, n)
        if not walk(call, at, desk, how, NULL, worker, run):
            return False
        if n == 0:
            copy_part(call, &part, &desk.total, at.m)
        elif how != EXACT:
            merge_part(call, &part, &desk.total, at.m)
        else:
            for r in range(at.m):
                for d in range(call.Dv):
                    desk.total.sums[r * call.Dv + d] += part.sums[r * call.Dv + d]
    copy_part(call, &desk.total, &part, at.m)
    return True


cdef void redo_rows(const Call *call, Place *at, Desk *desk, int worker,
                    qkv_run *run) noexcept nogil:
    """The rows of a task that are not done, all of its splits being there."""
    cdef Py_ssize_t r, h, i
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        if desk.todo[r] == PENDING and desk.part.nonfinite_v[r] & V_BITS != MET:
            settle_row(call, at, desk, r, h, i, row_out(call, at, desk, r, h, i))
            if desk.todo[r] == DONE:
                store_row(call, at, desk, r, h, i)
    if any_to_do(at, desk, 0, at.m, CLEAN):
        if not walk_again(call, at, desk, CLEAN, worker, run):
            return
        finish_rows(call, at, desk, True, worker, run)
    exact_rows(call, at, desk, worker, run)


cdef void exact_rows(const Call *call, Place *at, Desk *desk, int worker,
                     qkv_run *run) noexcept nogil:
    """The rows of a task that have more to do, from the final maximum and denominator of each."""
    cdef Py_ssize_t r
    for r in range(at.m):
        if desk.todo[r] != TO_SCORE:
            desk.rows[r].scores = NULL  # its weights are written
    if any_to_do(at, desk, 0, at.m, EXACT) and walk_again(call, at, desk, EXACT, worker, run):
        store_exact(call, at, desk)
    at.scaled = True
    if (any_to_do(at, desk, 0, at.m, EXACT)
            and walk_again(call, at, desk, SCORES_ALONE, worker, run)):
        settle_scored(call, at, desk)
        if walk_again(call, at, desk, EXACT, worker, run):
            store_exact(call, at, desk)


cdef void settle_scored(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    cdef Py_ssize_t r, h, i
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        if desk.todo[r] == TO_SCORE:
            settle_row(call, at, desk, r, h, i, row_out(call, at, desk, r, h, i))
            if desk.todo[r] == DONE:
                store_row(call, at, desk, r, h, i)


cdef void store_exact(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    """The output of the rows that the walk was made for; every NaN has the same bits."""
    cdef Py_ssize_t r, h, i, d
    cdef float *out
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        if any_to_do(at, desk, r, 1, EXACT):
            out = row_out(call, at, desk, r, h, i)
            call.ops.scaled(desk.part.sums + r * call.Dv, call.Dv, desk.ones, out, call.Dv, 1,
                            call.Dv)
            for d in range(call.Dv):
                out[d] = NAN if isnan(out[d]) else out[d]
            store_row(call, at, desk, r, h, i)
            desk.todo[r] = DONE


# ---- rows of split items, when all parts are merged ----------------------------------------------

cdef size_t lay_left_over(Call *call, char *memory) noexcept nogil:
    cdef char *at = memory
    cdef Leftover *x = &call.left_over
    cdef size_t rows = call.units * call.block
    x.count = 0
    x.tasks = <Py_ssize_t *> carve(&at, call.units, sizeof(Py_ssize_t))
    x.todo = <uint8_t *> carve(&at, rows, sizeof(uint8_t))
    x.nonfinite_v = <uint8_t *> carve(&at, rows, sizeof(uint8_t))
    x.max = <float *> carve(&at, rows, sizeof(float))
    x.sum = <float *> carve(&at, rows, sizeof(float))
    return at - memory


cdef void leave_over(Call *call, const Place *at, const Desk *desk) noexcept nogil:
    """Remember the rows of a unit that are not done; parts retire one at a time."""
    cdef Leftover *x = &call.left_over
    cdef Py_ssize_t first = x.count * call.block
    x.tasks[x.count] = at.item.first_task + at.kv_head * at.item.splits
    memcpy(x.todo + first, desk.todo, at.m)
    memcpy(x.nonfinite_v + first, desk.part.nonfinite_v, at.m)
    memcpy(x.max + first, desk.part.max, at.m * sizeof(float))
    memcpy(x.sum + first, desk.part.sum, at.m * sizeof(float))
    x.count += 1


cdef void redo_unit(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    """A task: what was left over of a unit."""
    cdef const Call *call = <const Call *> job
    cdef const Leftover *x = &call.left_over
    cdef Py_ssize_t first = index * call.block, r
    cdef Place at
    cdef Desk desk
    find_place(call, x.tasks[index], &at)
    lay_desk(call, call.desks + worker * call.desk_size, &desk)
    start_rows(call, &at, &desk)
    memcpy(desk.todo, x.todo + first, at.m)
    memcpy(desk.part.nonfinite_v, x.nonfinite_v + first, at.m)
    memcpy(desk.part.max, x.max + first, at.m * sizeof(float))
    memcpy(desk.part.sum, x.sum + first, at.m * sizeof(float))
    for r in range(at.m):
        if desk.todo[r] == DONE:
            desk.rows[r].scores = NULL
    redo_rows(call, &at, &desk, worker, run)
