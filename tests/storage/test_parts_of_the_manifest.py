"""A rank opens the manifest parts and the data files that have a key which it asks for, and no other."""

import json
import math
import pickle
from collections import Counter

import alone
import pytest
import torch
from test_damage import rewrite_commit
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from shardplan.layouts import Cut, DTensorStorage, Grids, MLADownProjection
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
)
from shardplan.planner.planning.manifest import ChunkLists
from shardplan.planner.save import checkpoint_metadata
from shardplan.planner.storage.format.commit import read_commit
from shardplan.planner.storage.format.index import KeyIndex
from shardplan.planner.storage.places.files import LocalFiles, files_at
from shardplan.planner.storage.reading.parts import read_stages

STAGES, SHARDS, LAYERS = 3, 2, 6
RULES = [DTensorStorage({"*": (Cut(0, "dp_shard"),)})]
SLOTS = ("exp_avg", "exp_avg_sq")


def names(stages):
    each = LAYERS // STAGES
    return [f"layers.{i}.w" for s in stages for i in range(s * each, (s + 1) * each)]


def value(name, slot=""):
    seed = sum(map(ord, name + slot))
    return torch.arange(32, dtype=torch.float32).view(8, 4) + seed


def state(stages, blank=False, shard=None):
    def local(name, slot=""):
        whole = value(name, slot) if not blank else torch.zeros(8, 4)
        return whole if shard is None else whole.chunk(SHARDS)[shard].clone()

    own = names(stages)
    return {
        "model": {name: local(name) for name in own},
        "optimizer": {
            "state": {
                name: {
                    **{s: local(name, s) for s in SLOTS},
                    "step": torch.tensor(0.0 if blank else 7.0),
                }
                for name in own
            },
            "param_groups": [{"params": own, "lr": 0.0 if blank else 0.5, "betas": (0.9, 0.99)}],
        },
        "iteration": 0 if blank else 11,
        **{f"only_{s}": -1 if blank else s for s in stages},
    }


