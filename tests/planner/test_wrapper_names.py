"""Names with wrappers' tokens: a wrapper's go, a user's own submodule `module` keeps its name.

Expected keys and values are written out or come from stock DCP.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
    MissingKeyError,
    SafetensorsReader,
    SafetensorsWriter,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


class Own(nn.Module):
    """Its own child is called as a wrapper's."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3, bias=False)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.module(x))


class Both(nn.Module):
    """Two parameters of one shape whose names differ in `module` only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.module = nn.Linear(2, 2, bias=False)


class Precision(nn.Module):
    """A wrapper of a class that nobody knows."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


OWN = {"module.weight", "norm.weight", "norm.bias"}
WRAPPED = {
    "bare": lambda module: module,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "checkpoint": checkpoint_wrapper,
    "both": lambda module: nn.DataParallel(torch.compile(module)),
}


def number(model, start=1.0):
    """Gives each parameter a number of its own."""
    with torch.no_grad():
        for order, parameter in enumerate(model.parameters()):
            parameter.fill_(start + order)
    return model


def writer(path, own):
    return SafetensorsWriter(path, sync=False) if own else FileSystemWriter(path, sync_files=False)


def save(state, path, planner=None, own=False):
    dcp.save(state, storage_writer=writer(path, own), planner=planner, no_dist=True)


def load(state, path, planner=None, own=False):
    reader = SafetensorsReader(path) if own else FileSystemReader(path)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def refused(kind, call, *args):
    """Returns the text of the error that DCP carries, which is of a kind."""
    with pytest.raises(CheckpointException) as caught:
        call(*args)
    (error,) = (error for error, _ in caught.value.failures.values())
    assert kind is type(error)
    return str(error)


def keys(path):
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def values(model):
    return [parameter.detach().flatten()[0].item() for parameter in model.parameters()]


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("unwrapped_state", [False, True])
def test_only_the_wrappers_tokens_go_so_stock_loads_into_the_bare_model(
    tmp_path, wrapper, unwrapped_state
):
    wrapped = WRAPPED[wrapper](number(Own()))
    state = get_model_state_dict(wrapped) if unwrapped_state else wrapped.state_dict()
    save(state, tmp_path, LayoutAwareSavePlanner(wrapped))
    assert OWN == keys(tmp_path)
    bare = number(Own(), 50.0)
    load(bare.state_dict(), tmp_path)
    assert [1.0, 2.0, 3.0] == values(bare)


def test_a_state_dict_without_its_wrapper_is_found_by_the_wrapped_model(tmp_path):
    """And the other way round."""
    model = number(Own())
    save(model.state_dict(), tmp_path / "a", LayoutAwareSavePlanner(nn.DataParallel(model)))
    save(nn.DataParallel(model).state_dict(), tmp_path / "b", LayoutAwareSavePlanner(model))
    assert OWN == keys(tmp_path / "a") == keys(tmp_path / "b")


def test_without_a_model_keys_are_those_of_the_state_dict(tmp_path):
    state = nn.DataParallel(number(Own())).state_dict()
    save(state, tmp_path, LayoutAwareSavePlanner())
    assert {f"module.{key}" for key in OWN} == keys(tmp_path)


