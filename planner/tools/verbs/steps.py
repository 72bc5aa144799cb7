"""The way of a parameter's elements in words and numbers: storage → local → component → global."""

import math
from dataclasses import dataclass

from shardplan.layouts import Grid, Layout
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Frame
from shardplan.layouts.stages import Concat, Interleave

from ...planning.ownership import parts


@dataclass(frozen=True, slots=True)
class Step:
    """One space on the way.

    Attributes:
        space: `storage`, `local`, `component` or `global`.
        words: What leads there.
        boxes: What the rank holds: tensor, shape, and ranges of each dim.
    """

    space: str
    words: str
    boxes: tuple[tuple[str, tuple[int, ...], str], ...]


def steps(layout: Layout, grid: Grid) -> list[Step]:
    """Returns the way of a parameter's elements on one rank.

    Args:
        layout: The parameter's layout.
        grid: The rank's grid of the parameter's family.
    """
    storage = layout.storage
    stored = storage.numel(grid)
    found = [Step("storage", f"this rank stores {stored:,} elements: {storage.describe(grid)}", ())]
    frames = evaluate(layout.stages[:1], grid, layout.fqn)
    found.append(
        Step("local", f"the local tensor has shape {layout.local_shape}", _boxes(frames, layout))
    )
    for number in range(1, len(layout.stages)):
        stage = layout.stages[number]
        frames = evaluate(layout.stages[: number + 1], grid, layout.fqn)
        last = number == len(layout.stages) - 1
        split = isinstance(stage, Concat | Interleave)
        found.append(
            Step(
                "component" if split and not last else "global",
                stage.describe(grid),
                _boxes(frames, layout) if last or split else (),
            )
        )
    if len(layout.stages) == 1:
        found.append(
            Step("global", "the same tensor: nothing else cuts it", _boxes(frames, layout))
        )
    return found


def ownership(layout: Layout, grid: Grid, itemsize: int) -> str:
    """Returns which of the replicas writes what, in words.

    Args:
        layout: The parameter's layout.
        grid: The rank's grid of the parameter's family.
        itemsize: Bytes of one element.
    """
    axes = layout.replica_axes(grid)
    count, index = grid.count(axes), grid.linear(axes)
    if count == 1:
        return "no other rank holds these boxes: this rank writes all of them"
    shared = ", ".join(axis for axis in axes if grid.size(axis) > 1)
    boxes = [b for f in evaluate(layout.stages, grid, layout.fqn) for b in f.boxes]
    split = [parts(box.sizes, itemsize, count) for box in boxes]
    if not boxes:
        return "this rank holds nothing of it and writes nothing"
    text = f"{count} ranks hold the same boxes (along {shared}); "
    if all(cuts is None for cuts in split):
        return text + "small ones are dealt in turns, each to one of them"
    return text + f"large boxes are cut in {count}: this rank writes part {index} of each"


def _boxes(
    frames: tuple[Frame, ...], layout: Layout
) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    found = []
    for frame in frames:
        for box in frame.boxes:
            ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
            name = frame.suffix or layout.fqn
            if frame.expert is not None:
                name = layout.key(frame)
            text = f"[{ranges}] ← storage {box.start:,}" + (
                "" if math.prod(box.sizes) == 1 else f", steps {box.strides}"
            )
            found.append((name, frame.shape, text))
    return tuple(found)
