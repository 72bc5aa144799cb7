"""Which rank wrote a chunk: the save's own rules once more, at the coordinate that is asked for.

| name | is |
|---|---|
| `Owners` | the place of the rank that wrote a chunk or a value |

Nothing is looked up in files and no list of all ranks is kept. A chunk's box names the coordinate
along the axes that its layout uses; among replicas a large box was cut into one part for each, and
the turns of the small ones are dealt once more for those replicas only.
"""

import math
from collections.abc import Iterator
from typing import Any

from shardplan.layouts import CheckpointError, Grid
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Shape
from shardplan.layouts.stages import Stage

from ...planning.manifest import OBJECT, SHARD, Extra, Laid, StageManifest, value_names
from ...planning.ownership import Ownership, Turns, parts, take, value_writers, writer_of_value
from ..format.commit import Commit

_Box = tuple[str, int | None, Shape]
_Owner = int | Grid


class Owners:
    """The place of the rank that wrote a chunk or a value.

    Args:
        commit: What `checkpoint.json` says.
    """

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._stages = commit.stages
        self._rules = commit.ownership
        self._boxes: dict[tuple[Any, ...], dict[_Box, _Owner]] = {}
        self._turns: dict[tuple[Any, ...], dict[tuple[str, Shape | None], int]] = {}
        self._starts: dict[tuple[int, int, str], Grid] = {}

    def place(self, stage: int, origin: Laid | Extra, key: str, offsets: Shape | None) -> int:
        """Returns the place of the rank that wrote a chunk, or a whole value.

        Args:
            stage: Pipeline stage of the key.
            origin: What the key stands for there.
            key: The key.
            offsets: First element of the chunk in the global tensor, None for a Python value.

        Raises:
            CheckpointError: If the manifest has no such chunk.
        """
        if isinstance(origin, Extra):
            return _of_extra(origin, key, offsets)
        if origin.kind.role == SHARD and offsets is not None:
            return self._of_chunk(stage, origin, key, offsets)
        return self._of_value(stage, origin, key, offsets)

    def _of_chunk(self, stage: int, laid: Laid, key: str, offsets: Shape) -> int:
        kind, layout = laid.kind, laid.layout
        ident = (stage, kind.chunk, layout.family, id(layout.stages), kind.itemsize)
        owners = self._boxes.get(ident)
        if owners is None:
            owners = self._boxes[ident] = self._owners(stage, laid)
        owner = owners.get((laid.suffix, laid.expert, offsets))
        if isinstance(owner, int):
            return owner
        if owner is None:
            raise CheckpointError(
                f"{key}: the manifest has no chunk at {offsets}. The metadata is another "
                "checkpoint's."
            )
        axes = layout.replica_axes(owner)
        part = self._turn(stage, laid, owner, axes, key, offsets)
        return self._place(laid, _spread(owner, axes, part))

    def _of_value(self, stage: int, laid: Laid, key: str, offsets: Shape | None) -> int:
        layout = laid.layout
        writers = value_writers(layout, self._start(stage, laid))
        grid = next(
            (w for w in writers if (len(writers) == 1 or laid.name in value_names(layout, w))), None
        )
        if grid is None:
            raise CheckpointError(f"{key}: no rank of the manifest writes it")
        axes = layout.replica_axes(grid)
        if grid.count(axes) > 1:
            grid = _spread(grid, axes, self._turn(stage, laid, grid, axes, key, offsets))
        return self._place(laid, grid)

    def _place(self, laid: Laid, grid: Grid) -> int:
        return self._commit.place(laid.kind.chunk, laid.layout.family, grid.linear(grid.axes))

    def _start(self, stage: int, laid: Laid) -> Grid:
        ident = (stage, laid.kind.chunk, laid.layout.family)
        start = self._starts.get(ident)
        if start is None:
            grid = self._stages[stage].chunks[laid.kind.chunk].grids.of(laid.layout.family)
            start = grid.at(**{axis: 0 for axis in grid.axes if axis != "pp"})
            self._starts[ident] = start
        return start

    def _owners(self, stage: int, laid: Laid) -> dict[_Box, _Owner]:
        """Returns who wrote each box of a layout: a place, or where replicas take turns.

        These are the replicas of the rank at a coordinate, which has the replica axes at 0.
        """
        layout, itemsize = laid.layout, laid.kind.itemsize
        start = self._start(stage, laid)
        axes = layout.replica_axes(start)
        replicas = start.count(axes)
        # Without replicas the size of an element is nothing to the owners.
        ident = (stage, laid.kind.chunk, layout.family, id(layout.stages), 0)
        if replicas == 1 and ident in self._boxes:
            return self._boxes[ident]
        owners: dict[_Box, _Owner] = {}
        outer = [axis for axis in layout.axes if axis not in layout.storage.axes]
        for place in start.walk(outer):
            for grid in layout.storage.holders(place):
                own = self._place(laid, grid) if replicas == 1 else grid
                for frame in evaluate(layout.stages, grid, layout.fqn):
                    for box in frame.boxes:
                        cuts = parts(box.sizes, itemsize, replicas, self._rules)
                        if cuts is None:
                            owners[frame.suffix, frame.expert, box.offsets] = own
                        for number, cut in enumerate(cuts or ()):
                            found = self._place(laid, _spread(grid, axes, number))
                            owners[frame.suffix, frame.expert, take(box, cut).offsets] = found
        if replicas == 1:
            self._boxes[ident] = owners
        return owners

    def _turn(
        self,
        stage: int,
        laid: Laid,
        grid: Grid,
        axes: tuple[str, ...],
        key: str,
        offsets: Shape | None,
    ) -> int:
        """Returns which of the replicas at a coordinate wrote a small box or a value."""
        chunk, family = laid.kind.chunk, laid.layout.family
        ident = (stage, chunk, family, grid.coordinate, axes)
        turns = self._turns.get(ident)
        if turns is None:
            slabs = list(_small(self._stages[stage], chunk, family, grid, axes, self._rules))
            slabs.sort(key=lambda s: (-s[0], s[1]))
            dealt = Turns(grid.count(axes))
            turns = {(name, at): dealt.deal(nbytes) for nbytes, name, at in slabs}
            self._turns[ident] = turns
        replica = turns.get((key, offsets))
        if replica is None:
            raise CheckpointError(f"{key}: the manifest does not say which replica wrote it")
        return replica


