"""Reading a live model: names without wrappers, tied parameters, buffers, collisions."""

import types

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    ExpertGrid,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    TensorParallel,
    carried_pg_collection,
    clean_name,
    model_layouts,
)

GRIDS = Grids.from_sizes(0)


def read(model, grids=GRIDS, providers=()):
    return model_layouts(model, grids, LayoutRegistry(providers))


class Float16Module(torch.nn.Module):
    """DDP, Float16Module, MegatronFSDP: what is wrapped stands under `module`."""

    def __init__(self, module, **attributes):
        super().__init__()
        self.module = module
        for name, value in attributes.items():
            setattr(self, name, value)


# Names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fqn", "clean"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("module.layers.0.weight", "layers.0.weight"),
        ("module.module.module.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0._orig_mod.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.weight", "weight"),
        # FSDP 1's flat parameter is a parameter, not a wrapper.
        ("layers.0._fsdp_wrapped_module._flat_param", "layers.0._flat_param"),
        # Whole tokens only.
        ("modules.weight", "modules.weight"),
        ("module_list.0.weight", "module_list.0.weight"),
        ("my_module.weight", "my_module.weight"),
        ("submodule.weight", "submodule.weight"),
        ("weight", "weight"),
        ("module", "module"),
        ("module.module", "module.module"),
        ("", ""),
    ],
)
def test_clean_name(fqn, clean):
    assert clean == clean_name(fqn)


def test_wrappers_at_every_level_leave_no_trace_in_names():
    model = Float16Module(
        Float16Module(torch.nn.Sequential(Float16Module(torch.nn.Linear(2, 3)), torch.nn.ReLU()))
    )
    assert ["0.weight", "0.bias"] == list(read(model))
    assert ["0.weight", "0.bias"] == [layout.fqn for layout in read(model).values()]


def wrap(kind, module):
    if kind == "compile":
        return torch.compile(module)
    if kind == "checkpoint":
        return checkpoint_wrapper(module)
    if kind == "DataParallel":
        return torch.nn.DataParallel(module)
    # What a wrapper needs to run, such as a process group, does not matter to its names.
    wrapper = type(kind, (torch.nn.Module,), {})()
    wrapper.add_module("module", module)
    return wrapper


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        "compile",
        "checkpoint",
        "DataParallel",
        "DistributedDataParallel",
        "MegatronFSDP",
        "Float16Module",
    ],
)
def test_every_wrappers_token_is_stripped_at_the_root_and_inside(kind):
    inner = torch.nn.Sequential(wrap(kind, torch.nn.Linear(2, 3)), torch.nn.LayerNorm(3))
    assert ["0.weight", "0.bias", "1.weight", "1.bias"] == list(read(wrap(kind, inner)))


def test_a_class_made_from_a_wrappers_is_one():
    class Engine(torch.nn.DataParallel):
        pass

    assert ["weight", "bias"] == list(read(Engine(torch.nn.Linear(2, 3))))


def test_a_wrapper_that_gives_its_only_childs_state_dict_is_told_by_that():
    model = Delegating(torch.nn.Linear(2, 3))
    assert ["weight", "bias"] == list(read(model)) == list(model.state_dict())


class Delegating(torch.nn.Module):
    """A wrapper of a class that nobody knows."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def state_dict(self, *args, **options):
        return self.module.state_dict(*args, **options)


class Filtering(torch.nn.Module):
    """A user's module: it overrides state_dict, and its only child is called module."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)

    def state_dict(self, *args, **options):
        return {key: value for key, value in super().state_dict(*args, **options).items()}


class Adding(Filtering):
    def state_dict(self, *args, **options):
        state = torch.nn.Module.state_dict(self, *args, **options)
        state["version"] = torch.tensor(2)
        return state


class Looking(Filtering):
    """It needs its child for more than its state dict."""

    def state_dict(self, *args, **options):
        assert self.module.in_features == 2
        return super().state_dict(*args, **options)


