"""The expert-parallel grid: whose index an expert gets, by whole tokens, by the model's own grid."""

import types

import pytest
import torch

from shardplan.layouts import (
    ExpertGrid,
    ExpertIndex,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    Shard,
    SwiGLU,
    TensorParallel,
    Unstack,
    expert_name,
    model_layouts,
    prove,
    tiling_faults,
)
from shardplan.layouts.experts import ExpertName, global_expert_index
from shardplan.layouts.variants import variants


def info(
    fqn="experts.linear_fc1.weight0",
    shape=(4, 2),
    counted=None,
    owners=(),
    param=None,
    rank=0,
    **sizes,
):
    grids = Grids.from_sizes(rank, **(sizes or {"dp_shard": 2, "ep": 2}))
    return ParamInfo(fqn, shape, grids.expert, True, counted, param, owners)


# Names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fqn", "found"),
    [
        # grouped
        ("mlp.experts.linear_fc1.weight0", ("mlp.experts.linear_fc1.weight", 0, "")),
        ("mlp.experts.linear_fc1.weight10", ("mlp.experts.linear_fc1.weight", 10, "")),
        ("mlp.experts.linear_fc2.bias7", ("mlp.experts.linear_fc2.bias", 7, "")),
        ("experts.linear_fc1.weight1", ("experts.linear_fc1.weight", 1, "")),
        ("experts.weight1", ("experts.weight", 1, "")),
        # sequential
        (
            "mlp.experts.local_experts.3.linear_fc1.weight",
            ("mlp.experts.local_experts.", 3, ".linear_fc1.weight"),
        ),
        ("experts.12.w", ("experts.", 12, ".w")),
        ("layers.1.experts.0.w1.weight", ("layers.1.experts.", 0, ".w1.weight")),
        ("experts.0", ("experts.", 0, "")),
        # the index before the weight counts, not a digit that its name ends in
        ("experts.2.linear.weight1", ("experts.", 2, ".linear.weight1")),
        # nested: the last mark
        ("experts.1.experts.2.w", ("experts.1.experts.", 2, ".w")),
        # stacked: no index
        ("mlp.experts.linear_fc1.weight", ("mlp.experts.linear_fc1.weight", None, "")),
        ("mlp.experts.gate_up_proj", ("mlp.experts.gate_up_proj", None, "")),
        ("layers.1.mlp.experts.w", ("layers.1.mlp.experts.w", None, "")),
        ("experts.linear_fc1.lora_weight1", ("experts.linear_fc1.lora_weight1", None, "")),
        ("experts.linear_fc1.weight1_scale", ("experts.linear_fc1.weight1_scale", None, "")),
        ("experts", ("experts", None, "")),
    ],
)
def test_an_experts_index_stands_in_whole_tokens(fqn, found):
    assert ExpertName(*found) == expert_name(fqn)


@pytest.mark.parametrize(
    "fqn",
    [
        "layers.1.mlp.linear_fc1.weight",
        "layers.1.mlp.linear_fc1.weight1",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc1.weight1",
        "mlp.experts_gate.weight1",
        "myexperts.0.w",
        "mlp.router.weight",
        "expert.0.w",
        "",
    ],
)
def test_a_dense_parameter_is_none(fqn):
    assert expert_name(fqn) is None


def test_other_tokens():
    assert ExpertName("moe.", 1, ".w") == expert_name("moe.1.w", ("moe",))
    assert expert_name("experts.1.w", ("moe",)) is None


# Names on disk ---------------------------------------------------------------------------------------------------


def keys(provider, names, rank=0, shape=(2, 2), **sizes):
    """Name on disk of each local parameter of a rank."""
    grids = Grids.from_sizes(rank, **sizes)
    layouts = model_layouts(dict.fromkeys(names, shape), grids, LayoutRegistry([provider]))
    return {fqn: layout.slabs(grids.of(layout.family))[0].key for fqn, layout in layouts.items()}


def test_substrings_are_not_renamed_and_renames_do_not_chain():
    """16 experts a rank, rank 1: weight1 → weight17, not what weight10 or layers.1 hold."""
    place = "decoder.layers.1.mlp.experts.linear_fc1."
    names = [f"{place}weight{i}" for i in range(16)] + [f"{place}bias{i}" for i in range(16)]
    dense = ["decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.linear_fc1.weight1"]
    found = keys(ExpertGrid(), names + dense, rank=1, dp_shard=2, ep=2)
    assert f"{place}weight16" == found[f"{place}weight0"]
    assert f"{place}weight17" == found[f"{place}weight1"]
    assert f"{place}weight26" == found[f"{place}weight10"]
    assert f"{place}weight31" == found[f"{place}weight15"]
    assert f"{place}bias17" == found[f"{place}bias1"]
    assert {name: name for name in dense} == {name: found[name] for name in dense}
    assert len(found) == len(set(found.values()))  # one to one
    assert {f"{place}weight{i}" for i in range(16, 32)} < set(found.values())


