# cython: language_level=3, cdivision=True
"""The working memory of a call: one block, of which each worker and each split has its part."""

from libc.stdint cimport uint8_t

from qkv_ext._kernels cimport LANES, TILE, qkv_row

from src.types cimport Call, Desk, Leftover, Part


cdef inline void *carve(char **at, size_t count, size_t size) noexcept nogil:
    """The next count elements, on a cache line of their own."""
    cdef char *start = at[0]
    at[0] = start + (count * size + 63) // 64 * 64
    return start


cdef inline size_t lay_part(const Call *call, char *memory, Part *part) noexcept nogil:
    cdef char *at = memory
    part.sums = <float *> carve(&at, call.block * call.Dv, sizeof(float))
    part.max = <float *> carve(&at, call.block, sizeof(float))
    part.sum = <float *> carve(&at, call.block, sizeof(float))
    part.nonfinite_v = <uint8_t *> carve(&at, call.block, sizeof(uint8_t))
    return at - memory


cdef inline size_t lay_desk(const Call *call, char *memory, Desk *desk) noexcept nogil:
    """Lay out a worker's memory from there on; returns what it takes."""
    cdef char *at = memory
    at += lay_part(call, at, &desk.part)
    at += lay_part(call, at, &desk.total)
    desk.head = <Py_ssize_t *> carve(&at, 1, sizeof(Py_ssize_t))
    desk.rows = <qkv_row *> carve(&at, call.block, sizeof(qkv_row))
    desk.q = <float *> carve(&at, call.block * call.D, sizeof(float))
    desk.scores = <float *> carve(&at, call.block * (TILE + LANES), sizeof(float))
    desk.factor = <float *> carve(&at, call.block, sizeof(float))
    desk.ones = <float *> carve(&at, call.block, sizeof(float))
    desk.scales = <float *> carve(&at, call.block, sizeof(float))
    desk.values = <float *> carve(&at, call.block * call.Dv if call.kind else 0, sizeof(float))
    desk.start = <Py_ssize_t *> carve(&at, call.block, sizeof(Py_ssize_t))
    desk.end = <Py_ssize_t *> carve(&at, call.block, sizeof(Py_ssize_t))
    desk.packed = <uint8_t *> carve(&at, call.keys // TILE, sizeof(uint8_t))
    desk.panels = <float *> carve(&at, call.keys * call.D, sizeof(float))
    desk.k_rows = <float *> carve(&at, TILE * call.D, sizeof(float))
    desk.v_rows = <float *> carve(&at, TILE * call.Dv, sizeof(float))
    desk.v_scale = <float *> carve(&at, TILE + LANES, sizeof(float))
    # from here on what most calls never touch
    desk.todo = <uint8_t *> carve(&at, call.block, sizeof(uint8_t))
    desk.top = <float *> carve(&at, call.block, sizeof(float))
    desk.inverse = <float *> carve(&at, call.block, sizeof(float))
    desk.v_codes = <float *> carve(&at, TILE * call.Dv, sizeof(float))
    desk.admitted = <float *> carve(&at, call.block * (TILE + LANES), sizeof(float))
    desk.met = <float *> carve(&at, call.block * call.Dv, sizeof(float))
    return at - memory


cdef inline size_t lay_left_over(Call *call, char *memory) noexcept nogil:
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