@pytest.mark.parametrize("kind", [Filtering, Adding, Looking])
def test_a_users_state_dict_that_keeps_its_childs_name_is_not_a_wrappers(kind):
    model = torch.nn.Sequential(kind(), torch.nn.Linear(2, 2))
    names = ["0.module.weight", "0.module.bias", "1.weight", "1.bias"]
    assert names == list(read(model)) == [k for k in model.state_dict() if k != "version"]
    assert ["module.weight", "module.bias"] == list(read(kind()))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: Filtering(), ["module.weight", "module.bias"]),
        (lambda: Delegating(torch.nn.Linear(2, 2)), ["weight", "bias"]),
        (lambda: Delegating(Filtering()), ["module.weight", "module.bias"]),
        (lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2)), ["weight", "bias"]),
        (lambda: wrap("checkpoint", torch.nn.Linear(2, 2)), ["weight", "bias"]),
        (lambda: torch.nn.Sequential(Delegating(torch.nn.Linear(2, 2))), ["0.weight", "0.bias"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_checkpointing_wrapper_at_the_root_changes_no_name(build, names):
    assert names == list(read(build()))
    assert names == list(read(wrap("checkpoint", build())))


def test_a_childs_own_state_dict_is_not_asked_for():
    class Costly(torch.nn.Linear):
        def state_dict(self, *args, **options):
            raise AssertionError("this gathers all ranks' shards")

    assert ["weight", "bias"] == list(read(Delegating(Costly(2, 2))))


@pytest.mark.parametrize(
    "token", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"]
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_users_submodule_keeps_its_name_whatever_that_is(token, alone):
    model = torch.nn.Module()
    model.add_module(token, torch.nn.Linear(2, 3))
    if not alone:
        model.norm = torch.nn.LayerNorm(3)
    outer = torch.nn.Sequential(model)
    assert list(outer.state_dict()) == list(read(outer))
    assert list(outer.state_dict()) == list(read(wrap("DistributedDataParallel", outer)))


def test_names_are_those_of_the_state_dict_without_wrappers():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), Float16Module(torch.nn.Embedding(4, 2))
    )
    assert {clean_name(key) for key in model.state_dict()} == set(read(model))


def test_shapes_are_those_of_the_tensors():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = model.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        fqn: layout.local_shape for fqn, layout in read(model).items()
    }
    assert () == read(model)["1.num_batches_tracked"].local_shape


def test_what_megatron_fsdp_wraps_has_the_shape_of_its_original():
    model = torch.nn.Linear(2, 3, bias=False)
    model.weight.orig_param = torch.zeros(6, 2)
    assert (6, 2) == read(model)["weight"].local_shape


def test_a_model_may_be_described_by_names_and_shapes():
    layouts = read({"a.w": (2, 3), "b": torch.Size([4])})
    assert {"a.w": (2, 3), "b": (4,)} == {f: layout.local_shape for f, layout in layouts.items()}
    assert {"dense"} == {layout.family for layout in layouts.values()}


# Tied parameters and buffers ----------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 2)
        self.output = torch.nn.Linear(2, 4)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)


def test_tied_parameters_have_a_layout_under_each_name():
    layouts = read(Tied())
    assert {"embedding.weight", "output.weight", "output.bias"} <= set(layouts)
    assert layouts["embedding.weight"].local_shape == layouts["output.weight"].local_shape
    assert ("embedding.weight", "output.weight") == tuple(
        layouts[fqn].name for fqn in ("embedding.weight", "output.weight")
    )


def test_tied_parameters_are_numbered_once_as_an_optimizer_does():
    model = Tied()
    assert ("embedding.weight", "output.bias") == read(model).parameters
    assert len(list(model.parameters())) == len(read(model).parameters)


def test_a_module_that_is_used_twice_has_both_names():
    shared = torch.nn.Linear(2, 2, bias=False)
    assert ["0.weight", "1.weight"] == list(read(torch.nn.Sequential(shared, shared)))


def test_buffers_have_layouts_and_what_is_not_set_has_none():
    layouts = read(Tied())
    assert {"scale", "cache"} <= set(layouts)
    assert not {"nothing", "absent"} & set(layouts)


def test_parameters_are_numbered_in_the_order_of_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Float16Module(torch.nn.Linear(3, 1)))
    assert ("0.weight", "0.bias", "1.weight", "1.bias") == read(model).parameters


# Collisions -------------------------------------------------------------------------------------------------------------


def test_two_parameters_that_differ_in_a_users_own_module_have_two_names():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))
            self.module = torch.nn.Linear(2, 2, bias=False)

    assert ["weight", "module.weight"] == list(read(Both()))


