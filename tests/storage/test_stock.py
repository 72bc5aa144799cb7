"""Stock DCP and its tools open a checkpoint of this format, and say so when they can't."""

import alone
import pytest
import safetensors.torch
import test_failures as small
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardplan.layouts import Grids
from shardplan.planner import CheckpointError, LayoutAwareSavePlanner
from shardplan.planner.storage import SafetensorsReader, finalize
from shardplan.planner.storage.format.torch_head import torch_head

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")


def blank():
    return {"model": {"w": torch.zeros(8, 4), "b": torch.zeros(8)}, "lr": 0.0}


def saved(path, **options):
    states = [small.state(1, 4, lr=0.25) for _ in range(4)]
    for rank, state in enumerate(states):
        state["model"]["w"] += torch.arange(rank * 8.0, rank * 8 + 8).view(2, 4)
    assert small.save(path, 1, 4, states, **options) == [None] * 4
    return torch.arange(32.0).view(8, 4) + 1


def test_stock_load_of_a_finalized_checkpoint(tmp_path):
    expected = saved(tmp_path, stock=True)
    assert finalize(tmp_path) is True
    state = blank()
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(expected, state["model"]["w"])
    assert torch.equal(torch.ones(8), state["model"]["b"]) and state["lr"] == 0.25
    dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(expected, whole["model"]["w"])
    # It is what it was, too.
    own = small.state(-1, 1, lr=0.0)
    alone.load(tmp_path, [own], [small.planner(small.LayoutAwareLoadPlanner, 0, 1)])
    assert torch.equal(expected, own["model"]["w"]) and own["lr"] == 0.25
    file = next(tmp_path.glob("*/00002-of-00004.safetensors"))
    assert torch.equal(expected[4:6], safetensors.torch.load_file(file)["model.w@4,0"])


def test_without_heads_a_stock_load_names_the_reader(tmp_path):
    saved(tmp_path)
    assert finalize(tmp_path) is False
    reader = dcp.FileSystemReader(tmp_path)
    stored = reader.read_metadata().state_dict_metadata
    assert {"model.w", "model.b", "lr"} == stored.keys()
    assert (8, 4) == tuple(stored["model.w"].size) and 4 == len(stored["model.w"].chunks)
    with pytest.raises(CheckpointException, match="SafetensorsReader"):
        dcp.load(blank(), checkpoint_id=tmp_path)


def test_stock_planner_reads_through_the_reader(tmp_path):
    expected = saved(tmp_path)
    state = blank()
    dcp.load(state, storage_reader=SafetensorsReader(tmp_path))
    assert torch.equal(expected, state["model"]["w"]) and state["lr"] == 0.25


def test_next_save_takes_the_old_metadata_away(tmp_path):
    saved(tmp_path, stock=True)
    finalize(tmp_path)
    saved(tmp_path, overwrite=True)
    assert not (tmp_path / ".metadata").exists()


def test_nothing_to_finalize_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        finalize(tmp_path)


DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_every_dtype_in_both_forms(tmp_path, dtype):
    assert 0 == len(torch_head(dtype, (3, 5))) % 64
    tensors = {"w": torch.arange(15.0).view(3, 5).to(dtype), "s": torch.tensor(1.0).to(dtype)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    planner = LayoutAwareSavePlanner(shapes, grid=Grids.from_sizes(0))
    alone.saved(tmp_path, [{"model": tensors}], [planner], stock=True)
    assert finalize(tmp_path)
    for options in ({"checkpoint_id": tmp_path}, {"storage_reader": SafetensorsReader(tmp_path)}):
        state = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
        dcp.load(state, **options)
        for name, tensor in tensors.items():
            found = state["model"][name]
            assert (
                tensor.view(-1).view(torch.uint8).tolist()
                == found.view(-1).view(torch.uint8).tolist()
            )