def test_an_unknown_wrappers_token_stays_as_it_does_for_stock(tmp_path):
    wrapped = Precision(number(Own()))
    save(wrapped.state_dict(), tmp_path, LayoutAwareSavePlanner(wrapped))
    assert {f"module.{key}" for key in OWN} == keys(tmp_path)
    other = Precision(number(Own(), 50.0))
    load(other.state_dict(), tmp_path)
    assert [1.0, 2.0, 3.0] == values(other)


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("own", [False, True], ids=["stock", "own"])
@pytest.mark.parametrize("to", [*WRAPPED, "unknown"])
@pytest.mark.parametrize("source", [*WRAPPED, "unknown"])
def test_any_wrapper_loads_from_any_other(tmp_path, source, to, own, given):
    wrapped = {**WRAPPED, "unknown": Precision}
    saved = wrapped[source](number(Own()))
    save({"model": saved.state_dict()}, tmp_path, LayoutAwareSavePlanner(), own)
    model = wrapped[to](number(Own(), 50.0))
    planner = LayoutAwareLoadPlanner(model if given else None)
    load({"model": model.state_dict()}, tmp_path, planner, own)
    assert [1.0, 2.0, 3.0] == values(model)
    assert [] == planner.report.missing == planner.report.unexpected


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_a_checkpoint_that_lost_the_users_name_still_loads(tmp_path, given):
    """As older releases wrote it."""
    state = {"weight": torch.ones(3, 2), "norm.weight": torch.ones(3), "norm.bias": torch.ones(3)}
    save(state, tmp_path)
    model = number(Own(), 50.0)
    load(model.state_dict(), tmp_path, LayoutAwareLoadPlanner(model if given else None))
    assert [1.0, 1.0, 1.0] == values(model)


@pytest.mark.parametrize("own", [False, True], ids=["stock", "own"])
def test_optimizer_state_keeps_the_users_name_too(tmp_path, own):
    def make(start):
        model = number(Own(), start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=start / 64)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for order, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["exp_avg"].fill_(start + order)
        return model, optimizer

    model, optimizer = make(1.0)
    state = {"optim": get_optimizer_state_dict(nn.DataParallel(model), optimizer)}
    save(state, tmp_path, LayoutAwareSavePlanner(nn.DataParallel(model)), own)
    if not own:
        slots = {f"optim.state.{name}.exp_avg" for name in OWN}
        assert slots == {key for key in keys(tmp_path) if key.endswith(".exp_avg")}
    for given in (True, False):
        other, live = make(50.0)
        state = {"optim": get_optimizer_state_dict(other, live)}
        load(state, tmp_path, LayoutAwareLoadPlanner(other if given else None), own)
        set_optimizer_state_dict(other, live, state["optim"])
        found = [live.state[p]["exp_avg"].flatten()[0].item() for p in other.parameters()]
        assert [1.0, 2.0, 3.0] == found
        assert 1 / 64 == live.param_groups[0]["lr"]


@pytest.mark.parametrize("form", ["list", "by name"])
def test_groups_of_a_checkpoint_that_lost_the_users_name(tmp_path, form):
    model = number(Own(), 50.0)
    names = ["weight", "norm.weight", "norm.bias"]
    if form == "list":
        saved = {"param_groups": [{"params": names, "lr": 0.25}]}
    else:
        saved = {"param_groups": {name: {"lr": 0.25} for name in names}}
    save({"optim": {"state": {name: {"m": torch.ones(1)} for name in names}, **saved}}, tmp_path)
    live = {name: {"m": torch.zeros(1)} for name in OWN}
    groups = [{"params": sorted(OWN), "lr": 1.0}]
    state = {"optim": {"state": live, "param_groups": groups}}
    load(state, tmp_path, LayoutAwareLoadPlanner(model))
    assert 0.25 == groups[0]["lr"]
    assert [1.0, 1.0, 1.0] == [slots["m"].item() for slots in live.values()]


