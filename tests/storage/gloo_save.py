"""Run by torchrun: counts what `dcp.save` and `dcp.load` send, for first, second and changed saves."""

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardplan.layouts import Cut, DTensorStorage, Grids
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    PinnedStager,
    SafetensorsReader,
    SafetensorsWriter,
)

SHAPES = {"w": (8, 4), "b": (8,)}
NAMES = [
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
]


def main():
    root = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    counted = Counter()

    def count(name):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            counted[name] += 1
            return original(*args, **kwargs)

        return call

    for name in NAMES:
        setattr(dist, name, count(name))
    rules = [DTensorStorage({name: (Cut(0, "dp_shard"),) for name in SHAPES})]
    grid = Grids.from_sizes(rank, dp_shard=world)
    planner = LayoutAwareSavePlanner(SHAPES, grid=grid, layouts=rules)

    def state(value, more=False):
        rows = 8 // world
        tensors = {n: torch.full((rows, *s[1:]), float(value)) for n, s in SHAPES.items()}
        return {"model": tensors, "step": value, **({"more": [1, 2]} if more else {})}

    def save(name, values, **options):
        counted.clear()
        writer = SafetensorsWriter(root / name, sync=False, timeout=30.0)
        dcp.save(values, storage_writer=writer, planner=planner, **options)
        return dict(counted)

    alone = {"use_collectives": False}
    assert save("first", state(1), **alone) == {"barrier": 1}, counted
    assert save("second", state(2), **alone) == {"barrier": 1}, counted
    assert save("changed", state(3, True), **alone) == {"barrier": 1}, counted
    together = save("together", state(4))
    assert sum(together.values()) > 1, together
    writer = SafetensorsWriter(root / "thread", sync=False, timeout=30.0)
    dcp.async_save(state(5), storage_writer=writer, planner=planner, **alone).result()
    stager = PinnedStager(shared=True)
    for value, name in ((6, "process"), (7, "process again")):
        writer = SafetensorsWriter(root / name, sync=False, timeout=30.0)
        dcp.async_save(
            state(value),
            storage_writer=writer,
            planner=planner,
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            **alone,
        ).result()
    names = ("first", "second", "changed", "together", "thread", "process", "process again")
    dist.barrier()
    for value, name in enumerate(names, 1):
        left = [p.name for p in (root / name).rglob("*") if p.name.endswith((".tmp", ".beat"))]
        assert not left, (name, left)
        values = state(-1, name == "changed")
        loader = LayoutAwareLoadPlanner(SHAPES, grid=grid, layouts=rules)
        dcp.load(values, storage_reader=SafetensorsReader(root / name), planner=loader)
        expected = state(value, name == "changed")
        assert values["step"] == value, (name, values["step"])
        for key, tensor in expected["model"].items():
            assert torch.equal(tensor, values["model"][key]), (name, key)
    # Replicas read once: each rank a part of what both need, the rest comes by broadcast.
    whole = {"model": {n: torch.zeros(s) for n, s in SHAPES.items()}, "step": -1}
    alone_grid = Grids.from_sizes(rank, dp_replicate=world)
    loader = LayoutAwareLoadPlanner(SHAPES, grid=alone_grid, layouts=[])
    reader = SafetensorsReader(root / "second", broadcast=dist.group.WORLD, verify=False)
    dcp.load(whole, storage_reader=reader, planner=loader)
    assert whole["step"] == 2, whole["step"]
    for key, shape in SHAPES.items():
        assert torch.equal(torch.full(shape, 2.0), whole["model"][key]), key
    read = torch.tensor(reader.stats.read)
    dist.all_reduce(read)
    assert read == sum(4 * torch.Size(s).numel() for s in SHAPES.values()), read
    # Ranks that do not load the same end with an error on both.
    part = {"model": {"w": torch.zeros(8, 4)}} if rank else {"model": {"b": torch.zeros(8)}}
    loader = LayoutAwareLoadPlanner(SHAPES, grid=alone_grid, layouts=[])
    reader = SafetensorsReader(root / "second", broadcast=dist.group.WORLD)
    try:
        dcp.load(part, storage_reader=reader, planner=loader)
    except CheckpointException as error:
        assert "do not load the same" in str(error), error
    else:
        raise AssertionError("loaded")
    dist.barrier()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
