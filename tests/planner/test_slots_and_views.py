"""Views of storage, DTensors placed otherwise, scalar slots, and what a failed plan leaves behind."""

import contextlib
import math

import memory
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import (
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
    TensorParallel,
)
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
    UnstorableValueError,
)

Save, Load = LayoutAwareSavePlanner, LayoutAwareLoadPlanner


def test_strided_flat_shard_is_saved_right():
    """exp_avg and exp_avg_sq interleaved in one buffer: each a 1-D view of stride 2."""
    buffer = torch.stack([torch.arange(24.0), torch.arange(24.0) + 100], 1)
    state = {"optimizer": {"state": {"w": {"exp_avg": buffer[:, 0], "exp_avg_sq": buffer[:, 1]}}}}
    layouts = [FSDPFlatBuffer({"w": ((0, 24),)})]
    saved = memory.save([state], [Save({"w": (4, 6)}, layouts=layouts)])
    expected = torch.arange(24.0).view(4, 6)
    assert expected.tolist() == saved.tensor("optimizer.state.w.exp_avg").tolist()
    assert (expected + 100).tolist() == saved.tensor("optimizer.state.w.exp_avg_sq").tolist()


def test_expanded_flat_shard_is_saved_right():
    """A lazily made state: one zero expanded to the shard's length (stride 0)."""
    state = {"model": {"w": torch.full((1,), 3.0).expand(4)}}
    layouts = [FSDPFlatBuffer({"w": ((0, 4),)})]
    saved = memory.save([state], [Save({"w": (2, 2)}, layouts=layouts)])
    assert [[3.0, 3.0], [3.0, 3.0]] == saved.tensor("model.w").tolist()


