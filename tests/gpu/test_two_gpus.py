"""The same on two CUDA devices with NCCL: FSDP2 on the GPUs, every way to save, other layouts.

Needs two GPUs; elsewhere the tests are left out. On a machine where the package can't be
installed, `PYTHONPATH=scripts/typing python -m pytest tests/gpu` serves.
"""

import datetime
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WAYS = ("stock", "stock async", "own", "own alone", "own async")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 130), torch.nn.SiLU(), torch.nn.Linear(130, 7, bias=False)]
    return torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)


def _trained(mesh):
    model = _model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(16, 96, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _save(way: str, state: dict, model, path: str) -> None:
    planner = LayoutAwareSavePlanner(model)
    writer = {} if way.startswith("stock") else {"storage_writer": SafetensorsWriter(path)}
    if not writer:
        writer = {"checkpoint_id": path}
    if way.endswith("async"):
        dcp.async_save(state, planner=planner, **writer).result()
    else:
        dcp.save(state, planner=planner, use_collectives=way != "own alone", **writer)


def _full(tree, prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _full(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{prefix}{key}"] = whole.detach().cpu()
    return found


def _blank(tree, change):
    return {
        key: _blank(value, change)
        if isinstance(value, dict)
        else change(value)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in tree.items()
    }


def _work(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(NCCL_NVLS_ENABLE="0", RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(f"{folder}/store", 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=90),
    )
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp_shard",))
    model, optimizer = _trained(mesh)
    options = get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": {"state": options["state"]}}
    want = _full(state)

    def columns(value: torch.Tensor) -> torch.Tensor:
        """A tensor of the same global shape, cut along its last dim instead of its first."""
        if not isinstance(value, DTensor):
            return torch.full_like(value, -1)
        blank = torch.full(value.shape, -1, dtype=value.dtype, device="cuda")
        return distribute_tensor(blank, mesh, [Shard(value.ndim - 1)])

    for way in WAYS:
        path = f"{folder}/{way}"
        _save(way, state, model, path)
        for change in (lambda value: torch.full_like(value, -1), columns):
            got = _blank(state, change)
            reader = {"checkpoint_id": path}
            if not way.startswith("stock"):
                reader = {"storage_reader": SafetensorsReader(path)}
            planner = LayoutAwareLoadPlanner(model)
            dcp.load(got, planner=planner, **reader)
            found = _full(got)
            assert want.keys() == found.keys()
            wrong = [key for key in want if not torch.equal(want[key], found[key])]
            assert not wrong, f"{way}: {wrong}"
    dist.barrier()
    dist.destroy_process_group()


def test_every_way_to_save_and_two_ways_to_load():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (folder,), nprocs=2)
        assert all(Path(folder, way).is_dir() for way in WAYS)
