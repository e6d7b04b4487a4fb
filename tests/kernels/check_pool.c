/* The thread pool: runs of every kind, results in order, stops, many callers at once, forks. */
#include "pool.c" /* itself and not its header alone: a fork is to come while its lock is held */

#include "check.h"

#include <fenv.h>
#include <stdio.h>

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

enum { MOST_TASKS = 400, MOST_THREADS = 300 };
static const int thread_counts[] = {1, 2, 3, 4, 8, 64, 255, 256, MOST_THREADS};

static void spin(int turns) {
    for (int i = 0; i < turns; i++) relax();
}

/* ---- floating-point mode --------------------------------------------------------------------- */

static int rounds_up(void) { /* what floats do; x86 has another register for long doubles */
    volatile float one = 1.0f, little = 1e-10f;
    return one + little > one;
}

static void look_at_rounding(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    atomic_int *taken = job;
    (void)index, (void)run;
    if (worker && rounds_up()) fail("a thread rounds as whoever started it did");
    if (worker) atomic_store(taken, 1);
    while (!worker && !atomic_load(taken)) relax();
}

/* First of all, so that it is this run that starts a thread. */
static void check_mode(long trials) {
    atomic_int taken = 0;
    (void)trials;
    fesetround(FE_UPWARD);
    if (!rounds_up()) fail("this system does not round up");
    qkv_parallel_for(look_at_rounding, &taken, 4, 1, 2, NULL);
    qkv_float_mode found = qkv_enter_float_mode();
    if (rounds_up()) fail("the mode that was entered is not the default one");
    qkv_leave_float_mode(found);
    if (!rounds_up()) fail("the mode of the caller was lost");
    fesetround(FE_TONEAREST);
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Nothing here is atomic: that no two threads meet in it is what the pool promises, and what a
   thread sanitizer sees. */
typedef struct {
    int threads;
    int pause;                /* of a task */
    int done[MOST_TASKS];     /* how often each task ran */
    int last[MOST_THREADS];   /* the latest task of each worker, plus one */
    int tasks[MOST_THREADS];  /* how many each worker ran */
} numbers;

static void count_task(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    numbers *x = job;
    (void)run;
    if (worker < 0 || worker >= x->threads) fail("worker %d of %d", worker, x->threads);
    if (x->last[worker] > index) fail("task %td after task %d", index, x->last[worker] - 1);
    x->last[worker] = (int)index + 1;
    x->tasks[worker]++;
    x->done[index]++;
    spin(x->pause);
}

static void check_numbers(const numbers *x, ptrdiff_t count) {
    ptrdiff_t all = 0;
    for (ptrdiff_t i = 0; i < MOST_TASKS; i++)
        if (x->done[i] != (i < count)) fail("task %td of %td ran %d times", i, count, x->done[i]);
    for (int i = 0; i < MOST_THREADS; i++) all += x->tasks[i];
    if (all != count) fail("%td tasks ran, not %td", all, count);
}

static void run_and_check(ptrdiff_t count, ptrdiff_t grain, int threads, int pause) {
    numbers x = {.threads = threads, .pause = pause};
    int end = qkv_parallel_for(count_task, &x, count, grain, threads, NULL);
    if (end) fail("a run ended with %d", end);
    check_numbers(&x, count);
}

static void check_runs(long trials) {
    for (long trial = 0; trial < trials; trial++) {
        context.trial = trial;
        int threads = thread_counts[between(0, sizeof thread_counts / sizeof *thread_counts - 1)];
        ptrdiff_t count = size_between(0, MOST_TASKS);
        run_and_check(count, size_between(1, count + 3), threads, (int)between(0, 200));
    }
}

/* A task may not start a run, but a signal handler in poll may. */
static int run_within(void) {
    run_and_check(50, 3, 4, 0);
    return 0;
}

static void slow_task(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    int64_t start = milliseconds();
    (void)job, (void)index;
    while (milliseconds() - start < 5 && !qkv_stopped(run, worker)) spin(50);
}

static void check_nested(long trials) {
    (void)trials;
    if (qkv_parallel_for(slow_task, NULL, 40, 1, 4, run_within)) fail("a run was stopped");
}

/* ---- results in order ----------------------------------------------------------------------------------- */

typedef struct {
    qkv_sequencer *sequencer;
    ptrdiff_t next;             /* whose turn it is to retire */
    ptrdiff_t retired[MOST_TASKS];
    int values[MOST_TASKS];     /* what the tasks leave behind */
    int pause;
} line;

static void retire_value(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    line *x = job;
    (void)worker, (void)run;
    if (index != x->next) fail("%td retires, %td should", index, x->next);
    if (x->values[index] != (int)index * 3 + 1) fail("%td retires before it is filled", index);
    x->retired[x->next++] = index;
}

static void fill_value(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    line *x = job;
    if (qkv_ordered_wait(x->sequencer, index, worker, run)) return;
    spin((int)(index * 7 % 5) * x->pause);
    x->values[index] = (int)index * 3 + 1;
    qkv_ordered_commit(x->sequencer, index, worker, run);
}

static void check_order(long trials) {
    for (long trial = 0; trial < trials; trial++) {
        line x = {.pause = (int)between(0, 100)};
        ptrdiff_t count = size_between(0, MOST_TASKS), grain = one_in(2) ? 1 : between(1, 5);
        context.trial = trial;
        x.sequencer = qkv_sequencer_new(between(1, 12), retire_value, &x);
        if (!x.sequencer) fail("no memory");
        if (qkv_parallel_for(fill_value, &x, count, grain, (int)between(1, 9), NULL))
            fail("a run was stopped");
        if (x.next != count) fail("%td of %td have retired", x.next, count);
        qkv_sequencer_free(x.sequencer);
    }
}

/* ---- stops ----------------------------------------------------------------------------------- */

static _Thread_local int is_caller;
static int polls, polls_left;

static int stop_soon(void) {
    if (!is_caller) fail("a worker polls");
    polls++;
    return --polls_left <= 0;
}

typedef struct {
    qkv_sequencer
            *sequencer; /* whose first index is never done, so that the others wait; or NULL */
} endless;

static void wait_for_stop(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    endless *x = job;
    if (x->sequencer && index > 0) {
        if (!qkv_ordered_wait(x->sequencer, index + 12, worker, run))
            fail("%td did not wait", index);
        return;
    }
    while (!qkv_stopped(run, worker)) spin(20);
}

static void never(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    (void)job, (void)worker, (void)run;
    fail("%td retires", index);
}

/* The caller is the first to have no more to do. */
static void leave_it_to_others(void *job, ptrdiff_t index, int worker, qkv_run *run) {
    atomic_int *taken = job;
    (void)index;
    if (worker) atomic_store(taken, 1);
    while (worker && !qkv_stopped(run, worker)) spin(20);
    while (!worker && !atomic_load(taken)) spin(20); /* or the caller takes all tasks itself */
}

static void check_stops(long trials) {
    is_caller = 1;
    for (long trial = 0; trial < 4 + trials / 400; trial++) {
        endless x = {one_in(2) ? qkv_sequencer_new(4, never, NULL) : NULL};
        int threads = (int)between(1, 5);
        context.trial = trial;
        polls = 0;
        polls_left = (int)between(1, 2);
        int end = qkv_parallel_for(wait_for_stop, &x, 1000000, between(1, 3), threads, stop_soon);
        if (end != QKV_STOPPED) fail("a stopped run ended with %d", end);
        if (polls_left > 0) fail("stopped after %d polls", polls);
        if (x.sequencer) qkv_sequencer_free(x.sequencer);
        run_and_check(100, 1, threads, 10); /* and the pool is as it was */
        polls_left = 1;
        atomic_int taken = 0;
        end = qkv_parallel_for(leave_it_to_others, &taken, 4, 1, 2, stop_soon);
        if (end != QKV_STOPPED) fail("a run that others were to end ended with %d", end);
    }
}

/* ---- many callers ---------------------------------------------------------------------------- */

static atomic_int callers, to_do;

THREAD_MAIN call_again_and_again(void *unused) {
    (void)unused;
    for (int n; (n = atomic_fetch_sub(&to_do, 1)) > 0;)
        run_and_check(n * 37 % MOST_TASKS, 1 + n % 5, 1 + n % 9, n % 50);
    atomic_fetch_sub(&callers, 1);
    return 0;
}

static void start_callers(int count, int runs) {
    atomic_store(&to_do, runs);
    for (int i = 0; i < count; i++) {
        atomic_fetch_add(&callers, 1);
        if (!start_thread(call_again_and_again)) fail("no thread");
    }
}

static void wait_for_callers(void) {
    while (atomic_load(&callers) > 0) step_aside();
}

static void check_callers(long trials) {
    start_callers(8, (int)trials);
    wait_for_callers();
}

/* ---- forks ----------------------------------------------------------------------------------- */

#if defined(_WIN32)

void check_forks(long trials) {
    (void)trials;
    printf("%-8s there are none here\n", "forks");
}

#else

static void use_the_pool(void) {
    for (int i = 0; i < 20; i++) run_and_check(60, 1, 4, 20);
}

static void end_child(void) {
    use_the_pool();
    _exit(0);
}

static void wait_for_child(pid_t child) {
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child) fail("no child");
    if (status) fail("the child ended with status %#x", (unsigned)status);
}

