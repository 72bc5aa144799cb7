"""One table of layouts for both planners: made once, shared, and left as it is."""

import pickle

import memory
import pytest
import torch
from torch import nn

from shardplan.layouts import Grids
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner, LayoutTable
from shardplan.planner.megatron import FsdpDtensorSavePlanner


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_both_planners_take_one_with_the_optimizer():
    model, optimizer = trained()
    table = LayoutTable.of(model, optimizer=optimizer)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    checkpoint = memory.save([state], [LayoutAwareSavePlanner(table)])
    assert "optim.state.0.weight.exp_avg" in checkpoint.metadata.state_dict_metadata
    other, its_optimizer = trained()
    found = {"model": other.state_dict(), "optim": its_optimizer.state_dict()}
    for value in (
        *found["model"].values(),
        *(s["exp_avg"] for s in found["optim"]["state"].values()),
    ):
        value.detach().fill_(-1)
    memory.load(checkpoint, [found], [LayoutAwareLoadPlanner(pickle.loads(pickle.dumps(table)))])
    for key, value in state["model"].items():
        assert torch.equal(value, found["model"][key])
    for number, slots in state["optim"]["state"].items():
        assert torch.equal(slots["exp_avg"], found["optim"]["state"][number]["exp_avg"])


@pytest.mark.parametrize("kind", [LayoutAwareSavePlanner, LayoutAwareLoadPlanner])
def test_what_is_given_beside_a_table_is_refused(kind):
    table = LayoutTable.of({"w": (2,)}, grid=Grids.from_sizes(0))
    text = r"^grid=, ep_rank=, ep_size= given beside a LayoutTable.* LayoutTable\.of"
    with pytest.raises(ValueError, match=text):
        kind(table, grid=Grids.from_sizes(0), ep_rank=0, ep_size=1)
    with pytest.raises(ValueError, match=r"^optimizer= given beside"):
        kind(table, optimizer=trained()[1])


def test_megatrons_names_stay_with_their_planner():
    table = LayoutTable.of({"decoder.w": (2,)}, grid=Grids.from_sizes(0))
    names = table.names
    FsdpDtensorSavePlanner(table)
    assert names is table.names
    checkpoint = memory.save(
        [{"model": {"decoder.w": torch.ones(2)}}], [LayoutAwareSavePlanner(table)]
    )
    assert ["model.decoder.w"] == list(checkpoint.metadata.state_dict_metadata)
