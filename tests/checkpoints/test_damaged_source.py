"""What is damaged is neither converted, exported nor loaded: under new checksums nobody would know."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan

from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsWriter,
)
from shardplan.planner.checkpoints.reader import CheckpointReader

WEIGHT = torch.arange(1000.0)


def own(path):
    writer = SafetensorsWriter(path, sync=False)
    state = {"w": WEIGHT, "v": torch.ones(8), "n": 3}
    dcp.save(state, storage_writer=writer, planner=LayoutAwareSavePlanner(), no_dist=True)
    return next(path.glob("*/*.safetensors"))


def stock(path):
    dcp.save({"w": WEIGHT, "v": torch.ones(8), "n": 3}, checkpoint_id=path, no_dist=True)
    return next(path.glob("*.distcp"))


def saved_file(path):
    torch.save({"w": WEIGHT, "v": torch.ones(8), "n": 3}, path)
    return path


def damage(make, path):
    """Makes a checkpoint in which one bit of `w` is not what was written."""
    file = make(path)
    raw = bytearray(file.read_bytes())
    at = raw.index(WEIGHT.numpy().tobytes()) + 2001
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("to", ["dcp", "shardplan", "torch", "safetensors"])
@pytest.mark.parametrize("make", [own, stock, saved_file])
def test_convert(tmp_path, make, to):
    damaged, out = tmp_path / "c", tmp_path / "out"
    damage(make, damaged)
    answer = shardplan("convert", damaged, out, "--to", to, "--tensors-only")
    assert 2 == answer.status
    assert "checksum" in answer.err and "shardplan verify" in answer.err
    assert not out.exists()
    assert 1 == shardplan("verify", damaged).status


@pytest.mark.parametrize("make", [own, stock])
def test_load_through_the_reader_of_any_format(tmp_path, make):
    damaged = tmp_path / "c"
    damage(make, damaged)
    state = {"w": torch.full((1000,), -1.0)}
    planner = LayoutAwareLoadPlanner()
    with pytest.raises(BaseException, match="checksum"):
        dcp.load(state, storage_reader=CheckpointReader(damaged), planner=planner, no_dist=True)
    state = {"v": torch.zeros(8)}
    dcp.load(state, storage_reader=CheckpointReader(damaged), planner=planner, no_dist=True)
    assert torch.equal(torch.ones(8), state["v"])


@pytest.mark.parametrize("make", [own, stock])
def test_missing_file_is_named_before_anything_is_written(tmp_path, make):
    make(tmp_path / "c").unlink()
    answer = shardplan("convert", tmp_path / "c", tmp_path / "out", "--to", "safetensors")
    assert 2 == answer.status
    assert not (tmp_path / "out").exists()
