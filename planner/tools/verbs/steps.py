"""The way of a parameter's elements in words and numbers: storage → local → component → global."""

import math
from dataclasses import dataclass

from shardplan.layouts import Grid, Layout
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Frame
from shardplan.layouts.stages import (
    Concat,
    ExpertIndex,
    Fuse,
    Interleave,
    Permute,
    Shard,
    Stack,
    Stage,
    Unpad,
    Unstack,
)
from shardplan.layouts.storage import Cuts, FlatBuffer, FlatRanges, Whole

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
    stored = layout.storage.numel(grid)
    found = [Step("storage", _storage(layout.stages[0], grid, stored), ())]
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
                words(stage, grid),
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


def words(stage: Stage, grid: Grid) -> str:
    """Returns what a stage does at a coordinate, in one sentence."""
    if isinstance(stage, Concat):
        named = ", ".join(f"{suffix.lstrip('._')} {size}" for suffix, size in stage.parts)
        return f"cut along dim {stage.dim} into {stage.what}: {named}"
    if isinstance(stage, Interleave):
        named = ", ".join(f"{suffix.lstrip('._')} {size}" for suffix, size in stage.parts)
        return f"cut along dim {stage.dim} into {stage.groups} groups of {named}"
    if isinstance(stage, Shard):
        index, count = grid.index(stage.axis), grid.size(stage.axis)
        return (
            f"shard {index} of {count} along {stage.axis}: dim {stage.dim} moves by {index} shards"
        )
    if isinstance(stage, Fuse):
        return f"the components are one tensor again, along dim {stage.dim}"
    if isinstance(stage, Unpad):
        return f"only the first {stage.size} of dim {stage.dim} are kept: the rest is padding"
    if isinstance(stage, Permute):
        return f"dims in the order {stage.dims}"
    if isinstance(stage, ExpertIndex):
        rank = grid.index(stage.axis)
        return (
            f"local expert {stage.local_expert_index} of {stage.num_local_experts} on "
            f"{stage.axis} rank {rank} is expert {stage.expert_index(grid)}"
        )
    if isinstance(stage, Unstack):
        return "one tensor for each expert of the leading dim"
    if isinstance(stage, Stack):
        return f"one tensor of all {stage.num_experts} experts"
    return str(stage)


def _storage(stage: object, grid: Grid, stored: int) -> str:
    text = f"this rank stores {stored:,} elements"
    if isinstance(stage, FlatBuffer | FlatRanges):
        start, stop = stage.bounds(grid)
        index, count = grid.linear(stage.shard_axes), grid.count(stage.shard_axes)
        text += f": [{start:,}, {stop:,}) of the flattened local tensor"
        text += f", from slice {index} of {count} along {', '.join(stage.shard_axes)}"
        if isinstance(stage, FlatBuffer):
            text += f" (slices of {stage.shard_size:,}; the tensor begins at {stage.offset:,})"
        return text
    if isinstance(stage, Cuts):
        made = [
            f"dim {cut.dim} in {grid.size(cut.axis)} along {cut.axis} (this rank is "
            f"{grid.index(cut.axis)})"
            for cut in stage.cuts
            if grid.size(cut.axis) > 1
        ]
        return text + (f": cut {', then '.join(made)}" if made else ": nothing cuts it")
    if isinstance(stage, Whole):
        return text + ": the whole local tensor"
    return f"{text}: {stage}"


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
