# cython: language_level=3, cdivision=True
"""What a call, an item, a task and a worker are: structs, and no code but where a row lies.

Part of attention.pyx, as the other .pxd here are: each one cimports those before it, in this order,

    contract   what Python counts on too
    types      the structs
    views      the arrays of a call, and what they say of it
    plan       blocks of rows, splits and tasks, from the shape of each item
    arena      where the working memory of a worker lies
    rules      the rows of a task, and the keys that each of them may see
    keys       where keys and values lie, and how a tile of them is made ready for a product
    nonfinite  what entries of V that are not finite do to the sums of a row
    rows       the beginning and the end of a row
    tiles      a task's rows over the tiles, one after the other
    splits     what becomes of splits
    exact      the rows whose numbers are not all finite
"""

from libc.stdint cimport int32_t, int64_t, uint8_t

from qkv_ext._core._kernels cimport qkv_kernels, qkv_sequencer, qkv_row, qkv_run


cdef enum:
    SPLIT = 1024         # keys of a split, a multiple of TILE
    FEW_ROWS = 8         # up to here dot products with the rows of K beat packing them


# How a pass over the tiles takes V and the weights.
cdef enum:
    AS_IT_IS             # running maximum and sums
    CLEAN                # the same, the entries of V that are not finite read as 0
    EXACT                # final maximum and denominator, such entries as the formula has them
    SCORES_ALONE         # running maximum and sum of the weights, without V


# What is to be done yet for a row of a task.
cdef enum:
    DONE
    PENDING              # its sums are not finite
    TO_WEIGH             # top and inverse are known: EXACT
    TO_SCORE             # int8 keys: these first, from keys with their scales


# What V has to do with it that a row's sums are not finite.
cdef enum:
    MET = 1              # a tile of the row has entries that are not,
    SEEN = 2             # and the row is allowed the key of one
    V_BITS = MET | SEEN
    LARGE = 4            # the products with an int8 key may be beyond float32 once it has its scale


# ---- a call -------------------------------------------------------------------------------------

# One item: its arrays from its own first row on, its rules, and its plan.
cdef struct Item:
    const char *q
    const char *k
    const char *v
    const int64_t *pages  # where a KVCache has its keys, or NULL: see keys.pxd
    const char *mask     # or NULL
    const char *block_mask  # or NULL
    const int32_t *q_segments  # [L] or NULL
    const int32_t *k_segments  # [S]
    char *out
    char *weights        # or NULL
    char *lse            # or NULL
    const float *slopes  # [heads] or NULL
    Py_ssize_t L, S      # its own lengths
    Py_ssize_t padded_len  # rows that are its own, of which L are there
    Py_ssize_t diagonal     # query i stands at key i + diagonal
    Py_ssize_t block, blocks, splits
    Py_ssize_t splits_per_task  # one after the other
    uint8_t *looked      # [blocks, tiles], what the mask does there, or NULL: see look_at_tile
    bint use_dot_kernel  # dot products with the rows of K, no panels
    Py_ssize_t first_task, first_partial


cdef struct Shape:
    Py_ssize_t heads, kv_heads, group, S, D, Dv
    int kind             # of q and out: QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16
    int stored           # of k and v: that, or in pages any of storage.def
    Py_ssize_t page      # keys of a page, 0 where k and v are arrays


# Bytes from a head to the next, and from a row to the next.
cdef struct Stride:
    Py_ssize_t head, row


cdef struct Strides:
    Stride q, k, v, out, mask, blocks, weights, lse


cdef struct Rules:
    float scale
    Py_ssize_t left, right
    qkv_row row          # what all rows have in common: start_rows fills in the rest
    const float *sinks   # [heads] or NULL
    bint bool_mask
    Py_ssize_t block_rows  # of queries; row.block is that of keys
    bint large_scales    # of int8 keys: see overflows