def test_sequential_experts_of_both_ranks_have_different_names():
    """EP 2, 4 experts: both ranks call theirs experts.0 and experts.1."""
    names = ["experts.0.w", "experts.1.w"]
    found = [keys(ExpertGrid(), names, rank=rank, dp_shard=2, ep=2) for rank in range(2)]
    assert {"experts.0.w": "experts.0.w", "experts.1.w": "experts.1.w"} == found[0]
    assert {"experts.0.w": "experts.2.w", "experts.1.w": "experts.3.w"} == found[1]


def test_the_models_own_expert_grid_counts_not_a_global_one():
    """8 experts over the model's EP 4: rank 3 holds 6 and 7; a global EP 2 would say 4 and 5."""
    names = ["experts.0.w", "experts.1.w"]
    found = keys(ExpertGrid(num_experts=8), names, rank=3, dp_shard=4, ep=4)
    assert ["experts.6.w", "experts.7.w"] == list(found.values())
    with pytest.raises(LayoutError) as error:
        keys(ExpertGrid(num_experts=8), names, rank=3, dp_shard=4, ep=2)
    assert str(error.value) == (
        "experts.0.w: the rank has 2 local experts but 8 experts over 2 expert-parallel ranks "
        "make 4 (edp_shard 1/2, ep 1/2). Pass the model's own pg_collection (or grid=): its ep "
        "size is not the one that the model was built with."
    )


def test_expert_parallelism_off_leaves_the_names():
    names = ["experts.0.w", "experts.1.w"]
    assert dict(zip(names, names, strict=True)) == keys(ExpertGrid(), names, rank=1, dp_shard=4)


def test_a_table_places_experts_that_are_no_blocks():
    names = ["experts.0.w", "experts.1.w"]
    provider = ExpertGrid(indices=((0, 2), (3, 1)))
    assert ["experts.3.w", "experts.1.w"] == list(
        keys(provider, names, rank=1, dp_shard=2, ep=2).values()
    )


# Stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "param", "stages"),
    [
        (ExpertGrid(), info(counted=2), (ExpertIndex(0, 2),)),
        (ExpertGrid(8), info(counted=4), (ExpertIndex(0, 4),)),
        (ExpertGrid(8), info(), (ExpertIndex(0, 4),)),
        (ExpertGrid(), info("experts.w", (3, 4, 2)), (Shard(0, "ep"),)),
        (ExpertGrid(6), info("experts.w", (3, 4, 2)), (Shard(0, "ep"),)),
        (ExpertGrid(6), info("experts.bias", (3, 4)), (Shard(0, "ep"),)),
        (ExpertGrid(stacked="single"), info("experts.w", (3, 4, 2)), (Shard(0, "ep"), Unstack())),
    ],
)
def test_stages(provider, param, stages):
    assert provider.claims(param)
    assert stages == provider.stages(param)


def test_dense_parameters_are_not_claimed():
    assert not ExpertGrid(8).claims(ParamInfo("w", (2,), Grids.from_sizes(0).dense))
    assert Level.EXPERT is ExpertGrid().level


def test_single_experts_that_were_saved_as_one_tensor():
    """2 local experts of 2 ranks fill (4, 2, 2) under one name, together."""
    names = ["mlp.experts.linear_fc1.weight0", "mlp.experts.linear_fc1.weight1"]
    boxes = []
    for rank in range(2):
        grids = Grids.from_sizes(rank, dp_shard=2, ep=2)
        registry = LayoutRegistry([ExpertGrid()])
        for layout in model_layouts(dict.fromkeys(names, (2, 2)), grids, registry).values():
            _, stacked = variants(layout, grids.expert)
            (slab,) = stacked.slabs(grids.expert)
            assert ("mlp.experts.linear_fc1.weight", (4, 2, 2)) == (slab.key, slab.global_shape)
            boxes.append((slab.offsets, slab.sizes))
    assert [] == tiling_faults((4, 2, 2), boxes)
    assert [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)] == [offsets for offsets, _ in boxes]


