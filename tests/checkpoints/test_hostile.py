"""Checkpoints that lie about themselves: refused by name, nothing outside of them is opened."""

import dataclasses
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from safetensors.torch import save_file

from shardplan.layouts import CheckpointError
from shardplan.planner.checkpoints.opening import open_checkpoint


@pytest.fixture
def stock(tmp_path):
    dcp.save({"w": torch.arange(8.0), "v": torch.arange(4.0)}, checkpoint_id=tmp_path / "a")
    return tmp_path / "a"


def change(stock, **values):
    """Rewrites where the data of `w` lies."""
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "w":
            metadata.storage_data[index] = dataclasses.replace(place, **values)
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "x/../../secret", "a\0b", ""])
def test_no_file_outside_is_opened(stock, name):
    (stock.parent / "secret").write_bytes(b"secret")
    change(stock, relative_path=name)
    with (
        open_checkpoint(stock) as checkpoint,
        pytest.raises(CheckpointError, match="which lies outside of it"),
    ):
        checkpoint.read("w")
    for verb in ("verify", "inspect"):
        assert "secret" != shardplan(verb, stock).out.strip()
    assert 1 == shardplan("verify", stock).status


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"length": 1 << 50}, "truncated"),
        ({"offset": -5}, "truncated|no tensor that torch.save wrote"),
        ({"length": 40}, "no tensor that torch.save wrote"),
    ],
)
def test_places_that_can_not_be(stock, values, words):
    change(stock, **values)
    with open_checkpoint(stock) as checkpoint, pytest.raises(CheckpointError, match=words):
        checkpoint.read("w")
    assert 1 == shardplan("verify", stock).status


def test_a_place_of_another_tensor_is_noticed(stock):
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    other = next(p for i, p in metadata.storage_data.items() if i.fqn == "v")
    change(stock, offset=other.offset, length=other.length)
    with (
        open_checkpoint(stock) as checkpoint,
        pytest.raises(CheckpointError, match=r"but the metadata says torch.float32 and \(8,\)"),
    ):
        checkpoint.read("w")
    answer = shardplan("verify", stock)
    assert 1 == answer.status
    assert "overlap" in answer.out


def rewrite(path, **entry):
    """Changes the header's entry of `w` and writes the file again."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["w"] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"data_offsets": [-32, 0]}, "no possible entry"),
        ({"data_offsets": [0, 16]}, "needs 32 bytes but has 16"),
        ({"shape": [1 << 62]}, "needs 18446744073709551616 bytes but has 32"),
        ({"dtype": "F3"}, "torch has no dtype 'F3'"),
        ({"shape": "x"}, "no possible entry"),
        ({"data_offsets": None}, "no possible entry"),
    ],
)
def test_safetensors_entries_that_can_not_be(tmp_path, entry, words):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(8.0)}, path)
    rewrite(path, **entry)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_safetensors_headers_that_can_not_be(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(path)


def test_an_index_that_names_a_file_outside(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"w": "../x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which lies outside of it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "values", [{"relative_path": 5}, {"offset": "0"}, {"length": "x"}, {"offset": 0.5}]
)
def test_places_of_other_kinds_are_damaged(stock, values):
    change(stock, **values)
    for verb in ("verify", "inspect"):
        answer = shardplan(verb, stock)
        assert {"verify": 1, "inspect": 2}[verb] == answer.status
        assert "'w' lies in" in answer.out + answer.err


@pytest.mark.parametrize("name", ["size", "sizes", "offsets"])
def test_negative_shapes_are_damaged(stock, name):
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["w"]
    object.__setattr__(stored if name == "size" else stored.chunks[0], name, torch.Size([-8]))
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    answer = shardplan("verify", stock)
    assert (1, "") == (answer.status, answer.err)
    assert "w: " in answer.out and "-8" in answer.out