# Two parameters whose names differ in a token only ------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("own", [False, True], ids=["stock", "own"])
def test_both_are_saved_and_come_back_each_as_itself(tmp_path, own, given):
    model = number(Both())
    save(model.state_dict(), tmp_path, LayoutAwareSavePlanner(model), own)
    if not own:
        assert {"weight", "module.weight"} == keys(tmp_path)
    other = number(Both(), 50.0)
    load(other.state_dict(), tmp_path, LayoutAwareLoadPlanner(other if given else None), own)
    assert [1.0, 2.0] == values(other)


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("only", ["weight", "module.weight"])
def test_one_that_the_checkpoint_lacks_is_not_filled_with_the_other(tmp_path, only, given):
    save({only: torch.ones(2, 2)}, tmp_path)
    model = number(Both(), 50.0)
    (lacking,) = {"weight", "module.weight"} - {only}
    planner = LayoutAwareLoadPlanner(model if given else None)
    text = refused(MissingKeyError, load, model.state_dict(), tmp_path, planner)
    assert text.startswith(f"{lacking}: not in the checkpoint")
    assert [50.0, 51.0] == values(model)
    planner = LayoutAwareLoadPlanner(model if given else None, strict=False)
    load(model.state_dict(), tmp_path, planner)
    assert [lacking] == planner.report.missing
    assert {only: 1.0, lacking: values(number(Both(), 50.0))[lacking == "module.weight"]} == {
        "weight": values(model)[0],
        "module.weight": values(model)[1],
    }


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_saved_wrapped_and_loaded_bare_is_refused_naming_both(tmp_path, given, strict):
    """`module.weight` is one parameter in the checkpoint and another in the model."""
    save(nn.DataParallel(number(Both())).state_dict(), tmp_path)
    model = number(Both(), 50.0)
    planner = LayoutAwareLoadPlanner(model if given else None, strict=strict)
    assert (
        "weight: the checkpoint has module.module.weight, which may be this key or module.weight: all "
        "are one name but for wrappers' tokens. Wrap the model as it was when it was saved, and load "
        "its state_dict() without model=."
    ) == refused(CheckpointError, load, model.state_dict(), tmp_path, planner)
    assert [50.0, 51.0] == values(model)
    load(nn.DataParallel(model).state_dict(), tmp_path, LayoutAwareLoadPlanner())  # the advice
    assert [1.0, 2.0] == values(model)


def test_a_wrapped_model_with_both_is_refused_at_save_and_the_advice_works(tmp_path):
    model = number(Both())
    wrapped = nn.DataParallel(model)
    planner = LayoutAwareSavePlanner(wrapped)
    text = refused(LayoutError, save, wrapped.state_dict(), tmp_path, planner)
    assert "the parameters weight and module.weight, which are both this name but for" in text
    save(wrapped.module.state_dict(), tmp_path, LayoutAwareSavePlanner(wrapped.module))
    assert {"weight", "module.weight"} == keys(tmp_path)


def test_two_stored_names_for_one_key_are_refused_naming_both(tmp_path):
    save({"module.w": torch.zeros(2), "_orig_mod.w": torch.ones(2)}, tmp_path)
    planner = LayoutAwareLoadPlanner()
    text = refused(CheckpointError, load, {"w": torch.zeros(2)}, tmp_path, planner)
    assert text.startswith("w: the checkpoint has module.w and _orig_mod.w, which are both")


def test_a_value_beside_the_model_is_not_taken_for_the_users_submodule(tmp_path):
    model = number(Own())
    state = {"model": model.state_dict(), "weight": torch.full((4,), 7.0)}
    save(state, tmp_path, LayoutAwareSavePlanner(model))
    assert {"weight", *(f"model.{name}" for name in OWN)} == keys(tmp_path)
    state = {"model": number(Own(), 9.0).state_dict(), "weight": torch.zeros(4)}
    load(state, tmp_path, LayoutAwareLoadPlanner(model))
    assert [7.0] * 4 == state["weight"].tolist()
    assert 1.0 == state["model"]["module.weight"][0, 0].item()


def test_a_copy_under_a_wrappers_name_that_nothing_asks_for_is_unexpected(tmp_path):
    save({"weight": torch.ones(2, 2), "module.weight": torch.ones(2, 2)}, tmp_path)
    model = nn.Linear(2, 2, bias=False)
    planner = LayoutAwareLoadPlanner(model)
    load(model.state_dict(), tmp_path, planner)
    assert ["module.weight"] == planner.report.unexpected
