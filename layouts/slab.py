"""Boxes of global tensors and the strided view of local storage that fills each of them.

All numbers count elements. Nothing here imports torch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from .errors import LayoutError

Shape = tuple[int, ...]


def contiguous_strides(shape: Shape) -> Shape:
    """Returns the row-major strides of `shape`, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Box(NamedTuple):
    """A box in the coordinates of a frame, with the view of storage that fills it.

    Attributes:
        offsets: First index of the box on each dim of the frame.
        sizes: Extent of the box on each dim; never zero.
        start: Position of the box's first element in the rank's flattened storage.
        strides: Step in flattened storage for each dim of the box.
    """

    offsets: Shape
    sizes: Shape
    start: int
    strides: Shape

    def narrow(self, dim: int, start: int, stop: int, shift: int = 0) -> "Box | None":
        """Returns the part of the box in `[start, stop)` of `dim`, moved by `-shift`, if any."""
        first = max(self.offsets[dim], start)
        size = min(self.offsets[dim] + self.sizes[dim], stop) - first
        if size <= 0:
            return None
        return Box(
            self.offsets[:dim] + (first - shift,) + self.offsets[dim + 1 :],
            self.sizes[:dim] + (size,) + self.sizes[dim + 1 :],
            self.start + (first - self.offsets[dim]) * self.strides[dim],
            self.strides,
        )

    def move(self, dim: int, distance: int) -> "Box":
        """Returns the box moved by `distance` on `dim`; the view of storage stays."""
        moved = self.offsets[:dim] + (self.offsets[dim] + distance,) + self.offsets[dim + 1 :]
        return Box(moved, self.sizes, self.start, self.strides)


class Frame(NamedTuple):
    """A tensor somewhere on the way from storage to global, and a rank's boxes of it.

    Frames without boxes are kept: a rank that holds nothing of a tensor still knows its shape.

    Attributes:
        suffix: What the tensor's key has after the parameter's name: `''`, `'_w'`, `'.query'`.
        shape: Shape of the tensor in the coordinates reached so far.
        boxes: What the rank holds of it.
        expert: Global expert index that fills the hole in the parameter's name, if it has one.
    """

    suffix: str
    shape: Shape
    boxes: tuple[Box, ...]
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of one global tensor with the strided view of this rank's storage that fills it.

    `torch.as_strided(storage.view(-1), sizes, strides, start)` is its data, where `storage` is
    what the rank holds of the parameter (a shard: contiguous, often one-dimensional).

    Attributes:
        key: Name of the global tensor on disk, without the state dict's prefix and slot.
        global_shape: Shape of that tensor.
        offsets: First index of the box on each dim of the global tensor.
        sizes: Extent of the box on each dim.
        start: Position of the box's first element in the flattened storage.
        strides: Step in the flattened storage for each dim of the box.
    """

    key: str
    global_shape: Shape
    offsets: Shape
    sizes: Shape
    start: int
    strides: Shape

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offsets) == len(self.sizes) == len(self.strides):
            raise LayoutError(
                f"{self.key}: offsets {self.offsets}, sizes {self.sizes} and strides "
                f"{self.strides} must have one entry for each of the "
                f"{len(self.global_shape)} dims of the global shape {self.global_shape}"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.sizes)


def split(sizes: Shape, count: int) -> list[tuple[int, int, int]]:
    """Cuts a box into `count` parts of nearly equal size along one dim.

    The dim is the first one that is at least `count` long, else the longest one; the parts
    differ by one row at most. Part `i` is the same on every rank.

    Args:
        sizes: Extent of the box, in elements.
        count: How many parts are wanted; fewer come back if no dim is long enough.

    Returns:
        `(dim, start, stop)` of each part, relative to the box.

    >>> split((5, 2), 2)
    [(0, 0, 3), (0, 3, 5)]
    """
    dim = next((d for d, size in enumerate(sizes) if size >= count), None)
    if dim is None:
        dim = max(range(len(sizes)), key=lambda d: sizes[d])
        count = sizes[dim]
    each, extra = divmod(sizes[dim], count)
    cuts = [i * each + min(i, extra) for i in range(count + 1)]
    return [(dim, cuts[i], cuts[i + 1]) for i in range(count)]


def flat_boxes(shape: Shape, start: int, stop: int) -> tuple[Box, ...]:
    """Returns the boxes of a row-major tensor that the flat range `[start, stop)` covers.

    At most `2 * len(shape) - 1` boxes, in storage order; the storage is the range itself, so
    the first element of the first box lies at position 0.

    Args:
        shape: Shape of the tensor that the range cuts.
        start: First element, `0 <= start`.
        stop: One past the last element, `stop <= prod(shape)`.

    >>> [(b.offsets, b.sizes, b.start) for b in flat_boxes((3, 4), 2, 9)]
    [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 1), 6)]
    """
    strides = contiguous_strides(shape)
    boxes: list[Box] = []

    def cover(prefix: Shape, first: int, last: int, base: int) -> None:
        """Covers `[first, last)` of the sub-tensor at `prefix`, whose storage begins at `base`."""
        depth = len(prefix)
        lead = (1,) * depth
        rest = shape[depth:]
        if last - first <= 0:
            return
        if depth == len(shape) or (first == 0 and last == math.prod(rest)):
            boxes.append(Box(prefix + (0,) * len(rest), lead + rest, base, strides))
            return
        row = strides[depth]
        begin, head = divmod(first, row)
        end, tail = divmod(last, row)
        if begin == end:
            cover((*prefix, begin), head, tail, base)
            return
        if head:
            cover((*prefix, begin), head, row, base)
            base += row - head
            begin += 1
        if end > begin:
            boxes.append(
                Box(
                    (*prefix, begin) + (0,) * (len(rest) - 1),
                    (*lead, end - begin) + rest[1:],
                    base,
                    strides,
                )
            )
            base += (end - begin) * row
        if tail:
            cover((*prefix, end), 0, tail, base)

    cover((), start, stop, 0)
    return tuple(boxes)
