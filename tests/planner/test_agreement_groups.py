"""Saves by a process group of some ranks: one replica's ranks hold everything, other groups do not.

All ranks in one process: each makes its mesh, planner and plan in a process group that sends nothing.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import Cut, DTensorStorage, FSDPFlatBuffer, Grids, IncompleteCheckpointError
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
    PerRank,
    SafetensorsReader,
    SafetensorsWriter,
)

FULL = torch.arange(32.0).reshape(8, 4)
ONE = Grids.from_sizes(0)


@contextlib.contextmanager
def on(rank, size=4):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(sizes=(2, 2)):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "tp"))


def sharded(mesh, rank, tp=2):
    part = FULL.chunk(tp)[rank % tp].clone()
    return DTensor.from_local(
        part, mesh["tp"], [Shard(0)], run_check=False, shape=FULL.shape, stride=(4, 1)
    )


# Planner and state dict of a rank, by where its layouts come from.


def of_mesh(rank, group, **given):
    mesh = mesh_of()
    state = {"w": sharded(mesh, rank), "b": torch.ones(3), "rng": PerRank(rank % 2)}
    return LayoutAwareSavePlanner(process_group=group, **given), state


def of_whole_mesh(rank, group):
    """A DTensor that names both axes, replicated along the one that leaves."""
    part = FULL.chunk(2)[rank % 2].clone()
    w = DTensor.from_local(
        part, mesh_of(), [Replicate(), Shard(0)], run_check=False, shape=FULL.shape, stride=(4, 1)
    )
    state = {"w": w, "b": torch.ones(3), "rng": PerRank(rank % 2)}
    return LayoutAwareSavePlanner(process_group=group), state


def of_cuts(rank, group):
    layouts = [DTensorStorage({"w": (Cut(0, "tp"),)})]
    grid = Grids.from_sizes(rank, dp_replicate=2, tp=2)
    planner = LayoutAwareSavePlanner(
        {"w": (8, 4), "b": (3,)}, grid=grid, layouts=layouts, process_group=group
    )
    part = FULL.chunk(2)[rank % 2].clone()
    return planner, {"w": part, "b": torch.ones(3), "rng": PerRank(rank % 2)}


def of_flat_buffer(rank, group):
    ranges = {"w": ((0, 10), (10, 32)), "b": ((0, 3), (3, 3))}
    grid = Grids.from_sizes(rank, dp_replicate=2, dp_shard=2)
    planner = LayoutAwareSavePlanner(
        {"w": (8, 4), "b": (3,)},
        grid=grid,
        layouts=[FSDPFlatBuffer(ranges)],
        process_group=group,
    )
    begin, end = ranges["w"][rank % 2]
    state = {"w": FULL.view(-1)[begin:end].clone(), "b": torch.ones(3 * (1 - rank % 2))}
    return planner, {**state, "rng": PerRank(rank % 2)}


SOURCES = {f.__name__: f for f in (of_mesh, of_whole_mesh, of_cuts, of_flat_buffer)}


def save(path, make, ranks, writer, group=None):
    """Saves from some ranks, as `dcp.save` does with a process group of theirs."""
    planners, plans, writers = [], [], []
    for place, rank in enumerate(ranks):
        with on(rank):
            planner, state = make(rank, dist.new_group(list(group or ranks)))
            planners.append(planner)
            writers.append(writer(path))
            planner.set_up_planner(state, writers[-1].storage_meta(), place == 0)
            writers[-1].set_up_storage_writer(place == 0, rank=place, use_collectives=True)
            plan = writers[-1].prepare_local_plan(planner.create_local_plan())
            plans.append(world.sent(plan))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(world.sent(plan)), planner).wait()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return planners


WRITERS = {
    "stock": (lambda path: dcp.FileSystemWriter(path, sync_files=False), dcp.FileSystemReader),
    "own": (lambda path: SafetensorsWriter(path, sync=False), SafetensorsReader),
}


@pytest.mark.parametrize("storage", WRITERS)
@pytest.mark.parametrize("replica", [(0, 1), (2, 3)])
@pytest.mark.parametrize("source", SOURCES)
def test_one_replica_saves_everything(tmp_path, source, replica, storage):
    writer, reader = WRITERS[storage]
    save(tmp_path, SOURCES[source], replica, writer)
    state = {"w": torch.zeros(8, 4), "b": torch.zeros(3)}
    world.load(tmp_path, [state], [LayoutAwareLoadPlanner(grid=ONE)], reader)
    assert torch.equal(FULL, state["w"]) and [1.0] * 3 == state["b"].tolist()
    own = [{"rng": PerRank()} for _ in range(2)]
    places = [Grids.from_sizes(r, tp=2) for r in range(2)]
    world.load(tmp_path, own, [LayoutAwareLoadPlanner(grid=g) for g in places], reader)
    assert [0, 1] == [o["rng"].value for o in own]


@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_of_plain_replicas_saves(tmp_path, rank):
    def make(rank, group):
        return LayoutAwareSavePlanner(process_group=group), {"w": FULL.clone(), "n": 3}

    save(tmp_path, make, [rank], WRITERS["stock"][0])
    state = {"w": torch.zeros(8, 4), "n": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(FULL, state["w"]) and 3 == state["n"]


def test_a_grid_of_the_group_is_taken_as_it_is(tmp_path):
    def make(rank, group):
        return of_mesh(rank, group, grid=Grids.from_sizes(rank % 2, tp=2))

    save(tmp_path, make, (2, 3), WRITERS["stock"][0])
    state = {"w": torch.zeros(8, 4)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(FULL, state["w"])


REFUSED = {
    "shards of other ranks": (
        (0, 2),
        of_cuts,
        r"^w: cut along the axis tp of 2 ranks, of which process_group has 1, so the shards of "
        r"ranks 1, 3 would be missing",
    ),
    "shards of other ranks, flat": (
        (0, 2),
        of_flat_buffer,
        r"^w: cut along the axis dp_shard of 2 ranks.* ranks 1, 3 would be missing",
    ),
    "not a box": (
        (0, 3),
        of_cuts,
        r"^process_group: its 2 ranks 0, 3 are not all ranks along some axes .*'tp': 2",
    ),
    "one stage": (
        (0, 1),
        lambda rank, group: (
            LayoutAwareSavePlanner(
                {"w": (8, 4)}, grid=Grids.from_sizes(rank, pp=2, tp=2), process_group=group
            ),
            {"w": FULL},
        ),
        r"^process_group: the parameters of other pipeline stages, on ranks 2, 3, would be missing",
    ),
    "numbered otherwise": (
        (0, 1),
        lambda rank, group: (
            LayoutAwareSavePlanner(
                {"w": (8, 4)}, grid=Grids.from_sizes(3 - rank, dp_replicate=4), process_group=group
            ),
            {"w": FULL},
        ),
        r"^process_group: rank 0 of 4 is at place 3 of a grid of 4 ranks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_groups_that_do_not_hold_everything_are_refused(tmp_path, case):
    ranks, make, text = REFUSED[case]
    with pytest.raises(LayoutError, match=text):
        save(tmp_path / "c", make, ranks, WRITERS["stock"][0])
    assert not (tmp_path / "c" / ".metadata").exists()


def test_boxes_of_other_ranks_would_be_missing(tmp_path):
    text = r"^w: \[0, 4\) is covered by no rank of shape .* Save from all ranks that hold a part"
    with pytest.raises(IncompleteCheckpointError, match=text):
        save(tmp_path / "c", of_mesh, (1, 3), WRITERS["stock"][0])
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_plan_is_made_anew_for_another_group(tmp_path):
    """One planner, first for all ranks and then for one replica."""
    planners, states = [], []
    for rank in range(4):
        with on(rank):
            planner, state = of_cuts(rank, None)
            planner.set_up_planner(state)
            first = planner.create_local_plan().planner_data
            planner._ranks = (0, 1)
            if rank < 2:
                planner.set_up_planner(state)
                second = planner.create_local_plan().planner_data
                assert (4, 2) == (first.grids[0].world_size, second.grids[0].world_size)
                assert (None, (0, 1)) == (first.ranks, second.ranks)
            planners.append(planner)
            states.append(state)
