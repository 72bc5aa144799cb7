"""A rank reads one manifest, makes the chunk lists that it needs, and opens the files it needs."""

import pickle
from collections import Counter

import alone
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from shardplan.layouts import Cut, DTensorStorage, Grids, MLADownProjection
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
)
from shardplan.planner.planning.manifest import ChunkLists
from shardplan.planner.planning.metadata import checkpoint_metadata
from shardplan.planner.storage.format.commit import read_commit
from shardplan.planner.storage.places.files import LocalFiles, files_at

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


@pytest.mark.parametrize("stage", range(STAGES))
def test_each_rank_opens_files_of_its_stage(saved, opened, stage):
    for shard in range(SHARDS):
        opened.clear()
        rank = stage * SHARDS + shard
        load(saved, [stage], rank, pp=STAGES, dp_shard=SHARDS)
        # The iteration is one value for all, and the first stage's first rank wrote it.
        needed = sorted({0, stage})
        places = {s * SHARDS + r for s in needed for r in range(SHARDS)}
        files = {name for name in opened if name.endswith(".safetensors")}
        assert files <= {f"{p:05d}-of-{STAGES * SHARDS:05d}.safetensors" for p in places}
        assert 1 == opened.count("checkpoint.json")
        assert max(Counter(opened).values()) == 1, "no file is opened twice"


def test_one_tensor_makes_one_chunk_list(saved, monkeypatch):
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
    assert [name] == made


def test_wrapped_names_are_found_and_keys_that_are_nowhere_reported(saved):
    name = names([1])[0]
    own = {"model": {f"module.{name}": torch.zeros(8, 4), "nowhere": torch.ones(2)}}
    loader = LayoutAwareLoadPlanner({name: (8, 4)}, grid=Grids.from_sizes(0), strict=False)
    alone.load(saved, [own], [loader])
    assert torch.equal(value(name), own["model"][f"module.{name}"])
    assert ["model.nowhere"] == loader.report.missing


def test_report_names_what_is_left(saved):
    _, loader = load(saved, [0])
    text = str(pickle.loads(pickle.dumps(loader.report)))
    left = loader.report.unexpected
    assert {f"model.{n}" for n in names([1, 2])} <= set(left)
    assert not any(key.startswith(f"model.{n}") for key in left for n in names([0]))
    assert f"{len(left)} unexpected" in text


def test_keys_and_stored_forms_are_those_of_the_whole_manifest(saved):
    files = files_at(saved)
    whole = checkpoint_metadata(read_commit(files).stages)
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
