# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, embedsignature=True, freethreading_compatible=True
"""The kernel table and the thread pool for the other modules: the only one that links C."""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

import os
import sys

BUILD = qkv_build.decode()

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept
    unsigned long PyThread_get_thread_ident() noexcept nogil


cdef extern from "kernels.h" nogil:
    const qkv_kernels *const qkv_tables[]
    const int qkv_table_count
    int qkv_runnable(const char *name)
    const char qkv_compiler[]
    ctypedef struct qkv_kind:
        const char *name
        int bits
        bint scaled
    const qkv_kind qkv_storage[]

cdef extern from "pool.h" nogil:
    enum:
        QKV_STOPPED
        QKV_FORKED
    ctypedef int qkv_poll() noexcept
    int qkv_parallel_for(qkv_task *task, void *job, Py_ssize_t count, Py_ssize_t grain,
                         int threads, qkv_poll *poll)
    int qkv_stopped(qkv_run *run, int worker)
    qkv_sequencer *qkv_sequencer_new(Py_ssize_t slots, qkv_retire *retire, void *job)
    void qkv_sequencer_free(qkv_sequencer *sequencer)
    int qkv_ordered_wait(qkv_sequencer *sequencer, Py_ssize_t index, int worker, qkv_run *run)
    void qkv_ordered_commit(qkv_sequencer *sequencer, Py_ssize_t index, int worker, qkv_run *run)
    void *qkv_alloc(size_t size)
    void qkv_free(void *block)


cdef double MOST_BYTES = <double> (<size_t> -1 >> 2)


cdef const qkv_kernels *table(int isa) noexcept nogil:
    return qkv_tables[isa]


cdef unsigned long main_thread = 0  # its ident, 0 before the first poll of a process


def forget_main_thread():
    """In a forked child the thread that forked is the main one."""
    global main_thread
    main_thread = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_main_thread)


cdef unsigned long find_main_thread() noexcept:
    """By its attributes: threading.main_thread() would run handlers itself."""
    module = sys.modules.get("threading")  # None where there is no other thread
    return getattr(getattr(module, "_main_thread", None), "_ident", None) or 0


cdef int poll_signals() noexcept nogil:
    """Whether a signal handler raised an exception.

    Handlers run in the main thread, and no other asks for them: a thread that waits for the GIL
    while the interpreter ends is ended there, and its workers go on with what was on its stack.
    """
    global main_thread
    if main_thread != 0 and main_thread != PyThread_get_thread_ident():
        return 0
    with gil:
        if main_thread == 0:  # no object in a variable here, or the early return takes the GIL too
            main_thread = find_main_thread()
        return PyErr_CheckSignals() != 0  # leaves the handler's exception set


cdef int parallel_for(qkv_task *task, void *job, Py_ssize_t count, Py_ssize_t grain,
                      int threads) except -1 nogil:
    cdef int end = qkv_parallel_for(task, job, count, grain, threads, poll_signals)
    if end == QKV_STOPPED:
        return -1  # with the exception of the signal handler
    if end == QKV_FORKED:
        with gil:
            raise RuntimeError("a signal handler forked during this call: the child has no result")
    return 0


cdef int stopped(qkv_run *run, int worker) noexcept nogil:
    return qkv_stopped(run, worker)


cdef qkv_sequencer *new_sequencer(Py_ssize_t slots, qkv_retire *retire, void *job) except NULL:
    cdef qkv_sequencer *sequencer = qkv_sequencer_new(slots, retire, job)
    if sequencer == NULL:
        raise MemoryError(f"no memory for a sequencer of {slots} slots")
    return sequencer


cdef void free_sequencer(qkv_sequencer *sequencer) noexcept nogil:
    qkv_sequencer_free(sequencer)


cdef int ordered_wait(qkv_sequencer *sequencer, Py_ssize_t index, int worker,
                      qkv_run *run) noexcept nogil:
    return qkv_ordered_wait(sequencer, index, worker, run)


cdef void ordered_commit(qkv_sequencer *sequencer, Py_ssize_t index, int worker,
                         qkv_run *run) noexcept nogil:
    qkv_ordered_commit(sequencer, index, worker, run)


cdef void *scratch(double size) except NULL:
    cdef void *block = NULL
    if size < MOST_BYTES:
        block = qkv_alloc(<size_t> size)
    if block == NULL:
        raise MemoryError(f"no memory for {size:.0f} bytes of working memory")
    return block


cdef void release(void *block) noexcept nogil:
    qkv_free(block)


def compiled():
    """The instruction sets of this build, slowest first; the others take their index as isa."""
    return tuple(qkv_tables[i].name.decode() for i in range(qkv_table_count))


def runnable():
    """Those of compiled() that this CPU and this operating system can run."""
    return tuple(name for name in compiled() if qkv_runnable(name.encode()))


def compiler():
    """Name and version of the compiler that built the kernels."""
    return qkv_compiler.decode()


def storage():
    """(kind of C, bits, whether rows have scales) of each storage type, by its name."""
    return {qkv_storage[n].name.decode(): (n, qkv_storage[n].bits, qkv_storage[n].scaled)
            for n in range(QKV_KINDS)}


cdef int elementwise(x, out, int isa, bint tanh) except -1:
    cdef Py_buffer source, target
    PyObject_GetBuffer(x, &source, PyBUF_STRIDES)
    try:
        PyObject_GetBuffer(out, &target, PyBUF_STRIDES | PyBUF_WRITABLE)
        function = table(isa).tanh if tanh else table(isa).exp
        function(<const float *> source.buf, <float *> target.buf, source.shape[0])
        PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&source)
    return 0


def exp(x, out, int isa):
    """The kernels' exp, for tests: out = exp(x) for contiguous float32 vectors, x <= 43."""
    elementwise(x, out, isa, False)


def tanh(x, out, int isa):
    """The kernels' tanh, likewise."""
    elementwise(x, out, isa, True)
