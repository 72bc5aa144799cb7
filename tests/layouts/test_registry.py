"""Registries: how providers are asked, what conflicts, and what other packages register."""

import types
from importlib.metadata import EntryPoint

import pytest
import torch

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    GDN,
    Concat,
    ExpertGrid,
    Fuse,
    Grid,
    Grids,
    Join,
    LayoutError,
    LayoutProvider,
    LayoutRegistry,
    Level,
    ParamInfo,
    PipelineLayers,
    Shard,
    SwiGLU,
    TensorParallel,
    VocabularyPadding,
    Whole,
    installed_layouts,
)
from shardplan.layouts import registry as registry_module
from shardplan.layouts.provider import attribute, matcher


class Provider:
    def __init__(self, name, level, stages=(), claims=True):
        self.name, self.level = name, level
        self._stages, self._claims = stages, claims

    def claims(self, param):
        return self._claims

    def stages(self, param):
        return self._stages

    def __repr__(self):
        return f"<{self.name}>"


def info(fqn="w", shape=(4, 2), **sizes):
    return ParamInfo(fqn, shape, Grids.from_sizes(0, **sizes).dense)


# How they are asked ---------------------------------------------------------------------------------------------


def test_nobody_claims_it():
    layout = LayoutRegistry(()).layout(info())
    assert ("w", "w", (Whole((4, 2)),), "dense") == (
        layout.fqn,
        layout.name,
        layout.stages,
        layout.family,
    )


def test_levels_make_the_order_not_the_place_in_the_list():
    halves = Concat(0, (("_w", 2), ("_v", 2)))
    parallel = Provider("p", Level.PARALLEL, (Shard(0, "tp"),))
    component = Provider("c", Level.COMPONENT, (halves,))
    for providers in ((parallel, component), (component, parallel)):
        layout = LayoutRegistry(providers).layout(info())
        assert (Whole((4, 2)), halves, Shard(0, "tp")) == layout.stages


def test_components_are_fused_again_when_each_of_them_is_global():
    halves = Concat(0, (("_w", 2), ("_v", 2)))
    providers = [
        Provider("c", Level.COMPONENT, (halves, Fuse(0))),
        Provider("p", Level.PARALLEL, (Shard(0, "tp"),)),
        Provider("e", Level.EXPERT, (Shard(0, "ep"),)),
    ]
    stages = LayoutRegistry(providers).layout(info()).stages
    assert (Whole((4, 2)), halves, Shard(0, "tp"), Fuse(0), Shard(0, "ep")) == stages
    stages = LayoutRegistry(providers[:1]).layout(info()).stages
    assert (Whole((4, 2)), halves, Fuse(0)) == stages


@pytest.mark.parametrize("stage", [Fuse(0), Join(0, (("", ("_w", "_v"), 1),))])
def test_parts_may_be_joined_at_a_later_level_too(stage):
    halves = Concat(0, (("_w", 2), ("_v", 2)))
    for level in (Level.PADDING, Level.FORMAT):
        providers = [Provider("c", Level.COMPONENT, (halves,)), Provider("f", level, (stage,))]
        assert (Whole((4, 2)), halves, stage) == LayoutRegistry(providers).layout(info()).stages


def test_one_that_does_not_claim_is_not_asked_for_stages():
    silent = Provider("s", Level.PARALLEL, None, claims=False)
    assert (Whole((4, 2)),) == LayoutRegistry([silent]).layout(info()).stages


def test_equal_chains_are_shared():
    registry = LayoutRegistry([TensorParallel({"*": 0})])
    assert registry.layout(info("a")).stages is registry.layout(info("b")).stages


def test_the_levels():
    assert ["STORAGE", "COMPONENT", "PARALLEL", "PADDING", "EXPERT", "NAME", "FORMAT"] == [
        level.name for level in sorted(Level)
    ]


# Conflicts --------------------------------------------------------------------------------------------------------


def test_two_claims_at_one_level_name_both():
    registry = LayoutRegistry([SwiGLU(["w"]), GDN({"*": {"q": 4}})])
    with pytest.raises(LayoutError) as error:
        registry.layout(info(tp=2))
    assert str(error.value) == (
        "w: both 'swiglu' and 'gdn' claim it at level COMPONENT (tp 0/2). Leave one of them out "
        "of layouts=, or narrow its patterns."
    )


def test_two_claims_at_different_levels_are_one_chain():
    registry = LayoutRegistry([SwiGLU(["w"]), TensorParallel({"w": 0})])
    assert 3 == len(registry.layout(info()).stages)


