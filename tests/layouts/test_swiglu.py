"""SwiGLU halves: who is claimed, how they are cut, and the order of rows on every rank."""

import types

import pytest
import torch

from shardplan.layouts import (
    Concat,
    Fuse,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    SwiGLU,
    TensorParallel,
    model_layouts,
    prove,
)
from shardplan.layouts.fsdp import FSDPFlatBuffer


def info(fqn="mlp.linear_fc1.weight", shape=(8, 2), grids=None, is_expert=False, owners=()):
    grids = grids or Grids.from_sizes(0)
    grid = grids.expert if is_expert else grids.dense
    return ParamInfo(fqn, shape, grid, is_expert, owners=owners)


def gated(**attributes):
    return (("", types.SimpleNamespace(**attributes)),)


# Who is claimed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fqn", "claimed"),
    [
        ("linear_fc1.weight", True),
        ("decoder.layers.0.mlp.linear_fc1.weight", True),
        ("mlp.linear_fc1.bias", True),
        ("mlp.experts.linear_fc1.weight0", True),
        ("mlp.experts.linear_fc1.weight15", True),
        ("mlp.experts.linear_fc1.bias3", True),
        ("mlp.experts.local_experts.1.linear_fc1.weight", True),
        ("mlp.shared_experts.linear_fc1.weight", True),
        ("mlp.linear_fc2.weight", False),
        ("mlp.linear_fc1.layer_norm_weight", False),
        ("mlp.linear_fc1.weight_scale", False),
        ("mlp.linear_fc10.weight", False),
        ("mlp.my_linear_fc1.weight", False),
    ],
)
def test_a_gated_owner_claims_its_first_projection(fqn, claimed):
    assert claimed == SwiGLU().claims(info(fqn, owners=gated(gated_linear_unit=True)))
    assert not SwiGLU().claims(info(fqn, owners=gated(gated_linear_unit=False)))
    assert not SwiGLU().claims(info(fqn, owners=gated()))
    assert not SwiGLU().claims(info(fqn))


def test_the_config_of_an_owner_may_say_it():
    config = types.SimpleNamespace(gated_linear_unit=True)
    assert SwiGLU().claims(info(owners=gated(config=config)))


def test_the_nearest_owner_decides():
    plain = ("mlp", types.SimpleNamespace(gated_linear_unit=False))
    model = ("", types.SimpleNamespace(gated_linear_unit=True))
    assert not SwiGLU().claims(info(owners=(model, plain)))
    assert SwiGLU().claims(info(owners=(plain, model)))


def test_a_pattern_claims_with_or_without_a_module():
    provider = SwiGLU(["*.gate_up.weight"])
    assert provider.claims(info("mlp.gate_up.weight"))
    assert not provider.claims(info("gate_up.weight"))
    assert not provider.claims(info("mlp.gate_up.weight1"))
    assert not provider.claims(info("mlp.linear_fc1.weight"))
    assert Level.COMPONENT is provider.level


# How they are cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "stages"),
    [
        ((8, 2), {}, (Concat(0, (("_w", 4), ("_v", 4)), "SwiGLU halves"),)),
        ((8,), {}, (Concat(0, (("_w", 4), ("_v", 4)), "SwiGLU halves"),)),
        ((8, 2), {"sizes": (5, 3)}, (Concat(0, (("_w", 5), ("_v", 3)), "SwiGLU halves"),)),
        ((2, 8), {"dim": 1}, (Concat(1, (("_w", 4), ("_v", 4)), "SwiGLU halves"),)),
        (
            (8, 2),
            {"components": "fused"},
            (Concat(0, (("_w", 4), ("_v", 4)), "SwiGLU halves"), Fuse(0)),
        ),
    ],
)
def test_stages(shape, options, stages):
    assert stages == SwiGLU(**options).stages(info(shape=shape))


def test_stacked_experts_have_their_rows_in_dim_1():
    """[E, 2F, H]: the halves of each expert, not half of the experts."""
    (stage,) = SwiGLU().stages(info("experts.linear_fc1", (2, 8, 3), is_expert=True))
    assert Concat(1, (("_w", 4), ("_v", 4)), "SwiGLU halves") == stage
    (stage,) = SwiGLU().stages(info("experts.linear_fc1.weight0", (8, 3), is_expert=True))
    assert 0 == stage.dim


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            (3, 2),
            {},
            "mlp.linear_fc1.weight: two SwiGLU halves can't share 3 rows of dim 0 evenly (tp 0/2). "
            "Pass the two sizes that this rank holds to SwiGLU(sizes=...).",
        ),
        (
            (),
            {},
            "mlp.linear_fc1.weight: SwiGLU halves lie along dim 0 but the tensor has 0 dims "
            "(tp 0/2). Pass SwiGLU(dim=...).",
        ),
        (
            (4, 2),
            {"dim": 2},
            "mlp.linear_fc1.weight: SwiGLU halves lie along dim 2 but the tensor has 2 dims "
            "(tp 0/2). Pass SwiGLU(dim=...).",
        ),
    ],
)
def test_what_can_not_be_halved_is_refused(shape, options, message):
    """F = 3 at TP 2 leaves 3 local rows: 2F divides by TP, F does not."""
    with pytest.raises(LayoutError) as error:
        SwiGLU(**options).stages(info(shape=shape, grids=Grids.from_sizes(0, tp=2)))
    assert message == str(error.value)


