"""Optimizer states in every form that torch gives: by name, flattened, by integer."""

import copy
from typing import Any

import memory
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardplan.layouts import DEFAULT_LAYOUTS, FSDPFlatBuffer, Grids, Level
from shardplan.planner import CheckpointError, LayoutAwareLoadPlanner, LayoutAwareSavePlanner


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.frozen = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)
        self.unused = torch.nn.Parameter(torch.ones(5))  # trained, but never gets a gradient
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.frozen(self.first(x))))


def trained(seed: int, steps: int, kind: Any = torch.optim.AdamW, groups: int = 2):
    """A model and its optimizer after some steps, with two groups of their own options."""
    torch.manual_seed(seed)
    model = Model()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    weights = [p for n, p in named if n.endswith("weight")]
    others = [p for n, p in named if not n.endswith("weight")]
    options = [
        {"params": weights, "lr": 0.01 * (seed + 1)},
        {"params": others, "lr": 0.02 * (seed + 1), "weight_decay": 0.0},
    ]
    optimizer = kind(options if groups == 2 else [p for _, p in named], lr=0.05 * (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(
            equal(v, actual[k]) for k, v in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(expected) == len(actual) and all(map(equal, expected, actual))
    if isinstance(expected, torch.Tensor):
        return expected.dtype == actual.dtype and torch.equal(expected, actual)
    return type(expected) is type(actual) and expected == actual


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flattened"])
def test_state_dict_of_torch(options):
    """`get_optimizer_state_dict`, into a model that was never trained."""
    model, optimizer = trained(0, 3)
    checkpoint = memory.save(
        [{"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}],
        [LayoutAwareSavePlanner(model)],
    )
    assert checkpoint.metadata is not None
    keys = checkpoint.metadata.state_dict_metadata
    assert "optimizer.state.first.weight.exp_avg" in keys
    assert not any("frozen" in key for key in keys)
    other, fresh = trained(1, 1)
    state = {"optimizer": get_optimizer_state_dict(other, fresh, options=options)}
    memory.load(checkpoint, [state], [LayoutAwareLoadPlanner(other)])
    assert equal(get_optimizer_state_dict(model, optimizer, options=options), state["optimizer"])
    lenient = StateDictOptions(strict=False, flatten_optimizer_state_dict=options is FLAT)
    set_optimizer_state_dict(other, fresh, state["optimizer"], options=lenient)
    expected, found = optimizer.state_dict(), fresh.state_dict()
    found["state"].pop(2, None)  # torch makes one for the parameter that never had a gradient
    assert equal(expected, found)


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flattened"])
@pytest.mark.parametrize("writer", [DefaultSavePlanner, LayoutAwareSavePlanner])
def test_stock_and_own_planners_read_each_other(options, writer):
    model, optimizer = trained(0, 2)
    own = writer is LayoutAwareSavePlanner
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    expected = copy.deepcopy(state)
    checkpoint = memory.save([state], [writer(model) if own else writer()])
    other, fresh = trained(1, 1)
    found = {"optimizer": get_optimizer_state_dict(other, fresh, options=options)}
    reader = DefaultLoadPlanner() if own else LayoutAwareLoadPlanner(other)
    memory.load(checkpoint, [found], [reader])
    assert equal(expected, found)


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("writer", [DefaultSavePlanner, LayoutAwareSavePlanner])
@pytest.mark.parametrize("wrap", [lambda s: {"optimizer": s}, lambda s: s], ids=["section", "top"])
def test_a_list_of_groups_loads_into_the_flattened_form(wrap, writer, given):
    model, optimizer = trained(0, 2)
    listed = wrap(get_optimizer_state_dict(model, optimizer))
    own = writer is LayoutAwareSavePlanner and given
    checkpoint = memory.save([listed], [writer(model) if own else writer()])
    expected = wrap(get_optimizer_state_dict(model, optimizer, options=FLAT))
    other, fresh = trained(1, 1)
    found = wrap(get_optimizer_state_dict(other, fresh, options=FLAT))
    planner = LayoutAwareLoadPlanner(other if given else None)
    memory.load(checkpoint, [found], [planner])
    assert equal(expected, found)
    assert [] == planner.report.missing == planner.report.unexpected


def listed(*groups):
    """A checkpoint with groups that are listed, and a model's shapes for it."""
    names = [name for group in groups for name in group["params"]]
    state = {"state": {n: {"m": torch.ones(2)} for n in names}, "param_groups": list(groups)}
    shapes = dict.fromkeys(("a", "b.c", "d"), (2,))
    return memory.save([{"optim": state}], [LayoutAwareSavePlanner()]), shapes


def flat_load(checkpoint, shapes, options, **given):
    state = {f"state.{name}.m": torch.zeros(2) for name in shapes}
    state |= {f"param_groups.{key}": value for key, value in options.items()}
    planner = LayoutAwareLoadPlanner(shapes, **given)
    memory.load(checkpoint, [{"optim": state}], [planner])
    return state, planner.report


TWO_GROUPS = (
    {"params": ["a", "b.c"], "lr": 0.25, "cfg": {"x": 1, "y.z": 2}, "betas": (0.5, 0.75)},
    {"params": ["d"], "lr": torch.tensor(0.125), "cfg": {"x": 3, "y.z": 4}, "betas": (0, 1)},
)


def test_options_of_every_kind_from_a_list_into_the_flattened_form():
    checkpoint, shapes = listed(*TWO_GROUPS)
    blank = {"a.lr": 0.0, "b.c.lr": torch.tensor(9.0), "d.lr": 0.0}
    blank |= {f"{n}.cfg.x": 0 for n in shapes} | {f"{n}.cfg.y.z": 0 for n in shapes}
    blank |= {f"{n}.betas": () for n in shapes}
    state, report = flat_load(checkpoint, shapes, blank)
    found = {k.removeprefix("param_groups."): v for k, v in state.items() if "groups" in k}
    assert {
        "a.lr": 0.25,
        "b.c.lr": torch.tensor(0.25),
        "d.lr": 0.125,
        **{"a.cfg.x": 1, "b.c.cfg.x": 1, "d.cfg.x": 3},
        **{"a.cfg.y.z": 2, "b.c.cfg.y.z": 2, "d.cfg.y.z": 4},
        **{"a.betas": (0.5, 0.75), "b.c.betas": (0.5, 0.75), "d.betas": (0, 1)},
    } == found
    assert [] == report.missing


def test_an_option_that_no_saved_group_has_is_missing():
    checkpoint, shapes = listed(*TWO_GROUPS)
    with pytest.raises(CheckpointError, match=r"^optim\.param_groups\.a\.foreach: not in the"):
        flat_load(checkpoint, shapes, {"a.foreach": True, "a.lr": 0.0})
    state, report = flat_load(checkpoint, shapes, {"a.foreach": True, "a.lr": 0.0}, strict=False)
    assert ["optim.param_groups.a.foreach"] == report.missing
    assert (True, 0.25) == (state["param_groups.a.foreach"], state["param_groups.a.lr"])


def test_one_tensor_for_two_parameters_of_groups_with_different_rates():
    checkpoint, shapes = listed(*TWO_GROUPS)
    rate = torch.tensor(0.0)
    state, _ = flat_load(checkpoint, shapes, {"a.lr": rate, "b.c.lr": rate})
    assert 0.25 == state["param_groups.a.lr"].item() == rate.item()
    with pytest.raises(CheckpointError, match=r"d\.lr: saved as .*0\.125.*, but .*a\.lr as 0\.25"):
        flat_load(checkpoint, shapes, {"a.lr": rate, "d.lr": rate})
    flat_load(checkpoint, shapes, {"a.lr": rate, "d.lr": torch.tensor(0.0)})  # as the error says


@pytest.mark.parametrize("model", [{"a": (2,), "b": (2,)}, None], ids=["model", "no model"])
def test_one_tensor_for_two_parameters_whose_rates_were_saved_apart(model):
    def state(a, b):
        rates = {"param_groups.a.lr": a, "param_groups.b.lr": b}
        return {"optim": {"state.a.m": torch.ones(2), "state.b.m": torch.ones(2), **rates}}

    def load(saved, live):
        checkpoint = memory.save([saved], [LayoutAwareSavePlanner(model)])
        memory.load(checkpoint, [live], [LayoutAwareLoadPlanner(model)])

    for kind in (torch.tensor, float):
        rate = torch.tensor(0.0)
        load(state(kind(0.5), kind(0.5)), state(rate, rate))
        assert 0.5 == rate.item()
        with pytest.raises(
            CheckpointError, match=r"optim\.param_groups\.[ab]\.lr.* both now|they sh"
        ):
            load(state(kind(0.25), kind(0.5)), state(rate, rate))
        apart = state(torch.tensor(0.0), torch.tensor(0.0))  # as the error says
        load(state(kind(0.25), kind(0.5)), apart)
        assert 0.25 == apart["optim"]["param_groups.a.lr"].item()


def test_a_list_of_numbers_does_not_load_into_the_flattened_form_by_itself():
    _, optimizer = trained(0, 1, torch.optim.SGD)  # without momentum: groups, and no state
    checkpoint = memory.save([{"optim": optimizer.state_dict()}], [DefaultSavePlanner()])
    other, fresh = trained(1, 1, torch.optim.SGD)
    state = {"optim": get_optimizer_state_dict(other, fresh, options=FLAT)}
    with pytest.raises(CheckpointError, match=r"optim\.param_groups\.\d\.params: .* numbers the"):
        memory.load(checkpoint, [state], [LayoutAwareLoadPlanner(other)])
    raw = {"optim": fresh.state_dict()}  # as the error says
    memory.load(checkpoint, [raw], [LayoutAwareLoadPlanner(other, optimizer=fresh)])
    assert [0.01, 0.02] == [group["lr"] for group in raw["optim"]["param_groups"]]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_raw_state_dict(kind):
    """`optimizer.state_dict()` with the optimizer given: integers are names on disk."""
    model, optimizer = trained(0, 3, lambda p, lr: kind(p, lr=lr, **momentum(kind)))
    state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    planner = LayoutAwareSavePlanner(model, optimizer=optimizer)
    checkpoint = memory.save([state], [planner])
    assert checkpoint.metadata is not None
    slots = {key for key in checkpoint.metadata.state_dict_metadata if ".state." in key}
    assert any(key.startswith("optimizer.state.first.weight.") for key in slots)
    assert not any(part.isdigit() for key in slots for part in key.split("."))
    assert ["first.weight", "last.weight"] == checkpoint.value("optimizer.param_groups.0.params")
    other, fresh = trained(1, 1, lambda p, lr: kind(p, lr=lr, **momentum(kind)))
    found = {"optimizer": fresh.state_dict(), "model": other.state_dict()}
    memory.load(checkpoint, [found], [LayoutAwareLoadPlanner(other, optimizer=fresh)])
    fresh.load_state_dict(found["optimizer"])
    assert equal(optimizer.state_dict(), fresh.state_dict())
    assert equal(model.state_dict(), other.state_dict())


def momentum(kind):
    return {} if kind is torch.optim.AdamW else {"momentum": 0.9}


def test_raw_state_dict_with_parameters_in_another_order():
    """Names, not integers, say which state is whose."""
    model, optimizer = trained(0, 2)
    state = {"optimizer": optimizer.state_dict()}
    checkpoint = memory.save([state], [LayoutAwareSavePlanner(model, optimizer=optimizer)])
    other, _ = trained(1, 0)
    weights = [other.last.weight, other.first.weight]
    others = [other.unused, other.last.bias, other.first.bias]
    fresh = torch.optim.AdamW([{"params": others, "lr": 0.5}, {"params": weights, "lr": 0.25}])
    for p in (*weights, other.last.bias, other.first.bias):
        p.grad = torch.ones_like(p)
    fresh.step()
    found = {"optimizer": fresh.state_dict()}
    memory.load(checkpoint, [found], [LayoutAwareLoadPlanner(other, optimizer=fresh)])
    loaded = found["optimizer"]
    assert torch.equal(optimizer.state[model.last.weight]["exp_avg"], loaded["state"][3]["exp_avg"])
    assert torch.equal(optimizer.state[model.first.bias]["exp_avg"], loaded["state"][2]["exp_avg"])
    assert [0.02, 0.01] == [group["lr"] for group in loaded["param_groups"]]
    assert [0.0, 0.01] == [group["weight_decay"] for group in loaded["param_groups"]]
    assert [[0, 1, 2], [3, 4]] == [group["params"] for group in loaded["param_groups"]]


@pytest.mark.parametrize("names", [False, True])
def test_raw_state_dict_without_the_optimizer(names):
    """The order of an optimizer's numbers is not guessed; torch's own `param_names` tell it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.named_parameters() if names else model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    planner = LayoutAwareSavePlanner(model)
    if names:
        checkpoint = memory.save([state], [planner])
        saved = checkpoint.tensor("optimizer.state.bias.exp_avg")
        assert torch.equal(optimizer.state[model.bias]["exp_avg"], saved)
        return
    text = r"parameter number 0 of the optimizer has no known name\. Pass optimizer="
    with pytest.raises(CheckpointError, match=text):
        memory.save([state], [planner])


def test_state_that_was_never_made():
    """A frozen parameter has no state, one without a gradient none yet; loads report, not hang."""
    model, optimizer = trained(0, 2)
    state = {"optimizer": optimizer.state_dict()}
    assert 5 == sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
    assert 4 == len(state["optimizer"]["state"])
    checkpoint = memory.save([state], [LayoutAwareSavePlanner(model, optimizer=optimizer)])
    other, fresh = trained(1, 0)
    for p in other.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    fresh.step()
    found = {"optimizer": fresh.state_dict()}
    assert 5 == len(found["optimizer"]["state"])
    kept = fresh.state[other.unused]["exp_avg"].clone()
    planner = LayoutAwareLoadPlanner(other, optimizer=fresh)
    with pytest.raises(
        CheckpointError, match=r"optimizer\.state\.unused\.exp_avg: not in the checkpoint"
    ):
        memory.load(checkpoint, [found], [planner])
    planner = LayoutAwareLoadPlanner(other, optimizer=fresh, strict=False)
    memory.load(checkpoint, [found], [planner])
    assert [f"optimizer.state.unused.{slot}" for slot in ("step", "exp_avg", "exp_avg_sq")] == (
        planner.report.missing
    )
    assert torch.equal(kept, fresh.state[other.unused]["exp_avg"])
    assert torch.equal(
        optimizer.state[model.last.bias]["exp_avg"], fresh.state[other.last.bias]["exp_avg"]
    )


# Sharded otherwise than the parameter -------------------------------------------------------------


def zero_ranks(kind, world_size, blank=False):
    """ZeRO: every rank has whole parameters, and a flat slice of their optimizer state."""
    shapes = {"a": (3, 4), "b": (5,)}
    full = {
        name: torch.arange(float(torch.Size(s).numel())) + 100 * i
        for i, (name, s) in enumerate(shapes.items())
    }
    each = {name: -(-tensor.numel() // world_size) for name, tensor in full.items()}
    ranges = {
        name: [
            (min(r * each[name], t.numel()), min((r + 1) * each[name], t.numel()))
            for r in range(world_size)
        ]
        for name, t in full.items()
    }
    layouts = [p for p in DEFAULT_LAYOUTS if p.level is not Level.STORAGE]
    planners = [
        kind(
            shapes,
            grid=Grids.from_sizes(rank, dp_shard=world_size),
            layouts=layouts,
            optimizer_layouts=[FSDPFlatBuffer(ranges)],
        )
        for rank in range(world_size)
    ]
    states = []
    for rank in range(world_size):
        model = {n: t.view(shapes[n]).clone() for n, t in full.items()}
        state = {
            n: {"exp_avg": full[n][slice(*ranges[n][rank])] + 0.5, "step": torch.tensor(3.0)}
            for n in full
            if ranges[n][rank][0] < ranges[n][rank][1]
        }
        states.append({"model": model, "optimizer": {"state": state}})
    if blank:
        for state in states:
            for tensor in [
                *state["model"].values(),
                *(t for s in state["optimizer"]["state"].values() for t in s.values()),
            ]:
                tensor.fill_(-1)
    return states, planners


@pytest.mark.parametrize("target", [1, 2, 3, 7])
@pytest.mark.parametrize("source", [1, 2, 3, 7])
def test_optimizer_state_as_flat_shards(source, target):
    """Tensors laid out as flat shards of their parameter, at any world size."""
    checkpoint = memory.save(*zero_ranks(LayoutAwareSavePlanner, source))
    assert torch.equal(
        torch.arange(12.0).view(3, 4) + 0.5, checkpoint.tensor("optimizer.state.a.exp_avg")
    )
    states, planners = zero_ranks(LayoutAwareLoadPlanner, target, blank=True)
    memory.load(checkpoint, states, planners)
    assert equal(zero_ranks(LayoutAwareLoadPlanner, target)[0], states)