def test_a_name_is_used_once():
    first, second = Provider("mine", Level.PARALLEL), Provider("mine", Level.NAME)
    with pytest.raises(LayoutError) as error:
        LayoutRegistry([first, second])
    assert str(error.value) == (
        "two layout providers have the name 'mine': <mine> and <mine>. Leave one out, or give it "
        "another name."
    )
    with pytest.raises(LayoutError, match="the name 'swiglu'"):
        LayoutRegistry([*DEFAULT_LAYOUTS, SwiGLU(["*.gate_up.weight"])])


@pytest.mark.parametrize(
    "thing", [SwiGLU, None, 3, "swiglu", types.SimpleNamespace(name="x", level=Level.NAME)]
)
def test_what_is_no_provider_is_refused(thing):
    with pytest.raises(LayoutError) as error:
        LayoutRegistry([thing])
    assert str(error.value) == (
        f"{thing!r} is no layout provider. Pass an instance with name, level, claims(param) and "
        "stages(param)."
    )


@pytest.mark.parametrize("level", [7, -1, "NAME", None])
def test_a_level_that_is_none_is_refused(level):
    """A provider of such a level would never be asked, and its parameters saved as if whole."""
    with pytest.raises(LayoutError) as error:
        LayoutRegistry([Provider("mine", level)])
    assert str(error.value) == (
        f"the layout provider 'mine' has the level {level!r}, which is none of STORAGE, COMPONENT, "
        "PARALLEL, PADDING, EXPERT, NAME, FORMAT. It would never be asked."
    )
    LayoutRegistry([Provider("mine", 4)])


def test_a_registry_takes_any_iterable_and_keeps_the_order():
    providers = [SwiGLU(), GDN()]
    assert tuple(providers) == LayoutRegistry(iter(providers)).providers


# Built-in providers -------------------------------------------------------------------------------------------------


def test_the_default_layouts():
    assert [
        ("fsdp-flat-buffer", Level.STORAGE),
        ("dtensor", Level.STORAGE),
        ("swiglu", Level.COMPONENT),
        ("gdn", Level.COMPONENT),
        ("mamba", Level.COMPONENT),
        ("mla-down-projection", Level.COMPONENT),
        ("tensor-parallel", Level.PARALLEL),
        ("vocabulary-padding", Level.PADDING),
        ("expert-grid", Level.EXPERT),
        ("pipeline-layers", Level.NAME),
    ] == [(provider.name, provider.level) for provider in DEFAULT_LAYOUTS]
    assert all(isinstance(provider, LayoutProvider) for provider in DEFAULT_LAYOUTS)
    LayoutRegistry(DEFAULT_LAYOUTS)


def test_nobody_claims_a_name_alone():
    """Without a live model, what is not described is a whole dense tensor."""
    registry = LayoutRegistry(DEFAULT_LAYOUTS)
    for fqn in ("mlp.linear_fc1.weight", "in_proj.weight", "layers.3.w", "embedding.weight"):
        assert (Whole((4, 2)),) == registry.layout(info(fqn, dp_shard=2, tp=2)).stages


def test_all_levels_together():
    """An expert's gate and up projection, at ETP 2 and EP 2, in the second layer of a stage."""
    grids = Grids.from_sizes(3, dp_shard=4, tp=2, ep=2)
    registry = LayoutRegistry(
        [
            SwiGLU(["*"], components="fused"),
            TensorParallel({"*": 0}),
            VocabularyPadding(),
            ExpertGrid(4),
            PipelineLayers(offset=6),
        ]
    )
    fqn = "layers.1.experts.linear_fc1.weight0"
    layout = registry.layout(ParamInfo(fqn, (4, 2), grids.expert, True, 2))
    assert "expert" == layout.family
    assert [
        ("layers.7.experts.linear_fc1.weight2", (8, 2), (2, 0), (2, 2), 0),
        ("layers.7.experts.linear_fc1.weight2", (8, 2), (6, 0), (2, 2), 4),
    ] == [(s.key, s.global_shape, s.offsets, s.sizes, s.start) for s in layout.slabs(grids.expert)]


# Parameters ----------------------------------------------------------------------------------------------------------


def test_an_error_of_a_parameter_has_its_name_the_rule_the_facts_and_what_to_do():
    error = info("a.w", dp_shard=2, tp=2).fail("the rule", "Do this.")
    assert isinstance(error, LayoutError)
    assert isinstance(error, ValueError)
    assert "a.w: the rule (dp_shard 0/2, tp 0/2). Do this." == str(error)


def test_parameters_with_equal_facts_are_equal_whatever_live_objects_they_have():
    one = ParamInfo("w", (2,), Grids.from_sizes(0).dense, param=object(), owners=(("", object()),))
    assert one == ParamInfo("w", (2,), Grids.from_sizes(0).dense)
    assert hash(one) == hash(ParamInfo("w", (2,), Grids.from_sizes(0).dense))