def _spread(grid: Grid, axes: tuple[str, ...], position: int) -> Grid:
    """Returns the grid at a position in the row-major order of `axes`."""
    indices = {}
    for axis in reversed(axes):
        position, indices[axis] = divmod(position, grid.size(axis))
    return grid.at(**indices)


def _of_extra(extra: Extra, key: str, offsets: Shape | None) -> int:
    """Returns the place of the rank that wrote a value which belongs to no parameter."""
    for start, _, place in extra.boxes or ():
        if start == offsets:
            return place
    if extra.writer is None:
        raise CheckpointError(
            f"{key}: the manifest has no chunk at {offsets}. The metadata is another checkpoint's."
        )
    return extra.writer


def _small(
    manifest: StageManifest,
    chunk: int,
    family: str,
    grid: Grid,
    axes: tuple[str, ...],
    rules: Ownership,
) -> Iterator[tuple[int, str, Shape | None]]:
    """Yields size, key and offsets of all that the replicas at a coordinate take turns in."""
    replicas = grid.count(axes)
    known: dict[tuple[tuple[Stage, ...], int], list[tuple[str, int | None, int, Shape]]] = {}
    for kind, members in manifest.groups.items():
        if kind.chunk != chunk:
            continue
        layouts = manifest.layouts(kind)
        for index in members:
            layout = layouts[index]
            if layout.family != family or layout.replica_axes(grid) != axes:
                continue
            if kind.role != SHARD or kind.dtype is None:
                nbytes = rules.object_nbytes if kind.role == OBJECT else kind.itemsize
                offsets = None if kind.dtype is None else (0,) * len(kind.shape)
                if writer_of_value(layout, grid):
                    for name in value_names(layout, grid):
                        yield nbytes, kind.place.key(name), offsets
                continue
            ident = (layout.stages, kind.itemsize)
            boxes = known.get(ident)
            if boxes is None:
                boxes = known[ident] = [
                    (f.suffix, f.expert, math.prod(b.sizes) * kind.itemsize, b.offsets)
                    for f in evaluate(layout.stages, grid, layout.fqn)
                    for b in f.boxes
                    if parts(b.sizes, kind.itemsize, replicas, rules) is None
                ]
            for suffix, expert, nbytes, at in boxes:
                yield nbytes, kind.place.key(layout.key_of(suffix, expert)), at