def test_stacked_experts_may_be_one_tensor_each_on_disk():
    grids = Grids.from_sizes(1, dp_shard=2, ep=2)
    layouts = model_layouts(
        {"mlp.experts.w": (2, 3, 4)}, grids, LayoutRegistry([ExpertGrid(stacked="single")])
    )
    layout = layouts["mlp.experts.w"]
    prove(layout, grids.expert)
    assert [
        ("mlp.experts.2.w", (3, 4), (0, 0), 0),
        ("mlp.experts.3.w", (3, 4), (0, 0), 12),
    ] == [(s.key, s.global_shape, s.offsets, s.start) for s in layout.slabs(grids.expert)]


def test_what_all_experts_share_keeps_its_name():
    """A 2-D tensor of another height than the experts: a replica, with either form on disk."""
    for provider in (ExpertGrid(4), ExpertGrid(4, stacked="single")):
        assert {"mlp.experts.gate.weight": "mlp.experts.gate.weight"} == keys(
            provider, ["mlp.experts.gate.weight"], shape=(3, 5), dp_shard=2, ep=2
        )


def test_an_experts_dtensor_over_its_own_axis_places_itself():
    mesh = types.SimpleNamespace(mesh_dim_names=("edp_shard", "ep"))
    param = info("experts.w", (6, 4, 2), param=types.SimpleNamespace(device_mesh=mesh))
    assert () == ExpertGrid().stages(param)
    other = types.SimpleNamespace(mesh_dim_names=("edp_shard",))
    param = info("experts.w", (3, 4, 2), param=types.SimpleNamespace(device_mesh=other))
    assert (Shard(0, "ep"),) == ExpertGrid().stages(param)


def test_experts_over_tensor_parallelism_and_swiglu():
    """Etp 2: rows of both halves over etp, columns of fc2 over etp, every key covered once."""
    grids = Grids.from_sizes(0, dp_shard=4, tp=2, ep=2)
    registry = LayoutRegistry(
        [
            SwiGLU(["*.linear_fc1.*"]),
            TensorParallel({"*.linear_fc1.*": 0, "*.linear_fc2.*": 1}),
            ExpertGrid(),
        ]
    )
    model = {
        "experts.linear_fc1.weight0": (4, 3),
        "experts.linear_fc1.weight1": (4, 3),
        "experts.linear_fc2.weight0": (3, 2),
        "experts.linear_fc2.weight1": (3, 2),
    }
    found = {}
    for layout in model_layouts(model, grids, registry).values():
        assert ("pp", "edp_replicate", "edp_shard", "ep", "etp") == grids.expert.axes
        assert ("edp_replicate", "edp_shard") == layout.replica_axes(grids.expert)
        prove(layout, grids.expert)
        for place in grids.expert.walk(("ep", "etp")):
            found |= {slab.key: slab.global_shape for slab in layout.slabs(place)}
    assert {
        **{f"experts.linear_fc1.weight{i}_{half}": (4, 3) for i in range(4) for half in "wv"},
        **{f"experts.linear_fc2.weight{i}": (3, 4) for i in range(4)},
    } == found


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "param", "message"),
    [
        (
            ExpertGrid(6),
            info(dp_shard=4, ep=4),
            "experts.linear_fc1.weight0: 6 experts can't be divided by 4 expert-parallel ranks "
            "(ep 0/4). Choose an ep size that divides the number of experts.",
        ),
        (
            ExpertGrid(),
            info(),
            "experts.linear_fc1.weight0: the number of experts of its layer is not known (ep 0/2). "
            "Pass ExpertGrid(num_experts=...).",
        ),
        (
            ExpertGrid(),
            info("experts.4.w", counted=4),
            "experts.4.w: local expert 4 is not in [0, 4), the experts of one rank (ep 0/2). Name "
            "experts locally, from 0 on every rank, or pass the layer's number of experts to "
            "ExpertGrid(num_experts=...).",
        ),
        (
            ExpertGrid(8),
            info("experts.w", (3, 4, 2)),
            "experts.w: dim 0 of stacked experts has 3 rows but a rank holds 4 experts (ep 0/2). "
            "Mend the number of experts, or pass ExpertGrid(num_experts=...).",
        ),
        (
            ExpertGrid(),
            info("experts.bias", (3, 4)),
            "experts.bias: its shape (3, 4) does not tell whether it is stacked by expert or "
            "shared by all, and the number of experts of its layer is not known (ep 0/2). Pass "
            "ExpertGrid(num_experts=...).",
        ),
        (
            ExpertGrid(indices=((0, 2), (1, 3))),
            info("experts.w", (2, 4, 2)),
            "experts.w: ExpertGrid(indices=...) puts stacked experts in the order [0, 2, 1, 3] "
            "(ep 0/2). Stacked experts lie on disk in the order of the ranks; give one block "
            "after another.",
        ),
        (
            ExpertGrid(indices=((0, 1),)),
            info(),
            "experts.linear_fc1.weight0: ExpertGrid(indices=...) has 1 rows for 2 expert-parallel "
            "ranks (ep 0/2). Give one row of equal length for each rank.",
        ),
        (
            ExpertGrid(indices=((0, 1), (2,))),
            info(),
            "experts.linear_fc1.weight0: ExpertGrid(indices=...) has 2 rows for 2 expert-parallel "
            "ranks (ep 0/2). Give one row of equal length for each rank.",
        ),
        (
            ExpertGrid(indices=((0, 1), (1, 2))),
            info(),
            "experts.linear_fc1.weight0: ExpertGrid(indices=...) names the experts [0, 1, 1, 2], "
            "not each of 0 … 3 once (ep 0/2). Give every global expert index once.",
        ),
    ],
)
def test_what_can_not_be_is_refused(provider, param, message):
    with pytest.raises(LayoutError) as error:
        provider.stages(param)
    assert message == str(error.value)


