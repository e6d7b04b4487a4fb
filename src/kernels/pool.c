/* The thread pool: see pool.h for what it promises. */
#define _GNU_SOURCE
#include "pool.h"

#include "float_mode.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#if !defined(__EMSCRIPTEN__)
#include "threads.h"
#endif

struct qkv_run {
    qkv_task *task;
    void *job;
    ptrdiff_t count, grain;
    atomic_ptrdiff_t next; /* the first task that no thread has taken */
    atomic_int stopped; /* 0, or why the run is over before its time */
    qkv_poll *poll;
    int shared;      /* other threads have a part in it */
    unsigned forks;  /* the forks that had led to this process when the run began */
    int64_t polled; /* when the calling thread last polled, in ms */
};

static int64_t milliseconds(void) {
#if defined(_WIN32)
    return (int64_t)GetTickCount64(); /* moves every 16 ms */
#else
    struct timespec now;
#if defined(CLOCK_MONOTONIC_COARSE)
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
#elif defined(CLOCK_MONOTONIC)
    clock_gettime(CLOCK_MONOTONIC, &now);
#else
    timespec_get(&now, TIME_UTC);
#endif
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
#endif
}

/* Counts the forks that led to this process: a signal handler that poll runs may fork. */
static unsigned forks;

enum { POLL_MS = 20 };

int qkv_stopped(qkv_run *run, int worker) {
    if (worker == 0 && run->poll) {
        int64_t now = milliseconds();
        if (now - run->polled >= POLL_MS) {
            int stop = run->poll() ? QKV_STOPPED : 0;
            run->polled = now;
            if (run->shared && run->forks != forks) stop = QKV_FORKED;
            if (stop) atomic_store_explicit(&run->stopped, stop, memory_order_relaxed);
        }
    }
    return atomic_load_explicit(&run->stopped, memory_order_relaxed);
}

static void work(qkv_run *run, int worker) {
    for (;;) {
        ptrdiff_t start = atomic_fetch_add(&run->next, run->grain);
        for (ptrdiff_t i = start; i < start + run->grain; i++) {
            if (i >= run->count || qkv_stopped(run, worker)) return;
            run->task(run->job, i, worker, run);
        }
    }
}

static void relax(void) { /* a hint to the CPU inside a loop that waits for another thread */
#if defined(_WIN32)
    YieldProcessor();
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

enum { SPINS = 2000 }; /* of relax(), about 20 us, before a waiting thread lets the CPU go */

#if defined(__EMSCRIPTEN__)

static void step_aside(void) { relax(); }

static void share(qkv_run *run, int threads) {
    (void)threads;
    work(run, 0);
}

#else

enum { MOST_WORKERS = 255 };

/* Everything that is not atomic is read and written under lock. */
static struct {
    mutex lock;
    condition wake, idle;
    atomic_uint turn;   /* counts the runs; workers spin on it before they sleep */
    atomic_int taken;   /* a caller owns the pool */
    atomic_int working; /* workers in the run that have not finished */
    qkv_run *run;       /* the run that workers may join, or NULL */
    int seats;          /* how many more may join */
    int joined;         /* how many have */
    int workers;        /* threads alive */
    int asleep;         /* threads that wait for wake */
} pool = {.lock = MUTEX_START, .wake = CONDITION_START, .idle = CONDITION_START};

THREAD_MAIN worker_main(void *unused) {
    unsigned seen = 0;
    (void)unused;
    qkv_enter_float_mode(); /* a thread is born with the mode of whoever started it */
    lock(&pool.lock);
    for (;;) {
        while (!(pool.run && pool.seats > 0 && pool.turn != seen)) {
            pool.asleep++;
            sleep_on(&pool.wake, &pool.lock);
            pool.asleep--;
        }
        qkv_run *run = pool.run;
        int worker = ++pool.joined;
        seen = pool.turn;
        pool.seats--;
        pool.working++;
        unlock(&pool.lock);

        work(run, worker);

        lock(&pool.lock);
        if (--pool.working == 0 && !pool.run) wake_one(&pool.idle);
        unlock(&pool.lock);
        for (int i = 0; i < SPINS && atomic_load(&pool.turn) == seen; i++) relax();
        lock(&pool.lock);
    }
    return 0;
}

#if defined(_WIN32)

static void watch_forks(void) {} /* there are none */

#else

/* A forked child has this thread alone, and whoever held the lock is not there to release it. */
static void forget_threads(void) {
    forks++;
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
    pool.run = NULL;
    pool.seats = pool.joined = pool.workers = pool.asleep = 0;
    atomic_store(&pool.working, 0);
    atomic_store(&pool.taken, 0);
}

static void register_handler(void) { pthread_atfork(NULL, NULL, forget_threads); }

static void watch_forks(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handler);
}

#endif

/* Under lock.  Where the system refuses a thread, fewer serve. */
static void start_workers(int wanted) {
    while (pool.workers < wanted && pool.workers < MOST_WORKERS && start_thread(worker_main))
        pool.workers++;
}

