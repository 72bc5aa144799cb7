"""The public conformance suite: every built-in provider passes it, and wrong ones do not."""

import itertools
import re
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import find, given, settings

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    GDN,
    BufferDescription,
    Concat,
    Cut,
    Cuts,
    DTensorStorage,
    ExpertGrid,
    FlatRanges,
    FSDPFlatBuffer,
    Grids,
    Interleave,
    LayoutError,
    LayoutProvider,
    LayoutRegistry,
    Level,
    Mamba,
    MLADownProjection,
    PipelineLayers,
    Shard,
    SwiGLU,
    TensorParallel,
    VocabularyPadding,
    prove,
)
from shardplan.layouts.testing import (
    GRID_SIZES,
    LayoutProviderConformance,
    every_rank,
    grid_sizes,
    grids,
    param_info,
    param_infos,
    shapes,
)

COLUMNS = TensorParallel({"*": 0})


def spread(numel, count):
    """Uneven flat ranges, each longer than the one before."""
    edges = sorted([0, *(numel * i * i // (count * count) for i in range(1, count)), numel])
    return tuple(itertools.pairwise(edges))


# Built-in providers -------------------------------------------------------------------------------------------------


class TestSwiGLU(LayoutProviderConformance):
    provider = SwiGLU(["*.linear_fc1.*"])
    companions = (COLUMNS, ExpertGrid())

    def params(self, grids):
        t, e = grids.dense.size("tp"), grids.expert.size("etp")
        return [
            param_info(grids, "mlp.linear_fc1.weight", (16 // t, 3)),
            param_info(grids, "mlp.linear_fc1.bias", (16 // t,)),
            param_info(grids, "mlp.linear_fc2.weight", (4, 3)),
            param_info(grids, "mlp.experts.linear_fc1.weight0", (16 // e, 3), num_local_experts=2),
            param_info(grids, "mlp.experts.linear_fc1.weight1", (16 // e, 3), num_local_experts=2),
        ]


class TestSwiGLUFused(TestSwiGLU):
    provider = SwiGLU(["*.linear_fc1.*"], components="fused")


class TestGDN(LayoutProviderConformance):
    provider = GDN({"*.in_proj.*": {"query": 4, "key": 4, "value": 8, "z": 8, "b": 4, "a": 4}})
    companions = (COLUMNS,)

    def params(self, grids):
        rows = 32 // grids.dense.size("tp")
        return [
            param_info(grids, "mixer.in_proj.weight", (rows, 2)),
            param_info(grids, "mixer.in_proj.bias", (rows,)),
            param_info(grids, "mixer.out_proj.weight", (2, 8)),
        ]


class TestGDNFused(TestGDN):
    provider = GDN(
        {"*.in_proj.*": {"query": 4, "key": 4, "value": 8, "z": 8, "b": 4, "a": 4}},
        components="fused",
    )


class TestGDNLive(LayoutProviderConformance):
    provider = GDN()
    companions = (COLUMNS,)

    def params(self, grids):
        t = grids.dense.size("tp")
        owner = types.SimpleNamespace(qk_dim=4, v_dim=8, num_value_heads=4)
        owners = (("mixer", owner),)
        return [
            param_info(grids, "mixer.in_proj.weight", (32 // t, 2), owners=owners),
            param_info(grids, "mixer.conv1d.weight", (16 // t, 1, 4), owners=owners),
            param_info(grids, "mixer.A_log", (4 // t,), owners=owners),
        ]


class TestMamba(LayoutProviderConformance):
    provider = Mamba({"*.in_proj.weight": {"z": 8, "x": 8, "B": 4, "C": 4, "dt": 4}})
    companions = (COLUMNS,)

    def params(self, grids):
        t = grids.dense.size("tp")
        packed = types.SimpleNamespace(
            partition_sizes=[8 // t, 4 // t, 4 // t], tensor_model_parallel=True, partition_dim=0
        )
        return [
            param_info(grids, "mixer.in_proj.weight", (28 // t, 2)),
            param_info(grids, "mixer.conv1d_weight", (16 // t, 1, 4), param=packed),
            param_info(grids, "mixer.A_log", (4 // t,)),
        ]


class TestMambaFused(TestMamba):
    provider = Mamba(
        {"*.in_proj.weight": {"z": 8, "x": 8, "B": 4, "C": 4, "dt": 4}}, components="fused"
    )


class TestMLADownProjection(LayoutProviderConformance):
    provider = MLADownProjection({"*.column.*": (8, 4)})
    companions = (TensorParallel({"*.column.*": 0}),)

    def params(self, grids):
        config = types.SimpleNamespace(q_lora_rank=8, kv_lora_rank=3, qk_pos_emb_head_dim=1)
        owners = (("whole", types.SimpleNamespace(config=config)),)
        rows = 12 // grids.dense.size("tp")
        return [
            param_info(grids, "a.column.linear_qkv_down_proj.weight", (rows, 2)),
            param_info(grids, "a.whole.linear_qkv_down_proj.weight", (12, 2), owners=owners),
            param_info(
                grids, "a.whole.linear_qkv_down_proj.layer_norm_weight", (2,), owners=owners
            ),
            param_info(grids, "a.column.linear_proj.weight", (rows, 2)),
        ]


class TestTensorParallel(LayoutProviderConformance):
    provider = TensorParallel({"*.column.*": 0, "*.row.*": 1, "*.norm.*": None})
    companions = (ExpertGrid(),)

    def params(self, grids):
        marked = types.SimpleNamespace(tensor_model_parallel=True, partition_dim=1)
        return [
            param_info(grids, "a.column.weight", (3, 2)),
            param_info(grids, "a.column.bias", (3,)),
            param_info(grids, "a.row.weight", (3, 2)),
            param_info(grids, "a.row.bias.0", (1, 5)),
            param_info(grids, "a.norm.weight", (3,)),
            param_info(grids, "a.live.weight", (3, 2), param=marked),
            param_info(grids, "a.experts.0.column.weight", (3, 2), num_local_experts=1),
        ]


class TestVocabularyPadding(LayoutProviderConformance):
    provider = VocabularyPadding({"embedding.weight": 10, "output.weight": 11})
    companions = (COLUMNS,)

    def params(self, grids):
        rows = 16 // grids.dense.size("tp")
        return [
            param_info(grids, "embedding.weight", (rows, 2)),
            param_info(grids, "output.weight", (rows, 2)),
            param_info(grids, "norm.weight", (rows,)),
        ]


class TestExpertGrid(LayoutProviderConformance):
    provider = ExpertGrid()
    companions = (TensorParallel({"*.fc1.*": 0, "*.fc2.*": 1}),)

    def params(self, grids):
        singles = [
            param_info(grids, f"layers.1.experts.{i}.{name}.weight", (3, 2), num_local_experts=2)
            for i in range(2)
            for name in ("fc1", "fc2")
        ]
        return [
            *singles,
            param_info(grids, "layers.2.experts.fc1.weight0", (3, 2), num_local_experts=1),
            param_info(grids, "layers.3.experts.stacked", (2, 3, 2)),
            param_info(grids, "router.weight", (4, 2)),
        ]


class TestExpertGridUnstacked(TestExpertGrid):
    provider = ExpertGrid(stacked="single")


class TestPipelineLayers(LayoutProviderConformance):
    provider = PipelineLayers({0: 4, 1: 2, 2: 9})
    companions = (ExpertGrid(),)

    def params(self, grids):
        return [
            *(param_info(grids, f"decoder.layers.{i}.weight", (2,)) for i in range(3)),
            param_info(grids, "decoder.layers.0.experts.0.w", (2,), num_local_experts=1),
            param_info(grids, "embedding.weight", (2,)),
        ]


class TestFSDPFlatBuffer(LayoutProviderConformance):
    """Ranges depend on the world, so there is a provider for each."""

    companions = (SwiGLU(["*.linear_fc1.*"]), COLUMNS, ExpertGrid())

    @pytest.fixture(autouse=True, params=range(len(GRID_SIZES)))
    def _world(self, request):
        self.grid_sizes = (GRID_SIZES[request.param],)
        grids = Grids.from_sizes(0, **self.grid_sizes[0])
        t, e = grids.dense.size("tp"), grids.expert.size("etp")
        dense, expert = grids.dense.size("dp_shard"), grids.expert.size("edp_shard")
        self.fc1, self.expert = (16 // t, 3), (16 // e, 3)
        buffers = [BufferDescription({"p0": (3,), "p1": (5, 2), "p2": ()}, dense, alignment=4)]
        self.provider = FSDPFlatBuffer(
            {
                "*.experts.*": spread(self.expert[0] * 3, expert),
                "*.linear_fc1.*": spread(self.fc1[0] * 3, dense),
            },
            buffers=buffers,
        )

    def params(self, grids):
        return [
            param_info(grids, "mlp.linear_fc1.weight", self.fc1),
            param_info(grids, "mlp.experts.linear_fc1.weight0", self.expert, num_local_experts=1),
            *(param_info(grids, f"p{i}", shape) for i, shape in enumerate([(3,), (5, 2)])),
        ]


class TestDTensorStorage(LayoutProviderConformance):
    provider = DTensorStorage(
        {
            "uneven": (Cut(0, "dp_shard"),),
            "columns": (Cut(1, "dp_shard"),),
            "packed.*": (Cut(0, "tp", 2), Cut(0, "dp_shard")),
            "both": (Cut(0, "dp_shard"), Cut(1, "tp")),
        }
    )
    companions = (SwiGLU(["packed.*"]),)

    def params(self, grids):
        return [
            param_info(grids, "uneven", (5, 2)),
            param_info(grids, "columns", (2, 5)),
            param_info(grids, "packed.weight", (14, 2)),
            param_info(grids, "both", (5, 5)),
            param_info(grids, "plain", (5, 5)),
        ]


class TestDTensorStorageLive(LayoutProviderConformance):
    provider = DTensorStorage()
    companions = (ExpertGrid(),)

    def params(self, grids):
        def shard(dim=None, **more):
            return types.SimpleNamespace(is_replicate=lambda: dim is None, dim=dim, **more)

        def dtensor(grid, names, *placements):
            shape = tuple(grid.size(name) for name in names)
            mesh = types.SimpleNamespace(mesh_dim_names=names, shape=shape, ndim=len(shape))
            return types.SimpleNamespace(device_mesh=mesh, placements=placements)

        dense = ("dp_replicate", "dp_shard", "tp")
        tp = grids.dense.size("tp")
        return [
            param_info(
                grids, "fsdp", (7, 2), param=dtensor(grids.dense, dense, shard(), shard(0), shard())
            ),
            param_info(
                grids,
                "fsdp.over.tp",
                (7, 2),
                param=dtensor(grids.dense, dense, shard(), shard(0, split_factor=tp), shard(0)),
            ),
            param_info(
                grids,
                "experts.w",
                (8, 3, 2),
                param=dtensor(grids.expert, ("edp_shard", "ep"), shard(1), shard(0)),
            ),
        ]


def test_every_built_in_provider_is_in_the_suite():
    tried = {
        type(suite.__dict__["provider"])
        for suite in globals().values()
        if isinstance(suite, type) and "provider" in vars(suite)
    } | {FSDPFlatBuffer}
    assert {type(provider) for provider in DEFAULT_LAYOUTS} <= tried


def test_an_mla_projection_at_the_root_has_a_name_without_a_dot_before_it():
    grids = Grids.from_sizes(0)
    registry = LayoutRegistry([MLADownProjection({"*": (8, 4)})])
    layout = registry.layout(param_info(grids, "linear_qkv_down_proj.weight", (12, 2)))
    keys = [slab.key for slab in layout.slabs(grids.dense)]
    assert ["linear_q_down_proj.weight", "linear_kv_down_proj.weight"] == keys


# Wrong providers: each is found by the test that is there for it ---------------------------------------------------------


class Base:
    name, level = "mine", Level.COMPONENT

    def claims(self, param):
        return param.fqn == "w"

    def stages(self, param):
        return (Concat(0, (("_a", 2), ("_b", 2))),)


class Right(Base):
    pass


class NoLevel(Base):
    level = 1


class NoName(Base):
    name = ""


class ClaimsNothing(Base):
    def claims(self, param):
        return False


class ClaimsNoBool(Base):
    def claims(self, param):
        return param.fqn if param.fqn == "w" else None


class RaisesForOthers(Base):
    def claims(self, param):
        return param.local_shape[0] == 4


class Remembers(Base):
    def __init__(self):
        self.asked = 0

    def stages(self, param):
        self.asked += 1
        return (Concat(0, ((f"_{self.asked}", 4),)),)


class AnswersWithAList(Base):
    def stages(self, param):
        return [Concat(0, (("_a", 4),))]


class NotHashable(Base):
    def stages(self, param):
        return (Concat(0, [("_a", 4)]),)


class StageOfItsOwn(Base):
    class Stage:
        axes = ()

        def apply(self, frames, grid):
            return frames

    stage = Stage()

    def stages(self, param):
        return (self.stage,)


class LooksAtItsRank(Base):
    def stages(self, param):
        first = 1 + param.grid.index("dp_shard")
        return (Concat(0, (("_a", first), ("_b", 4 - first))),)


class LooksAtItsRankInTheName(Base):
    def rename(self, param, name):
        return f"{name}{param.grid.index('tp')}"


class Overlaps(Base):
    level = Level.STORAGE

    def stages(self, param):
        count = param.grid.size("dp_shard")
        return (FlatRanges((4,), ("dp_shard",), ((0, 4),) * count),)


class LeavesAHole(Base):
    level = Level.STORAGE

    def stages(self, param):
        count = param.grid.size("dp_shard")
        return (FlatRanges((4,), ("dp_shard",), ((0, 3),) + ((4, 4),) * (count - 1)),)


class OneNameForTwo(Base):
    def claims(self, param):
        return param.fqn in ("w", "v")

    def rename(self, param, name):
        return "same"


class OneSuffixForTwo(Base):
    def stages(self, param):
        return (Concat(0, (("_a", 2), ("_a", 2))),)


class ReadsBeyond(Base):
    """A storage stage that says it holds less than the boxes that it gives."""

    level = Level.STORAGE

    class Less(Cuts):
        def numel(self, grid):
            return 3

    def stages(self, param):
        return (self.Less((4,), ()),)


class ReadsTwice(Base):
    class Twice:
        axes = ()

        def apply(self, frames, grid):
            (frame,) = frames
            first, second = (frame._replace(suffix=suffix) for suffix in ("_a", "_b"))
            return (first, second)

    twice = Twice()

    def stages(self, param):
        return (self.twice,)


WRONG = [
    (NoLevel, "test_it_is_an_instance_with_a_name_and_a_level", "the level 1 is no Level"),
    (NoName, "test_it_is_an_instance_with_a_name_and_a_level", "the name '' is no text"),
    (ClaimsNothing, "test_it_claims_something", "claims nothing that params"),
    (ClaimsNoBool, "test_it_answers_for_any_parameter", "gave None, no bool"),
    (RaisesForOthers, "test_it_answers_for_any_parameter", "tuple index out of range"),
    (Remembers, "test_it_is_pure_and_deterministic", "then"),
    (AnswersWithAList, "test_it_is_pure_and_deterministic", "no tuple"),
    (NotHashable, "test_its_stages_are_plain_values", "unhashable"),
    (
        StageOfItsOwn,
        "test_its_stages_are_plain_values",
        "is not a subclass of shardplan.layouts.Stage",
    ),
    (LooksAtItsRank, "test_its_layouts_do_not_depend_on_the_rank", "at dp_shard 1/2"),
    (LooksAtItsRankInTheName, "test_its_layouts_do_not_depend_on_the_rank", "named 'w1'"),
    (Overlaps, "test_every_element_is_covered_exactly_once", "covered 2 times"),
    (LeavesAHole, "test_every_element_is_covered_exactly_once", "covered by no rank"),
    (LeavesAHole, "test_its_layouts_are_proved", "covered by no rank"),
    (OneNameForTwo, "test_its_keys_are_different", "v and w both write same_a"),
    (OneSuffixForTwo, "test_its_keys_are_different", "a key twice"),
    (ReadsBeyond, "test_its_views_lie_in_storage_and_apart", "beyond the 3 elements"),
    (ReadsTwice, "test_its_views_lie_in_storage_and_apart", "reads what another slab reads"),
]


def suite_for(made):
    class Suite(LayoutProviderConformance):
        provider = made

        def params(self, grids):
            return [param_info(grids, "w", (4,)), param_info(grids, "v", (4,))]

    return Suite()


def suite_tests(suite):
    return [name for name in dir(suite) if name.startswith("test_")]


@pytest.mark.parametrize(("wrong", "test", "message"), WRONG)
def test_a_wrong_provider_is_found(wrong, test, message):
    with pytest.raises(
        (AssertionError, LayoutError, TypeError, IndexError), match=re.escape(message)
    ):
        getattr(suite_for(wrong()), test)()


def test_each_test_of_the_suite_is_failed_by_something():
    assert {test for _, test, _ in WRONG} == set(suite_tests(LayoutProviderConformance))


@pytest.mark.parametrize("test", suite_tests(LayoutProviderConformance))
def test_a_right_provider_passes(test):
    getattr(suite_for(Right()), test)()


def test_a_class_is_no_provider():
    with pytest.raises(AssertionError, match="is a class: set an instance"):
        suite_for(Right).test_it_is_an_instance_with_a_name_and_a_level()


def test_params_must_be_given():
    class Empty(LayoutProviderConformance):
        provider = Right()

    with pytest.raises(NotImplementedError, match="return the parameters that one rank holds"):
        Empty().test_it_claims_something()


def test_a_third_partys_grouped_projection_passes():
    """What a user writes: a provider and a subclass of the suite."""

    class GroupedQKV:
        name, level = "grouped-qkv", Level.COMPONENT

        def claims(self, param):
            return param.fqn.endswith("qkv.weight")

        def stages(self, param):
            groups = param.local_shape[0] // 8
            return (Interleave(0, groups, ((".q", 4), (".k", 2), (".v", 2)), "QKV parts"),)

    class Suite(LayoutProviderConformance):
        provider = GroupedQKV()
        companions = (COLUMNS,)

        def params(self, grids):
            return [param_info(grids, "attention.qkv.weight", (32 // grids.dense.size("tp"), 3))]

    assert isinstance(Suite.provider, LayoutProvider)
    for test in suite_tests(Suite):
        getattr(Suite(), test)()


# Strategies --------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(grid_sizes(max_world=12))
def test_grid_sizes_are_worlds(sizes):
    ranks = [g.dense.coordinate for g in every_rank(sizes)]
    assert len(ranks) == len(set(ranks)) == Grids.from_sizes(0, **sizes).world_size <= 12


@settings(max_examples=100, deadline=None)
@given(grids())
def test_grids_are_of_any_rank(found):
    assert found.dense.world_size == found.expert.world_size <= 16


@settings(max_examples=100, deadline=None)
@given(shapes(min_dims=1, max_dims=2, min_size=1, max_size=3))
def test_shapes_stay_in_their_bounds(shape):
    assert 1 <= len(shape) <= 2
    assert set(shape) <= {1, 2, 3}


@settings(max_examples=200, deadline=None)
@given(param_infos())
def test_params_can_be_laid_out(param):
    layout = LayoutRegistry([ExpertGrid()]).layout(param)
    prove(layout, param.grid)
    assert ("expert" if ".experts." in param.fqn else "dense") == layout.family


def test_strategies_reach_what_matters():
    find(grids(), lambda g: g.expert.size("ep") > 1 and g.expert.index("ep") > 0)
    find(grids(), lambda g: g.dense.size("tp") > 1 and g.expert.size("etp") == 1)
    find(shapes(), lambda shape: shape == ())
    find(shapes(), lambda shape: 0 in shape)
    find(param_infos(), lambda param: param.num_local_experts == 4)


# What is imported -----------------------------------------------------------------------------------------------------------


def loaded(statement):
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_layouts_import_neither_torch_nor_what_tests_need():
    assert not {"torch", "numpy", "hypothesis", "pytest"} & loaded("import shardplan.layouts")


def test_the_suite_needs_hypothesis_only():
    found = loaded("import shardplan.layouts.testing")
    assert "hypothesis" in found
    assert not {"torch", "pytest"} & found


def test_a_live_model_does_not_need_an_import_of_torch_by_the_library():
    """Modules and tensors are read by their attributes."""
    assert torch.nn.Linear is not None
    code = (
        "import sys\nimport shardplan.layouts as s\n"
        "r = s.LayoutRegistry(s.DEFAULT_LAYOUTS)\n"
        "g = s.Grids.from_sizes(0, dp_shard=2, ep=2)\n"
        "x = s.model_layouts({'a.w': (2, 3), 'experts.0.w': (2,)}, g, r)\n"
        "[s.prove(y, g.of(y.family)) for y in x.values()]\n"
    )
    assert "torch" not in loaded(code)


def test_shard_alone_is_no_storage():
    assert not hasattr(Shard(0, "tp"), "holders")
