"""The first stage of a layout: what a rank stores of the local tensor.

| stage | does | stands for |
|---|---|---|
| `Whole` | the whole local tensor | a parameter without FSDP |
| `FlatBuffer` | a slice of the flattened local tensor, by its place in a buffer | Megatron-FSDP, ZeRO |
| `FlatRanges` | a slice of the flattened local tensor, by bounds per rank | the same, given by hand |
| `Cuts` | a part along mesh axes: `torch.chunk`'s, strided, or of given sizes | DTensor, FSDP2 |

The boxes that come out are in the coordinates of the local tensor; their views are in elements
of the rank's own flattened storage.
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .errors import LayoutError
from .grid import Grid
from .slab import Box, Frame, Shape, contiguous_strides, flat_boxes
from .stages import Stage

Interval = tuple[int, int]


class StorageStage(Stage):
    """The first stage of a chain: what a rank stores of the local tensor.

    Attributes:
        shape: Shape of the local tensor.
    """

    __slots__ = ()
    shape: Shape

    def numel(self, grid: Grid) -> int:
        """Returns how many elements the rank stores."""
        raise NotImplementedError

    def holders(self, grid: Grid) -> Iterable[Grid]:
        """Yields the coordinates along `axes` that store anything."""
        return (g for g in grid.walk(self.axes) if self.numel(g))

    def pattern(self, grid: Grid) -> Hashable:
        """Returns what tells the boxes of all coordinates: equal patterns have equal boxes.

        Which coordinate has which of them may differ.
        """
        return self


def _first(frames: tuple[Frame, ...]) -> None:
    if frames:
        raise LayoutError("a storage stage starts a chain; it can't come after another stage")


def _check_shape(shape: Shape) -> None:
    if any(size < 0 for size in shape):
        raise LayoutError(f"the local shape {shape} has a negative size")


@dataclass(frozen=True, slots=True)
class Whole(StorageStage):
    """The rank stores the whole local tensor of `shape`."""

    shape: Shape

    def __post_init__(self) -> None:
        _check_shape(self.shape)

    def numel(self, grid: Grid) -> int:
        return math.prod(self.shape)

    def describe(self, grid: Grid) -> str:
        return "the whole local tensor"

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        _first(frames)
        return (Frame("", self.shape, flat_boxes(self.shape, 0, math.prod(self.shape))),)


def _describe_flat(bounds: Interval, axes: tuple[str, ...], grid: Grid) -> str:
    start, stop = bounds
    return (
        f"[{start:,}, {stop:,}) of the flattened local tensor, from slice {grid.linear(axes)} of "
        f"{grid.count(axes)} along {', '.join(axes)}"
    )


def _flat_apply(shape: Shape, start: int, stop: int) -> tuple[Frame, ...]:
    return (Frame("", shape, flat_boxes(shape, start, stop)),)


@dataclass(frozen=True, slots=True)
class FlatBuffer(StorageStage):
    """The rank stores what its slice of a shared flat buffer holds of the local tensor.

    The buffer is cut into equal slices, one for each coordinate of `shard_axes`; the tensor's
    flattened elements lie in it from `offset` on. Padding needs no mention: it belongs to no
    tensor.

    Attributes:
        shape: Shape of the local tensor.
        shard_axes: Axes that cut the buffer, slowest first.
        offset: Position of the tensor's first element in the buffer.
        shard_size: Length of one rank's slice.
    """

    shape: Shape
    shard_axes: tuple[str, ...]
    offset: int
    shard_size: int

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        if self.offset < 0 or self.shard_size < 1:
            raise LayoutError(
                f"a flat buffer needs an offset of at least 0 and a shard size of at least 1, "
                f"not {self.offset} and {self.shard_size}"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return self.shard_axes

    def bounds(self, grid: Grid) -> Interval:
        """Returns the rank's `[start, stop)` of the flattened local tensor."""
        numel = math.prod(self.shape)
        start = grid.linear(self.shard_axes) * self.shard_size - self.offset
        return min(max(start, 0), numel), min(max(start + self.shard_size, 0), numel)

    def numel(self, grid: Grid) -> int:
        start, stop = self.bounds(grid)
        return stop - start

    def holders(self, grid: Grid) -> Iterable[Grid]:
        for position in self._slices(grid):
            rest, indices = position, {}
            for axis in reversed(self.shard_axes):
                rest, indices[axis] = divmod(rest, grid.size(axis))
            yield grid.at(**indices)

    def pattern(self, grid: Grid) -> Hashable:
        slices = self._slices(grid)
        cut = (self.offset % self.shard_size, self.shard_size) if len(slices) > 1 else None
        return (self.shape, self.shard_axes, cut)

    def _slices(self, grid: Grid) -> range:
        """Returns the positions of the slices that hold any of the tensor."""
        numel = math.prod(self.shape)
        if not numel:
            return range(0)
        count = grid.count(self.shard_axes)
        if self.offset + numel > count * self.shard_size:
            raise LayoutError(
                f"the tensor's {numel} elements from {self.offset} on end after the buffer's "
                f"{count} slices of {self.shard_size}. Give the buffer's real shard size."
            )
        first = self.offset // self.shard_size
        return range(first, (self.offset + numel - 1) // self.shard_size + 1)

    def describe(self, grid: Grid) -> str:
        slices = f"slices of {self.shard_size:,}; the tensor begins at {self.offset:,}"
        return f"{_describe_flat(self.bounds(grid), self.shard_axes, grid)} ({slices})"

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        _first(frames)
        return _flat_apply(self.shape, *self.bounds(grid))


@dataclass(frozen=True, slots=True)
class FlatRanges(StorageStage):
    """The rank stores `ranges[i]` of the flattened local tensor, `i` its place on `shard_axes`.

    Attributes:
        shape: Shape of the local tensor.
        shard_axes: Axes that the ranges run over, slowest first.
        ranges: `(start, stop)` for each coordinate of these axes.
    """

    shape: Shape
    shard_axes: tuple[str, ...]
    ranges: tuple[Interval, ...]

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        numel = math.prod(self.shape)
        for start, stop in self.ranges:
            if not 0 <= start <= stop <= numel:
                raise LayoutError(
                    f"the flat range [{start}, {stop}) is not inside the local tensor's "
                    f"[0, {numel}) (shape {self.shape}). Ranges count elements of the "
                    "flattened local tensor, without the buffer's padding."
                )

    @property
    def axes(self) -> tuple[str, ...]:
        return self.shard_axes

    def bounds(self, grid: Grid) -> Interval:
        """Returns the rank's `[start, stop)` of the flattened local tensor."""
        count = grid.count(self.shard_axes)
        if len(self.ranges) != count:
            raise LayoutError(
                f"{len(self.ranges)} flat ranges for {count} ranks of {self.shard_axes} "
                f"({grid.facts()}). Give one range for each rank, empty ones included."
            )
        return self.ranges[grid.linear(self.shard_axes)]

    def numel(self, grid: Grid) -> int:
        start, stop = self.bounds(grid)
        return stop - start

    def holders(self, grid: Grid) -> Iterable[Grid]:
        return (g for g in grid.walk(self.shard_axes) if self.numel(g))

    def pattern(self, grid: Grid) -> Hashable:
        return self

    def describe(self, grid: Grid) -> str:
        return _describe_flat(self.bounds(grid), self.shard_axes, grid)

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        _first(frames)
        return _flat_apply(self.shape, *self.bounds(grid))


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of a dim along a mesh axis.

    Attributes:
        dim: Dim of the tensor.
        axis: Mesh axis.
        split_factor: Pieces that the dim is first cut into, each of which is then cut along the
            axis (DTensor's `_StridedShard`); 1 for a plain `Shard`.
        sizes: Extent for each rank of the axis; `torch.chunk`'s sizes if not given.
    """

    dim: int
    axis: str
    split_factor: int = 1
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise LayoutError(
                f"a cut along {self.axis} can't have the split factor {self.split_factor}"
            )
        if any(size < 0 for size in self.sizes or ()):
            raise LayoutError(f"a cut along {self.axis} has a negative size in {self.sizes}")

    def take(self, held: list[Interval], grid: Grid) -> list[Interval]:
        """Returns the part that the rank keeps of `held`, a list of ranges of the dim."""
        length = sum(stop - start for start, stop in held)
        count, index = grid.size(self.axis), grid.index(self.axis)
        if self.sizes is not None:
            if len(self.sizes) != count or sum(self.sizes) != length:
                raise LayoutError(
                    f"sizes {self.sizes} of dim {self.dim} must be {count} numbers, one for each "
                    f"rank of {self.axis}, that add up to {length} ({grid.facts()})"
                )
            start = sum(self.sizes[:index])
            return _positions(held, start, start + self.sizes[index])
        kept: list[Interval] = []
        for piece in range(self.split_factor):
            start, stop = _chunk(length, self.split_factor, piece)
            first, last = _chunk(stop - start, count, index)
            kept += _positions(held, start + first, start + last)
        return kept


def _chunk(length: int, count: int, index: int) -> Interval:
    """Returns the range of one of the pieces that `torch.chunk` cuts; the last may be empty."""
    each = -(-length // count)
    return min(index * each, length), min((index + 1) * each, length)


def _positions(held: list[Interval], start: int, stop: int) -> list[Interval]:
    """Returns the elements number `start` to `stop` of a list of ranges, as ranges."""
    found: list[Interval] = []
    for first, last in held:
        size = last - first
        a, b = first + max(start, 0), first + min(stop, size)
        if a < b:
            if found and found[-1][1] == a:
                a = found.pop()[0]
            found.append((a, b))
        start -= size
        stop -= size
    return found


@dataclass(frozen=True, slots=True)
class Cuts(StorageStage):
    """The rank stores what cuts along mesh axes leave it, row-major (a DTensor's local tensor).

    Cuts are made from left to right, as DTensor's placements are. Where a cut leaves several
    pieces of a dim, the rank's storage holds them one after another and several boxes come out.

    Attributes:
        shape: Shape of the tensor before the cuts: the local tensor, or the global one where
            the mesh holds the tensor-parallel axis too.
        cuts: The cuts, in the order of the mesh's axes.
    """

    shape: Shape
    cuts: tuple[Cut, ...]

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        for cut in self.cuts:
            if not 0 <= cut.dim < len(self.shape):
                raise LayoutError(
                    f"a cut along {cut.axis} names dim {cut.dim} of a tensor with "
                    f"{len(self.shape)} dims (shape {self.shape})"
                )

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cut.axis for cut in self.cuts))

    def held(self, grid: Grid) -> list[list[Interval]]:
        """Returns the ranges of each dim that the rank stores."""
        held: list[list[Interval]] = [[(0, size)] if size else [] for size in self.shape]
        for cut in self.cuts:
            held[cut.dim] = cut.take(held[cut.dim], grid)
        return held

    def numel(self, grid: Grid) -> int:
        return math.prod(sum(b - a for a, b in dim) for dim in self.held(grid))

    def describe(self, grid: Grid) -> str:
        made = [
            f"dim {cut.dim} in {grid.size(cut.axis)} along {cut.axis} (this rank is "
            f"{grid.index(cut.axis)})"
            for cut in self.cuts
            if grid.size(cut.axis) > 1
        ]
        return f"cut {', then '.join(made)}" if made else "nothing cuts it"

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        _first(frames)
        held = self.held(grid)
        strides = contiguous_strides(tuple(sum(b - a for a, b in dim) for dim in held))
        boxes = [Box((), (), 0, strides)]
        for dim, ranges in enumerate(held):
            cut = []
            for box in boxes:
                start = box.start
                for a, b in ranges:
                    cut.append(Box((*box.offsets, a), (*box.sizes, b - a), start, strides))
                    start += (b - a) * strides[dim]
            boxes = cut
        return (Frame("", self.shape, tuple(boxes)),)
