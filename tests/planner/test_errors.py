"""Bad input: every error names the fqn, both numbers, the rank's facts and what to do."""

import os

import memory
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from shardplan.layouts import (
    GDN,
    BufferDescription,
    Concat,
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
    Level,
    PipelineLayers,
    SwiGLU,
    TensorParallel,
)
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
)


def parts_of(text, fqn, *needles):
    """Checks that an error starts with the parameter and has every part."""
    assert text.startswith(f"{fqn}: "), text
    for needle in needles:
        assert needle in text, (needle, text)


TP4 = Grids.from_sizes(1, tp=4)
EP4 = Grids.from_sizes(2, dp_shard=4, ep=4)
DP2 = Grids.from_sizes(1, dp_shard=2)


class Other(SwiGLU):
    name = "mine"


MADE = {
    "sizes that do not divide": (
        {"a.in_proj.weight": (7, 3)},
        TP4,
        [GDN({"*.in_proj.weight": {"query": 6, "key": 4}})],
        ("6 rows", "4 tensor-parallel ranks", "'query'", "tp 1/4", "Choose a tensor-parallel size"),
    ),
    "experts that do not divide": (
        {"experts.0.w": (7, 3)},
        EP4,
        [ExpertGrid(6)],
        ("6 experts", "4 expert-parallel ranks", "ep 2/4", "Choose an ep size"),
    ),
    "more experts than there are": (
        {"experts.0.w": (7, 3), "experts.1.w": (7, 3)},
        EP4,
        [ExpertGrid(4)],
        ("2 local experts", "4 experts over 4", "ep 2/4", "pg_collection"),
    ),
    "halves of an odd tensor": (
        {"a.linear_fc1.weight": (7, 3)},
        TP4,
        [SwiGLU(["*.linear_fc1.weight"])],
        ("7 rows of dim 0", "tp 1/4", "SwiGLU(sizes=...)"),
    ),
    "a flat range outside the tensor": (
        {"w": (2, 3)},
        DP2,
        [FSDPFlatBuffer({"w": ((0, 4), (4, 7))})],
        ("[4, 7)", "[0, 6)", "dp_shard 1/2", "padding"),
    ),
    "too few flat ranges": (
        {"w": (2, 3)},
        DP2,
        [FSDPFlatBuffer({"w": ((0, 6),)})],
        ("1 flat ranges", "2 ranks", "dp_shard 1/2", "empty ones included"),
    ),
    "a buffer cut for another world": (
        {"w": (2, 3)},
        DP2,
        [FSDPFlatBuffer(buffers=[BufferDescription({"w": (2, 3)}, 3)])],
        ("3 slices", "2 ranks", "dp_shard 1/2"),
    ),
    "a buffer with another shape": (
        {"w": (2, 3)},
        DP2,
        [FSDPFlatBuffer(buffers=[BufferDescription({"w": (3, 2)}, 2)])],
        ("(3, 2)", "(2, 3)", "dp_shard 1/2"),
    ),
    "a sharded dim that is not there": (
        {"w": (2,)},
        TP4,
        [TensorParallel({"w": 1})],
        ("dim 1", "1 dims", "tp 1/4", "partition_dim"),
    ),
    "two providers on one parameter": (
        {"w": (2, 3)},
        TP4,
        [SwiGLU(["w"]), Other(["w"])],
        ("'swiglu'", "'mine'", "COMPONENT", "tp 1/4", "Leave one of them out"),
    ),
    "a layer without a number": (
        {"layers.1.w": (2,)},
        Grids.from_sizes(1, pp=2),
        [PipelineLayers({0: 4})],
        ("layer 1", "1 layers", "pp 1/2", "global number"),
    ),
}


@pytest.mark.parametrize("kind", [LayoutAwareSavePlanner, LayoutAwareLoadPlanner])
@pytest.mark.parametrize("case", MADE)
def test_found_when_a_planner_is_made(case, kind):
    model, grid, layouts, needles = MADE[case]
    with pytest.raises(LayoutError) as caught:
        kind(model, grid=grid, layouts=layouts)
    parts_of(
        str(caught.value),
        next(reversed(model)) if "layers" in case else next(iter(model)),
        *needles,
    )


class Parts:
    """Components that do not add up."""

    name = "parts"
    level = Level.COMPONENT

    def claims(self, param):
        return param.fqn == "w"

    def stages(self, param):
        return (Concat(0, (("_a", 2), ("_b", 3)), "two parts"),)


