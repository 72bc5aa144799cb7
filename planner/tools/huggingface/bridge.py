"""Two layouts of the same parameters joined: any box of one side from boxes of the other.

Both layouts say where the elements of one parameter lie; a part that both place is a part that can
be copied. Nothing is read: a bridge is integers.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from shardplan.layouts import Grids, Layout, LayoutError
from shardplan.layouts.slab import Box, Frame, Shape, contiguous_strides

from ...checkpoints.streams import Read, Source


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a parameter, in the parameter's own coordinates and in a tensor's.

    Attributes:
        key: The tensor.
        offsets: First element in the tensor.
        sizes: Extent in the tensor.
        start: First element in the parameter.
        dims: For each dim of the tensor, the parameter's dim that it runs along; None for a dim
            of one element.
    """

    key: str
    offsets: Shape
    sizes: Shape
    start: Shape
    dims: tuple[int | None, ...]

    def extent(self, rank: int) -> list[tuple[int, int]]:
        """Returns the range of each of the parameter's dims."""
        found = [(first, first + 1) for first in self.start]
        for dim, size in zip(self.dims, self.sizes, strict=True):
            if dim is not None:
                found[dim] = (self.start[dim], self.start[dim] + size)
        return found

    def part(self, ranges: list[tuple[int, int]]) -> tuple[Shape, Shape]:
        """Returns offsets and sizes in the tensor of a part of the box."""
        offsets, sizes = [], []
        for at, size, dim in zip(self.offsets, self.sizes, self.dims, strict=True):
            if dim is None:
                offsets.append(at)
                sizes.append(size)
            else:
                first, last = ranges[dim]
                offsets.append(at + first - self.start[dim])
                sizes.append(last - first)
        return tuple(offsets), tuple(sizes)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that lies in a near tensor and in a far one."""

    near: Placed
    far: Placed
    ranges: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Bridge:
    """The tensors of the far side and what fills them.

    Attributes:
        shapes: Shape of each far tensor.
        pieces: The parts of near tensors that fill it.
        near: Shape of each near tensor, as the layouts have it.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    near: dict[str, Shape] = field(default_factory=dict)

    def source(self, key: str, near: Mapping[str, Source]) -> Source:
        """Returns a far tensor as a source that reads the near ones.

        Args:
            key: The far tensor.
            near: The near tensors by key.

        Raises:
            LayoutError: If the near tensors that fill it have several dtypes.
        """
        dtypes = {near[piece.near.key].dtype for piece in self.pieces[key]}
        if len(dtypes) != 1:
            raise LayoutError(
                f"{key}: its parts have the dtypes {sorted(map(str, dtypes))}. Save them with one."
            )
        dtype = dtypes.pop()

        def read(offsets: Shape, sizes: Shape) -> torch.Tensor:
            out = torch.empty(sizes, dtype=dtype)
            for piece in self.pieces[key]:
                _copy(piece, near[piece.near.key].read, offsets, sizes, out)
            return out

        return Source(dtype, self.shapes[key], read)


def _copy(piece: Piece, read: Read, offsets: Shape, sizes: Shape, out: torch.Tensor) -> None:
    """Copies what a piece has of a box of the far tensor."""
    ranges = list(piece.ranges)
    far = piece.far
    place, extent = far.part(ranges)
    for dim, (at, size, first, count) in enumerate(zip(place, extent, offsets, sizes, strict=True)):
        start, stop = max(at, first), min(at + size, first + count)
        if start >= stop:
            return
        own = far.dims[dim]
        if own is not None:
            base = ranges[own][0] - at
            ranges[own] = (base + start, base + stop)
    near_offsets, near_sizes = piece.near.part(ranges)
    data = read(near_offsets, near_sizes)
    natural = _to_parameter(data, piece.near, ranges)
    place, extent = far.part(ranges)
    index = tuple(slice(a - f, a - f + n) for a, n, f in zip(place, extent, offsets, strict=True))
    order = [dim for dim in far.dims if dim is not None]
    missing = [dim for dim in range(natural.dim()) if dim not in order]
    out[index] = natural.permute([*missing, *order]).reshape(extent)


def _to_parameter(data: torch.Tensor, near: Placed, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """Returns a near tensor's box with the parameter's dims in order."""
    known = [dim for dim, own in enumerate(near.dims) if own is not None]
    ones = [dim for dim, own in enumerate(near.dims) if own is None]
    known.sort(key=lambda dim: near.dims[dim] or 0)
    return data.permute([*ones, *known]).reshape([stop - start for start, stop in ranges])


def build_bridge(
    near: Mapping[str, Layout],
    far: Mapping[str, Layout],
    grids: Grids,
    prefix: str = "",
) -> Bridge:
    """Returns the bridge between two layouts of the same parameters.

    Args:
        near: Layout of each parameter on the side that is read.
        far: Layout of each parameter on the side that is made.
        grids: Grids of one rank that holds everything.
        prefix: What the near keys have before the layouts' names.

    Raises:
        LayoutError: If an element of a far tensor is not on the near side.
    """
    bridge = Bridge()
    for fqn, layout in far.items():
        grid = grids.of(layout.family)
        shape = layout.local_shape
        theirs = [(layout.key(f), f) for f in layout.frames(grid)]
        ours = [(prefix + near[fqn].key(f), f) for f in near[fqn].frames(grid)]
        for key, frame in theirs:
            if bridge.shapes.setdefault(key, frame.shape) != frame.shape:
                raise LayoutError(
                    f"{key}: shape {bridge.shapes[key]} by one parameter, {frame.shape} by {fqn}"
                )
        for key, frame in ours:
            bridge.near[key] = frame.shape
        sides = [list(_placed(side, shape)) for side in (ours, theirs)]
        for one in sides[1]:
            extent = one.extent(len(shape))
            for two in sides[0]:
                ranges = _meet(extent, two.extent(len(shape)))
                if ranges is not None:
                    bridge.pieces.setdefault(one.key, []).append(Piece(two, one, ranges))
    for key, shape in bridge.shapes.items():
        found = sum(
            math.prod(stop - start for start, stop in piece.ranges)
            for piece in bridge.pieces.get(key, ())
        )
        if found != math.prod(shape):
            raise LayoutError(
                f"{key}: {found} of its {math.prod(shape)} elements are on the other side. The "
                "rules must name every component."
            )
    return bridge


def _meet(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> tuple[tuple[int, int], ...] | None:
    met = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True))
    return met if all(start < stop for start, stop in met) else None


def _placed(frames: Iterable[tuple[str, Frame]], shape: Shape) -> Iterable[Placed]:
    for key, frame in frames:
        for box in frame.boxes:
            yield _place(key, box, shape)


def _place(key: str, box: Box, shape: Shape) -> Placed:
    """Finds the parameter's dims in a box's strides."""
    strides = contiguous_strides(shape)
    start, rest = [], box.start
    for step in strides:
        index, rest = divmod(rest, step)
        start.append(index)
    dims: list[int | None] = []
    for size, step in zip(box.sizes, box.strides, strict=True):
        if size == 1:
            dims.append(None)
            continue
        dims.append(next(d for d, s in enumerate(strides) if s == step and shape[d] > 1))
    return Placed(key, box.offsets, box.sizes, tuple(start), tuple(dims))