static pid_t fork_child(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) alarm(60); /* rather than to hang */
    return child;
}

static atomic_int held; /* 0, 1 while the lock is, 2 to let it go */

THREAD_MAIN hold_the_lock(void *unused) {
    (void)unused;
    lock(&pool.lock);
    atomic_store(&held, 1);
    while (atomic_load(&held) == 1) step_aside();
    unlock(&pool.lock);
    atomic_store(&held, 0);
    return 0;
}

static void fork_while_locked(void) {
    atomic_store(&held, 0);
    if (!start_thread(hold_the_lock)) fail("no thread");
    while (atomic_load(&held) != 1) step_aside();
    pid_t child = fork_child();
    if (child == 0) end_child();
    atomic_store(&held, 2);
    wait_for_child(child);
    while (atomic_load(&held) != 0) step_aside();
}

static void fork_while_others_compute(void) {
    start_callers(3, 200);
    pid_t child = fork_child();
    if (child == 0) end_child();
    wait_for_child(child);
    wait_for_callers();
}

static void fork_twice(void) {
    pid_t child = fork_child();
    if (child == 0) {
        use_the_pool();
        pid_t grandchild = fork_child();
        if (grandchild == 0) end_child();
        wait_for_child(grandchild);
        end_child();
    }
    use_the_pool();
    wait_for_child(child);
}

