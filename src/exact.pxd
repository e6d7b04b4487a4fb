# cython: language_level=3, cdivision=True
"""Rows whose numbers are not all finite.

   pass AS_IT_IS      the sums of a row come out NaN or infinite
     look_at_values   whether it met entries of V that are not finite, and sees one of them
     redo_rows
       pass CLEAN     a row that met some and sees none is summed up again with these read as 0,
                      and keeps the bits that it has with finite values in their place
       settle_rows    of the others the maximum and the denominator, which V does not enter, tell:
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

from qkv_ext._core._kernels cimport qkv_run

from src.types cimport (
    CLEAN, Call, DONE, EXACT, Leftover, PENDING, SCORES_ALONE, TO_SCORE, Task, Workspace,
)
from src.plan cimport task_at
from src.arena cimport bind_workspace
from src.rules cimport any_to_do, next_row
from src.rows cimport finish_rows, row_out, settle_rows, start_rows, store_row
from src.splits cimport process_splits


cdef inline void redo_rows(const Call *call, Task *task, Workspace *ws) noexcept nogil:
    """The rows of a task that are not done, all of its splits being there."""
    settle_rows(call, task, ws, PENDING)
    if any_to_do(task, ws, 0, task.m, CLEAN):
        if not process_splits(call, task, ws, CLEAN):
            return
        finish_rows(call, task, ws, True)
    exact_rows(call, task, ws)


cdef inline void exact_rows(const Call *call, Task *task, Workspace *ws) noexcept nogil:
    """The rows of a task that have more to do, from the final maximum and denominator of each."""
    cdef Py_ssize_t r
    for r in range(task.m):
        if ws.todo[r] != TO_SCORE:
            ws.rows[r].scores = NULL  # its weights are written
    if any_to_do(task, ws, 0, task.m, EXACT) and process_splits(call, task, ws, EXACT):
        store_exact(call, task, ws)
    task.scaled = True
    if any_to_do(task, ws, 0, task.m, EXACT) and process_splits(call, task, ws, SCORES_ALONE):
        settle_rows(call, task, ws, TO_SCORE)
        if process_splits(call, task, ws, EXACT):
            store_exact(call, task, ws)


cdef inline void store_exact(const Call *call, const Task *task, Workspace *ws) noexcept nogil:
    """The output of the rows that the pass was made for; every NaN has the same bits."""
    cdef Py_ssize_t r, h, i, d, Dv = call.shape.Dv
    cdef float *out
    for r in range(task.m):
        next_row(call, task, r, &h, &i)
        if any_to_do(task, ws, r, 1, EXACT):
            out = row_out(call, task, ws, r, h, i)
            call.ops.scale_rows(ws.partial.acc + r * Dv, Dv, ws.ones, out, Dv, 1, Dv)
            for d in range(Dv):
                out[d] = NAN if isnan(out[d]) else out[d]
            store_row(call, task, ws, r, h, i)
            ws.todo[r] = DONE


cdef inline void redo_unit(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    """A task: what was left over of a unit."""
    cdef const Call *call = <const Call *> job
    cdef const Leftover *x = &call.arena.left_over
    cdef Py_ssize_t first = index * call.plan.block, r
    cdef Task task
    cdef Workspace ws
    task_at(call, x.tasks[index], &task)
    bind_workspace(call, worker, run, &ws)
    start_rows(call, &task, &ws)
    memcpy(ws.todo, x.todo + first, task.m)
    memcpy(ws.partial.nonfinite_v, x.nonfinite_v + first, task.m)
    memcpy(ws.partial.row_max, x.row_max + first, task.m * sizeof(float))
    memcpy(ws.partial.row_sum, x.row_sum + first, task.m * sizeof(float))
    for r in range(task.m):
        if ws.todo[r] == DONE:
            ws.rows[r].scores = NULL
    redo_rows(call, &task, &ws)
