# cython: language_level=3, cdivision=True
"""Where keys and values lie, and how a tile of them is made ready for a product.

   arrays     rows of K and V, in float32 or 16 bits.  K becomes panels, 16 bits become floats.
   pages      of a KVCache: P keys of an item each, four addresses a page:
                k        (Hkv, P / 64, D, 64)  panels
                v        (Hkv, P Dv)           blocks of 64 columns one after the other: rows
                                               [P, 64] each, the last as wide as what is left
                k_scale  (Hkv, P), v_scale     where storage.def says so: int8
              Few rows of queries are multiplied with them as they are stored; for more they
              become floats first, with the same bits.
"""

from libc.math cimport isfinite

from qkv_ext._core._kernels cimport (
    LANES, PANEL, QKV_FLOAT32, QKV_MINUS, QKV_PLUS, TILE, qkv_bytes, qkv_numbers, qkv_scaled,
)

from src.contract cimport K_ADDRESS, K_SCALE_ADDRESS, V_ADDRESS, V_SCALE_ADDRESS
from src.types cimport Call, FEW_ROWS, Task, Workspace
from src.rules cimport in_page


# A tile of K or V, as it is multiplied with.
cdef struct Tile:
    int kind             # of storage
    const char *start    # of the panels of K; of the blocks of V
    const float *scale   # [TILE], or NULL
    Py_ssize_t first     # V: the tile's first row in its blocks,
    Py_ssize_t width     # columns of a block: PANEL, or all there are,
    bint blocks          # whether the rows of a block are side by side,
    bint finite          # whether it had nothing to be cleaned of; the same of the tile before
    Py_ssize_t ld        # else the numbers from a row to the next; may be 0, or negative,
    Py_ssize_t depth     # and rows of a block: it starts depth numbers further for each column


cdef inline const float *rows_of(const Call *call, const char *base, Py_ssize_t stride,
                                 Py_ssize_t first, Py_ssize_t n, Py_ssize_t width, float *copy,
                                 Py_ssize_t *ld) noexcept nogil:
    """n rows of an array as floats: in place, or widened into the copy; ld is their distance."""
    if call.shape.stored == QKV_FLOAT32:
        ld[0] = stride // <Py_ssize_t> sizeof(float)
        return <const float *> (base + first * stride)
    call.ops.widen(call.shape.stored, base + first * stride,
                   qkv_numbers(call.shape.stored, stride), copy, n, width)
    ld[0] = width
    return copy


cdef inline void times_product(const Call *call, int kind, const float *a, Py_ssize_t lda,
                               const char *b, Py_ssize_t ldb, float *c, Py_ssize_t ldc,
                               const float *beta, Py_ssize_t m, Py_ssize_t n,
                               Py_ssize_t k) noexcept nogil:
    """A product with b as it is stored."""
    if kind == QKV_FLOAT32:
        call.ops.product(a, lda, <const float *> b, ldb, c, ldc, beta, m, n, k)
    else:
        call.ops.product_stored(kind, a, lda, b, ldb, c, ldc, beta, m, n, k)


# ---- keys ----------------------------------------------------------------------------------------

