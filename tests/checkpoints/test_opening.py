"""What a file is decides its content, not its name; what can't be read is an error by name."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import SerializationFormat

from shardplan.layouts import (
    CheckpointError,
    DamagedCheckpointError,
    Grids,
    IncompleteCheckpointError,
    MissingKeyError,
)
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
)
from shardplan.planner.checkpoints.opening import open_checkpoint


def write(path, entries, nbytes, metadata=None):
    """Writes a safetensors file from `name: (dtype, shape, begin, end)`."""
    header = {k: {"dtype": d, "shape": s, "data_offsets": [a, b]} for k, (d, s, a, b) in entries}
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(nbytes)))


@pytest.mark.parametrize(
    ("entries", "nbytes", "words"),
    [
        (
            [("a", ("U8", [4], 0, 4)), ("b", ("U8", [4], 2, 6))],
            6,
            "b begins at byte 2 .* overlaps a",
        ),
        ([("a", ("U8", [4], 0, 4)), ("b", ("U8", [4], 6, 10))], 10, "b begins .* a hole after a"),
        ([("a", ("U8", [4], 0, 4)), ("b", ("U8", [4], 0, 4))], 4, "b begins .* overlaps a"),
        ([("a", ("U8", [4], 0, 4))], 6, "entries end at byte .* was appended to"),
        ([("a", ("U8", [4], 0, 4))], 3, "entries end at byte .* is truncated"),
        ([("a", ("U8", [4], 0, 4)), ("e", ("U8", [0], 2, 2))], 4, "e begins|a begins"),
    ],
)
@pytest.mark.parametrize("name", ["x.safetensors", "x", "x.pt"])
def test_files_with_holes_and_overlaps_are_refused(tmp_path, entries, nbytes, words, name):
    path = tmp_path / name
    write(path, entries, nbytes)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(DamagedCheckpointError, match=words):
        open_checkpoint(path)
    for verb in ("verify", "inspect"):
        answer = shardplan(verb, path)
        assert {"verify": 1, "inspect": 2}[verb] == answer.status
        assert str(path) in answer.out + answer.err


def test_one_damaged_file_of_a_folder_is_named(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    write(tmp_path / "2.safetensors", [("b", ("U8", [4], 2, 6))], 6)
    answer = shardplan("verify", tmp_path)
    assert 1 == answer.status
    assert f"{tmp_path / '2.safetensors'}: b begins at byte 2" in answer.out


EIGHT_BITS = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


@pytest.mark.parametrize("name", [*EIGHT_BITS, "float4_e2m1fn_x2", "uint16", "complex64"])
def test_dtypes_that_safetensors_shares(tmp_path, name):
    dtype = getattr(torch, name)
    # Bit patterns of numbers in every one of them.
    tensor = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]] * 2, dtype=torch.uint8).view(dtype)
    save_file({"w": tensor, "v": torch.ones(3)}, tmp_path / "x.safetensors")
    assert 0 == shardplan("verify", tmp_path / "x.safetensors").status
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert (dtype, tuple(tensor.shape)) == (checkpoint.dtype("w"), checkpoint.shape("w"))
        assert [[1, 2, 3, 4, 5, 6, 7, 8]] * 2 == checkpoint.read("w").view(torch.uint8).tolist()
        half = tensor.shape[1] // 2
        box = checkpoint.read("w", (1, half or 0), (1, tensor.shape[1] - half))
        assert [tensor[1, half:].view(torch.uint8).tolist()] == box.view(torch.uint8).tolist()


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e5m2fnuz"])
def test_own_storage_writes_dtypes_as_safetensors_does(tmp_path, name):
    dtype = getattr(torch, name)
    tensor = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8).view(dtype)
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0))
    dcp.save(
        {"w": tensor}, storage_writer=SafetensorsWriter(tmp_path), planner=planner, no_dist=True
    )
    (file,) = tmp_path.rglob("*.safetensors")
    with safe_open(file, "pt") as other:
        found = other.get_tensor("w")
    assert (dtype, (2, 4)) == (found.dtype, tuple(found.shape))
    state = {"w": torch.zeros(2, 4, dtype=torch.uint8).view(dtype)}
    reader, planner = SafetensorsReader(tmp_path), LayoutAwareLoadPlanner(grid=Grids.from_sizes(0))
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert [[1, 2, 3, 4], [5, 6, 7, 8]] == state["w"].view(torch.uint8).tolist()


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2", "F128", "", None, ["F32"]])
def test_dtypes_without_one_of_torch_are_named(tmp_path, code):
    write(tmp_path / "x.safetensors", [("key.of.it", (code, [4], 0, 3))], 3)
    answer = shardplan("verify", tmp_path / "x.safetensors")
    assert 1 == answer.status
    assert "key.of.it has no possible entry" in answer.out


def test_content_decides(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "b.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "c", _use_new_zipfile_serialization=False)
    formats = []
    for name in ("a.pt", "b.safetensors", "c"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert [1, 1, 1] == checkpoint.read("w").tolist()
            formats.append(checkpoint.format)
        assert 0 == shardplan("verify", tmp_path / name).status
    assert ["safetensors", "torch", "torch"] == formats


def archive(change=None):
    stream = io.BytesIO()
    torch.save({"w": torch.arange(100.0), "v": torch.ones(3)}, stream)
    return stream.getvalue()


def zipped():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("a.txt", "hello")
    return stream.getvalue()


def numpy_file():
    stream = io.BytesIO()
    np.save(stream, np.ones(3))
    return stream.getvalue()


def circular():
    state = {}
    state["again"] = state
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def old_form():
    stream = io.BytesIO()
    torch.save({"w": torch.arange(100.0)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["x", "x.pt", "x.safetensors"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"PK",
        b"PK\x03\x04",
        b"\x80",
        b"\x80\x02}",
        b"hello, world",
        bytes(4096),
        b"\xff" * 4096,
        archive()[:100],
        archive()[:-30],
        archive()[:700] + archive()[900:],
        old_form()[:50],
        old_form()[:-20],
        zipped(),
        numpy_file(),
        circular(),
        (2).to_bytes(8, "little") + b"{}" + b"more",
        (5).to_bytes(8, "little") + b"{....",
        (1 << 40).to_bytes(8, "little") + b"{}",
    ],
    ids=range(20),
)
def test_damaged_and_foreign_files_are_damaged_by_name(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    for verb in ("verify", "inspect"):
        answer = shardplan(verb, path)
        assert {"verify": 1, "inspect": 2}[verb] == answer.status
        assert str(path) in answer.out + answer.err
        assert "trust" not in answer.out + answer.err
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [[torch.ones(2)], torch.ones(2), 5])
def test_what_is_not_a_state_dict_is_named(tmp_path, value):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=f"holds a {type(value).__name__}, not a state dict"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_cut_metadata_is_damaged(tmp_path, cut):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    file = tmp_path / "a" / ".metadata"
    file.write_bytes(file.read_bytes()[:cut])
    answer = shardplan("verify", tmp_path / "a")
    assert (1, "") == (answer.status, answer.err)
    assert f"{file}: damaged, or not metadata of DCP" in answer.out
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(tmp_path / "a")


def test_a_key_that_is_not_there(tmp_path):
    save_file({"model.w": torch.ones(3)}, tmp_path / "x.safetensors")
    with (
        open_checkpoint(tmp_path / "x.safetensors") as checkpoint,
        pytest.raises(MissingKeyError, match=r"other\.w: not in .* Did you mean model\.w"),
    ):
        checkpoint.read("other.w")


def own(path, state):
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0))
    dcp.save(state, storage_writer=SafetensorsWriter(path), planner=planner, no_dist=True)


def stock(path, state):
    dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize(("save", "pattern"), [(own, "*.safetensors"), (stock, "*.distcp")])
def test_a_missing_data_file_is_one_fault(tmp_path, save, pattern):
    save(tmp_path / "a", {f"layer.{i}": torch.ones(2) for i in range(30)})
    (file,) = (tmp_path / "a").rglob(pattern)
    file.unlink()
    answer = shardplan("verify", tmp_path / "a", "--json")
    assert 1 == answer.status
    (fault,) = answer.json["faults"]
    assert fault["where"].endswith(file.name)
    assert "needed by 30 keys" in fault["what"]
    with (
        open_checkpoint(tmp_path / "a") as checkpoint,
        pytest.raises(CheckpointError, match=file.name),
    ):
        checkpoint.read("layer.3")


@pytest.mark.parametrize("save", [own, stock])
def test_tensors_without_elements_are_sound(tmp_path, save):
    state = {"e": torch.zeros(0, 4), "f": torch.zeros(3, 0, 2), "w": torch.ones(2)}
    save(tmp_path / "a", state)
    assert 0 == shardplan("verify", tmp_path / "a").status


def stored_rows(path, name, key, value, offsets):
    """Writes a chunk of a sharded Hugging Face folder as torch's writer does."""
    info = json.dumps({key: {"saved_offsets": offsets}})
    save_file({key: value}, path / name, metadata={"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})


def test_files_of_an_older_save_are_the_likely_cause(tmp_path):
    for rank in range(2):
        name = f"shard-{rank + 1:05d}-model.safetensors"
        stored_rows(tmp_path, name, "d", torch.full((2, 3), 1.0), [2 * rank, 0])
    stored_rows(tmp_path, "shard-00003-model.safetensors", "d", torch.full((4, 3), 2.0), [0, 0])
    answer = shardplan("verify", tmp_path)
    assert 1 == answer.status
    assert "shard-00002-model.safetensors" in answer.out
    assert "Files of an older save were probably left" in answer.out
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(IncompleteCheckpointError, match="Files of an older save"),
    ):
        checkpoint.read("d")
    state = {"d": torch.zeros(4, 3)}
    with pytest.raises(BaseException, match=r"d: .*shard-00002-model\.safetensors.*older save"):
        dcp.load(
            state,
            storage_reader=HuggingFaceStorageReader(str(tmp_path)),
            planner=LayoutAwareLoadPlanner(grid=Grids.from_sizes(0)),
            no_dist=True,
        )
    assert not state["d"].any()
    # The advice works.
    for rank in range(2):
        (tmp_path / f"shard-{rank + 1:05d}-model.safetensors").unlink()
    assert 0 == shardplan("verify", tmp_path).status


def test_stock_files_of_safetensors_open(tmp_path):
    state = {"w": torch.arange(8.0), "v": torch.arange(6).reshape(2, 3)}
    form = SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path / "a", serialization_format=form)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    answer = shardplan("verify", tmp_path / "a")
    assert 0 == answer.status, answer.out
    with open_checkpoint(tmp_path / "a") as checkpoint:
        assert state["w"].tolist() == checkpoint.read("w").tolist()
        assert [[1, 2], [4, 5]] == checkpoint.read("v", (0, 1), (2, 2)).tolist()
    (file,) = (tmp_path / "a").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    answer = shardplan("verify", tmp_path / "a", "--json")
    assert 1 == answer.status
    (fault,) = answer.json["faults"]
    assert "is truncated" in fault["what"] and "needed by 2 keys" in fault["what"]


def test_a_tensor_that_its_file_lacks_is_a_fault(tmp_path):
    form = SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path / "a", serialization_format=form)
    dcp.save({"w": torch.arange(8.0), "v": torch.ones(2)}, storage_writer=writer, no_dist=True)
    (file,) = (tmp_path / "a").glob("*.distcp")
    save_file({"w": torch.arange(8.0)}, file)
    answer = shardplan("verify", tmp_path / "a")
    assert 1 == answer.status
    assert "v: " in answer.out and "1 fault" in answer.out
