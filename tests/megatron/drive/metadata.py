"""What Megatron gathers about every DTensor, beside what the layouts say without a message."""

import time
from types import SimpleNamespace

import hybrid
import torch.distributed as dist
from bothways import layouts
from counting import Calls
from hybrid import Parallel
from megatron.core.transformer import fsdp_dtensor_checkpoint
from megatron.training import checkpointing
from torch.distributed.tensor import DTensor

from shardplan.layouts import Grid, LayoutError, prove
from shardplan.planner.planning.table import build_table


def gathered(model, experts) -> dict[str, tuple]:
    """Megatron's own preprocessing, its GDN handler too, and what it says of each DTensor."""
    state = {"model": model.state_dict_for_save_checkpoint()}
    state["model"], _ = fsdp_dtensor_checkpoint.handle_gdn_in_state_dict(
        model, state["model"], None
    )
    arguments = SimpleNamespace(swiglu=True, num_experts=experts)
    done = checkpointing.preprocess_fsdp_dtensor_state_dict(arguments, state, model)["model"]
    found = {}
    for key, value in done.items():
        if not isinstance(value, DTensor):
            continue
        (chunk,) = value.__create_chunk_list__()
        box = (list(chunk.offsets), list(chunk.sizes))
        found[key] = (list(value.shape), None if 0 in chunk.sizes else box)
    return found


def planned(table) -> dict[str, tuple]:
    """The same from the layouts alone; keys without the wrappers' tokens."""
    found = {}
    for chunk in table.chunks:
        for layout in chunk.layouts.values():
            grid = chunk.grids.of(layout.family)
            for frame in layout.frames(grid):
                boxes = []
                for box in sorted(frame.boxes):
                    if boxes and boxes[-1][0][0] + boxes[-1][1][0] == box.offsets[0]:
                        boxes[-1][1][0] += box.sizes[0]  # parts that lie one after another
                    else:
                        boxes.append((list(box.offsets), list(box.sizes)))
                assert len(boxes) < 2, (layout.fqn, boxes)
                found[layout.key(frame)] = (list(frame.shape), boxes[0] if boxes else None)
    return found


def coordinate(dense, expert) -> list:
    return [list(dense.coordinate), list(expert.coordinate)]


def everywhere(table) -> tuple[dict, list]:
    """Boxes of this rank, and of every rank with its coordinates, all from this rank's layouts."""
    (chunk,) = table.chunks
    grids = chunk.grids

    def boxes(dense, expert):
        return {
            layout.fqn: [
                [layout.key(f), [[list(b.offsets), list(b.sizes)] for b in f.boxes]]
                for f in layout.frames(expert if layout.family == "expert" else dense)
            ]
            for layout in chunk.layouts.values()
        }

    found = []
    for rank in range(grids.world_size):
        dense = Grid.from_rank(dict(zip(grids.dense.axes, grids.dense.sizes, strict=True)), rank)
        expert = Grid.from_rank(dict(zip(grids.expert.axes, grids.expert.sizes, strict=True)), rank)
        found.append([coordinate(dense, expert), boxes(dense, expert)])
    return boxes(grids.dense, grids.expert), found


def unproved(table) -> list[str]:
    faults = []
    for chunk in table.chunks:
        for layout in chunk.layouts.values():
            try:
                prove(layout, chunk.grids.of(layout.family))
            except LayoutError as error:
                faults.append(str(error))
    return faults


def compare(parallel: dict, fused: int | None = None, **changes) -> dict:
    parallel = Parallel(**parallel)
    groups = hybrid.process_groups(parallel)
    model = hybrid.shard(hybrid.make(parallel, groups, **changes), parallel, groups)
    dist.barrier()
    with Calls() as theirs:
        start = time.perf_counter()
        expected = gathered(model.module, model.module.config.num_moe_experts)
        theirs_seconds = time.perf_counter() - start
    with Calls() as ours:
        start = time.perf_counter()
        table = build_table(model, layouts=layouts(fused))
        actual = planned(table)
        ours_seconds = time.perf_counter() - start
    expected = {key.removeprefix("module."): value for key, value in expected.items()}
    tensors = {k: v for k, v in actual.items() if k in expected}
    own, of_others = everywhere(table)
    return {
        "own": own,
        "own_names": sorted(actual),
        "their_names": sorted(expected),
        "coordinate": coordinate(table.grids.dense, table.grids.expert),
        "of_others": of_others,
        "unproved": unproved(table),
        "tensors": len(expected),
        "differences": [
            [key, expected[key], tensors.get(key)]
            for key in sorted(expected)
            if tensors.get(key) != expected[key]
        ],
        "only_planned": sorted(set(actual) - set(expected)),
        "theirs": {"collectives": theirs.count, "seconds": theirs_seconds},
        "ours": {"collectives": ours.count, "seconds": ours_seconds},
    }
