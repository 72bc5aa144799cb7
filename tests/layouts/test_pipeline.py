"""Pipeline layer numbers: which token is one, and what number it gets."""

import types

import pytest
import torch

from shardplan.layouts import (
    ExpertGrid,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    PipelineLayers,
    model_layouts,
)


def name(provider, fqn, owners=(), others=()):
    param = ParamInfo(fqn, (2,), Grids.from_sizes(0).dense, owners=owners)
    layout = LayoutRegistry([provider, *others]).layout(param)
    return layout.name


# Given numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fqn", "renamed"),
    [
        ("layers.0.w", "layers.2.w"),
        ("decoder.layers.1.mlp.weight1", "decoder.layers.3.mlp.weight1"),
        ("decoder.layers.10.w", "decoder.layers.12.w"),
        # Only the first `layers` is the pipeline's; a nested stack counts for itself.
        ("decoder.layers.0.mixer.layers.1.w", "decoder.layers.2.mixer.layers.1.w"),
        # Whole tokens, and a number that has something under it.
        ("decoder.my_layers.0.w", "decoder.my_layers.0.w"),
        ("decoder.layers0.w", "decoder.layers0.w"),
        ("decoder.layers.x.w", "decoder.layers.x.w"),
        ("layers.0", "layers.0"),
        ("embedding.weight", "embedding.weight"),
    ],
)
def test_an_offset(fqn, renamed):
    assert renamed == name(PipelineLayers(offset=2), fqn)


def test_two_stages_of_four_layers():
    """Both stages hold layers.0 and layers.1; the second one's are layers.2 and layers.3."""
    local = {"layers.0.w": (2,), "layers.1.w": (2,)}
    found = []
    for stage in range(2):
        grids = Grids.from_sizes(stage, pp=2)
        registry = LayoutRegistry([PipelineLayers(offset=2 * stage)])
        layouts = model_layouts(local, grids, registry)
        found += [slab.key for x in layouts.values() for slab in x.slabs(grids.dense)]
    assert [f"layers.{i}.w" for i in range(4)] == found


def test_a_number_for_each_layer():
    provider = PipelineLayers({0: 2, 1: 6})
    assert "layers.2.w" == name(provider, "layers.0.w")
    assert "layers.6.w" == name(provider, "layers.1.w")
    with pytest.raises(LayoutError) as error:
        name(provider, "layers.2.w")
    assert str(error.value) == (
        "layers.2.w: layer 2 is not among the 2 layers of PipelineLayers({0: 2, 1: 6}) (one rank). "
        "Give every local layer its global number."
    )


def test_a_layer_that_keeps_its_number_is_not_claimed():
    grid = Grids.from_sizes(0).dense
    assert Level.NAME is PipelineLayers().level
    assert not PipelineLayers(offset=0).claims(ParamInfo("layers.0.w", (2,), grid))
    assert PipelineLayers(offset=1).claims(ParamInfo("layers.0.w", (2,), grid))
    assert not PipelineLayers().claims(ParamInfo("layers.0.w", (2,), grid))


@pytest.mark.parametrize(
    ("fqn", "renamed"),
    [
        ("layers.0.experts.1.w", "layers.2.experts.{expert}.w"),
        ("layers.0.experts.fc1.weight1", "layers.2.experts.fc1.weight{expert}"),
        # Experts that hold layers: both numbers are found, whichever is renamed first.
        ("experts.0.layers.1.w", "experts.{expert}.layers.3.w"),
        ("stage10.experts.10.layers.1.w", "stage10.experts.{expert}.layers.3.w"),
    ],
)
def test_layer_numbers_and_expert_numbers_do_not_disturb_each_other(fqn, renamed):
    param = ParamInfo(fqn, (2,), Grids.from_sizes(0).expert, True, 11)
    layout = LayoutRegistry([ExpertGrid(), PipelineLayers(offset=2)]).layout(param)
    assert renamed == layout.name


# Live layers ----------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, layer_number=None):
        super().__init__()
        self.norm = torch.nn.Linear(2, 2, bias=False)
        if layer_number is not None:
            self.layer_number = layer_number


class Stage(torch.nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(number) for number in numbers])
        self.final_norm = torch.nn.LayerNorm(2)


class Model(torch.nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder


def names(model):
    layouts = model_layouts(model, Grids.from_sizes(0), LayoutRegistry([PipelineLayers()]))
    return {fqn: layout.name for fqn, layout in layouts.items()}


def test_live_layers_count_from_one():
    assert {
        "decoder.layers.0.norm.weight": "decoder.layers.2.norm.weight",
        "decoder.layers.1.norm.weight": "decoder.layers.3.norm.weight",
        "decoder.final_norm.weight": "decoder.final_norm.weight",
        "decoder.final_norm.bias": "decoder.final_norm.bias",
    } == names(Model(Stage([3, 4])))


def test_a_wrapper_of_a_layer_does_not_hide_its_number():
    class Float16Module(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    stage = Stage([3])
    stage.layers[0] = Float16Module(stage.layers[0])
    assert "layers.2.norm.weight" == names(Float16Module(stage))["layers.0.norm.weight"]


def test_a_wrapper_of_a_layer_that_nobody_knows_does_not_hide_its_number():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    stage = Stage([3])
    stage.layers[0] = Wrapper(stage.layers[0])
    found = names(Wrapper(stage))
    assert "module.layers.2.module.norm.weight" == found["module.layers.0.module.norm.weight"]


def test_nested_layers_keep_their_own_numbers():
    """The layer of the pipeline is the first one with a number, from the root on."""
    stage = Stage([3])
    stage.layers[0].inner = Stage([7])
    found = names(stage)
    assert "layers.2.inner.layers.0.norm.weight" == found["layers.0.inner.layers.0.norm.weight"]


def test_layers_without_a_number_keep_theirs():
    assert "layers.0.norm.weight" == names(Stage([None]))["layers.0.norm.weight"]


def test_a_layer_number_that_is_no_number_is_not_one():
    assert "layers.0.norm.weight" == names(Stage(["3"]))["layers.0.norm.weight"]


def test_a_number_of_a_module_that_is_no_layer_does_not_count():
    owner = types.SimpleNamespace(layer_number=5)
    assert "mtp.block.w" == name(PipelineLayers(), "mtp.block.w", (("mtp.block", owner),))
