"""Writers let go of each block before they ask for the next: memory does not grow with the state."""

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from shardplan.layouts import CheckpointError
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.checkpoints.own_writing import write_own
from shardplan.planner.checkpoints.stock_writing import OneFileWriter
from shardplan.planner.checkpoints.streamed import StreamedSavePlanner, drive_save
from shardplan.planner.checkpoints.streams import Source, write_safetensors
from shardplan.planner.checkpoints.torch_archive import write_archive

COUNT, SIZE = 12, 5000


class Watched:
    """Sources that know how many of their blocks are alive when the next one is read."""

    def __init__(self):
        self.blocks = []
        self.most = 0

    def read(self, number):
        def of(offsets, sizes):
            gc.collect()
            self.most = max(self.most, sum(block() is not None for block in self.blocks))
            block = expected(number)[offsets[0] : offsets[0] + sizes[0]].clone()
            self.blocks.append(weakref.ref(block))
            return block

        return of

    @property
    def sources(self):
        return {f"t{i}": Source(torch.float32, (SIZE,), self.read(i)) for i in range(COUNT)}


def expected(number):
    return torch.arange(SIZE, dtype=torch.float32) + number


def stock(path, sources):
    planner = StreamedSavePlanner(sources, {}, {key: (key,) for key in sources})
    drive_save(planner, OneFileWriter(path))


WRITERS = {
    "out": stock,
    "own": lambda path, sources: write_own(path, sources, {}),
    "out.pt": lambda path, sources: write_archive(path, sources, lambda n: None),
    "out.safetensors": write_safetensors,
}


@pytest.mark.parametrize("name", WRITERS)
def test_one_block_at_a_time(tmp_path, name):
    watched = Watched()
    WRITERS[name](tmp_path / name, watched.sources)
    # The one before may still be held while the next is read, and no more.
    assert watched.most <= 1
    assert COUNT == len(watched.blocks)
    with open_checkpoint(tmp_path / name) as checkpoint:
        for i in range(COUNT):
            assert torch.equal(expected(i), checkpoint.read(f"t{i}"))


def test_what_is_written_opens_elsewhere(tmp_path):
    watched = Watched()
    stock(tmp_path / "out", watched.sources)
    state = {f"t{i}": torch.zeros(SIZE) for i in range(COUNT)}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    write_safetensors(tmp_path / "x.safetensors", watched.sources, {"format": "pt"})
    write_archive(tmp_path / "x.pt", watched.sources, lambda n: None)
    for found in (state, load_file(tmp_path / "x.safetensors"), torch.load(tmp_path / "x.pt")):
        assert [] == [i for i in range(COUNT) if not torch.equal(expected(i), found[f"t{i}"])]


@pytest.mark.parametrize("write", [write_safetensors, WRITERS["out.pt"]])
def test_a_failed_write_leaves_nothing(tmp_path, write):
    def broken(offsets, sizes):
        raise CheckpointError("the source is damaged")

    with pytest.raises(CheckpointError, match="the source is damaged"):
        write(tmp_path / "x", {"a": Source(torch.float32, (3,), broken)})
    assert [] == list(tmp_path.iterdir())
