# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Blocked matmul: out = activation(a b + bias) + residual.

    call      stacked products x blocks of rows x groups of column panels
      task      one of each
        chunk     256 of the inner dimension: its sum is added to what the earlier ones left in out;
                  the task's columns of b are packed into panels of 64, unless they are already, or
                  few rows would use them; panels of 16 bits are widened but for a few rows
          block     192 rows of a: they stay in the second-level cache
            panel     product of the block x 64 columns, register tile by register tile; after the
                      last chunk what ends it, while it is in the first cache

Each element is the same chain of operations whatever the block that it falls into.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
cimport cython
from libc.string cimport memcpy, memset

from qkv_ext._core._kernels cimport (
    PANEL, QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, QKV_GELU, QKV_GELU_TANH, QKV_RELU, QKV_SILU,
    TILE, parallel_for, qkv_build, qkv_bytes, qkv_enter_float_mode, qkv_float_mode, qkv_kernels,
    qkv_leave_float_mode, qkv_prefetch, qkv_run, release, scratch, stopped, table,
)

import numpy

from qkv_ext._core._arrays import MAX_NDIM as MOST_AXES

BUILD = qkv_build.decode()


cdef int MAX_NDIM = MOST_AXES
cdef object float32 = numpy.dtype("float32")
cdef object float16 = numpy.dtype("float16")
cdef object uint16 = numpy.dtype("uint16")
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty
cdef dict CODES = {None: 0, "relu": QKV_RELU, "gelu": QKV_GELU, "gelu_tanh": QKV_GELU_TANH,
                   "silu": QKV_SILU}


cdef enum:
    ROWS = 2048          # rows of a task at most: what it packs of b serves all of them
    PANELS = 8           # column panels of a task at most: one visit to a row of b packs them all
    SOME_PANELS = 4      # a task that has to shrink gives up panels down to so many or less,
    FEW_ROWS = 384       # then rows down to so many or less, then panels again
    BLOCK = 192          # rows of a that meet all panels of a task before the next do
    STRIP = 48           # of them, whose results are in the first cache when they are ended
    PACK_ROWS = 16       # from here on packing a panel of b pays
    FEW_AT_MEMORY = 8    # up to which what a product waits for is a panel that comes from memory,
    IN_CACHE = 1 << 20   # unless the weight has no more than so many bytes
    COLUMNS = 16384      # of b, read in place, between two looks at the signals
    SMALL_WORK = 100000  # multiplications below which no other thread is woken up


cdef struct Call:
    const qkv_kernels *ops
    Py_buffer a, b, out
    bint packed          # b is panels, not a matrix
    int kind             # of the numbers of b: QKV_FLOAT32, or for panels a type of storage.def
    const float *bias    # [N] or NULL
    int activation       # QKV_RELU, ... or 0
    const float *residual  # [M, N] ldr or NULL; of one item
    Py_ssize_t ldr
    bint ends            # there is one of these
    Py_ssize_t M, N, K
    Py_ssize_t rows, row_blocks, panels, panel_groups, block
    float *workspaces    # per worker: panels [panels, TILE, PANEL], and ones [block]
    Py_ssize_t workspace_size, ones_at  # in floats
    bint pack            # there are such panels
    bint few             # rows, which are multiplied by panels as they come from memory


cdef inline char *item_of(const Call *call, const Py_buffer *x, Py_ssize_t item) noexcept nogil:
    """The start of a stacked matrix; leading axes of length 1, or missing ones, broadcast."""
    cdef char *at = <char *> x.buf
    cdef Py_ssize_t axis, own, n
    for axis in range(call.out.ndim - 3, -1, -1):
        n = call.out.shape[axis]
        own = axis - call.out.ndim + x.ndim
        if own >= 0 and x.shape[own] != 1:
            at += item % n * x.strides[own]
        item //= n
    return at


cdef inline Py_ssize_t row_stride(const Py_buffer *x) noexcept nogil:
    """The distance between rows, in floats."""
    return x.strides[x.ndim - 2] // <Py_ssize_t> sizeof(float) if x.shape[x.ndim - 2] != 1 else 0


cdef void pack_panels(const float *b, Py_ssize_t ldb, float *panels, Py_ssize_t k,
                      Py_ssize_t n) noexcept nogil:
    """panels[n / PANEL] [TILE, PANEL] = b[k, n] ldb: rows lie far apart, so each is read once."""
    cdef Py_ssize_t t, j
    for t in range(k):
        for j from 0 <= j < n by PANEL:
            memcpy(panels + j * TILE + t * PANEL, b + t * ldb + j,
                   min(PANEL, n - j) * sizeof(float))


