"""Who writes what: of the replicas of a slab exactly one writes each element, and all take turns.

Each rule depends on nothing but layouts and integers that all replicas share, so every replica
comes to the same answer alone.
"""

import heapq
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from shardplan.layouts import ExpertIndex, Grid, Layout, Shard, Unstack
from shardplan.layouts.slab import Box, Shape, split
from shardplan.layouts.storage import StorageStage

# Below these sizes the overhead of a chunk dominates, in bytes.
_SMALLEST_PART = 4 << 10
_SMALLEST_SPLIT = 64 << 10
_EVEN = 1.05  # allowed imbalance: largest part ÷ mean
_OBJECT_NBYTES = 64  # what a Python value counts for when replicas take turns

# The rules in this module, which a reader has to repeat. A change to them, and not only to the
# numbers above, is a new version; readers keep the rules of every version that was released.
OWNERSHIP_VERSION = 2


@dataclass(frozen=True, slots=True)
class Ownership:
    """The numbers that decide who writes what; a checkpoint records those of its save.

    Attributes:
        smallest_split: A replicated box of fewer bytes is written by one replica.
        smallest_part: No replica's part of a box has fewer bytes.
        even: Largest part of a box ÷ mean, at most.
        object_nbytes: Bytes that a Python value counts for.
    """

    smallest_split: int
    smallest_part: int
    even: float
    object_nbytes: int

    @classmethod
    def current(cls) -> "Ownership":
        """Returns the numbers of this version of the library."""
        return cls(_SMALLEST_SPLIT, _SMALLEST_PART, _EVEN, _OBJECT_NBYTES)


def parts(
    sizes: Shape, itemsize: int, replicas: int, rules: Ownership | None = None
) -> list[tuple[int, int, int]] | None:
    """Returns the cuts of a replicated box, one part for each replica; None if it stays whole.

    Args:
        sizes: Extent of the box, in elements.
        itemsize: Bytes of one element.
        replicas: How many ranks hold the box.
        rules: The numbers of the save; of this version if not given.

    Returns:
        `(dim, start, stop)` of the part of each replica, relative to the box. A box that no dim
        divides evenly enough stays whole: replicas then take turns, which is fairer.
    """
    if replicas == 1:
        return None
    nbytes = itemsize
    for size in sizes:
        nbytes *= size
    rules = rules or Ownership.current()
    if nbytes < max(rules.smallest_split, replicas * rules.smallest_part):
        return None
    for dim, size in enumerate(sizes):
        if -(-size // replicas) * replicas <= rules.even * size:
            return [(dim, start, stop) for _, start, stop in split((size,), replicas)]
    return None


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

    That is a rank which stores some of the parameter, so that it surely has the value; which of
    them is drawn by the parameter's name, so that a model's scalars are spread over the ranks,
    and its replicas take turns. Where the expert axis is part of the name, each name has its own.
    """
    named = _named_axes(layout)
    storage = layout.storage.axes
    draw = zlib.crc32(layout.fqn.encode())
    for axis in layout.axes:
        if axis not in storage and axis not in named:
            draw, index = divmod(draw, grid.size(axis))
            if grid.index(axis) != index:
                return False
    if not storage:
        return True
    holders = _holders(layout.storage, grid.axes, grid.sizes)
    if not holders:
        return True
    return holders[draw % len(holders)] == tuple(grid.index(axis) for axis in storage)


def value_writers(layout: Layout, grid: Grid) -> list[Grid]:
    """Returns the coordinates for which `writer_of_value` is true: one for each expert's name.

    Args:
        layout: The parameter's layout.
        grid: Its family's grid; replica axes and pipeline stage are taken from it.
    """
    named, storage = _named_axes(layout), layout.storage.axes
    draw = zlib.crc32(layout.fqn.encode())
    drawn = {}
    for axis in layout.axes:
        if axis not in storage and axis not in named:
            draw, drawn[axis] = divmod(draw, grid.size(axis))
    holders = _holders(layout.storage, grid.axes, grid.sizes) if storage else ()
    if holders:
        drawn |= dict(zip(storage, holders[draw % len(holders)], strict=True))
    return list(grid.at(**drawn).walk([a for a in named if a not in storage]))


def _named_axes(layout: Layout) -> list[str]:
    """Returns the axes that tell experts' names apart."""
    by_row = any(isinstance(stage, Unstack) for stage in layout.stages)
    return list(
        dict.fromkeys(
            axis
            for stage in layout.stages
            if isinstance(stage, ExpertIndex)
            or (by_row and isinstance(stage, Shard) and not stage.dim)
            for axis in stage.axes
        )
    )


@lru_cache(maxsize=4096)
def _holders(
    storage: StorageStage, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Returns the coordinates along a storage's axes that store anything of it."""
    origin = Grid(axes, sizes, (0,) * len(axes))
    return tuple(
        tuple(place.index(axis) for axis in storage.axes) for place in storage.holders(origin)
    )
