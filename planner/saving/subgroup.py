"""A save by some of the ranks only: `process_group=` of `dcp.save`, such as one replica's.

The ranks that save must hold everything. So the grids are cut down to the ranks of the group, and
an axis that becomes shorter must be one along which ranks are replicas.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from shardplan.layouts import Grid, Grids, LayoutError

from ..planning.table import Chunk

_SHOWN = 8


def ranks_of(process_group: Any) -> tuple[int, ...] | None:
    """Returns the global ranks of a process group; None if it has all ranks, or is None."""
    if process_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = tuple(dist.get_process_group_ranks(process_group))
    return None if len(ranks) == dist.get_world_size() else ranks


def restrict(chunks: tuple[Chunk, ...], ranks: tuple[int, ...] | None) -> tuple[Chunk, ...]:
    """Returns the model's chunks on the grids of the ranks that save.

    Args:
        chunks: The chunks, each on a grid of all ranks or of those that save.
        ranks: Global ranks that save; None for all.

    Raises:
        LayoutError: If the ranks are not a box of the grid, or shards of others would be missing.
    """
    if ranks is None:
        return chunks
    found = []
    for chunk in chunks:
        grids = restrict_grids(chunk.grids, ranks)
        _check_layouts(chunk, grids, ranks)
        found.append(dataclasses.replace(chunk, grids=grids))
    return tuple(found)


def restrict_grids(grids: Grids, ranks: tuple[int, ...] | None) -> Grids:
    """Returns the grids of the ranks that save.

    Raises:
        LayoutError: If they are not a box of the grid, or the ranks are not numbered like it.
    """
    if ranks is None or grids.world_size == len(ranks):
        return grids
    return Grids(_restricted(grids.dense, ranks), _restricted(grids.expert, ranks))


def _restricted(grid: Grid, ranks: tuple[int, ...]) -> Grid:
    rank, world = dist.get_rank(), dist.get_world_size()
    if grid.world_size != world or grid.linear(grid.axes) != rank:
        raise LayoutError(
            f"process_group: rank {rank} of {world} is at place {grid.linear(grid.axes)} of a grid "
            f"of {grid.world_size} ranks ({grid.facts()}), so the places of the group's ranks "
            f"{_listed(ranks)} are not known. Pass grid= with the grid of the ranks that save, or "
            "save from all ranks."
        )
    kept = _kept(grid, ranks)
    if math.prod(map(len, kept)) != len(ranks):
        raise LayoutError(
            f"process_group: its {len(ranks)} ranks {_listed(ranks)} are not all ranks along some "
            f"axes of the grid {dict(zip(grid.axes, grid.sizes, strict=True))} ({grid.facts()}). "
            "Save from the ranks of one replica, or from all ranks."
        )
    coordinate = tuple(k.index(c) for k, c in zip(kept, grid.coordinate, strict=True))
    return Grid(grid.axes, tuple(map(len, kept)), coordinate)


def _kept(grid: Grid, ranks: Iterable[int]) -> list[list[int]]:
    """Returns the indices along each axis that the ranks have."""
    axes = dict(zip(grid.axes, grid.sizes, strict=True))
    coordinates = [Grid.from_rank(axes, rank).coordinate for rank in ranks]
    return [sorted(set(indices)) for indices in zip(*coordinates, strict=True)]


def _check_layouts(chunk: Chunk, grids: Grids, ranks: tuple[int, ...]) -> None:
    """Refuses a group without ranks that hold shards of their own."""
    for family in ("dense", "expert"):
        whole, grid = chunk.grids.of(family), grids.of(family)
        shorter = {
            axis
            for axis, size, left in zip(whole.axes, whole.sizes, grid.sizes, strict=True)
            if left < size
        }
        if "pp" in shorter:
            raise LayoutError(
                f"process_group: the parameters of other pipeline stages, on ranks "
                f"{_listed(_others(whole, 'pp', ranks))}, would be missing ({whole.facts()}). Save "
                "from all stages; to save one stage alone, pass grid= with the grid of its ranks."
            )
        checked: set[int] = set()
        for layout in (*chunk.layouts.values(), *chunk.state_layouts.values()):
            if layout.family != family or id(layout.stages) in checked:
                continue
            checked.add(id(layout.stages))
            for axis in layout.axes:
                if axis in shorter:
                    raise LayoutError(
                        f"{layout.fqn}: cut along the axis {axis} of {whole.size(axis)} ranks, of "
                        f"which process_group has {grid.size(axis)}, so the shards of ranks "
                        f"{_listed(_others(whole, axis, ranks))} would be missing "
                        f"({whole.facts()}). Save from a group that has all of that axis."
                    )


def _others(grid: Grid, axis: str, ranks: tuple[int, ...]) -> list[int]:
    """Returns the ranks that differ from the group's along one axis only."""
    places = _kept(grid, ranks)
    at = grid.axes.index(axis)
    found = []
    for place in grid.walk(grid.axes):
        inside = [c in kept for c, kept in zip(place.coordinate, places, strict=True)]
        if not inside[at] and all(inside[:at] + inside[at + 1 :]):
            found.append(place.linear(grid.axes))
    return found


def _listed(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:_SHOWN]))
    return shown if len(listed) <= _SHOWN else f"{shown} and {len(listed) - _SHOWN} more"
