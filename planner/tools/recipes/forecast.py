"""What a save of a whole model would be, from layouts alone: no weights, no ranks, no messages.

Bytes are exact: they are those of the planner's own rules of ownership (`planner.ownership`),
and a test compares them with real plans, rank by rank.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardplan.layouts import Grid, Layout, LayoutRegistry, model_layouts
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Box
from shardplan.layouts.stages import ExpertIndex, Stage

from ...planning.ownership import Turns, parts
from .numbers import Numbers
from .parallel import Description, Parallel, describe

Counts = npt.NDArray[np.int64]
Chain = tuple[Stage, ...]


@dataclass(slots=True)
class Forecast:
    """What all ranks would write.

    Attributes:
        parallel: The configuration.
        rank_bytes: Bytes that each rank writes.
        rank_chunks: Chunks that each rank writes.
        keys: Number of tensors on disk.
        chunks: Number of their chunks.
        parameters: Number of parameters that the fullest pipeline stage has on one rank.
    """

    parallel: Parallel
    rank_bytes: Counts
    rank_chunks: Counts
    keys: int = 0
    chunks: int = 0
    parameters: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return int(self.rank_bytes.sum())

    @property
    def balance(self) -> float:
        """Bytes of the busiest rank over the mean."""
        mean = float(self.rank_bytes.mean())
        return float(self.rank_bytes.max()) / mean if mean else 1.0


@dataclass(slots=True)
class Placement:
    """The layouts of a model in one configuration, one description for each pipeline stage.

    Attributes:
        parallel: The configuration.
        stages: Description and layouts of the first rank of each stage.
    """

    parallel: Parallel
    stages: list[tuple[Description, dict[str, Layout]]] = field(default_factory=list)


def place(numbers: Numbers, parallel: Parallel) -> Placement:
    """Returns where every parameter lies in a configuration.

    Raises:
        LayoutError: With every dim that does not divide, by name.
    """
    placement = Placement(parallel)
    ranks = parallel.world_size // parallel.pp
    for stage in range(parallel.pp):
        found = describe(numbers, parallel, stage * ranks)
        layouts = model_layouts(found.shapes, found.grids, LayoutRegistry(found.providers))
        placement.stages.append((found, dict(layouts)))
    return placement


def forecast(placement: Placement, state: dict[str, torch.dtype]) -> Forecast:
    """Returns what a save would write.

    Args:
        placement: Where the parameters lie.
        state: Dtype of each saved tensor of a parameter.
    """
    world = placement.parallel.world_size
    result = Forecast(placement.parallel, np.zeros(world, np.int64), np.zeros(world, np.int64))
    sizes = [dtype.itemsize for dtype in state.values()]
    for description, layouts in placement.stages:
        result.parameters = max(result.parameters, len(layouts))
        for family in ("dense", "expert"):
            grid = description.grids.of(family)
            own = _Family(grid)
            for chain, count in _chains(layouts, family).items():
                for itemsize in set(sizes):
                    own.add(chain, itemsize, count * sizes.count(itemsize))
            own.deal()
            result.rank_bytes += own.bytes.reshape(-1)
            result.rank_chunks += own.chunks.reshape(-1)
            result.keys += own.keys
    result.chunks = int(result.rank_chunks.sum())
    return result


def _chains(layouts: dict[str, Layout], family: str) -> dict[Chain, int]:
    """Returns the distinct chains of a family and how many parameters have each."""
    found: dict[Chain, int] = {}
    for layout in layouts.values():
        if layout.family == family:
            chain = plain(layout.stages)
            found[chain] = found.get(chain, 0) + 1
    return found


def plain(stages: Chain) -> Chain:
    """Returns a chain without the number of its expert, which changes no box."""
    return tuple(
        dataclasses.replace(s, local_expert_index=0) if isinstance(s, ExpertIndex) else s
        for s in stages
    )


def named_axes(stages: Chain) -> tuple[str, ...]:
    """Returns the axes that are part of a name only: every index has a tensor of its own."""
    return tuple(a for s in stages if isinstance(s, ExpertIndex) for a in s.axes)


def holders(stages: Chain, grid: Grid) -> Iterator[Grid]:
    """Yields the coordinates that hold anything, along the axes that move boxes."""
    storage: Any = stages[0]
    named = named_axes(stages)
    axes = dict.fromkeys(a for s in stages for a in s.axes)
    outer = [a for a in axes if a not in storage.axes and a not in named]
    start = grid.at(**{a: 0 for a in grid.axes if a != "pp"})
    for at in start.walk(outer):
        yield from storage.holders(at)


class _Family:
    """Bytes and chunks of all ranks of one pipeline stage, for one family of parameters.

    Args:
        grid: The family's grid; its coordinate gives the stage.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.bytes: Counts = np.zeros(grid.sizes, np.int64)
        self.chunks: Counts = np.zeros(grid.sizes, np.int64)
        self.keys = 0
        self._small: dict[tuple[str, ...], dict[tuple[int, ...], list[int]]] = {}

    def add(self, chain: Chain, itemsize: int, count: int) -> None:
        """Adds parameters of one chain.

        Args:
            chain: Their stages.
            itemsize: Bytes of one element.
            count: How many there are.
        """
        grid = self.grid
        used = dict.fromkeys(a for s in chain for a in s.axes)
        replicas = tuple(a for a in grid.axes if a not in used and a != "pp")
        number = grid.count(replicas)
        named = set(named_axes(chain))
        frames = evaluate(chain, grid)
        self.keys += len(frames) * count * grid.count(tuple(named))
        for at in holders(chain, grid):
            for frame in evaluate(chain, at):
                for box in frame.boxes:
                    self._box(box, itemsize, count, at, replicas, number, named)

    def _box(
        self,
        box: Box,
        itemsize: int,
        count: int,
        at: Grid,
        replicas: tuple[str, ...],
        number: int,
        named: set[str],
    ) -> None:
        nbytes = math.prod(box.sizes) * itemsize
        cuts = parts(box.sizes, itemsize, number)
        if cuts is None and number > 1:
            free = {*replicas, *named}
            ident = tuple(
                -1 if axis in free else index
                for axis, index in zip(at.axes, at.coordinate, strict=True)
            )
            waiting = self._small.setdefault(replicas, {}).setdefault(ident, [])
            waiting.extend([nbytes] * count)
            return
        if cuts is None:
            index = self._index(at, named)
            self.bytes[index] += nbytes * count
            self.chunks[index] += count
            return
        row = nbytes // max(box.sizes[cuts[0][0]], 1)
        for replica, (_, start, stop) in enumerate(cuts):
            index = self._index(self._replica(at, replicas, replica), named)
            self.bytes[index] += row * (stop - start) * count
            self.chunks[index] += count

    def _index(self, at: Grid, free: set[str]) -> tuple[Any, ...]:
        """Returns the place of a coordinate in the arrays, all of the free axes at once."""
        return tuple(
            slice(None) if axis in free else index
            for axis, index in zip(at.axes, at.coordinate, strict=True)
        )

    @staticmethod
    def _replica(at: Grid, axes: tuple[str, ...], number: int) -> Grid:
        indices = {}
        for axis in reversed(axes):
            number, indices[axis] = divmod(number, at.size(axis))
        return at.at(**indices)

    def deal(self) -> None:
        """Deals the small boxes that several replicas hold, as the planner does."""
        for replicas, places in self._small.items():
            number = self.grid.count(replicas)
            known: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            for ident, waiting in places.items():
                sizes = tuple(sorted(waiting, reverse=True))
                if sizes not in known:
                    known[sizes] = _loads(sizes, number)
                named = {
                    axis
                    for axis, index in zip(self.grid.axes, ident, strict=True)
                    if index < 0 and axis not in replicas
                }
                pairs = zip(self.grid.axes, ident, strict=True)
                fixed = self.grid.at(**{axis: max(index, 0) for axis, index in pairs})
                for replica, (nbytes, count) in enumerate(known[sizes]):
                    place = self._index(self._replica(fixed, replicas, replica), named)
                    self.bytes[place] += nbytes
                    self.chunks[place] += count


def _loads(sizes: tuple[int, ...], number: int) -> list[tuple[int, int]]:
    """Returns bytes and count that each replica is dealt; sizes are largest first."""
    turns = Turns(number)
    found = [[0, 0] for _ in range(number)]
    for nbytes in sizes:
        replica = turns.deal(nbytes)
        found[replica][0] += nbytes
        found[replica][1] += 1
    return [(nbytes, count) for nbytes, count in found]
