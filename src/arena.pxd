# cython: language_level=3, cdivision=True
"""The working memory of a call: one block, a piece of it for each worker and each partial."""

from libc.stdint cimport uint8_t

from qkv_ext._core._kernels cimport LANES, TILE, qkv_row, qkv_run

from src.types cimport Call, Leftover, Partial, Workspace


cdef inline void *arena_alloc(char **free, size_t count, size_t size) noexcept nogil:
    """The next count elements, on a cache line of their own."""
    cdef char *start = free[0]
    free[0] = start + (count * size + 63) // 64 * 64
    return start


cdef inline size_t bind_partial(const Call *call, char *memory, Partial *partial) noexcept nogil:
    cdef char *free = memory
    cdef Py_ssize_t block = call.plan.block
    partial.acc = <float *> arena_alloc(&free, block * call.shape.Dv, sizeof(float))
    partial.row_max = <float *> arena_alloc(&free, block, sizeof(float))
    partial.row_sum = <float *> arena_alloc(&free, block, sizeof(float))
    partial.nonfinite_v = <uint8_t *> arena_alloc(&free, block, sizeof(uint8_t))
    return free - memory


cdef inline size_t bind_workspace(const Call *call, int worker, qkv_run *run,
                                  Workspace *ws) noexcept nogil:
    """A worker's memory; returns what it takes."""
    cdef char *memory = call.arena.workspaces + worker * call.arena.workspace_size
    cdef char *free = memory
    cdef Py_ssize_t block = call.plan.block, keys = call.plan.keys
    cdef Py_ssize_t D = call.shape.D, Dv = call.shape.Dv
    ws.worker, ws.run = worker, run
    free += bind_partial(call, free, &ws.partial)
    free += bind_partial(call, free, &ws.total)
    ws.head = <Py_ssize_t *> arena_alloc(&free, 1, sizeof(Py_ssize_t))
    ws.rows = <qkv_row *> arena_alloc(&free, block, sizeof(qkv_row))
    ws.q = <float *> arena_alloc(&free, block * D, sizeof(float))
    ws.scores = <float *> arena_alloc(&free, block * (TILE + LANES), sizeof(float))
    ws.factor = <float *> arena_alloc(&free, block, sizeof(float))
    ws.ones = <float *> arena_alloc(&free, block, sizeof(float))
    ws.scales = <float *> arena_alloc(&free, block, sizeof(float))
    ws.values = <float *> arena_alloc(&free, block * Dv if call.shape.kind else 0, sizeof(float))
    ws.start = <Py_ssize_t *> arena_alloc(&free, block, sizeof(Py_ssize_t))
    ws.end = <Py_ssize_t *> arena_alloc(&free, block, sizeof(Py_ssize_t))
    ws.unmasked = <uint8_t *> arena_alloc(&free, block, 1)
    ws.packed = <uint8_t *> arena_alloc(&free, keys // TILE, sizeof(uint8_t))
    ws.panels = <float *> arena_alloc(&free, keys * D, sizeof(float))
    ws.k_rows = <float *> arena_alloc(&free, TILE * D, sizeof(float))
    ws.v_rows = <float *> arena_alloc(&free, TILE * Dv, sizeof(float))
    ws.v_scale = <float *> arena_alloc(&free, TILE + LANES, sizeof(float))
    # from here on what most calls never touch
    ws.todo = <uint8_t *> arena_alloc(&free, block, sizeof(uint8_t))
    ws.top = <float *> arena_alloc(&free, block, sizeof(float))
    ws.inverse = <float *> arena_alloc(&free, block, sizeof(float))
    ws.v_codes = <float *> arena_alloc(&free, TILE * Dv, sizeof(float))
    ws.admitted = <float *> arena_alloc(&free, block * (TILE + LANES), sizeof(float))
    ws.met = <float *> arena_alloc(&free, block * Dv, sizeof(float))
    return free - memory


cdef inline size_t bind_leftover(Call *call, char *memory) noexcept nogil:
    cdef char *free = memory
    cdef Leftover *x = &call.arena.left_over
    cdef size_t units = call.plan.units, rows = units * call.plan.block
    x.count = 0
    x.tasks = <Py_ssize_t *> arena_alloc(&free, units, sizeof(Py_ssize_t))
    x.todo = <uint8_t *> arena_alloc(&free, rows, sizeof(uint8_t))
    x.nonfinite_v = <uint8_t *> arena_alloc(&free, rows, sizeof(uint8_t))
    x.row_max = <float *> arena_alloc(&free, rows, sizeof(float))
    x.row_sum = <float *> arena_alloc(&free, rows, sizeof(float))
    return free - memory
