# The query rows of a task: where they come from, what they may see, and how they end.
# Part of attention.pyx.

cdef inline void first_row(const Call *call, const Place *at, Py_ssize_t *h,
                           Py_ssize_t *i) noexcept nogil:
    """Head and position in the item of the first row of a task."""
    i[0] = at.first_row // call.group
    h[0] = at.kv_head * call.group + at.first_row % call.group


cdef inline void next_row(const Call *call, const Place *at, Py_ssize_t *h,
                          Py_ssize_t *i) noexcept nogil:
    """Those of the row after: the next head of the group, or the first one of the next position."""
    h[0] += 1
    if h[0] == (at.kv_head + 1) * call.group:
        h[0] -= call.group
        i[0] += 1


cdef inline Py_ssize_t alike(const Call *call, const Place *at, Py_ssize_t r) noexcept nogil:
    """How many rows of a task lie evenly from row r on: all, or those of the heads of a group."""
    if call.group == 1:
        return at.m - r
    return min(at.m - r, call.group - (at.first_row + r) % call.group)


cdef void gather_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    """The query rows of a task side by side, as floats, scaled."""
    cdef Py_ssize_t r = 0, i, h, n
    cdef Py_ssize_t stride = call.q_row if call.group == 1 else call.q_head
    cdef const char *source
    cdef float *target
    while r < at.m:
        n = alike(call, at, r)
        h = at.kv_head * call.group + (at.first_row + r) % call.group
        i = (at.first_row + r) // call.group
        source = at.item.q + h * call.q_head + i * call.q_row
        target = desk.q + r * call.D
        if call.kind == QKV_FLOAT32:
            call.ops.scaled(<const float *> source, stride // <Py_ssize_t> sizeof(float),
                            desk.scales, target, call.D, n, call.D)
        else:
            call.ops.widen(call.kind, <const uint16_t *> source,
                           stride // <Py_ssize_t> sizeof(uint16_t), target, n, call.D)
            call.ops.scaled(target, call.D, desk.scales, target, call.D, n, call.D)
        r += n


cdef void start_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    """Gather the scaled query rows of a task, and what each of them is allowed to see."""
    cdef const Item *item = at.item
    cdef const char *mask_row
    cdef qkv_row *row
    cdef Py_ssize_t r, i, h, position
    gather_rows(call, at, desk)
    if call.stored == QKV_INT8:
        desk.reach = reach_of(call, desk.q, at.m)
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        row = &desk.rows[r]
        position = i + item.shift
        row.lo = min(max(position - call.left, 0), item.S)
        row.hi = min(max(position + call.right + 1, row.lo), item.S)
        row.position = position
        row.softcap = call.softcap
        row.slope = item.slopes[h] if item.slopes != NULL else 0.0
        row.keep = NULL
        row.bias = NULL
        row.mask_step = call.mask_step
        if item.mask != NULL:
            mask_row = item.mask + h * call.mask_head + i * call.mask_row
            if call.bool_mask:
                row.keep = <const uint8_t *> mask_row
            else:
                row.bias = <const float *> mask_row
        row.scores = NULL
        if item.weights != NULL:
            row.scores = <float *> (item.weights + h * call.weights_head + i * call.weights_row)


cdef inline float reach_of(const Call *call, const float *q, Py_ssize_t m) noexcept nogil:
    """More than the products of m query rows with a key of integers can add up to."""
    return 128.0 * call.D * qkv_magnitude(q, m * call.D)


cdef inline bint allowed(const qkv_row *row, Py_ssize_t j) noexcept nogil:
    """Whether the row may see key j: the rules that softmax_tile applies, for one key."""
    return (row.lo <= j < row.hi
            and (row.keep == NULL or row.keep[j * row.mask_step])
            and (row.bias == NULL or row.bias[j * row.mask_step] != -INFINITY))


cdef void extent(const qkv_row *rows, Py_ssize_t m, Py_ssize_t *lo, Py_ssize_t *hi) noexcept nogil:
    """The keys lo <= j < hi that any of m rows may see; lo == hi where there are none."""
    cdef Py_ssize_t r
    lo[0] = hi[0] = 0
    for r in range(m):
        if rows[r].lo < rows[r].hi:
            lo[0] = rows[r].lo if hi[0] == 0 else min(lo[0], rows[r].lo)
            hi[0] = max(hi[0], rows[r].hi)


cdef bint find_factors(const Call *call, const Place *at, Desk *desk, bint again) noexcept nogil:
    """factor = 1 / sum for every row, with sinks, and lse; returns whether the sums settle all.

    NaN for a row that summed up nothing, most often for want of an allowed key.
    again: for the rows alone that are pending.
    """
    cdef Part *part = &desk.part
    cdef Py_ssize_t r, i, h
    cdef float top, sum, factor, sink = -INFINITY
    cdef bint fine, settled = True
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        if again and desk.todo[r] != PENDING:
            continue
        top, sum, factor = part.max[r], part.sum[r], 1.0
        fine = sum > 0.0 and not overflows(call, at, desk, r)
        if call.sinks != NULL:
            sink = call.sinks[h]
            fine = fine and isfinite(top) and not (isnan(sink) or sink == INFINITY)
            if fine and sink > top + 80.0:  # a factor that is subnormal: see exact.pxi
                fine = False
            elif fine and sink > top:
                factor = <float> exp(<double> top - sink)  # one error for all: none of its own
                top = sink
                sum = sum * factor + 1.0
            elif fine:
                sum += expf(sink - top)
        desk.factor[r] = factor / sum if fine else NAN
        settled = settled and fine
        if at.item.lse != NULL and fine:
            lse_of(call, at, h, i)[0] = top + logf(sum)
    return settled


cdef inline float *lse_of(const Call *call, const Place *at, Py_ssize_t h,
                          Py_ssize_t i) noexcept nogil:
    return <float *> (at.item.lse + h * call.lse_head + i * call.lse_row)


cdef bint scale_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    """out = factor sums for all rows of a task; returns whether every one of them is finite."""
    cdef Py_ssize_t r = 0, i, h, n
    cdef Py_ssize_t stride = call.out_row if call.group == 1 else call.out_head
    cdef char *target
    cdef bint fine = True
    if call.kind != QKV_FLOAT32:
        return call.ops.scaled(desk.part.sums, call.Dv, desk.factor, desk.values, call.Dv, at.m,
                               call.Dv)
    while r < at.m:
        n = alike(call, at, r)
        h = at.kv_head * call.group + (at.first_row + r) % call.group
        i = (at.first_row + r) // call.group
        target = at.item.out + h * call.out_head + i * call.out_row
        fine = call.ops.scaled(desk.part.sums + r * call.Dv, call.Dv, desk.factor + r,
                               <float *> target, stride // <Py_ssize_t> sizeof(float), n,
                               call.Dv) and fine
        r += n
    return fine


cdef bint finish_rows(const Call *call, const Place *at, Desk *desk, bint again, int worker,
                      qkv_run *run) noexcept nogil:
    """out = sums / sum, with sinks, weights and lse; returns whether no row has more to do.

    A row that summed up nothing is settled; one whose sums are not finite is pending.
    again: the rows that are pending already, and there is no other way for them but to be settled.
    """
    cdef const Item *item = at.item
    cdef Part *part = &desk.part
    cdef Py_ssize_t r, i, h
    cdef float *out
    cdef qkv_row *row
    cdef bint all_fine, fine, right = True
    all_fine = find_factors(call, at, desk, again) and not again and scale_rows(call, at, desk)
    if all_fine and item.weights == NULL and call.kind == QKV_FLOAT32:
        return True
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        row = &desk.rows[r]
        if (row.scores != NULL or not all_fine) and stopped(run, worker):
            return True
        if not again or desk.todo[r] == PENDING:
            out = row_out(call, at, desk, r, h, i)
            fine = all_fine or (not isnan(desk.factor[r])
                                and call.ops.scaled(part.sums + r * call.Dv, call.Dv,
                                                    desk.factor + r, out, call.Dv, 1, call.Dv))
            desk.todo[r] = DONE if fine else PENDING
            if fine:
                write_weights(call, row, part.max[r], desk.factor[r])
            elif again or part.sum[r] == 0.0:
                settle_row(call, at, desk, r, h, i, out)
            if desk.todo[r] == DONE:
                store_row(call, at, desk, r, h, i)
        right = right and desk.todo[r] == DONE
    return right


cdef inline float *row_out(const Call *call, const Place *at, Desk *desk, Py_ssize_t r,
                           Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    """Where the floats of an output row go: to the output, unless that is of 16 bits."""
    if call.kind != QKV_FLOAT32:
        return desk.values + r * call.Dv
    return <float *> (at.item.out + h * call.out_head + i * call.out_row)


cdef inline void store_row(const Call *call, const Place *at, Desk *desk, Py_ssize_t r,
                           Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    """An output row of 16 bits, from its floats."""
    if call.kind != QKV_FLOAT32:
        call.ops.narrow(call.kind, desk.values + r * call.Dv,
                        <uint16_t *> (at.item.out + h * call.out_head + i * call.out_row), call.Dv)


cdef void write_weights(const Call *call, qkv_row *row, float top, float factor) noexcept nogil:
    """The weights of a row in the place of its scores, once."""
    if row.scores != NULL:
        call.ops.weights(row.scores + row.lo, top, factor, row.scores + row.lo, row.hi - row.lo)
        memset(row.scores, 0, row.lo * sizeof(float))
        memset(row.scores + row.hi, 0, (call.S - row.hi) * sizeof(float))
        row.scores = NULL


cdef void fill_absent(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    """Rows past the item's own length are no rows: output 0, weights 0, lse -inf."""
    cdef const Call *call = <const Call *> job
    cdef const Item *item = &call.items[index // call.heads]
    cdef Py_ssize_t h = index % call.heads, i
    cdef Py_ssize_t size = call.Dv * (4 if call.kind == QKV_FLOAT32 else 2)
    for i in range(item.L, item.room):
        memset(item.out + h * call.out_head + i * call.out_row, 0, size)
        if item.weights != NULL:
            if stopped(run, worker):
                return
            memset(item.weights + h * call.weights_head + i * call.weights_row, 0,
                   call.S * sizeof(float))
        if item.lse != NULL:
            (<float *> (item.lse + h * call.lse_head + i * call.lse_row))[0] = -INFINITY