def test_sizes_that_do_not_cover_the_rows_are_refused_with_all_numbers():
    grids = Grids.from_sizes(7, dp_shard=8, tp=2)
    layout = LayoutRegistry([SwiGLU(["*"], sizes=(1408, 1408))]).layout(info(shape=(2820, 1)))
    with pytest.raises(LayoutError) as error:
        layout.slabs(grids.dense)
    assert str(error.value) == (
        "mlp.linear_fc1.weight: SwiGLU halves cover 2816 rows of dim 0 (w 1408 + v 1408) but the "
        "local tensor has 2820 (dp_shard 3/8, tp 1/2). Give the sizes that this tensor-parallel "
        "rank holds."
    )


# The order of rows ----------------------------------------------------------------------------------------------


def fused(tp, dp, numel, columns=2):
    """The fused layout of an F = 4 projection, cut evenly over `dp` ranks of each tp rank."""
    grids = Grids.from_sizes(0, dp_shard=dp, tp=tp)
    each = numel // dp
    ranges = tuple((i * each, (i + 1) * each) for i in range(dp))
    registry = LayoutRegistry(
        [
            SwiGLU(["*"], components="fused"),
            TensorParallel({"*": 0}),
            FSDPFlatBuffer({"*": ranges}),
        ]
    )
    layout = registry.layout(info(shape=(8 // tp, columns), grids=grids))
    prove(layout, grids.dense)
    return layout, grids.dense


def test_fused_rows_at_tp_2_and_dp_2():
    """Local rows [gate_t (2); up_t (2)] in canonical [gate (4); up (4)]."""
    layout, grid = fused(2, 2, 8)
    rows = {
        (place.index("tp"), place.index("dp_shard")): [
            (s.offsets[0], s.sizes[0]) for s in layout.slabs(place)
        ]
        for place in grid.walk(("tp", "dp_shard"))
    }
    assert {
        (0, 0): [(0, 2)],
        (0, 1): [(4, 2)],
        (1, 0): [(2, 2)],
        (1, 1): [(6, 2)],
    } == rows


def test_loaded_at_tp_1_and_dp_8_rank_r_gets_row_r_of_gate_then_up():
    """g0 g1 g2 g3 u0 u1 u2 u3, not g0 u0 g1 u1 …: a row each for eight ranks."""
    names = ["g0", "g1", "g2", "g3", "u0", "u1", "u2", "u3"]
    # What four ranks at TP 2 and DP 2 saved.
    checkpoint = torch.full((8, 2), -1)
    layout, grid = fused(2, 2, 8)
    for place in grid.walk(("tp", "dp_shard")):
        t, d = place.index("tp"), place.index("dp_shard")
        local = torch.tensor([2 * t, 2 * t + 1] if d == 0 else [4 + 2 * t, 5 + 2 * t])
        held = local[:, None].expand(2, 2).reshape(-1).clone()  # each row is full of its number
        for slab in layout.slabs(place):
            rows = slice(slab.offsets[0], slab.offsets[0] + slab.sizes[0])
            checkpoint[rows] = held.as_strided(slab.sizes, slab.strides, slab.start)
    # What eight ranks at TP 1 and DP 8 load.
    layout, grid = fused(1, 8, 16)
    loaded = []
    for place in grid.walk(("dp_shard",)):
        held = torch.full((2,), -1)
        for slab in layout.slabs(place):
            rows = slice(slab.offsets[0], slab.offsets[0] + slab.sizes[0])
            held.as_strided(slab.sizes, slab.strides, slab.start).copy_(checkpoint[rows])
        assert 1 == len(set(held.tolist()))
        loaded.append(names[held[0]])
    assert names == loaded


def test_split_halves_have_their_own_keys():
    grids = Grids.from_sizes(1, tp=2)
    registry = LayoutRegistry([SwiGLU(["*"]), TensorParallel({"*": 0})])
    layout = registry.layout(info(shape=(4, 2), grids=grids))
    assert [
        ("mlp.linear_fc1.weight_w", (4, 2), (2, 0), 0),
        ("mlp.linear_fc1.weight_v", (4, 2), (2, 0), 4),
    ] == [(s.key, s.global_shape, s.offsets, s.start) for s in layout.slabs(grids.dense)]


# A live model ----------------------------------------------------------------------------------------------------


class MLP(torch.nn.Module):
    def __init__(self, gated_linear_unit):
        super().__init__()
        self.config = types.SimpleNamespace(gated_linear_unit=gated_linear_unit)
        self.linear_fc1 = torch.nn.Linear(3, 8)
        self.linear_fc2 = torch.nn.Linear(4, 3)


@pytest.mark.parametrize("gated_linear_unit", [True, False])
def test_a_live_module_says_whether_it_is_gated(gated_linear_unit):
    layouts = model_layouts(MLP(gated_linear_unit), Grids.from_sizes(0), LayoutRegistry([SwiGLU()]))
    keys = {s.key for layout in layouts.values() for s in layout.slabs(Grids.from_sizes(0).dense)}
    halves = {
        "linear_fc1.weight_w",
        "linear_fc1.weight_v",
        "linear_fc1.bias_w",
        "linear_fc1.bias_v",
    }
    whole = {"linear_fc1.weight", "linear_fc1.bias"}
    assert {"linear_fc2.weight", "linear_fc2.bias"} | (
        halves if gated_linear_unit else whole
    ) == keys
