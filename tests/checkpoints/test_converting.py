"""A converted checkpoint is the same checkpoint: its keys, its values of each rank, its bits."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import world
from cli.command import shardplan
from safetensors.torch import save_file

from shardplan.layouts import CheckpointError, Grids, UnstorableValueError
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    PerRank,
    SafetensorsReader,
    SafetensorsWriter,
)
from shardplan.planner.checkpoints.converting import convert
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.checkpoints.own_writing import write_own
from shardplan.planner.checkpoints.streams import Source, write_safetensors
from shardplan.planner.checkpoints.torch_archive import write_archive

RANKS = 3
STORAGE = {
    "dcp": (
        lambda path: dcp.FileSystemWriter(path, sync_files=False),
        dcp.FileSystemReader,
    ),
    "shardplan": (lambda path: SafetensorsWriter(path, sync=False), SafetensorsReader),
}
ROUTES = [route for n in (1, 2) for route in itertools.product(STORAGE, repeat=n)]


def random_state(rank):
    """What trainers keep of each rank: tensors in dicts, lists and tuples, an empty dict."""
    return {
        "torch": torch.arange(4, dtype=torch.uint8) + rank,
        "numpy": ("MT19937", np.arange(3, dtype=np.uint32) * rank, rank, 0, 0.5),
        "workers": [torch.full((2,), rank), {"at": rank}],
        "half": torch.full((1,), rank, dtype=torch.bfloat16),
        1: {},
    }


def check(rank, found):
    expected = random_state(rank)
    assert list(map(str, expected)) == list(map(str, found))
    assert expected["torch"].tolist() == found["torch"].tolist()
    assert torch.uint8 == found["torch"].dtype and torch.bfloat16 == found["half"].dtype
    assert [0, rank, 2 * rank] == found["numpy"][1].tolist()
    assert ("MT19937", rank, 0, 0.5) == (found["numpy"][0], *found["numpy"][2:])
    assert [rank, rank] == found["workers"][0].tolist()
    assert {"at": rank} == found["workers"][1]
    assert {} == found[1]


def states(make):
    return [
        {
            "rng": PerRank(make(rank)),
            "loader": PerRank({"order": make(rank)}, axes=("dp_shard",)),
            "bare": PerRank(torch.tensor([rank]) if make is random_state else None),
            "w": torch.arange(6.0) if make is random_state else torch.zeros(6),
            "step": 5 if make is random_state else 0,
        }
        for rank in range(RANKS)
    ]


def planners(cls):
    return [cls(grid=Grids.from_sizes(rank, dp_shard=RANKS)) for rank in range(RANKS)]


@pytest.mark.parametrize("start", STORAGE)
@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_values_of_each_rank_resume(tmp_path, start, route):
    writer, _ = STORAGE[start]
    world.save(tmp_path / "0", states(random_state), planners(LayoutAwareSavePlanner), writer)
    for number, to in enumerate(route):
        answer = shardplan(
            "convert", tmp_path / f"{number}", tmp_path / f"{number + 1}", "--to", to
        )
        assert 0 == answer.status, answer.err
    last = tmp_path / f"{len(route)}"
    answer = shardplan("diff", tmp_path / "0", last, "--values")
    assert 0 == answer.status, answer.out
    assert 0 == shardplan("verify", last).status
    into = states(lambda rank: None)
    held = [dict(state) for state in into]
    world.load(last, into, planners(LayoutAwareLoadPlanner), STORAGE[route[-1]][1])
    for rank, (state, values) in enumerate(zip(into, held, strict=True)):
        check(rank, values["rng"].value)
        check(rank, values["loader"].value["order"])
        assert [rank] == values["bare"].value.tolist()
        assert [0, 1, 2, 3, 4, 5] == state["w"].tolist()
        assert 5 == state["step"]


def test_keys_are_what_they_were(tmp_path):
    """Names that code elsewhere takes apart: wrappers' tokens, holes, chunks, slots."""
    names = (
        "module.w", "_orig_mod.w", "_fsdp_wrapped_module.w", "model0.w", "w", "w.exp_avg", "a..b",
        ".", "weight{expert}", "{layer}", "experts.weight0", "state.w.step", "Ä", " ", "param_groups.w",
    )  # fmt: skip
    state = {name: torch.full((2, 3), float(i)) for i, name in enumerate(names)}
    state |= {"w.step": 5, "state": {}, "list": [{}, 5, torch.ones(2)], "none": None}
    state |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "n": {0: torch.ones(1)}}
    dcp.save(state, checkpoint_id=tmp_path / "0")
    for number, to in enumerate(("shardplan", "shardplan", "dcp")):
        source, out = tmp_path / f"{number}", tmp_path / f"{number + 1}"
        assert 0 == shardplan("convert", source, out, "--to", to).status
        assert 0 == shardplan("diff", tmp_path / "0", out, "--values").status
    with open_checkpoint(tmp_path / "3") as checkpoint:
        for i, name in enumerate(names):
            assert [float(i)] * 6 == checkpoint.read(name).flatten().tolist()


def test_positions_in_a_list_stay_where_some_are_left_out(tmp_path):
    dcp.save(
        {"a": [torch.ones(1), 7, torch.zeros(2)], "b": [torch.ones(1)]},
        checkpoint_id=tmp_path / "a",
    )
    assert 0 == shardplan("convert", tmp_path / "a", tmp_path / "b.pt", "--tensors-only").status
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert [0, 2] == list(found["a"]) and {int} == set(map(type, found["a"]))
    assert isinstance(found["b"], list)
    assert ["a.0", "a.2", "b.0"] == sorted(open_checkpoint(tmp_path / "b.pt").tensors)


