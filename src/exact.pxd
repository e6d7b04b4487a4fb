# cython: language_level=3, cdivision=True
"""Rows whose numbers are not all finite.

   walk AS_IT_IS      the sums of a row come out NaN or infinite
     look_at_values   whether it met entries of V that are not finite, and sees one of them
     redo_rows
       walk CLEAN     a row that met some and sees none is summed up again with these read as 0,
                      and keeps the bits that it has with finite values in their place
       settle_row     of the others the maximum and the denominator, in which V has no part, tell:
                      no allowed key     zeros
                      not finite         NaN, as the formula has it
                      finite             exact_rows

In exact_rows weights are divided by the denominator before they meet V, as the formula has it.  A
weight w of an allowed key adds w v to the sums where v is finite.  What it makes of other entries
is found by one more product, of whole numbers: 1 for each allowed key whose weight is not 0,
UNDERFLOWN for each whose weight is, times the codes of V.  The result says which infinities were
met, and whether 0 met one, which is NaN.  An excluded key has 0 in both products.

Which of this is done for a row depends on that row alone.
"""

from libc.math cimport NAN, isnan
from libc.string cimport memcpy

from qkv_ext._kernels cimport qkv_run

from src.types cimport (
    CLEAN, Call, DONE, Desk, EXACT, Leftover, MET, PENDING, Part, Place, SCORES_ALONE, TO_SCORE,
    V_BITS,
)
from src.plan cimport find_place, take_split
from src.arena cimport lay_desk
from src.rules cimport any_to_do, first_row, next_row
from src.rows cimport finish_rows, row_out, settle_row, start_rows, store_row
from src.tiles cimport walk
from src.splits cimport copy_part, merge_part


cdef inline bint walk_again(const Call *call, Place *at, Desk *desk, int how, int worker,
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


cdef inline void redo_rows(const Call *call, Place *at, Desk *desk, int worker,
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


cdef inline void exact_rows(const Call *call, Place *at, Desk *desk, int worker,
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


cdef inline void settle_scored(const Call *call, const Place *at, Desk *desk) noexcept nogil:
    cdef Py_ssize_t r, h, i
    first_row(call, at, &h, &i)
    for r in range(at.m):
        if r > 0:
            next_row(call, at, &h, &i)
        if desk.todo[r] == TO_SCORE:
            settle_row(call, at, desk, r, h, i, row_out(call, at, desk, r, h, i))
            if desk.todo[r] == DONE:
                store_row(call, at, desk, r, h, i)


cdef inline void store_exact(const Call *call, const Place *at, Desk *desk) noexcept nogil:
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


cdef inline void redo_unit(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
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
