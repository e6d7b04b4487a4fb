# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Blocked matmul: out = a b + bias.

    call      stacked products x blocks of rows x groups of column panels
      task      one of each
        chunk     256 of the inner dimension: its sum is added to what the earlier ones left in out
          panel     64 columns of b, packed unless they are already, or few rows would use them
            product   rows x 64 columns, register tile by register tile

Each element is the same chain of operations whatever the block that it falls into.
"""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport memcpy, memset

from qkv_ext._kernels cimport (
    PANEL, TILE, parallel_for, qkv_kernels, qkv_run, release, scratch, stopped, table,
)


cdef enum:
    ROWS = 384           # rows of a task: a chunk of them stays in the second-level cache
    PANELS = 4           # column panels of a task
    PACK_ROWS = 16       # from here on packing a panel of b pays
    SMALL_WORK = 400000  # multiplications below which no other thread is woken up


cdef struct Call:
    const qkv_kernels *ops
    Py_buffer a, b, out
    bint packed          # b is panels, not a matrix
    const float *bias    # [N] or NULL
    Py_ssize_t M, N, K
    Py_ssize_t rows, row_blocks, panels, panel_groups
    float *desks         # per worker: a panel [TILE, PANEL] and ROWS ones
    bint pack


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


cdef void pack_panel(const float *b, Py_ssize_t ldb, float *panel, Py_ssize_t k,
                     Py_ssize_t n) noexcept nogil:
    """panel[k, PANEL] PANEL = b[k, n] ldb."""
    cdef Py_ssize_t t
    for t in range(k):
        memcpy(panel + t * PANEL, b + t * ldb, n * sizeof(float))


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t item = index // (call.row_blocks * call.panel_groups)
    cdef Py_ssize_t group = index // call.row_blocks % call.panel_groups
    cdef Py_ssize_t first = index % call.row_blocks * call.rows
    cdef Py_ssize_t m = min(call.rows, call.M - first)
    cdef Py_ssize_t lda = row_stride(&call.a), ldo = row_stride(&call.out), ldb = PANEL
    cdef float *panel = call.desks + worker * (TILE * PANEL + ROWS)
    cdef const float *ones = panel + TILE * PANEL
    cdef const float *a = <const float *> item_of(call, &call.a, item) + first * lda
    cdef const float *b
    cdef const float *right
    cdef float *out = <float *> item_of(call, &call.out, item) + first * ldo
    cdef Py_ssize_t t, depth, p, j, n, i, all_panels = (call.N + PANEL - 1) // PANEL
    if call.packed:
        b = <const float *> call.b.buf
    else:
        b = <const float *> item_of(call, &call.b, item)
    for t from 0 <= t < max(call.K, 1) by TILE:  # K may be 0: zeros
        depth = min(TILE, call.K - t)
        for p in range(group * call.panels, min((group + 1) * call.panels, all_panels)):
            if stopped(run, worker):
                return
            j = p * PANEL
            n = min(PANEL, call.N - j)
            if call.packed:
                right = b + (p * call.K + t) * PANEL
            elif call.pack:
                right = panel
                pack_panel(b + t * row_stride(&call.b) + j, row_stride(&call.b), panel, depth, n)
            else:
                right = b + t * row_stride(&call.b) + j
                ldb = row_stride(&call.b)
            call.ops.product(a + t, lda, right, ldb, out + j, ldo, ones if t else NULL, m, n, depth,
                             NULL, 0)
            if call.bias != NULL and t + depth == call.K:
                for i in range(m):
                    add_bias(out + i * ldo + j, call.bias + j, n)


cdef inline void add_bias(float *row, const float *bias, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(n):
        row[j] += bias[j]


cdef int run(Call *call, Py_ssize_t items, int threads) except -1:
    cdef double work = <double> items * call.M * call.N * max(call.K, 1)
    cdef Py_ssize_t panels = (call.N + PANEL - 1) // PANEL, tasks, i
    cdef int worker
    if work < SMALL_WORK:
        threads = 1
    call.pack = call.M >= PACK_ROWS and not call.packed
    call.rows = min(call.M, ROWS)
    call.row_blocks = (call.M + call.rows - 1) // call.rows
    call.panels = PANELS
    while call.panels > 1 and items * call.row_blocks * (panels // call.panels) < 4 * threads:
        call.panels //= 2
    call.panel_groups = (panels + call.panels - 1) // call.panels
    tasks = items * call.row_blocks * call.panel_groups
    threads = <int> min(threads, tasks)
    call.desks = <float *> scratch(<double> threads * (TILE * PANEL + ROWS) * sizeof(float))
    try:
        for worker in range(threads):
            for i in range(ROWS):
                call.desks[worker * (TILE * PANEL + ROWS) + TILE * PANEL + i] = 1.0
        with nogil:
            parallel_for(run_task, call, tasks, 1, threads)
    finally:
        release(call.desks)
    return 0


def product(problem, int isa):
    """Write problem.out = a b + bias."""
    cdef Call call
    cdef Py_buffer bias_view
    cdef Py_ssize_t items = 1, axis
    a, b, packed, bias, out, threads = problem
    memset(&call, 0, sizeof(Call))
    memset(&bias_view, 0, sizeof(Py_buffer))
    try:
        PyObject_GetBuffer(a, &call.a, PyBUF_STRIDES)
        PyObject_GetBuffer(b, &call.b, PyBUF_STRIDES)
        PyObject_GetBuffer(out, &call.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        if bias is not None:
            PyObject_GetBuffer(bias, &bias_view, PyBUF_STRIDES)
            call.bias = <const float *> bias_view.buf
        call.ops = table(isa)
        call.packed = packed
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
