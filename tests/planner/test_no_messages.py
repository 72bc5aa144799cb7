"""Planning sends nothing, and what DCP sends around it does not grow with the model."""

import functools
import inspect
import pickle
import types

import memory
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.utils as dcp_utils
import torch.distributed.distributed_c10d as c10d

from shardplan.layouts import (
    BufferDescription,
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
    SwiGLU,
    TensorParallel,
)
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

# What a planner may ask of torch.distributed: nothing is sent.
QUESTIONS = {"is_available", "is_initialized", "get_rank", "get_world_size"}


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions of torch.distributed that were called since."""
    recorded: list[str] = []

    def recording(name, function):
        @functools.wraps(function)
        def record(*args, **kwargs):
            recorded.append(name)
            return function(*args, **kwargs)

        return record

    replaced = 0
    for module in (dist, c10d):
        for name in dir(module):
            function = vars(module).get(name)
            if name.startswith("_") or type(function) is not types.FunctionType:
                continue
            monkeypatch.setattr(module, name, recording(name, function))
            replaced += 1
    for method in (
        "allreduce",
        "allgather",
        "broadcast",
        "barrier",
        "send",
        "recv",
        "gather",
        "scatter",
    ):
        monkeypatch.setattr(
            c10d.ProcessGroup, method, recording(method, getattr(c10d.ProcessGroup, method))
        )
    assert replaced > 80
    return recorded


def shapes(layers):
    found = {"embedding.weight": (12, 4)}
    for i in range(layers):
        found |= {
            f"layers.{i}.linear_fc1.weight": (8, 4),
            f"layers.{i}.linear_fc2.weight": (4, 4),
            f"layers.{i}.experts.linear_fc1.weight0": (4, 4),
            f"layers.{i}.norm.weight": (4,),
        }
    return found


def ranks(kind, layers=2, tp=2):
    """Ranks with flat buffers, tensor and expert parallelism; two a tensor-parallel rank."""
    found, described = [], shapes(layers)
    for rank in range(2 * tp):
        grid = Grids.from_sizes(rank, dp_shard=2, tp=tp, ep=2, etp=1)
        dense = {k: v for k, v in described.items() if "experts" not in k}
        experts = {k: v for k, v in described.items() if "experts" in k}
        buffers = [BufferDescription(dense, 2), BufferDescription(experts, tp)]
        layouts = [
            FSDPFlatBuffer(buffers=buffers),
            SwiGLU(["*linear_fc1.weight*"]),
            TensorParallel({"*.linear_fc1.weight": 0, "*.linear_fc2.weight": 1}),
            ExpertGrid(2),
        ]
        found.append(kind(described, grid=grid, layouts=layouts))
    return found


def states(planners):
    found = []
    for rank, planner in enumerate(planners):
        layouts = planner._table.chunks[0].layouts
        grids = planner._table.grids
        model = {
            fqn: torch.full((layout.storage.numel(grids.of(layout.family)),), float(rank))
            for fqn, layout in layouts.items()
        }
        state = {
            fqn: {"exp_avg": tensor.clone(), "step": torch.tensor(1.0)}
            for fqn, tensor in model.items()
            if tensor.numel()
        }
        groups = [{"lr": 0.1, "params": list(model)}]
        found.append(
            {"model": model, "optimizer": {"state": state, "param_groups": groups}, "n": 1}
        )
    return found


def test_planning_sends_nothing(calls):
    savers = ranks(LayoutAwareSavePlanner)
    held = states(savers)
    assert set(calls) <= QUESTIONS
    checkpoint = memory.save(held, savers)
    memory.save(held, savers)  # the unchanged plan
    memory.load(checkpoint, held, ranks(LayoutAwareLoadPlanner))
    assert [] == sorted(set(calls) - QUESTIONS)
    assert len(checkpoint.data) > 20


def test_planning_without_a_model_sends_nothing(calls):
    planner = LayoutAwareSavePlanner()
    checkpoint = memory.save([{"w": torch.ones(3), "n": 1}], [planner])
    memory.load(checkpoint, [{"w": torch.zeros(3), "n": 0}], [LayoutAwareLoadPlanner()])
    assert [] == sorted(set(calls) - QUESTIONS)


def test_a_call_would_be_recorded(calls, tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        dist.all_reduce(torch.ones(1))
        gathered = [None]
        c10d.all_gather_object(gathered, 1)
    finally:
        dist.destroy_process_group()
    assert {"all_reduce", "all_gather_object", "init_process_group"} <= set(calls)


# What DCP sends -----------------------------------------------------------------------------------


def messages(layers):
    """What each rank sends of its plan, and what the coordinator answers, pickled."""
    planners = ranks(LayoutAwareSavePlanner, layers, tp=1)
    sent = []
    for state, planner in zip(states(planners), planners, strict=True):
        planner.set_up_planner(state)
        sent.append(pickle.dumps(planner.create_local_plan()))
    replies, _ = planners[0].create_global_plan([pickle.loads(data) for data in sent])
    return sent, [pickle.dumps(reply) for reply in replies]


def test_plan_messages_do_not_grow_with_the_model():
    """100, 1,000 and 10,000 parameters: a message grows by one bit for each value at most."""
    sizes = {}
    for parameters in (100, 1000, 10_000):
        sent, replies = messages(parameters // 4)
        sizes[parameters] = [len(data) for data in sent], [len(data) for data in replies]
        count = parameters // 4 * 4 + 1
        assert sizes[parameters][0][0] > count * 10  # the stage's first rank sends its layouts
    (first, answers), (second, _), (third, most) = sizes.values()
    kinds = 4  # the parameters, exp_avg, step, and lr by name: one bit field each
    slack = kinds * 8  # a longer integer has a longer header
    assert second[1] <= first[1] + kinds * (900 // 8 + 1) + slack
    assert third[1] <= first[1] + kinds * (9900 // 8 + 1) + slack
    assert first[1] < 1200
    assert answers == most
    assert max(most) < 400


def test_load_plans_travel_empty():
    savers = ranks(LayoutAwareSavePlanner)
    held = states(savers)
    checkpoint = memory.save(held, savers)
    for state, planner in zip(held, ranks(LayoutAwareLoadPlanner), strict=True):
        planner.set_up_planner(state, checkpoint.metadata)
        plan = planner.create_local_plan()
        assert len(plan.items) > 10
        assert [] == pickle.loads(pickle.dumps(plan)).items
        assert len(pickle.dumps(plan)) < 200


@pytest.fixture
def one_process(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counted(monkeypatch, run):
    """The object collectives of DCP's own steps while something runs."""
    names: list[str] = []
    for name in (
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "all_gather_object",
    ):
        original = getattr(dist, name)

        def record(*args, _name=name, _original=original, **kwargs):
            names.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(dist, name, record)
    run()
    monkeypatch.undo()
    return names


def test_stock_save_makes_its_own_collectives_and_no_more(one_process, monkeypatch, tmp_path):
    """The same as with the stock planner, whatever the model holds."""
    assert "dist.gather_object" in inspect.getsource(dcp_utils)  # where DCP calls them
    model = {f"w{i}": torch.ones(4) for i in range(50)}

    def save(planner, name):
        return counted(
            monkeypatch,
            lambda: dcp.save({"model": model}, checkpoint_id=tmp_path / name, planner=planner),
        )

    stock = save(dcp.DefaultSavePlanner(), "stock")
    cuts = DTensorStorage({"w*": (Cut(0, "dp_shard"),)})
    own = LayoutAwareSavePlanner({name: (4,) for name in model}, layouts=[cuts])
    assert stock == save(own, "own") == save(own, "again")
    assert 4 == len(stock), stock
