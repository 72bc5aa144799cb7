"""DTensors as torch really makes them: fully_shard and distribute_tensor, every rank in turn.

torch's fake process group lets one process be each rank of a world, one after another. Nothing
is sent; each rank's local tensor is full of global element numbers, which the layout must name.
"""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from oracle import dtensor_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    Grids,
    LayoutRegistry,
    model_layouts,
    prove,
)

REGISTRY = LayoutRegistry(DEFAULT_LAYOUTS)


@contextlib.contextmanager
def rank_of(names, sizes, rank):
    """The mesh as one rank sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def numbered(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


def check(module, mesh, shape):
    """The slabs of this rank read just what they name, and all of what it holds."""
    grids = Grids.from_mesh(mesh)
    layout = model_layouts(module, grids, REGISTRY)["weight"]
    held = module.weight.to_local().detach().clone().view(-1)
    taken = torch.zeros_like(held)
    for slab in layout.slabs(grids.dense):
        assert shape == slab.global_shape
        place = tuple(slice(o, o + n) for o, n in zip(slab.offsets, slab.sizes, strict=True))
        view = held.as_strided(slab.sizes, slab.strides, slab.start)
        assert torch.equal(numbered(shape)[place], view), (mesh.get_coordinate(), slab)
        taken.as_strided(slab.sizes, slab.strides, slab.start).add_(1)
    assert bool((taken == 1).all()), (mesh.get_coordinate(), held)
    prove(layout, grids.dense)
    return layout


class Module(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def fsdp(shape, names, sizes, tp_dim=None, packed=1):
    """FSDP2 over the dense axes of a mesh, over a tensor-parallel DTensor if there is a tp axis."""
    layouts = set()
    for rank in range(math.prod(sizes)):
        with rank_of(names, sizes, rank) as mesh:
            weight = numbered(shape)
            if tp_dim is not None:
                tp = mesh["tp"]
                shards = dtensor_shards(weight, tp_dim, tp.size(), packed)
                weight = DTensor.from_local(
                    shards[tp.get_local_rank()].contiguous(),
                    tp,
                    [_StridedShard(tp_dim, split_factor=packed) if packed > 1 else Shard(tp_dim)],
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
            module = Module(weight)
            fully_shard(module, mesh=mesh[tuple(name for name in names if name != "tp")])
            layouts.add(check(module, mesh, shape))
    assert 1 == len(layouts)  # equal on every rank


@pytest.mark.parametrize("rows", [8, 6, 5, 2, 1])
def test_fsdp2_cuts_rows_evenly_or_not(rows):
    fsdp((rows, 2), ("dp_shard",), (4,))


def test_hsdp_replicates_along_the_outer_axis():
    fsdp((5, 2), ("dp_replicate", "dp_shard"), (2, 2))


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("rows", [12, 8, 7, 5, 3])
def test_fsdp2_over_tensor_parallelism(rows, sizes, tp_dim):
    """FSDP cuts what tensor parallelism left: with 7 rows, TP 2 and FSDP 3, row 6 is on (2, 1)."""
    fsdp((rows, 3), ("dp_shard", "tp"), sizes, tp_dim)


def test_hsdp_over_tensor_parallelism():
    fsdp((7, 2), ("dp_replicate", "dp_shard", "tp"), (2, 2, 2), 0)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("rows", [16, 10, 7])
def test_fsdp2_over_packed_projections(rows, sizes):
    """[gate; up] as one strided tensor-parallel shard: a rank's own rows are cut, not the packed.

    8 rows on (2, 2): TP rank 0 has rows 0, 1, 4, 5, and of these FSDP's rank 0 has 0 and 1. The
    placements read from left to right would say 0 and 4.
    """
    fsdp((rows, 3), ("dp_shard", "tp"), sizes, 0, packed=2)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Shard(0)),
        (Shard(1), Replicate()),
        (Replicate(), Replicate()),
    ],
)
@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 2)])
def test_distributed_tensors(shape, placements):
    layouts = set()
    for rank in range(6):
        with rank_of(("dp_shard", "tp"), (2, 3), rank) as mesh:
            weight = distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)
            layouts.add(check(Module(weight), mesh, shape))
    assert 1 == len(layouts)
