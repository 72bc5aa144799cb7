"""Checkpoints of a raw `optimizer.state_dict()`, whose parameters are numbers, loaded by name.

Expected values are those of the optimizer that was saved, or written out.
"""

from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    MissingKeyError,
    SafetensorsWriter,
    ShapeMismatchError,
)
from shardplan.planner.checkpoints.reader import CheckpointReader

# The names of the model's parameters, in the order of `parameters()`.
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def build(kind="adamw", order=(0, 1, 2, 3), groups=(4,), start=1.0, steps=True):
    """Returns a model and its optimizer; slots are full of start + position among NAMES."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    own = list(model.parameters())
    listed, parameters = [own[n] for n in order], []
    for number, size in enumerate(groups):
        parameters.append({"params": listed[:size], "lr": start / 8 / (number + 1)})
        listed = listed[size:]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(parameters),
        "sgd": lambda: torch.optim.SGD(parameters, momentum=0.5),
    }[kind]()
    for number, parameter in enumerate(own):
        if steps is True or number in steps:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for number, parameter in enumerate(own):
        for slot, value in optimizer.state.get(parameter, {}).items():
            value.fill_(start + number + 16 * (slot == "exp_avg_sq") + 32 * (slot == "step"))
    return model, optimizer


SECTIONS = {
    "optim": lambda raw: {"optim": raw},
    "nested": lambda raw: {"train": {"optimizer": raw}},
    "bare": lambda raw: raw,
    "lightning": lambda raw: {"optimizer_states": [raw]},
}


def save(state, path, how="dcp"):
    if how == "file":
        path.mkdir(exist_ok=True)
        torch.save(state, path / "c.ckpt")
    elif how == "own":
        writer = SafetensorsWriter(path, sync=False)
        dcp.save(state, storage_writer=writer, planner=LayoutAwareSavePlanner(), no_dist=True)
    else:
        dcp.save(state, storage_writer=FileSystemWriter(path, sync_files=False), no_dist=True)


def load(state, path, planner):
    file = path / "c.ckpt"
    reader = CheckpointReader(str(file if file.exists() else path))
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return planner.report


def refused(kind, *args):
    """Returns the text of the error that a load raises, which is of a kind."""
    with pytest.raises(CheckpointException) as caught:
        load(*args)
    (error,) = (error for error, _ in caught.value.failures.values())
    assert kind is type(error)
    return str(error)


def slots(optimizer, model, slot="exp_avg"):
    """Returns the first element of each parameter's slot, in the order of NAMES."""
    return [optimizer.state[p][slot].flatten()[0].item() for p in model.parameters()]


def untouched(optimizer, model):
    return [100.0, 101.0, 102.0, 103.0] == slots(optimizer, model)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("how", ["dcp", "file", "own"])
