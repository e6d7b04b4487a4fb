# cython: language_level=3, cdivision=True
"""The beginning and the end of a row: where it comes from, and how it ends."""

from libc.math cimport INFINITY, NAN, exp, expf, isfinite, isnan, logf
from libc.stdint cimport uint16_t, uint8_t
from libc.string cimport memset

from qkv_ext._kernels cimport QKV_FLOAT32, QKV_INT8, qkv_row, qkv_run, stopped

from src.types cimport Call, DONE, Desk, Item, PENDING, Part, Place, TO_SCORE, TO_WEIGH
from src.rules cimport alike, allowed, first_row, next_row, overflows, reach_of, sees_any


cdef inline void gather_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
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


cdef inline void start_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
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


cdef inline float *lse_of(const Call *call, const Place *at, Py_ssize_t h,
                          Py_ssize_t i) noexcept nogil:
    return <float *> (at.item.lse + h * call.lse_head + i * call.lse_row)


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


cdef inline void write_weights(const Call *call, qkv_row *row, float top,
                               float factor) noexcept nogil:
    """The weights of a row in the place of its scores, once."""
    if row.scores != NULL:
        call.ops.weights(row.scores + row.lo, top, factor, row.scores + row.lo, row.hi - row.lo)
        memset(row.scores, 0, row.lo * sizeof(float))
        memset(row.scores + row.hi, 0, (call.S - row.hi) * sizeof(float))
        row.scores = NULL


cdef inline bint find_factors(const Call *call, const Place *at, Desk *desk,
                              bint again) noexcept nogil:
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
            if fine and sink > top + 80.0:  # a factor that is subnormal: see exact.pxd
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


cdef inline bint scale_rows(const Call *call, const Place *at, Desk *desk) noexcept nogil:
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


cdef inline bint finish_rows(const Call *call, const Place *at, Desk *desk, bint again, int worker,
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


cdef inline void settle_row(const Call *call, const Place *at, Desk *desk, Py_ssize_t r,
                            Py_ssize_t h, Py_ssize_t i, float *out) noexcept nogil:
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


cdef inline void fill_absent(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
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