cdef inline const float *packed_tile(const Call *call, const Task *task, Workspace *ws,
                                     Py_ssize_t tile) noexcept nogil:
    """The panels of the tile's keys: packed when first used, kept while the head stays."""
    cdef Py_ssize_t n = min(TILE, task.item.S - tile), c, ld
    cdef bint kept = task.item.blocks > 1
    cdef float *panels = ws.panels + (tile * call.shape.D if kept else 0)
    cdef const float *k
    if kept and ws.packed[tile // TILE]:
        return panels
    k = rows_of(call, task.k, call.strides.k.row, tile, n, call.shape.D, ws.k_rows, &ld)
    for c from 0 <= c < n by PANEL:
        call.ops.pack(k + c * ld, ld, panels + c * call.shape.D, min(PANEL, n - c), call.shape.D)
    if kept:
        ws.packed[tile // TILE] = 1
    return panels


cdef inline void take_keys(const Call *call, const Task *task, Workspace *ws, Py_ssize_t tile,
                           Tile *keys) noexcept nogil:
    """The panels of a tile."""
    cdef Py_ssize_t first, panels = (min(TILE, task.item.S - tile) + PANEL - 1) // PANEL
    keys.kind, keys.scale = QKV_FLOAT32, NULL
    if call.shape.page == 0:
        keys.start = <const char *> packed_tile(call, task, ws, tile)
        return
    first = task.kv_head * call.shape.page + tile % call.shape.page
    keys.start = (in_page(call, task, tile, K_ADDRESS)
                  + qkv_bytes(call.shape.stored, first * call.shape.D))
    if qkv_scaled(call.shape.stored):
        keys.scale = <const float *> in_page(call, task, tile, K_SCALE_ADDRESS) + first
    if call.shape.stored == QKV_FLOAT32 or task.m <= FEW_ROWS:
        keys.kind = call.shape.stored
        return
    call.ops.widen(call.shape.stored, keys.start, 0, ws.panels, 1, panels * PANEL * call.shape.D)
    keys.start = <const char *> ws.panels


cdef inline void score_panel(const Call *call, const Tile *keys, Py_ssize_t c, const float *q,
                             Py_ssize_t m, float *s, Py_ssize_t lds, Py_ssize_t columns,
                             const float *ones) noexcept nogil:
    """s[m, columns] = Q Kᵀ for the panel from key c of the tile on, in whole vectors."""
    cdef Py_ssize_t d, depth, D = call.shape.D
    columns = (columns + LANES - 1) // LANES * LANES
    for d from 0 <= d < max(D, 1) by TILE:  # D may be 0: zeros
        depth = min(TILE, D - d)
        times_product(call, keys.kind, q + d, D,
                      keys.start + qkv_bytes(keys.kind, c * D + d * PANEL), PANEL, s, lds,
                      ones if d else NULL, m, columns, depth)
    if keys.scale != NULL:
        call.ops.scale_columns(s, lds, m, columns, keys.scale + c)


cdef inline void scale_panels(const Call *call, Workspace *ws, Py_ssize_t n,
                              Tile *keys) noexcept nogil:
    """The n keys of a tile as the formula has them, scales and all: a score of integers may be
    infinite where the formula's is not."""
    cdef Py_ssize_t c
    if keys.kind != QKV_FLOAT32:
        call.ops.widen(keys.kind, keys.start, 0, ws.panels, 1,
                       (n + PANEL - 1) // PANEL * PANEL * call.shape.D)
    for c from 0 <= c < n by PANEL:
        call.ops.scale_columns(ws.panels + c * call.shape.D, PANEL, call.shape.D, PANEL,
                               keys.scale + c)
    keys.kind, keys.start, keys.scale = QKV_FLOAT32, <const char *> ws.panels, NULL


# ---- values --------------------------------------------------------------------------------------

cdef inline const char *rows_from(const Tile *values, Py_ssize_t column, Py_ssize_t j,
                                  Py_ssize_t width) noexcept nogil:
    """Row j of the tile in the block from that column on, which has that width."""
    cdef Py_ssize_t ld = width if values.blocks else values.ld
    return values.start + qkv_bytes(values.kind, column * values.depth + (values.first + j) * ld)


cdef inline void take_values(const Call *call, const Task *task, Workspace *ws, Py_ssize_t tile,
                             Py_ssize_t n, bint floats, Tile *values) noexcept nogil:
    """The values of a tile; floats: in float32 (but for the scales of int8), not as stored."""
    cdef Py_ssize_t c, width, first, Dv = call.shape.Dv, page = call.shape.page
    cdef Py_ssize_t v_row = call.strides.v.row
    cdef int stored = call.shape.stored
    values.scale, values.blocks, values.ld = NULL, page > 0, 0
    if (page == 0 and stored != QKV_FLOAT32 and task.item.use_dot_kernel and not floats
            and Dv % LANES == 0):  # few rows: as they are stored, 64 columns of a row at a time
        values.kind, values.first, values.width, values.depth = stored, 0, PANEL, 1
        values.ld = qkv_numbers(stored, v_row)
        values.start = task.v + tile * v_row
    elif page == 0:
        values.kind, values.first, values.width, values.depth = QKV_FLOAT32, 0, Dv, 0
        values.start = <const char *> rows_of(call, task.v, v_row, tile, n, Dv, ws.v_rows,
                                              &values.ld)
    else:
        first = task.kv_head * page
        values.kind, values.width, values.depth = stored, PANEL, page
        values.first = tile % page
        values.start = in_page(call, task, tile, V_ADDRESS) + qkv_bytes(stored, first * Dv)
        if qkv_scaled(stored):
            values.scale = (<const float *> in_page(call, task, tile, V_SCALE_ADDRESS) + first
                            + values.first)
        if stored != QKV_FLOAT32 and (task.m > FEW_ROWS or floats):
            for c from 0 <= c < Dv by PANEL:
                width = min(PANEL, Dv - c)
                call.ops.widen(stored, rows_from(values, c, 0, width), 0, ws.v_rows + c * TILE, 1,
                               n * width)
            values.kind, values.first, values.depth = QKV_FLOAT32, 0, TILE
            values.start = <const char *> ws.v_rows


cdef inline bint is_finite(const Call *call, const Tile *values, Py_ssize_t first,
                           Py_ssize_t n) noexcept nogil:
    """Whether n rows of a tile of floats are."""
    cdef Py_ssize_t j, c, width
    for c from 0 <= c < call.shape.Dv by values.width:
        width = min(values.width, call.shape.Dv - c)
        if not call.ops.split_finite(<const float *> rows_from(values, c, first, width),
                                     width if values.blocks else values.ld, NULL, NULL, n, width):
            return False
    for j in range(first, first + n if values.scale != NULL else first):
        if not isfinite(values.scale[j]):
            return False
    return True


cdef inline void clean_tile(const Call *call, Workspace *ws, Py_ssize_t n, bint codes,
                            Tile *values) noexcept nogil:
    """The tile with its non-finite entries read as 0, and the codes of these entries."""
    cdef Py_ssize_t j, c, d, width
    # the tile before tells what to expect: a copy of what is finite is not worth its time
    if values.finite and is_finite(call, values, 0, n):
        return
    values.finite = True
    for c from 0 <= c < call.shape.Dv by values.width:
        width = min(values.width, call.shape.Dv - c)
        values.finite = call.ops.split_finite(
            <const float *> rows_from(values, c, 0, width),
            width if values.blocks else values.ld, ws.v_rows + c * TILE,
            ws.v_codes + c * TILE if codes else NULL, n, width) and values.finite
        for j in range(n if codes and values.scale != NULL else 0):
            if not isfinite(values.scale[j]):  # a row of nothing but NaN
                for d in range(width):
                    ws.v_codes[c * TILE + j * width + d] = QKV_PLUS + QKV_MINUS
    if values.scale != NULL:
        for j in range(n):
            values.finite = values.finite and isfinite(values.scale[j])
            ws.v_scale[j] = values.scale[j] if isfinite(values.scale[j]) else 0.0
        values.scale = ws.v_scale
    values.start, values.first, values.depth = <const char *> ws.v_rows, 0, TILE
    values.blocks = True


cdef inline void add_values(const Call *call, Workspace *ws, const Tile *values, Py_ssize_t r,
                            Py_ssize_t m, Py_ssize_t start, Py_ssize_t end) noexcept nogil:
    """sums = factor sums + weights V for m rows from r on and the keys start .. end of the tile."""
    cdef Py_ssize_t lds = TILE + LANES, c, width, Dv = call.shape.Dv
    cdef float *weights = ws.scores + r * lds + start
    if values.scale != NULL:
        call.ops.scale_columns(weights, lds, m, end - start, values.scale + start)
    for c from 0 <= c < Dv by values.width:
        width = min(values.width, Dv - c)
        times_product(call, values.kind, weights, lds, rows_from(values, c, start, width),
                      width if values.blocks else values.ld, ws.partial.acc + r * Dv + c, Dv,
                      ws.factor + r, m, width, end - start)
