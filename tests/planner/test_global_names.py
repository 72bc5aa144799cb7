"""Cases from practice: experts, pipeline stages and vocabularies under their global names."""

from types import SimpleNamespace

import memory
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from shardplan.layouts import (
    ExpertGrid,
    Grids,
    PipelineLayers,
    SwiGLU,
    TensorParallel,
    VocabularyPadding,
)
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
    RanksDisagreeError,
)


class Group:
    """What is asked of a process group."""

    def __init__(self, rank, size):
        self._place = rank, size

    def rank(self):
        return self._place[0]

    def size(self):
        return self._place[1]


def keys(planner, state):
    return [key for key, _, _ in memory.boxes(planner, state)]


def test_key_renaming_with_the_old_names_in_the_checkpoint(tmp_path):
    """Key-renaming load planner is silently undone by the v2.3 compatibility path."""
    saved = {f"layers.0.experts.{i}.weight": torch.full((2, 2), float(i)) for i in range(4)}
    dcp.save(saved, checkpoint_id=tmp_path)
    for nested in (False, True):
        names = ["layers.0.experts.0.weight", "layers.0.experts.1.weight"]
        state = {name: torch.full((2, 2), -1.0) for name in names}
        planner = LayoutAwareLoadPlanner(
            dict.fromkeys(names, (2, 2)), grid=Grids.from_sizes(1, dp_shard=2, ep=2)
        )
        if nested:  # a checkpoint with a section, and one more key than this rank has
            dcp.save({"model": saved, "other": torch.zeros(1)}, checkpoint_id=tmp_path / "nested")
            dcp.load({"model": state}, checkpoint_id=tmp_path / "nested", planner=planner)
        else:
            dcp.load(state, checkpoint_id=tmp_path, planner=planner)
        assert [2.0] * 4 == state[names[0]].flatten().tolist()
        assert [3.0] * 4 == state[names[1]].flatten().tolist()
        assert names == list(state)


def test_experts_by_the_models_own_grid():
    """Experts named by the global EP grid instead of the model's own."""
    shapes = {f"mlp.experts.local_experts.{i}.weight": (1,) for i in range(2)}
    state = dict.fromkeys(shapes, torch.zeros(1))

    def named(**options):
        planner = LayoutAwareSavePlanner(shapes, layouts=[ExpertGrid()], **options)
        return keys(planner, state)

    own = SimpleNamespace(ep=Group(3, 4), dp=Group(3, 4))  # the global grid has ep 2
    expected = [f"mlp.experts.local_experts.{i}.weight" for i in (6, 7)]
    assert expected == named(pg_collection=own)
    wide = SimpleNamespace(ep=Group(1, 2), dp=Group(3, 4))
    assert expected == named(pg_collection=wide, ep_rank=3, ep_size=4)
    off = SimpleNamespace(ep=None, dp=Group(0, 1))
    assert [f"mlp.experts.local_experts.{i}.weight" for i in (0, 1)] == named(pg_collection=off)
    unset = SimpleNamespace(dp=Group(0, 1))
    assert [f"mlp.experts.local_experts.{i}.weight" for i in (0, 1)] == named(pg_collection=unset)
    for half in ({"ep_rank": 3}, {"ep_size": 4}):
        for kind in (LayoutAwareSavePlanner, LayoutAwareLoadPlanner):
            with pytest.raises(ValueError, match="together"):
                kind(shapes, pg_collection=own, **half)


def expert_ranks(kind, layouts):
    """Two expert-parallel ranks with two experts each; rank r's expert i has the value 2r+i."""
    shapes = {"experts.0.w": (2,), "experts.1.w": (2,)}
    planners = [
        kind(
            shapes if layouts else None,
            grid=Grids.from_sizes(r, dp_shard=2, ep=2),
            layouts=layouts,
        )
        for r in range(2)
    ]
    states = [
        {f"experts.{i}.w": torch.full((2,), 2.0 * rank + i) for i in range(2)} for rank in range(2)
    ]
    return states, planners


