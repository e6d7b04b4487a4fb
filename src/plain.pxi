# The short way for a call without options on arrays that can be taken as they are.
# Part of attention.pyx.

cdef inline bint is_plain(array) noexcept:
    return type(array) is ndarray and array.dtype is float32


cdef bint fit(Views *x) noexcept:
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


cdef plain(int isa, q, k, v, bint causal, int threads):
    """The output of a call without options, where q, k and v can be taken as they are, else None.

    Three quarters of a small call are the checks in Python; what this recognises needs none.
    """
    cdef Call call
    cdef Views x
    cdef qkv_float_mode found
    if not (is_plain(q) and is_plain(k) and is_plain(v)):
        return None
    memset(&call, 0, sizeof(Call))
    memset(&x, 0, sizeof(Views))
    found = qkv_enter_float_mode()
    try:
        PyObject_GetBuffer(q, &x.q, PyBUF_STRIDES)
        PyObject_GetBuffer(k, &x.k, PyBUF_STRIDES)
        PyObject_GetBuffer(v, &x.v, PyBUF_STRIDES)
        if not fit(&x):
            return None
        out = empty(q.shape, float32)
        PyObject_GetBuffer(out, &x.out, PyBUF_STRIDES | PyBUF_WRITABLE)
        call.ops = table(isa)
        call.scale = <float> (1.0 / sqrt(<double> x.q.shape[3]))
        call.left, call.right = OPEN, 0 if causal else OPEN
        compute(&call, &x, x.k.shape[2] - x.q.shape[2], threads)
        return out
    finally:
        let_go(&x)
        qkv_leave_float_mode(found)