@contextlib.contextmanager
def rank_of(names, sizes, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


FULL = torch.arange(32.0).view(8, 4)


def sharded(mesh, rank):
    return DTensor.from_local(
        FULL[rank * 4 : rank * 4 + 4].clone(), mesh, [Shard(0)], run_check=False
    )


def replicated(mesh, rank):
    return DTensor.from_local(FULL.clone(), mesh, [Replicate()], run_check=False)


def by_columns(mesh, rank):
    part = FULL[:, rank * 2 : rank * 2 + 2].contiguous()
    return DTensor.from_local(part, mesh, [Shard(1)], run_check=False)


@pytest.mark.parametrize(
    ("parameter", "state"),
    [(replicated, sharded), (sharded, replicated), (sharded, by_columns), (None, sharded)],
    ids=["zero-state-of-replica", "replica-of-shard", "columns-of-rows", "model-by-shapes"],
)
def test_dtensor_placed_otherwise_than_its_parameter(parameter, state):
    """The values are the state's, and the metadata names what was written."""
    planners, states = [], []
    for rank in range(2):
        with rank_of(("dp_shard",), (2,), rank) as mesh:
            model = torch.nn.Module()
            model.w = torch.nn.Parameter((parameter or state)(mesh, rank))
            planners.append(
                Save(model if parameter else {"w": (8, 4)}, grid=Grids.from_sizes(rank, dp_shard=2))
            )
            states.append({"ema": {"w": state(mesh, rank)}})
    saved = memory.save(states, planners)
    assert torch.equal(FULL, saved.tensor("ema.w"))
    chunks = saved.metadata.state_dict_metadata["ema.w"].chunks
    listed = {(tuple(c.offsets), tuple(c.sizes)) for c in chunks}
    written = {(offset, tuple(data.shape)) for (_, offset), data in saved.data.items()}
    assert written == listed


def lr_state(rank, swapped):
    a, b = f"a{rank}", f"b{rank}"
    groups = [{"lr": 0.1, "params": [a]}, {"lr": 0.2, "params": [b]}]
    if swapped:
        groups = [{"lr": 0.1, "params": [b]}, {"lr": 0.2, "params": [a]}]
    state = {name: {"m": torch.ones(2)} for name in (a, b)}
    return {"optimizer": {"state": state, "param_groups": groups}}


def stage_planners():
    return [Save({f"a{r}": (2,), f"b{r}": (2,)}, grid=Grids.from_sizes(r, pp=2)) for r in range(2)]


def test_parameters_that_change_groups_with_pipeline_stages():
    planners = stage_planners()
    memory.save([lr_state(r, False) for r in range(2)], planners)
    saved = memory.save([lr_state(r, True) for r in range(2)], planners)
    found = {k: saved.value(f"optimizer.param_groups.{k}.lr") for k in ("a0", "b0", "a1", "b1")}
    assert {"a0": 0.2, "b0": 0.1, "a1": 0.2, "b1": 0.1} == found


def test_param_names_that_change_with_the_same_numbers():
    def state(names):
        values = {0: {"m": torch.full((2,), 0.0)}, 1: {"m": torch.full((2,), 1.0)}}
        groups = [{"lr": 1.0, "params": [0, 1], "param_names": names}]
        return {"optimizer": {"state": values, "param_groups": groups}}

    planner = Save({"a": (2,), "b": (2,)})
    memory.save([state(["a", "b"])], [planner])
    saved = memory.save([state(["b", "a"])], [planner])
    assert [1.0, 1.0] == saved.tensor("optimizer.state.a.m").tolist()
    assert [0.0, 0.0] == saved.tensor("optimizer.state.b.m").tolist()


def test_failed_plan_leaves_the_next_save_right():
    """Form A is saved, form B fails while planning, form A is saved again: as the first time."""

    def good(value):
        state = {0: {"m": torch.full((2,), value)}, 1: {"m": torch.full((2,), value + 1)}}
        groups = [{"lr": value, "params": [0, 1], "param_names": ["a", "b"]}]
        return {"optimizer": {"state": state, "param_groups": groups}}

    planner = Save({"a": (2,), "b": (2,)})
    memory.save([good(1.0)], [planner])
    with pytest.raises(LayoutError):
        memory.save([{"model": {"a": torch.ones(2), "b": torch.ones(5)}}], [planner])
    saved = memory.save([good(5.0)], [planner])
    assert [5.0, 5.0] == saved.tensor("optimizer.state.a.m").tolist()
    assert ["a", "b"] == saved.value("optimizer.param_groups.0.params")


def test_failed_plan_does_not_move_learning_rates():
    """Groups [a, b], [c]; the form that fails has [a], [b, c] and a tensor without data."""

    def state(rank, first, device="cpu"):
        names = [f"{name}{rank}" for name in "abc"]
        groups = [{"lr": 0.1, "params": names[:first]}, {"lr": 0.2, "params": names[first:]}]
        slots = {name: {"m": torch.ones(2, device=device)} for name in names}
        return {"optimizer": {"state": slots, "param_groups": groups}}

    planners = [
        Save({f"{name}{r}": (2,) for name in "abc"}, grid=Grids.from_sizes(r, pp=2))
        for r in range(2)
    ]
    memory.save([state(r, 2) for r in range(2)], planners)
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state(rank, 1, device="meta"))
        with pytest.raises(UnstorableValueError):
            planner.create_local_plan()
    saved = memory.save([state(r, 2) for r in range(2)], planners)
    found = {k: saved.value(f"optimizer.param_groups.{k}.lr") for k in ("a0", "b0", "c0")}
    assert {"a0": 0.1, "b0": 0.1, "c0": 0.2} == found


def nadam(numel, product):
    slots = {"m": torch.ones(numel), "mu_product": torch.tensor(product), "step": torch.tensor(1.0)}
    return {"optimizer": {"state": {"A": slots}}}


def test_scalar_slot_of_a_parameter_with_one_element_a_rank():
    """A_log of two heads over tp=2; NAdam's mu_product is a number, not a shard of two."""
    layouts = [TensorParallel({"A": 0})]
    planners = [
        Save({"A": (1,)}, grid=Grids.from_sizes(r, tp=2), layouts=layouts) for r in range(2)
    ]
    saved = memory.save([nadam(1, 0.5), nadam(1, 0.5)], planners)
    assert () == tuple(saved.metadata.state_dict_metadata["optimizer.state.A.mu_product"].size)
    state = nadam(2, 0.0)
    memory.load(saved, [state], [Load({"A": (2,)}, layouts=layouts)])
    assert 0.5 == state["optimizer"]["state"]["A"]["mu_product"].item()


def test_scalar_slot_where_one_rank_of_the_buffer_has_one_element():
    layouts = [FSDPFlatBuffer({"A": ((0, 1), (1, 4))})]
    planners = [
        Save({"A": (4,)}, grid=Grids.from_sizes(r, dp_shard=2), layouts=layouts) for r in range(2)
    ]
    saved = memory.save([nadam(1, 0.5), nadam(3, 0.5)], planners)
    assert 0.5 == saved.tensor("optimizer.state.A.mu_product").item()