static pid_t forked; /* the child, 0 in it, -1 before */

static int fork_once(void) {
    if (forked < 0) forked = fork_child();
    return 0;
}

/* In the middle of a run, as a signal handler may. */
static void fork_in_a_run(void) {
    forked = -1;
    int end = qkv_parallel_for(slow_task, NULL, 40, 1, 3, fork_once);
    if (forked == 0) {
        if (end != QKV_FORKED) _exit(1);
        end_child();
    }
    wait_for_child(forked);
    if (end) fail("the parent's run ended with %d", end);
}

void check_forks(long trials) {
    context.of = NULL;
    context.what = "forks";
    use_the_pool();
    for (long trial = 0; trial < 3 + trials / 400; trial++) {
        context.trial = trial;
        fork_while_locked();
        fork_while_others_compute();
        fork_twice();
        fork_in_a_run();
    }
    printf("%-8s locked | while others compute | twice | in a run\n", "forks");
}

#endif

/* ---- memory ---------------------------------------------------------------------------------- */

static void check_memory(long trials) {
    static const size_t sizes[] = {0, 1, 63, 64, 4096, (1 << 22) - 1, 1 << 22, (1 << 23) + 5};
    (void)trials;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *block = qkv_alloc(sizes[i]);
        if (!block) fail("no %zu bytes", sizes[i]);
        if ((uintptr_t)block % (sizes[i] >= 1 << 22 ? 1 << 21 : 64))
            fail("%zu bytes are not aligned", sizes[i]);
        for (size_t j = 0; j < sizes[i]; j += 4096) block[j] = 1;
        if (sizes[i]) block[sizes[i] - 1] = 1;
        qkv_free(block);
    }
    qkv_free(NULL);
    if (qkv_alloc(SIZE_MAX / 4)) fail("memory without end");
}

void check_pool(long trials) {
    static const struct {
        const char *name;
        void (*check)(long trials);
    } checks[] = {
            {"mode", check_mode},     {"runs", check_runs},   {"nested runs", check_nested},
            {"order", check_order},   {"stops", check_stops}, {"many callers", check_callers},
            {"memory", check_memory},
    };
    context.of = NULL;
    printf("%-8s %ld trials:", "pool", trials);
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        context.what = checks[i].name;
        printf(" %s%s", i ? "| " : "", checks[i].name);
        fflush(stdout);
        checks[i].check(trials);
    }
    printf("\n");
}
