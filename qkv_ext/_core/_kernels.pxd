# cython: language_level=3
"""What the Cython modules share: the table of micro-kernels, the thread pool, and array access.

The C side is documented in src/kernels/kernels.h and src/kernels/pool.h.
"""

from libc.stdint cimport int8_t, int32_t, uint8_t, uint16_t


cdef extern from "build.h":
    const char qkv_build[]  # which each module has as BUILD: _build.py explains it


cdef extern from "kernels.h" nogil:
    const Py_ssize_t PANEL
    const Py_ssize_t TILE
    const Py_ssize_t LANES
    const float HARDLY_LARGER
    float qkv_correction(float before, float after)
    float qkv_magnitude(const float *x, Py_ssize_t n)

    enum:
        QKV_FLOAT32
        QKV_FLOAT16
        QKV_BFLOAT16
        QKV_KINDS

    Py_ssize_t qkv_bytes(int kind, Py_ssize_t n) noexcept
    Py_ssize_t qkv_numbers(int kind, Py_ssize_t bytes) noexcept
    bint qkv_scaled(int kind) noexcept

    enum:
        QKV_PLUS
        QKV_MINUS

    enum:
        QKV_SOFTCAP
        QKV_SLOPE
        QKV_BIAS
        QKV_KEEP
        QKV_SEGMENT
        QKV_BLOCKS
        QKV_EXCLUDES

    enum:
        QKV_ALLOWS
        QKV_CHANGES

    ctypedef struct qkv_row:
        Py_ssize_t lo
        Py_ssize_t hi
        int modifiers
        float softcap
        float slope
        int mask_step
        Py_ssize_t position
        const float *bias
        const uint8_t *keep
        const int32_t *segments
        int32_t segment
        const uint8_t *blocks
        Py_ssize_t block
        float *scores

    bint qkv_is_kept(const qkv_row *row, Py_ssize_t j) noexcept

    enum:
        QKV_RELU
        QKV_GELU
        QKV_GELU_TANH
        QKV_SILU

    ctypedef struct qkv_norm:
        int kind
        int centered
        int streams
        Py_ssize_t n
        const float *weight
        const float *bias
        double eps

    ctypedef struct qkv_norm_row:
        pass

    void qkv_norm_start(qkv_norm_row *row, float scale) noexcept
    void qkv_norm_mean(qkv_norm_row *row, Py_ssize_t n) noexcept
    int qkv_norm_factor(qkv_norm_row *row, const qkv_norm *norm) noexcept

    ctypedef struct qkv_kernels:
        const char *name
        Py_ssize_t rows
        void (*product)(const float *a, Py_ssize_t lda, const float *b, Py_ssize_t ldb, float *c,
                        Py_ssize_t ldc, const float *beta, Py_ssize_t m, Py_ssize_t n,
                        Py_ssize_t k) noexcept nogil
        void (*product_stored)(int kind, const float *a, Py_ssize_t lda, const void *b,
                               Py_ssize_t ldb, float *c, Py_ssize_t ldc, const float *beta,
                               Py_ssize_t m, Py_ssize_t n, Py_ssize_t k) noexcept nogil
        void (*product_panel)(int kind, const float *a, Py_ssize_t lda, const void *b, float *c,
                              Py_ssize_t ldc, const float *beta, Py_ssize_t m, Py_ssize_t n,
                              Py_ssize_t k) noexcept nogil
        void (*dots)(const float *a, Py_ssize_t lda, const float *b, Py_ssize_t ldb, float *c,
                     Py_ssize_t ldc, Py_ssize_t m, Py_ssize_t n, Py_ssize_t k) noexcept nogil
        void (*pack)(const float *b, Py_ssize_t ldb, float *panel, Py_ssize_t n,
                     Py_ssize_t k) noexcept nogil
        void (*softmax_tile)(float *s, Py_ssize_t lds, Py_ssize_t m, Py_ssize_t n,
                             Py_ssize_t first, const qkv_row *rows, float *max, float *sum,
                             float *factor) noexcept nogil
        int (*look_at_mask)(const qkv_row *row, Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*epilogue)(float *c, Py_ssize_t ldc, const float *bias, int activation,
                         const float *residual, Py_ssize_t ldr, Py_ssize_t m,
                         Py_ssize_t n) noexcept nogil
        void (*adjust)(float *s, Py_ssize_t n, Py_ssize_t first,
                       const qkv_row *row) noexcept nogil
        int (*scale_rows)(const float *x, Py_ssize_t ldx, const float *factor, float *y,
                          Py_ssize_t ldy, Py_ssize_t m, Py_ssize_t n) noexcept nogil
        int (*split_finite)(const float *x, Py_ssize_t ldx, float *finite, float *code,
                            Py_ssize_t m, Py_ssize_t n) noexcept nogil
        void (*weights)(const float *x, float max, float factor, float *y,
                        Py_ssize_t n) noexcept nogil
        float (*largest)(const float *x, Py_ssize_t n) noexcept nogil
        float (*exp_and_sum)(const float *x, float max, float *y, Py_ssize_t n) noexcept nogil
        void (*softmax)(const float *x, float *y, Py_ssize_t n) noexcept nogil
        void (*widen)(int kind, const void *x, Py_ssize_t ldx, float *y, Py_ssize_t m,
                      Py_ssize_t n) noexcept nogil
        void (*scale_columns)(float *s, Py_ssize_t lds, Py_ssize_t m, Py_ssize_t n,
                              const float *factor) noexcept nogil
        void (*narrow)(int kind, const float *x, uint16_t *y, Py_ssize_t n) noexcept nogil
        float (*to_int8)(const float *x, int8_t *y, Py_ssize_t n) noexcept nogil
        void (*rotate_halves)(int kind, const void *a, const void *b, const float *cosines,
                              const float *sines, void *first, void *second, Py_ssize_t n,
                              int streams) noexcept nogil
        void (*rotate_pairs)(int kind, const void *x, const float *cosines, const float *sines,
                             void *y, Py_ssize_t n, int streams) noexcept nogil
        void (*merge_weights)(float *s, Py_ssize_t lds, Py_ssize_t m, Py_ssize_t n,
                              float *lse) noexcept nogil
        void (*merge_rows)(int kind, const char *const *x, const Py_ssize_t *ldx,
                           const float *weight, Py_ssize_t ldw, Py_ssize_t m, char *y,
                           Py_ssize_t ldy, Py_ssize_t rows, Py_ssize_t n,
                           int large) noexcept nogil
        void (*norm)(const qkv_norm *norm, const char *x, Py_ssize_t ldx, char *y, Py_ssize_t ldy,
                     Py_ssize_t m) noexcept nogil
        void (*norm_sums)(int kind, const void *x, Py_ssize_t n, qkv_norm_row *row) noexcept nogil
        void (*norm_apply)(const qkv_norm *norm, const qkv_norm_row *row, const void *x, void *y,
                           Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*exp)(const float *x, float *y, Py_ssize_t n) noexcept nogil
        void (*tanh)(const float *x, float *y, Py_ssize_t n) noexcept nogil

    void qkv_prefetch(const char *p, Py_ssize_t n) noexcept
    enum:
        MASK_AHEAD
    void qkv_prefetch_mask(const qkv_row *row, Py_ssize_t first, Py_ssize_t n) noexcept
    void qkv_stream_end() noexcept


