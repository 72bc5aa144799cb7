"""What a load reports as unexpected: keys that no shard of the model would ask for."""

import memory
import torch

from shardplan.layouts import ExpertGrid, FSDPFlatBuffer, Grids
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

SHAPES = {"a": (4,), "b": (4,), "experts.0.w": (2,), "experts.1.w": (2,)}
RANGES = {"a": ((0, 4), (4, 4)), "b": ((0, 0), (0, 4))}  # each rank stores one of the two


def rank_state(rank, slots=("exp_avg",), model_only=False):
    name = "ab"[rank]
    model = {"a": torch.ones(4 * (rank == 0)), "b": torch.ones(4 * (rank == 1))}
    model |= {f"experts.{i}.w": torch.ones(2) for i in range(2)}
    if model_only:
        return {"model": model}
    state = {
        n: {"step": torch.tensor(1.0), **{slot: torch.ones_like(model[n]) for slot in slots}}
        for n in (name, "experts.0.w", "experts.1.w")
    }
    groups = [{"lr": 0.5, "params": list(model)}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


def planners(kind):
    layouts = [FSDPFlatBuffer(RANGES), ExpertGrid(4)]
    return [
        kind(SHAPES, grid=Grids.from_sizes(rank, dp_shard=2, ep=2), layouts=layouts)
        for rank in range(2)
    ]


def unexpected(checkpoint, states):
    loaders = planners(LayoutAwareLoadPlanner)
    memory.load(checkpoint, states, loaders)
    return [sorted(loader.report.unexpected) for loader in loaders]


def test_other_shards_are_expected():
    """A rank with an empty shard has no state for it, and other ranks hold the other experts."""
    states = [rank_state(rank) for rank in range(2)]
    checkpoint = memory.save(states, planners(LayoutAwareSavePlanner))
    assert checkpoint.metadata is not None
    keys = checkpoint.metadata.state_dict_metadata
    assert {"optimizer.state.b.exp_avg", "optimizer.state.experts.3.w.step"} <= set(keys)
    assert [[], []] == unexpected(checkpoint, [rank_state(rank) for rank in range(2)])


def test_what_nobody_asks_for_is_unexpected():
    """A slot that this optimizer has not, and a key that no layout explains, on every rank."""
    states = [rank_state(rank, ("exp_avg", "max_exp_avg")) for rank in range(2)]
    for state in states:
        state["model"]["old"] = torch.zeros(1)
    checkpoint = memory.save(states, planners(LayoutAwareSavePlanner))
    names = ["a", "b", *(f"experts.{i}.w" for i in range(4))]
    expected = ["model.old", *(f"optimizer.state.{name}.max_exp_avg" for name in names)]
    found = unexpected(checkpoint, [rank_state(rank) for rank in range(2)])
    assert [sorted(expected)] * 2 == found


def test_sections_that_are_not_loaded_do_not_count():
    states = [rank_state(rank) for rank in range(2)]
    checkpoint = memory.save(states, planners(LayoutAwareSavePlanner))
    assert [[], []] == unexpected(checkpoint, [rank_state(r, model_only=True) for r in range(2)])
