/* What the pool asks of the system's threads, in the words of POSIX and of Windows. */
#ifndef QKV_THREADS_H
#define QKV_THREADS_H

enum { STACK = 1 << 19 }; /* musl's default is small, and kernels need little */

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

typedef SRWLOCK mutex;
typedef CONDITION_VARIABLE condition;
#define MUTEX_START SRWLOCK_INIT
#define CONDITION_START CONDITION_VARIABLE_INIT
#define THREAD_MAIN static DWORD WINAPI /* name(void *unused), returns 0 */
typedef LPTHREAD_START_ROUTINE thread_main;

static void lock(mutex *m) { AcquireSRWLockExclusive(m); }
static void unlock(mutex *m) { ReleaseSRWLockExclusive(m); }
static void sleep_on(condition *c, mutex *m) { SleepConditionVariableSRW(c, m, INFINITE, 0); }
static void nap_on(condition *c, mutex *m, int ms) {
    SleepConditionVariableSRW(c, m, (DWORD)ms, 0);
}
static void wake_one(condition *c) { WakeConditionVariable(c); }
static void step_aside(void) { Sleep(0); } /* Sleep(1) may take 15 ms */

/* Returns whether there is one more thread. */
static int start_thread(thread_main main) {
    HANDLE thread = CreateThread(NULL, STACK, main, NULL, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    if (thread) CloseHandle(thread); /* which lets go of it, and does not end it */
    return thread != NULL;
}

#else

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <time.h>

typedef pthread_mutex_t mutex;
typedef pthread_cond_t condition;
#define MUTEX_START PTHREAD_MUTEX_INITIALIZER
#define CONDITION_START PTHREAD_COND_INITIALIZER
#define THREAD_MAIN static void *
typedef void *thread_main(void *);

static void lock(mutex *m) { pthread_mutex_lock(m); }
static void unlock(mutex *m) { pthread_mutex_unlock(m); }
static void sleep_on(condition *c, mutex *m) { pthread_cond_wait(c, m); }

/* Until woken, but no longer than so many milliseconds (if nobody sets the clock meanwhile). */
static void nap_on(condition *c, mutex *m, int ms) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ms * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(c, m, &until);
}

static void wake_one(condition *c) { pthread_cond_signal(c); }

static void step_aside(void) {
    const struct timespec little = {.tv_nsec = 50000};
    nanosleep(&little, NULL);
}

static int start_thread(thread_main main) {
    pthread_attr_t attributes;
    pthread_t thread;
    const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t blocked, before;
    int refused;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&blocked); /* signals belong to the threads of the program, */
    for (size_t i = 0; i < sizeof own_faults / sizeof *own_faults; i++)
        sigdelset(&blocked, own_faults[i]); /* but for those that a thread sends itself */
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    refused = pthread_create(&thread, &attributes, main, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !refused;
}

#endif

#endif