def test_the_live_optimizers_order_names_the_numbers(tmp_path, how, section):
    order = (2, 0, 3, 1)
    _, optimizer = build(order=order)
    save(SECTIONS[section](optimizer.state_dict()), tmp_path, how)
    model, live = build(order=order, start=100.0)
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    raw = live.state_dict()
    report = load(SECTIONS[section](raw), tmp_path, planner)
    live.load_state_dict(raw)
    assert [1.0, 2.0, 3.0, 4.0] == slots(live, model)
    assert [17.0, 18.0, 19.0, 20.0] == slots(live, model, "exp_avg_sq")
    assert [33.0, 34.0, 35.0, 36.0] == slots(live, model, "step")
    assert 1 / 8 == live.param_groups[0]["lr"]
    assert [] == report.missing == report.unexpected
    before = {"optim": "optim.", "nested": "train.optimizer.", "bare": ""}.get(
        section, "optimizer_states.0."
    )
    assert {
        f"{before}state.{number}.{slot}": f"{before}state.{NAMES[position]}.{slot}"
        for number, position in enumerate(order)
        for slot in ("exp_avg", "exp_avg_sq", "step")
    } == report.numbered
    assert "12 numbered" in str(report)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_a_live_state_by_name_loads_it_too(tmp_path, flat):
    order, groups = (2, 0, 3, 1), (1, 3)
    _, optimizer = build(order=order, groups=groups)
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(order=order, groups=groups, start=100.0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, live, options=options)
    load({"optim": state}, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    for position, name in enumerate(NAMES):
        found = state[f"state.{name}.exp_avg"] if flat else state["state"][name]["exp_avg"]
        assert {1.0 + position} == set(found.flatten().tolist())
    if flat:
        rates = [state[f"param_groups.{name}.lr"] for name in NAMES]
        assert [1 / 16, 1 / 16, 1 / 8, 1 / 16] == rates
    else:
        assert [1 / 8, 1 / 16] == [group["lr"] for group in state["param_groups"]]


def test_several_groups_come_back_each_at_its_place(tmp_path):
    _, optimizer = build(groups=(1, 2, 1))
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(groups=(1, 2, 1), start=100.0)
    raw = live.state_dict()
    load({"optim": raw}, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    assert [1 / 8, 1 / 16, 1 / 24] == [group["lr"] for group in raw["param_groups"]]
    assert [[0], [1, 2], [3]] == [group["params"] for group in raw["param_groups"]]
    assert [1.0, 2.0, 3.0, 4.0] == [raw["state"][n]["exp_avg"].flatten()[0] for n in range(4)]


def test_momentum_and_momentum_that_is_none(tmp_path):
    _, optimizer = build("sgd")
    raw = optimizer.state_dict()
    raw["state"][1]["momentum_buffer"] = None
    save({"optim": raw}, tmp_path)
    model, live = build("sgd", start=100.0)
    raw = live.state_dict()
    raw["state"][1]["momentum_buffer"] = raw["state"][2]["momentum_buffer"] = None
    load({"optim": raw}, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    assert raw["state"][1]["momentum_buffer"] is None
    assert torch.equal(torch.full((3, 5), 3.0), raw["state"][2]["momentum_buffer"])
    assert torch.equal(torch.full((5, 4), 1.0), raw["state"][0]["momentum_buffer"])


def test_numbers_may_be_text(tmp_path):
    _, optimizer = build()
    raw = optimizer.state_dict()
    raw["state"] = {str(number): slots for number, slots in raw["state"].items()}
    raw["param_groups"][0]["params"] = ["0", "1", "2", "3"]
    save({"optim": raw}, tmp_path)
    model, live = build(start=100.0)
    raw = live.state_dict()
    load({"optim": raw}, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    live.load_state_dict(raw)
    assert [1.0, 2.0, 3.0, 4.0] == slots(live, model)
    assert 1 / 8 == live.param_groups[0]["lr"]


def test_a_checkpoint_by_name_still_fills_a_numbered_state(tmp_path):
    model, optimizer = build(order=(2, 0, 3, 1))
    save({"optim": get_optimizer_state_dict(model, optimizer)}, tmp_path)
    model, live = build(order=(1, 3, 0, 2), start=100.0)
    raw = live.state_dict()
    report = load({"optim": raw}, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    live.load_state_dict(raw)
    assert [1.0, 2.0, 3.0, 4.0] == slots(live, model)
    assert {} == report.numbered


# Parameters that have not stepped --------------------------------------------------------------------------------------


def test_state_that_the_checkpoint_lacks_is_missing_under_both_names(tmp_path):
    _, optimizer = build(steps={0, 1, 3})
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(start=100.0)
    raw = live.state_dict()
    state = {"optim": raw}
    text = refused(MissingKeyError, state, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    assert (
        "optim.state.1.weight.exp_avg: not in the checkpoint, where it would be optim.state.2.exp_avg ("
    ) in text
    assert untouched(live, model)
    planner = LayoutAwareLoadPlanner(model, optimizer=live, strict=False)
    report = load(state, tmp_path, planner)
    assert [1.0, 2.0, 102.0, 4.0] == slots(live, model)
    assert [
        f"optim.state.1.weight.{s}" for s in ("step", "exp_avg", "exp_avg_sq")
    ] == report.missing


def test_state_that_the_live_optimizer_lacks_is_unexpected(tmp_path):
    _, optimizer = build()
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(start=100.0, steps={0, 1, 3})
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    report = load({"optim": live.state_dict()}, tmp_path, planner)
    assert {f"optim.state.2.{s}" for s in ("step", "exp_avg", "exp_avg_sq")} == set(
        report.unexpected
    )
    model, live = build(start=100.0, steps=())
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    text = refused(MissingKeyError, {"optim": live.state_dict()}, tmp_path, planner)
    assert text.startswith("optim.state: empty here, but the checkpoint has 12 values below it")


# What does not fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dcp", "file", "own"])
@pytest.mark.parametrize("names", [False, True], ids=["numbers", "names"])
def test_groups_of_other_sizes_are_refused_before_anything_is_filled(tmp_path, how, names):
    _, optimizer = build(groups=(1, 3))
    save({"optim": optimizer.state_dict()}, tmp_path, how)
    model, live = build(groups=(2, 2), start=100.0)
    state = {"optim": get_optimizer_state_dict(model, live) if names else live.state_dict()}
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    assert refused(CheckpointError, state, tmp_path, planner) == (
        "optim.param_groups.0: the checkpoint numbers the 1 parameters of this group, and the live "
        "optimizer's group at its place has 2. Build the optimizer with the groups that were saved."
    )
    assert untouched(live, model)


def test_groups_are_compared_also_where_the_state_dict_has_none(tmp_path):
    _, optimizer = build(groups=(1, 3))
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(groups=(2, 2), start=100.0)
    state = {"optim": {"state": get_optimizer_state_dict(model, live)["state"]}}
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    text = refused(CheckpointError, state, tmp_path, planner)
    assert text.startswith("optim.param_groups.0: the checkpoint numbers the 1 parameters")
    assert untouched(live, model)


@pytest.mark.parametrize(
    ("saved", "live", "text"),
    [
        ((4,), (2,), "optim.state.3: the checkpoint numbers at least 4 parameters, and the live optimizer has 2."),
        ((2,), (4,), "optim.state.1.weight.step: not in the checkpoint, where it would be optim.state.2.step"),
        ((4,), (2, 2), "optim.param_groups: the checkpoint has 1 groups of numbered parameters, and the live optimizer 2."),
        ((2, 2), (4,), "optim.param_groups: the checkpoint has 2 groups of numbered parameters, and the live optimizer 1."),
    ],
)  # fmt: skip
def test_another_number_of_parameters_or_groups_is_refused(tmp_path, saved, live, text):
    _, optimizer = build(groups=saved, steps=range(sum(saved)))
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(groups=live, start=100.0, steps=range(sum(live)))
    state, before = {"optim": live.state_dict()}, live.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(CheckpointException) as caught:
        load(state, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    assert text in str(caught.value)
    assert torch.equal(before, state["optim"]["state"][0]["exp_avg"])


def test_another_number_of_parameters_of_which_none_beyond_has_stepped(tmp_path):
    """Only the list of the group tells."""
    _, optimizer = build(steps={0, 1})
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(groups=(2,), start=100.0, steps={0, 1})
    state = {"optim": live.state_dict()}
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    text = refused(CheckpointError, state, tmp_path, planner)
    assert text.startswith(
        "optim.param_groups.0: the checkpoint numbers the 4 parameters of this group"
    )
    assert {100.0} == set(state["optim"]["state"][0]["exp_avg"].flatten().tolist())


def test_another_order_is_refused_where_shapes_tell(tmp_path):
    _, optimizer = build()
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(order=(2, 1, 0, 3), start=100.0)
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    text = refused(ShapeMismatchError, {"optim": live.state_dict()}, tmp_path, planner)
    assert "optim.state.0.exp_avg: the checkpoint has shape (5, 4), this model needs (3, 5)" in text
    assert (
        "Its number makes it optim.state.1.weight.exp_avg: build the optimizer with its parameters in "
        "the order in which they were saved."
    ) in text
    assert untouched(live, model)


def test_another_order_is_refused_where_the_saved_groups_have_names(tmp_path):
    def build_square(order, start):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        named = list(model.named_parameters())
        optimizer = torch.optim.AdamW([named[n] for n in order])
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for number, (_, parameter) in enumerate(named):
            optimizer.state[parameter]["exp_avg"].fill_(start + number)
        return model, optimizer

    _, optimizer = build_square((0, 1), 1.0)
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build_square((1, 0), 100.0)
    planner = LayoutAwareLoadPlanner(model, optimizer=live)
    text = refused(CheckpointError, {"optim": live.state_dict()}, tmp_path, planner)
    assert text == (
        "optim.param_groups.0: parameter number 0 is 0.weight in the checkpoint and 1.weight in the live "
        "optimizer. Build the optimizer with its parameters in the order in which they were saved."
    )
    assert [100.0, 101.0] == slots(live, model)
    model, live = build_square((0, 1), 100.0)
    state = {"optim": live.state_dict()}
    load(state, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    assert [1.0, 2.0] == slots(live, model)


@pytest.mark.parametrize("names", [False, True], ids=["numbers", "names"])
def test_without_the_optimizer_the_error_asks_for_it_and_that_works(tmp_path, names):
    _, optimizer = build()
    save({"optim": optimizer.state_dict()}, tmp_path)
    model, live = build(start=100.0)
    state = {"optim": get_optimizer_state_dict(model, live) if names else live.state_dict()}
    with pytest.raises(CheckpointException) as caught:
        load(state, tmp_path, LayoutAwareLoadPlanner(model))
    (error,) = (error for error, _ in caught.value.failures.values())
    assert isinstance(error, CheckpointError)
    assert "ass optimizer= to the planner" in str(error)
    assert untouched(live, model)
    load(state, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    found = state["optim"]["state"]
    assert [1.0, 2.0, 3.0, 4.0] == [slots["exp_avg"].flatten()[0] for slots in found.values()]


def test_a_name_that_is_a_number_is_not_taken_for_one(tmp_path):
    """The checkpoint is by name, and lacks a parameter whose number is another's name."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(2)])
    save({"optim": {"state": {"0": {"m": torch.ones(2)}}}}, tmp_path)
    state = {"optim": {"state": {name: {"m": torch.full((2,), 9.0)} for name in ("0", "1")}}}
    optimizer = torch.optim.SGD(list(model.parameters())[::-1])
    planner = LayoutAwareLoadPlanner(model, optimizer=optimizer, strict=False)
    report = load(state, tmp_path, planner)
    assert [1.0, 1.0] == state["optim"]["state"]["0"]["m"].tolist()
    assert [9.0, 9.0] == state["optim"]["state"]["1"]["m"].tolist()
    assert ["optim.state.1.m"] == report.missing
    assert {} == report.numbered


# Other models ------------------------------------------------------------------------------------------------------------


@pytest.mark.gloo
def test_dtensors_of_ranks_are_mapped_also_where_a_rank_stores_nothing(tmp_path):
    with ranks.started(2) as processes:
        for names in (False, True):
            path = str(tmp_path / str(names))
            for values, numbered in processes.run(
                "numbered_jobs:sharded_by_number", 2, path, names
            ):
                assert [{1.0}, {2.0}, {3.0}, {4.0}] == values
                assert "optim.state.1.weight.exp_avg" == numbered["optim.state.0.exp_avg"]


class Gated(nn.Module):
    """Its first projection is two tensors by name, `_w` and `_v`, and one by number."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=True)
        self.linear_fc1 = nn.Linear(4, 8, bias=False)


def test_components_are_filled_from_the_whole_tensor_that_has_the_number(tmp_path):
    saved = torch.arange(32.0).reshape(8, 4)
    group = {"params": [0], "lr": 0.25}
    save({"optim": {"state": {0: {"exp_avg": saved}}, "param_groups": [group]}}, tmp_path)
    model = nn.ModuleDict({"mlp": Gated()})
    planner = LayoutAwareSavePlanner(model)
    live = torch.optim.AdamW(model.parameters())
    by_name = {"mlp.linear_fc1.weight": {"exp_avg": torch.zeros(8, 4)}}
    save_named = {"optim": {"state": by_name}}
    writer = FileSystemWriter(tmp_path / "named", sync_files=False)
    dcp.save(save_named, storage_writer=writer, planner=planner, no_dist=True)
    stored = FileSystemReader(tmp_path / "named").read_metadata().state_dict_metadata
    assert {f"optim.state.mlp.linear_fc1.weight_{c}.exp_avg" for c in "wv"} == set(stored)
    load(save_named, tmp_path, LayoutAwareLoadPlanner(model, optimizer=live))
    assert torch.equal(saved, by_name["mlp.linear_fc1.weight"]["exp_avg"])


def test_a_wrapped_model_with_a_submodule_called_module(tmp_path):
    def make(start):
        model = nn.Module()
        model.module, model.norm = nn.Linear(2, 2, bias=False), nn.LayerNorm(2)
        wrapped = nn.DataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        for parameter in wrapped.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for number, parameter in enumerate(wrapped.parameters()):
            optimizer.state[parameter]["exp_avg"].fill_(start + number)
        return wrapped, optimizer

    _, optimizer = make(1.0)
    save({"optim": optimizer.state_dict()}, tmp_path)
    wrapped, live = make(100.0)
    planner = LayoutAwareLoadPlanner(wrapped, optimizer=live)
    report = load({"optim": live.state_dict()}, tmp_path, planner)
    assert [1.0, 2.0, 3.0] == slots(live, wrapped)
    assert "optim.state.module.weight.exp_avg" == report.numbered["optim.state.0.exp_avg"]
