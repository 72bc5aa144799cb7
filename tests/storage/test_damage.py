"""Damaged and hostile checkpoints: each a named error, nothing loaded, nothing run, little memory."""

import copy
import json
import pickle
import resource
import shutil
import sys
import tracemalloc

import alone
import pytest
import test_failures as small
import torch

from shardplan.layouts import Cut, DTensorStorage, Grids
from shardplan.planner import CheckpointError, LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.storage import SafetensorsReader
from shardplan.planner.storage.format.commit import CHECKPOINT
from shardplan.planner.storage.format.header import parse_header
from shardplan.planner.storage.format.sums import block_sum


@pytest.fixture
def saved(tmp_path):
    """Returns a checkpoint of two ranks and the folder of its files."""
    path = tmp_path / "checkpoint"
    states = [small.state(rank, 2, lr=0.5) for rank in (1, 1)]
    assert small.save(path, 1, states=states) == [None, None]
    (folder,) = [p for p in path.iterdir() if p.is_dir()]
    return path, folder


def load(path, ranks=1, **options):
    states = [small.state(-1, ranks, lr=0.0) for _ in range(ranks)]
    planners = [small.planner(LayoutAwareLoadPlanner, rank, ranks) for rank in range(ranks)]
    alone.load(path, states, planners, **options)
    return states


def data_file(folder, place=1):
    return folder / f"0000{place}-of-00002.safetensors"


def rewrite_commit(path, change):
    """Changes checkpoint.json and makes its checksum fit."""
    data = json.loads((path / CHECKPOINT).read_bytes())
    change(data)
    data.pop("sum", None)
    text = json.dumps(data).encode()[:-1]
    raw = text + b',"sum":"' + block_sum(text).hex().encode() + b'"}'
    (path / CHECKPOINT).write_bytes(raw)


def test_whole_checkpoint_loads(saved):
    (state,) = load(saved[0])
    assert torch.equal(torch.ones(8, 4), state["model"]["w"]) and state["lr"] == 0.5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_flipped_data_byte_is_found(saved, ranks):
    path, folder = saved
    file = data_file(folder)
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for position in (start, start + 1, len(raw) - 1):
        file.write_bytes(raw[:position] + bytes([raw[position] ^ 4]) + raw[position + 1 :])
        with pytest.raises(CheckpointError) as caught:
            load(path, ranks)
        text = str(caught.value)
        assert "00001-of-00002.safetensors" in text and "rank 1" in text
        assert "model." in text and "checksum does not match" in text
    load(path, ranks, verify=False)


def test_truncated_file_is_found(saved):
    path, folder = saved
    file = data_file(folder)
    raw = file.read_bytes()
    for length in (0, 5, 100, len(raw) - 1):
        file.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors.*truncated"):
            load(path)


def test_missing_file_is_named(saved):
    path, folder = saved
    data_file(folder).rename(folder / "away")
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: missing"):
        load(path)


def test_file_of_another_save_is_refused(saved, tmp_path):
    path, folder = saved
    other = tmp_path / "other"
    assert small.save(other, 2) == [None, None]
    (theirs,) = [p for p in other.iterdir() if p.is_dir()]
    shutil.copy(data_file(theirs), data_file(folder))
    with pytest.raises(CheckpointError, match=f"belongs to save {theirs.name} and place 1"):
        load(path)
    shutil.copy(data_file(folder, 0), data_file(folder))
    with pytest.raises(CheckpointError, match=r"belongs to save .* and place 0"):
        load(path)


def test_flipped_manifest_bytes_are_found(saved):
    path, _ = saved
    file = path / CHECKPOINT
    raw = file.read_bytes()
    for position in range(0, len(raw), 7):
        file.write_bytes(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :])
        with pytest.raises(CheckpointError):
            load(path)
    file.write_bytes(raw)
    load(path)


