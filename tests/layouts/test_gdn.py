"""Gated DeltaNet components: q k v z b a at every offset, and the module's own names."""

import types

import pytest
import torch

from shardplan.layouts import (
    GDN,
    FSDPFlatBuffer,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    TensorParallel,
    model_layouts,
    prove,
)

# in_proj of the worked example: 28 rows.
ROWS = {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 2, "alpha": 2}
STARTS = {"query": 0, "key": 4, "value": 8, "z": 16, "beta": 24, "alpha": 26}


def layout_of(ranges, components):
    """TP 2 leaves 14 local rows; FSDP cuts them into the given ranges."""
    grids = Grids.from_sizes(0, dp_shard=len(ranges), tp=2)
    registry = LayoutRegistry(
        [
            GDN({"*": ROWS}, components=components),
            TensorParallel({"*": 0}),
            FSDPFlatBuffer({"*": ranges}),
        ]
    )
    layout = registry.layout(ParamInfo("in_proj.weight", (14,), grids.dense))
    prove(layout, grids.dense)
    return layout, grids.dense


# (tp, dp) → (offset, size) in the canonical order q k v z b a.
FSDP_4 = (
    ((0, 4), (4, 8), (8, 12), (12, 14)),
    {
        (0, 0): [(0, 2), (4, 2)],
        (0, 1): [(8, 4)],
        (0, 2): [(16, 4)],
        (0, 3): [(24, 1), (26, 1)],
        (1, 0): [(2, 2), (6, 2)],
        (1, 1): [(12, 4)],
        (1, 2): [(20, 4)],
        (1, 3): [(25, 1), (27, 1)],
    },
)
FSDP_3 = (
    ((0, 5), (5, 10), (10, 14)),
    {
        (0, 0): [(0, 2), (4, 2), (8, 1)],
        (0, 1): [(9, 3), (16, 2)],
        (0, 2): [(18, 2), (24, 1), (26, 1)],
        (1, 0): [(2, 2), (6, 2), (12, 1)],
        (1, 1): [(13, 3), (20, 2)],
        (1, 2): [(22, 2), (25, 1), (27, 1)],
    },
)


@pytest.mark.parametrize(("ranges", "right"), [FSDP_4, FSDP_3], ids=["FSDP 4", "FSDP 3"])
def test_fused_offsets_under_tensor_parallelism_and_fsdp(ranges, right):
    layout, grid = layout_of(ranges, "fused")
    found = {
        (place.index("tp"), place.index("dp_shard")): [
            (slab.offsets[0], slab.sizes[0]) for slab in layout.slabs(place)
        ]
        for place in grid.walk(("tp", "dp_shard"))
    }
    assert right == found
    slab = layout.slabs(grid)[0]
    assert ("in_proj.weight", (28,)) == (slab.key, slab.global_shape)


@pytest.mark.parametrize(("ranges", "right"), [FSDP_4, FSDP_3], ids=["FSDP 4", "FSDP 3"])
def test_split_offsets_are_the_fused_ones_less_each_components_start(ranges, right):
    layout, grid = layout_of(ranges, "split")
    for place in grid.walk(("tp", "dp_shard")):
        slabs = layout.slabs(place)
        components = [slab.key.removeprefix("in_proj.weight.") for slab in slabs]
        assert [(ROWS[name],) for name in components] == [slab.global_shape for slab in slabs]
        assert right[place.index("tp"), place.index("dp_shard")] == [
            (STARTS[name] + slab.offsets[0], slab.sizes[0])
            for name, slab in zip(components, slabs, strict=True)
        ]


def test_a_component_that_does_not_divide_is_named():
    grids = Grids.from_sizes(0, tp=4)
    provider = GDN({"*": ROWS})
    with pytest.raises(LayoutError) as error:
        provider.stages(ParamInfo("in_proj.weight", (7,), grids.dense))
    assert str(error.value) == (
        "in_proj.weight: the 2 rows of its GDN component 'beta' can't be divided by 4 "
        "tensor-parallel ranks (tp 0/4). Choose a tensor-parallel size that divides every "
        "component."
    )


