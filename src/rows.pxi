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


cdef void scale_panels(const Call *call, Desk *desk, Py_ssize_t n, Tile *keys) noexcept nogil:
    """The n keys of a tile as the formula has them, scales and all: a score of integers may be
    infinite where the formula's is not."""
    cdef Py_ssize_t c
    if keys.kind != QKV_FLOAT32:
        call.ops.widen(keys.kind, keys.start, 0, desk.panels, 1,
                       (n + PANEL - 1) // PANEL * PANEL * call.D)
    for c from 0 <= c < n by PANEL:
        call.ops.times(desk.panels + c * call.D, PANEL, call.D, PANEL, keys.scale + c)
    keys.kind, keys.start, keys.scale = QKV_FLOAT32, <const char *> desk.panels, NULL


cdef Py_ssize_t line_of(const Call *call, const Place *at, Desk *desk, Py_ssize_t r,
                        Py_ssize_t tile) noexcept nogil:
    """The scores of a row in a tile into desk.line, -inf for what is not allowed; how many are."""
    cdef qkv_row *row = &desk.rows[r]
    cdef float *line = desk.line
    cdef Py_ssize_t n = min(TILE, row.hi - tile), c, j, ld, count = 0
    cdef const float *k
    cdef Tile keys
    if call.page:
        take_keys(call, at, desk, tile, &keys)
        if keys.scale != NULL:
            scale_panels(call, desk, n, &keys)
        for c from 0 <= c < n by PANEL:
            score_panel(call, &keys, c, desk.q + r * call.D, 1, line + c, TILE, min(PANEL, n - c),
                        desk.ones)
    else:
        k = rows_of(call, at.k, call.k_row, tile, n, call.D, desk.k_rows, &ld)
        call.ops.dots(desk.q + r * call.D, call.D, k, ld, line, TILE, 1, n, call.D)
    call.ops.adjust(line, n, tile, row)
    for j in range(n):
        if allowed(row, tile + j):
            count += 1
        else:
            line[j] = -INFINITY
    return count


cdef void plain_row(const Call *call, const Place *at, Desk *desk, Py_ssize_t r, float sink,
                    float *out, float *lse) noexcept nogil:
    """The plain formula over the allowed keys of one row, in key order; zeros where there are none.

    Weights are divided by the denominator before they meet V, as the formula has it, so that what
    is finite there is finite here.  The scores are computed again for each of its three passes.
    """
    cdef qkv_row *row = &desk.rows[r]
    cdef float *line = desk.line
    # a row without keys looks at no tile: the page of one may have been dropped
    cdef Py_ssize_t start = row.lo // TILE * TILE if row.lo < row.hi else row.hi
    cdef Py_ssize_t tile, j, d, n, count = 0
    cdef float top = sink, sum, weight
    cdef Tile values
    for tile from start <= tile < row.hi by TILE:  # pass 1: the maximum
        count += line_of(call, at, desk, r, tile)
        for j in range(min(TILE, row.hi - tile)):
            if line[j] > top or isnan(line[j]):
                top = line[j]  # once NaN, nothing is larger
    if row.scores != NULL:
        memset(row.scores, 0, call.S * sizeof(float))
    for d in range(call.Dv):
        out[d] = 0.0
    if count == 0:
        lse[0] = sink
        return
    sum = expf(sink - top) if call.sinks != NULL else 0.0
    for tile from start <= tile < row.hi by TILE:  # pass 2: the denominator
        n = min(TILE, row.hi - tile)
        line_of(call, at, desk, r, tile)
        call.ops.weights(line, top, 1.0, line, n)
        for j in range(n):
            if allowed(row, tile + j):
                sum += line[j]
    lse[0] = top + logf(sum)
    for d in range(call.Dv if isnan(sum) else 0):
        out[d] = NAN
    for tile from start <= tile < row.hi by TILE:  # pass 3: the weights and the output
        n = min(TILE, row.hi - tile)
        line_of(call, at, desk, r, tile)
        call.ops.weights(line, top, 1.0, line, n)
        take_values(call, at, desk, tile, n, False, &values)
        for j in range(n):
            if not allowed(row, tile + j):
                continue
            weight = line[j] / sum
            if row.scores != NULL:
                row.scores[tile + j] = weight
            if not isnan(sum):
                value_row(call, &values, j, desk.value)
                for d in range(call.Dv):
                    out[d] += weight * desk.value[d]


cdef bint find_factors(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    """factor = 1 / sum for every row, with sinks, and lse; returns whether the sums settle all.

    NaN for a row that summed up nothing, most often for want of an allowed key, or is spoilt.
    """
    cdef Part *part = &desk.part
    cdef Py_ssize_t r, i, h
    cdef float top, sum, factor, sink = -INFINITY
    cdef bint fine, settled = True
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        top, sum, factor = part.max[r], part.sum[r], 1.0
        fine = sum > 0.0 and not part.spoilt[r]
        if call.sinks != NULL:
            sink = call.sinks[h]
            fine = fine and isfinite(top) and not (isnan(sink) or sink == INFINITY)
            if fine and sink > top:
                factor = expf(top - sink)
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


cdef bint finish_rows(const Call *call, const Place *at, Desk *desk, bint last) noexcept nogil:
    """out = sums / sum, with sinks, weights and lse; returns whether every row came out right.

    A row that summed up nothing is left to the plain formula; a row whose sums are not finite only
    where this is the last try.
    """
    cdef const Item *item = at.item
    cdef Part *part = &desk.part
    cdef Py_ssize_t r, i, h
    cdef char *target
    cdef float *row_out
    cdef float lse = 0.0
    cdef qkv_row *row
    cdef bint all_fine, fine, right = True
    all_fine = find_factors(call, at, desk) and scale_rows(call, at, desk)
    if all_fine and item.weights == NULL and call.kind == QKV_FLOAT32:
        return True
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        target = item.out + h * call.out_head + i * call.out_row
        row_out = <float *> target if call.kind == QKV_FLOAT32 else desk.values + r * call.Dv
        row = &desk.rows[r]
        fine = all_fine or (not isnan(desk.factor[r])
                            and call.ops.scaled(part.sums + r * call.Dv, call.Dv, desk.factor + r,
                                                row_out, call.Dv, 1, call.Dv))
        if fine and row.scores != NULL:
            call.ops.weights(row.scores + row.lo, part.max[r], desk.factor[r],
                             row.scores + row.lo, row.hi - row.lo)
            memset(row.scores, 0, row.lo * sizeof(float))
            memset(row.scores + row.hi, 0, (call.S - row.hi) * sizeof(float))
        elif not fine and (last or part.sum[r] == 0.0):  # which needs no other try
            plain_row(call, at, desk, r, -INFINITY if call.sinks == NULL else call.sinks[h],
                      row_out, &lse)
            if item.lse != NULL:
                lse_of(call, at, h, i)[0] = lse
        elif not fine:
            right = False
            continue
        if call.kind != QKV_FLOAT32:
            call.ops.narrow(call.kind, row_out, <uint16_t *> target, call.Dv)
    return right


cdef void fill_absent(const Call *call, const Item *item) noexcept nogil:
    """Rows past the item's own length are no rows: output 0, weights 0, lse -inf."""
    cdef Py_ssize_t h, i, size = call.Dv * (4 if call.kind == QKV_FLOAT32 else 2)
    for h in range(call.heads):
        for i in range(item.L, item.room):
            memset(item.out + h * call.out_head + i * call.out_row, 0, size)
            if item.weights != NULL:
                memset(item.weights + h * call.weights_head + i * call.weights_row, 0,
                       call.S * sizeof(float))
            if item.lse != NULL:
                (<float *> (item.lse + h * call.lse_head + i * call.lse_row))[0] = -INFINITY