def test_tensor_lr_of_a_parameter_with_one_element_a_rank():
    def state(rank, value):
        name = f"A{rank // 2}"
        groups = [{"lr": torch.tensor(value), "params": [name]}]
        return {
            "optimizer": {"state": {name: {"m": torch.full((1,), value)}}, "param_groups": groups}
        }

    def planners(kind):
        return [
            kind(
                {f"A{r // 2}": (1,)},
                grid=Grids.from_sizes(r, pp=2, tp=2),
                layouts=[TensorParallel({"A*": 0})],
            )
            for r in range(4)
        ]

    saved = memory.save([state(r, 0.5) for r in range(4)], planners(Save))
    states = [state(r, 0.0) for r in range(4)]
    memory.load(saved, states, planners(Load))
    assert [0.5] * 4 == [s["optimizer"]["param_groups"][0]["lr"].item() for s in states]


def test_buffer_called_step_does_not_take_the_optimizers_steps():
    """Two experts on two ranks with different steps: both must be in the checkpoint."""

    def state(rank):
        slots = {"m": torch.full((2,), float(rank)), "step": torch.tensor(float(rank + 3))}
        return {
            "model": {"experts.0.w": torch.full((2,), float(rank)), "step": torch.tensor(7.0)},
            "optimizer": {"state": {"experts.0.w": slots}},
        }

    planners = [
        Save(
            {"experts.0.w": (2,), "step": ()},
            grid=Grids.from_sizes(r, dp_shard=2, ep=2),
            layouts=[ExpertGrid(2)],
        )
        for r in range(2)
    ]
    saved = memory.save([state(0), state(1)], planners)
    keys = sorted(
        k
        for k in saved.metadata.state_dict_metadata
        if k.startswith("optimizer") and k.endswith("step")
    )
    assert ["optimizer.state.experts.0.w.step", "optimizer.state.experts.1.w.step"] == keys
    assert [3.0, 4.0] == [saved.tensor(key).item() for key in keys]


def test_parameter_called_step_of_another_size():
    shapes = {"step": (3,), "w": (2,)}
    slots = {n: {"m": torch.ones(s), "step": torch.tensor(4.0)} for n, s in shapes.items()}
    state = {"model": {n: torch.ones(s) for n, s in shapes.items()}, "optimizer": {"state": slots}}
    saved = memory.save([state], [Save(shapes)])
    assert 4.0 == saved.tensor("optimizer.state.w.step").item()


def bytes_of_ranks(shapes, replicas):
    planners = [
        Save(shapes, grid=Grids.from_sizes(r, dp_replicate=replicas)) for r in range(replicas)
    ]
    states = [{"model": {n: torch.zeros(s) for n, s in shapes.items()}} for _ in range(replicas)]
    saved = memory.save(states, planners)
    loads = [0] * replicas
    for place, rank in saved.written_by.items():
        loads[rank] += saved.data[place].numel() * 4
    return loads


def test_rows_that_do_not_divide_by_the_replicas_stay_balanced():
    """30 tensors of 4 rows on 3 replicas: 120 rows, 40 each; not 60, 30, 30."""
    loads = bytes_of_ranks({f"p{i}": (4, 8192) for i in range(30)}, 3)
    assert max(loads) <= 1.05 * sum(loads) / 3


def test_boxes_shorter_than_the_replicas_stay_balanced():
    """10 cubes of 41 rows on 64 replicas: today ranks 41 to 63 write nothing at all."""
    loads = bytes_of_ranks({f"p{i}": (41, 41, 41) for i in range(128)}, 64)
    assert max(loads) <= 1.05 * sum(loads) / 64


def test_flattened_state_of_w_beside_a_parameter_state_w():
    """`state.w.m` is w's (a replica of 2), `state.state.w.m` is state.w's (tp shards, 4)."""
    layouts = [TensorParallel({"state.w": 0})]
    planners = [
        Save({"w": (2,), "state.w": (2,)}, grid=Grids.from_sizes(r, tp=2), layouts=layouts)
        for r in range(2)
    ]
    states = [
        {
            "optimizer": {
                "state.w.m": torch.tensor([5.0, 6.0]),
                "state.state.w.m": torch.tensor([0.0, 1.0]) + 10 * r,
            }
        }
        for r in range(2)
    ]
    saved = memory.save(states, planners)
    assert [5.0, 6.0] == saved.tensor("optimizer.state.w.m").tolist()


