# cython: language_level=3, cdivision=True
"""What is chosen from the shape of each item: blocks of query rows, splits of the keys, tasks."""

from qkv_ext._kernels cimport TILE

from src.types cimport Call, FEW_ROWS, Item, Place, SPLIT


cdef enum:
    ROWS = 132           # query rows of a task: their scores stay in the second-level cache,
    ORDERED_ROWS = 48    # fewer where rows see different keys


cdef inline void plan_item(const Call *call, Item *item) noexcept nogil:
    """Blocks and splits of an item, from its own lengths alone."""
    cdef Py_ssize_t rows = item.L * call.group
    cdef bint ordered = call.right < item.S or call.left < item.S
    cdef Py_ssize_t most = ORDERED_ROWS if ordered else ROWS
    item.direct = rows <= FEW_ROWS and call.page == 0
    item.blocks = (rows + most - 1) // most
    item.block = 0
    if rows > 0:
        item.block = (rows + item.blocks - 1) // item.blocks
        if not item.direct:  # whole register tiles
            item.block = (item.block + call.ops.rows - 1) // call.ops.rows * call.ops.rows
        item.blocks = (rows + item.block - 1) // item.block
    item.splits = item.passes = 1
    if item.blocks == 1:
        item.splits = max(1, (item.S + SPLIT - 1) // SPLIT)
    elif call.page:
        item.passes = max(1, (item.S + SPLIT - 1) // SPLIT)


cdef inline Py_ssize_t plan(Call *call) noexcept nogil:
    """Plan every item and lay the tasks end to end; returns their number."""
    cdef Py_ssize_t n, tasks = 0, own
    cdef Item *item
    for n in range(call.count):
        item = &call.items[n]
        plan_item(call, item)
        own = item.blocks * item.splits * call.kv_heads
        item.first_task = tasks
        item.first_part = call.parts
        tasks += own
        if item.splits > 1:
            call.parts += own
            call.units += call.kv_heads
        call.block = max(call.block, item.block)
        call.longest = max(call.longest, item.S)
        call.absent = call.absent or item.L < item.room
        if item.blocks > 1 and call.page == 0:
            call.keys = max(call.keys, (item.S + TILE - 1) // TILE * TILE)
        elif not item.direct:
            call.keys = max(call.keys, TILE)
    return tasks


cdef inline void find_place(const Call *call, Py_ssize_t index, Place *at) noexcept nogil:
    """The item that holds the task, by bisection, then head, block and split within it."""
    cdef Py_ssize_t low = 0, high = call.count, middle, unit, block
    cdef const Item *item
    while high - low > 1:
        middle = (low + high) // 2
        if call.items[middle].first_task <= index:
            low = middle
        else:
            high = middle
    item = &call.items[low]
    index -= item.first_task
    unit = index // item.splits
    block = unit % item.blocks
    if call.right < item.S:
        block = item.blocks - 1 - block  # in causal order the longest first
    at.item = item
    at.split = index % item.splits
    at.part = item.first_part + index
    at.kv_head = unit // item.blocks
    at.head = low * call.kv_heads + at.kv_head
    at.first_row = block * item.block
    at.m = min(item.block, item.L * call.group - at.first_row)
    at.k = item.k + at.kv_head * call.k_head
    at.v = item.v + at.kv_head * call.v_head
    at.scaled = False
    at.first_key, at.end_key = 0, item.S
    if item.splits > 1:
        at.first_key = at.split * SPLIT
        at.end_key = min(item.S, at.first_key + SPLIT)


cdef inline void take_split(Place *at, Py_ssize_t n) noexcept nogil:
    at.first_key = n * SPLIT
    at.end_key = min(at.item.S, at.first_key + SPLIT)
