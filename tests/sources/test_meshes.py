"""Grids from DTensors' own meshes, however the meshes were cut; each rank in a thread of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import Cut, Grid, Grids, LayoutError, ParamInfo
from shardplan.layouts.fsdp import dtensor_cuts
from shardplan.planner import LayoutAwareSavePlanner
from shardplan.planner.planning.meshes import grids_from_tensors


@pytest.fixture
def on_rank():
    """Runs a function as one rank of a group that sends nothing; torch tells ranks by thread."""
    pools = []

    def run(rank, world, function):
        def go():
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            try:
                return function()
            finally:
                dist.destroy_process_group()

        pools.append(ThreadPoolExecutor(1))
        return pools[-1].submit(go).result()

    yield run
    for pool in pools:
        pool.shutdown()


def placed(mesh, *placements, shape=(8, 4)):
    return distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)


def test_axes_by_name_are_those_of_the_root(on_rank):
    def grids():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        return grids_from_tensors([("w", placed(mesh["tp"], Shard(0)))])

    expected = Grid(("pp", "dp", "tp"), (2, 2, 2), (1, 0, 1))
    assert expected == on_rank(5, 8, grids).dense


def test_a_flattened_axis(on_rank):
    def grids():
        names = ("pp", "dp_replicate", "dp_shard", "cp")
        mesh = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=names)
        flat = mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
        return grids_from_tensors([("w", placed(flat, Shard(0)))])

    assert Grid(("pp", "dp_shard_cp"), (2, 4), (1, 2)) == on_rank(6, 8, grids).dense


def test_dense_and_expert_axes_of_one_world(on_rank):
    def grids():
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        dense = world._unflatten(0, (4, 2), ("fsdp", "tp"))
        sparse = world._unflatten(0, (4, 2), ("efsdp", "ep"))
        return grids_from_tensors(
            [
                ("w", placed(dense[("fsdp", "tp")], Shard(0), Shard(1))),
                ("norm", placed(dense["fsdp"], Shard(0))),
                ("experts.w1", placed(sparse[("efsdp", "ep")], Shard(1), Shard(0))),
            ]
        )

    made = on_rank(5, 8, grids)
    assert Grid(("fsdp", "tp"), (4, 2), (2, 1)) == made.dense
    assert Grid(("efsdp", "ep"), (4, 2), (2, 1)) == made.expert


def test_axes_that_overlap_in_part(on_rank):
    def grids():
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        one = world._unflatten(0, (4, 2), ("a", "b"))
        other = world._unflatten(0, (2, 4), ("c", "d"))
        tensors = [("w", placed(one["a"], Shard(0))), ("v", placed(other["d"], Shard(0)))]
        return grids_from_tensors(tensors)

    with pytest.raises(
        LayoutError, match=r"^w: its mesh axis 'a' of size 4 overlaps in part .*grid="
    ):
        on_rank(0, 8, grids)


def plan(state):
    planner = LayoutAwareSavePlanner()
    planner.set_up_planner(state)
    return planner.create_local_plan()


def test_an_expert_whose_mesh_forgets_the_expert_axis(on_rank):
    def make():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp_shard"))
        return plan(
            {
                "w": placed(mesh, Replicate(), Shard(0)),
                "experts": {"0": {"w": placed(mesh["dp_shard"], Shard(0))}},
            }
        )

    with pytest.raises(
        LayoutError, match=r"^experts\.0\.w: .* without the expert axis ep of size 2"
    ):
        on_rank(0, 4, make)


def test_meshes_that_say_nothing_of_the_other_ranks(on_rank):
    def world_axis():
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        return world._unflatten(0, (2, 4), ("pp", "fsdp"))["fsdp"]

    def own_names():
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))["y"]

    def some_ranks():
        return DeviceMesh("cpu", [0, 1, 2, 3])

    texts = {
        world_axis: r"^w: the tensors' meshes leave 2 ranks of .*world=8.* apart, .* Pass grid=",
        own_names: r"^w: the tensors' meshes leave the axis 'x' of .* Pass grid=",
        some_ranks: r"^w: its mesh was cut from one of 4 ranks, but there are 8, .* Pass grid=",
    }
    for make, text in texts.items():
        with pytest.raises(LayoutError, match=text):
            on_rank(0, 8, lambda make=make: grids_from_tensors([("w", placed(make(), Shard(0)))]))


def test_axes_of_a_mesh_by_the_ranks_along_them(on_rank):
    """Meshes without names, or with other ones, on a grid that was given."""
    grid = Grids.from_sizes(5, pp=2, dp_shard=2, tp=2)

    def cuts(ranks, *placements):
        tensor = placed(DeviceMesh("cpu", ranks), *placements)
        return dtensor_cuts(ParamInfo("w", (8, 4), grid.dense, False, None, tensor)).cuts

    assert (Cut(0, "tp"),) == on_rank(5, 8, lambda: cuts([4, 5], Shard(0)))
    assert (Cut(1, "dp_shard"),) == on_rank(5, 8, lambda: cuts([5, 7], Shard(1)))
    both = [[4, 5], [6, 7]]
    expected = (Cut(0, "dp_shard"), Cut(1, "tp"))
    assert expected == on_rank(5, 8, lambda: cuts(both, Shard(0), Shard(1)))
    text = (
        r"^w: its mesh axis 'axis0' of size \d is not one of the grid's axes \(pp 2, dp_replicate 1"
    )
    for ranks in ([5, 6], [4, 5, 6, 7], [7, 5]):
        with pytest.raises(LayoutError, match=text):
            on_rank(5, 8, lambda ranks=ranks: cuts(ranks, Shard(0)))
