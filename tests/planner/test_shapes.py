"""A tensor's own word against its shape: the right number of elements is not enough."""

import contextlib

import alone
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
    LayoutError,
)
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

SHAPE = (4, 4)
ROWS = [DTensorStorage({"w": (Cut(0, "dp_shard"),)})]


@contextlib.contextmanager
def mesh_of(sizes, names):
    dist.init_process_group("fake", rank=0, world_size=torch.Size(sizes).numel(), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def refuses(state, planner, *words):
    planner.set_up_planner(state, None, True)
    with pytest.raises(LayoutError) as caught:
        planner.create_local_plan()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("model", [None, {"w": SHAPE}], ids=["no model", "model"])
@pytest.mark.parametrize("place", ["parameter", "slot"])
def test_dtensor_whose_local_part_has_another_shape(model, place):
    with mesh_of((2,), ("dp_shard",)) as mesh:
        local = torch.arange(8.0).view(2, 4)  # Shard(1) gives (4, 2)
        tensor = DTensor.from_local(
            local, mesh, [Shard(1)], run_check=False, shape=SHAPE, stride=(4, 1)
        )
        key, state = "w", {"w": tensor}
        if place == "slot":
            key, state = "w", {"optimizer": {"state": {"w": {"m": tensor}}}}
        layouts = (
            {} if model is None else {"layouts": [DTensorStorage({"w": (Cut(1, "dp_shard"),)})]}
        )
        planner = LayoutAwareSavePlanner(model, grid=Grids.from_sizes(0, dp_shard=2), **layouts)
        refuses(state, planner, key, "(2, 4)")


@pytest.mark.parametrize("shape", [(4, 2), (1, 8), (2, 2, 2)])
@pytest.mark.parametrize("place", ["parameter", "slot"])
def test_plain_shard_of_another_shape(shape, place):
    tensor = torch.arange(8.0).view(shape)
    state = (
        {"w": tensor} if place == "parameter" else {"optimizer": {"state": {"w": {"m": tensor}}}}
    )
    planner = LayoutAwareSavePlanner(
        {"w": SHAPE}, grid=Grids.from_sizes(0, dp_shard=2), layouts=ROWS
    )
    refuses(state, planner, "w", str(tuple(shape)))


def test_slice_of_a_flat_buffer_is_flat_or_rows():
    buffers = [FSDPFlatBuffer({"w": [(0, 8), (8, 16)]})]
    for shape, fits in (((8,), True), ((2, 4), True), ((4, 2), False), ((1, 8), False)):
        own = LayoutAwareSavePlanner(
            {"w": SHAPE}, grid=Grids.from_sizes(0, dp_shard=2), layouts=buffers
        )
        state = {"w": torch.arange(8.0).view(shape)}
        if fits:
            own.set_up_planner(state, None, True)
            assert 1 == len(own.create_local_plan().items)
        else:
            refuses(state, own, "w", str(shape))


@pytest.mark.parametrize("given", [False, True], ids=["no model", "model"])
def test_experts_that_their_placements_call_replicas(given):
    with mesh_of((2, 2), ("ep", "edp_shard")) as mesh:
        local = torch.ones(2, 1, 2)
        tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(1)], run_check=False)
        model = torch.nn.Module()
        model.experts = torch.nn.Module()
        model.experts.w1 = torch.nn.Parameter(tensor)
        layouts = (
            *(p for p in DEFAULT_LAYOUTS if p.name != "expert-grid"),
            ExpertGrid(num_experts=4),
        )
        planner = LayoutAwareSavePlanner(model if given else None, layouts=layouts)
        refuses({"experts.w1": tensor}, planner, "experts.w1", "ep")


def test_parameters_that_zero_3_has_taken_apart_are_refused_until_they_are_gathered():
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
    LayoutAwareSavePlanner(model)  # gathered: whole
    whole = model.weight.data
    model.weight.data = torch.empty(0)
    for kind in (LayoutAwareSavePlanner, LayoutAwareLoadPlanner):
        with pytest.raises(
            LayoutError, match=r"weight: .*ZeRO-3.*\(2, 3\).*\(0,\).*GatheredParameters"
        ):
            kind(model)
    model.weight.data = whole
    LayoutAwareSavePlanner(model)


FACTORS = {"row": (4, 1), "col": (1, 6), "precondition": (3, 5, 2), "swapped": (6, 4)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_of_another_shape_of_a_whole_parameter_comes_back(tmp_path, ranks):
    """Row and column factors, preconditioners: one value for the parameter, equal on its replicas."""

    def state(fill):
        slots = {
            n: torch.full(s, fill) + torch.arange(s[-1]) * bool(fill) for n, s in FACTORS.items()
        }
        return {"model": {"w": torch.ones(4, 6)}, "optimizer": {"state": {"w": slots}}}

    def make(kind):
        grids = [Grids.from_sizes(rank, dp_replicate=ranks) for rank in range(ranks)]
        return [kind({"w": (4, 6)}, grid=grid, layouts=()) for grid in grids]

    alone.saved(tmp_path, [state(7.0) for _ in range(ranks)], make(LayoutAwareSavePlanner))
    loaded = [state(0.0) for _ in range(ranks)]
    alone.load(tmp_path, loaded, make(LayoutAwareLoadPlanner))
    expected = state(7.0)["optimizer"]["state"]["w"]
    for own in loaded:
        for slot, tensor in own["optimizer"]["state"]["w"].items():
            assert torch.equal(expected[slot], tensor), slot


def test_state_of_another_shape_of_a_cut_parameter_is_refused_by_slot():
    state = {"optimizer": {"state": {"w": {"row_var": torch.ones(4, 1)}}}}
    own = LayoutAwareSavePlanner({"w": SHAPE}, grid=Grids.from_sizes(0, dp_shard=2), layouts=ROWS)
    refuses(state, own, "row_var", "(4, 1)", "optimizer_layouts=", "PerRank")
    # Exactly as many elements as the shard has, in another shape.
    state = {"optimizer": {"state": {"w": {"row_var": torch.ones(8, 1)}}}}
    own = LayoutAwareSavePlanner({"w": SHAPE}, grid=Grids.from_sizes(0, dp_shard=2), layouts=ROWS)
    refuses(state, own, "row_var", "(8, 1)")