def test_newer_versions_are_refused_by_name(saved):
    path, _ = saved
    raw = (path / CHECKPOINT).read_bytes()
    rewrite_commit(path, lambda data: data.update(version=3))
    with pytest.raises(
        CheckpointError, match=r"checkpoint.json: written in version 3 .* version 2"
    ):
        load(path)
    (path / CHECKPOINT).write_bytes(raw)
    rewrite_commit(path, lambda data: data["ownership"].update(version=3))
    with pytest.raises(CheckpointError, match=r"version 3 of the rules, .* knows version 2"):
        load(path)


def test_checksums_of_another_kind_are_not_called_damage(saved):
    path, folder = saved
    file = data_file(folder)
    raw = file.read_bytes()
    for old, new in (("xxh3_64", "crc32c_"), ("262144", "131072")):
        assert old.encode() in raw
        file.write_bytes(raw.replace(old.encode(), new.encode()))
        with pytest.raises(CheckpointError, match=rf"checksums are .*{new}.* this version"):
            load(path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_pickle_in_place_of_a_manifest_is_not_run(saved):
    path, folder = saved
    for file in (path / CHECKPOINT, data_file(folder)):
        raw = file.read_bytes()
        file.write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            load(path)
        file.write_bytes(raw)


@pytest.mark.parametrize("save", ["../../../etc", "..", "/tmp/x", "0123456789ABCDEF", "", 5, None])
def test_save_id_never_becomes_another_path(saved, save):
    path, _ = saved
    rewrite_commit(path, lambda data: data.update(save=save))
    with pytest.raises(CheckpointError, match="impossible contents"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(ranks=1 << 40),
        lambda d: d.update(ranks=-1),
        lambda d: d.update(ranks="2"),
        lambda d: d.update(stages=[]),
        lambda d: d["ownership"].pop("even"),
        lambda d: d["ownership"].update(smallest_split="64"),
        lambda d: d["extras"][0].__setitem__(4, 2),
        lambda d: d["extras"][0].__setitem__(4, None),
        lambda d: d["extras"].append(["x"]),
        lambda d: d.update(places=[[[0, 0], None]]),
        lambda d: d.update(numbers=[0]),
    ],
)
def test_impossible_commit_is_refused(saved, change):
    path, _ = saved
    rewrite_commit(path, change)
    with pytest.raises(CheckpointError):
        load(path)


def deep(depth):
    data = 1
    for _ in range(depth):
        data = [data]
    return data


MANIFESTS = [
    ("negative size", lambda d: d["stages"].append(["Whole", {"shape": [-1]}])),
    ("overflow", lambda d: d["stages"].append(["Whole", {"shape": [1 << 70]}])),
    ("fraction", lambda d: d["stages"].append(["Whole", {"shape": [1.5]}])),
    ("unknown stage", lambda d: d["stages"].append(["System", {"shape": [1]}])),
    ("nested", lambda d: d["stages"].append(deep(40))),
    ("world", lambda d: d["chunks"][0].update(dense=[["dp_shard"], [1 << 40], 0])),
    ("chain", lambda d: d["chunks"][0]["layouts"].append(["x", 99])),
    ("bits", lambda d: d["groups"][0].__setitem__(5, "/////w==")),
    ("role", lambda d: d["groups"][0].__setitem__(2, "code")),
    ("dtype", lambda d: d["groups"][0].__setitem__(3, "system")),
    ("path", lambda d: d["groups"][0][1].__setitem__(0, [{"a": 1}])),
]


@pytest.mark.parametrize("change", [c for _, c in MANIFESTS], ids=[n for n, _ in MANIFESTS])
def test_impossible_manifest_is_refused(saved, change):
    path, _ = saved
    rewrite_commit(path, lambda data: change(data["stages"][0]))
    with pytest.raises(CheckpointError, match=r"checkpoint.json: impossible contents"):
        load(path)


