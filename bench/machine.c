/* The limits of this machine, measured in the same run as everything else: fused multiply-add peak
   by instruction set, and read bandwidth.  Compiled on demand by machine.py; never part of a wheel.

   cc -O3 -shared -fPIC machine.c -o machine.so -lpthread */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* One measurement on every thread at once.  A thread says how much it did, in units of 1e9, and when
   it began and ended; together they took from the first begin to the last end. */
typedef struct {
    double (*measure)(const float *data, size_t n);
    const float *data;
    size_t n;
    atomic_int *waiting;
    double amount, begin, end;
} work;

static void *run(void *argument) {
    work *w = argument;
    atomic_fetch_sub(w->waiting, 1);
    while (atomic_load(w->waiting) > 0) sched_yield(); /* all begin together */
    w->begin = now();
    w->amount = w->measure(w->data, w->n);
    w->end = now();
    return NULL;
}

static double on_threads(double (*measure)(const float *, size_t), const float *data, size_t n,
                         int threads) {
    enum { MOST = 256 };
    work works[MOST];
    pthread_t ids[MOST];
    double amount = 0.0, begin = 0.0, end = 0.0;
    int started = 0;
    if (threads > MOST) threads = MOST;
    atomic_int waiting = threads;
    for (int i = 0; i < threads; i++) {
        works[i] = (work){measure, data ? data + i * (n / threads) : NULL, n / threads, &waiting,
                          0.0, 0.0, 0.0};
        if (pthread_create(&ids[i], NULL, run, &works[i])) break;
        started++;
    }
    atomic_fetch_sub(&waiting, threads - started);
    for (int i = 0; i < started; i++) pthread_join(ids[i], NULL);
    for (int i = 0; i < started; i++) {
        amount += works[i].amount;
        if (i == 0 || works[i].begin < begin) begin = works[i].begin;
        if (i == 0 || works[i].end > end) end = works[i].end;
    }
    return started ? amount / (end - begin) : 0.0;
}

/* Sixteen independent chains of lanes lanes, enough to fill two pipelines of latency four. */
#define FMA_RATE(name, attributes, vector, lanes, fma)                                             \
    attributes static double name(const float *data, size_t n) {                                   \
        enum { CHAINS = 16, STEPS = 4000000 };                                                     \
        vector acc[CHAINS], factor = (vector){0} + 0.999f, add = (vector){0} + 0.001f;             \
        volatile float sink;                                                                       \
        (void)data;                                                                                \
        (void)n;                                                                                   \
        for (int i = 0; i < CHAINS; i++) acc[i] = (vector){0} + (float)i;                          \
        for (long t = 0; t < STEPS; t++)                                                           \
            _Pragma("GCC unroll 16") for (int i = 0; i < CHAINS; i++) acc[i] =                     \
                fma(acc[i], factor, add);                                                          \
        for (int i = 1; i < CHAINS; i++) acc[0] += acc[i];                                         \
        sink = acc[0][0];                                                                          \
        (void)sink;                                                                                \
        return 2.0 * CHAINS * lanes * STEPS / 1e9;                                                 \
    }

#define TIMES_PLUS(a, b, c) ((a) * (b) + (c))
typedef float four __attribute__((vector_size(16)));

#if defined(__x86_64__)
#include <immintrin.h>
FMA_RATE(fma_scalar, , four, 4, TIMES_PLUS)
FMA_RATE(fma_avx2, __attribute__((target("avx2,fma"))), __m256, 8, _mm256_fmadd_ps)
FMA_RATE(fma_avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512_fmadd_ps)
#else
FMA_RATE(fma_scalar, , four, 4, TIMES_PLUS)
#endif

/* GFLOP/s of an instruction set by its name in qkv_ext, 0 for an unknown one; the caller knows that
   the machine can run it.  "scalar" is the baseline of the ABI, four lanes of the compiler's. */
double fma_peak(const char *isa, int threads) {
#if defined(__x86_64__)
    if (isa[0] == 'a' && isa[3] == '5') return on_threads(fma_avx512, NULL, 0, threads);
    if (isa[0] == 'a') return on_threads(fma_avx2, NULL, 0, threads);
#endif
    return isa[0] == 's' || isa[0] == 'n' ? on_threads(fma_scalar, NULL, 0, threads) : 0.0;
}

static double read(const float *data, size_t n) {
    const four *p = (const four *)data;
    four sums[8] = {{0}};
    volatile float sink;
    for (size_t i = 0; i + 8 <= n / 4; i += 8)
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) sums[j] += p[i + j];
    for (int j = 1; j < 8; j++) sums[0] += sums[j];
    sink = sums[0][0];
    (void)sink;
    return n * sizeof(float) / 1e9;
}

/* GB/s of a streaming sum over n floats, aligned to 16 bytes, each thread over its own share. */
double read_bandwidth(const float *data, size_t n, int threads) {
    return on_threads(read, data, n / 1024 * 1024, threads);
}
