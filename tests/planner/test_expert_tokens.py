"""Experts under any name: the tokens of `ExpertGrid` serve a save and every form that a load looks for."""

import memory
import pytest
import torch

from shardplan.layouts import DEFAULT_LAYOUTS, ExpertGrid, Grids
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

FULL = torch.arange(24.0).reshape(4, 2, 3)
SHAPES = {
    "stacked": {"layers.0.{}.w": (2, 2, 3)},
    "single": {"layers.0.{}.0.w": (2, 3), "layers.0.{}.1.w": (2, 3)},
}


def case(form, token, rank, value=None):
    """Names, and the state of one of two expert-parallel ranks: two of four experts."""
    names = {name.format(token): shape for name, shape in SHAPES[form].items()}
    own = FULL[2 * rank : 2 * rank + 2].clone()
    if value is not None:
        own.fill_(value)
    tensors = [own] if form == "stacked" else list(own)
    return names, {"model": dict(zip(names, tensors, strict=True))}


def layouts(token, **given):
    others = [p for p in DEFAULT_LAYOUTS if not isinstance(p, ExpertGrid)]
    return [*others, ExpertGrid(4, tokens=[token], **given)]


@pytest.mark.parametrize("token", ["experts", "moe_blocks", "inner"])
@pytest.mark.parametrize("saved", ["stacked", "single"])
@pytest.mark.parametrize("live", ["stacked", "single"])
@pytest.mark.parametrize("unstack", [False, True])
def test_what_loads_under_one_token_loads_under_every_token(token, saved, live, unstack):
    given = {"stacked": "single"} if unstack else {}
    places = [Grids.from_sizes(rank, dp_shard=2, ep=2) for rank in range(2)]
    states, planners = [], []
    for rank, grid in enumerate(places):
        names, state = case(saved, token, rank)
        states.append(state)
        planners.append(LayoutAwareSavePlanner(names, grid=grid, layouts=layouts(token, **given)))
    checkpoint = memory.save(states, planners)
    one = saved == "stacked" and not unstack
    key = f"model.layers.0.{token}.w" if one else f"model.layers.0.{token}.3.w"
    assert key in checkpoint.metadata.state_dict_metadata
    found, planners = [], []
    for rank, grid in enumerate(places):
        names, state = case(live, token, rank, -1.0)
        found.append(state)
        planners.append(LayoutAwareLoadPlanner(names, grid=grid, layouts=layouts(token)))
    memory.load(checkpoint, found, planners)
    for rank, state in enumerate(found):
        values = list(state["model"].values())
        loaded = values[0] if live == "stacked" else torch.stack(values)
        assert torch.equal(FULL[2 * rank : 2 * rank + 2], loaded)


def test_a_name_without_a_token_marks_no_experts():
    """Under `experts` the default provider knows them; under another name each rank's is the same."""
    places = [Grids.from_sizes(rank, dp_shard=2, ep=2) for rank in range(2)]
    for token, shape in (("experts", (4, 2, 3)), ("moe_blocks", (2, 2, 3))):
        states, planners = [], []
        for rank, grid in enumerate(places):
            names, state = case("stacked", token, rank, 1.0)
            states.append(state)
            planners.append(LayoutAwareSavePlanner(names, grid=grid))
        checkpoint = memory.save(states, planners)
        assert shape == tuple(checkpoint.tensor(f"model.layers.0.{token}.w").shape)