def test_patterns_are_whole_names():
    provider = GDN({"*.in_proj.weight": ROWS})
    grid = Grids.from_sizes(0).dense
    assert Level.COMPONENT is provider.level
    assert provider.claims(ParamInfo("a.in_proj.weight", (28, 2), grid))
    assert not provider.claims(ParamInfo("in_proj.weight", (28, 2), grid))
    assert not provider.claims(ParamInfo("a.in_proj.weight2", (28, 2), grid))
    assert not provider.claims(ParamInfo("a.in_proj.bias", (28, 2), grid))


# Live modules --------------------------------------------------------------------------------------------------


class GatedDeltaNet(torch.nn.Module):
    """Shapes and attributes of megatron/core/ssm/gated_delta_net at a tensor-parallel size."""

    def __init__(self, tp=1, bias=False, sections=False):
        super().__init__()
        self.qk_dim, self.v_dim, self.num_value_heads = 4, 8, 2
        self.in_proj = torch.nn.Linear(3, 28 // tp, bias=bias)
        self.conv1d = torch.nn.Conv1d(16 // tp, 16 // tp, 4, groups=16 // tp, bias=bias)
        self.out_proj = torch.nn.Linear(8 // tp, 3, bias=False)
        self.out_norm = torch.nn.RMSNorm(4)
        self.A_log = torch.nn.Parameter(torch.zeros(2 // tp))
        self.dt_bias = torch.nn.Parameter(torch.zeros(2 // tp))
        if sections:
            self.in_proj_split_names = ("query", "key", "value", "z", "beta", "alpha")
            self.in_proj_split_sections = [n // tp for n in (4, 4, 8, 8, 2, 2)]
        for tensor in (
            *self.in_proj.parameters(),
            *self.conv1d.parameters(),
            self.A_log,
            self.dt_bias,
        ):
            tensor.tensor_model_parallel, tensor.partition_dim = True, 0
        self.out_proj.weight.tensor_model_parallel, self.out_proj.weight.partition_dim = True, 1


class Layer(torch.nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.self_attention = mixer


def shapes(model, tp=1, provider=None):
    grids = Grids.from_sizes(0, tp=tp)
    registry = LayoutRegistry([provider or GDN(), TensorParallel()])
    found = {}
    for layout in model_layouts(model, grids, registry).values():
        prove(layout, grids.dense)
        found |= {slab.key: slab.global_shape for slab in layout.slabs(grids.dense)}
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sections", [True, False])
def test_a_live_module_gives_its_components_whatever_the_tensor_parallel_size(tp, sections):
    place = "self_attention"
    assert {
        f"{place}.in_proj.weight.query": (4, 3),
        f"{place}.in_proj.weight.key": (4, 3),
        f"{place}.in_proj.weight.value": (8, 3),
        f"{place}.in_proj.weight.z": (8, 3),
        f"{place}.in_proj.weight.beta": (2, 3),
        f"{place}.in_proj.weight.alpha": (2, 3),
        f"{place}.conv1d.weight.query": (4, 1, 4),
        f"{place}.conv1d.weight.key": (4, 1, 4),
        f"{place}.conv1d.weight.value": (8, 1, 4),
        f"{place}.out_proj.weight": (3, 8),
        f"{place}.out_norm.weight": (4,),
        f"{place}.A_log": (2,),
        f"{place}.dt_bias": (2,),
    } == shapes(Layer(GatedDeltaNet(tp, sections=sections)), tp)


@pytest.mark.parametrize("sections", [True, False])
def test_the_components_of_a_live_module_lie_in_megatrons_order(sections):
    """q k v z beta alpha; beta and alpha have the same number of rows."""
    grids = Grids.from_sizes(0, tp=2)
    registry = LayoutRegistry([GDN(), TensorParallel()])
    layouts = model_layouts(GatedDeltaNet(2, sections=sections), grids, registry)
    first_rows = {
        slab.key.removeprefix("in_proj.weight."): slab.start // 3
        for slab in layouts["in_proj.weight"].slabs(grids.dense)
    }
    assert {"query": 0, "key": 2, "value": 4, "z": 8, "beta": 12, "alpha": 13} == first_rows
    first_rows = {
        slab.key.removeprefix("conv1d.weight."): slab.start // 4
        for slab in layouts["conv1d.weight"].slabs(grids.dense)
    }
    assert {"query": 0, "key": 2, "value": 4} == first_rows


def test_biases_are_split_too():
    found = shapes(GatedDeltaNet(2, bias=True), 2)
    assert (8,) == found["in_proj.bias.value"]
    assert (4,) == found["conv1d.bias.query"]
    assert "in_proj.bias" not in found


def test_a_live_module_fused():
    found = shapes(GatedDeltaNet(2), 2, GDN(components="fused"))
    assert (28, 3) == found["in_proj.weight"]
    assert (16, 1, 4) == found["conv1d.weight"]


def test_the_modules_own_names_and_sections_count():
    """GDN2: seven sections, query key value z f b w."""
    module = GatedDeltaNet()
    module.in_proj = torch.nn.Linear(3, 40, bias=False)
    module.in_proj_split_names = ("query", "key", "value", "z", "f", "b", "w")
    module.in_proj_split_sections = (4, 4, 8, 8, 4, 4, 8)
    found = shapes(module)
    assert {
        "query": (4, 3),
        "key": (4, 3),
        "value": (8, 3),
        "z": (8, 3),
        "f": (4, 3),
        "b": (4, 3),
        "w": (8, 3),
    } == {k.rpartition(".")[2]: v for k, v in found.items() if k.startswith("in_proj")}
    assert {"query", "key", "value"} == {
        k.rpartition(".")[2] for k in found if k.startswith("conv1d")
    }


def test_names_and_sections_of_different_length_are_refused():
    module = GatedDeltaNet(sections=True)
    module.in_proj_split_names = ("query", "key")
    with pytest.raises(LayoutError) as error:
        shapes(module)
    assert str(error.value) == (
        "in_proj.weight: 2 names ('query', 'key') for 6 sections (4, 4, 8, 8, 2, 2) (one rank). "
        "in_proj_split_names and in_proj_split_sections of the module must match."
    )


def test_sections_that_do_not_cover_the_rows_are_refused():
    module = GatedDeltaNet(sections=True)
    module.in_proj_split_sections = (4, 4, 8, 8, 2, 3)
    with pytest.raises(LayoutError) as error:
        shapes(module)
    assert str(error.value) == (
        "in_proj.weight: GDN components cover 29 rows of dim 0 (query 4 + key 4 + value 8 + z 8 + "
        "beta 2 + alpha 3) but the local tensor has 28 (one rank). Give the sizes that this "
        "tensor-parallel rank holds."
    )


def test_another_modules_in_proj_is_not_claimed():
    """Only the projection that belongs to the GDN itself, and only a GDN's."""

    class Mamba(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = torch.nn.Linear(3, 4)

    class Odd(GatedDeltaNet):
        def __init__(self):
            super().__init__()
            self.inner = Mamba()
            self.in_proj_extra = torch.nn.Linear(3, 4)

    assert {"in_proj.weight", "in_proj.bias"} == set(shapes(Mamba()))
    found = shapes(Odd())
    assert {"inner.in_proj.weight", "inner.in_proj.bias", "in_proj_extra.weight"} < set(found)


def test_a_description_comes_before_the_live_module():
    module = GatedDeltaNet()
    found = shapes(module, provider=GDN({"in_proj.weight": {"a": 20, "b": 8}}))
    assert {"in_proj.weight.a": (20, 3), "in_proj.weight.b": (8, 3)} == {
        k: v for k, v in found.items() if k.startswith("in_proj")
    }
    assert "conv1d.weight.query" in found


def test_an_unrelated_module_with_only_one_of_the_dims_is_not_a_gdn():
    owner = types.SimpleNamespace(qk_dim=4)
    param = ParamInfo("in_proj.weight", (4,), Grids.from_sizes(0).dense, owners=(("", owner),))
    assert not GDN().claims(param)
