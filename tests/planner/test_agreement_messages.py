"""What ranks say of their plans, and what comparing it finds: all ranks in one process."""

import dataclasses
import itertools
import random

import alone
import memory
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardplan.layouts import Cut, DTensorStorage, ExpertGrid, FSDPFlatBuffer, Grid, Grids
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    MissingKeyError,
    PerRank,
    RanksDisagreeError,
    UnstorableValueError,
)
from shardplan.planner.planning.manifest import Kind, Members
from shardplan.planner.planning.tied import with_aliases
from shardplan.planner.saving.agreement import compare
from shardplan.planner.saving.messages import PlanMessage, Tie, WriterMeta
from shardplan.planner.state.described import Description
from shardplan.planner.state.entries import Place


class Writer:
    """A storage writer that stores layouts, as far as the planner sees it."""

    stores_layouts = True

    def __init__(self, collective: bool) -> None:
        self.collective = collective
        self.failed: list[tuple[str, int, object]] = []

    def plan_failed(self, error: Exception, grids: Grids, ranks: object) -> None:
        self.failed.append((str(error), grids.world_size, ranks))


def message(planner, state, writer=None):
    meta = StorageMeta() if writer is None else WriterMeta(writer=writer)
    planner.set_up_planner(state, meta, False)
    return memory.world.sent(planner.create_local_plan()).planner_data


def compared(states, planners):
    return compare([message(p, s) for p, s in zip(planners, states, strict=True)])


# Slots ----------------------------------------------------------------------------------------------


def flat(kind, rank, ranges=((0, 3), (3, 8))):
    grid = Grids.from_sizes(rank, dp_shard=len(ranges))
    return kind({"w": (8,)}, grid=grid, layouts=[FSDPFlatBuffer({"w": ranges})])


def slots(rank, value):
    return {"optim": {"state": {"w": {"exp_avg": torch.ones((3, 5)[rank]), "m": value}}}}


@pytest.mark.parametrize(
    "values",
    [
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (torch.tensor([3]), torch.tensor([4])),
        (
            torch.tensor(1 + 2j, dtype=torch.complex128),
            torch.tensor(1 - 2j, dtype=torch.complex128),
        ),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (np.array([1]), np.array([2])),
        ({"a": (1, 2)}, {"a": (1, 3)}),
        ("x", None),
        (True, 1),
        (torch.tensor(1.0), 1.0),
    ],
    ids=repr,
)
def test_values_of_one_slot_that_differ_are_refused_by_key_and_ranks(values):
    planners = [flat(LayoutAwareSavePlanner, rank) for rank in range(2)]
    with pytest.raises(RanksDisagreeError, match=r"optim\.state\.w\.m.*rank.* 0 and .*1"):
        compared([slots(r, values[r]) for r in range(2)], planners)


@pytest.mark.parametrize(
    "value", [torch.tensor(float("nan")), torch.tensor(5.0, dtype=torch.float8_e4m3fn), (1, "a")]
)
def test_equal_values_of_one_slot_agree(value):
    planners = [flat(LayoutAwareSavePlanner, rank) for rank in range(2)]
    assert compared([slots(r, value) for r in range(2)], planners).fault is None


def test_values_of_one_slot_may_be_per_rank():
    planners = [flat(LayoutAwareSavePlanner, rank) for rank in range(2)]
    saved = memory.save([slots(r, PerRank((r, "own"))) for r in range(2)], planners)
    states = [slots(r, PerRank()) for r in range(2)]
    memory.load(saved, states, [flat(LayoutAwareLoadPlanner, rank) for rank in range(2)])
    assert [(0, "own"), (1, "own")] == [s["optim"]["state"]["w"]["m"].value for s in states]


def test_steps_that_differ_later_are_found_in_an_unchanged_plan():
    planners = [flat(LayoutAwareSavePlanner, rank) for rank in range(2)]
    states = [slots(r, torch.tensor(1.0)) for r in range(2)]
    memory.save(states, planners)
    states[1]["optim"]["state"]["w"]["m"].fill_(2.0)
    with pytest.raises(RanksDisagreeError, match=r"^optim\.state\.w\.m: ranks 0 and 1 hold diff"):
        memory.save(states, planners)


