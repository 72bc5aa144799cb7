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