def planner(kind, stages, rank=0, **sizes):
    shapes = {name: (8, 4) for name in names(stages)}
    if "dp_shard" in sizes:
        shapes = {name: (4, 4) for name in shapes}
    grid = Grids.from_sizes(rank, **sizes)
    return kind({name: (8, 4) for name in shapes}, grid=grid, layouts=RULES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("pp")
    states, planners = [], []
    for rank in range(STAGES * SHARDS):
        stage, shard = divmod(rank, SHARDS)
        states.append(state([stage], shard=shard))
        sizes = {"pp": STAGES, "dp_shard": SHARDS}
        planners.append(planner(LayoutAwareSavePlanner, [stage], rank, **sizes))
    alone.saved(path, states, planners)
    return path


@pytest.fixture
def opened(monkeypatch):
    """Returns the names of the files that are opened."""
    found = []
    for name in ("read", "open"):
        real = getattr(LocalFiles, name)

        def call(self, file, real=real):
            found.append(file.rpartition("/")[2])
            return real(self, file)

        monkeypatch.setattr(LocalFiles, name, call)
    return found


def load(path, stages, rank=0, **sizes):
    own = state(stages, blank=True, shard=rank % SHARDS if sizes else None)
    loader = planner(LayoutAwareLoadPlanner, stages, rank, **sizes)
    (reader,) = alone.load(path, [own], [loader])
    expected = state(stages, shard=rank % SHARDS if sizes else None)
    for name in names(stages):
        assert torch.equal(expected["model"][name], own["model"][name])
        for slot in (*SLOTS, "step"):
            found = own["optimizer"]["state"][name][slot]
            assert torch.equal(expected["optimizer"]["state"][name][slot], found)
    assert 0.5 == own["optimizer"]["param_groups"][0]["lr"]
    assert 11 == own["iteration"]
    assert list(stages) == [own[f"only_{s}"] for s in stages]
    return reader, loader


def parts(opened):
    return sorted(name for name in opened if name.startswith("stage-"))


@pytest.mark.parametrize("stage", range(STAGES))
def test_each_rank_opens_its_stage(saved, opened, stage):
    for shard in range(SHARDS):
        opened.clear()
        rank = stage * SHARDS + shard
        reader, _ = load(saved, [stage], rank, pp=STAGES, dp_shard=SHARDS)
        # The iteration is one value for all, and the first stage's word counts.
        needed = sorted({0, stage})
        assert [f"stage-{s:05d}.json" for s in needed] == parts(opened)
        places = {s * SHARDS + r for s in needed for r in range(SHARDS)}
        files = {name for name in opened if name.endswith(".safetensors")}
        assert files <= {f"{p:05d}-of-{STAGES * SHARDS:05d}.safetensors" for p in places}
        assert len(needed) == reader.stats.parts
        assert max(Counter(opened).values()) == 1, "no file is opened twice"


def test_all_stages_in_one_process(saved, opened):
    load(saved, range(STAGES))
    assert STAGES == len(parts(opened))


def test_one_tensor_opens_one_part_and_makes_one_chunk_list(saved, opened, monkeypatch):
    made = []
    real = ChunkLists.of
    monkeypatch.setattr(
        ChunkLists,
        "of",
        lambda self, layout, *a: (made.append(layout.fqn), real(self, layout, *a))[1],
    )
    name = names([2])[0]
    own = {"model": {name: torch.zeros(8, 4)}}
    loader = LayoutAwareLoadPlanner({name: (8, 4)}, grid=Grids.from_sizes(0), layouts=[])
    alone.load(saved, [own], [loader])
    assert torch.equal(value(name), own["model"][name])
    assert ["stage-00002.json"] == parts(opened)
    assert [name] == made


def test_wrapped_names_and_keys_that_are_nowhere_open_no_more(saved, opened):
    name = names([1])[0]
    own = {"model": {f"module.{name}": torch.zeros(8, 4), "nowhere": torch.ones(2)}}
    loader = LayoutAwareLoadPlanner({name: (8, 4)}, grid=Grids.from_sizes(0), strict=False)
    alone.load(saved, [own], [loader])
    assert torch.equal(value(name), own["model"][f"module.{name}"])
    assert ["model.nowhere"] == loader.report.missing
    assert ["stage-00001.json"] == parts(opened)


def test_report_of_what_is_left_reads_the_rest_when_it_is_asked_for(saved, opened):
    _, loader = load(saved, [0])
    assert ["stage-00000.json"] == parts(opened)
    text = str(pickle.loads(pickle.dumps(loader.report)))
    assert STAGES == len(parts(opened))
    left = loader.report.unexpected
    assert {f"model.{n}" for n in names([1, 2])} <= set(left)
    assert not any(key.startswith(f"model.{n}") for key in left for n in names([0]))
    assert f"{len(left)} unexpected" in text


def test_leftovers_of_a_checkpoint_that_is_gone(saved, tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    for file in saved.rglob("*"):
        if file.is_file():
            (path / file.relative_to(saved)).parent.mkdir(exist_ok=True)
            (path / file.relative_to(saved)).write_bytes(file.read_bytes())
    _, loader = load(path, [0])
    (part,) = path.glob("*/stage-00001.json")
    raw = part.read_bytes()
    part.unlink()
    assert "unexpected not known" in str(loader.report)
    with pytest.raises(CheckpointError, match=r"stage-00001.json: missing"):
        loader.report.unexpected  # noqa: B018
    load(path, [0])  # needs no part of another stage
    with pytest.raises(CheckpointError, match=r"stage-00001.json: missing"):
        load(path, [1])
    part.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=r"stage-00001.json: no JSON"):
        load(path, [1])


def test_keys_and_stored_forms_are_those_of_the_whole_manifest(saved):
    files = files_at(saved)
    whole = checkpoint_metadata(read_stages(files, read_commit(files))[0])
    lazy = SafetensorsReader(saved).read_metadata()
    assert list(whole.state_dict_metadata) == list(lazy.state_dict_metadata)
    assert len(whole.state_dict_metadata) == len(lazy.state_dict_metadata)
    for key, stored in whole.state_dict_metadata.items():
        assert key in lazy.state_dict_metadata and stored == lazy.state_dict_metadata[key]
        assert whole.planner_data[key] == lazy.planner_data[key]
    fresh = SafetensorsReader(saved).read_metadata().state_dict_metadata
    for key in reversed(list(whole.state_dict_metadata)):
        assert whole.state_dict_metadata[key] == fresh[key]
    assert "model.nowhere" not in fresh and fresh.get("model") is None and 5 not in fresh


def test_projections_that_are_fused_keep_a_step_each(tmp_path):
    """The reader looked for their steps under the name of neither: no such checkpoint loaded."""
    name, head = "attention.linear_qkv_down_proj.weight", "optimizer.state.attention."
    steps = {f"{head}linear_{part}_down_proj.weight.step" for part in ("q", "kv")}

    def fused(kind):
        rows = MLADownProjection({"*": (24, 12)})
        return kind({name: (36, 8)}, grid=Grids.from_sizes(0), layouts=[rows])

    def own(step):
        slots = {"step": torch.tensor(step), "exp_avg": torch.full((36, 8), step)}
        return {"model": {name: torch.full((36, 8), step)}, "optimizer": {"state": {name: slots}}}

    alone.saved(tmp_path, [own(3.0)], [fused(LayoutAwareSavePlanner)])
    assert steps <= set(SafetensorsReader(tmp_path).read_metadata().state_dict_metadata)
    found = own(0.0)
    alone.load(tmp_path, [found], [fused(LayoutAwareLoadPlanner)])
    assert 3.0 == found["optimizer"]["state"][name]["step"]


def test_stock_planner_loads_all_of_it(saved):
    own = {f"model.{n}": torch.zeros(8, 4) for n in names(range(STAGES))}
    dcp_load(own, storage_reader=SafetensorsReader(saved), no_dist=True)
    assert all(torch.equal(value(n), own[f"model.{n}"]) for n in names(range(STAGES)))


def test_index_finds_every_key_and_little_else():
    stages = [
        [f"decoder.layers.{i}.{n}.weight" for i in range(s * 250, s * 250 + 250) for n in "abcd"]
        for s in range(8)
    ]
    arounds = [("model.", ""), ("optimizer.state.", ".exp_avg"), ("a.module.", "")]
    index = KeyIndex.of(
        arounds, [[*own, "iteration"] if not s else own for s, own in enumerate(stages)]
    )
    assert KeyIndex.from_json(json.loads(json.dumps(index.to_json())), 8) == index
    for before, after in arounds:
        for number, own in enumerate(stages):
            for name in own:
                assert number in index.stages(before + name + after)
    assert [0] == index.stages("iteration")
    assert [3] == index.stages(f"a.{stages[3][7]}"), "wrappers' tokens do not count"
    wrong = sum(len(index.stages(f"model.other.{i}")) for i in range(20_000))
    assert wrong <= 4, "1,000 names of 2 ** 32: once in 540,000 questions to eight stages"
    assert 4 * 8_001 == sum(map(len, index.names))


def spoilt(change):
    def commit(data):
        change(data["index"])

    return commit


WRONG = {
    "other stages": lambda i: i["names"].pop(),
    "no base64": lambda i: i["names"].__setitem__(0, "%"),
    "half a number": lambda i: i["names"].__setitem__(0, "AAAA"),
    "not ascending": lambda i: i["names"].__setitem__(0, "AQAAAAAAAAA="),
    "twice": lambda i: i["names"].__setitem__(0, "AQAAAAEAAAA="),
    "around no text": lambda i: i["around"].append([1, 2]),
    "around of one": lambda i: i["around"].append(["a"]),
    "no names": lambda i: i.pop("names"),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_index_is_refused(saved, name):
    raw = (saved / "checkpoint.json").read_bytes()
    try:
        rewrite_commit(saved, spoilt(WRONG[name]))
        with pytest.raises(CheckpointError, match=r"checkpoint.json: impossible contents"):
            SafetensorsReader(saved).read_metadata()
    finally:
        (saved / "checkpoint.json").write_bytes(raw)


def test_single_stage_needs_no_index(tmp_path):
    one = planner(LayoutAwareSavePlanner, [0])
    alone.saved(tmp_path, [state([0])], [one])
    assert json.loads((tmp_path / "checkpoint.json").read_bytes())["index"] is None
    assert math.isclose(1, load(tmp_path, [0])[0].stats.parts)