def test_experts_of_other_ranks_may_differ_and_replicas_of_one_may_not():
    """Each expert-parallel rank's own experts have steps of their own."""
    shapes = {"experts.0.w": (2,), "experts.1.w": (2,)}

    def made(kind):
        places = [Grids.from_sizes(r, dp_shard=4, ep=2) for r in range(4)]
        return [kind(shapes, grid=grid, layouts=[ExpertGrid()]) for grid in places]

    def state(steps):
        slots = {
            f"experts.{i}.w": {"exp_avg": torch.ones(2), "step": torch.tensor(steps[i])}
            for i in range(2)
        }
        return {"optim": {"state": slots}}

    steps = [(0.0, 1.0), (2.0, 3.0), (0.0, 1.0), (2.0, 3.0)]  # ep counts faster than its replicas
    saved = memory.save([state(s) for s in steps], made(LayoutAwareSavePlanner))
    found = [saved.tensor(f"optim.state.experts.{i}.w.step").item() for i in range(4)]
    assert [0.0, 1.0, 2.0, 3.0] == found
    text = r"^optim\.state\.experts\.3\.w\.step: ranks 1 and 3 hold different values"
    for own in ((2.0, 3.0), (0.0, 1.0)):  # also where other experts have the values of these
        steps[1], steps[3] = own, (own[0], 9.0)
        with pytest.raises(RanksDisagreeError, match=text):
            memory.save([state(s) for s in steps], made(LayoutAwareSavePlanner))


@pytest.mark.parametrize("seed", range(20))
def test_missing_slots_are_those_that_a_rank_stores_a_part_of(seed):
    """Random flat buffers: who stores what is written down by the test itself."""
    draw = random.Random(seed)
    ranks, shapes, ranges = 4, {}, {}
    for number in range(12):
        cuts = sorted(draw.choices(range(7), k=ranks - 1))
        bounds = [0, *cuts, 6]
        shapes[f"p{number:02}"] = (6,)
        ranges[f"p{number:02}"] = tuple(itertools.pairwise(bounds))
    held = {
        (rank, name): draw.random() < 0.9 or start == stop
        for name, parts in ranges.items()
        for rank, (start, stop) in enumerate(parts)
    }
    wrong = {
        f"o.state.{name}.m: rank {rank} lacks it but stores {stop - start} elements"
        for name, parts in ranges.items()
        if any(held[r, name] for r in range(ranks))
        for rank, (start, stop) in enumerate(parts)
        if stop > start and not held[rank, name]
    }
    states, planners = [], []
    for rank in range(ranks):
        parts = {n: p[rank] for n, p in ranges.items()}
        state = {n: {"m": torch.ones(b - a)} for n, (a, b) in parts.items() if held[rank, n]}
        states.append({"o": {"state": state}})
        grid = Grids.from_sizes(rank, dp_shard=ranks)
        planners.append(LayoutAwareSavePlanner(shapes, grid=grid, layouts=[FSDPFlatBuffer(ranges)]))
    if not wrong:
        assert compared(states, planners).fault is None
        return
    with pytest.raises(RanksDisagreeError) as caught:
        compared(states, planners)
    text = str(caught.value)
    assert sum(fault in text for fault in wrong) == min(len(wrong), 8)
    assert len(wrong) == 1 or f"{len(wrong)} problems" in text


# Keys of some ranks ----------------------------------------------------------------------------------

OWN = {
    "int": lambda rank: rank,
    "tensor": lambda rank: torch.full((3,), float(rank)),
    "empty tensor": lambda rank: torch.zeros(0, 2),
    "bytes": lambda rank: b"x%d" % rank,
}


