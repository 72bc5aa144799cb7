"""Parameter groups and their options at load, tied tensors, and which values count as equal."""

import math
from typing import Any

import memory
import pytest
import torch

from shardplan.layouts import ExpertGrid, Grids, VocabularyPadding
from shardplan.planner import CheckpointError, LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.planning.manifest import Extra, StageManifest
from shardplan.planner.saving.agreement import first_difference
from shardplan.planner.state.conversion import exact_number
from shardplan.planner.state.values import same_value, value_digest

Save, Load = LayoutAwareSavePlanner, LayoutAwareLoadPlanner


# Tied tensors with padding ------------------------------------------------------------------------


def load_tied(policy: str, emb: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Two stored copies of 10 rows into one memory of 12, which holds fives before."""
    stored = memory.stored(
        **{"model.emb": ((10, 2), [((0, 0), emb)]), "model.out": ((10, 2), [((0, 0), out)])}
    )
    tied = torch.full((12, 2), 5.0)
    planner = Load(
        {"emb": (12, 2), "out": (12, 2)},
        layouts=[VocabularyPadding({"emb": 10, "out": 10})],
        padding=policy,
    )
    memory.load(stored, [{"model": {"emb": tied, "out": tied}}], [planner])
    return tied


@pytest.mark.parametrize(("policy", "rest"), [("zero", 0.0), ("keep", 5.0)])
def test_tied_padded_embedding_of_two_copies(policy, rest):
    """The copy's padding was memory that nobody filled, and the two counted as different."""
    values = torch.arange(20.0).view(10, 2)
    tied = load_tied(policy, values, values.clone())
    assert [*values.tolist(), [rest] * 2, [rest] * 2] == tied.tolist()


@pytest.mark.parametrize("policy", ["zero", "keep"])
def test_tied_padded_embedding_whose_copies_differ(policy):
    values = torch.arange(20.0).view(10, 2)
    other = values.clone()
    other[9, 1] = -1.0
    with pytest.raises(CheckpointError, match=r"model\.emb and model\.out: they share"):
        load_tied(policy, values, other)


# Parameter groups ---------------------------------------------------------------------------------


def group_round_trip(before: dict[str, Any], after: dict[str, Any], **options: Any) -> Any:
    def state(group):
        return {"optimizer": {"state": {"a": {"m": torch.ones(2)}}, "param_groups": [group]}}

    saved = memory.save([state(before)], [Save({"a": (2,)})])
    loaded, planner = state(after), Load({"a": (2,)}, **options)
    memory.load(saved, [loaded], [planner])
    return loaded["optimizer"]["param_groups"][0], planner.report


def test_number_lr_into_a_tensor_lr():
    """Adam(lr=1e-3) into Adam(lr=torch.tensor(...)) failed, since 0.001 is no float32."""
    lr = torch.tensor(5.0)
    group, _ = group_round_trip({"lr": 1e-3, "params": ["a"]}, {"lr": lr, "params": ["a"]})
    assert torch.equal(torch.tensor(1e-3), group["lr"])
    assert group["lr"] is lr


def test_number_into_a_tensor_outside_of_groups():
    saved = memory.save([{"lr": 1e-3}], [Save(None)])
    state = {"lr": torch.tensor(5.0)}
    memory.load(saved, [state], [Load(None)])
    assert torch.equal(torch.tensor(1e-3), state["lr"])


def test_tensor_of_higher_precision_is_not_rounded():
    saved = memory.save([{"lr": torch.tensor(1e-3, dtype=torch.float64)}], [Save(None)])
    with pytest.raises(
        CheckpointError, match=r"lr: 0\.001 can't be kept exactly as torch\.float32"
    ):
        memory.load(saved, [{"lr": torch.tensor(5.0)}], [Load(None)])


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_number_that_rounds_to_nothing_is_an_error(value):
    before, after = {"lr": value, "params": ["a"]}, {"lr": torch.tensor(5.0), "params": ["a"]}
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0\.lr: "):
        group_round_trip(before, after)


OWN_GROUPS = {
    "dict": lambda v: {0: {"lr": v}, "extra": {"lr": v + 1}},
    "dict of numbers": lambda v: {3: {"lr": v}, 7: {"lr": v + 1}},
    "list without parameters": lambda v: [{"lr": v}, {"lr": v + 1}],
    "number of parameters": lambda v: [{"lr": v, "params": 3}],
    "dict with number of parameters": lambda v: {0: {"lr": v, "params": int(v)}},
    "dict of groups": lambda v: {0: {"lr": v, "params": ["a"]}},
}


@pytest.mark.parametrize("model", [None, {"a": (2,)}], ids=["no model", "model"])
@pytest.mark.parametrize("groups", OWN_GROUPS)
def test_what_a_user_calls_param_groups_comes_back(groups, model):
    """It was taken for an optimizer's list, and its load was a TypeError."""

    def state(value):
        return {"s": {"param_groups": OWN_GROUPS[groups](value)}, "m": {"a": torch.ones(2)}}

    grid = Grids.from_sizes(0)
    saved = memory.save([state(5.0)], [Save(model, grid=grid)])
    loaded, planner = state(0.0), Load(model, grid=grid)
    memory.load(saved, [loaded], [planner])
    assert OWN_GROUPS[groups](5.0) == loaded["s"]["param_groups"]
    assert [] == planner.report.missing == planner.report.unexpected


def test_option_that_is_a_mapping():
    """`param_groups.0.cfg.x` was taken for an option x of a parameter named 0.cfg."""
    group, report = group_round_trip(
        {"lr": 1.0, "cfg": {"x": 2.0, "y": {"z": 3.0}}, "params": ["a"]},
        {"lr": 0.0, "cfg": {"x": 0.0, "y": {"z": 0.0}}, "params": ["a"]},
    )
    assert {"lr": 1.0, "cfg": {"x": 2.0, "y": {"z": 3.0}}, "params": ["a"]} == group
    assert [] == report.missing
    assert [] == report.unexpected


def test_option_that_is_a_mapping_which_the_live_group_lacks():
    group, _ = group_round_trip(
        {"lr": 1.0, "cfg": {"x": 2.0}, "params": ["a"]}, {"lr": 0.0, "params": ["a"]}
    )
    assert {"lr": 1.0, "cfg": {"x": 2.0}, "params": ["a"]} == group


def by_stage(rank: int, value: float) -> dict[str, Any]:
    name = f"layers.{rank}.w"
    group = {"lr": value, "cfg": {"x": value + 0.5}, "params": [name]}
    return {"optimizer": {"state": {name: {"m": torch.ones(2)}}, "param_groups": [group]}}


def test_option_that_is_a_mapping_by_name():
    """With pipeline stages: `param_groups.layers.0.w.cfg.x`."""

    def planners(kind):
        return [kind({f"layers.{r}.w": (2,)}, grid=Grids.from_sizes(r, pp=2)) for r in range(2)]

    saved = memory.save([by_stage(rank, rank + 1.0) for rank in range(2)], planners(Save))
    assert 1.5 == saved.value("optimizer.param_groups.layers.0.w.cfg.x")
    states, loads = [by_stage(rank, 0.0) for rank in range(2)], planners(Load)
    memory.load(saved, states, loads)
    assert [1.0, 2.0] == [s["optimizer"]["param_groups"][0]["lr"] for s in states]
    assert [1.5, 2.5] == [s["optimizer"]["param_groups"][0]["cfg"]["x"] for s in states]
    assert [[], []] == [planner.report.missing for planner in loads]


def test_option_that_the_checkpoint_lacks():
    """It stayed as it was, and nothing told so."""
    before, after = {"lr": 1.0, "params": ["a"]}, {"lr": 0.0, "wd": 7.0, "params": ["a"]}
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0\.wd: not in the check"):
        group_round_trip(before, after)
    assert {"lr": 0.0, "wd": 7.0, "params": ["a"]} == after  # no half of it is loaded
    group, report = group_round_trip(before, after, strict=False)
    assert {"lr": 1.0, "wd": 7.0, "params": ["a"]} == group
    assert ["optimizer.param_groups.0.wd"] == report.missing


def test_member_that_the_checkpoint_lacks_is_not_told_twice():
    shapes = {"a": (2,)}
    state = {"optimizer": {"param_groups": [{"lr": 1.0, "params": ["a"]}]}}
    saved = memory.save([state], [Save(shapes)])
    loaded = {"optimizer": {"param_groups": [{"lr": 0.0, "params": ["b"]}]}}
    planner = Load({"b": (2,)}, strict=False)
    memory.load(saved, [loaded], [planner])
    assert ["optimizer.param_groups.b"] == planner.report.missing
    assert 0.0 == loaded["optimizer"]["param_groups"][0]["lr"]


def groups_of(*listed: tuple[float, list[str]]) -> dict[str, Any]:
    names = [name for _, members in listed for name in members]
    groups = [{"lr": lr, "params": members} for lr, members in listed]
    return {
        "optimizer": {"state": {n: {"m": torch.ones(2)} for n in names}, "param_groups": groups}
    }


def test_group_without_parameters_comes_back():
    """Its options were not loaded and not told; here each group is at its own place."""
    saved = memory.save([groups_of((1.0, ["a"]), (2.0, []))], [Save({"a": (2,)})])
    loaded, planner = groups_of((0.0, ["a"]), (0.0, [])), Load({"a": (2,)})
    memory.load(saved, [loaded], [planner])
    assert [1.0, 2.0] == [group["lr"] for group in loaded["optimizer"]["param_groups"]]
    assert [] == planner.report.missing


def test_group_without_parameters_among_groups_in_another_order():
    """Then no place says whose options it has: it stays, and the report tells."""
    saved = memory.save([groups_of((1.0, []), (2.0, ["a"]))], [Save({"a": (2,)})])
    loaded, planner = groups_of((0.0, ["a"]), (9.0, [])), Load({"a": (2,)})
    memory.load(saved, [loaded], [planner])
    assert [2.0, 9.0] == [group["lr"] for group in loaded["optimizer"]["param_groups"]]
    assert ["optimizer.param_groups.1.lr"] == planner.report.missing


def test_group_without_parameters_of_a_pipeline_stage():
    """Options by name say nothing of it, and a load of what was just saved is no error."""

    def planners(kind):
        return [kind({f"w{r}": (2,)}, grid=Grids.from_sizes(r, pp=2)) for r in range(2)]

    def states(value):
        return [groups_of((value, ["w0"]), (8.0, [])), groups_of((8.0, []), (value, ["w1"]))]

    saved = memory.save(states(1.0), planners(Save))
    loaded, loads = states(0.0), planners(Load)
    memory.load(saved, loaded, loads)
    found = [[g["lr"] for g in state["optimizer"]["param_groups"]] for state in loaded]
    assert [[1.0, 8.0], [8.0, 1.0]] == found
    assert [["optimizer.param_groups.1.lr"], ["optimizer.param_groups.0.lr"]] == [
        planner.report.missing for planner in loads
    ]


# NaN ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["dp_shard", "pp"])
def test_option_that_is_not_a_number(axis):
    """By position and by name: two parameters of a group counted as saved with different NaNs."""
    shapes = {"a": (2,), "b": (2,)}

    def state(value):
        slots = {name: {"m": torch.ones(2)} for name in shapes}
        group = {"d": value, "params": ["a", "b"]}
        return {"optimizer": {"state": slots, "param_groups": [group]}}

    grid = Grids.from_sizes(**{axis: 1})
    saved = memory.save([state(math.nan)], [Save(shapes, grid=grid)])
    loaded = state(0.0)
    memory.load(saved, [loaded], [Load(shapes, grid=grid)])
    assert math.isnan(loaded["optimizer"]["param_groups"][0]["d"])


def test_not_a_number_changes_its_kind():
    """NaN into a tensor was refused as "not kept exactly"."""
    saved = memory.save([{"best": math.nan}], [Save(None)])
    state = {"best": torch.tensor(0.0)}
    memory.load(saved, [state], [Load(None)])
    assert math.isnan(state["best"].item())


@pytest.mark.parametrize("kind", [int, bool, torch.int64])
def test_not_a_number_is_no_integer(kind):
    with pytest.raises((ValueError, RuntimeError)):
        exact_number(math.nan, kind)


def test_nan_of_single_experts_into_one_stacked():
    """The scalars of two experts counted as different."""
    names = ("experts.0.w", "experts.1.w")
    state = {
        "model": {n: torch.ones(2, 2) for n in names},
        "optimizer": {"state": {n: {"d": torch.tensor(math.nan)} for n in names}},
    }
    saved = memory.save([state], [Save(dict.fromkeys(names, (2, 2)), layouts=[ExpertGrid(2)])])
    loaded = {
        "model": {"experts.w": torch.zeros(2, 2, 2)},
        "optimizer": {"state": {"experts.w": {"d": torch.tensor(0.0)}}},
    }
    memory.load(saved, [loaded], [Load({"experts.w": (2, 2, 2)}, layouts=[ExpertGrid(2)])])
    assert math.isnan(loaded["optimizer"]["state"]["experts.w"]["d"].item())


@pytest.mark.parametrize(
    ("expected", "a", "b"),
    [
        (True, math.nan, math.nan),
        (True, 1, 1.0),
        (True, 1.0, torch.tensor(1.0)),
        (True, torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])),
        (True, {"a": (math.nan,), "b": 1}, {"b": 1, "a": (math.nan,)}),
        (False, math.nan, 0.0),
        (False, torch.ones(2), torch.ones(3)),
        (False, torch.tensor([1.0, math.nan]), torch.tensor([math.nan, 1.0])),
        (False, (1, 2), (1, 2, 3)),
        (False, (1, 2), [1, 2]),
        (False, {"a": 1}, {"a": 1, "b": 1}),
        (False, torch.ones(2), 1.0),
    ],
)
def test_same_value(expected, a, b):
    assert expected == same_value(a, b)
    assert expected == same_value(b, a)


