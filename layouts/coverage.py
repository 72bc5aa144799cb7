"""The proof that the slabs of all ranks cover every global element exactly once.

Near-linear in the number of boxes: boxes are grouped by their range on one dim after another,
and only groups that overlap in part are cut further.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .errors import LayoutError, summary
from .grid import Grid
from .layout import Layout
from .slab import Shape

Extent = tuple[Shape, Shape]


def tiling_faults(
    shape: Shape, boxes: Iterable[Extent], origin: Shape | None = None, who: str = "no rank"
) -> list[str]:
    """Returns what keeps boxes from covering every element of a tensor exactly once.

    Args:
        shape: Shape of the tensor.
        boxes: `(offsets, sizes)` of each box, in elements; empty boxes count for nothing.
        origin: Where the tensor lies in a larger one, to name elements by their place there.
        who: What failed to cover a hole, for the sentence.

    Returns:
        A sentence for each hole, overlap or box outside, none if the boxes tile the tensor. The
        first fault found on a dim ends the search there, so the list is short, not complete.

    >>> tiling_faults((8,), [((0,), (4,))])
    ['[4, 8) is covered by no rank']
    """
    kept = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return [f"a box with offsets {offsets} and sizes {sizes} in a tensor of shape {shape}"]
        if math.prod(sizes) == 0:
            continue
        if any(o < 0 or o + s > d for o, s, d in zip(offsets, sizes, shape, strict=True)):
            return [f"the box {_text(offsets, sizes)} is not inside the tensor's shape {shape}"]
        kept.append((offsets, sizes))
    if not shape:
        return [] if len(kept) == 1 else [f"the only element is covered {len(kept)} times"]
    if math.prod(shape) == 0:
        return []
    return _faults(shape, kept, 0, (), origin or (0,) * len(shape), who)


def _faults(
    shape: Shape,
    boxes: Sequence[Extent],
    dim: int,
    fixed: tuple[str, ...],
    origin: Shape,
    who: str,
) -> list[str]:
    """Checks boxes that all span the same range on the dims before `dim`."""

    def text(first: int, last: int) -> str:
        return ", ".join((*fixed, f"[{origin[dim] + first}, {origin[dim] + last})"))

    groups: dict[tuple[int, int], list[Extent]] = {}
    for box in boxes:
        start = box[0][dim]
        groups.setdefault((start, start + box[1][dim]), []).append(box)
    ranges = sorted(groups)
    if any(a[1] > b[0] for a, b in itertools.pairwise(ranges)):
        groups = _cut(groups)
        ranges = sorted(groups)
    reached = 0
    for start, stop in ranges:
        if start > reached:
            return [f"{text(reached, start)} is covered by {who}"]
        reached = stop
    if reached < shape[dim]:
        return [f"{text(reached, shape[dim])} is covered by {who}"]
    faults: list[str] = []
    for start, stop in ranges:
        group = groups[start, stop]
        if dim + 1 < len(shape):
            faults += _faults(shape, group, dim + 1, (text(start, stop),), origin, who)
        elif len(group) > 1:
            faults.append(f"{text(start, stop)} is covered {len(group)} times")
        if faults:
            return faults
    return faults


def _cut(groups: dict[tuple[int, int], list[Extent]]) -> dict[tuple[int, int], list[Extent]]:
    """Cuts ranges that overlap in part at every border inside them."""
    borders = sorted({edge for bounds in groups for edge in bounds})
    cut: dict[tuple[int, int], list[Extent]] = {}
    for (start, stop), boxes in groups.items():
        first, last = bisect_left(borders, start), bisect_left(borders, stop)
        for i in range(first, last):
            cut.setdefault((borders[i], borders[i + 1]), []).extend(boxes)
    return cut


def _text(offsets: Shape, sizes: Shape) -> str:
    return ", ".join(f"[{o}, {o + s})" for o, s in zip(offsets, sizes, strict=True)) or "[]"


def extents(layout: Layout, grid: Grid) -> dict[str, tuple[Shape, list[Extent]]]:
    """Returns every key of a layout with its global shape and the boxes of all coordinates.

    Replicas count once: only coordinates along the axes that the layout uses are visited, and
    along the storage's own axes only those that hold anything.

    Raises:
        LayoutError: If two coordinates disagree about a key's global shape.
    """
    outer = [axis for axis in layout.axes if axis not in layout.storage.axes]
    start = grid.at(**{axis: 0 for axis in grid.axes if axis != "pp"})
    found: dict[str, tuple[Shape, list[Extent]]] = {}
    for place in start.walk(outer):
        holders = list(layout.storage.holders(place))
        for coordinate in holders or (place,):
            for frame in layout.frames(coordinate):
                key = layout.key(frame)
                shape, boxes = found.setdefault(key, (frame.shape, []))
                if shape != frame.shape:
                    raise LayoutError(
                        f"{layout.fqn}: {key} has the global shape {shape} at one coordinate and "
                        f"{frame.shape} at another ({coordinate.facts()}). A layout must give one "
                        "shape everywhere."
                    )
                boxes.extend((box.offsets, box.sizes) for box in frame.boxes)
    return found


def prove(layout: Layout, grid: Grid) -> None:
    """Checks that a layout covers every element of its global tensors exactly once.

    Args:
        layout: The layout.
        grid: Its grid; which rank's coordinate it carries does not matter.

    Raises:
        LayoutError: With every key that has a hole or an overlap.
    """
    faults = [
        f"{key}: {fault} of shape {shape}"
        for key, (shape, boxes) in extents(layout, grid).items()
        for fault in tiling_faults(shape, boxes)
    ]
    if faults:
        raise LayoutError(f"{layout.fqn}: {summary(faults)} (axes {layout.axes})")