@pytest.mark.parametrize("kind", OWN)
def test_spare_items_are_what_a_rank_must_write_beside_its_plan(kind):
    """Without collectives: every rank plans alone, and all messages are compared later."""
    holders = {0: "ab", 1: "bc", 2: "bc", 3: "d"}
    planners = [
        LayoutAwareSavePlanner({"w": (4,)}, grid=Grids.from_sizes(r, dp_replicate=4))
        for r in range(4)
    ]
    states = [
        {"w": torch.ones(4), "train": {k: OWN[kind](ord(k)) for k in holders[r]}} for r in range(4)
    ]
    messages, written = [], {}
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        writer = Writer(collective=False)
        planner.set_up_planner(state, WriterMeta(writer=writer), rank == 0)
        plan = planner.create_local_plan()
        messages.append(memory.world.sent(plan).planner_data)
        (alone,), metadata = planner.create_global_plan([plan])
        assert {} == metadata.state_dict_metadata
        for item in planner.finish_plan(alone).items:
            written[item.index.fqn] = rank
            planner.resolve_data(item)
    assert {"w", "train.a", "train.b"} == written.keys()
    agreement = compare(messages)
    for rank, (planner, reply) in enumerate(zip(planners, agreement.replies, strict=True)):
        for item in planner.spare_items(reply.write):
            assert item.index.fqn not in written
            written[item.index.fqn] = rank
            value = planner.resolve_data(item)
            if isinstance(value, torch.Tensor):
                assert torch.equal(OWN[kind](ord(item.index.fqn[-1])), value)
        assert [] == planner._values and {} == planner._spare  # no tensor outlives the save
    assert (0, 0, 1, 3) == tuple(written[f"train.{k}"] for k in "abcd")
    (stage,) = agreement.stages
    assert {"train.a": None, "train.b": None, "train.c": 1, "train.d": 3} == {
        extra.key: extra.writer for extra in stage.extras
    }


def test_keys_of_some_ranks_that_differ_are_refused():
    planners = [LayoutAwareSavePlanner(grid=Grids.from_sizes(r, dp_shard=4)) for r in range(4)]
    states = [{"a": 1}, {"a": 1, "t": torch.ones(2)}, {"a": 1}, {"a": 1, "t": torch.zeros(2)}]
    with pytest.raises(RanksDisagreeError, match=r"^t: ranks 1 and 3 hold different values"):
        compared(states, planners)


@pytest.mark.parametrize("other", [{}, {"rng": 7}, {"rng": PerRank(7, axes=("dp_shard",))}])
def test_a_value_is_per_rank_on_all_ranks_or_on_none(other):
    planners = [LayoutAwareSavePlanner(grid=Grids.from_sizes(r, dp_shard=2)) for r in range(2)]
    with pytest.raises(RanksDisagreeError, match=r"^rng: a PerRank value on rank \d and not on"):
        compared([{"a": 1, "rng": PerRank(1)}, {"a": 1, **other}], planners)


# Optimizers that leave out what a rank stores nothing of --------------------------------------------


def leaving_out(kind, rank, sources):
    """Three ranks; the first parameter has 2 rows, so that rank 2 stores nothing of it."""
    shapes = {"a": (2, 2), "b": (5, 2)}
    if sources == "cuts":
        layouts = [DTensorStorage({"*": (Cut(0, "dp_shard"),)})]
    else:
        layouts = [FSDPFlatBuffer(RANGES[sources])]
    return kind(shapes, grid=Grids.from_sizes(rank, dp_shard=3), layouts=layouts)


RANGES = {
    "flat": {"a": ((0, 2), (2, 4), (4, 4)), "b": ((0, 0), (0, 4), (4, 10))},
    "flat, nobody lists all": {"a": ((0, 4), (4, 4), (4, 4)), "b": ((0, 0), (0, 4), (4, 10))},
}
HELD = {
    "cuts": [{"a": (1, 2), "b": (2, 2)}, {"a": (1, 2), "b": (2, 2)}, {"b": (1, 2)}],
    "flat": [{"a": (2,)}, {"a": (2,), "b": (4,)}, {"b": (6,)}],
    "flat, nobody lists all": [{"a": (4,)}, {"b": (4,)}, {"b": (6,)}],
}


