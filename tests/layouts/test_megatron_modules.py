"""Modules of Megatron by stand-ins: what is on disk is cut by hand here.

Live ones, but for those of Transformer Engine, are in tests/megatron/test_modules.py.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    Grid,
    Grids,
    LayoutError,
    LayoutRegistry,
    Mamba,
    MLADownProjection,
    PipelineLayers,
    model_layouts,
)
from shardplan.layouts.variants import variants


def owner(parameters, **attributes):
    """A module with these parameters and attributes."""
    module = nn.Module()
    for name, tensor in parameters.items():
        module.register_parameter(name, nn.Parameter(tensor))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def column(parameter, **marks):
    parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    for name, value in marks.items():
        setattr(parameter, name, value)


def layouts_of(model, rank, tp, providers=DEFAULT_LAYOUTS):
    return model_layouts(model, Grids.from_sizes(rank, tp=tp), LayoutRegistry(providers))


def written(model_of, tp, providers=DEFAULT_LAYOUTS):
    """What all ranks write together, each key whole; an element that two ranks write differs not."""
    found = {}
    for rank in range(tp):
        model = model_of(rank, tp)
        tensors = {k: t.detach() for k, t in model.named_parameters()}
        grid = Grids.from_sizes(rank, tp=tp).dense
        for fqn, layout in layouts_of(model, rank, tp, providers).items():
            for slab in layout.slabs(grid):
                whole = found.setdefault(slab.key, torch.full(slab.global_shape, -1.0))
                data = tensors[fqn].as_strided(slab.sizes, slab.strides, slab.start)
                place = tuple(
                    slice(o, o + s) for o, s in zip(slab.offsets, slab.sizes, strict=True)
                )
                whole[place] = data
    return found


def numbered(rows, start, *rest):
    return (start + torch.arange(rows * int(torch.Size(rest).numel()))).reshape(rows, *rest).float()


# Mamba -------------------------------------------------------------------------------------------

MAMBA = {"z": 8, "x": 8, "B": 4, "C": 4, "dt": 2}
WHOLE = {name: numbered(rows, 1000 * i, 3) for i, (name, rows) in enumerate(MAMBA.items())}


def mamba(rank, tp):
    local = {name: whole.chunk(tp)[rank] for name, whole in WHOLE.items()}
    mixer = owner({"conv1d_weight": torch.cat([local[n][:, :1, None] for n in ("x", "B", "C")])})
    column(mixer.conv1d_weight, partition_sizes=[len(local[n]) for n in ("x", "B", "C")])
    mixer.in_proj = owner({"weight": torch.cat(list(local.values()))})
    column(mixer.in_proj.weight, partition_sizes=[len(part) for part in local.values()])
    return mixer


@pytest.mark.parametrize("tp", [1, 2])
def test_mamba_parts_are_whole_on_disk_whatever_the_tensor_parallel_size(tp):
    found = written(mamba, tp)
    assert {f"in_proj.weight.{n}" for n in MAMBA} | {
        f"conv1d_weight.{n}" for n in ("x", "B", "C")
    } == set(found)
    for name, whole in WHOLE.items():
        assert torch.equal(whole, found[f"in_proj.weight.{name}"])
    assert torch.equal(WHOLE["B"][:, :1, None], found["conv1d_weight.B"])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("over", [1, 2])
def test_mamba_in_one_tensor_in_the_order_of_as_many_ranks(tp, over):
    providers = [p for p in DEFAULT_LAYOUTS if p.name != "mamba"]
    providers.append(Mamba(components="fused", fused_over=over))
    in_order = [w.chunk(over)[g] for g in range(over) for w in WHOLE.values()]
    assert torch.equal(torch.cat(in_order), written(mamba, tp, providers)["in_proj.weight"])


def test_mamba_by_numbers_alone():
    provider = Mamba({"in_proj.weight": MAMBA})
    grids = Grids.from_sizes(1, tp=2)
    made = model_layouts({"in_proj.weight": (13, 3)}, grids, LayoutRegistry([provider]))
    (stage,) = [s for s in made["in_proj.weight"].stages if hasattr(s, "parts")]
    assert ((".z", 4), (".x", 4), (".B", 2), (".C", 2), (".dt", 1)) == stage.parts


def test_mamba_parts_that_do_not_divide_are_refused():
    with pytest.raises(LayoutError, match=r"the 2 rows of its part 'dt' can't be divided by 4"):
        model_layouts(
            {"in_proj.weight": (7, 3)},
            Grids.from_sizes(0, tp=4),
            LayoutRegistry([Mamba({"*": MAMBA})]),
        )


# MLA ---------------------------------------------------------------------------------------------

QUERY, LATENT = numbered(8, 0, 3), numbered(6, 500, 3)
CONFIG = SimpleNamespace(q_lora_rank=8, kv_lora_rank=4, qk_pos_emb_head_dim=2)


def layer(attention):
    found = nn.Module()
    found.self_attention = attention
    return found


def fused(rank, tp, *, sharded=True):
    parts = [w.chunk(tp)[rank] if sharded else w for w in (QUERY, LATENT)]
    attention = owner({}, config=CONFIG)
    attention.linear_qkv_down_proj = owner(
        {"weight": torch.cat(parts), "layer_norm_weight": torch.arange(3.0)}
    )
    if sharded:
        column(attention.linear_qkv_down_proj.weight)
    return layer(attention)


@pytest.mark.parametrize(("tp", "sharded"), [(1, True), (2, True), (2, False)])
def test_a_fused_down_projection_is_on_disk_what_two_are(tp, sharded):
    found = written(lambda rank, tp: fused(rank, tp, sharded=sharded), tp)
    assert {
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "input_layernorm.weight",
    } == set(found)
    assert torch.equal(QUERY, found["self_attention.linear_q_down_proj.weight"])
    assert torch.equal(LATENT, found["self_attention.linear_kv_down_proj.weight"])


def test_unfused_down_projections_have_the_same_keys():
    attention = nn.Module()
    attention.linear_q_down_proj = owner({"weight": QUERY})
    attention.linear_kv_down_proj = owner({"weight": LATENT})
    found = written(lambda rank, tp: layer(attention), 1)
    assert torch.equal(QUERY, found["self_attention.linear_q_down_proj.weight"])
    assert torch.equal(LATENT, found["self_attention.linear_kv_down_proj.weight"])


def test_a_fused_down_projection_of_other_rows_is_refused():
    with pytest.raises(LayoutError, match=r"it has 7 rows, neither the 8 \+ 5 of both"):
        model_layouts(
            {"linear_qkv_down_proj.weight": (7, 3)},
            Grids.from_sizes(0, tp=2),
            LayoutRegistry([MLADownProjection({"*": (8, 5)})]),
        )


# Gated DeltaNet 2, by the module's own names -----------------------------------------------------


def test_seven_sections_keep_their_own_names():
    names = ("query", "key", "value", "z", "f", "b", "w")
    sizes = (2, 2, 4, 4, 2, 2, 4)
    module = owner({}, in_proj_split_names=names, in_proj_split_sections=sizes)
    weight = numbered(20, 0, 3)
    module.in_proj = owner({"weight": weight})
    column(module.in_proj.weight)
    found = written(lambda rank, tp: module, 1)
    assert [f"in_proj.weight.{name}" for name in names] == list(found)
    assert torch.equal(weight[16:], found["in_proj.weight.w"])


# Layer numbers and multi-token prediction --------------------------------------------------------


def numbered_layers(*numbers):
    layers = nn.ModuleList()
    for number in numbers:
        one = owner({"w": torch.zeros(1)}, layer_number=number)
        layers.append(one)
    holder = nn.Module()
    holder.layers = layers
    return holder


def names(model, providers=DEFAULT_LAYOUTS):
    return {fqn: layout.name for fqn, layout in layouts_of(model, 0, 1, providers).items()}


def test_a_stage_names_its_layers_by_their_own_number():
    assert {"layers.0.w": "layers.2.w", "layers.1.w": "layers.3.w"} == names(numbered_layers(3, 4))


def test_a_nested_layer_keeps_its_number():
    """Megatron's substitution renames both and gives two parameters one name."""
    model = numbered_layers(3)
    model.layers[0].inner = numbered_layers(1, 2)
    assert {
        "layers.0.w": "layers.2.w",
        "layers.0.inner.layers.0.w": "layers.2.inner.layers.0.w",
        "layers.0.inner.layers.1.w": "layers.2.inner.layers.1.w",
    } == names(model)


