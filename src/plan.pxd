# cython: language_level=3, cdivision=True
"""What is chosen from the shape of each item: blocks of query rows, splits of the keys, tasks."""

from libc.stdint cimport uint8_t
from libc.string cimport memset

from qkv_ext._core._kernels cimport TILE

from src.types cimport Call, FEW_ROWS, Item, SPLIT, Task, row_at


cdef enum:
    ROWS = 132           # query rows of a task: their scores stay in the second-level cache,
    ORDERED_ROWS = 48    # fewer where rows see different keys


cdef inline void plan_item(const Call *call, Item *item) noexcept nogil:
    """Blocks and splits of an item, from its own lengths alone."""
    cdef Py_ssize_t rows = item.L * call.shape.group
    cdef bint ordered = call.rules.right < item.S or call.rules.left < item.S
    cdef Py_ssize_t most = ORDERED_ROWS if ordered else ROWS
    item.use_dot_kernel = rows <= FEW_ROWS and call.shape.page == 0
    item.blocks = (rows + most - 1) // most
    item.block = 0
    if rows > 0:
        item.block = (rows + item.blocks - 1) // item.blocks
        if not item.use_dot_kernel:  # whole register tiles
            item.block = (item.block + call.ops.rows - 1) // call.ops.rows * call.ops.rows
        item.blocks = (rows + item.block - 1) // item.block
    item.splits = item.splits_per_task = 1
    if item.blocks == 1:
        item.splits = max(1, (item.S + SPLIT - 1) // SPLIT)
    elif call.shape.page:
        item.splits_per_task = max(1, (item.S + SPLIT - 1) // SPLIT)


cdef inline Py_ssize_t tiles_of(const Item *item) noexcept nogil:
    return (item.S + TILE - 1) // TILE


cdef inline bint same_mask(const Item *item, const Item *other) noexcept nogil:
    """Whether what one remembers of its mask goes for the other."""
    return (item.mask == other.mask and item.block_mask == other.block_mask
            and item.q_segments == other.q_segments and item.L == other.L
            and item.S == other.S and item.diagonal == other.diagonal)


cdef inline void lay_looked(Call *call, uint8_t *memory) noexcept nogil:
    """Room for what items remember of masks that serve all heads; NULL tells how much it is."""
    cdef Py_ssize_t n
    cdef Item *item
    call.plan.looked = 0
    item = &call.plan.items[0]
    if (item.mask == NULL and item.block_mask == NULL and item.q_segments == NULL
            or call.strides.mask.head or call.strides.blocks.head):
        return
    for n in range(call.plan.count):
        item = &call.plan.items[n]
        if n and same_mask(item, item - 1):
            item.looked = item[-1].looked
            continue
        if memory != NULL:
            item.looked = memory + call.plan.looked
        call.plan.looked += item.blocks * tiles_of(item)
    if memory != NULL:
        memset(memory, 0, call.plan.looked)


cdef inline void lay_tasks(Call *call) noexcept nogil:
    """Plan every item and lay the tasks end to end."""
    cdef Py_ssize_t n, own
    cdef Item *item
    for n in range(call.plan.count):
        item = &call.plan.items[n]
        plan_item(call, item)
        own = item.blocks * item.splits * call.shape.kv_heads
        item.first_task = call.plan.tasks
        item.first_partial = call.plan.partials
        call.plan.tasks += own
        if item.splits > 1:
            call.plan.partials += own
            call.plan.units += call.shape.kv_heads
        call.plan.block = max(call.plan.block, item.block)
        call.plan.longest = max(call.plan.longest, item.S)
        call.plan.absent = call.plan.absent or item.L < item.padded_len
        if item.blocks > 1 and call.shape.page == 0:
            call.plan.keys = max(call.plan.keys, tiles_of(item) * TILE)
        elif not item.use_dot_kernel:
            call.plan.keys = max(call.plan.keys, TILE)


cdef inline Py_ssize_t item_of(const Call *call, Py_ssize_t index, bint split) noexcept nogil:
    """The item that holds a task, by bisection; split: by its number among those of split items.

    Items without any share their first number with the next item: the last one wins.
    """
    cdef Py_ssize_t low = 0, high = call.plan.count, middle
    cdef const Item *item
    while high - low > 1:
        middle = (low + high) // 2
        item = &call.plan.items[middle]
        if (item.first_partial if split else item.first_task) <= index:
            low = middle
        else:
            high = middle
    return low


cdef inline void task_at(const Call *call, Py_ssize_t index, Task *task) noexcept nogil:
    """The item that holds the task, then head, block and split within it."""
    cdef Py_ssize_t n = item_of(call, index, False), unit, block
    cdef const Item *item = &call.plan.items[n]
    index -= item.first_task
    unit = index // item.splits
    block = unit % item.blocks
    if call.rules.right < item.S:
        block = item.blocks - 1 - block  # in causal order the longest first
    task.item = item
    task.split = index % item.splits
    task.partial = item.first_partial + index
    task.kv_head = unit // item.blocks
    task.head = n * call.shape.kv_heads + task.kv_head
    task.first_row = block * item.block
    task.m = min(item.block, item.L * call.shape.group - task.first_row)
    task.k = row_at(item.k, call.strides.k, task.kv_head, 0)
    task.v = row_at(item.v, call.strides.v, task.kv_head, 0)
    task.scaled = False
    task.first_key, task.end_key = 0, item.S
    if item.splits > 1:
        take_split(task, task.split)


cdef inline void take_split(Task *task, Py_ssize_t n) noexcept nogil:
    task.first_key = n * SPLIT
    task.end_key = min(task.item.S, task.first_key + SPLIT)