def options(shapes, lr, fill):
    return {
        "optim": {
            "state": {n: {"m": torch.full(s, fill)} for n, s in shapes.items()},
            "param_groups": [{"lr": lr, "betas": (0.9, 0.99), "params": list(shapes)}],
        }
    }


@pytest.mark.parametrize("sources", HELD)
def test_optimizers_may_leave_out_what_their_rank_stores_nothing_of(sources):
    held = HELD[sources]
    savers = [leaving_out(LayoutAwareSavePlanner, r, sources) for r in range(3)]
    saved = memory.save([options(s, 0.5, 3.0) for s in held], savers)
    for wanted in (held, [{n: None for n in ("a", "b")}] * 3):
        states = []
        for rank in range(3):
            full = {
                n: held[rank].get(n, (0, 2) if sources == "cuts" else (0,)) for n in wanted[rank]
            }
            states.append(options(full, 0.0, 0.0))
        loaders = [leaving_out(LayoutAwareLoadPlanner, r, sources) for r in range(3)]
        memory.load(saved, states, loaders)
        for state, loader in zip(states, loaders, strict=True):
            assert 0.5 == state["optim"]["param_groups"][0]["lr"]
            assert all(bool((s["m"] == 3.0).all()) for s in state["optim"]["state"].values())
            assert [] == loader.report.unexpected


def test_options_that_differ_between_such_optimizers_are_refused():
    savers = [leaving_out(LayoutAwareSavePlanner, r, "cuts") for r in range(3)]
    states = [options(s, 0.5 if r < 2 else 0.25, 3.0) for r, s in enumerate(HELD["cuts"])]
    with pytest.raises(RanksDisagreeError, match=r"optim\.param_groups\.b\.lr: rank 2 has another"):
        memory.save(states, savers)


def trained(rank, flatten):
    """The model and optimizer state of one of two pipeline stages, each with its own layer."""
    module = torch.nn.Module()
    module.register_module(f"layer{rank}", torch.nn.Linear(2, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    chosen = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(module, optimizer, options=chosen)
    return module, {"optim": state}


def test_options_of_ranks_that_train_other_parameters_name_two_ways_out():
    stages = [trained(rank, flatten=False) for rank in range(2)]
    states = [state for _, state in stages]
    advice = (
        r"^optim\.param_groups\.0\.params: ranks 0 and 1 hold different values .* pass the model "
        r"and grid= to the planner, or .* StateDictOptions\(flatten_optimizer_state_dict=True\)\.$"
    )
    with pytest.raises(RanksDisagreeError, match=advice):
        memory.save(states, replicas())

    savers = [
        LayoutAwareSavePlanner(module, grid=Grids.from_sizes(rank, pp=2))
        for rank, (module, _) in enumerate(stages)
    ]
    assert_rates_saved(memory.save(states, savers))
    flat = [trained(rank, flatten=True)[1] for rank in range(2)]
    assert_rates_saved(memory.save(flat, replicas()))


@pytest.mark.parametrize("flatten", [True, False])
def test_options_saved_by_name_load_into_a_list_without_a_model(flatten):
    stages = [trained(rank, flatten) for rank in range(2)]
    savers = [
        LayoutAwareSavePlanner(module, grid=Grids.from_sizes(rank, pp=2))
        for rank, (module, _) in enumerate(stages)
    ]
    saved = memory.save([state for _, state in stages], savers)

    names = [f"layer{rank}.{part}" for part in ("weight", "bias") for rank in range(2)]
    groups = [{"lr": 0.0, "params": names[:3]}, {"lr": 0.0, "params": names[3:]}]
    planner = LayoutAwareLoadPlanner()
    memory.load(saved, [{"optim": {"state": {}, "param_groups": groups}}], [planner])
    assert [0.5, 0.5] == [group["lr"] for group in groups]
    assert [names[:3], names[3:]] == [group["params"] for group in groups]

    more = [{"lr": 0.0, "params": [*names, "layer2.weight"]}]
    with pytest.raises(MissingKeyError, match=r"optim\.param_groups\.layer2\.weight: not in"):
        wanted = {"optim": {"state": {}, "param_groups": more}}
        memory.load(saved, [wanted], [LayoutAwareLoadPlanner()])
    assert 0.0 == more[0]["lr"]


def replicas():
    grids = [Grids.from_sizes(rank, dp_replicate=2) for rank in range(2)]
    return [LayoutAwareSavePlanner(grid=grid) for grid in grids]


def assert_rates_saved(saved):
    rates = {key for key in saved.metadata.state_dict_metadata if key.endswith(".lr")}
    names = [f"layer{rank}.{part}" for rank in range(2) for part in ("weight", "bias")]
    assert {f"optim.param_groups.{name}.lr" for name in names} == rates


# The writer, and drivers other than dcp.save ---------------------------------------------------------


def test_one_rank_of_several_is_refused_by_whoever_drives_a_stock_writer():
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0, dp_replicate=2))
    planner.set_up_planner({"w": torch.ones(2)}, StorageMeta(), True)
    plan = planner.create_local_plan()
    with pytest.raises(CheckpointError, match=r"the other 1 ranks \(dp_replicate 0/2\)"):
        planner.create_global_plan([plan])