def mtp(**attributes):
    model = nn.Module()
    model.mtp = numbered_layers(2)
    for name, value in attributes.items():
        setattr(model.mtp.layers[0], name, value)
    model.mtp.layers[0].mtp_model_layer = owner({"w": torch.zeros(1)}, layer_number=2)
    return model


def test_an_mtp_layers_inner_layer_has_the_name_of_older_checkpoints():
    inner = "mtp.layers.0.mtp_model_layer.w"
    assert "mtp.layers.1.transformer_layer.w" == names(mtp())[inner]
    made = layouts_of(mtp(), 0, 1)[inner]
    assert ["mtp.layers.1.transformer_layer.w", "mtp.layers.1.mtp_model_layer.w"] == [
        form.name for form in variants(made, Grid((), (), ()))
    ]


def test_an_mtp_layer_of_a_hybrid_stack_keeps_its_name():
    found = names(mtp(mtp_layer_pattern="M*"))
    assert "mtp.layers.1.mtp_model_layer.w" == found["mtp.layers.0.mtp_model_layer.w"]


def test_the_name_of_mtps_inner_layer_can_be_kept():
    providers = [p for p in DEFAULT_LAYOUTS if p.name != "pipeline-layers"]
    providers.append(PipelineLayers(mtp="mtp_model_layer"))
    found = names(mtp(), providers)
    assert "mtp.layers.1.mtp_model_layer.w" == found["mtp.layers.0.mtp_model_layer.w"]