def test_the_nearest_owner_answers_first():
    outer, inner = types.SimpleNamespace(a=1, b=2), types.SimpleNamespace(a=3)
    param = ParamInfo("m.w", (2,), Grids.from_sizes(0).dense, owners=(("", outer), ("m", inner)))
    assert ("m", 3) == param.nearest("a")
    assert ("", 2) == param.nearest("b")
    assert ("", None) == param.nearest("c")


@pytest.mark.parametrize(
    ("axes", "is_expert", "axis"),
    [
        (("dp_shard", "tp"), False, "tp"),
        (("edp_shard", "ep", "etp"), True, "etp"),
        (("edp_shard", "ep"), True, "etp"),
        # One mesh for all parameters: experts lie on it too.
        (("dp_shard", "tp"), True, "tp"),
    ],
)
def test_an_axis_of_a_role_in_the_parameters_own_grid(axes, is_expert, axis):
    param = ParamInfo("w", (2,), Grid(axes, (1,) * len(axes), (0,) * len(axes)), is_expert)
    assert axis == param.axis("tp", "etp")


def test_an_attribute_may_stand_on_the_parameter_before_wrapping():
    param = types.SimpleNamespace(a=None, orig_param=types.SimpleNamespace(a=1, b=2))
    found = ParamInfo("w", (2,), Grids.from_sizes(0).dense, param=param)
    assert (1, 2, None, 5) == (
        found.attribute("a"),
        found.attribute("b"),
        found.attribute("c"),
        found.attribute("c", 5),
    )


def test_attributes_of_modules_and_configs_are_found_wherever_they_stand():
    """In the dictionary, the class, a property, or what __getattr__ makes up (OmegaConf)."""

    class Module(torch.nn.Module):
        of_class = 1

        @property
        def made(self):
            return 2

    class Config:
        def __getattr__(self, name):
            if name == "gated_linear_unit":
                return True
            raise AttributeError(name)

    class Slots:
        __slots__ = ("held",)

    module, slots = Module(), Slots()
    module.own, slots.held = 3, 4
    assert [1, 2, 3, None] == [attribute(module, n) for n in ("of_class", "made", "own", "absent")]
    assert [True, None] == [attribute(Config(), n) for n in ("gated_linear_unit", "absent")]
    assert [4, None] == [attribute(slots, n) for n in ("held", "absent")]
    assert attribute(None, "absent") is None


@pytest.mark.parametrize(
    ("patterns", "name", "matches"),
    [
        (["a.b"], "a.b", True),
        (["a.b"], "axb", False),
        (["a.b"], "a.b1", False),
        (["a.b"], "c.a.b", False),
        (["*.b"], "a.b", True),
        (["*.b"], "b", False),
        (["w?"], "w1", True),
        (["w?"], "w10", False),
        (["w[01]"], "w1", True),
        (["w[01]"], "w2", False),
        (["a", "b"], "b", True),
        (["a", "b"], "ab", False),
        (["A"], "a", False),
        ([], "", False),
    ],
)
def test_patterns_match_whole_names(patterns, name, matches):
    assert matches == matcher(patterns)(name)


# Other packages ------------------------------------------------------------------------------------------------------


def register(monkeypatch, **values):
    found = [EntryPoint(name, value, "shardplan.layouts") for name, value in values.items()]

    def entry_points(*, group):
        assert "shardplan.layouts" == group
        return found

    monkeypatch.setattr(registry_module, "entry_points", entry_points)


def test_no_package_registers_anything_here():
    assert () == installed_layouts()


def test_classes_and_instances_of_other_packages_are_found_in_the_order_of_their_names(monkeypatch):
    register(monkeypatch, b="shardplan.layouts:SwiGLU", a="shardplan.layouts.gdn:GDN")
    assert [GDN, SwiGLU] == [type(provider) for provider in installed_layouts()]


def test_an_instance_may_be_registered(monkeypatch):
    monkeypatch.setattr(registry_module, "MINE", Provider("mine", Level.NAME), raising=False)
    register(monkeypatch, mine="shardplan.layouts.registry:MINE")
    assert ["mine"] == [provider.name for provider in installed_layouts()]
    LayoutRegistry([*DEFAULT_LAYOUTS, *installed_layouts()])


def test_a_package_that_is_broken_is_named(monkeypatch):
    register(monkeypatch, mine="no_such_package.layouts:Mine")
    with pytest.raises(LayoutError) as error:
        installed_layouts()
    assert str(error.value) == (
        "the layout provider 'mine' of an unknown package can't be loaded: No module named "
        "'no_such_package'. Uninstall the package, or pass layouts= without it."
    )
    assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_the_default_layouts_do_not_load_what_other_packages_register(monkeypatch):
    register(monkeypatch, mine="no_such_package.layouts:Mine")
    LayoutRegistry(DEFAULT_LAYOUTS)
