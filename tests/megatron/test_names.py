"""Names for tools, from integers alone and from stand-ins for process groups."""

import doctest
import importlib
from types import SimpleNamespace

import pytest

from shardplan.layouts import Grids, LayoutError, MLADownProjection
from shardplan.planner.megatron import (
    ep_rank_and_size,
    expert_global_key,
    expert_local_key,
    get_ep_layer_offset,
    global_param_name,
    whole_projections,
)


def group(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def wrapped(model, levels):
    for _ in range(levels):
        model = SimpleNamespace(module=model)
    return model


def test_doctests():
    module = importlib.import_module("shardplan.planner.megatron.names")
    assert 0 == doctest.testmod(module).failed


# The semantics of Megatron-LM's pull request 8045 -----------------------------------------------------


def test_unset_falls_back_and_none_is_off():
    assert (None, None) == ep_rank_and_size(None)
    assert (None, None) == ep_rank_and_size(pg_collection=SimpleNamespace())
    assert (0, 1) == ep_rank_and_size(pg_collection=SimpleNamespace(ep=None))
    assert (3, 4) == ep_rank_and_size(pg_collection=SimpleNamespace(ep=group(3, 4)))


@pytest.mark.parametrize("levels", [0, 1, 3])
def test_a_model_carries_its_collection_at_any_wrapper_level(levels):
    model = SimpleNamespace(pg_collection=SimpleNamespace(ep=group(1, 2)))
    assert (1, 2) == ep_rank_and_size(wrapped(model, levels))
    assert (1, 2) == ep_rank_and_size([wrapped(model, levels)])


def test_the_offset_of_a_rank():
    assert [0, 2, 4, 6] == [get_ep_layer_offset(8, ep_rank=r, ep_size=4) for r in range(4)]
    assert 0 == get_ep_layer_offset(8)
    assert 0 == get_ep_layer_offset(None, ep_rank=3, ep_size=4)


@pytest.mark.parametrize("given", [{"ep_rank": 1}, {"ep_size": 4}], ids=str)
def test_rank_and_size_go_together(given):
    for call in (
        lambda: ep_rank_and_size(**given),
        lambda: get_ep_layer_offset(8, **given),
        lambda: expert_local_key("mlp.experts.linear_fc1.weight0", 8, **given),
        lambda: expert_global_key("mlp.experts.linear_fc1.weight0", 8, **given),
    ):
        with pytest.raises(ValueError, match="together"):
            call()


def test_experts_that_do_not_divide_are_refused():
    """Megatron gives ranks 0 and 1 of 4 the experts [0, 1) and [1, 2) of 6, and loses 4 and 5."""
    with pytest.raises(LayoutError, match="6 experts can't be divided by 4"):
        get_ep_layer_offset(6, ep_rank=1, ep_size=4)


# Keys ---------------------------------------------------------------------------------------------------

# Local key on ep rank 2 of 4 with 16 experts, 4 a rank: local i is global 8 + i.
KEYS = {
    "mlp.experts.linear_fc1.weight1": "mlp.experts.linear_fc1.weight9",
    "mlp.experts.linear_fc1.bias3": "mlp.experts.linear_fc1.bias11",
    "mlp.experts.linear_fc1.weight1_w": "mlp.experts.linear_fc1.weight9_w",
    "mlp.experts.linear_fc2.weight0": "mlp.experts.linear_fc2.weight8",
    "mlp.experts.local_experts.2.linear_fc1.weight": "mlp.experts.local_experts.10.linear_fc1.weight",
    "experts.2.w": "experts.10.w",
    # Only the expert's own token, once: Megatron rewrites both of these.
    "weight1.layers.0.mlp.experts.linear_fc1.weight1": (
        "weight1.layers.0.mlp.experts.linear_fc1.weight9"
    ),
    "mlp.experts.linear_fc1.weight1.lora_weight1": "mlp.experts.linear_fc1.weight9.lora_weight1",
    # A slot behind it and a prefix before it stay.
    "optimizer.state.module.mlp.experts.linear_fc1.weight1.exp_avg": (
        "optimizer.state.module.mlp.experts.linear_fc1.weight9.exp_avg"
    ),
    # No expert of several.
    "layers.1.mlp.linear_fc1.weight": "layers.1.mlp.linear_fc1.weight",
    "layers.1.mlp.shared_experts.linear_fc1.weight": "layers.1.mlp.shared_experts.linear_fc1.weight",
    "layers.1.mlp.router.expert_bias": "layers.1.mlp.router.expert_bias",
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_go_to_the_global_index_and_back(key):
    grid = {"ep_rank": 2, "ep_size": 4}
    assert KEYS[key] == expert_global_key(key, 16, **grid)
    assert key == expert_local_key(KEYS[key], 16, **grid)


def test_another_ranks_expert_has_no_local_key():
    """Megatron makes `weight-4` of global expert 0 on rank 1 of 2."""
    with pytest.raises(
        LayoutError, match=r"0 is no expert of ep rank 1 of 2, which holds \[4, 8\)"
    ):
        expert_local_key("mlp.experts.linear_fc1.weight0", 8, ep_rank=1, ep_size=2)


# Parameters ---------------------------------------------------------------------------------------------


def test_a_parameters_name_offline():
    shapes = {f"layers.0.mlp.experts.linear_fc1.weight{i}": (4, 2) for i in range(2)}
    names = [
        global_param_name(shapes, name, grid=Grids.from_sizes(rank, dp_shard=4, ep=4))
        for rank in range(4)
        for name in shapes
    ]
    assert [f"layers.0.mlp.experts.linear_fc1.weight{i}" for i in range(8)] == names


def test_a_parameter_that_is_two_on_disk_has_one_name():
    name = "layers.0.self_attention.linear_qkv_down_proj.weight"
    for layouts in ([MLADownProjection({"*": (8, 6)})], whole_projections()):
        assert name == global_param_name(
            {name: (7, 3)}, name, grid=Grids.from_sizes(1, tp=2), layouts=layouts
        )


def test_a_parameter_of_another_model_is_refused():
    with pytest.raises(LayoutError, match="none of the 1 model chunks has it"):
        global_param_name({"a": (2,)}, "b", grid=Grids.from_sizes())
