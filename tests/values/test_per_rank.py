"""Values that differ between ranks: declared, found out, and what another world makes of them."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
import world
from memory import Memory, MemoryReader, MemoryWriter

from shardplan.layouts import CheckpointError, Grids, LayoutError
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LoadPolicies,
    PerRank,
)


def grids(count, **sizes):
    sizes = sizes or {"dp_shard": count}
    return [Grids.from_sizes(rank, **sizes) for rank in range(count)]


def save(states, places=None):
    memory = Memory()
    places = places or grids(len(states))
    planners = [LayoutAwareSavePlanner(grid=grid) for grid in places]
    world.save("", states, planners, lambda _: MemoryWriter(memory))
    return memory


def load(memory, states, places=None, **given):
    places = places or grids(len(states))
    planners = [LayoutAwareLoadPlanner(grid=grid, **given) for grid in places]
    world.load("", states, planners, lambda _: MemoryReader(memory))
    return [planner.report for planner in planners]


def test_every_rank_gets_its_own_value_back():
    values = [{"seed": rank, "state": torch.tensor([rank, 9])} for rank in range(4)]
    memory = save([{"rng": PerRank(value), "step": 3} for value in values])
    assert {"rng.rank_0", "rng.rank_1", "rng.rank_2", "rng.rank_3", "step"} == {
        key for key, _ in memory.data
    }
    states = [{"rng": PerRank(), "step": 0} for _ in range(4)]
    holders = [state["rng"] for state in states]
    reports = load(memory, states)
    assert [0, 1, 2, 3] == [holder.value["seed"] for holder in holders]
    assert [[r, 9] for r in range(4)] == [holder.value["state"].tolist() for holder in holders]
    assert [[]] * 4 == [report.unexpected for report in reports]


def test_values_along_some_axes_only():
    places = grids(4, dp_shard=2, tp=2)  # tp counts faster
    memory = save([{"loader": PerRank(r // 2, axes=("dp_shard",))} for r in range(4)], places)
    assert {("loader.dp_shard_0", None): 0, ("loader.dp_shard_1", None): 2} == memory.written_by
    wider = grids(8, dp_shard=2, tp=4)
    states = [{"loader": PerRank(-1, axes=["dp_shard"])} for _ in range(8)]
    load(memory, states, wider)
    assert [0, 0, 0, 0, 1, 1, 1, 1] == [state["loader"].value for state in states]


def test_pipeline_stages_have_values_of_their_own():
    places = grids(4, pp=2, dp_shard=2)
    memory = save([{"rng": PerRank(rank)} for rank in range(4)], places)
    states = [{"rng": PerRank()} for _ in range(4)]
    load(memory, states, places)
    assert [0, 1, 2, 3] == [state["rng"].value for state in states]


def test_a_value_that_differs_along_an_axis_that_was_not_named():
    places = grids(4, dp_shard=2, tp=2)
    with pytest.raises(CheckpointError, match=r"^loader\.dp_shard_0: ranks 0 and 1 hold different"):
        save([{"loader": PerRank(r, axes=("dp_shard",))} for r in range(4)], places)


def test_an_axis_that_the_grid_has_not():
    with pytest.raises(LayoutError, match=r"^loader: PerRank names the axes \('dp',\), but"):
        save([{"loader": PerRank(r, axes=("dp",))} for r in range(2)])


MORE = [
    ({}, r"^rng: 2 ranks saved .* and 3 load, so there is none for rank 2 \(dp_shard 2/3\)"),
    ({"more_ranks": "keep"}, [0, 1, "own"]),
    ({"more_ranks": "wrap"}, [0, 1, 0]),
]


@pytest.mark.parametrize(("policies", "outcome"), MORE, ids=str)
def test_a_larger_world(policies, outcome):
    memory = save([{"rng": PerRank(rank), "step": 1} for rank in range(2)])
    states = [{"rng": PerRank("own"), "step": 0} for _ in range(3)]
    if isinstance(outcome, str):
        with pytest.raises(CheckpointError, match=outcome):
            load(memory, states, policies=LoadPolicies(**policies))
        return
    reports = load(memory, states, policies=LoadPolicies(**policies))
    assert outcome == [state["rng"].value for state in states]
    assert [[], [], ["rng"]] == [list(report.ranks) for report in reports]


FEWER = [
    ({}, r"^rng: 3 ranks saved .* and 1 load, so that of rank 1 to 2 would be lost"),
    ({"fewer_ranks": "drop"}, "dropped the value of rank 1 to 2"),
]


@pytest.mark.parametrize(("policies", "outcome"), FEWER, ids=str)
def test_a_smaller_world(policies, outcome):
    memory = save([{"rng": PerRank(rank)} for rank in range(3)])
    state = {"rng": PerRank()}
    if not policies:
        with pytest.raises(CheckpointError, match=outcome):
            load(memory, [state])
        return
    (report,) = load(memory, [state], policies=LoadPolicies(**policies))
    assert (0, outcome) == (state["rng"].value, report.ranks["rng"])


def test_one_value_for_all_becomes_each_ranks_own():
    memory = save([{"rng": 5}] * 2)
    states = [{"rng": PerRank()} for _ in range(3)]
    reports = load(memory, states)
    assert [5, 5, 5] == [state["rng"].value for state in states]
    assert "one value was saved for all ranks" == reports[0].ranks["rng"]


def test_stock_reads_the_values_of_all_ranks(tmp_path):
    planners = [LayoutAwareSavePlanner(grid=grid) for grid in grids(2)]
    world.save(tmp_path, [{"rng": PerRank(rank + 5)} for rank in range(2)], planners)
    state = {"rng": {"rank_0": None, "rank_1": None}}
    dcp.load(state, checkpoint_id=str(tmp_path))
    assert {"rank_0": 5, "rank_1": 6} == state["rng"]


def test_new_axes_are_noticed_by_a_planner_that_is_used_again():
    planner = LayoutAwareSavePlanner(grid=grids(1)[0])
    for value, key in [(PerRank(1), "x.rank_0"), (PerRank(1, axes=("tp",)), "x.tp_0")]:
        memory = Memory()
        world.save("", [{"x": value}], [planner], lambda _, m=memory: MemoryWriter(m))
        assert [(key, None)] == list(memory.data)


# What is not declared ------------------------------------------------------------------------------

DIFFERENT = [
    ({"step": 1}, {"step": 2}, "step"),
    ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b"),
    ({"s": "x", "t": 0.5}, {"s": "x", "t": 0.25}, "t"),
    ({"n": None}, {"n": False}, "n"),
]


@pytest.mark.parametrize(("first", "second", "key"), DIFFERENT, ids=str)
def test_what_differs_between_ranks_is_an_error_with_the_key_and_both_ranks(first, second, key):
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(key)}: ranks 1 and 3 hold different .*PerRank"
    ):
        save([dict(), first, dict(first), second])


def test_python_values_of_some_ranks_only_are_written_by_the_first_that_has_them():
    states = [{"x": 1}, {"x": 1, "dp_rank_1": b"a"}, {"x": 1, "dp_rank_2": b"b", "late": 7}]
    states.append({"x": 1, "late": 7})
    memory = save(states)
    assert {"x": 0, "dp_rank_1": 1, "dp_rank_2": 2, "late": 2} == {
        key: rank for (key, _), rank in memory.written_by.items()
    }
    targets = [{key: None for key in state} for state in states]
    load(memory, targets)
    assert states == targets