cdef extern from "pool.h" nogil:
    int qkv_byte(const uint8_t *x) noexcept
    void qkv_set_byte(uint8_t *x, int value) noexcept

    ctypedef struct qkv_run:
        pass
    ctypedef void qkv_task(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil
    ctypedef struct qkv_sequencer:
        pass
    ctypedef void qkv_retire(void *job, Py_ssize_t index, int worker, qkv_run *run) noexcept nogil


cdef extern from "float_mode.h" nogil:
    ctypedef struct qkv_float_mode:
        pass
    qkv_float_mode qkv_enter_float_mode() noexcept
    void qkv_leave_float_mode(qkv_float_mode found) noexcept


# The table of an instruction set, by its place in compiled(); the caller knows that it is runnable.
cdef const qkv_kernels *table(int isa) noexcept nogil

# qkv_parallel_for of pool.h, polling for signals; raises what the signal handler raised.
cdef int parallel_for(qkv_task *task, void *job, Py_ssize_t count, Py_ssize_t grain,
                      int threads) except -1 nogil
cdef int stopped(qkv_run *run, int worker) noexcept nogil

# The qkv_sequencer functions of pool.h; new_sequencer raises MemoryError.
cdef qkv_sequencer *new_sequencer(Py_ssize_t slots, qkv_retire *retire, void *job) except NULL
cdef void free_sequencer(qkv_sequencer *sequencer) noexcept nogil
cdef int ordered_wait(qkv_sequencer *sequencer, Py_ssize_t index, int worker,
                      qkv_run *run) noexcept nogil
cdef void ordered_commit(qkv_sequencer *sequencer, Py_ssize_t index, int worker,
                         qkv_run *run) noexcept nogil

# qkv_alloc of pool.h, but raises MemoryError; size is a double so that it cannot wrap around.
cdef void *scratch(double size) except NULL
cdef void release(void *block) noexcept nogil
