"""finalize: stock DCP's metadata for a checkpoint in our own format."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan

from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter


@pytest.mark.parametrize("stock", [True, False])
def test_stock_opens_what_was_saved_for_it(tmp_path, stock):
    path = tmp_path / "checkpoint"
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 4}
    writer = SafetensorsWriter(path, stock=stock)
    planner = LayoutAwareSavePlanner({"w": (2, 3)})
    dcp.save(state, storage_writer=writer, planner=planner, use_collectives=False)
    answer = shardplan("finalize", path, "--json")
    assert (0, {"path": str(path), "stock_load": stock}) == (answer.status, answer.json)
    found = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
    if stock:
        dcp.load(found, checkpoint_id=path)
        assert torch.equal(state["model"]["w"], found["model"]["w"])
        assert 4 == found["step"]
    else:
        with pytest.raises(dcp.CheckpointException, match="SafetensorsReader"):
            dcp.load(found, checkpoint_id=path)


def test_a_folder_without_a_checkpoint_is_no_answer(tmp_path):
    answer = shardplan("finalize", tmp_path)
    assert 2 == answer.status
    assert "no complete checkpoint to finalize: there is no checkpoint.json" in answer.err


def test_a_stock_checkpoint_needs_no_finalize(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "stock")
    before = (tmp_path / "stock" / ".metadata").read_bytes()
    answer = shardplan("finalize", tmp_path / "stock")
    assert 2 == answer.status
    assert "stock DCP wrote it" in answer.err
    assert before == (tmp_path / "stock" / ".metadata").read_bytes()


@pytest.mark.parametrize("part", ["values", "head"])
def test_verify_sees_what_stock_tools_would_read(tmp_path, part):
    """One byte of the Python values, or of what stands before a chunk for torch.load."""
    path = tmp_path / "c"
    writer = SafetensorsWriter(path, sync=False, stock=True)
    state = {"w": torch.ones(4, 3), "n": 5}
    dcp.save(state, storage_writer=writer, planner=LayoutAwareSavePlanner(), no_dist=True)
    assert 0 == shardplan("finalize", path).status
    assert 0 == shardplan("verify", path).status
    name = "values.distcp" if part == "values" else "*.safetensors"
    (file,) = path.glob(f"*/{name}")
    raw = bytearray(file.read_bytes())
    at = len(raw) // 2 if part == "values" else raw.index(b"_rebuild_tensor")
    raw[at] ^= 1
    file.write_bytes(raw)
    answer = shardplan("verify", path)
    assert 1 == answer.status
    words = (
        "values.distcp: its checksum differs" if part == "values" else "head for torch.load differs"
    )
    assert words in " ".join(answer.out.split())