def test_a_table_of_blocks_places_stacked_experts():
    blocks = ExpertGrid(indices=((0, 1), (2, 3)))
    assert (Shard(0, "ep"),) == blocks.stages(info("experts.w", (2, 4, 2)))


def test_without_expert_parallelism_a_flat_tensor_may_be_anything():
    assert () == ExpertGrid().stages(info("experts.bias", (3, 4), dp_shard=2))


# Live modules ------------------------------------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    """Megatron's grouped linear: one weight for each local expert."""

    def __init__(self, count):
        super().__init__()
        for i in range(count):
            setattr(self, f"weight{i}", torch.nn.Parameter(torch.zeros(4, 2)))


class MoE(torch.nn.Module):
    def __init__(self, count, indices=None, total=None):
        super().__init__()
        self.experts = Experts(count)
        self.router = torch.nn.Linear(2, 8)
        if indices is not None:
            self.local_expert_indices = indices
        if total is not None:
            self.config = types.SimpleNamespace(num_moe_experts=total)


def live_keys(model, rank=1, **sizes):
    grids = Grids.from_sizes(rank, **sizes)
    layouts = model_layouts(model, grids, LayoutRegistry([ExpertGrid()]))
    return [
        slab.key
        for fqn, layout in layouts.items()
        if "experts" in fqn
        for slab in layout.slabs(grids.of(layout.family))
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"total": 4}, {"indices": [2, 3]}, {"indices": torch.tensor([2, 3]), "total": 4}],
)
def test_a_live_layer_is_counted_or_says_how_many_experts_it_has(options):
    assert ["experts.weight2", "experts.weight3"] == live_keys(MoE(2, **options), dp_shard=2, ep=2)


def test_a_live_layers_indices_must_be_those_of_the_grid():
    with pytest.raises(LayoutError) as error:
        live_keys(MoE(2, indices=[0, 1]), dp_shard=2, ep=2)
    assert str(error.value) == (
        "experts.weight0: the layer's local_expert_indices are [0, 1], but ep rank 1 of 2 holds "
        "[2, 3] (ep 1/2). Pass the model's own pg_collection, or ExpertGrid(indices=...) for a "
        "placement that is not in blocks."
    )


def test_a_live_layers_number_of_experts_must_be_that_of_the_grid():
    with pytest.raises(LayoutError, match=r"has 2 local experts but 8 experts over 2 .* make 4"):
        live_keys(MoE(2, total=8), dp_shard=2, ep=2)


def test_layers_may_have_different_numbers_of_experts():
    model = torch.nn.ModuleList([MoE(1), MoE(3)])
    assert ["0.experts.weight1", "1.experts.weight3", "1.experts.weight4", "1.experts.weight5"] == (
        live_keys(model, dp_shard=2, ep=2)
    )


def test_dense_parameters_of_the_layer_stay_on_the_dense_grid():
    grids = Grids.from_sizes(0, dp_shard=2, ep=2)
    layouts = model_layouts(MoE(2), grids, LayoutRegistry([ExpertGrid()]))
    assert "dense" == layouts["router.weight"].family
    assert "expert" == layouts["experts.weight0"].family


# The one number ------------------------------------------------------------------------------------------------------------


def test_global_expert_index():
    """megatron's layer offset for 8 experts at ep rank 3 of 4 is 6."""
    grid = Grids.from_sizes(3, dp_shard=4, ep=4).expert
    assert [6, 7] == [global_expert_index(grid, i, 8) for i in (0, 1)]
    with pytest.raises(LayoutError, match="local expert 2 is not in"):
        global_expert_index(grid, 2, 8)
    with pytest.raises(LayoutError, match="6 experts can't be divided by 4"):
        global_expert_index(grid, 0, 6)