PLANNED = {
    "components that do not add up": (
        {"w": (6, 3)},
        TP4,
        [Parts()],
        {"w": torch.zeros(6, 3)},
        ("5 rows of dim 0", "has 6", "a 2 + b 3", "tp 1/4", "Give the sizes"),
    ),
    "a tensor of another size": (
        {"w": (6, 3)},
        DP2,
        [FSDPFlatBuffer({"w": ((0, 7), (7, 18))})],
        {"w": torch.zeros(7)},
        ("7 elements in shape (7,)", "stores 11", "(6, 3)", "dp_shard 1/2", "FSDPFlatBuffer"),
    ),
    "a transposed tensor": (
        {"w": (6, 3)},
        DP2,
        [],
        {"w": torch.zeros(3, 6)},
        ("has shape (3, 6)", "(6, 3)", "dp_shard 1/2", "Build the planner"),
    ),
    "cuts of given sizes that do not add up": (
        {"w": (6, 3)},
        DP2,
        [DTensorStorage({"w": (Cut(0, "dp_shard", sizes=(2, 3)),)})],
        {"w": torch.zeros(3, 3)},
        ("(2, 3)", "6", "dp_shard 1/2", "Mend the cut"),
    ),
}


@pytest.mark.parametrize("case", PLANNED)
def test_found_when_a_save_is_planned(case):
    model, grid, layouts, state, needles = PLANNED[case]
    with pytest.raises(LayoutError) as caught:
        planner = LayoutAwareSavePlanner(model, grid=grid, layouts=layouts)
        planner.set_up_planner(state)
        planner.create_local_plan()
    parts_of(str(caught.value), "w", *needles)


@pytest.mark.parametrize("case", PLANNED)
def test_found_when_a_load_is_planned(case):
    model, grid, layouts, state, needles = PLANNED[case]
    checkpoint = memory.stored(w=((6, 3), [((0, 0), torch.ones(6, 3))]))
    with pytest.raises(LayoutError) as caught:
        planner = LayoutAwareLoadPlanner(model, grid=grid, layouts=layouts)
        memory.load(checkpoint, [state], [planner])
    parts_of(str(caught.value), "w", *needles)
    assert not state["w"].any()


# Ranks that disagree ------------------------------------------------------------------------------


def planned(states, planners):
    """What `dcp.save` raises on each rank, None where it goes on to write."""
    plans = []
    for state, planner in zip(states, planners, strict=True):
        planner.set_up_planner(state)
        plans.append(memory.world.sent(planner.create_local_plan()))
    try:
        replies, _ = planners[0].create_global_plan(plans)
    except CheckpointError as error:
        return [str(error)] * len(planners)
    texts = []
    for planner, reply in zip(planners, replies, strict=True):
        try:
            planner.finish_plan(memory.world.sent(reply))
            texts.append(None)
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def three(models, layouts=((), (), ())):
    planners = [
        LayoutAwareSavePlanner(
            models[rank], grid=Grids.from_sizes(rank, dp_replicate=3), layouts=layouts[rank]
        )
        for rank in range(3)
    ]
    return [{k: torch.zeros(s) for k, s in model.items()} for model in models], planners


