# What is chosen from the shape of each item: blocks of query rows, splits of the keys, tasks.
# Part of attention.pyx.

cdef void plan_item(const Call *call, Item *item) noexcept nogil:
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


cdef Py_ssize_t plan(Call *call) noexcept nogil:
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
