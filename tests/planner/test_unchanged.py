"""An unchanged state dict reuses its plan; whatever changes in it is noticed."""

import copy
import pickle

import memory
import pytest
import torch

from shardplan.layouts import FSDPFlatBuffer, Grids, SwiGLU
from shardplan.planner import CheckpointError, LayoutAwareSavePlanner, LayoutError
from shardplan.planner.save import write_plan


@pytest.fixture
def plans(monkeypatch):
    """One entry for each time that a plan is made from nothing."""
    made: list[int] = []

    def counting(*args, **kwargs):
        made.append(1)
        return write_plan(*args, **kwargs)

    monkeypatch.setattr("shardplan.planner.save.write_plan", counting)
    return made


MODEL = {"a.linear_fc1.weight": (4, 2), "b.weight": (3,)}


def planner():
    return LayoutAwareSavePlanner(MODEL, layouts=[SwiGLU(["*.linear_fc1.weight"])])


def state(value=1.0):
    def tensor(shape):
        return torch.full(shape, value)

    return {
        "model": {name: tensor(shape) for name, shape in MODEL.items()},
        "optimizer": {
            "state": {
                name: {"exp_avg": tensor(shape), "step": torch.tensor(value)}
                for name, shape in MODEL.items()
            },
            "param_groups": [
                {"lr": value, "params": ["a.linear_fc1.weight"]},
                {"lr": -value, "params": ["b.weight"]},
            ],
        },
        "args": {"seeds": [1, 2], "nested": [{"x": 1}, {"x": torch.full((2,), value)}]},
        "iteration": int(value),
    }


def everything(checkpoint):
    """All that is in a checkpoint, by key."""
    found = {}
    for (key, offset), data in checkpoint.data.items():
        found[key, offset] = checkpoint.value(key) if offset is None else data.tolist()
    return found


def test_unchanged_plan_is_reused_with_new_values(plans):
    """New tensors of the same form: the same plan, the second values."""
    saver = planner()
    memory.save([state(1.0)], [saver])
    second = memory.save([state(2.0)], [saver])
    assert 1 == len(plans)
    assert everything(memory.save([state(2.0)], [planner()])) == everything(second)
    assert 2.0 == second.value("optimizer.param_groups.0.lr")
    assert -2.0 == second.value("optimizer.param_groups.1.lr")
    assert 2 == second.value("iteration")
    assert [2.0] * 3 == second.tensor("model.b.weight").tolist()


def changed(change):
    found = state(2.0)
    change(found)
    return found


def group(number):
    return lambda s: s["optimizer"]["param_groups"][number]


CHANGES = {
    "a key more": lambda s: s["model"].update(extra=torch.ones(1)),
    "a key less": lambda s: s["model"].pop("b.weight"),
    "another key": lambda s: s["args"].update(seed=s["args"].pop("seeds")),
    "a slot more": lambda s: s["optimizer"]["state"]["b.weight"].update(m=torch.ones(3)),
    "a slot less": lambda s: s["optimizer"]["state"]["b.weight"].pop("exp_avg"),
    "another order": lambda s: s["model"].update(
        {"a.linear_fc1.weight": s["model"].pop("a.linear_fc1.weight")}
    ),
    "another dtype": lambda s: s["model"].update({"b.weight": torch.ones(3).double()}),
    "another step": lambda s: s["optimizer"]["state"]["b.weight"].update(step=torch.ones(1)),
    "a step as a number": lambda s: s["optimizer"]["state"]["b.weight"].update(step=2.0),
    "another shape of an extra": lambda s: s["args"]["nested"][1].update(x=torch.ones(3)),
    "a tensor in place of a number": lambda s: s.update(iteration=torch.tensor(2)),
    "a mapping in place of a number": lambda s: s.update(iteration={"n": 2}),
    "a number in place of a mapping": lambda s: s.update(args=3),
    "an empty mapping": lambda s: s.update(args={}),
    "a tensor in a list of numbers": lambda s: s["args"].update(seeds=[1, torch.ones(1)]),
    "a longer list with structure": lambda s: s["args"]["nested"].append({"x": 1}),
    "a mapping in a list of mappings": lambda s: s["args"]["nested"][0].update(x={"y": 1}),
    "a parameter in another group": lambda s: (
        group(0)(s)["params"].append("b.weight"),
        group(1)(s)["params"].clear(),
    ),
    "groups the other way round": lambda s: s["optimizer"]["param_groups"].reverse(),
    "an option more": lambda s: group(0)(s).update(betas=(0.9, 0.99)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_form_is_noticed(plans, change):
    saver = planner()
    memory.save([state(1.0)], [saver])
    found = memory.save([changed(CHANGES[change])], [saver])
    assert 2 == len(plans), "the old plan was used"
    assert everything(memory.save([changed(CHANGES[change])], [planner()])) == everything(found)


def test_a_changed_shape_is_refused_not_written(plans):
    saver = planner()
    memory.save([state(1.0)], [saver])
    bad = state(2.0)
    bad["model"]["b.weight"] = torch.ones(4)
    with pytest.raises(LayoutError, match=r"b\.weight: the tensor has 4 elements .* stores 3"):
        memory.save([bad], [saver])
    third = memory.save([state(3.0)], [saver])
    assert [3.0] * 3 == third.tensor("model.b.weight").tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(iteration=7),
        lambda s: group(0)(s).update(lr=0.5),
        lambda s: s["args"].update(seeds=[3, 4, 5]),
    ],
)
def test_new_python_values_need_no_new_plan(plans, change):
    saver = planner()
    memory.save([state(1.0)], [saver])
    found = memory.save([changed(change)], [saver])
    assert 1 == len(plans)
    assert everything(memory.save([changed(change)], [planner()])) == everything(found)


def test_two_planners_share_nothing(plans):
    """The same class on the same keys with other shapes and grids: each has its own plan."""
    first = LayoutAwareSavePlanner({"w": (4,)}, layouts=[])
    second = LayoutAwareSavePlanner({"w": (6,)}, layouts=[])
    third = [
        LayoutAwareSavePlanner(
            {"w": (4,)},
            grid=Grids.from_sizes(rank, dp_shard=2),
            layouts=[FSDPFlatBuffer({"w": ((0, 3), (3, 4))})],
        )
        for rank in range(2)
    ]
    for _ in range(2):
        assert [0.0, 1.0, 2.0, 3.0] == memory.save([{"w": torch.arange(4.0)}], [first]).tensor(
            "w"
        ).tolist()
        assert 6 == memory.save([{"w": torch.arange(6.0)}], [second]).tensor("w").numel()
        parts = [{"w": torch.arange(3.0)}, {"w": torch.arange(3.0, 4.0)}]
        assert {("w", (0,)), ("w", (3,))} == set(memory.save(parts, third).data)
    assert 4 == len(plans)


def test_planners_pickle_and_copy(plans):
    """Process workers of `async_save` get a copy, before or after a save."""
    saver = planner()
    for _ in range(2):
        for twin in (pickle.loads(pickle.dumps(saver)), copy.deepcopy(saver)):
            found = memory.save([state(3.0)], [twin])
            assert [3.0] * 3 == found.tensor("model.b.weight").tolist()
        memory.save([state(1.0)], [saver])


def test_planning_twice_without_a_state_dict():
    saver = planner()
    memory.save([state(1.0)], [saver])
    with pytest.raises(CheckpointError, match="create_local_plan was called before set_up_planner"):
        saver.create_local_plan()
