"""Who writes what: of the replicas of a slab exactly one writes each element, and all take turns.

| name | does |
|---|---|
| `parts` | cuts a slab that several replicas hold into one part for each, if it is large |
| `Turns` | deals small slabs to replicas so that their loads stay equal |
| `writer_of_value` | the coordinate that writes a parameter's scalar |

Each rule depends on nothing but layouts and integers that all replicas share, so every replica
comes to the same answer alone.
"""

import heapq
from collections.abc import Iterable

from shardplan.layouts import ExpertIndex, Grid, Layout, Shard, Unstack
from shardplan.layouts.slab import Box, Shape, split

# A part smaller than this costs a writer more than its bytes.
_SMALLEST_PART = 4 << 10
_SMALLEST_SPLIT = 64 << 10


def parts(sizes: Shape, itemsize: int, replicas: int) -> list[tuple[int, int, int]] | None:
    """Returns the cuts of a replicated box, one part for each replica; None if it stays whole.

    Args:
        sizes: Extent of the box, in elements.
        itemsize: Bytes of one element.
        replicas: How many ranks hold the box.

    Returns:
        `(dim, start, stop)` of the part of each replica, relative to the box; fewer parts than
        replicas if no dim is long enough.
    """
    if replicas == 1:
        return None
    nbytes = itemsize
    for size in sizes:
        nbytes *= size
    if nbytes < max(_SMALLEST_SPLIT, replicas * _SMALLEST_PART):
        return None
    return split(sizes, replicas)


def take(box: Box, cut: tuple[int, int, int]) -> Box:
    """Returns the part of a box that one of `parts` names."""
    dim, start, stop = cut
    first = box.offsets[dim]
    part = box.narrow(dim, first + start, first + stop)
    assert part is not None  # parts are never empty
    return part


class Turns:
    """Deals slabs to the replicas that hold them, largest first to the least loaded.

    Args:
        count: How many replicas take turns.
    """

    def __init__(self, count: int) -> None:
        self._loads = [(0, i) for i in range(count)]

    def deal(self, nbytes: int) -> int:
        """Returns the replica that writes the next slab."""
        load, replica = self._loads[0]
        heapq.heapreplace(self._loads, (load + nbytes, replica))
        return replica


def deal(slabs: Iterable[tuple[int, str, int]], count: int, replica: int) -> list[int]:
    """Returns which of the slabs one replica writes.

    Args:
        slabs: `(nbytes, key, number)` of each slab that all of the replicas hold.
        count: How many replicas there are.
        replica: Which of them asks.

    Returns:
        The numbers of its slabs.
    """
    turns = Turns(count)
    return [
        number
        for nbytes, _, number in sorted(slabs, key=lambda s: (-s[0], s[1], s[2]))
        if turns.deal(nbytes) == replica
    ]


def writer_of_value(layout: Layout, grid: Grid) -> bool:
    """Returns whether this rank may write what belongs to a whole parameter, such as its step.

    That is a rank which stores the parameter's first elements, so that it surely has the value;
    its replicas take turns. Where the expert axis is part of the name, each name has its own.
    """
    by_row = any(isinstance(stage, Unstack) for stage in layout.stages)
    named = {
        axis
        for stage in layout.stages
        if isinstance(stage, ExpertIndex) or (by_row and isinstance(stage, Shard) and not stage.dim)
        for axis in stage.axes
    }
    storage = layout.storage.axes
    for axis in layout.axes:
        if axis not in storage and axis not in named and grid.index(axis) != 0:
            return False
    if not storage:
        return True
    first = next(iter(layout.storage.holders(grid)), None)
    return first is None or all(first.index(axis) == grid.index(axis) for axis in storage)
