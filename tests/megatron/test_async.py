"""An asynchronous save returns before it is written, and what is written is what was there. Megatron is not needed."""

import threading

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from shardplan.planner import (
    CheckpointExistsError,
    PinnedStager,
    SafetensorsReader,
    SafetensorsWriter,
)
from shardplan.planner.megatron import load_checkpoint, save_checkpoint


def gated(kind):
    """A storage writer that writes when it may."""

    class Gated(kind):
        def __init__(self, *args, **given):
            super().__init__(*args, **given)
            self.gate = threading.Event()

        def write_data(self, plan, planner):
            assert self.gate.wait(60)
            return super().write_data(plan, planner)

    return Gated


def model(value):
    made = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(made.weight, value)
    return made


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("stager", [None, PinnedStager])
def test_training_goes_on_while_it_is_written(tmp_path, own, stager):
    live = model(1.0)
    writer = gated(SafetensorsWriter if own else FileSystemWriter)(tmp_path)
    future = save_checkpoint(
        live,
        None,
        tmp_path,
        iteration=5,
        storage_writer=writer,
        async_save=True,
        async_stager=stager and stager(),
    )
    assert not future.done()
    torch.nn.init.constant_(live.weight, 2.0)
    writer.gate.set()
    future.result(60)
    found = model(-1.0)
    reader = {"storage_reader": SafetensorsReader(tmp_path)} if own else {}
    assert 5 == load_checkpoint(found, None, tmp_path, **reader).iteration
    assert torch.equal(torch.ones(2, 3), found.weight)


def test_its_error_comes_from_the_future(tmp_path):
    save_checkpoint(model(1.0), None, tmp_path, storage_writer=SafetensorsWriter(tmp_path))
    again = SafetensorsWriter(tmp_path)
    with pytest.raises(CheckpointExistsError):
        save_checkpoint(model(2.0), None, tmp_path, storage_writer=again, async_save=True).result(
            60
        )
    found = model(-1.0)
    load_checkpoint(found, None, tmp_path, storage_reader=SafetensorsReader(tmp_path))
    assert torch.equal(torch.ones(2, 3), found.weight)
