"""Inputs on which Megatron's own path is wrong or fails, with what is right, in one process.

The numbers are those of the smallest inputs on which it was seen; those that need ranks (GDN at
another tensor-parallel size, ranks with different state, another expert grid) are in
test_both_ways.py and test_optimizers.py, those about names alone in test_names.py.
"""

import argparse
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    FlatBuffer,
    Grids,
    LayoutRegistry,
    ParamInfo,
    expert_name,
)
from shardplan.layouts.layout import Layout
from shardplan.layouts.megatron_fsdp import rank_shape, storage
from shardplan.planner import PerRank
from shardplan.planner.megatron import load_checkpoint, save_checkpoint


def layout(fqn, shape, rank, param=None, **sizes):
    grids = Grids.from_sizes(rank, **sizes)
    expert = ".experts." in f".{fqn}"
    grid = grids.expert if expert else grids.dense
    info = ParamInfo(fqn, shape, grid, expert, 2 if expert else None, param)
    return LayoutRegistry(DEFAULT_LAYOUTS).layout(info), grid


def boxes(made, grid):
    return [(s.key, s.global_shape, s.offsets, s.sizes) for s in made.slabs(grid)]


def test_a_bias_of_a_grouped_expert_is_named_by_its_global_index():
    """Megatron leaves `bias0` as it is, so that every expert-parallel rank writes one key."""
    name = "mlp.experts.linear_fc2.bias0"
    keys = [boxes(*layout(name, (4,), rank, dp_shard=2, ep=2))[0][0] for rank in range(2)]
    assert ["mlp.experts.linear_fc2.bias0", "mlp.experts.linear_fc2.bias2"] == keys


def test_a_parameter_that_only_its_mode_marks_as_sharded():
    """Megatron drops the mode when it copies marks: global (2, 2), both ranks at row 0."""
    param = SimpleNamespace(_tensor_parallel_mode="column")
    found = [boxes(*layout("w", (2, 2), rank, param, tp=2)) for rank in range(2)]
    assert [[("w", (4, 2), (0, 0), (2, 2))], [("w", (4, 2), (2, 0), (2, 2))]] == found


def test_a_shard_that_ends_in_mid_row():
    """Shapes (1, 8), (2, 3), (2, 3) on 2 ranks: slices of 16, the last tensor at 14. Megatron's
    view(-1, 3) of its first 2 elements fails."""
    made = Layout("w", "w", (FlatBuffer((2, 3), ("dp_shard",), offset=14, shard_size=16),))
    grids = [Grids.from_sizes(rank, dp_shard=2).dense for rank in range(2)]
    assert [("w", (2, 3), (0, 0), (1, 2))] == boxes(made, grids[0])
    assert [("w", (2, 3), (0, 2), (1, 1)), ("w", (2, 3), (1, 0), (1, 3))] == boxes(made, grids[1])


class Row:
    """A DTensor of shape (4, 6) that tensor parallelism shards along dim 1, over 2 ranks."""

    shape = (4, 6)
    placements = (SimpleNamespace(is_replicate=lambda: False, dim=1),)

    def to_local(self):
        return torch.zeros(4, 3)


def test_a_row_parallel_dtensor_has_its_ranks_own_columns():
    """Megatron takes (1, 6) for rank 0's part of (4, 6) over dp 2, tp 2; right is (2, 3)."""
    own = Row()
    item = SimpleNamespace(global_data_index=0)
    buffer = SimpleNamespace(
        item_index_map={0: item},
        param_idx={own: 0},
        bucket_index=SimpleNamespace(global_data_index=0, size=12),
        dp_world_size=2,
    )
    group = SimpleNamespace(model_weight_buffer=buffer, main_weight_buffer=None)
    buffers = SimpleNamespace(parameter_groups=[group], param_to_param_group={own: 0})
    param = SimpleNamespace(
        orig_param=own,
        megatron_fsdp_slice=slice(0, 6),
        _megatron_fsdp_model=SimpleNamespace(param_and_grad_buffer=buffers),
    )
    assert (4, 3) == rank_shape(param)
    made, grid = layout("w", rank_shape(param), 0, param, dp_shard=2, tp=2)
    assert [("w", (4, 6), (0, 0), (2, 3))] == boxes(made, grid)


def test_one_rule_for_what_an_expert_is():
    """Megatron has three: `.experts.` in the name, `mlp.experts`, or `allreduce=False`."""
    for name, family in (
        ("experts.local_experts.0.w", "expert"),
        ("decoder.layers.0.mlp.experts.local_experts.0.w", "expert"),
        ("decoder.layers.0.moe.experts.local_experts.0.w", "expert"),
        ("decoder.layers.0.mlp.shared_experts.w", "dense"),
        ("decoder.layers.0.mlp.router.weight", "dense"),
    ):
        assert (family == "expert") == (expert_name(name) is not None), name


# Version 2, as newer releases name its parts ------------------------------------------------------------


