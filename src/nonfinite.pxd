# cython: language_level=3, cdivision=True
"""What entries of V that are not finite do to the sums of a row; exact.pxd says when."""

from libc.math cimport INFINITY, NAN
from libc.stdint cimport uint8_t
from libc.string cimport memset

from qkv_ext._core._kernels cimport (
    LANES, QKV_ALLOWS, QKV_BIAS, QKV_BLOCKS, QKV_EXCLUDES, QKV_KEEP, QKV_MINUS, QKV_SEGMENT, TILE,
    qkv_is_kept, qkv_row, stopped,
)

from src.types cimport Call, MET, PENDING, SEEN, Task, Workspace
from src.rules cimport allowed, key_range, look_at_tile
from src.keys cimport Tile, is_finite, take_values


cdef enum:
    UNDERFLOWN = 1 << 22  # more than all codes of a tile together


cdef inline bint look_at_values(const Call *call, const Task *task, Workspace *ws) noexcept nogil:
    """What V has to do with the sums of pending rows; False where the run was stopped."""
    cdef Py_ssize_t lo, hi, tile, n, r
    cdef bint open = True, masked = ws.rows[0].modifiers & QKV_EXCLUDES
    cdef Tile values
    key_range(ws.rows, task.m, &lo, &hi)
    lo = max(lo, task.first_key)
    hi = min(hi, task.end_key)
    for tile from lo // TILE * TILE <= tile < hi by TILE:
        if stopped(ws.run, ws.worker):
            return False
        n = min(TILE, hi - tile)
        if masked and not look_at_tile(call, task, ws, tile, n) & QKV_ALLOWS:
            continue  # such a tile was not met
        take_values(call, task, ws, tile, n, True, &values)
        if is_finite(call, &values, 0, n):
            continue
        mark_rows(call, task, ws, &values, tile, n)
        open = False
        for r in range(task.m):
            open = open or (ws.todo[r] == PENDING and not ws.partial.nonfinite_v[r] & SEEN)
        if not open:
            break
    return True


cdef inline void mark_rows(const Call *call, const Task *task, Workspace *ws, const Tile *values,
                           Py_ssize_t tile, Py_ssize_t n) noexcept nogil:
    """nonfinite_v of the pending rows, for a tile that has entries which are not finite."""
    cdef uint8_t *marks = ws.partial.nonfinite_v
    cdef Py_ssize_t j, r
    cdef bint known
    for r in range(task.m):
        marks[r] |= MET
    for j in range(n):
        known = False  # that the row of V is not finite: looked at when somebody may see it
        for r in range(task.m):
            if marks[r] & SEEN or ws.todo[r] != PENDING or not allowed(ws.rows + r, tile + j):
                continue
            if not known and is_finite(call, values, j, 1):
                break
            known = True
            marks[r] |= SEEN


cdef inline void admit_row(const qkv_row *row, const float *weights, float *admitted,
                           Py_ssize_t first, Py_ssize_t n) noexcept nogil:
    """admitted[n]: 0 for an excluded key, UNDERFLOWN where an allowed one has weight 0, else 1."""
    cdef Py_ssize_t lo = min(max(row.lo - first, 0), n), hi = min(max(row.hi - first, lo), n), j
    cdef const uint8_t *keep
    cdef const float *bias
    for j in range(n):
        admitted[j] = 1.0 if weights[j] > 0.0 else <float> UNDERFLOWN
    memset(admitted, 0, lo * sizeof(float))
    memset(admitted + hi, 0, (n - hi) * sizeof(float))
    if row.modifiers & QKV_KEEP:
        keep = row.keep + first * row.mask_step
        for j in range(lo, hi):
            admitted[j] = admitted[j] if keep[j * row.mask_step] else 0.0
    if row.modifiers & QKV_BIAS:
        bias = row.bias + first * row.mask_step
        for j in range(lo, hi):
            admitted[j] = 0.0 if bias[j * row.mask_step] == -INFINITY else admitted[j]
    if row.modifiers & (QKV_SEGMENT | QKV_BLOCKS):
        for j in range(lo, hi):
            admitted[j] = admitted[j] if qkv_is_kept(row, first + j) else 0.0


cdef inline float met_by(float codes) noexcept nogil:
    """What a sum of codes makes of a finite sum: itself, an infinity, or NaN."""
    cdef int all
    if codes >= UNDERFLOWN:
        return NAN
    all = <int> codes
    if all % QKV_MINUS and all >= QKV_MINUS:
        return NAN
    return -INFINITY if all >= QKV_MINUS else INFINITY


cdef inline void add_nonfinite(const Call *call, Workspace *ws, const Tile *values,
                               Py_ssize_t first, Py_ssize_t m, Py_ssize_t tile) noexcept nogil:
    """Add to the sums of m rows what their weights make of the tile's non-finite entries."""
    cdef Py_ssize_t lds = TILE + LANES, r, c, j, width, Dv = call.shape.Dv
    cdef Py_ssize_t start = ws.start[first], n = ws.end[first] - start
    cdef float *sums = ws.partial.acc + first * Dv
    cdef float *admitted = ws.admitted + first * lds
    if values.finite:
        return
    for r in range(m):
        admit_row(ws.rows + first + r, ws.scores + (first + r) * lds + start,
                  admitted + r * lds, tile + start, n)
    for c from 0 <= c < Dv by values.width:
        width = min(values.width, Dv - c)
        call.ops.product(admitted, lds, ws.v_codes + c * TILE + start * width, width, ws.met + c,
                         Dv, NULL, m, width, n)
    for j in range(m * Dv):
        if ws.met[j] != 0.0:
            sums[j] += met_by(ws.met[j])


cdef inline void weigh_rows(const Call *call, Workspace *ws, Py_ssize_t first, Py_ssize_t m,
                            Py_ssize_t tile) noexcept nogil:
    """Scores of m rows become their final weights."""
    cdef Py_ssize_t start = ws.start[first], n = ws.end[first] - start, r, j, lo, hi
    cdef float *scores
    cdef const qkv_row *row
    for r in range(first, first + m):
        row = &ws.rows[r]
        scores = ws.scores + r * (TILE + LANES) + start
        lo = min(max(row.lo - tile - start, 0), n)
        hi = min(max(row.hi - tile - start, lo), n)
        call.ops.adjust(scores, n, tile + start, row)
        for j in range(lo):
            scores[j] = -INFINITY
        for j in range(hi, n):
            scores[j] = -INFINITY
        call.ops.weights(scores, ws.top[r], ws.inverse[r], scores, n)
        ws.factor[r] = 1.0