def test_local_expert_names_collide():
    """Local expert names collide across EP ranks; one copy survives."""
    checkpoint = memory.save(*expert_ranks(LayoutAwareSavePlanner, [ExpertGrid()]))
    assert {(f"experts.{i}.w", (0,)) for i in range(4)} == set(checkpoint.data)
    assert [0, 1, 2, 3] == [int(checkpoint.tensor(f"experts.{i}.w")[0]) for i in range(4)]
    states, planners = expert_ranks(LayoutAwareSavePlanner, [])
    text = r"^experts\.0\.w: ranks 0 and 1 hold different values under this key"
    with pytest.raises(RanksDisagreeError, match=text):
        memory.save(states, planners)


def stages(kind, offsets, filler=None):
    """Two pipeline stages of two layers that count from 0; layer i has the value i."""
    shapes = {"layers.0.w": (2,), "layers.1.w": (2,)}
    layouts = [[] if o is None else [PipelineLayers(offset=o)] for o in offsets]
    planners = [
        kind(shapes, grid=Grids.from_sizes(rank, pp=2), layouts=layouts[rank]) for rank in range(2)
    ]
    states = [
        {
            f"layers.{i}.w": torch.full((2,), 2.0 * rank + i if filler is None else filler)
            for i in range(2)
        }
        for rank in range(2)
    ]
    return states, planners


def test_pipeline_stages_count_layers_from_0():
    """Pipeline stages use stage-local layer indices as global names."""
    checkpoint = memory.save(*stages(LayoutAwareSavePlanner, (0, 2)))
    assert [0, 1, 2, 3] == [int(checkpoint.tensor(f"layers.{i}.w")[0]) for i in range(4)]
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.w: both layers\.0\.w of pipeline stage 0"
    ):
        memory.save(*stages(LayoutAwareSavePlanner, (None, None)))
    states, planners = stages(LayoutAwareLoadPlanner, (0, 2), filler=-1.0)
    memory.load(checkpoint, states, planners)
    assert [[0, 1], [2, 3]] == [[int(s[f"layers.{i}.w"][0]) for i in range(2)] for s in states]
    whole = {f"layers.{i}.w": torch.zeros(2) for i in range(4)}
    memory.load(checkpoint, [whole], [DefaultLoadPlanner()])
    assert [0, 1, 2, 3] == [int(tensor[0]) for tensor in whole.values()]


def test_substring_rename():
    """Substring rename: weight1 also hits weight10; renames chain."""
    at = "decoder.layers.1.mlp.experts."
    shapes = {f"{at}linear_fc1.{kind}{i}": (1,) for kind in ("weight", "bias") for i in range(16)}
    shapes |= {"decoder.layers.1.mlp.linear_fc1.weight": (1,)}
    planner = LayoutAwareSavePlanner(
        shapes, grid=Grids.from_sizes(1, dp_shard=2, ep=2), layouts=[ExpertGrid()]
    )
    prefix = "chained_0.optimizer.state.exp_avg."
    for head in ("", prefix):
        state = {head + name: torch.zeros(shape) for name, shape in shapes.items()}
        names = [f"{at}linear_fc1.{kind}{i}" for kind in ("weight", "bias") for i in range(16, 32)]
        written = keys(planner, state)  # the dense weight may be its replica's turn
        assert set(names) == {key.removeprefix(head) for key in written if ".experts." in key}
    for local, expert in ((0, 16), (1, 17), (10, 26), (15, 31)):
        state = {f"{prefix}{at}linear_fc1.weight{local}": torch.zeros(1)}
        assert [f"{prefix}{at}linear_fc1.weight{expert}"] == keys(planner, state)
    leader = LayoutAwareSavePlanner(
        shapes, grid=Grids.from_sizes(0, dp_shard=2, ep=2), layouts=[ExpertGrid()]
    )
    untouched = {"decoder.layers.1.mlp.linear_fc1.weight": torch.zeros(1)}
    assert list(untouched) == keys(leader, untouched)


# Vocabulary ---------------------------------------------------------------------------------------

GARBAGE = 99.0


