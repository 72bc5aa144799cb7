"""FSDP storage: flat buffers that cut parameters anywhere, and DTensors that cut them by dim.

| provider | places |
|---|---|
| `FSDPFlatBuffer` | slices of the flattened parameter (Megatron-FSDP, ZeRO) |
| `DTensorStorage` | shards over a mesh (FSDP2, tensor parallelism by DTensor), uneven and strided too |
| `BufferDescription` | a flat buffer: shapes in order, alignment, padding, shard size |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import megatron_fsdp
from .errors import LayoutError
from .grid import Grid, mesh_axes
from .provider import Level, ParamInfo, matcher
from .slab import Shape
from .stages import Stage
from .storage import Cut, Cuts, FlatBuffer, FlatRanges


@dataclass(frozen=True, slots=True)
class BufferDescription:
    """A flat buffer that holds parameters one after another and is cut into equal slices.

    Attributes:
        shapes: Local shape of each parameter, in the buffer's order.
        shard_count: Number of slices (the product of the shard axes' sizes).
        alignment: Each parameter starts at a multiple of this many elements.
        shard_size: Length of a slice, in elements; by default the smallest multiple of the
            alignment that holds everything.
        axes: Axes that cut the buffer, slowest first; `dp_shard` or the experts' `edp_shard`
            if not given.

    >>> BufferDescription({"p0": (3,), "p1": (4,)}, shard_count=2).offsets
    {'p0': 0, 'p1': 3}
    """

    shapes: Mapping[str, Shape]
    shard_count: int
    alignment: int = 1
    shard_size: int | None = None
    axes: tuple[str, ...] | None = None

    @property
    def offsets(self) -> dict[str, int]:
        """Position of each parameter's first element in the buffer."""
        offsets, end = {}, 0
        for fqn, shape in self.shapes.items():
            start = -(-end // self.alignment) * self.alignment
            offsets[fqn] = start
            end = start + math.prod(shape)
        return offsets

    @property
    def slice_length(self) -> int:
        """Length of one rank's slice, in elements, padding included."""
        if self.shard_size is not None:
            return self.shard_size
        end = max(
            (start + math.prod(self.shapes[fqn]) for fqn, start in self.offsets.items()), default=0
        )
        each = -(-end // self.shard_count)
        return max(-(-each // self.alignment) * self.alignment, 1)


class FSDPFlatBuffer:
    """Places slices of the flattened parameter: cut in mid-row, empty, or beside padding.

    | form | reads |
    |---|---|
    | `FSDPFlatBuffer()` | Megatron-FSDP parameters: their place in the parameter buffer, for every rank; see `megatron_fsdp` |
    | `FSDPFlatBuffer({pattern: ((0, 4), (4, 8))})` | `[start, stop)` of the flattened parameter for each rank |
    | `FSDPFlatBuffer(buffers=[BufferDescription(...)])` | the parameters' place in a buffer |

    Args:
        ranges: For each pattern, one range for each rank of the shard axis, in elements.
        buffers: Descriptions of flat buffers; a parameter may be in one of them.
        axes: Axes of the explicit ranges; `dp_shard` or the experts' `edp_shard` if not given.

    """

    name = "fsdp-flat-buffer"
    level = Level.STORAGE

    def __init__(
        self,
        ranges: Mapping[str, Sequence[tuple[int, int]]] | None = None,
        *,
        buffers: Sequence[BufferDescription] = (),
        axes: tuple[str, ...] | None = None,
    ) -> None:
        self._rules = [
            (matcher([pattern]), tuple((int(a), int(b)) for a, b in bounds))
            for pattern, bounds in (ranges or {}).items()
        ]
        self._axes = axes
        self._places: dict[str, tuple[BufferDescription, int, int]] = {}
        for buffer in buffers:
            length = buffer.slice_length
            for fqn, offset in buffer.offsets.items():
                if fqn in self._places:
                    raise LayoutError(f"{fqn}: two flat buffers hold it. Describe it once.")
                self._places[fqn] = (buffer, offset, length)

    def claims(self, param: ParamInfo) -> bool:
        return (
            param.fqn in self._places
            or any(matches(param.fqn) for matches, _ in self._rules)
            or megatron_fsdp.is_managed(param)
        )

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        shard = (param.axis("dp_shard", "edp_shard"),)
        if param.fqn in self._places:
            buffer, offset, length = self._places[param.fqn]
            shape = tuple(buffer.shapes[param.fqn])
            if shape != param.local_shape:
                raise param.fail(
                    f"the buffer holds it with shape {shape} but it has {param.local_shape}",
                    "Describe the buffer with the shapes that this rank holds.",
                )
            axes = buffer.axes or shard
            if param.grid.count(axes) != buffer.shard_count:
                raise param.fail(
                    f"its buffer is cut into {buffer.shard_count} slices but {axes} has "
                    f"{param.grid.count(axes)} ranks",
                    "Give the buffer's axes, or the grid that cut it.",
                )
            end = offset + math.prod(shape)
            if end > length * buffer.shard_count:
                raise param.fail(
                    f"its elements [{offset}, {end}) do not fit into the buffer's "
                    f"{buffer.shard_count} slices of {length}",
                    "Give the buffer's real shard_size.",
                )
            return (FlatBuffer(shape, axes, offset, length),)
        for matches, bounds in self._rules:
            if matches(param.fqn):
                return (_ranges(param, self._axes or shard, bounds),)
        return (megatron_fsdp.storage(param),)


def _ranges(
    param: ParamInfo, axes: tuple[str, ...], bounds: tuple[tuple[int, int], ...]
) -> FlatRanges:
    count = param.grid.count(axes)
    if len(bounds) != count:
        raise param.fail(
            f"{len(bounds)} flat ranges for {count} ranks of {axes}",
            "Give one range for each rank, empty ones included.",
        )
    try:
        return FlatRanges(param.local_shape, axes, bounds)
    except LayoutError as error:
        raise param.fail(str(error), "Mend the ranges.") from None


class DTensorStorage:
    """Places what a DTensor's mesh and placements leave to a rank.

    | form | reads |
    |---|---|
    | `DTensorStorage()` | the parameter's own mesh and placements |
    | `DTensorStorage({pattern: (Cut(0, "dp_shard"),)})` | cuts by name, with sizes where they are uneven |

    Shards follow `torch.chunk`, in the order in which they were made; a packed `_StridedShard`
    gives several boxes. Axes without a cut are
    replicas. The mesh's axis names must be the grid's, or names that it knows as theirs.

    Args:
        cuts: Cuts of the tensor for each pattern of names.

    Source: torch/distributed/tensor/placement_types.py.
    """

    name = "dtensor"
    level = Level.STORAGE

    def __init__(self, cuts: Mapping[str, Sequence[Cut]] | None = None) -> None:
        self._rules = [(matcher([pattern]), tuple(c)) for pattern, c in (cuts or {}).items()]

    def claims(self, param: ParamInfo) -> bool:
        return any(matches(param.fqn) for matches, _ in self._rules) or (
            hasattr(param.param, "placements") and not megatron_fsdp.is_managed(param)
        )

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        for matches, cuts in self._rules:
            if matches(param.fqn):
                stage = Cuts(param.local_shape, cuts)
                try:
                    stage.held(param.grid)
                except LayoutError as error:
                    raise LayoutError(f"{param.fqn}: {error}. Mend the cut's sizes.") from None
                return (stage,)
        return (dtensor_cuts(param),)


def dtensor_cuts(param: ParamInfo) -> Cuts:
    """Returns the cuts that a DTensor's placements make.

    Raises:
        LayoutError: If a mesh axis is not on the grid or has another size there, or a placement
            is neither a shard nor a replica.
    """
    mesh, placements = param.param.device_mesh, param.param.placements
    marks = tuple(None if p.is_replicate() else _mark(p) for p in placements)
    axes = _grid_axes(mesh, param.grid)
    _check_place(param, mesh, axes)
    try:
        return _cuts_of(
            param.local_shape, mesh_axes(mesh), tuple(mesh.shape), axes, marks, param.grid
        )
    except _NoCuts as error:
        raise param.fail(*error.args) from None


class _NoCuts(Exception):
    """Placements that make no cuts: the rule, and what to do."""


def _mark(placement: Any) -> tuple[int, int] | str:
    """Returns dim and split factor of a shard, the text of any other placement."""
    dim = getattr(placement, "dim", None)
    if dim is None:
        return str(placement)
    return int(dim), int(getattr(placement, "split_factor", 1))


def _grid_axes(mesh: Any, grid: Grid) -> tuple[str | None, ...]:
    """Returns the grid's axis of each axis of a mesh: by its name, else by the ranks along it."""
    found = []
    for dim, (name, size) in enumerate(zip(mesh_axes(mesh), mesh.shape, strict=True)):
        axis = grid.resolve(name)
        known = axis is not None and grid.size(axis) == size
        found.append(axis if known else _axis_by_ranks(mesh, dim, grid))
    return tuple(found)


def _check_place(param: ParamInfo, mesh: Any, axes: tuple[str | None, ...]) -> None:
    """Refuses a mesh whose ranks have another order than the grid: each would store another's part."""
    if not hasattr(mesh, "get_coordinate"):
        return  # a stand-in without ranks
    own = tuple(mesh.get_coordinate() or ())
    due = tuple(
        index if axis is None else param.grid.index(axis)
        for axis, index in zip(axes, own, strict=False)
    )
    # Where one process stands for several ranks, torch may give it an equal mesh of another one.
    if own != due and _place(mesh, mesh.get_rank()) != due:
        raise param.fail(
            f"its mesh {mesh} has this rank at {dict(zip(mesh_axes(mesh), own, strict=True))}, but the "
            f"grid has it at {dict(zip(mesh_axes(mesh), due, strict=True))}",
            "Build all DTensors on one mesh, and pass the grid of that mesh "
            "(grid=Grids.from_mesh(mesh)).",
        )


@lru_cache(maxsize=256)
def _place(mesh: Any, rank: int) -> tuple[int, ...]:
    """Returns a rank's index along each axis of a mesh; empty if it is not on it."""
    found = (mesh.mesh == rank).nonzero().tolist()
    return tuple(found[0]) if found else ()


def _axis_by_ranks(mesh: Any, dim: int, grid: Grid) -> str | None:
    """Returns the grid's axis that has the ranks of a mesh's, if ranks are numbered as the grid is."""
    place = tuple(mesh.get_coordinate() or ()) if hasattr(mesh, "get_coordinate") else ()
    if not place or int(mesh.mesh[place]) != grid.linear(grid.axes):
        return None
    along = (*place[:dim], slice(None), *place[dim + 1 :])
    ranks = mesh.mesh[along].tolist()
    for axis in grid.axes:
        if ranks == [g.linear(grid.axes) for g in grid.walk((axis,))]:
            return axis
    return None


@lru_cache(maxsize=4096)
def _cuts_of(
    shape: Shape,
    names: tuple[str, ...],
    sizes: Shape,
    axes: tuple[str | None, ...],
    marks: tuple[tuple[int, int] | str | None, ...],
    grid: Grid,
) -> Cuts:
    """Returns the cuts of placements; a model has few kinds of them and many parameters."""
    cuts: list[Cut] = []
    for name, size, axis, mark in zip(names, sizes, axes, marks, strict=True):
        if mark is None:
            continue
        if axis is None:
            known = ", ".join(f"{a} {n}" for a, n in zip(grid.axes, grid.sizes, strict=True))
            raise _NoCuts(
                f"its mesh axis {name!r} of size {size} is not one of the grid's axes ({known})",
                "Pass the grid that the mesh was made from (grid=Grids.from_mesh(mesh)), or name "
                "the mesh's axes as the grid's.",
            )
        if isinstance(mark, str):
            raise _NoCuts(
                f"its placement along {name!r} is {mark}, neither a shard nor a replica",
                "Reduce partial sums before saving.",
            )
        cuts.append(Cut(mark[0], axis, mark[1]))
    return Cuts(shape, tuple(_as_made(cuts, grid)))


def _as_made(cuts: Sequence[Cut], grid: Grid) -> list[Cut]:
    """Returns a DTensor's cuts in the order in which they were made.

    FSDP2 cuts what tensor parallelism left, but its axis stands first in the mesh; so it writes
    `_StridedShard` there, with the number of pieces that were already cut as the split factor.
    Read from left to right that gives the same rows only if all numbers divide. A split factor
    that no cuts explain is a real one (packed projections), made before the others.

    | placements of 7 rows on (dp_shard 3, tp 2) | cuts | dp 2, tp 0 | dp 2, tp 1 |
    |---|---|---|---|
    | `_StridedShard(0, split_factor=2), Shard(0)` | tp, then dp_shard | none | row 6 |
    | `Shard(0), Shard(0)` | dp_shard, then tp | row 6 | none |
    """
    made: list[Cut] = []
    for cut in reversed(cuts):
        pieces, place, explained = 1, 0, cut.split_factor == 1
        for i, other in enumerate(made):
            if explained:
                break
            if other.dim == cut.dim:
                pieces *= grid.size(other.axis)
                explained, place = pieces == cut.split_factor, i + 1
        if explained:
            made.insert(place, Cut(cut.dim, cut.axis))
        else:
            made.insert(0, cut)
    return made
