# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Keys and values written into the pages of a KVCache, in their storage type.

    call      items of the batch x key/value heads x panels of 64 slots
      task      one of each: the rows are encoded, then written as a panel of K and as rows of V

The bits are those of _storage.py on every instruction set.  keys.pxd has the layout of a page.
"""

from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int8_t, int64_t, uint8_t, uint16_t
from libc.string cimport memcpy, memset

cimport cython

from qkv_ext._core._kernels cimport (
    PANEL, QKV_BFLOAT16, QKV_FLOAT16, QKV_FLOAT32, parallel_for, qkv_build, qkv_bytes,
    qkv_enter_float_mode, qkv_float_mode, qkv_kernels, qkv_leave_float_mode, qkv_numbers, qkv_run,
    qkv_scaled, release, scratch, table,
)

from src.contract cimport (
    ADDRESSES, K_ADDRESS, K_SCALE_ADDRESS, V_ADDRESS, V_SCALE_ADDRESS,
)

import numpy

from qkv_ext._core._kernels import storage

BUILD = qkv_build.decode()


cdef dict STORAGE = {name: kind for name, (kind, _, _) in storage().items()}
cdef object float32 = numpy.dtype("float32")
cdef object float16 = numpy.dtype("float16")
cdef object ndarray = numpy.ndarray


cdef enum:
    SMALL_WORK = 65536   # numbers below which no other thread is woken up

cdef float LARGE_SCALE = 2.0 ** 60  # of keys whose products float32 may not hold: see Pool


cdef struct Item:
    const int64_t *pages  # four addresses each
    Py_ssize_t length     # keys that are there
    Py_ssize_t count      # and those that come


# K or V: where its rows lie, and where they go to in a page.
cdef struct Rows:
    const char *start     # (B, Hkv, n, width), of contiguous rows
    Py_ssize_t by_item, by_head, by_row, width


cdef struct Call:
    const qkv_kernels *ops
    int given, stored     # storage types
    Py_ssize_t page, heads, panels
    Rows k, v
    const Item *items
    char *memory          # of a worker: [PANEL, width] floats, then [PANEL, width] entries
    Py_ssize_t per_worker, floats
    uint8_t *large        # of a worker: whether it had a scale as large as that


cdef const char *encoded(const Call *call, const char *rows, Py_ssize_t stride, Py_ssize_t m,
                         Py_ssize_t n, char *memory, float *scales, Py_ssize_t *ld) noexcept nogil:
    """m rows as entries of the storage type, ld bytes apart, and their scales where it has some."""
    cdef Py_ssize_t r
    cdef char *entries = memory + call.floats
    ld[0] = stride
    if call.given == call.stored:
        return rows
    if call.given != QKV_FLOAT32:
        call.ops.widen(call.given, rows, qkv_numbers(call.given, stride), <float *> memory, m, n)
        rows, stride = memory, n * <Py_ssize_t> sizeof(float)
        ld[0] = stride
    if call.stored == QKV_FLOAT32:
        return rows
    ld[0] = qkv_bytes(call.stored, n)
    for r in range(m):
        if qkv_scaled(call.stored):
            scales[r] = call.ops.to_int8(<const float *> (rows + r * stride),
                                         <int8_t *> (entries + r * ld[0]), n)
        else:
            call.ops.narrow(call.stored, <const float *> (rows + r * stride),
                            <uint16_t *> (entries + r * ld[0]), n)
    return entries


cdef inline void put_columns(const char *rows, Py_ssize_t ld, char *panel, Py_ssize_t m,
                             Py_ssize_t n, Py_ssize_t size) noexcept nogil:
    """m rows as the first columns of a panel [n, PANEL]; size is a constant of every caller."""
    cdef Py_ssize_t j, r
    for j in range(n):
        for r in range(m):
            memcpy(panel + (j * PANEL + r) * size, rows + r * ld + j * size, size)


cdef void put_keys(const Call *call, const char *rows, Py_ssize_t ld, char *panel, Py_ssize_t m,
                   Py_ssize_t column) noexcept nogil:
    """Entries of m keys into a panel, from a column on."""
    cdef Py_ssize_t n = call.k.width, size = qkv_bytes(call.stored, 1)
    if call.stored == QKV_FLOAT32 and m == PANEL:
        call.ops.pack(<const float *> rows, ld // <Py_ssize_t> sizeof(float), <float *> panel, m, n)
    elif size == 4:
        put_columns(rows, ld, panel + column * 4, m, n, 4)
    elif size == 1:
        put_columns(rows, ld, panel + column, m, n, 1)
    else:
        put_columns(rows, ld, panel + column * 2, m, n, 2)


cdef void put_values(const Call *call, const char *rows, Py_ssize_t ld, char *base, Py_ssize_t m,
                     Py_ssize_t slot) noexcept nogil:
    """Entries of m values into the blocks of a head, from a slot on."""
    cdef Py_ssize_t r, start, width, size = qkv_bytes(call.stored, 1)
    cdef char *block
    for start from 0 <= start < call.v.width by PANEL:
        width = min(PANEL, call.v.width - start)
        block = base + (start * call.page + slot * width) * size
        for r in range(m):
            memcpy(block + r * width * size, rows + r * ld + start * size, width * size)


cdef void run_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil:
    cdef const Call *call = <const Call *> job
    cdef Py_ssize_t panel = index % call.panels, head = index // call.panels % call.heads
    cdef Py_ssize_t b = index // call.panels // call.heads
    cdef const Item *item = call.items + b
    # the slots of this panel among those that are filled: panel 0 is the one that has begun
    cdef Py_ssize_t first = max(item.length, (item.length // PANEL + panel) * PANEL)
    cdef Py_ssize_t stop = min((first // PANEL + 1) * PANEL, item.length + item.count)
    cdef Py_ssize_t m = stop - first, slot = first % call.page, ld, r
    cdef Py_ssize_t size = qkv_bytes(call.stored, 1)
    cdef const int64_t *page = item.pages + ADDRESSES * (first // call.page)
    cdef char *memory = call.memory + worker * call.per_worker
    cdef float scales[64]
    cdef const char *entries
    cdef const char *rows
    if m <= 0:
        return
    rows = (call.k.start + b * call.k.by_item + head * call.k.by_head
            + (first - item.length) * call.k.by_row)
    entries = encoded(call, rows, call.k.by_row, m, call.k.width, memory, scales, &ld)
    put_keys(call, entries, ld,
             (<char *> page[K_ADDRESS]
              + (head * call.page + slot // PANEL * PANEL) * call.k.width * size),
             m, slot % PANEL)
    if qkv_scaled(call.stored):
        memcpy(<float *> page[K_SCALE_ADDRESS] + head * call.page + slot, scales, m * sizeof(float))
        for r in range(m):
            if not scales[r] < LARGE_SCALE:  # NaN is as large as any
                call.large[worker] = True
    rows = (call.v.start + b * call.v.by_item + head * call.v.by_head
            + (first - item.length) * call.v.by_row)
    entries = encoded(call, rows, call.v.by_row, m, call.v.width, memory, scales, &ld)
    put_values(call, entries, ld,
               <char *> page[V_ADDRESS] + head * call.page * call.v.width * size, m, slot)
    if qkv_scaled(call.stored):
        memcpy(<float *> page[V_SCALE_ADDRESS] + head * call.page + slot, scales, m * sizeof(float))


cdef inline void lay_rows(Rows *rows, const Py_buffer *x) noexcept nogil:
    rows.start = <const char *> x.buf
    rows.by_item, rows.by_head, rows.by_row = x.strides[0], x.strides[1], x.strides[2]
    rows.width = x.shape[3]


cdef bint append_rows(int isa, int given, const Py_buffer *k, const Py_buffer *v, list counts,
                      pages, int threads) except -1:
    """Whether a scale is large.  counts are None where every item takes all rows."""
    cdef Call call
    cdef Py_ssize_t b, count, batch = k.shape[0], most = 0, width, worker
    cdef double numbers
    cdef Item one
    cdef Item *items = &one
    cdef Py_buffer addresses, starts
    cdef bint large = False
    layout, lengths, rows, first, _, _ = <tuple> pages
    kind, call.page, call.heads, _, _ = <tuple> layout
    call.ops, call.given, call.stored = table(isa), given, STORAGE[kind]
    lay_rows(&call.k, k)
    lay_rows(&call.v, v)
    width = max(call.k.width, call.v.width)
    numbers = <double> batch * call.heads * k.shape[2] * (call.k.width + call.v.width)
    if numbers < SMALL_WORK:
        threads = 1
    call.floats = (width * PANEL * <Py_ssize_t> sizeof(float) + 63) // 64 * 64
    call.per_worker = 2 * call.floats if call.given != call.stored else 0
    memset(&addresses, 0, sizeof(Py_buffer))
    memset(&starts, 0, sizeof(Py_buffer))
    call.memory = NULL
    try:
        call.memory = <char *> scratch(<double> call.per_worker * threads + threads
                                       + 64 + <double> batch * sizeof(Item))
        items = <Item *> (call.memory + call.per_worker * threads)
        call.large = <uint8_t *> (items + batch)
        memset(call.large, 0, threads)
        call.items = items
        PyObject_GetBuffer(rows, &addresses, PyBUF_STRIDES)
        PyObject_GetBuffer(first, &starts, PyBUF_STRIDES)
        for b in range(batch):
            count = k.shape[2] if counts is None else counts[b]
            items[b].pages = (<const int64_t *> addresses.buf
                              + ADDRESSES * (<const int64_t *> starts.buf)[b])
            items[b].length, items[b].count = (<list> lengths)[b], count
            most = max(most, (items[b].length % PANEL + count + PANEL - 1) // PANEL)
        call.panels = most
        if batch * call.heads * most:
            with nogil:
                parallel_for(run_task, &call, batch * call.heads * most, 1, threads)
        for worker in range(threads):
            large |= call.large[worker]
        return large
    finally:
        PyBuffer_Release(&starts)
        PyBuffer_Release(&addresses)
        release(call.memory)


cdef inline bint readable(const Py_buffer *x, Py_ssize_t batch, Py_ssize_t heads,
                          Py_ssize_t width) noexcept nogil:
    """Whether it is (B, Hkv, n, width), aligned and of contiguous rows."""
    cdef size_t odd = <size_t> x.buf
    if x.ndim != 4 or x.shape[0] != batch or x.shape[1] != heads or x.shape[3] != width:
        return False
    odd |= <size_t> x.strides[0] | <size_t> x.strides[1] | <size_t> x.strides[2]
    return odd % x.itemsize == 0 and (x.strides[3] == x.itemsize or width <= 1)


@cython.auto_pickle(False)
cdef class Append:
    """The functions of one instruction set."""

    cdef int isa

    def __init__(self, int isa):
        self.isa = isa

    def compute(self, k, v, list counts, pages, int threads):
        """Write so many keys and values of each item; whether the scale of a key is large.

        k and v are checked, and pages, of _store.py, have room for them.
        """
        cdef Py_buffer of_k, of_v
        cdef int given = QKV_FLOAT32
        cdef qkv_float_mode found
        if k.itemsize == 2:
            given = QKV_FLOAT16 if k.dtype.kind == "f" else QKV_BFLOAT16
            if given == QKV_BFLOAT16:  # a dtype that the buffer protocol has no name for
                k, v = k.view("u2"), v.view("u2")
        memset(&of_k, 0, sizeof(Py_buffer))
        memset(&of_v, 0, sizeof(Py_buffer))
        found = qkv_enter_float_mode()
        try:
            PyObject_GetBuffer(k, &of_k, PyBUF_STRIDES)
            PyObject_GetBuffer(v, &of_v, PyBUF_STRIDES)
            return append_rows(self.isa, given, &of_k, &of_v, counts, pages, threads)
        finally:
            PyBuffer_Release(&of_v)  # does nothing for a view that was not taken
            PyBuffer_Release(&of_k)
            qkv_leave_float_mode(found)

    @cython.binding(False)  # which takes a bound method less
    def plain(self, k, v, pages, list until, int threads):
        """The new lengths, and whether the scale of a key is large, or None where it wants a look.

        That is where k and v cannot be taken as they are, or an item has no room for them: its
        pages may be written to up to so many keys.
        """
        cdef Py_buffer of_k, of_v
        cdef Py_ssize_t b, heads, d, dv, length
        cdef int given = QKV_FLOAT32
        cdef qkv_float_mode found
        cdef bint large
        cdef list lengths, grown
        if type(k) is not ndarray or type(v) is not ndarray or k.dtype is not v.dtype:
            return None
        if k.dtype is float16:
            given = QKV_FLOAT16
        elif k.dtype is not float32:
            return None
        layout, lengths, _, _, _, _ = <tuple> pages
        _, _, heads, d, dv = <tuple> layout
        memset(&of_k, 0, sizeof(Py_buffer))
        memset(&of_v, 0, sizeof(Py_buffer))
        found = qkv_enter_float_mode()
        try:
            PyObject_GetBuffer(k, &of_k, PyBUF_STRIDES)
            PyObject_GetBuffer(v, &of_v, PyBUF_STRIDES)
            if (not readable(&of_k, len(lengths), heads, d)
                    or not readable(&of_v, len(lengths), heads, dv)
                    or of_k.shape[2] != of_v.shape[2]):
                return None
            grown = []
            for b in range(len(lengths)):
                length = <Py_ssize_t> lengths[b] + of_k.shape[2]
                if <Py_ssize_t> until[b] < length:
                    return None
                grown.append(length)
            large = append_rows(self.isa, given, &of_k, &of_v, None, pages, threads)
            return grown, large
        finally:
            PyBuffer_Release(&of_v)
            PyBuffer_Release(&of_k)
            qkv_leave_float_mode(found)
