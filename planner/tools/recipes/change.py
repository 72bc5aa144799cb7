"""What a change of the parallel configuration costs: the reads of every rank of the new one."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardplan.layouts import Grid, Layout
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Box
from shardplan.layouts.stages import ExpertIndex

from ...planning.ownership import parts, take
from .forecast import Chain, Counts, Placement, holders, plain

_EXPERT = re.compile(r"\d+$")


@dataclass(slots=True)
class Reads:
    """What each rank of a configuration reads of a checkpoint of another.

    Attributes:
        rank_bytes: Bytes that each rank needs; with reads of exact ranges, what it reads.
        rank_reads: Parts of saved chunks that it reads them from.
        whole_bytes: Bytes that a reader loads which takes whole chunks for each part, as torch's
            file system reader does.
    """

    rank_bytes: Counts
    rank_reads: Counts
    whole_bytes: int = 0


@dataclass(slots=True)
class _Met:
    """Reads of one pair of layouts, by coordinate along the axes that move boxes."""

    places: list[tuple[Grid, int, int, int]]


def change(before: Placement, after: Placement, state: dict[str, torch.dtype]) -> Reads:
    """Returns what every rank reads when a checkpoint of `before` is loaded into `after`.

    Args:
        before: Where the parameters lay when they were saved.
        after: Where they lie now.
        state: Dtype of each saved tensor of a parameter.
    """
    world = after.parallel.world_size
    result = Reads(np.zeros(world, np.int64), np.zeros(world, np.int64))
    saved: dict[str, tuple[Layout, Grid]] = {}
    for description, layouts in before.stages:
        for fqn, layout in layouts.items():
            saved[fqn] = (layout, description.grids.of(layout.family))
    sizes = [dtype.itemsize for dtype in state.values()]
    known: dict[Any, _Met] = {}
    for description, layouts in after.stages:
        grids = description.grids
        arrays = {f: _Arrays(grids.of(f)) for f in ("dense", "expert")}
        pairs: dict[tuple[str, Chain, Chain, int | None], tuple[int, Grid]] = {}
        for fqn, layout in layouts.items():
            for rank, name in _names(fqn, layout, grids.of(layout.family), before):
                old, old_grid = saved[name]
                ident = (layout.family, plain(old.stages), plain(layout.stages), rank)
                pairs[ident] = (pairs.get(ident, (0, old_grid))[0] + 1, old_grid)
        for (family, old_chain, chain, rank), (count, old_grid) in pairs.items():
            for itemsize in set(sizes):
                grid = grids.of(family)
                met = (old_chain, chain, itemsize, grid.axes, grid.sizes)
                if met not in known:
                    known[met] = _meet(old_chain, old_grid, chain, grid, itemsize)
                weight = count * sizes.count(itemsize)
                result.whole_bytes += arrays[family].add(known[met], chain, rank, weight)
        for found in arrays.values():
            result.rank_bytes += found.bytes.reshape(-1)
            result.rank_reads += found.reads.reshape(-1)
    return result


def _names(fqn: str, layout: Layout, grid: Grid, before: Placement) -> list[tuple[int | None, str]]:
    """Returns, for each expert-parallel rank, the name that the parameter had before."""
    index = next((s for s in layout.stages if isinstance(s, ExpertIndex)), None)
    if index is None:
        return [(None, fqn)]
    held = index.num_local_experts * grid.size("ep") // before.parallel.ep
    found: list[tuple[int | None, str]] = []
    for rank in range(grid.size("ep")):
        expert = rank * index.num_local_experts + index.local_expert_index
        found.append((rank, _EXPERT.sub(str(expert % held), fqn)))
    return found


def _meet(old: Chain, old_grid: Grid, new: Chain, grid: Grid, itemsize: int) -> _Met:
    """Meets the boxes of every coordinate with the chunks that were saved."""
    saved = _chunks(old, old_grid, itemsize)
    places = []
    for at in holders(new, grid):
        needed = reads = whole = 0
        for frame in evaluate(new, at):
            starts, stops, sizes = saved[frame.suffix]
            for box in frame.boxes:
                first = np.array(box.offsets)
                last = first + box.sizes
                met = ((starts < last) & (stops > first)).all(axis=1)
                needed += math.prod(box.sizes)
                reads += int(met.sum())
                whole += int(sizes[met].sum())
        places.append((at, needed * itemsize, reads, whole * itemsize))
    return _Met(places)


def _chunks(chain: Chain, grid: Grid, itemsize: int) -> dict[str, tuple[Counts, Counts, Counts]]:
    """Returns first and last elements and sizes of the chunks that all ranks write of a parameter.

    By component; one row for each chunk.
    """
    used = dict.fromkeys(a for s in chain for a in s.axes)
    replicas = grid.count([a for a in grid.axes if a not in used and a != "pp"])
    boxes: dict[str, list[Box]] = {}
    for at in holders(chain, grid):
        for frame in evaluate(chain, at):
            found = boxes.setdefault(frame.suffix, [])
            for box in frame.boxes:
                cuts = parts(box.sizes, itemsize, replicas)
                found += [box] if cuts is None else [take(box, cut) for cut in cuts]
    made = {}
    for suffix, held in boxes.items():
        starts = np.array([box.offsets for box in held], np.int64).reshape(len(held), -1)
        sizes = np.array([box.sizes for box in held], np.int64).reshape(len(held), -1)
        made[suffix] = (starts, starts + sizes, sizes.prod(axis=1))
    return made


class _Arrays:
    """Bytes and reads of all ranks of one pipeline stage, for one family of parameters."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.bytes: Counts = np.zeros(grid.sizes, np.int64)
        self.reads: Counts = np.zeros(grid.sizes, np.int64)

    def add(self, met: _Met, chain: Chain, expert_rank: int | None, count: int) -> int:
        """Adds the reads of parameters that are laid out alike.

        Args:
            met: Their reads by coordinate.
            chain: Their stages.
            expert_rank: The expert-parallel rank that holds them, None for dense ones.
            count: How many there are.

        Returns:
            The bytes of the whole chunks that they touch, on all ranks.
        """
        used = {a for s in chain for a in s.axes}
        free = [a for a in self.grid.axes if a not in used and a != "pp"]
        replicas = self.grid.count(free)
        total = 0
        for at, nbytes, reads, whole in met.places:
            index: tuple[Any, ...] = tuple(
                slice(None)
                if axis in free
                else expert_rank
                if axis == "ep" and expert_rank is not None
                else own
                if axis == "pp"
                else i
                for axis, i, own in zip(at.axes, at.coordinate, self.grid.coordinate, strict=True)
            )
            self.bytes[index] += nbytes * count
            self.reads[index] += reads * count
            total += whole * count * replicas
        return total
