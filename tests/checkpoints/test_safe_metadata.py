"""Stock `.metadata` is read without executing it: only DCP's own types come out."""

import collections
import os
import pathlib
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

from shardplan.layouts import CheckpointError, DamagedCheckpointError
from shardplan.planner.checkpoints.opening import open_checkpoint
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


def tuples(metadata):
    """Megatron-FSDP plans its uneven shards with tuples."""
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            stored.size = list(stored.size)
            for chunk in stored.chunks:
                object.__setattr__(chunk, "offsets", tuple(chunk.offsets))
                object.__setattr__(chunk, "sizes", tuple(chunk.sizes))
    for index in metadata.storage_data:
        if index.offset is not None:
            object.__setattr__(index, "offset", tuple(index.offset))


def older(metadata):
    """Attributes that torch 2.2 did not have, and one that no version has."""
    for name in ("storage_meta", "version"):
        metadata.__dict__.pop(name, None)
    for place in metadata.storage_data.values():
        place.__dict__.pop("transform_descriptors", None)
        place.__dict__["later"] = ["x"]


def ids(metadata):
    metadata.storage_meta.checkpoint_id = pathlib.PureWindowsPath("C:/run/step")
    metadata.storage_meta.modules = ["fsspec"]


def planner_data(metadata):
    """Nested containers of plain data, as planners of other libraries keep them."""
    metadata.planner_data = collections.OrderedDict(
        metadata.planner_data,
        **{"more": [{"a": (1, 2.5, None, b"x", {3}, frozenset([4]), 1j)}, torch.Size([2]), True]},
    )


def channels_last(metadata):
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            stored.properties.memory_format = torch.channels_last


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("change", [tuples, older, ids, planner_data, channels_last])
def test_what_trainers_and_older_versions_pickle(tmp_path, change, protocol):
    dcp.save(state(), checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=protocol))
    with open_checkpoint(tmp_path) as checkpoint:
        assert [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] == checkpoint.read("model.w").tolist()
        (chunk,) = checkpoint.tensor("model.w").chunks
        assert (torch.Size, torch.Size) == (type(chunk.offsets), type(chunk.sizes))
        assert 3 == checkpoint.load_object("step")
        assert not list(checkpoint.faults())
    loaded = state()
    loaded["model"]["w"].zero_()
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path))
    assert state()["model"]["w"].tolist() == loaded["model"]["w"].tolist()


DCP = "torch.distributed.checkpoint.metadata"
RENAMED = {
    "properties of torch 2.2": (
        (DCP, "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ),
    "memory format of torch 2.2": (
        (DCP, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ),
    "Megatron-Core": (
        (DCP, "Metadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ),
    "paths of Python 3.13": (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
}


@pytest.mark.parametrize("name", RENAMED)
def test_types_under_other_names(tmp_path, name):
    """Protocol 2 spells each global as a line of its module and one of its name."""
    dcp.save(state(), checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    if name == "Megatron-Core":
        metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 4)}}
    old, new = ("c{}\n{}\n".format(*names).encode() for names in RENAMED[name])
    data = pickle.dumps(metadata, protocol=2)
    assert old in data
    path.write_bytes(data.replace(old, new))
    with open_checkpoint(tmp_path) as checkpoint:
        assert Metadata is type(checkpoint.metadata)
        assert [8, 9, 10, 11] == checkpoint.read("model.w")[2].tolist()
        assert not list(checkpoint.faults())


@pytest.mark.parametrize("size", [(1.5,), "ab", ("a",), None, (True,), {1}])
def test_sizes_of_other_kinds_are_named(tmp_path, size):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    object.__setattr__(metadata.state_dict_metadata["w"].chunks[0], "offsets", size)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"w: .* stands where a size belongs"):
        read_metadata(path)
