/* Loads and stores of arrays in float32, float16 or bfloat16; kind is a constant in every caller.
   Part of template.h. */

static ALWAYS_INLINE vec v_get(const int kind, const void *x, ptrdiff_t i) {
    return kind == QKV_FLOAT32 ? v_load((const float *)x + i) : v_stored(kind, x, i);
}

/* The last n numbers of a row, fewer than VL. */
static ALWAYS_INLINE vec v_get_n(const int kind, const void *x, ptrdiff_t i, ptrdiff_t n) {
    uint16_t edge[VL] = {0};
    if (kind == QKV_FLOAT32) return v_load_n((const float *)x + i, n);
    memcpy(edge, (const uint16_t *)x + i, (size_t)n * sizeof *edge);
    return v_stored(kind, edge, 0);
}

/* streams, of float32 alone: past the caches. */
static ALWAYS_INLINE void v_put(const int kind, void *y, ptrdiff_t i, vec x, const int streams) {
    if (kind == QKV_FLOAT16)
        v_to_half((uint16_t *)y + i, x);
    else if (kind == QKV_BFLOAT16)
        v_to_bfloat((uint16_t *)y + i, x);
    else if (streams)
        v_stream((float *)y + i, x);
    else
        v_store((float *)y + i, x);
}

static ALWAYS_INLINE void v_put_n(const int kind, void *y, ptrdiff_t i, vec x, ptrdiff_t n) {
    uint16_t edge[VL];
    if (kind == QKV_FLOAT32) {
        v_store_n((float *)y + i, x, n);
    } else {
        v_put(kind, edge, 0, x, 0);
        memcpy((uint16_t *)y + i, edge, (size_t)n * sizeof *edge);
    }
}

/* A function for each kind, to be called with it and, for float32, a flag as constants. */
#define FOR_KIND(function, kind, flag, ...)                                                        \
    do {                                                                                           \
        if (kind == QKV_FLOAT16)                                                                   \
            function(QKV_FLOAT16, 0, __VA_ARGS__);                                                 \
        else if (kind == QKV_BFLOAT16)                                                             \
            function(QKV_BFLOAT16, 0, __VA_ARGS__);                                                \
        else if (flag)                                                                             \
            function(QKV_FLOAT32, 1, __VA_ARGS__);                                                 \
        else                                                                                       \
            function(QKV_FLOAT32, 0, __VA_ARGS__);                                                 \
    } while (0)