def header(entries, length=None):
    text = json.dumps(entries).encode()
    return text, (len(text) if length is None else length).to_bytes(8, "little") + text


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def changed(**fields):
    entries = copy.deepcopy(GOOD)
    entries["a"].update(fields)
    return entries


HEADERS = {
    "overlap": GOOD | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
    "hole": GOOD | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}},
    "negative": changed(data_offsets=[-8, 0]),
    "backward": changed(data_offsets=[8, 0]),
    "overflow": changed(shape=[1 << 62, 1 << 62]),
    "negative shape": changed(shape=[-2]),
    "bool shape": changed(shape=[True, 2]),
    "size": changed(shape=[3]),
    "dtype": changed(dtype="F31"),
    "no list": changed(shape=2),
    "text": changed(data_offsets="ab"),
    "no entry": {"a": 5},
}


@pytest.mark.parametrize("name", HEADERS)
def test_impossible_header_is_refused(name):
    text, _ = header(HEADERS[name])
    with pytest.raises(CheckpointError):
        parse_header("file", text, 8 + len(text) + 8)


def test_header_of_plain_safetensors_is_read():
    text, _ = header(GOOD)
    assert parse_header("file", text, 8 + len(text) + 8).entries["a"].shape == (2,)


@pytest.mark.parametrize("length", [1 << 63, 1 << 40, 100_000_001, 10_000])
def test_long_header_takes_no_memory(saved, length):
    path, folder = saved
    data_file(folder).write_bytes(header(GOOD, length)[1])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="header should be"):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_names_with_dots_stay_names(tmp_path):
    path = tmp_path / "checkpoint"
    name = "../../outside"
    grid = Grids.from_sizes(0)
    value = {"model": {name: torch.arange(4.0)}}
    own = LayoutAwareSavePlanner({name: (4,)}, grid=grid)
    alone.saved(path, [value], [own])
    assert [path] == list(tmp_path.iterdir())
    blank = {"model": {name: torch.zeros(4)}}
    alone.load(path, [blank], [LayoutAwareLoadPlanner({name: (4,)}, grid=grid)])
    assert torch.equal(torch.arange(4.0), blank["model"][name])


def test_full_disk_is_an_error_and_leaves_the_old_one(tmp_path):
    shapes = {"w": (1 << 18,)}
    rules = [DTensorStorage({"w": (Cut(0, "dp_shard"),)})]

    def planners(kind, ranks):
        grids = [Grids.from_sizes(rank, dp_shard=ranks) for rank in range(ranks)]
        return [kind(shapes, grid=grid, layouts=rules) for grid in grids]

    states = [{"model": {"w": torch.full((1 << 17,), 1.0)}} for _ in range(2)]
    alone.saved(tmp_path, states, planners(LayoutAwareSavePlanner, 2))
    for state in states:
        state["model"]["w"].fill_(2.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        errors = alone.save(tmp_path, states, planners(LayoutAwareSavePlanner, 2), overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert all(isinstance(error, OSError | CheckpointError) for error in errors)
    assert any(isinstance(error, OSError) and ".safetensors" in str(error) for error in errors)
    blank = {"model": {"w": torch.zeros(1 << 18)}}
    alone.load(tmp_path, [blank], planners(LayoutAwareLoadPlanner, 1))
    assert torch.equal(torch.ones(1 << 18), blank["model"]["w"])
    assert [] == list(tmp_path.glob(".*.tmp"))


def test_place_that_takes_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    errors = small.save(tmp_path / "file" / "checkpoint", 1)
    assert all(isinstance(error, OSError) and "checkpoint" in str(error) for error in errors)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_read_only_folder_is_an_error():
    errors = small.save("/proc/self/checkpoint", 1)  # read-only for root too
    assert all(isinstance(e, OSError) and "/proc/self/checkpoint" in str(e) for e in errors)


def test_reader_of_nothing_says_so(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint: there is no checkpoint.json"
    ):
        len(SafetensorsReader(tmp_path / "nowhere").read_metadata().state_dict_metadata)