def test_a_collective_writer_never_plans_alone():
    """As with no_dist=True, where the writer thinks that plans are exchanged."""
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0, dp_replicate=2))
    planner.set_up_planner({"w": torch.ones(2)}, WriterMeta(writer=Writer(collective=True)), True)
    plan = planner.create_local_plan()
    with pytest.raises(CheckpointError, match="the other 1 ranks"):
        planner.create_global_plan([plan])


@pytest.mark.parametrize("collective", [True, False])
def test_a_plan_that_fails_is_told_to_the_writer_where_nobody_else_learns_of_it(collective):
    writer = Writer(collective)
    planner = LayoutAwareSavePlanner({"w": (4,)}, grid=Grids.from_sizes(1, dp_replicate=2))
    planner.set_up_planner({"w": torch.ones(4).to_sparse()}, WriterMeta(writer=writer), False)
    with pytest.raises(UnstorableValueError, match=r"^w: a tensor of layout torch\.sparse_coo"):
        planner.create_local_plan()
    told = [(text[:3], world, ranks) for text, world, ranks in writer.failed]
    assert told == ([] if collective else [("w: ", 2, None)])


PLAIN = (str, bytes, int, bool, type(None), torch.dtype)


def test_a_message_is_plain_data():
    """All of it can be written as JSON: nothing but these classes and what they are made of."""
    w = torch.ones(4)
    planner = LayoutAwareSavePlanner(
        {"w": (4,), "v": (4,)}, grid=Grids.from_sizes(1, dp_replicate=2)
    )
    state = {
        "model": {"w": w, "v": w},
        "optim": {"state": {"w": {"step": torch.tensor(1.0), "o": "x"}}},
        "t": torch.ones(2),
        "n": [1],
        "rng": PerRank(1, axes=("dp_replicate",)),
    }

    def check(value):
        if isinstance(value, PLAIN):
            return
        if isinstance(value, dict):
            assert all(isinstance(k, Kind) and isinstance(v, Members) for k, v in value.items())
            value = (*value, *value.values())
        if dataclasses.is_dataclass(value):
            assert (
                isinstance(value, PlanMessage | Kind | Members | Grids | Grid | Description | Tie)
                or type(value).__name__ == "Told"
            )
            value = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
        assert type(value) in (tuple, Place), type(value)
        for part in value:
            check(part)

    sent = message(planner, state)
    assert sent.told.ties and sent.told.extras and sent.told.values and sent.told.per_rank
    check(sent)


@dataclasses.dataclass
class OtherMetadata(Metadata):
    """Metadata of another torch version: a field more, which the constructor does not take."""

    written: str = dataclasses.field(default="never", init=False)


def by_setting(metadata):
    metadata.version = "1"
    return metadata