@pytest.mark.parametrize("newer", [False, True], ids=["released", "newer"])
def test_version_2_by_the_names_of_either_release(newer):
    """A tensor of 6 elements at 4, in a buffer of 16 that 2 ranks of `dp` share."""
    param = SimpleNamespace()
    pair = SimpleNamespace(sharded=param, unsharded=SimpleNamespace())
    buffer = SimpleNamespace(
        mesh=SimpleNamespace(mesh_dim_names=("dp",), ndim=1),
        placements=(SimpleNamespace(dim=0) if newer else type("Flat", (), {})(),),
        layout=SimpleNamespace(size=16, tensor_to_offset=(0, 4)),
    )
    group = SimpleNamespace(main_weight=buffer)
    if newer:
        group.fsdp_parameters = (SimpleNamespace(sharded=None, unsharded=None), pair)
        param._mfsdp_parameter_group = lambda: group  # a weak reference
    else:
        group.sharded_parameters = (None, param)
        group.unsharded_parameters = (None, pair.unsharded)
        param._mfsdp_parameter_group = group
    info = ParamInfo("w", (2, 3), Grids.from_sizes(0, dp_shard=2).dense, param=param)
    assert FlatBuffer((2, 3), ("dp_shard",), 4, 8) == storage(info)


# A whole checkpoint in one process ----------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, number, start):
        super().__init__()
        self.layer_number = number
        self.config = SimpleNamespace(gated_linear_unit=True)
        self.mlp = nn.Module()
        self.mlp.linear_fc1 = nn.Linear(2, 4, bias=False)
        with torch.no_grad():
            self.mlp.linear_fc1.weight.copy_(start + torch.arange(8.0).reshape(4, 2))


class Chunk(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)


def keys(path):
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def test_every_slot_is_split_not_only_adams(tmp_path):
    """Megatron's handler wants exp_avg and exp_avg_sq, and fails on SGD's momentum."""
    model = Chunk(Layer(1, 0.0))
    (weight,) = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.state[weight] = {"momentum_buffer": 100 + torch.arange(8.0).reshape(4, 2)}
    save_checkpoint(model, optimizer, tmp_path)
    name = "optimizer.state.layers.0.mlp.linear_fc1.weight"
    assert {f"{name}_w.momentum_buffer", f"{name}_v.momentum_buffer"} == {
        key for key in keys(tmp_path) if key.startswith("optimizer.state.")
    }
    fresh = Chunk(Layer(1, -50.0))
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(fresh, other, tmp_path)
    (loaded,) = fresh.parameters()
    assert torch.equal(weight, loaded)
    assert torch.equal(
        optimizer.state[weight]["momentum_buffer"], other.state[loaded]["momentum_buffer"]
    )
    assert 0.5 == other.param_groups[0]["lr"]


def test_virtual_pipeline_chunks_are_sections_of_one_model(tmp_path):
    """Megatron's preprocessing asks for `model` and fails on `model0` and `model1`."""
    chunks = [Chunk(Layer(1, 0.0)), Chunk(Layer(2, 100.0))]
    optimizer = torch.optim.SGD([p for c in chunks for p in c.parameters()], lr=0.5)
    save_checkpoint(chunks, optimizer, tmp_path)
    assert {f"model.layers.{i}.mlp.linear_fc1.weight_{h}" for i in range(2) for h in "wv"} == {
        key for key in keys(tmp_path) if key.startswith("model")
    }
    whole = Chunk(Layer(1, -1.0), Layer(2, -1.0))
    load_checkpoint(whole, None, tmp_path)
    for layer, chunk in zip(whole.layers, chunks, strict=True):
        expected = chunk.layers[0].mlp.linear_fc1.weight
        assert torch.equal(expected, layer.mlp.linear_fc1.weight)


class Scheduler:
    def __init__(self, steps):
        self.steps = steps

    def state_dict(self):
        return {"num_steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["num_steps"]


def test_what_else_a_loop_keeps(tmp_path):
    model = Chunk(Layer(1, 0.0))
    arguments = {"hidden_size": 2, "rank": 3, "local_rank": 1}
    save_checkpoint(
        model,
        None,
        tmp_path,
        iteration=40,
        args=arguments,
        opt_param_scheduler=Scheduler(80),
        extra={"consumed": {"samples": 640}},
    )
    assert {"hidden_size": 2, "rank": 3, "local_rank": 1} == arguments
    assert {"args.hidden_size"} == {key for key in keys(tmp_path) if key.startswith("args")}
    scheduler = Scheduler(0)
    loaded = load_checkpoint(
        Chunk(Layer(1, -1.0)),
        None,
        tmp_path,
        opt_param_scheduler=scheduler,
        extra={"consumed": {"samples": 0}},
    )
    assert (40, {"consumed": {"samples": 640}}) == (loaded.iteration, loaded.extra)
    assert 80 == scheduler.steps


def test_arguments_travel_as_the_namespace_that_they_are(tmp_path):
    """Stock DCP, as Megatron's loop calls it, reads them back; each rank's own fields are gone."""
    arguments = argparse.Namespace(hidden_size=2, rank=3, local_rank=1)
    own = {"rng_state": PerRank({"seed": 3})}
    save_checkpoint(Chunk(Layer(1, 0.0)), None, tmp_path, iteration=4, args=arguments, extra=own)
    asked = {"args": None, "iteration": None, "checkpoint_version": None}
    dcp.load(asked, checkpoint_id=tmp_path)
    assert {
        "args": argparse.Namespace(hidden_size=2),
        "iteration": 4,
        "checkpoint_version": 3.0,
    } == asked
    wanted = {"rng_state": PerRank({"seed": 0})}
    loaded = load_checkpoint(Chunk(Layer(1, -1.0)), None, tmp_path, extra=wanted)
    assert {"seed": 3} == loaded.extra["rng_state"].value
