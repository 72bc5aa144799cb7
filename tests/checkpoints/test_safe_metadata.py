"""Stock `.metadata` is read without executing it: only DCP's own types come out."""

import os
import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError
from shardplan.planner.checkpoints.reader import CheckpointReader
from shardplan.planner.checkpoints.safe_metadata import read_metadata


def state():
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "h": torch.ones(2, dtype=torch.bfloat16)},
        "step": 3,
        "betas": [0.9, torch.tensor(0.95)],
    }


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def hostile(tmp_path, value):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(value))
    return path


def test_equals_what_pickle_reads(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    actual = read_metadata(tmp_path / ".metadata")
    assert expected == actual
    assert {"model.w", "model.h", "step", "betas.0", "betas.1"} == set(actual.state_dict_metadata)
    assert ChunkStorageMetadata is type(actual.state_dict_metadata["model.w"].chunks[0])
    assert list(expected.storage_data) == list(actual.storage_data)


def test_reader_loads_as_the_stock_one_does(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path)
    loaded = state()
    loaded["model"]["w"].zero_()
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path))
    assert state()["model"]["w"].tolist() == loaded["model"]["w"].tolist()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Runs(os.system, "true"), "posix.system"),
        (Runs(eval, "1"), "builtins.eval"),
        (Metadata({}, planner_data=Runs(os.mkdir, "x")), "posix.mkdir"),
        (Runs(getattr, "", "load"), "builtins.getattr"),
        (Runs(torch.load, "x"), "torch.serialization.load"),
        (torch.nn.Module, "torch.nn.modules.module.Module"),
    ],
)
def test_any_other_global_is_named_and_never_called(tmp_path, value, named):
    path = hostile(tmp_path, value)
    with pytest.raises(CheckpointError) as caught:
        read_metadata(path)
    assert f"{path}: not read, since it names {named}" in str(caught.value)
    assert "--trust-pickle" in str(caught.value)
    assert [".metadata"] == os.listdir(tmp_path)


def test_a_pickle_can_not_change_the_types_it_gets(tmp_path):
    """BUILD with a slot state sets attributes; on a type that would outlive the read."""
    module = "torch.distributed.checkpoint.metadata"
    ops = (
        f"c{module}\nChunkStorageMetadata\n".encode()
        + b"(N}(S'offsets'\nI7\nutb."  # BUILD: (None, {'offsets': 7})
    )
    assert "BUILD" in [op.name for op, _, _ in pickletools.genops(ops)]
    path = tmp_path / ".metadata"
    path.write_bytes(ops)
    with pytest.raises(CheckpointError, match="it sets 'offsets' on the type ChunkStorageMetadata"):
        read_metadata(path)
    assert not hasattr(ChunkStorageMetadata, "offsets")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"w": 1}, "holds a dict, not DCP's Metadata"),
        (Metadata({3: None}), "the key 3 is not text"),
        (Metadata({"w": "tensor"}), "a str stands where a TensorStorageMetadata belongs"),
        (
            Metadata(
                {
                    "w": TensorStorageMetadata(
                        TensorProperties(),
                        torch.Size([2]),
                        [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2]))],
                    )
                }
            ),
            "w: a chunk at (0, 0) of (2,) in a tensor of shape (2,)",
        ),
    ],
)
def test_wrong_structure_is_an_error_that_names_the_file(tmp_path, value, what):
    path = hostile(tmp_path, value)
    with pytest.raises(CheckpointError) as caught:
        read_metadata(path)
    assert what in str(caught.value)
    assert str(path) in str(caught.value)


def test_truncated_and_missing(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged, or not metadata of DCP"):
        read_metadata(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"No such file or directory\. Is it a checkpoint"):
        read_metadata(path)


def test_trusting_is_possible(tmp_path):
    path = hostile(tmp_path, Metadata({}, planner_data=Runs(os.getpid)))
    assert os.getpid() == read_metadata(path, trust_pickle=True).planner_data