cdef inline const char *panel_of(const Call *call, Py_ssize_t column, Py_ssize_t t) noexcept nogil:
    """Row t of the panel of b that begins with a column."""
    return <const char *> call.b.buf + qkv_bytes(call.kind, column * call.K + t * PANEL)


cdef inline void multiply(const Call *call, const float *a, Py_ssize_t lda, const void *b,
                          Py_ssize_t ldb, float *out, Py_ssize_t ldo, const float *beta,
                          Py_ssize_t m, Py_ssize_t n, Py_ssize_t k) noexcept nogil:
    if call.few:
        call.ops.product_panel(call.kind, a, lda, b, out, ldo, beta, m, n, k)
    else:
        call.ops.product(a, lda, <const float *> b, ldb, out, ldo, beta, m, n, k)


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t item = index // (call.row_blocks * call.panel_groups)
    cdef Py_ssize_t group = index // call.row_blocks % call.panel_groups
    cdef Py_ssize_t first = index % call.row_blocks * call.rows
    cdef Py_ssize_t m = min(call.rows, call.M - first)
    cdef Py_ssize_t lda = row_stride(&call.a), ldo = row_stride(&call.out), ldb = 0
    cdef float *panels = call.workspaces + worker * call.workspace_size
    cdef const float *ones = panels + call.ones_at
    cdef const float *a = <const float *> item_of(call, &call.a, item) + first * lda
    cdef const float *b = <const float *> call.b.buf
    cdef const void *right
    cdef float *out = <float *> item_of(call, &call.out, item) + first * ldo
    cdef Py_ssize_t start = group * call.panels * PANEL, t, depth, j, n, i, rows
    cdef Py_ssize_t end = min(start + call.panels * PANEL, call.N)
    cdef Py_ssize_t width = PANEL, step = PANEL
    if not call.packed:
        b = <const float *> item_of(call, &call.b, item)
        ldb = row_stride(&call.b)
        if not call.pack:  # few rows use b: it is read in place
            width, step = COLUMNS, ldb
    for t from 0 <= t < max(call.K, 1) by TILE:  # K may be 0: zeros
        depth = min(TILE, call.K - t)
        if call.pack and call.packed:
            for j from start <= j < end by PANEL:
                call.ops.widen(call.kind, panel_of(call, j, t), 0, panels + (j - start) * TILE, 1,
                               depth * PANEL)
        elif call.pack:
            pack_panels(b + t * ldb + start, ldb, panels, depth, end - start)
        for i from 0 <= i < m by call.block:
            rows = min(call.block, m - i)
            for j from start <= j < end by width:
                if stopped(run, worker):
                    return
                n = min(width, end - j)
                if call.pack:
                    right = panels + (j - start) * TILE
                elif call.packed:
                    right = panel_of(call, j, t)
                else:
                    right = b + t * ldb + j
                if call.ends and t + depth == call.K:
                    product_to_end(call, a + i * lda + t, lda, right, step, out + i * ldo + j, ldo,
                                   ones if t else NULL, first + i, j, rows, n, depth)
                else:
                    multiply(call, a + i * lda + t, lda, right, step, out + i * ldo + j, ldo,
                             ones if t else NULL, rows, n, depth)


cdef inline void product_to_end(const Call *call, const float *a, Py_ssize_t lda, const void *b,
                                Py_ssize_t ldb, float *out, Py_ssize_t ldo, const float *beta,
                                Py_ssize_t row, Py_ssize_t column, Py_ssize_t m, Py_ssize_t n,
                                Py_ssize_t k) noexcept nogil:
    """out = activation(a b + beta out + bias) + residual, of a block that starts at that row and
    column, a strip at a time."""
    cdef const float *bias = NULL
    cdef const float *residual = NULL
    cdef Py_ssize_t i, s, rows
    if call.bias != NULL:
        bias = call.bias + column
    for i from 0 <= i < m by STRIP:
        rows = min(STRIP, m - i)
        if call.residual != NULL:
            residual = call.residual + (row + i) * call.ldr + column
            for s in range(rows):  # they come while the strip is multiplied
                qkv_prefetch(<const char *> (residual + s * call.ldr), n * sizeof(float))
        multiply(call, a + i * lda, lda, b, ldb, out + i * ldo, ldo, beta, rows, n, k)
        call.ops.epilogue(out + i * ldo, ldo, bias, call.activation, residual, call.ldr, rows, n)


cdef Py_ssize_t count_tasks(Call *call, Py_ssize_t items, Py_ssize_t panels) noexcept nogil:
    call.row_blocks = (call.M + call.rows - 1) // call.rows
    call.panel_groups = (panels + call.panels - 1) // call.panels
    return items * call.row_blocks * call.panel_groups


