/* parallel_for over a pool of threads, and the one function that allocates scratch memory. */
#ifndef QKV_POOL_H
#define QKV_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qkv_run qkv_run;

enum { QKV_STOPPED = 1, QKV_FORKED = 2 };

/* One task.  worker is 0 for the calling thread and less than threads for every other: the index of
   the scratch memory that the task may use.  A task never starts another run. */
typedef void qkv_task(void *job, ptrdiff_t index, int worker, qkv_run *run);

/* Asked by the calling thread every 20 ms or so, also while it waits for the others; anything but 0
   stops the run. */
typedef int qkv_poll(void);

/* Runs task 0 .. count - 1, started in that order, grain of them at a time, on at most threads
   threads of which the caller is one.  Returns 0; QKV_STOPPED where poll stopped the run; QKV_FORKED
   in a child that poll forked off, whose other threads, and with them their tasks, are not there.

   Threads are started by the first run that wants them, spin for a few microseconds after a run and
   then sleep.  A caller that finds the pool busy runs its tasks alone.  A forked child starts with
   an empty pool of its own. */
int qkv_parallel_for(qkv_task *task, void *job, ptrdiff_t count, ptrdiff_t grain, int threads,
                     qkv_poll *poll);

/* Whether the run was stopped; long tasks ask between tiles, and so let the caller poll. */
int qkv_stopped(qkv_run *run, int worker);

/* A byte that any thread may find unset, and set to what every other would: which of them did is all
   the same. */
static inline int qkv_byte(const uint8_t *x) {
    return atomic_load_explicit((const _Atomic uint8_t *)x, memory_order_relaxed);
}
static inline void qkv_set_byte(uint8_t *x, int value) {
    atomic_store_explicit((_Atomic uint8_t *)x, (uint8_t)value, memory_order_relaxed);
}

/* Results that any thread computes but that are taken in the order of their index, such as the parts
   of a split sum.  Only slots of them wait at a time: the slot of index is index % slots.
   retire is called for 0, 1, 2 ... in turn, never twice at a time, on whichever thread comes by. */
typedef void qkv_retire(void *job, ptrdiff_t index, int worker, qkv_run *run);
typedef struct qkv_sequencer qkv_sequencer;
qkv_sequencer *qkv_sequencer_new(ptrdiff_t slots, qkv_retire *retire,
                                 void *job); /* NULL: no memory */
void qkv_sequencer_free(qkv_sequencer *sequencer);

/* Waits until the slot of index is free; returns 1 where the run was stopped. */
int qkv_ordered_wait(qkv_sequencer *sequencer, ptrdiff_t index, int worker, qkv_run *run);

/* The slot of index is filled: it, and all that waited for it, may retire. */
void qkv_ordered_commit(qkv_sequencer *sequencer, ptrdiff_t index, int worker, qkv_run *run);

/* Memory aligned to a cache line, large blocks to huge pages; NULL where there is none. */
void *qkv_alloc(size_t bytes);
void qkv_free(void *block);

#endif