def by_replacing(metadata):
    """How torch 2.11 sets the version."""
    return dataclasses.replace(metadata, version="1")


@pytest.mark.parametrize("kind", [Metadata, OtherMetadata])
@pytest.mark.parametrize("stamp", [by_setting, by_replacing])
def test_tied_keys_are_noted_however_torch_sets_the_version(kind, stamp):
    first = with_aliases(kind({}, planner_data={"a": 1}), {"head": "embed", "out": "embed"})
    metadata = stamp(first)
    metadata.storage_data = {memory.MetadataIndex("embed", torch.Size([0])): "there"}
    assert type(metadata) is Metadata
    assert ("1", {"a": 1}) == (metadata.version, metadata.planner_data)
    assert {"embed": "there", "head": "there", "out": "there"} == {
        i.fqn: place for i, place in metadata.storage_data.items()
    }
    assert type(memory.world.sent(first)) is Metadata  # DCP sends it to all ranks


class Replacing(dcp.FileSystemWriter):
    """torch 2.11's writer, as far as the metadata goes."""

    def finish(self, metadata, results):
        super().finish(dataclasses.replace(metadata, version="1"), results)


def test_tied_weights_load_from_a_writer_that_replaces_the_metadata(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    model = torch.nn.ModuleDict({n: torch.nn.Linear(3, 2, bias=False) for n in ("embed", "head")})
    model["head"].weight = model["embed"].weight
    model["embed"].weight.data = weight.clone()
    model["head"].weight.data = model["embed"].weight.data
    writer = Replacing(tmp_path, sync_files=False)
    planner = LayoutAwareSavePlanner(model)
    dcp.save(model.state_dict(), storage_writer=writer, planner=planner, no_dist=True)
    state = {f"{n}.weight": torch.zeros(2, 3) for n in ("embed", "head")}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(weight, state["embed.weight"]) and torch.equal(weight, state["head.weight"])
    places = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    assert 2 == len(places) and 1 == len({(p.relative_path, p.offset) for p in places.values()})


def test_options_by_name_beside_lists_of_other_ranks_are_stored():
    """One rank lists groups; another has a parameter that no list holds."""
    states = [
        {"opt": {"param_groups": [{"params": ["a"], "lr": 0.1}]}},
        {"opt": {"param_groups": {"c": {"lr": 0.1}}}},
    ]
    grids = [Grids.from_sizes(rank, dp_replicate=2) for rank in range(2)]
    checkpoint = memory.save(states, [LayoutAwareSavePlanner(grid=grid) for grid in grids])
    found = {"opt": {"param_groups": {"c": {"lr": 0.0}}}}
    memory.load(checkpoint, [found], [LayoutAwareLoadPlanner()])
    assert 0.1 == found["opt"]["param_groups"]["c"]["lr"]
    states[1]["opt"]["param_groups"]["c"]["lr"] = 0.3
    with pytest.raises(RanksDisagreeError, match=r"c\.lr: rank 1 has another value than any group"):
        memory.save(states, [LayoutAwareSavePlanner(grid=grid) for grid in grids])


@pytest.mark.parametrize("collective", [True, False])
def test_value_under_the_key_of_a_tensor_with_boxes_is_refused(tmp_path, collective):
    """With collectives the planner sees it, without them who completes the save."""
    tensor = torch.ones(2)
    tensor.global_shape, tensor.global_offsets = (2,), ((0,),)
    tensor.local_offsets, tensor.local_sizes = ((0,),), ((2,),)
    states = [{"t": tensor}, {"t": torch.arange(4.0)}]
    planners = [LayoutAwareSavePlanner(grid=Grids.from_sizes(r, dp_replicate=2)) for r in range(2)]
    text = "t: t of the model has this key, and so has a value that belongs to no parameter"
    if collective:
        with pytest.raises(CheckpointError, match=text):
            memory.save(states, planners)
        return
    errors = alone.save(tmp_path, states, planners)
    assert all(text in str(error) for error in errors)
    assert not (tmp_path / "checkpoint.json").exists()