def embedding_ranks(kind, tp, true_size=10, fill=None, **options):
    """The vocabulary padded to 2 × tp, 2 wide; element (r, c) is 10 r + c, padding is garbage."""
    multiple = 2 * tp
    padded = -(-true_size // multiple) * multiple
    full = torch.full((padded, 2), GARBAGE)
    full[:true_size] = torch.arange(true_size).view(-1, 1) * 10.0 + torch.arange(2)
    planners = [
        kind(
            {"w": (padded // tp, 2)},
            grid=Grids.from_sizes(rank, tp=tp),
            layouts=[TensorParallel({"w": 0}), VocabularyPadding({"w": true_size})],
            **options,
        )
        for rank in range(tp)
    ]
    parts = [part.clone() for part in full.chunk(tp)]
    if fill is not None:
        parts = [torch.full_like(part, fill) for part in parts]
    return [{"w": part} for part in parts], planners


def stock_padded(tp):
    """What stock writes of the padded embedding: padding rows are in the checkpoint."""
    states, _ = embedding_ranks(LayoutAwareSavePlanner, tp)
    rows = states[0]["w"].shape[0]
    chunks = [((rank * rows, 0), state["w"]) for rank, state in enumerate(states)]
    return memory.stored(w=((rows * tp, 2), chunks))


@pytest.mark.parametrize("padding", ["zero", "keep"])
@pytest.mark.parametrize("writer", ["own", "stock"])
@pytest.mark.parametrize(("saved_tp", "tp"), [(2, 4), (4, 2), (2, 2), (4, 1), (1, 4)])
def test_vocabulary_padding_changes_with_tp(writer, saved_tp, tp, padding):
    """Vocabulary padding changes with TP: 12 rows at TP=2, 16 at TP=4, and down again."""
    if writer == "own":
        checkpoint = memory.save(*embedding_ranks(LayoutAwareSavePlanner, saved_tp))
        assert (10, 2) == tuple(checkpoint.tensor("w").shape)
    else:
        checkpoint = stock_padded(saved_tp)
    states, planners = embedding_ranks(LayoutAwareLoadPlanner, tp, fill=-1.0, padding=padding)
    memory.load(checkpoint, states, planners)
    rows = torch.cat([state["w"] for state in states])
    assert {1: 10, 2: 12, 4: 16}[tp] == len(rows)
    assert torch.equal(torch.arange(10).view(-1, 1) * 10.0 + torch.arange(2), rows[:10])
    filler = 0.0 if padding == "zero" else -1.0
    assert torch.equal(torch.full((len(rows) - 10, 2), filler), rows[10:])
    if tp == 4:
        assert [[80.0, 81.0], [90.0, 91.0]] == states[2]["w"][:2].tolist()
        assert [[], [], ["w"], ["w"]] == [planner.report.padded for planner in planners]


@pytest.mark.parametrize("size", [8, 9, 11, 12])
def test_vocabularies_of_other_sizes(size):
    """Vocabulary padding changes with TP: error if V differs."""
    checkpoint = memory.save(*embedding_ranks(LayoutAwareSavePlanner, 2, true_size=size))
    states, planners = embedding_ranks(LayoutAwareLoadPlanner, 2, fill=-1.0)
    with pytest.raises(
        CheckpointError, match=rf"w: the checkpoint has shape \({size}, 2\), .*\(10, 2\)"
    ):
        memory.load(checkpoint, states, planners)
    assert all(bool((state["w"] == -1).all()) for state in states)


def test_padded_checkpoint_without_the_true_size():
    """Vocabulary padding changes with TP: without the true size the error says what to pass."""
    planner = LayoutAwareLoadPlanner({"w": (16, 2)}, layouts=[])
    with pytest.raises(CheckpointError, match=r"w: .*\(12, 2\), .*\(16, 2\).*VocabularyPadding"):
        memory.load(stock_padded(2), [{"w": torch.zeros(16, 2)}], [planner])


def test_layouts_that_contradict_the_model():
    """Experts that do not divide, and halves that do not add up, are found when a planner is made."""
    with pytest.raises(LayoutError, match=r"experts\.0\.w: 6 experts can't be divided by 4"):
        LayoutAwareSavePlanner(
            {"experts.0.w": (1,)},
            grid=Grids.from_sizes(0, dp_shard=4, ep=4),
            layouts=[ExpertGrid(6)],
        )
    planner = LayoutAwareSavePlanner(
        {"w": (5, 2)}, grid=Grids.from_sizes(0), layouts=[SwiGLU(["w"], sizes=(2, 2))]
    )
    with pytest.raises(
        LayoutError, match=r"w: SwiGLU halves cover 4 rows of dim 0 .* tensor has 5"
    ):
        keys(planner, {"w": torch.zeros(5, 2)})