A = {"a": (4, 2), "b": (3,), "c": (2,)}
DISAGREEING = {
    "another layout": (three([A] * 3, ((), (), (SwiGLU(["a"]),))), 2, "a", ("Concat", "Whole")),
    "another shape": (three([A, {**A, "b": (5,)}, A]), 1, "b", ("(3,)", "(5,)")),
    "another name": (three([A, A, {"a": (4, 2), "x": (3,), "c": (2,)}]), 2, "x", ("b",)),
    "another order": (three([A, {"b": (3,), "a": (4, 2), "c": (2,)}, A]), 1, "b", ("a",)),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_ranks_that_disagree(case):
    """An error on every rank; together they name both ranks and the first difference."""
    (states, planners), rank, fqn, needles = DISAGREEING[case]
    texts = planned(states, planners)
    assert None not in texts
    for other in {0, 1, 2} - {rank}:
        assert f"ranks 0 and {rank} " in texts[other]
        assert "nothing was written" in texts[other]
        assert f"dp_replicate {other}/3" in texts[other]
    parts_of(texts[rank], fqn, *needles, "rank 0", f"dp_replicate {rank}/3")


def test_a_parameter_that_only_one_rank_has():
    texts = planned(*three([A, A, {**A, "d": (1,)}]))
    assert None not in texts
    assert "4 parameters here and 3 there" in texts[2]


@pytest.mark.parametrize("value", [3, torch.full((2,), 3.0)])
def test_a_value_that_only_one_rank_has(value):
    """It is written by the rank that has it, Python value or tensor."""
    states, planners = three([A] * 3)
    states[1]["epoch"] = value
    checkpoint = memory.save(states, planners)
    if isinstance(value, torch.Tensor):
        assert [3.0, 3.0] == checkpoint.tensor("epoch").tolist()
        assert 1 == checkpoint.written_by["epoch", (0,)]
    else:
        assert (3, 1) == (checkpoint.value("epoch"), checkpoint.written_by["epoch", None])
    states[1].pop("epoch")
    assert [None] * 3 == planned(states, planners)


def test_ranks_that_disagree_write_nothing(tmp_path):
    states, planners = three([A, {**A, "b": (5,)}, A])
    with pytest.raises(CheckpointError):
        memory.world.save(tmp_path, states, planners)
    assert [] == [name for _, _, names in os.walk(tmp_path) for name in names]


def test_grids_that_do_not_fit_together():
    """Two ranks at one place, a place without a rank, and sizes that differ."""
    cases = {
        (0, 0): (3, "ranks 0 and 1 are at one place of the dense grid (dp_replicate 0/3)"),
        (0, 1): (2, "the dense grid has 2 ranks but 3 save"),
    }
    for (first, second), (size, text) in cases.items():
        planners = [
            LayoutAwareSavePlanner(A, grid=Grids.from_sizes(place, dp_replicate=size), layouts=[])
            for place in (first, second, size - 1)
        ]
        states = [{k: torch.zeros(s) for k, s in A.items()} for _ in planners]
        found = planned(states, planners)
        assert all(text in error for error in found), found
        assert "Give every planner the pg_collection or grid of its own rank" in found[0]
    sizes = [
        Grids.from_sizes(0, dp_replicate=3),
        Grids.from_sizes(1, dp_shard=3),
        Grids.from_sizes(2, dp_replicate=3),
    ]
    planners = [LayoutAwareSavePlanner(A, grid=grid, layouts=[]) for grid in sizes]
    found = planned([{k: torch.zeros(s) for k, s in A.items()} for _ in planners], planners)
    assert all("rank 1 has the dense axes" in error for error in found), found


def test_another_planner_on_one_rank():
    states, planners = three([A] * 3)
    planners[1] = DefaultSavePlanner()
    with pytest.raises(CheckpointError, match="rank 1 saves with another planner"):
        memory.save(states, planners)


# Loads --------------------------------------------------------------------------------------------


def test_shapes_that_differ():
    checkpoint = memory.stored(w=((6, 3), [((0, 0), torch.ones(6, 3))]))
    planner = LayoutAwareLoadPlanner({"w": (2, 3)}, grid=TP4, layouts=[TensorParallel({"w": 0})])
    with pytest.raises(CheckpointError) as caught:
        memory.load(checkpoint, [{"w": torch.zeros(2, 3)}], [planner])
    parts_of(str(caught.value), "w", "(6, 3)", "(8, 3)", "tp 1/4", "VocabularyPadding")


def test_ranks_of_a_tensor_that_differ():
    """Offsets and sizes of different rank."""
    checkpoint = memory.stored(w=((6,), [((0,), torch.ones(6))]))
    with pytest.raises(CheckpointError) as caught:
        memory.load(checkpoint, [{"w": torch.zeros(2, 3)}], [LayoutAwareLoadPlanner({"w": (2, 3)})])
    parts_of(str(caught.value), "w", "(6,)", "(2, 3)", "one rank")


def test_missing_keys():
    checkpoint = memory.stored(w=((2,), [((0,), torch.ones(2))]))
    state = {"w": torch.zeros(2), "v": torch.zeros(2), "n": 3}
    model = {"w": (2,), "v": (2,)}
    with pytest.raises(CheckpointError) as caught:
        memory.load(checkpoint, [state], [LayoutAwareLoadPlanner(model, grid=DP2)])
    text = str(caught.value)
    assert text.startswith("2 problems:\n")
    assert "v: not in the checkpoint (dp_shard 1/2)" in text
    assert "n: not in the checkpoint (dp_shard 1/2)" in text
    assert "strict=False" in text
    assert [0.0, 0.0] == state["w"].tolist()
    planner = LayoutAwareLoadPlanner(model, grid=DP2, strict=False)
    memory.load(checkpoint, [state], [planner])
    assert ([1.0, 1.0], [0.0, 0.0], 3) == (state["w"].tolist(), state["v"].tolist(), state["n"])
    assert ["v", "n"] == planner.report.missing


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_that_finds_nothing(strict):
    checkpoint = memory.stored(**{"model.w": ((2,), [((0,), torch.ones(2))])})
    planner = LayoutAwareLoadPlanner({"w": (2,)}, strict=strict)
    with pytest.raises(
        CheckpointError, match=r"none of the 1 requested keys .* first is w .*model\.w"
    ):
        memory.load(checkpoint, [{"w": torch.zeros(2)}], [planner])


def test_holes_and_overlaps_of_saved_chunks():
    """A checkpoint that lacks part of a requested box; more than eight faults are counted."""
    ones = torch.ones(2, 2)
    checkpoint = memory.stored(w=((4, 4), [((0, 0), ones), ((0, 2), ones), ((2, 0), ones)]))
    planner = LayoutAwareLoadPlanner({"w": (4, 4)})
    text = r"w: \[2, 4\), \[2, 4\) not covered by the checkpoint \(one rank\)"
    with pytest.raises(CheckpointError, match=text):
        memory.load(checkpoint, [{"w": torch.zeros(4, 4)}], [planner])
    half = {f"w{i}": ((2,), [((0,), torch.ones(1))]) for i in range(11)}
    planner = LayoutAwareLoadPlanner({f"w{i}": (2,) for i in range(11)})
    with pytest.raises(CheckpointError) as caught:
        memory.load(
            memory.stored(**half), [{f"w{i}": torch.zeros(2) for i in range(11)}], [planner]
        )
    text = str(caught.value)
    assert text.startswith("11 problems:\n") and text.endswith("… and 3 more")
    assert "w7: [1, 2) not covered" in text and "w8" not in text


def test_a_part_that_the_rank_does_not_need_may_be_missing():
    """Coverage is asked of the requested box, not of the whole tensor."""
    checkpoint = memory.stored(w=((8,), [((0,), torch.ones(4))]))
    layouts = [FSDPFlatBuffer({"w": ((0, 4), (4, 8))})]
    state = {"w": torch.zeros(4)}
    grid = Grids.from_sizes(0, dp_shard=2)
    memory.load(
        checkpoint, [state], [LayoutAwareLoadPlanner({"w": (8,)}, grid=grid, layouts=layouts)]
    )
    assert [1.0] * 4 == state["w"].tolist()
    planner = LayoutAwareLoadPlanner({"w": (8,)}, grid=DP2, layouts=layouts)
    with pytest.raises(CheckpointError, match=r"w: \[4, 8\) not covered .* \(dp_shard 1/2\)"):
        memory.load(checkpoint, [state], [planner])


def test_the_wrong_kind_of_value():
    saved = {"w": 3, "v": torch.ones(2)}
    checkpoint = memory.save([saved], [LayoutAwareSavePlanner()])
    with pytest.raises(CheckpointError, match=r"w: the checkpoint holds a Python value, .*\(2,\)"):
        memory.load(
            checkpoint, [{"w": torch.zeros(2), "v": torch.ones(2)}], [LayoutAwareLoadPlanner()]
        )
    with pytest.raises(
        CheckpointError, match=r"v: the checkpoint holds a tensor of shape \(2,\), .*str"
    ):
        memory.load(checkpoint, [{"w": 1, "v": "text"}], [LayoutAwareLoadPlanner()])


def test_values_that_can_not_be_stored():
    planner = LayoutAwareSavePlanner()
    with pytest.raises(CheckpointError, match=r"opt\.f"):
        memory.save([{"opt": {"f": lambda: 0}}], [planner])


def test_no_metadata():
    planner = LayoutAwareLoadPlanner({"w": (2,)})
    with pytest.raises(CheckpointError, match="is this a checkpoint"):
        planner.set_up_planner({"w": torch.zeros(2)}, None)


def test_stock_reads_what_the_planner_wrote():
    """The errors above are not the price of another format: stock opens it."""
    checkpoint = memory.save(
        [{"w": torch.ones(2), "n": [1]}], [LayoutAwareSavePlanner({"w": (2,)})]
    )
    state = {"w": torch.zeros(2), "n": [0]}
    memory.load(checkpoint, [state], [DefaultLoadPlanner()])
    assert ([1.0, 1.0], [1]) == (state["w"].tolist(), state["n"])