cdef int run(Call *call, Py_ssize_t items, int threads) except -1:
    cdef double work = <double> items * call.M * call.N * max(call.K, 1)
    cdef Py_ssize_t panels = (call.N + PANEL - 1) // PANEL, tasks, i
    cdef int worker
    call.ends = call.bias != NULL or call.activation or call.residual != NULL
    if work < SMALL_WORK:
        threads = 1
    if call.packed:
        call.few = call.M <= FEW_AT_MEMORY and (
            call.kind != QKV_FLOAT32 or qkv_bytes(call.kind, call.K) * call.N > IN_CACHE)
        call.pack = not call.few and call.kind != QKV_FLOAT32
    else:
        call.pack = call.M >= PACK_ROWS
    call.rows = min(call.M, ROWS)
    call.panels = min(panels, PANELS)
    if call.few:
        call.panels = 1  # which is read from end to end
    elif not call.packed and not call.pack:  # rows of b are read in place: the longer, the better
        call.panels = (panels + threads - 1) // threads
    while (call.packed or call.pack) and count_tasks(call, items, panels) < 4 * threads:
        if call.panels > SOME_PANELS:  # enough tasks for every thread to have some
            call.panels = (call.panels + 1) // 2
        elif call.rows > FEW_ROWS:
            call.rows = (call.rows + 1) // 2
        elif call.panels > 1:
            call.panels = (call.panels + 1) // 2
        else:
            break
    tasks = count_tasks(call, items, panels)
    threads = <int> min(threads, tasks)
    call.block = min(BLOCK, call.rows)
    call.ones_at = call.panels * TILE * PANEL if call.pack else 0
    call.workspace_size = call.ones_at + (call.block + 15) // 16 * 16
    call.workspaces = <float *> scratch(<double> threads * call.workspace_size * sizeof(float))
    try:
        for worker in range(threads):
            for i in range(call.block):
                call.workspaces[worker * call.workspace_size + call.ones_at + i] = 1.0
        with nogil:
            parallel_for(run_task, call, tasks, 1, threads)
    finally:
        release(call.workspaces)
    return 0


cdef inline int kind_of(panels) except -1:
    """What the panels of a PackedWeight are kept as."""
    dtype = panels.dtype
    if dtype is float32 or dtype == float32:
        return QKV_FLOAT32
    if dtype == float16:
        return QKV_FLOAT16
    if dtype == uint16:
        return QKV_BFLOAT16
    raise TypeError(f"panels are {dtype}; expected float32, float16, or uint16 for bfloat16")