cdef struct Plan:
    Item *items
    Py_ssize_t count     # of items
    Py_ssize_t block     # the largest block of rows
    Py_ssize_t keys      # keys that panels hold at most
    Py_ssize_t longest   # keys of the longest item
    bint absent          # some items have fewer rows than there is room for
    Py_ssize_t partials  # tasks of items with more than one split
    Py_ssize_t units     # blocks of rows that these tasks belong to
    Py_ssize_t tasks
    Py_ssize_t looked    # bytes of what items remember of their masks
    Py_ssize_t stride    # from a task to the one that its worker most likely takes next


# Rows of split items that are to be computed once more, when all splits are merged: see exact.pxd.
cdef struct Leftover:
    Py_ssize_t count     # of units that have some
    Py_ssize_t *tasks    # [units], the first task of each
    uint8_t *todo        # [units, block], and from here on: as a Workspace and its Partial have it
    uint8_t *nonfinite_v
    float *row_max
    float *row_sum


# Working memory: one Workspace per worker, and the partials that wait.
cdef struct Arena:
    char *workspaces
    size_t workspace_size
    char *waiting
    size_t partial_size
    Py_ssize_t slots
    qkv_sequencer *sequencer
    Leftover left_over   # of the splits


cdef struct Call:
    const qkv_kernels *ops
    Shape shape
    Strides strides
    Rules rules
    Plan plan
    Arena arena


# ---- a task -------------------------------------------------------------------------------------

# What a split leaves behind: unnormalised sums of a block of rows.
cdef struct Partial:
    float *acc           # [block, Dv]
    float *row_max       # [block]
    float *row_sum       # [block]
    uint8_t *nonfinite_v  # [block], MET and SEEN: what V has to do with it; LARGE: int8 keys


# A worker's memory.
cdef struct Workspace:
    int worker           # whose it is,
    qkv_run *run         # and what it asks whether to go on
    Partial partial
    Partial total        # of the splits so far, where a task has several
    float *q             # [block, D], scaled
    float reach          # what they make of an int8 key of scale 1, or more
    float *scores        # [block, TILE] TILE + LANES
    float *factor        # [block]
    float *ones          # [block]
    float *scales        # [block], the scale for every row
    float *panels        # K of a head, or of a tile: [keys / PANEL] panels
    float *k_rows        # [TILE, D], a tile of K that is stored in 16 bits
    float *v_rows        # [TILE, Dv], a tile of V that is, or with its non-finite entries as 0
    float *v_codes       # [TILE, Dv], what these are
    float *v_scale       # [TILE + LANES], the scales of such a tile in int8
    float *values        # [block, Dv], output rows before they are rounded to 16 bits
    uint8_t *todo        # [block], what is to be done yet for a row: DONE, PENDING, ...
    float *top           # [block], the maximum of a row, its sink among the scores,
    float *inverse       # [block], and 1 over its denominator
    float *admitted      # [block, TILE] TILE + LANES, the weights of keys whose V is not finite
    float *met           # [block, Dv], the sums of their codes
    Py_ssize_t *start    # [block], the first column of the tile that a group of rows needs,
    Py_ssize_t *end      # [block], and the end of them, 0 for none; at the group's first row
    uint8_t *unmasked    # [block], whether the mask changes none of these; likewise
    uint8_t *packed      # [tiles], which tiles of the head are in panels
    qkv_row *rows        # [block]
    Py_ssize_t *head     # the head that panels belongs to, -1 for none


# A block of rows against a split of the keys, or against all.
cdef struct Task:
    const Item *item
    Py_ssize_t head      # item and key/value head as one number
    Py_ssize_t kv_head, first_row, m, split
    Py_ssize_t partial   # its number among the tasks of split items
    Py_ssize_t first_key, end_key  # of its split
    const char *k
    const char *v
    bint scaled          # int8 keys with their scales, before the product


cdef inline char *row_at(const char *base, Stride stride, Py_ssize_t h,
                         Py_ssize_t i) noexcept nogil:
    """Row i of head h of an array."""
    return <char *> base + h * stride.head + i * stride.row