# Names and differences between ranks --------------------------------------------------------------


def two_names(other: float) -> memory.Memory:
    names = {"model.net.module.w": 1.0, "model.module.net.w": other}
    return memory.stored(
        **{n: ((2,), [((0,), torch.full((2,), value))]) for n, value in names.items()}
    )


def test_two_saved_names_that_clean_to_one():
    """The first was taken in silence."""
    expected = r"model\.net\.w: the checkpoint has model\.net\.module\.w and model\.module\.net\.w"
    with pytest.raises(CheckpointError, match=expected):
        memory.load(two_names(3.0), [{"model": {"net.w": torch.zeros(2)}}], [Load({"net.w": (2,)})])


def test_one_of_two_saved_names_asked_for_as_it_is():
    state = {"module.net.w": torch.zeros(2)}
    memory.load(two_names(3.0), [{"model": state}], [Load(None)])
    assert [3.0, 3.0] == state["module.net.w"].tolist()


def replicas() -> list[Any]:
    return [Save({"w": (2,)}, grid=Grids.from_sizes(r, dp_replicate=2)) for r in range(2)]


def test_dtypes_that_differ_between_ranks_are_named():
    """It said only that a rank lacks the value."""
    states = [{"model": {"w": torch.ones(2, dtype=d)}} for d in (torch.bfloat16, torch.float32)]
    expected = r"model\.w: torch\.bfloat16 on rank 0 and torch\.float32 on rank 1\. Give"
    with pytest.raises(CheckpointError, match=expected):
        memory.save(states, replicas())


