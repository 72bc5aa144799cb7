"""The writer with DCP's collectives: ranks that hold different values, all in one process."""

import functools

import alone
import hybrid
import pytest
import test_matrix as matrix
import torch
import world

from shardplan.layouts import BufferDescription, FSDPFlatBuffer, Grids
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsWriter,
)


@pytest.mark.parametrize("name", ["fsdp3", "pp2-hsdp"])
def test_saved_with_plans_exchanged(tmp_path, name):
    config = matrix.BY_NAME[name]
    states = [hybrid.state_dict(config, rank) for rank in range(config.world)]
    planners = [matrix.planner(LayoutAwareSavePlanner, config, r) for r in range(config.world)]
    writer = functools.partial(SafetensorsWriter, sync=False)
    world.save(tmp_path / "checkpoint", states, planners, writer)
    target = matrix.BY_NAME["one"]
    blank = [hybrid.state_dict(target, 0, blank=True)]
    alone.load(tmp_path / "checkpoint", blank, matrix.load_planners("one"))
    assert [] == matrix.differences(hybrid.after_load(target, 0), blank[0])


def adam(values):
    """A flat shard with its state; an optimizer has none for a parameter of which nothing is here."""
    slots = {"w": {"exp_avg": values + 1, "step": torch.tensor(3.0)}} if values.numel() else {}
    return {"model": {"w": values}, "optimizer": {"state": slots}}


@pytest.mark.parametrize("together", [True, False])
def test_rank_without_any_elements_has_an_empty_optimizer_state(tmp_path, together):
    """It was taken for a value that the other ranks lacked, and the save failed."""
    values = torch.arange(8.0)
    states = [adam(values[start : start + 4].clone()) for start in (0, 4, 8)]
    buffer = BufferDescription({"w": (8,)}, 3, 4)
    planners = [
        LayoutAwareSavePlanner(
            {"w": (8,)},
            grid=Grids.from_sizes(rank, dp_shard=3),
            layouts=[FSDPFlatBuffer(buffers=[buffer])],
        )
        for rank in range(3)
    ]
    if together:
        world.save(tmp_path, states, planners, functools.partial(SafetensorsWriter, sync=False))
    else:
        alone.saved(tmp_path, states, planners)
    state = adam(torch.zeros(8))
    alone.load(tmp_path, [state], [LayoutAwareLoadPlanner({"w": (8,)}, layouts=[])])
    assert [] == matrix.differences(adam(values), state)


def test_frozen_stage_does_not_excuse_an_optimizer_that_was_not_built(tmp_path):
    """Its empty state was saved, so a load into an empty state found it and left out the rest."""
    states = [adam(torch.arange(8.0)) for _ in range(2)]
    states[0] = {"model": {"frozen": torch.ones(2)}, "optimizer": {"state": {}}}
    shapes = [{"frozen": (2,)}, {"w": (8,)}]
    planners = [
        LayoutAwareSavePlanner(shapes[rank], grid=Grids.from_sizes(rank, pp=2), layouts=[])
        for rank in range(2)
    ]
    alone.saved(tmp_path, states, planners)
    state = {"model": {"w": torch.zeros(8)}, "optimizer": {"state": {}}}
    with pytest.raises(CheckpointError, match=r"optimizer\.state: empty here"):
        alone.load(tmp_path, [state], [LayoutAwareLoadPlanner({"w": (8,)}, layouts=[])])
    assert not state["model"]["w"].any()