cdef compute(int isa, problem):
    """Write problem.out = activation(a b + bias) + residual."""
    cdef Call call
    cdef Py_buffer bias_view, residual_view
    cdef Py_ssize_t items = 1, axis
    a, b, packed, bias, out, threads, activation, residual = problem
    cdef qkv_float_mode found = qkv_enter_float_mode()
    memset(&call, 0, sizeof(Call))
    memset(&bias_view, 0, sizeof(Py_buffer))
    memset(&residual_view, 0, sizeof(Py_buffer))
    try:
        PyObject_GetBuffer(a, &call.a, PyBUF_STRIDES)
        PyObject_GetBuffer(b, &call.b, PyBUF_STRIDES)
        PyObject_GetBuffer(out, &call.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        if bias is not None:
            PyObject_GetBuffer(bias, &bias_view, PyBUF_STRIDES)
            call.bias = <const float *> bias_view.buf
        if residual is not None:
            PyObject_GetBuffer(residual, &residual_view, PyBUF_STRIDES)
            call.residual, call.ldr = <const float *> residual_view.buf, row_stride(&residual_view)
        call.activation = CODES[activation]
        call.ops = table(isa)
        call.packed = packed
        call.kind = kind_of(b) if packed else QKV_FLOAT32
        call.M = call.out.shape[call.out.ndim - 2]
        call.N = call.out.shape[call.out.ndim - 1]
        call.K = call.a.shape[call.a.ndim - 1]
        for axis in range(call.out.ndim - 2):
            items *= call.out.shape[axis]
        if items and call.M and call.N:
            run(&call, items, threads)
    finally:
        PyBuffer_Release(&call.a)
        PyBuffer_Release(&call.b)
        PyBuffer_Release(&call.out)
        PyBuffer_Release(&bias_view)
        PyBuffer_Release(&residual_view)
        qkv_leave_float_mode(found)


# ---- the plain call -----------------------------------------------------------------------------

# A contiguous matrix that stands for an array of more axes, or of one.
cdef struct Matrix:
    Py_ssize_t shape[2]
    Py_ssize_t strides[2]


cdef inline bint take(array, Py_buffer *view) except -1:
    """Acquire a float32 array, aligned and contiguous; False, and nothing held, for any other."""
    if type(array) is not ndarray or array.dtype is not float32:
        return False
    PyObject_GetBuffer(array, view, PyBUF_STRIDES)
    if <size_t> view.buf % sizeof(float) == 0 and PyBuffer_IsContiguous(view, b"C"):
        return True
    PyBuffer_Release(view)  # which leaves nothing to release again
    return False


cdef void as_matrix(const Py_buffer *x, Py_ssize_t rows, Py_ssize_t columns, Matrix *m,
                    Py_buffer *flat) noexcept nogil:
    m.shape[0], m.shape[1] = rows, columns
    m.strides[0], m.strides[1] = columns * <Py_ssize_t> sizeof(float), sizeof(float)
    flat.buf, flat.ndim = x.buf, 2
    flat.shape, flat.strides = m.shape, m.strides


cdef plain_product(int isa, a, b, bias, Py_ssize_t columns, int least, int threads):
    return plain_linear(isa, a, b, bias, columns, least, threads, None, None)


cdef bint ends_alike(const Py_buffer *residual, const Py_buffer *a, Py_ssize_t N) noexcept nogil:
    """Whether the residual has the shape of the result."""
    cdef int axis
    if residual.ndim != a.ndim or residual.shape[a.ndim - 1] != N:
        return False
    for axis in range(a.ndim - 1):
        if residual.shape[axis] != a.shape[axis]:
            return False
    return True


cdef plain_linear(int isa, a, b, bias, Py_ssize_t columns, int least, int threads, activation,
                  residual):
    """activation(a b + bias) + residual where the arrays can be taken as they are, else None.

    columns is N where b is the panels of a PackedWeight, else 0; least is the least rank of a.
    """
    cdef Call call
    cdef Py_buffer a_view, b_view, bias_view, residual_view, out_view
    cdef Matrix a_matrix, out_matrix
    cdef Py_ssize_t K, M, N
    cdef qkv_float_mode found = qkv_enter_float_mode()
    memset(&call, 0, sizeof(Call))
    memset(&a_view, 0, sizeof(Py_buffer))
    memset(&b_view, 0, sizeof(Py_buffer))
    memset(&bias_view, 0, sizeof(Py_buffer))
    memset(&residual_view, 0, sizeof(Py_buffer))
    memset(&out_view, 0, sizeof(Py_buffer))
    try:
        if activation is not None:
            if type(activation) is not str or activation not in CODES:
                return None
            call.activation = CODES[activation]
        if not (take(a, &a_view) and (columns or take(b, &b_view))
                and (bias is None or take(bias, &bias_view))
                and (residual is None or take(residual, &residual_view))):
            return None
        if columns:
            PyObject_GetBuffer(b, &b_view, PyBUF_STRIDES)
        if not least <= a_view.ndim <= MAX_NDIM or a_view.len == 0:
            return None
        if b_view.ndim != (3 if columns else 2):
            return None
        K = a_view.shape[a_view.ndim - 1]
        N = columns if columns else b_view.shape[1]
        if b_view.shape[b_view.ndim - 2] != K or N == 0:
            return None
        if bias is not None and not (bias_view.ndim == 1 and bias_view.shape[0] == N):
            return None
        if residual is not None:
            if not ends_alike(&residual_view, &a_view, N):
                return None
            call.residual, call.ldr = <const float *> residual_view.buf, N
        M = a_view.len // <Py_ssize_t> sizeof(float) // K
        out = empty((M, N) if a_view.ndim == 2 else (*a.shape[:a.ndim - 1], N), float32)
        PyObject_GetBuffer(out, &out_view, PyBUF_STRIDES | PyBUF_WRITABLE)
        as_matrix(&a_view, M, K, &a_matrix, &call.a)
        as_matrix(&out_view, M, N, &out_matrix, &call.out)
        call.b = b_view
        call.bias = <const float *> bias_view.buf
        call.ops = table(isa)
        call.packed = columns > 0
        call.kind = kind_of(b) if columns else QKV_FLOAT32
        call.M, call.N, call.K = M, N, K
        run(&call, 1, threads)
        return out
    finally:
        PyBuffer_Release(&a_view)
        PyBuffer_Release(&b_view)
        PyBuffer_Release(&bias_view)
        PyBuffer_Release(&residual_view)
        PyBuffer_Release(&out_view)
        qkv_leave_float_mode(found)


@cython.auto_pickle(False)
cdef class Product:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, problem):
        """Write problem.out."""
        compute(self.isa, problem)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, a, b, bias, Py_ssize_t columns, int least, int threads, activation=None,
              residual=None):
        """activation(a b + bias) + residual where the arrays can be taken as they are, else None.
        """
        return plain_linear(self.isa, a, b, bias, columns, least, threads, activation, residual)
