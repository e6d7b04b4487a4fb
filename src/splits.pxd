# cython: language_level=3, cdivision=True
"""Splits: the rows of a task against 1024 keys, with a maximum and sums of their own, and how they
are merged, from left to right.
"""

from libc.string cimport memcpy

from qkv_ext._core._kernels cimport HARDLY_LARGER, qkv_correction, qkv_run

from src.types cimport (
    AS_IT_IS, Call, DONE, EXACT, Item, Leftover, PENDING, Partial, Task, Workspace,
)
from src.plan cimport item_of, take_split, task_at
from src.arena cimport bind_partial, bind_workspace
from src.rules cimport key_range
from src.nonfinite cimport look_at_values
from src.rows cimport finish_rows, start_rows
from src.tiles cimport process_tiles


cdef inline void copy_partial(const Call *call, const Partial *source, Partial *target,
                              Py_ssize_t m) noexcept nogil:
    memcpy(target.acc, source.acc, m * call.shape.Dv * sizeof(float))
    memcpy(target.row_max, source.row_max, m * sizeof(float))
    memcpy(target.row_sum, source.row_sum, m * sizeof(float))
    memcpy(target.nonfinite_v, source.nonfinite_v, m)


cdef inline float shifted(float before, float largest) noexcept nogil:
    """What is subtracted from scores: as softmax_tile has it, so that few sums are rounded."""
    return largest if largest > before + HARDLY_LARGER else before


cdef inline void merge_partial(const Call *call, const Partial *right, Partial *left,
                               Py_ssize_t m) noexcept nogil:
    """left becomes left and right together."""
    cdef Py_ssize_t r, d, Dv = call.shape.Dv
    cdef float top, keep, add
    cdef float *sums
    cdef const float *more
    for r in range(m):
        top = shifted(left.row_max[r], right.row_max[r])
        keep = qkv_correction(left.row_max[r], top)
        add = qkv_correction(right.row_max[r], top)
        sums = left.acc + r * Dv
        more = right.acc + r * Dv
        for d in range(Dv):
            sums[d] = sums[d] * keep + more[d] * add
        left.row_sum[r] = left.row_sum[r] * keep + right.row_sum[r] * add
        left.row_max[r] = top
        left.nonfinite_v[r] |= right.nonfinite_v[r]


cdef inline bint process_split(const Call *call, const Task *task, Workspace *ws) noexcept nogil:
    """The sums of a split, and what V has to do with those that are not finite; False where the run
    was stopped."""
    cdef float *sums = ws.partial.acc
    cdef Py_ssize_t r, Dv = call.shape.Dv
    if not process_tiles(call, task, ws, AS_IT_IS, NULL):
        return False
    if call.ops.scale_rows(sums, Dv, ws.ones, sums, Dv, task.m, Dv):
        return True
    for r in range(task.m):
        ws.todo[r] = DONE if call.ops.scale_rows(sums, Dv, ws.ones, sums, Dv, 1, Dv) else PENDING
        sums += Dv
    return look_at_values(call, task, ws)


cdef inline bint process_splits(const Call *call, Task *task, Workspace *ws,
                                int how) noexcept nogil:
    """A pass over all keys of the item, split by split; False where the run was stopped."""
    cdef Py_ssize_t n, j, lo, hi, splits = max(task.item.splits, task.item.splits_per_task)
    cdef Partial partial = ws.partial
    if splits == 1:
        return process_tiles(call, task, ws, how, NULL)
    key_range(ws.rows, task.m, &lo, &hi)
    for n in range(splits):
        take_split(task, n)
        if how == AS_IT_IS and n > 0 and (hi <= task.first_key or task.end_key <= lo):
            continue  # to merge nothing changes no bit
        if not (process_split(call, task, ws) if how == AS_IT_IS
                else process_tiles(call, task, ws, how, NULL)):
            return False
        if n == 0:
            copy_partial(call, &partial, &ws.total, task.m)
        elif how != EXACT:
            merge_partial(call, &partial, &ws.total, task.m)
        else:
            for j in range(task.m * call.shape.Dv):
                ws.total.acc[j] += partial.acc[j]
    ws.partial, ws.total = ws.total, partial
    return True


cdef inline void bind_waiting(const Call *call, Py_ssize_t index, Partial *partial) noexcept nogil:
    """The room of a partial that waits; -1 for the total of those that do not any more."""
    cdef Py_ssize_t slot = 0 if index < 0 else 1 + index % call.arena.slots
    bind_partial(call, call.arena.waiting + slot * call.arena.partial_size, partial)


cdef inline void store_partial(const Call *call, const Task *task,
                               const Workspace *ws) noexcept nogil:
    """The sums of a split wait for their left neighbour."""
    cdef Partial partial
    bind_waiting(call, task.partial, &partial)
    copy_partial(call, &ws.partial, &partial, task.m)


cdef inline void leave_over(Call *call, const Task *task, const Workspace *ws) noexcept nogil:
    """Remember the rows of a unit that are not done; partials are reduced one at a time."""
    cdef Leftover *x = &call.arena.left_over
    cdef Py_ssize_t first = x.count * call.plan.block
    x.tasks[x.count] = task.item.first_task + task.kv_head * task.item.splits
    memcpy(x.todo + first, ws.todo, task.m)
    memcpy(x.nonfinite_v + first, ws.partial.nonfinite_v, task.m)
    memcpy(x.row_max + first, ws.partial.row_max, task.m * sizeof(float))
    memcpy(x.row_sum + first, ws.partial.row_sum, task.m * sizeof(float))
    x.count += 1


cdef inline void reduce_partial(void *job, Py_ssize_t index, int worker,
                                qkv_run *run) noexcept nogil:
    """The next partial in order joins the total of its rows; the last one finishes them."""
    cdef Call *call = <Call *> job
    cdef Task task
    cdef Partial total, partial
    cdef Workspace ws
    cdef const Item *item = &call.plan.items[item_of(call, index, True)]
    task_at(call, item.first_task + index - item.first_partial, &task)
    bind_waiting(call, -1, &total)
    bind_waiting(call, index, &partial)
    if task.split == 0:
        copy_partial(call, &partial, &total, task.m)
    else:
        merge_partial(call, &partial, &total, task.m)
    if task.split == task.item.splits - 1:
        bind_workspace(call, worker, run, &ws)
        start_rows(call, &task, &ws)
        ws.partial = total
        if not finish_rows(call, &task, &ws, False):
            leave_over(call, &task, &ws)
