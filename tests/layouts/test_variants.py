"""Other forms of a parameter on disk: each is what its own provider would have written."""

import re

import pytest

from shardplan.layouts import (
    ExpertGrid,
    Grids,
    LayoutRegistry,
    MLADownProjection,
    SwiGLU,
    TensorParallel,
    model_layouts,
)
from shardplan.layouts.variants import variants


def layout_of(fqn, shape, grids, *, beside=(), components="split", tp=None, **experts):
    providers = [SwiGLU(["*fc1*"], components=components), ExpertGrid(4, **experts)]
    if tp is not None:
        providers.append(TensorParallel({"*": tp}))
    model = {name: shape for name in (*beside, fqn)}
    return model_layouts(model, grids, LayoutRegistry(providers))[fqn]


def on_disk(layout, grids):
    """What the ranks of a world write of a layout, replicas left out."""
    grid = grids.of(layout.family)
    return {
        (slab.key, slab.global_shape, slab.offsets, slab.sizes, slab.start, slab.strides, index)
        for index, place in enumerate(grid.walk(("ep", "etp", "tp")))
        for slab in layout.slabs(place)
    }


GRIDS = Grids.from_sizes(0, dp_shard=4, tp=2, ep=2)
FORMS = [
    (components, stacked) for components in ("split", "fused") for stacked in ("single", "stacked")
]


@pytest.mark.parametrize("tp", [None, 0])
@pytest.mark.parametrize("components", ["split", "fused"])
def test_a_dense_projection_has_two_forms(components, tp):
    grids = Grids.from_sizes(0, tp=2)
    made = layout_of("mlp.fc1.weight", (4, 3), grids, components=components, tp=tp)
    own, other = variants(made, grids.dense)
    assert made is own
    opposite = {"split": "fused", "fused": "split"}[components]
    right = layout_of("mlp.fc1.weight", (4, 3), grids, components=opposite, tp=tp)
    assert on_disk(right, grids) == on_disk(other, grids)
    assert right.name == other.name


@pytest.mark.parametrize("components", ["split", "fused"])
@pytest.mark.parametrize("leaf", ["weight", "layer_norm_weight"])
def test_latent_attentions_down_projection_has_two_forms(components, leaf):
    """Both as two tensors and the layer's norm, and as the module has them."""
    grids = Grids.from_sizes(0, tp=2)
    fqn = f"layers.0.self_attention.linear_qkv_down_proj.{leaf}"

    def made(components):
        down = MLADownProjection({"*": (8, 6)}, components=components)
        rows = 7 if leaf == "weight" else 3
        providers = [down, TensorParallel({"*proj.weight": 0})]
        return model_layouts({fqn: (rows, 3)}, grids, LayoutRegistry(providers))[fqn]

    right = {components: on_disk(made(components), grids) for components in ("split", "fused")}
    own, *others = variants(made(components), grids.dense)
    assert right.pop(components) == on_disk(own, grids)
    (opposite,) = right.values()
    assert [opposite] == [on_disk(other, grids) for other in others]


def test_a_parameter_without_parts_has_one_form():
    grids = Grids.from_sizes(0, tp=2)
    made = layout_of("mlp.fc2.weight", (4, 3), grids, tp=0)
    assert [made] == list(variants(made, grids.dense))


@pytest.mark.parametrize("tp", [None, 0])
@pytest.mark.parametrize("components", ["split", "fused"])
@pytest.mark.parametrize(
    "fqn",
    [
        "mlp.experts.fc1.weight{}",
        "mlp.experts.local_experts.{}.fc1.weight",
        "mlp.experts.{}.fc1.weight",
    ],
)
def test_a_single_expert_has_four_forms(fqn, components, tp):
    made, right = (
        layout_of(fqn.format(1), (4, 3), GRIDS, beside=[fqn.format(0)], components=c, tp=tp)
        for c in (components, {"split": "fused", "fused": "split"}[components])
    )
    found = [on_disk(form, GRIDS) for form in variants(made, GRIDS.expert)]
    assert [on_disk(made, GRIDS), on_disk(right, GRIDS)] == found[::2]
    assert [together(form) for form in found[::2]] == [bare(form) for form in found[1::2]]


def together(single):
    """What single experts write if all of a layer are one tensor: the index becomes a dim."""
    found = set()
    for key, shape, offsets, sizes, start, strides, place in single:
        head, index, tail = re.fullmatch(
            r"(.*?)\.?(\d+)((?:\.fc1\.weight)?(?:_[wv])?)", key
        ).groups()
        offsets, sizes = (int(index), *offsets), (1, *sizes)
        found.add((head + tail, (4, *shape), offsets, sizes, start, strides, place))
    return found


def bare(stacked):
    """Leaves out the stride of the dim that has one expert."""
    return {(*slab[:5], slab[5][1:], slab[6]) for slab in stacked}


@pytest.mark.parametrize("tp", [None, 1])
@pytest.mark.parametrize(("components", "stacked"), FORMS)
def test_stacked_experts_have_four_forms(components, stacked, tp):
    fqn, shape = "mlp.experts.fc1.weight", (2, 4, 3)
    made = layout_of(fqn, shape, GRIDS, tp=tp, components=components, stacked=stacked)
    found = [on_disk(form, GRIDS) for form in variants(made, GRIDS.expert)]
    assert on_disk(made, GRIDS) == found[0]
    assert 4 == len(found)
    for other, form in FORMS:
        right = layout_of(fqn, shape, GRIDS, tp=tp, components=other, stacked=form)
        assert on_disk(right, GRIDS) in found, (other, form)
