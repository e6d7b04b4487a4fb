# cython: language_level=3, cdivision=True
"""Splits: the rows of a task against 1024 keys, with a maximum and sums of their own, and how they
are merged, from left to right.
"""

from libc.string cimport memcpy

from qkv_ext._kernels cimport HARDLY_LARGER, qkv_correction, qkv_run

from src.types cimport AS_IT_IS, Call, DONE, Desk, Leftover, PENDING, Part, Place
from src.plan cimport find_place, take_split
from src.arena cimport lay_desk, lay_part
from src.rules cimport extent
from src.nonfinite cimport look_at_values
from src.rows cimport finish_rows, start_rows
from src.tiles cimport walk


cdef inline void copy_part(const Call *call, const Part *source, Part *target,
                           Py_ssize_t m) noexcept nogil:
    memcpy(target.sums, source.sums, m * call.Dv * sizeof(float))
    memcpy(target.max, source.max, m * sizeof(float))
    memcpy(target.sum, source.sum, m * sizeof(float))
    memcpy(target.nonfinite_v, source.nonfinite_v, m)


cdef inline float shifted(float before, float largest) noexcept nogil:
    """What is subtracted from scores: as softmax_tile has it, so that few sums are rounded."""
    return largest if largest > before + HARDLY_LARGER else before


cdef inline void merge_part(const Call *call, const Part *right, Part *left,
                            Py_ssize_t m) noexcept nogil:
    """left becomes left and right together."""
    cdef Py_ssize_t r, d
    cdef float top, keep, add
    cdef float *sums
    cdef const float *more
    for r in range(m):
        top = shifted(left.max[r], right.max[r])
        keep = qkv_correction(left.max[r], top)
        add = qkv_correction(right.max[r], top)
        sums = left.sums + r * call.Dv
        more = right.sums + r * call.Dv
        for d in range(call.Dv):
            sums[d] = sums[d] * keep + more[d] * add
        left.sum[r] = left.sum[r] * keep + right.sum[r] * add
        left.max[r] = top
        left.nonfinite_v[r] |= right.nonfinite_v[r]


cdef inline bint walk_split(const Call *call, const Place *at, Desk *desk, int worker,
                            qkv_run *run) noexcept nogil:
    """The sums of a split, and what V has to do with those that are not finite; False where the run
    was stopped."""
    cdef float *sums
    cdef Py_ssize_t r
    if not walk(call, at, desk, AS_IT_IS, NULL, worker, run):
        return False
    if call.ops.scaled(desk.part.sums, call.Dv, desk.ones, desk.part.sums, call.Dv, at.m, call.Dv):
        return True
    for r in range(at.m):
        sums = desk.part.sums + r * call.Dv
        desk.todo[r] = DONE if call.ops.scaled(sums, call.Dv, desk.ones, sums, call.Dv, 1,
                                               call.Dv) else PENDING
    return look_at_values(call, at, desk, worker, run)


cdef inline bint walk_splits(const Call *call, Place *at, Desk *desk, int worker,
                             qkv_run *run) noexcept nogil:
    """The sums of all splits of the item, one after the other; False where the run was stopped."""
    cdef Py_ssize_t n, lo, hi
    cdef Part part = desk.part
    extent(desk.rows, at.m, &lo, &hi)
    for n in range(at.item.passes):
        take_split(at, n)
        if n > 0 and (hi <= at.first_key or at.end_key <= lo):
            continue  # to merge nothing changes no bit
        if not walk_split(call, at, desk, worker, run):
            return False
        if n == 0:
            copy_part(call, &part, &desk.total, at.m)
        else:
            merge_part(call, &part, &desk.total, at.m)
    desk.part, desk.total = desk.total, part
    return True


cdef inline void leave_part(const Call *call, const Place *at, const Desk *desk) noexcept nogil:
    """The sums of a split wait for their left neighbour."""
    cdef Part part
    lay_part(call, call.waiting + (1 + at.part % call.slots) * call.part_size, &part)
    copy_part(call, &desk.part, &part, at.m)


cdef inline void leave_over(Call *call, const Place *at, const Desk *desk) noexcept nogil:
    """Remember the rows of a unit that are not done; parts retire one at a time."""
    cdef Leftover *x = &call.left_over
    cdef Py_ssize_t first = x.count * call.block
    x.tasks[x.count] = at.item.first_task + at.kv_head * at.item.splits
    memcpy(x.todo + first, desk.todo, at.m)
    memcpy(x.nonfinite_v + first, desk.part.nonfinite_v, at.m)
    memcpy(x.max + first, desk.part.max, at.m * sizeof(float))
    memcpy(x.sum + first, desk.part.sum, at.m * sizeof(float))
    x.count += 1


cdef inline void retire_part(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    """The next part in order joins the total of its rows; the last one finishes them."""
    cdef Call *call = <Call *> job
    cdef Place at
    cdef Part total, part
    cdef Desk desk
    cdef Py_ssize_t low = 0, high = call.count, middle
    while high - low > 1:  # items without parts share their first_part with the next: the last wins
        middle = (low + high) // 2
        if call.items[middle].first_part <= index:
            low = middle
        else:
            high = middle
    find_place(call, call.items[low].first_task + index - call.items[low].first_part, &at)
    lay_part(call, call.waiting, &total)
    lay_part(call, call.waiting + (1 + index % call.slots) * call.part_size, &part)
    if at.split == 0:
        copy_part(call, &part, &total, at.m)
    else:
        merge_part(call, &part, &total, at.m)
    if at.split == at.item.splits - 1:
        lay_desk(call, call.desks + worker * call.desk_size, &desk)
        start_rows(call, &at, &desk)
        desk.part = total
        if not finish_rows(call, &at, &desk, False, worker, run):
            leave_over(call, &at, &desk)
