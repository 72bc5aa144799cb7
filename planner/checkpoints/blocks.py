"""Cuts a tensor into pieces of bounded size that follow one another in row-major order."""

import math
from collections.abc import Iterator

from shardplan.layouts.slab import Shape

LIMIT = 32 << 20


def row_blocks(shape: Shape, itemsize: int, limit: int = LIMIT) -> Iterator[tuple[Shape, Shape]]:
    """Yields offsets and sizes of boxes that cover a tensor in row-major order.

    Args:
        shape: Shape of the tensor.
        itemsize: Bytes of one element.
        limit: Most bytes of one box, unless an element is larger.

    >>> list(row_blocks((3, 4), 1, 8))
    [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if not shape or math.prod(shape) * itemsize <= limit:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:]) * itemsize
    if row <= limit:
        each = limit // row
        rest = (0,) * (len(shape) - 1)
        for start in range(0, shape[0], each):
            yield (start, *rest), (min(each, shape[0] - start), *shape[1:])
        return
    for index in range(shape[0]):
        for offsets, sizes in row_blocks(shape[1:], itemsize, limit):
            yield (index, *offsets), (1, *sizes)
