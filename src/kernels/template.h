/* The micro-kernels, written once in a small vector vocabulary.  The including file defines

     vec, VL                    a vector of VL floats
     ROWS, VECS                 the register tile of a product: ROWS rows (6) by VECS vectors (2, 4)
     V_REGISTERS                the letter of inline assembly for a register that holds a vector
     SKINNY_ROWS                  how many rows by WIDE vectors the registers hold, 1 or 2
     v_zero v_set1              constants
     v_load v_store             VL floats, any alignment
     v_stream                   v_store past the caches, to a multiple of 16 bytes
     v_load_n v_store_n         the first n floats, 0 <= n <= VL; other lanes are zero, untouched
     v_add v_sub v_mul v_div v_abs   lane by lane, and v_minus_abs: -|a|
     v_max(a, b)                b where either is a NaN, or a NaN
     v_select_lt(a, b, x, y)         x where a < b, else y
     v_fma(a, b, c)             a b + c, and v_fnma: c - a b
     v_fma_once(a, b, c)        a b + c as if it were rounded once, where v_fma rounds twice, too
     v_ldexp(p, t)              p 2^(t - 3 2^22 - 127) with one rounding; the last nine bits of t are
                                the sign and the exponent of that power
     v_keep(s, bytes)           s where the byte is not 0, else -inf
     v_bias(s, b)               s + b, but -inf where b is -inf, whatever s is
     v_hsum v_hmax            over the lanes
     v_transpose(vec *)         VL vectors in place
     v_unzip v_zip(vec *)       of two vectors in place: lanes 0 2 4 ... of both, and 1 3 5 ...; and back
     v_hsum_n v_hmax_n(vec *)     lane i is the sum, or the largest, over the lanes of vector i
     v_from_half v_from_bfloat  VL floats of 16-bit numbers; v_to_half v_to_bfloat the other way
     v_from_int8                VL floats of 8-bit integers; storage.def says what has which

   and then includes this file, which defines the table QKV_TABLE.  Arrays are documented in
   kernels.h.  Nothing here branches on a value except where a comment says why. */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

enum {
    FEW = 8,             /* rows of a up to here: what a product waits for are the rows of b */
    WIDE = 8,            /* vectors of their tile */
    GEMV_COLUMNS = 4096, /* sums of a long row at most: half of the first-level cache */
};
_Static_assert(sizeof(vec) == VL * sizeof(float), "vec is VL floats");
_Static_assert(LANES % VL == 0, "VL divides LANES, up to which kernels read and write");
_Static_assert(ROWS == 6, "product.h has register tiles of 1 to 6 rows");
_Static_assert(VECS == 2 || VECS == 4, "product.h has register tiles of 2 or 4 vectors");
_Static_assert(SKINNY_ROWS == 1 || SKINNY_ROWS == 2, "product.h has SKINNY_ROWS 1 or 2");
_Static_assert(GEMV_COLUMNS / 16 >= VL && GEMV_COLUMNS % VL == 0, "long rows are whole vectors");

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* before acc is given a place in memory: it needs none */
#else
#define ALWAYS_INLINE __forceinline
#define UNROLL
#endif
#if defined(V_REGISTERS) && defined(__GNUC__)
#define IN_REGISTER(x) __asm__("" : "+" V_REGISTERS(x)) /* loaded once, not with each use */
#else
#define IN_REGISTER(x) ((void)0)
#endif

#include "exp.h"
#include "activation.h"
#include "product.h"
#include "dots.h"
#include "rows.h"
#include "numbers.h"
#include "rotary.h"
#include "merge.h"
#include "norm.h"
#include "softmax.h"

const qkv_kernels QKV_TABLE = {
        QKV_NAME,      ROWS,         product,      product_stored, product_panel, dots,
        pack,          softmax_tile, look_at_mask, epilogue,       adjust_row,    scale_rows,
        split_finite,  weights,      largest,      exp_and_sum,    softmax,       widen,
        scale_columns, narrow,       to_int8,      rotate_halves,  rotate_pairs,  merge_weights,
        merge_rows,    norm,         norm_sums,    norm_apply,     exp_each,      tanh_each,
};
