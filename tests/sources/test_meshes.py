"""Grids from DTensors' own meshes, however the meshes were cut; each rank in a thread of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import Grid, LayoutError
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
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "dp_shard", "cp"))
        flat = mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
        return grids_from_tensors([("w", placed(flat, Shard(0)))])

    assert Grid(("replica4", "dp_shard_cp"), (2, 4), (1, 2)) == on_rank(6, 8, grids).dense


def test_dense_and_expert_axes_of_one_world(on_rank):
    def grids():
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        dense = world._unflatten(0, (2, 2, 2), ("rep", "fsdp", "tp"))
        sparse = world._unflatten(0, (4, 2), ("efsdp", "ep"))
        return grids_from_tensors(
            [
                ("w", placed(dense[("fsdp", "tp")], Shard(0), Shard(1))),
                ("norm", placed(dense["fsdp"], Shard(0))),
                ("experts.w1", placed(sparse[("efsdp", "ep")], Shard(1), Shard(0))),
            ]
        )

    made = on_rank(5, 8, grids)
    assert Grid(("replica4", "fsdp", "tp"), (2, 2, 2), (1, 0, 1)) == made.dense
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


def test_meshes_that_span_other_ranks(on_rank):
    def make():
        whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp_shard",))
        return plan({"w": placed(whole, Shard(0)), "v": placed(part, Shard(0))})

    with pytest.raises(
        LayoutError, match=r"^v: its mesh .* spans 2 ranks and other tensors' meshes 4"
    ):
        on_rank(0, 4, make)