def test_what_was_saved_without_padding_stays_known_as_that(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    with open_checkpoint(tmp_path / "a") as checkpoint:
        checkpoint.metadata.planner_data["shardplan.unpadded"] = ("w",)
        convert(checkpoint, tmp_path / "b", "dcp")
    with open_checkpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.saved.unpadded("w")


READ = Source(torch.float32, (2,), lambda offsets, sizes: torch.ones(sizes))
WRITERS = {
    "safetensors": lambda path, key: write_safetensors(path, {"a": READ, key: READ}),
    "shardplan": lambda path, key: write_own(path, {"a": READ, key: READ}, {}),
}


@pytest.mark.parametrize(
    ("to", "key"),
    [
        ("safetensors", "__metadata__"),
        ("safetensors", "x\ud800"),
        ("shardplan", "__metadata__"),
        ("shardplan", "__shardplan_sums__"),
        ("shardplan", "__shardplan_new"),
        ("shardplan", "\udfffx"),
    ],
)
def test_keys_that_a_format_keeps_for_itself_are_refused_by_name(tmp_path, to, key):
    shown = key if key.isascii() else ascii(key)
    dcp.save({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "old")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnstorableValueError) as caught:
        WRITERS[to](tmp_path / "empty" / "x", key)
    assert str(caught.value).startswith(f"{shown}: ")
    assert [] == list((tmp_path / "empty").rglob("*.safetensors*"))
    torch.save({"a": torch.ones(1), key: torch.ones(2)}, tmp_path / "a.pt")
    before = sorted(tmp_path.iterdir())
    answer = shardplan("convert", tmp_path / "a.pt", tmp_path / "out", "--to", to)
    assert 2 == answer.status
    assert f"shardplan: {shown}: " in answer.err
    assert before == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_pickles_hold_any_key(tmp_path, to):
    keys = ("__metadata__", "__shardplan_sums__", "x\ud800")
    torch.save({key: torch.full((2,), float(i)) for i, key in enumerate(keys)}, tmp_path / "a.pt")
    assert 0 == shardplan("convert", tmp_path / "a.pt", tmp_path / "out", "--to", to).status
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert [0, 1, 2] == [int(checkpoint.read(key)[1]) for key in keys]


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("name", ["x", "x.bin", "x.old", "x.safetensors", "x.ckpt"])
def test_content_tells_the_format_whatever_the_name(tmp_path, to, name):
    save_file({"w": torch.arange(3.0)}, tmp_path / "a.safetensors")
    assert 0 == shardplan("convert", tmp_path / "a.safetensors", tmp_path / name, "--to", to).status
    assert ["a.safetensors", name] == sorted(path.name for path in tmp_path.iterdir())
    assert to == shardplan("inspect", tmp_path / name, "--json").json["format"]
    assert 0 == shardplan("diff", tmp_path / "a.safetensors", tmp_path / name, "--values").status


def test_half_bytes_are_what_other_tools_expect(tmp_path):
    packed = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    dcp.save({"w": packed}, checkpoint_id=tmp_path / "a")
    assert 0 == shardplan("convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors").status
    raw = (tmp_path / "b").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]} == header["w"]
    assert 0 == shardplan("diff", tmp_path / "a", tmp_path / "b", "--values").status


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path):
    dcp.save(
        {"a": torch.ones(1), "w": torch.ones(1, dtype=torch.complex128)},
        checkpoint_id=tmp_path / "a",
    )
    answer = shardplan("convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors")
    assert (2, False) == (answer.status, (tmp_path / "b").exists())
    assert "w: safetensors can't hold torch.complex128 of shape (1,)" in answer.err


def test_the_library_speaks_of_arguments_and_the_command_of_flags(tmp_path):
    dcp.save({"a": torch.ones(1), "step": 5}, checkpoint_id=tmp_path / "a")
    (tmp_path / "b").write_text("mine")
    with open_checkpoint(tmp_path / "a") as checkpoint:
        with pytest.raises(CheckpointError, match=r"pass overwrite=True\.$"):
            convert(checkpoint, tmp_path / "b", "torch")
        with pytest.raises(UnstorableValueError, match="Pass tensors_only=True to leave"):
            convert(checkpoint, tmp_path / "c", "safetensors")
        with pytest.raises(CheckpointError, match=r"zip: not a format\. Choose one of dcp, "):
            convert(checkpoint, tmp_path / "c", "zip")
        convert(checkpoint, tmp_path / "b", "torch", overwrite=True)
        convert(checkpoint, tmp_path / "c", "safetensors", tensors_only=True)
    for words in (["b", "--to", "torch"], ["d", "--to", "safetensors"]):
        answer = shardplan("convert", tmp_path / "a", tmp_path / words[0], *words[1:])
        assert "=True" not in answer.err and "ass --" in answer.err


def test_a_value_that_can_not_be_pickled_is_named(tmp_path):
    with pytest.raises(UnstorableValueError, match="a value can't be stored"):
        write_archive(tmp_path / "x.pt", {"a": lambda: 0}, lambda n: None)
    assert [] == list(tmp_path.iterdir())