def test_kinds_of_a_scalar_that_differ_between_ranks_are_named():
    states = [{"optimizer": {"state": {"w": {"step": s}}}} for s in (torch.tensor(1.0), 1.0)]
    expected = r"w\.step: torch\.float32 of shape \(\) on rank 0 and a Python value on rank 1\. "
    with pytest.raises(CheckpointError, match=expected):
        memory.save(states, replicas())


def test_dtypes_of_a_tensor_without_a_layout_that_differ_are_named():
    mine, other = (
        StageManifest((), extras=(Extra(("ema",), "0f", dtype, (2,)),))
        for dtype in (torch.bfloat16, torch.float32)
    )
    expected = "ema: torch.bfloat16 here and torch.float32 there, and no layout explains it"
    assert expected == first_difference(mine, other)


def test_equal_mappings_in_another_order_are_equal():
    """Ranks that built one mapping in two orders counted as different."""
    planners = [Save(None, grid=Grids.from_sizes(r, dp_shard=2)) for r in range(2)]
    saved = memory.save([{"v": ({"a": 1, "b": 2},)}, {"v": ({"b": 2, "a": 1},)}], planners)
    assert ({"a": 1, "b": 2},) == saved.value("v")


def test_mappings_with_values_exchanged_are_not_equal():
    assert value_digest({"a": 1, "b": 2}) != value_digest({"a": 2, "b": 1})
