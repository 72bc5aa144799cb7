"""Tensor-parallel shards: which dim, over which axis, and who is left alone."""

import types

import pytest
import torch

from shardplan.layouts import (
    Grid,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    Shard,
    TensorParallel,
    model_layouts,
    prove,
)


def info(fqn="w", shape=(4, 2), param=None, is_expert=False, **sizes):
    grids = Grids.from_sizes(0, **(sizes or {"tp": 2}))
    return ParamInfo(
        fqn, shape, grids.of("expert" if is_expert else "dense"), is_expert, param=param
    )


def live(**attributes):
    return types.SimpleNamespace(**attributes)


@pytest.mark.parametrize(
    ("param", "dim"),
    [
        (live(tensor_model_parallel=True, partition_dim=0), 0),
        (live(tensor_model_parallel=True, partition_dim=1), 1),
        (live(tensor_model_parallel=True, partition_dim=-1), None),
        (live(tensor_model_parallel=True), None),
        (live(tensor_model_parallel=False, partition_dim=0), None),
        (live(partition_dim=0), None),
        (live(_tensor_parallel_mode="column"), 0),
        (live(_tensor_parallel_mode="row"), 1),
        (live(_tensor_parallel_mode="replicated"), None),
        # That mode is a guess by the module's class, as Megatron-FSDP itself takes it: Mamba's gated
        # norm has it and is sharded. What is really duplicated is marked as not parallel.
        (
            live(_tensor_parallel_mode="replicated", tensor_model_parallel=True, partition_dim=0),
            0,
        ),
        (
            live(_tensor_parallel_mode="replicated", tensor_model_parallel=False, partition_dim=0),
            None,
        ),
        # Megatron-FSDP leaves some marks on the parameter that it wraps.
        (live(orig_param=live(tensor_model_parallel=True, partition_dim=1)), 1),
        (live(orig_param=live(_tensor_parallel_mode="row")), 1),
        (live(), None),
        (None, None),
    ],
)
def test_live_marks(param, dim):
    provider = TensorParallel()
    assert dim == provider.dim(info(param=param))
    assert (dim is not None) == provider.claims(info(param=param))


def test_a_pattern_comes_before_the_live_marks():
    provider = TensorParallel({"a.*": 1, "b.*": None})
    marked = live(tensor_model_parallel=True, partition_dim=0)
    assert 1 == provider.dim(info("a.w"))
    assert 1 == provider.dim(info("a.w", param=marked))
    assert provider.dim(info("b.w", param=marked)) is None
    assert 0 == provider.dim(info("c.w", param=marked))
    assert provider.dim(info("c.w")) is None
    assert Level.PARALLEL is provider.level


def test_dense_parameters_are_sharded_over_tp_and_experts_over_etp():
    provider = TensorParallel({"*": 0})
    assert (Shard(0, "tp"),) == provider.stages(info())
    assert (Shard(0, "etp"),) == provider.stages(info(is_expert=True))


@pytest.mark.parametrize(
    ("dim", "right"),
    [
        (0, [((8, 2), (0, 0)), ((8, 2), (4, 0))]),
        (1, [((4, 4), (0, 0)), ((4, 4), (0, 2))]),
        (None, [((4, 2), (0, 0)), ((4, 2), (0, 0))]),
    ],
)
def test_offsets_of_both_ranks(dim, right):
    param = info()
    layout = LayoutRegistry([TensorParallel({"w": dim})]).layout(param)
    prove(layout, param.grid)
    found = [layout.slabs(place)[0] for place in param.grid.walk(("tp",))]
    assert right == [(slab.global_shape, slab.offsets) for slab in found]
    assert (() if dim is not None else ("tp",)) == tuple(
        axis for axis in layout.replica_axes(param.grid) if axis == "tp"
    )


def test_experts_on_the_only_mesh_there_is_are_sharded_over_its_tensor_parallel_axis():
    """Grids.from_mesh with one mesh: the grid of the experts has no axis etp."""
    grid = Grid(("dp_shard", "tp"), (2, 2), (0, 1))
    param = ParamInfo("experts.0.w", (4, 2), grid, True)
    layout = LayoutRegistry([TensorParallel({"*": 0})]).layout(param)
    (slab,) = layout.slabs(grid)
    assert ((8, 2), (4, 0)) == (slab.global_shape, slab.offsets)


@pytest.mark.parametrize("dim", [2, 5])
def test_a_dim_that_is_not_there_is_refused(dim):
    with pytest.raises(LayoutError) as error:
        TensorParallel({"w": dim}).stages(info())
    assert str(error.value) == (
        f"w: it is sharded along dim {dim} but has 2 dims (shape (4, 2)) (tp 0/2). Mend "
        "partition_dim, or pass TensorParallel({name: dim})."
    )


def mesh(*names):
    return live(mesh_dim_names=names, ndim=len(names))


def test_a_dtensor_over_the_tensor_parallel_axis_places_itself():
    provider = TensorParallel({"*": 0})
    assert not provider.claims(info(param=live(device_mesh=mesh("dp_shard", "tp"))))
    assert provider.claims(info(param=live(device_mesh=mesh("dp_shard"))))
    # An expert's DTensor over tp, in the experts' own grid.
    assert not provider.claims(info(param=live(device_mesh=mesh("tp")), is_expert=True, tp=2))
    # Megatron-FSDP's DTensors say where they lie on the mesh, but their buffer is what counts.
    wrapped = live(device_mesh=mesh("dp_cp", "tp"), orig_param=live())
    assert provider.claims(info(param=wrapped))


def test_a_live_model():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear_qkv = torch.nn.Linear(3, 4)
            self.linear_proj = torch.nn.Linear(2, 3)
            self.norm = torch.nn.LayerNorm(3)
            for tensor in self.linear_qkv.parameters():
                tensor.tensor_model_parallel, tensor.partition_dim = True, 0
            self.linear_proj.weight._tensor_parallel_mode = "row"

    grids = Grids.from_sizes(0, tp=2)
    layouts = model_layouts(Attention(), grids, LayoutRegistry([TensorParallel()]))
    assert {
        "linear_qkv.weight": (8, 3),
        "linear_qkv.bias": (8,),
        "linear_proj.weight": (3, 4),
        "linear_proj.bias": (3,),
        "norm.weight": (3,),
        "norm.bias": (3,),
    } == {fqn: layout.slabs(grids.dense)[0].global_shape for fqn, layout in layouts.items()}