static void share(qkv_run *run, int threads) {
    int mine = 0;
    if (threads <= 1 || !atomic_compare_exchange_strong(&pool.taken, &mine, 1)) {
        work(run, 0);
        return;
    }
    run->shared = 1;
    watch_forks();
    lock(&pool.lock);
    start_workers(threads - 1);
    pool.run = run;
    pool.seats = threads - 1;
    pool.joined = 0;
    atomic_fetch_add(&pool.turn, 1);
    for (int i = 0; i < threads - 1 && i < pool.asleep; i++) wake_one(&pool.wake);
    unlock(&pool.lock);

    work(run, 0);
    if (run->forks != forks) return; /* the parent's pool; this process has a new one */

    lock(&pool.lock);
    pool.run = NULL; /* whoever wakes up from here on is late, and not waited for */
    unlock(&pool.lock);
    for (int i = 0; i < SPINS && atomic_load(&pool.working) > 0; i++) relax();
    lock(&pool.lock);
    while (pool.working > 0) { /* the others may have long tasks yet: signals are seen meanwhile */
        nap_on(&pool.idle, &pool.lock, POLL_MS);
        unlock(&pool.lock);
        qkv_stopped(run, 0);
        if (run->forks != forks) return;
        lock(&pool.lock);
    }
    unlock(&pool.lock);
    atomic_store(&pool.taken, 0);
}

#endif

int qkv_parallel_for(qkv_task *task, void *job, ptrdiff_t count, ptrdiff_t grain, int threads,
                     qkv_poll *poll) {
    qkv_run run = {.task = task, .job = job, .count = count, .grain = grain, .poll = poll};
    ptrdiff_t pieces = (count + grain - 1) / grain;
    run.polled = milliseconds();
    run.forks = forks;
    share(&run, pieces < threads ? (int)pieces : threads);
    return atomic_load(&run.stopped);
}

/* ---- results in order ------------------------------------------------------------------------------------- */

struct qkv_sequencer {
    qkv_retire *retire;
    void *job;
    ptrdiff_t slots;
    atomic_ptrdiff_t retired; /* the index whose turn it is */
    atomic_int busy;          /* a thread is retiring */
    atomic_char filled[];
};

qkv_sequencer *qkv_sequencer_new(ptrdiff_t slots, qkv_retire *retire, void *job) {
    qkv_sequencer *sequencer =
            qkv_alloc(sizeof *sequencer + (size_t)slots * sizeof *sequencer->filled);
    if (!sequencer) return NULL;
    sequencer->retire = retire;
    sequencer->job = job;
    sequencer->slots = slots;
    atomic_init(&sequencer->retired, 0);
    atomic_init(&sequencer->busy, 0);
    for (ptrdiff_t i = 0; i < slots; i++) atomic_init(&sequencer->filled[i], 0);
    return sequencer;
}

void qkv_sequencer_free(qkv_sequencer *sequencer) { qkv_free(sequencer); }

static int next_is_filled(qkv_sequencer *sequencer) {
    return atomic_load(&sequencer->filled[atomic_load(&sequencer->retired) % sequencer->slots]);
}

/* Whoever finds another thread retiring leaves: that thread looks again after it has let go.  One
   fills and then looks whether the other is busy, the other lets go and then looks what is filled:
   it takes exchanges, since emulators of Arm on x86 let a load overtake a store before it, seq_cst
   or not, and the last part would be left behind. */
static void retire_in_order(qkv_sequencer *sequencer, int worker, qkv_run *run) {
    while (next_is_filled(sequencer)) {
        if (atomic_exchange(&sequencer->busy, 1)) return;
        while (next_is_filled(sequencer)) {
            ptrdiff_t index = atomic_load(&sequencer->retired);
            sequencer->retire(sequencer->job, index, worker, run);
            atomic_store(&sequencer->filled[index % sequencer->slots], 0);
            atomic_store(&sequencer->retired, index + 1);
        }
        atomic_exchange(&sequencer->busy, 0);
    }
}

int qkv_ordered_wait(qkv_sequencer *sequencer, ptrdiff_t index, int worker, qkv_run *run) {
    for (int tries = 0; index - atomic_load(&sequencer->retired) >= sequencer->slots; tries++) {
        if (qkv_stopped(run, worker)) return 1;
        retire_in_order(sequencer, worker, run);
        if (tries < SPINS)
            relax();
        else
            step_aside(); /* the thread waited for has no CPU, perhaps because this one has it */
    }
    return 0;
}

void qkv_ordered_commit(qkv_sequencer *sequencer, ptrdiff_t index, int worker, qkv_run *run) {
    atomic_exchange(&sequencer->filled[index % sequencer->slots], 1);
    retire_in_order(sequencer, worker, run);
}

/* ---- memory ------------------------------------------------------------------------------------ */

#if defined(__linux__)
#include <sys/mman.h>
#endif

void *qkv_alloc(size_t bytes) {
    enum { LINE = 64, HUGE = 1 << 21 };
    const size_t alignment = bytes >= 2 * HUGE ? HUGE : LINE;
    void *block = NULL;
#if defined(_WIN32)
    block = _aligned_malloc(bytes ? bytes : 1, alignment);
#else
    if (posix_memalign(&block, alignment, bytes ? bytes : 1)) return NULL;
#endif
#if defined(MADV_HUGEPAGE)
    if (alignment == HUGE) madvise(block, bytes / HUGE * HUGE, MADV_HUGEPAGE);
#endif
    return block;
}

void qkv_free(void *block) {
#if defined(_WIN32)
    _aligned_free(block);
#else
    free(block);
#endif
}