def test_two_parameters_with_one_name_without_wrappers_tokens_are_refused():
    class Both(torch.nn.DataParallel):
        def __init__(self):
            super().__init__(torch.nn.Linear(2, 2))
            self.weight = torch.nn.Parameter(torch.zeros(2))

    with pytest.raises(LayoutError) as error:
        read(Both())
    assert str(error.value) == (
        "weight: two parameters have this name once wrappers' tokens "
        "(_checkpoint_wrapped_module, _fsdp_wrapped_module, _orig_mod, module) are "
        "stripped. Rename one of the modules."
    )


def test_one_parameter_that_is_reached_twice_is_no_collision():
    class Both(torch.nn.DataParallel):
        def __init__(self):
            super().__init__(torch.nn.Linear(2, 2, bias=False))
            self.weight = self.module.weight

    assert ["weight"] == list(read(Both()))


# Owners and grids -----------------------------------------------------------------------------------------------------------


def test_owners_are_the_chain_from_the_root_with_clean_paths():
    seen = {}

    class Watcher:
        name, level = "watcher", Level.PARALLEL

        def claims(self, param):
            seen[param.fqn] = [(path, type(module).__name__) for path, module in param.owners]
            return False

        def stages(self, param):
            raise AssertionError

    read(
        Float16Module(torch.nn.Sequential(Float16Module(torch.nn.Linear(2, 3)))),
        providers=[Watcher()],
    )
    assert [
        ("", "Float16Module"),
        ("", "Sequential"),
        ("0", "Float16Module"),
        ("0", "Linear"),
    ] == seen["0.weight"]


def test_experts_get_the_experts_grid_and_their_number():
    grids = Grids.from_sizes(0, dp_shard=4, ep=2)
    seen = {}

    class Watcher:
        name, level = "watcher", Level.PARALLEL

        def claims(self, param):
            seen[param.fqn] = (param.grid, param.is_expert, param.num_local_experts)
            return False

        def stages(self, param):
            raise AssertionError

    names = [
        "router.w",
        "experts.w",
        "experts.0.a.w",
        "experts.1.a.w",
        "experts.0.b",
        "shared_experts.w",
    ]
    read(dict.fromkeys(names, (2, 2, 2)), grids, [Watcher()])
    assert {
        "router.w": (grids.dense, False, None),
        "shared_experts.w": (grids.dense, False, None),
        "experts.w": (grids.expert, True, None),
        "experts.0.a.w": (grids.expert, True, 2),
        "experts.1.a.w": (grids.expert, True, 2),
        "experts.0.b": (grids.expert, True, 1),
    } == seen


def test_the_tokens_of_the_expert_grid_decide_who_is_an_expert():

    layouts = read({"moe.0.w": (2,), "experts.0.w": (2,)}, providers=[ExpertGrid(tokens=["moe"])])
    assert {"moe.0.w": "expert", "experts.0.w": "dense"} == {
        fqn: layout.family for fqn, layout in layouts.items()
    }


def test_an_error_of_one_parameter_names_it():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(LayoutError, match=r"^bias: it is sharded along dim 1 but has 1 dims"):
        read(model, providers=[TensorParallel({"*": 1})])


def test_a_plain_model_with_all_default_layouts_is_whole_on_every_rank():
    model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    layouts = read(model, Grids.from_sizes(1, dp_shard=2, tp=2), DEFAULT_LAYOUTS)
    assert {()} == {layout.axes for layout in layouts.values()}
    assert set(model.state_dict()) == set(layouts)


# The model's own process groups ----------------------------------------------------------------------------------------------


def test_the_pg_collection_is_found_at_any_wrapper_level():
    groups = types.SimpleNamespace()
    model = torch.nn.Linear(2, 2)
    assert carried_pg_collection(model) is None
    assert carried_pg_collection(None) is None
    model.pg_collection = groups
    assert groups is carried_pg_collection(model)
    assert groups is carried_pg_collection(Float16Module(Float16Module(model)))
    outer = types.SimpleNamespace()
    assert outer is carried_pg_collection(Float16Module(model, pg_collection=outer))
    assert groups is carried_pg_collection(Float16Module(model, pg_collection=None))


def test_a_circle_of_wrappers_ends():
    circle = types.SimpleNamespace()
    circle.module = circle
    assert carried_pg_collection(circle) is None
