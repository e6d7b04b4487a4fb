/* Preloaded into Python by faults.py: makes one allocation of the calling thread fail, and counts.
   Its turn comes to all that is aligned, as the library's working memory is, and to all of some size,
   as arrays are.  Small ones are objects of Python and NumPy.

       cc -shared -fPIC faults.c -o faults.so            (glibc, whose allocator has names of its own) */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

enum { SMALL = 2048 };
static _Thread_local long asked;   /* allocations of this thread so far, but small ones */
static _Thread_local long failing; /* the one that is to fail, 0 for none */
static atomic_long outstanding;    /* blocks of all threads that are not freed */

void faults_arm(long n) { failing = asked + n; }
void faults_disarm(void) { failing = 0; }
long faults_asked(void) { return asked; }
long faults_outstanding(void) { return atomic_load(&outstanding); }

static int fails(size_t size) { return size >= SMALL && ++asked == failing; }

static void *counted(void *block) {
    if (block) atomic_fetch_add(&outstanding, 1);
    return block;
}

void *malloc(size_t size) { return fails(size) ? NULL : counted(__libc_malloc(size)); }

void *calloc(size_t n, size_t size) {
    return fails(size < SMALL ? n * size : size) ? NULL : counted(__libc_calloc(n, size));
}

void *realloc(void *block, size_t size) {
    if (fails(size)) return NULL;
    void *moved = __libc_realloc(block, size);
    return block ? moved : counted(moved);
}

void *aligned_alloc(size_t alignment, size_t size) {
    return fails(SMALL) ? NULL : counted(__libc_memalign(alignment, size));
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *found = aligned_alloc(alignment, size);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

void free(void *block) {
    if (block) atomic_fetch_sub(&outstanding, 1);
    __libc_free(block);
}
