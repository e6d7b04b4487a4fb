# cython: language_level=3, cdivision=True
"""The beginning and the end of a row: where it comes from, and how it ends."""

from libc.math cimport INFINITY, NAN, exp, expf, isfinite, isnan, logf
from libc.stdint cimport uint16_t, uint8_t
from libc.string cimport memset

from qkv_ext._core._kernels cimport (
    QKV_BIAS, QKV_BLOCKS, QKV_FLOAT32, QKV_KEEP, QKV_SEGMENT, QKV_SLOPE, qkv_row, qkv_run,
    qkv_scaled, stopped,
)

from src.types cimport (
    Call, DONE, Item, MET, PENDING, Partial, TO_SCORE, TO_WEIGH, Task, V_BITS, Workspace, row_at,
)
from src.rules cimport (
    allowed, contiguous_run, find_row, next_row, overflows, reach_of, sees_any,
)


cdef inline void gather_rows(const Call *call, const Task *task, Workspace *ws) noexcept nogil:
    """The query rows of a task side by side, as floats, scaled."""
    cdef Py_ssize_t r = 0, i, h, n, D = call.shape.D
    cdef Py_ssize_t stride = call.strides.q.row if call.shape.group == 1 else call.strides.q.head
    cdef const char *source
    cdef float *target
    while r < task.m:
        n = contiguous_run(call, task, r)
        find_row(call, task, r, &h, &i)
        source = row_at(task.item.q, call.strides.q, h, i)
        target = ws.q + r * D
        if call.shape.kind == QKV_FLOAT32:
            call.ops.scale_rows(<const float *> source, stride // <Py_ssize_t> sizeof(float),
                                ws.scales, target, D, n, D)
        else:
            call.ops.widen(call.shape.kind, source, stride // <Py_ssize_t> sizeof(uint16_t), target,
                           n, D)
            call.ops.scale_rows(target, D, ws.scales, target, D, n, D)
        r += n


