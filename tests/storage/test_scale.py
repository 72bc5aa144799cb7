"""What a checkpoint of 20,000 parameters says of itself, whatever the number of ranks: no process group."""

import json

import pytest
import torch

from shardplan.layouts import (
    BufferDescription,
    CheckpointError,
    Cut,
    DTensorStorage,
    FlatBuffer,
    FSDPFlatBuffer,
    Grids,
    Layout,
    Shard,
)
from shardplan.layouts.layout import evaluate
from shardplan.planner.planning import manifest as planning
from shardplan.planner.planning.manifest import (
    SHARD,
    ChunkLists,
    Kind,
    Members,
    StageManifest,
)
from shardplan.planner.planning.metadata import checkpoint_metadata
from shardplan.planner.planning.ownership import Ownership
from shardplan.planner.planning.table import build_table
from shardplan.planner.state.entries import Place
from shardplan.planner.storage.format.commit import Commit
from shardplan.planner.storage.format.manifest import manifest_from_json
from shardplan.planner.storage.reading.keys import StageKeys

PARAMETERS = 20_000
LAYER = {
    "input_layernorm.weight": (1024,),
    "mlp.linear_fc1.weight": (8192, 1024),
    "mlp.linear_fc2.weight": (1024, 4096),
    "self_attention.linear_proj.weight": (1024, 1024),
    "self_attention.linear_qkv.weight": (3072, 1024),
}
SHAPES = {
    f"decoder.layers.{i}.{name}": shape
    for i in range(PARAMETERS // len(LAYER))
    for name, shape in LAYER.items()
}
SAVE = "0123456789abcdef"


def manifest(ranks, form):
    storage = DTensorStorage({"*": (Cut(0, "dp_shard"),)})
    if form == "flat":
        storage = FSDPFlatBuffer(buffers=[BufferDescription(SHAPES, ranks, 64)])
    grid = Grids.from_sizes(0, dp_shard=ranks)
    chunks = build_table(SHAPES, grid=grid, layouts=[storage]).chunks
    everything = Members((1 << PARAMETERS) - 1)
    places = [Place(("model",), "", "", ())]
    places += [Place(("optimizer", "state"), "", "", (s,)) for s in ("exp_avg", "exp_avg_sq")]
    kinds = [Kind(0, place, SHARD, torch.float32) for place in places]
    return StageManifest(chunks, dict.fromkeys(kinds, everything))


@pytest.mark.parametrize("form", ["even", "flat"])
def test_size_does_not_grow_with_the_ranks(form):
    sizes = {}
    for ranks in (8, 4096):
        made = manifest(ranks, form)
        raw = Commit(SAVE, ranks, (made,), ("d",)).encode()
        sizes[ranks] = len(raw)
        back, _ = manifest_from_json(json.loads(raw)["stages"][0], ranks)
        assert back.chunks[0].layouts == made.chunks[0].layouts
        assert back.groups == made.groups
    assert sizes[8] < 2_000_000
    assert abs(sizes[8] - sizes[4096]) < 20_000


@pytest.mark.parametrize("form", ["even", "flat"])
def test_chunks_are_computed_once_for_layouts_that_cut_tensors_alike(form, monkeypatch):
    made = manifest(8, form)
    evaluated = []
    monkeypatch.setattr(
        planning, "evaluate", lambda *args: evaluated.append(args) or evaluate(*args)
    )
    stored = checkpoint_metadata([made]).state_dict_metadata
    assert len(stored) == 3 * PARAMETERS
    # 20,000 parameters of 4 shapes; a flat buffer of 8 slices cuts at most 7 of them.
    assert len(evaluated) <= (7 * 2 + 5 if form == "flat" else 5 * 8)


def test_a_flat_buffer_shared_with_another_stage_is_cut_where_each_rank_is():
    """The rows of a tensor that the buffer's own axis cuts once more depend on the rank."""
    grid = Grids.from_sizes(0, dp_shard=2)
    layouts = {
        name: Layout(name, name, (FlatBuffer((2,), ("dp_shard",), at, 4), Shard(0, "dp_shard")))
        for name, at in (("first", 0), ("second", 4))
    }
    lists = planning.ChunkLists(grid.dense)
    with pytest.raises(CheckpointError, match=r"first: \[2, 4\) is covered by no rank"):
        lists.of(layouts["first"], 4)
    with pytest.raises(CheckpointError, match=r"second: \[0, 2\) is covered by no rank"):
        lists.of(layouts["second"], 4)


@pytest.mark.parametrize("form", ["even", "flat"])
def test_a_few_keys_need_few_chunk_lists(form, monkeypatch):
    keys = StageKeys(manifest(4096, form), Ownership.current())
    name = "decoder.layers.7.mlp.linear_fc1.weight"
    lists = []
    real = ChunkLists._make
    monkeypatch.setattr(ChunkLists, "_make", lambda *a: (lists.append(a[1].fqn), real(*a))[1])
    for place in (f"model.{name}", f"optimizer.state.{name}.exp_avg"):
        assert (8192, 1024) == tuple(keys.stored(keys.find(place)).size)
    assert [name] == lists
    assert keys.find(f"model.{name}.other") is None
