/* Checks the micro-kernels and the thread pool, without Python.

       check [PARTS] [SEED] [TRIALS]         PARTS is kernels,pool,forks or some of them

   Every micro-kernel of every instruction set that runs here is compared with the scalar one on
   random data, sizes and distances of rows, each array lying against a page that must not be
   touched.  The pool is tried with every kind of run, from several threads at once; forks are a
   part of their own, since emulators and thread sanitizers do not bear them.  Prints what it
   checked; a failure says where, and with which seed. */
#include "check.h"

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

struct context context;
uint64_t seed = 1;
static uint64_t state;

static void say_where(void) {
    fprintf(stderr, "%s of %s, trial %ld, seed %llu: ", context.what ? context.what : "start",
            context.of ? context.of : "the pool", context.trial, (unsigned long long)seed);
}

void fail(const char *format, ...) {
    va_list rest;
    say_where();
    va_start(rest, format);
    vfprintf(stderr, format, rest);
    va_end(rest);
    fputc('\n', stderr);
    exit(1);
}

static void on_fault(int number) {
    say_where();
    fprintf(stderr, "%s\n",
            number == SIGILL ? "an instruction that this CPU does not have"
                             : "touched memory outside its arrays");
    _Exit(1);
}

/* ---- random numbers -------------------------------------------------------------------------- */

uint32_t random_bits(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

ptrdiff_t between(ptrdiff_t low, ptrdiff_t high) {
    return low + (ptrdiff_t)(random_bits() % (uint64_t)(high - low + 1));
}

ptrdiff_t size_between(ptrdiff_t low, ptrdiff_t high) {
    ptrdiff_t n = between(low, high);
    if (one_in(2)) n = between(low / 16, high / 16) * 16 + between(-1, 1);
    if (one_in(3)) n = between(low, low + 9);
    return n < low ? low : n > high ? high : n;
}

int one_in(int n) { return random_bits() % (uint32_t)n == 0; }

float uniform(float low, float high) {
    return low + (high - low) * (float)((double)random_bits() * 0x1p-32);
}

float any_float(void) {
    uint32_t bits = random_bits();
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

enum { ARENAS = 20, ROOM = 1 << 20, FENCE = 512 };

static struct {
    unsigned char *start;  /* of ROOM bytes between two pages that must not be touched */
    unsigned char *used;   /* the array in it */
    size_t bytes;
} arenas[ARENAS];
static int taken;

static void make_arenas(void) {
    for (int i = 0; i < ARENAS; i++) {
#if defined(_WIN32)
        const size_t page = 1 << 16;
        DWORD before;
        unsigned char *all =
                VirtualAlloc(NULL, ROOM + 2 * page, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
        if (!all || !VirtualProtect(all, page, PAGE_NOACCESS, &before) ||
            !VirtualProtect(all + page + ROOM, page, PAGE_NOACCESS, &before))
            fail("no memory for the arrays");
#else
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        unsigned char *all = mmap(NULL, ROOM + 2 * page, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED || mprotect(all, page, PROT_NONE) ||
            mprotect(all + page + ROOM, page, PROT_NONE))
            fail("no memory for the arrays");
#endif
        arenas[i].start = all + page;
    }
}

void next_trial(long count) {
    for (int i = 0; i < taken; i++) {
        unsigned char *end = arenas[i].used + arenas[i].bytes;
        for (int j = 1; j <= FENCE; j++) {
            if (arenas[i].used - j >= arenas[i].start && arenas[i].used[-j] != 0xa5)
                fail("wrote %d bytes before array %d", j, i);
            if (end + j <= arenas[i].start + ROOM && end[j - 1] != 0xa5)
                fail("wrote %d bytes after array %d", j, i);
        }
    }
    taken = 0;
    context.trial = count;
}

void *array(size_t bytes) {
    if (taken == ARENAS || bytes > ROOM) fail("array %d of %zu bytes is too much", taken, bytes);
    unsigned char *start = arenas[taken].start, *at = one_in(2) ? start : start + ROOM - bytes;
    memset(at, 0xff, bytes);
    if (at > start)
        memset(at - FENCE > start ? at - FENCE : start, 0xa5,
               (size_t)(at - start < FENCE ? at - start : FENCE));
    size_t after = (size_t)(start + ROOM - at) - bytes;
    memset(at + bytes, 0xa5, after < FENCE ? after : FENCE);
    arenas[taken].used = at;
    arenas[taken++].bytes = bytes;
    return at;
}

float *floats(ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld) {
    return array(rows ? (size_t)((rows - 1) * ld + cols) * sizeof(float) : 0);
}

void fill(float *x, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld, enum kind kind) {
    static const float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN};
    const int rare = (int)between(20, 400);
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (ptrdiff_t j = 0; j < cols; j++) {
            float *to = x + i * ld + j;
            if (kind == PLAIN || kind == TINY)
                *to = uniform(-2.0f, 2.0f) * (kind == TINY ? 0x1p-126f : 1.0f);
            else
                *to = (float)between(-8, 8);
            if (kind == SPECIAL && one_in(rare)) *to = specials[between(0, 4)];
        }
    }
}

/* ---- comparison ------------------------------------------------------------------------------ */

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

int same(float x, float y) { return bits_of(x) == bits_of(y) || (x != x && y != y); }

int close_to(float x, float y, double by) {
    return same(x, y) || fabs((double)x - (double)y) <= by;
}

ptrdiff_t lanes_up(ptrdiff_t n) { return (n + LANES - 1) / LANES * LANES; }

float *copy_of(const float *x, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld) {
    float *copy = floats(rows, cols, ld);
    if (rows) memcpy(copy, x, (size_t)((rows - 1) * ld + cols) * sizeof *x);
    return copy;
}

void check_gaps(const float *x, const float *y, ptrdiff_t rows, ptrdiff_t from, ptrdiff_t ld) {
    const size_t gap = ld > from ? (size_t)(ld - from) * sizeof *x : 0;
    for (ptrdiff_t i = 0; i + 1 < rows; i++)
        if (gap && memcmp(x + i * ld + from, y + i * ld + from, gap))
            fail("wrote between rows %td and %td", i, i + 1);
}

int main(int argc, char **argv) {
    const char *parts = argc > 1 ? argv[1] : "kernels,pool,forks";
    long trials = argc > 3 ? atol(argv[3]) : 2000;
    if (argc > 2) seed = strtoull(argv[2], NULL, 10);
    state = seed;
    signal(SIGSEGV, on_fault);
    signal(SIGILL, on_fault);
#if defined(SIGBUS)
    signal(SIGBUS, on_fault);
#endif
    make_arenas();
    if (strstr(parts, "kernels")) check_kernels(trials);
    if (strstr(parts, "pool")) check_pool(trials);
    if (strstr(parts, "forks")) check_forks(trials);
    return 0;
}