cdef inline void start_rows(const Call *call, const Task *task, Workspace *ws) noexcept nogil:
    """Gather the scaled query rows of a task, and what each of them is allowed to see."""
    cdef const Item *item = task.item
    cdef const char *mask_row
    cdef qkv_row *row
    cdef Py_ssize_t r, i, h, position
    gather_rows(call, task, ws)
    if qkv_scaled(call.shape.stored):
        ws.reach = reach_of(call, ws.q, task.m)
    for r in range(task.m):
        next_row(call, task, r, &h, &i)
        row = &ws.rows[r]
        row[0] = call.rules.row
        position = i + item.diagonal
        row.lo = min(max(position - call.rules.left, 0), item.S)
        row.hi = min(max(position + call.rules.right + 1, row.lo), item.S)
        row.position = position
        if item.slopes != NULL and item.slopes[h] != 0.0:
            row.slope = item.slopes[h]
            row.modifiers |= QKV_SLOPE
        if item.mask != NULL:
            mask_row = row_at(item.mask, call.strides.mask, h, i)
            if call.rules.bool_mask:
                row.keep = <const uint8_t *> mask_row
                row.modifiers |= QKV_KEEP
            else:
                row.bias = <const float *> mask_row
                row.modifiers |= QKV_BIAS
        if item.q_segments != NULL:
            row.segment, row.segments = item.q_segments[i], item.k_segments
            row.modifiers |= QKV_SEGMENT
        if item.block_mask != NULL:
            row.blocks = <const uint8_t *> row_at(item.block_mask, call.strides.blocks, h,
                                                  i // call.rules.block_rows)
            row.modifiers |= QKV_BLOCKS
        if item.weights != NULL:
            row.scores = <float *> row_at(item.weights, call.strides.weights, h, i)


cdef inline float *row_out(const Call *call, const Task *task, Workspace *ws, Py_ssize_t r,
                           Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    """Where the floats of an output row go: to the output, unless that is of 16 bits."""
    if call.shape.kind != QKV_FLOAT32:
        return ws.values + r * call.shape.Dv
    return <float *> row_at(task.item.out, call.strides.out, h, i)


cdef inline void store_row(const Call *call, const Task *task, Workspace *ws, Py_ssize_t r,
                           Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    """An output row of 16 bits, from its floats."""
    if call.shape.kind != QKV_FLOAT32:
        call.ops.narrow(call.shape.kind, ws.values + r * call.shape.Dv,
                        <uint16_t *> row_at(task.item.out, call.strides.out, h, i), call.shape.Dv)


cdef inline void write_weights(const Call *call, qkv_row *row, float top,
                               float factor) noexcept nogil:
    """The weights of a row in the place of its scores, once."""
    if row.scores != NULL:
        call.ops.weights(row.scores + row.lo, top, factor, row.scores + row.lo, row.hi - row.lo)
        memset(row.scores, 0, row.lo * sizeof(float))
        memset(row.scores + row.hi, 0, (call.shape.S - row.hi) * sizeof(float))
        row.scores = NULL


cdef inline bint find_factors(const Call *call, const Task *task, Workspace *ws,
                              bint again) noexcept nogil:
    """factor = 1 / sum for every row, with sinks, and lse; returns whether the sums settle all.

    NaN for a row that summed up nothing, most often for want of an allowed key.
    again: for the rows alone that are pending.
    """
    cdef Partial *partial = &ws.partial
    cdef Py_ssize_t r, i, h
    cdef float top, sum, factor, sink = -INFINITY
    cdef bint fine, settled = True
    for r in range(task.m):
        next_row(call, task, r, &h, &i)
        if again and ws.todo[r] != PENDING:
            continue
        top, sum, factor = partial.row_max[r], partial.row_sum[r], 1.0
        fine = sum > 0.0 and not overflows(call, task, ws, r)
        if call.rules.sinks != NULL:
            sink = call.rules.sinks[h]
            fine = fine and isfinite(top) and not (isnan(sink) or sink == INFINITY)
            if fine and sink > top + 80.0:  # a factor that is subnormal: see exact.pxd
                fine = False
            elif fine and sink > top:
                factor = <float> exp(<double> top - sink)  # one error for all: none of its own
                top = sink
                sum = sum * factor + 1.0
            elif fine:
                sum += expf(sink - top)
        ws.factor[r] = factor / sum if fine else NAN
        settled = settled and fine
        if task.item.lse != NULL and fine:
            (<float *> row_at(task.item.lse, call.strides.lse, h, i))[0] = top + logf(sum)
    return settled


cdef inline bint scale_rows(const Call *call, const Task *task, Workspace *ws) noexcept nogil:
    """out = factor sums for all rows of a task; returns whether every one of them is finite."""
    cdef Py_ssize_t r = 0, i, h, n, Dv = call.shape.Dv
    cdef Py_ssize_t stride = call.strides.out.head if call.shape.group > 1 else call.strides.out.row
    cdef bint fine = True
    if call.shape.kind != QKV_FLOAT32:
        return call.ops.scale_rows(ws.partial.acc, Dv, ws.factor, ws.values, Dv, task.m, Dv)
    while r < task.m:
        n = contiguous_run(call, task, r)
        find_row(call, task, r, &h, &i)
        fine = call.ops.scale_rows(ws.partial.acc + r * Dv, Dv, ws.factor + r,
                                   row_out(call, task, ws, r, h, i),
                                   stride // <Py_ssize_t> sizeof(float), n, Dv) and fine
        r += n
    return fine


cdef inline bint finish_rows(const Call *call, const Task *task, Workspace *ws,
                             bint again) noexcept nogil:
    """out = sums / sum, with sinks, weights and lse; returns whether no row has more to do.

    A row that summed up nothing is settled; one whose sums are not finite is pending.
    again: the rows that are pending already, and there is no other way for them but to be settled.
    """
    cdef Partial *partial = &ws.partial
    cdef Py_ssize_t r, i, h, Dv = call.shape.Dv
    cdef float *out
    cdef qkv_row *row
    cdef bint all_fine, fine, right = True
    all_fine = find_factors(call, task, ws, again) and not again and scale_rows(call, task, ws)
    if all_fine and task.item.weights == NULL and call.shape.kind == QKV_FLOAT32:
        return True
    for r in range(task.m):
        next_row(call, task, r, &h, &i)
        row = &ws.rows[r]
        if (row.scores != NULL or not all_fine) and stopped(ws.run, ws.worker):
            return True
        if not again or ws.todo[r] == PENDING:
            out = row_out(call, task, ws, r, h, i)
            fine = all_fine or (not isnan(ws.factor[r])
                                and call.ops.scale_rows(partial.acc + r * Dv, Dv, ws.factor + r,
                                                        out, Dv, 1, Dv))
            ws.todo[r] = DONE if fine else PENDING
            if fine:
                write_weights(call, row, partial.row_max[r], ws.factor[r])
                store_row(call, task, ws, r, h, i)
            elif again or partial.row_sum[r] == 0.0:
                settle_row(call, task, ws, r, h, i)
        right = right and ws.todo[r] == DONE
    return right


cdef inline void settle_row(const Call *call, const Task *task, Workspace *ws, Py_ssize_t r,
                            Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    """A row by its maximum and its denominator: done, or what is to be done.

    Its lse and its weights are final with them, and its output where it is done.
    """
    cdef qkv_row *row = &ws.rows[r]
    cdef float sink = -INFINITY if call.rules.sinks == NULL else call.rules.sinks[h]
    cdef float top = ws.partial.row_max[r], total = ws.partial.row_sum[r], lse, value = 0.0
    cdef float *out = row_out(call, task, ws, r, h, i)
    cdef Py_ssize_t j
    if overflows(call, task, ws, r):
        ws.todo[r] = TO_SCORE
        return
    ws.todo[r] = DONE
    ws.top[r] = ws.inverse[r] = 0.0
    if total == 0.0 and not sees_any(row):
        lse = sink
        write_weights(call, row, 0.0, 0.0)
    else:
        if call.rules.sinks != NULL:
            top = top if sink < top else sink
            total = total * expf(ws.partial.row_max[r] - top) + expf(sink - top)
        lse = top + logf(total)
        if total > 0.0 and isfinite(top):
            ws.todo[r] = TO_SCORE if task.scaled else TO_WEIGH
            ws.top[r], ws.inverse[r] = top, 1.0 / total
            write_weights(call, row, top, ws.inverse[r])
        elif qkv_scaled(call.shape.stored) and not task.scaled:
            # a score of integers may be infinite where the formula's is not
            ws.todo[r] = TO_SCORE
            return
        else:
            value = lse = NAN
            if row.scores != NULL:
                for j in range(call.shape.S):
                    row.scores[j] = NAN if allowed(row, j) else 0.0
                row.scores = NULL
    if ws.todo[r] == DONE:
        for j in range(call.shape.Dv):
            out[j] = value
        store_row(call, task, ws, r, h, i)
    if task.item.lse != NULL:
        (<float *> row_at(task.item.lse, call.strides.lse, h, i))[0] = lse


cdef inline void settle_rows(const Call *call, const Task *task, Workspace *ws,
                             int todo) noexcept nogil:
    """The rows that have this to do, but for those that a pass CLEAN may settle."""
    cdef Py_ssize_t r, h, i
    for r in range(task.m):
        next_row(call, task, r, &h, &i)
        if ws.todo[r] == todo and (todo != PENDING or ws.partial.nonfinite_v[r] & V_BITS != MET):
            settle_row(call, task, ws, r, h, i)


cdef inline void fill_absent(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    """Rows past the item's own length are padding: output 0, weights 0, lse -inf."""
    cdef const Call *call = <const Call *> job
    cdef const Item *item = &call.plan.items[index // call.shape.heads]
    cdef Py_ssize_t h = index % call.shape.heads, i
    cdef Py_ssize_t size = call.shape.Dv * (4 if call.shape.kind == QKV_FLOAT32 else 2)
    for i in range(item.L, item.padded_len):
        memset(row_at(item.out, call.strides.out, h, i), 0, size)
        if item.weights != NULL:
            if stopped(run, worker):
                return
            memset(row_at(item.weights, call.strides.weights, h, i), 0,
                   call.shape.S * sizeof(float))
        if item.lse != NULL:
            (<float *> row_at(item.lse, call.strides.lse, h, i))[0] = -INFINITY
