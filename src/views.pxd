# cython: language_level=3, cdivision=True
"""The arrays of a call, and what they say of it: its shape, its strides and its items."""

from cpython.buffer cimport PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from src.contract cimport (
    ADDRESSES, COLUMNS, DIAGONAL, ITEM, K_LENGTH, K_START, Q_LENGTH, Q_ROOM, Q_START,
)
from src.types cimport Call, Item, Stride


cdef struct Views:
    Py_buffer q, k, v, mask, out, weights, lse, slopes, sinks, spans, table, first
    Py_buffer blocks, q_segments, k_segments


cdef inline int acquire(array, Py_buffer *view, int flags) except -1:
    if array is not None:
        PyObject_GetBuffer(array, view, flags)
    return 0


cdef inline void release_buffers(Views *x) noexcept:
    cdef Py_buffer *views = <Py_buffer *> x
    cdef size_t n
    for n in range(sizeof(Views) // sizeof(Py_buffer)):
        PyBuffer_Release(&views[n])  # does nothing for a view that was not taken


cdef inline char *item_ptr(const Py_buffer *x, const Py_buffer *out,
                           Py_ssize_t item) noexcept nogil:
    """The start of a batch item; leading axes of length 1 broadcast.  NULL where there is no x."""
    cdef char *start = <char *> x.buf
    cdef Py_ssize_t axis, n
    if x.buf == NULL:
        return NULL
    for axis in range(out.ndim - 4, -1, -1):
        n = out.shape[axis]
        if x.shape[axis] != 1:
            start += item % n * x.strides[axis]
        item //= n
    return start


cdef inline Py_ssize_t step_of(const Py_buffer *x, int axis) noexcept nogil:
    """The stride of an axis counted from the end, in bytes; 0 where it broadcasts."""
    if x.buf == NULL or x.shape[x.ndim - axis] == 1:
        return 0
    return x.strides[x.ndim - axis]


cdef inline Stride stride_of(const Py_buffer *x, int rows) noexcept nogil:
    """That of heads and rows, rows being the axis of the latter."""
    cdef Stride stride
    stride.head, stride.row = step_of(x, rows + 1), step_of(x, rows)
    return stride


cdef inline void describe_arrays(Call *call, const Views *x) noexcept nogil:
    """Sizes and strides, and how many items there are."""
    cdef Py_ssize_t axis
    call.rules.sinks = <const float *> x.sinks.buf
    call.rules.bool_mask = x.mask.buf != NULL and x.mask.itemsize == 1
    call.rules.row.mask_step = 1 if step_of(&x.mask, 1) else 0
    call.shape.heads = x.q.shape[x.q.ndim - 3]
    call.shape.D = x.q.shape[x.q.ndim - 1]
    call.shape.Dv = x.out.shape[x.out.ndim - 1]
    if call.shape.page == 0:
        call.shape.kv_heads = x.k.shape[x.k.ndim - 3]
        call.shape.S = x.k.shape[x.k.ndim - 2]
    call.strides.q, call.strides.k = stride_of(&x.q, 2), stride_of(&x.k, 2)
    call.strides.v, call.strides.out = stride_of(&x.v, 2), stride_of(&x.out, 2)
    call.strides.mask, call.strides.weights = stride_of(&x.mask, 2), stride_of(&x.weights, 2)
    call.strides.lse, call.strides.blocks = stride_of(&x.lse, 1), stride_of(&x.blocks, 2)
    call.plan.count = 1
    for axis in range(x.out.ndim - 3):
        call.plan.count *= x.out.shape[axis]
    if x.spans.buf != NULL:
        call.plan.count = x.spans.shape[0]


cdef inline void describe_items(Call *call, const Views *x, Py_ssize_t diagonal) noexcept nogil:
    """The items, from the spans where there are any; diagonal is of those that have none."""
    cdef Py_ssize_t n, owner, rows = x.out.shape[x.out.ndim - 2]
    cdef const int64_t *span = NULL
    cdef Item *item
    memset(call.plan.items, 0, call.plan.count * sizeof(Item))
    for n in range(call.plan.count):
        item = &call.plan.items[n]
        owner = n
        item.L = item.padded_len = rows
        item.S, item.diagonal = call.shape.S, diagonal
        if x.spans.buf != NULL:
            span = <const int64_t *> x.spans.buf + COLUMNS * n
            owner, item.diagonal = span[ITEM], span[DIAGONAL]
            item.L, item.padded_len, item.S = span[Q_LENGTH], span[Q_ROOM], span[K_LENGTH]
        item.q = item_ptr(&x.q, &x.out, owner)
        item.k = item_ptr(&x.k, &x.out, owner)
        item.v = item_ptr(&x.v, &x.out, owner)
        if call.shape.page:
            item.pages = (<const int64_t *> x.table.buf
                          + ADDRESSES * (<const int64_t *> x.first.buf)[owner])
        item.mask = item_ptr(&x.mask, &x.out, owner)
        item.block_mask = item_ptr(&x.blocks, &x.out, owner)
        if x.q_segments.buf != NULL:
            item.q_segments = <const int32_t *> x.q_segments.buf + owner * x.q_segments.shape[1]
            item.k_segments = <const int32_t *> x.k_segments.buf + owner * x.k_segments.shape[1]
        item.out = item_ptr(&x.out, &x.out, owner)
        item.weights = item_ptr(&x.weights, &x.out, owner)
        item.lse = item_ptr(&x.lse, &x.out, owner)
        if x.slopes.buf != NULL:
            item.slopes = <const float *> x.slopes.buf
            if x.slopes.shape[0] > 1:
                item.slopes += n * call.shape.heads
        if span != NULL:  # a sequence of a packed batch starts at rows of its own
            item.q += span[Q_START] * call.strides.q.row
            item.out += span[Q_START] * call.strides.out.row
            if item.lse != NULL:
                item.lse += span[Q_START] * call.strides.lse.row
            item.k += span[K_START] * call.strides.k.row
            item.v += span[K_START] * call.strides.v.row


# ---- arrays that are taken as they are ----------------------------------------------------------

cdef inline bint fit(Views *x) noexcept:
    """Whether q, k and v are aligned and contiguous, of rank 4, and of shapes that go together."""
    cdef Py_buffer *views[3]
    cdef int n
    views[0], views[1], views[2] = &x.q, &x.k, &x.v
    for n in range(3):
        if (views[n].ndim != 4 or views[n].len == 0 or <size_t> views[n].buf % sizeof(float)
                or not PyBuffer_IsContiguous(views[n], b"C")):
            return False
    return (x.q.shape[0] == x.k.shape[0] and x.q.shape[3] == x.k.shape[3] > 0
            and x.k.shape[1] > 0 and x.q.shape[1] % x.k.shape[1] == 0
            and x.k.shape[0] == x.v.shape[0] and x.k.shape[1] == x.v.shape[1]
            and x.k.shape[2] == x.v.shape[2] and x.k.shape[3] == x.v.shape[3])


# The sizes and strides of a mask with the four axes of an output.
cdef struct Axes:
    Py_ssize_t shape[4]
    Py_ssize_t strides[4]


cdef inline bint view_mask(Views *x, const Py_buffer *owner, Axes *axes) noexcept:
    """The mask of its owner in x, where it broadcasts to the scores and its rows are contiguous."""
    cdef Py_ssize_t n, full, first
    first = 4 - owner.ndim
    if first < 0 or <size_t> owner.buf % owner.itemsize:
        return False
    for n in range(4):
        axes.shape[n], axes.strides[n] = 1, 0
        if n < first:
            continue
        full = x.k.shape[2] if n == 3 else x.q.shape[n]
        if owner.shape[n - first] != 1 and owner.shape[n - first] != full:
            return False
        axes.shape[n], axes.strides[n] = owner.shape[n - first], owner.strides[n - first]
        if axes.strides[n] % owner.itemsize:
            return False
    if axes.shape[3] > 1 and axes.strides[3] != owner.itemsize:
        return False
    # field by field: the owner alone is to be released
    x.mask.buf, x.mask.itemsize = owner.buf, owner.itemsize
    x.mask.ndim, x.mask.shape, x.mask.strides = 4, axes.shape, axes.strides
    return True


cdef inline bint apart(const Py_buffer *x, const Py_buffer *y) noexcept:
    """Whether contiguous arrays share no memory."""
    return (<const char *> x.buf + x.len <= <const char *> y.buf
            or <const char *> y.buf + y.len <= <const char *> x.buf)


cdef inline bint out_fits(const Views *x) noexcept:
    """Whether out is like q, may be written, and shares no memory with q, k and v."""
    cdef int n
    if (x.out.readonly or x.out.ndim != 4 or <size_t> x.out.buf % sizeof(float)
            or not PyBuffer_IsContiguous(&x.out, b"C")):
        return False
    for n in range(4):
        if x.out.shape[n] != x.q.shape[n]:
            return False
    return apart(&x.out, &x.q) and apart(&x.out, &x.k) and apart(&x.out, &x.v)
