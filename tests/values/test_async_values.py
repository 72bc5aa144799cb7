"""`async_save` of what is neither shard nor plain value: the same as `save` writes."""

import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner, PerRank


def state():
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": {"a": weight, "tied": weight, "t": weight.clone().t(), "n": torch.tensor(2)},
        "rng": PerRank(random.Random(1).getstate()),
        "plain": {"step": 3, "lrs": [0.5, 0.25], 0: "zero", "empty": {}, "none": None},
    }


def contents(path):
    """Everything that a checkpoint holds: its keys, and each as stock reads it."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    held = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        if hasattr(stored, "size")
        else 0
        for key, stored in metadata.state_dict_metadata.items()
    }
    dcp.load(held, checkpoint_id=path)
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in held.items()}


@pytest.mark.filterwarnings("ignore")  # torch's, of its own stager
def test_async_save_writes_what_save_writes_whatever_happens_meanwhile(tmp_path):
    planner = LayoutAwareSavePlanner()
    dcp.save(state(), checkpoint_id=str(tmp_path / "sync"), planner=planner)
    live = state()
    future = dcp.async_save(
        live,
        checkpoint_id=str(tmp_path / "async"),
        planner=planner,
        async_checkpointer_type=AsyncCheckpointerType.THREAD,
    )
    live["model"]["a"].fill_(-1)
    live["plain"]["lrs"].append(9)
    live["rng"].value = "changed"
    future.result()
    wanted, found = (contents(str(tmp_path / name)) for name in ("sync", "async"))
    assert wanted == found
    assert [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] == found["model.tied"]
    target = state()
    target["rng"].value = None
    planner = LayoutAwareLoadPlanner()
    dcp.load(target, checkpoint_id=str(tmp_path / "async"), planner=planner)
    assert random.Random(1).getstate() == target["rng"].value