def test_numbers_of_an_optimizer_that_lists_parameters_in_another_order():
    """Without optimizer= the order is guessed; a wrong guess must not name b's momentum a."""
    model = torch.nn.Module()
    model.a, model.b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([model.b, model.a], momentum=0.9, lr=0.1)
    model.a.grad, model.b.grad = torch.ones(2), torch.full((2,), 2.0)
    optimizer.step()
    try:
        saved = memory.save([{"optimizer": optimizer.state_dict()}], [Save(model)])
    except CheckpointError as error:
        assert "optimizer=" in str(error)
        return
    assert [1.0, 1.0] == saved.tensor("optimizer.state.a.momentum_buffer").tolist()


@pytest.mark.parametrize(
    "spoil", [lambda t: t.to_sparse(), lambda t: t.to("meta")], ids=["sparse", "meta"]
)
def test_unstorable_tensor_in_an_unchanged_form(spoil):
    """Refused by name on the first save; so on the second, before a byte is written."""
    planner = Save({"w": (3,)})
    memory.save([{"model": {"w": torch.ones(3)}}], [planner])
    with pytest.raises(UnstorableValueError, match=r"model\.w"):
        memory.save([{"model": {"w": spoil(torch.ones(3))}}], [planner])


def test_write_back_writes_its_own_elements_only():
    """A strided flat shard: the cut row has a view, the whole rows go through write_back.

    A reader may fill the view on one thread while it commits the rest on another.
    """
    full = torch.arange(12.0).view(3, 4)
    stored = memory.stored(**{"model.w": ((3, 4), [((0, 0), full)])})
    shard = torch.full((10, 2), -1.0)[:, 0]
    planner = Load(
        {"w": (3, 4)},
        grid=Grids.from_sizes(1, dp_shard=2),
        layouts=[FSDPFlatBuffer({"w": ((0, 2), (2, 12))})],
    )
    planner.set_up_planner({"model": {"w": shard}}, stored.metadata, True)
    row, rest = planner.finish_plan(planner.create_local_plan()).items
    row_view, rest_copy = planner.resolve_tensor(row), planner.resolve_tensor(rest)
    assert (1, 2) == tuple(row_view.shape)
    touched = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            # Whatever write_back does with the data, another thread fills the row just then.
            touched.append(function)
            row_view.copy_(full[:1, 2:])
            return super().__torch_function__(function, types, args, kwargs or {})

    rest_copy.copy_(full[1:])
    planner.commit_tensor(rest, rest_copy.as_subclass(Watched))
    assert touched
    planner.commit_tensor(row, row_view)
    assert full.reshape(-1)[2:].tolist() == shard.tolist()


def test_optimizer_of_a_mapping_of_models_is_no_replica():
    """model={"model": m}: nobody answers for "optimizer"; equal zeros of two shards pass as one."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2))
    layouts = [TensorParallel({"w": 0})]
    planners = [
        Save({"model": model}, grid=Grids.from_sizes(r, tp=2), layouts=layouts) for r in range(2)
    ]
    states = [
        {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"w": {"m": torch.zeros(2)}}}}
        for _ in range(2)
    ]
    try:
        saved = memory.save(states, planners)
    except (LayoutError, CheckpointError) as error:
        assert "optimizer" in str(error)
        return
    assert (4,) == tuple(saved.metadata.state_dict_metadata["optimizer.state.w.m"].size)


def test_shape_that_differs_with_the_same_number_of_elements_is_named():
    """Today: "has 12 elements (shape (3, 4)) but its layout stores 12 of the local tensor (4, 3)"."""
    with pytest.raises(LayoutError) as caught:
        memory.save([{"model": {"w": torch.ones(3, 4)}}], [Save({"w": (4, 3)})])
    assert "12 elements" not in str(caught.value)


def test_cut_parameter_without_elements_saves_and_loads():
    """A rank's part of it has another shape and as many elements, and was taken for a mistake."""
    cuts = [DTensorStorage({"*": (Cut(0, "dp_shard"),)})]
    options = [{"grid": Grids.from_sizes(r, dp_shard=2), "layouts": cuts} for r in range(2)]
    shapes = {"w": (3, 0), "b": (4,)}

    def states(value):
        rows = (2, 1)
        return [{"m": {"w": torch.empty(n, 0), "b": torch.full((2,), value)}} for n in rows]

    planners = [LayoutAwareSavePlanner(shapes, **o) for o in options]
    checkpoint = memory.save(states(1.0), planners)
    found = states(0.0)
    memory.load(checkpoint, found, [LayoutAwareLoadPlanner(shapes, **o) for o in options])
    assert all(bool(state["m"]["b"].all()) for state in found)
    assert (3, 0) == tuple(checkpoint.metadata.state_dict_metadata["m.w"].size)
