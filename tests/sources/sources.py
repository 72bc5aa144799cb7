"""Ways in which training jobs make a state dict, all of one logical state.

Every source holds the same global tensors under the same keys, whatever its ranks hold of them, so
that a checkpoint of one opens in any other. `number(key, shape)` says what a tensor must hold.

| name | is |
|---|---|
| `Source` | a way to make the state dict, and what its planners are given |
| `SOURCES` | all of them by name |
| `expected` | the global tensors of a source by key |
"""

import copy
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardplan.layouts import BufferDescription, FSDPFlatBuffer
from shardplan.planner import PerRank

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 7), "b.bias": (3,)}
EXPERTS = {"experts.w1": (4, 6, 5)}
SLOTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Any]
Values = Mapping[str, torch.Tensor]


def number(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What the tensor of a key holds: every element of every tensor is another number."""
    first = zlib.crc32(key.encode()) % 4096 * 1024
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)


def values(section: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    return {name: number(f"{section}.{name}", shape) for name, shape in shapes.items()}


class Net(nn.Module):
    """Two linear layers of sizes that no number of ranks divides."""

    def __init__(self, held: Values) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 3)
        if any(name.startswith("experts.") for name in held):
            self.experts = nn.Module()
            self.experts.w1 = nn.Parameter(torch.empty(EXPERTS["experts.w1"]))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(held[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


Cut = Callable[[Values], Any]  # from the global tensors to a module that holds the rank's part


@dataclass(frozen=True)
class Source:
    """A way to make a state dict.

    Attributes:
        world: How many ranks it has.
        make: Returns the rank's state dict and what both planners are given.
        shapes: Global shape of each parameter.
        model_key: Key of a parameter on disk, with `{}` for its name.
        stock: Whether stock planners save and load it rightly.
        slots: Key of an optimizer slot on disk.
    """

    world: int
    make: Callable[[], tuple[State, dict[str, Any]]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    model_key: str = "model.{}"
    stock: bool = True
    slots: str = "optimizer.state.{}.{}"


def expected(source: Source) -> dict[str, torch.Tensor]:
    """Returns the global tensors that a source's checkpoint holds, by key."""
    found = {
        source.model_key.format(name): number(f"model.{name}", shape)
        for name, shape in source.shapes.items()
    }
    for slot in SLOTS if source.slots else ():
        for name, shape in source.shapes.items():
            found[source.slots.format(name, slot)] = number(f"{slot}.{name}", shape)
    return found


def state_of(cut: Cut, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> tuple[nn.Module, State]:
    """Returns a module and the state dict of it and its optimizer, in torch's own form."""
    module = cut(values("model", shapes))
    slots = {slot: cut(values(slot, shapes)).state_dict() for slot in SLOTS}
    tensors = module.state_dict()
    state = {
        name: {"step": torch.tensor(5.0), **{slot: held[name] for slot, held in slots.items()}}
        for name in tensors
    }
    group = {"lr": 0.25, "betas": (0.9, 0.95), "params": list(tensors)}
    return module, {
        "model": dict(tensors),
        "optimizer": {"state": state, "param_groups": [group]},
        "step": 7,
        "schedule": {"last_epoch": 3, "base_lrs": [0.1, 0.2]},
    }


# One mesh -----------------------------------------------------------------------------------------


def plain() -> tuple[State, dict[str, Any]]:
    module, state = state_of(Net)
    return state, {"model": module}


def nothing_given() -> tuple[State, dict[str, Any]]:
    return plain()[0], {}


def ddp() -> tuple[State, dict[str, Any]]:
    module, state = state_of(Net)
    return state, {"model": DistributedDataParallel(module)}


def _mesh(*shape: int, names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fsdp2(mesh: Any) -> Cut:
    def cut(held: Values) -> nn.Module:
        module = Net(held)
        fully_shard(module.a, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    return cut


def fsdp2(given: bool = True) -> tuple[State, dict[str, Any]]:
    module, state = state_of(_fsdp2(_mesh(dist.get_world_size(), names=("dp_shard",))))
    return state, {"model": module} if given else {}


def hsdp() -> tuple[State, dict[str, Any]]:
    mesh = _mesh(2, dist.get_world_size() // 2, names=("dp_replicate", "dp_shard"))
    module, state = state_of(_fsdp2(mesh))
    return state, {"model": module}


def _tensor_parallel(module: nn.Module, mesh: Any) -> nn.Module:
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    return parallelize_module(module, mesh, plan, src_data_rank=None)


def fsdp2_tp() -> tuple[State, dict[str, Any]]:
    mesh = _mesh(dist.get_world_size() // 2, 2, names=("dp_shard", "tp"))

    def cut(held: Values) -> nn.Module:
        module = _tensor_parallel(Net(held), mesh["tp"])
        fully_shard(module.a, mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    module, state = state_of(cut)
    return state, {"model": module}


def submesh() -> tuple[State, dict[str, Any]]:
    """Tensor parallelism on one axis of a mesh; on the other axis all of it is equal."""
    mesh = _mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    module, state = state_of(lambda held: _tensor_parallel(Net(held), mesh["tp"]))
    return state, {"model": module}


# Several meshes -----------------------------------------------------------------------------------


def _sparse(dense: Any, sparse: Any) -> Cut:
    def cut(held: Values) -> nn.Module:
        module = Net(held)
        experts = module.experts
        placed = distribute_tensor(
            experts.w1.detach(), sparse, [Shard(1), Shard(0)], src_data_rank=None
        )
        experts.w1 = nn.Parameter(placed)
        ignored = {experts.w1}
        return fully_shard(module, mesh=dense, ignored_params=ignored)

    return cut


def experts() -> tuple[State, dict[str, Any]]:
    """Experts on a mesh of their own: both are cut from one `world` axis, as torchtitan does."""
    world = _mesh(dist.get_world_size(), names=("world",))
    half = dist.get_world_size() // 2
    dense = world._unflatten(0, (1, 2 * half), ("dp_replicate", "fsdp"))
    sparse = world._unflatten(0, (1, half, 2), ("dp_replicate", "efsdp", "ep"))
    module, state = state_of(_sparse(dense["fsdp"], sparse[("efsdp", "ep")]), SHAPES | EXPERTS)
    return state, {"model": module}


class _Stateful:
    """An object that `dcp.save` asks for its state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def torchtitan() -> tuple[State, dict[str, Any]]:
    """Model parameters at the top, a flattened optimizer state, a data loader by dp rank."""
    world = _mesh(dist.get_world_size(), names=("world",))
    mesh = world._unflatten(0, (1, dist.get_world_size()), ("dp_replicate", "fsdp"))
    module, state = state_of(_fsdp2(mesh["fsdp"]))
    flat = {
        f"state.{name}.{slot}": tensor
        for name, slots in state["optimizer"]["state"].items()
        for slot, tensor in slots.items()
    }
    flat |= {f"param_groups.{name}.lr": 0.25 for name in state["model"]}
    rank = dist.get_rank()
    loader = {"world_size": dist.get_world_size(), f"dp_rank_{rank}": bytes([rank, 255])}
    return {
        **state["model"],
        "optimizer": _Stateful(flat),
        "lr_scheduler": _Stateful({"last_epoch": 3, "_last_lr": [0.1]}),
        "train_state": _Stateful({"step": torch.tensor(7), "ntokens_seen": torch.tensor(9)}),
        "dataloader": _Stateful(loader),
    }, {"model": module}


def accelerate() -> tuple[State, dict[str, Any]]:
    """FSDP2 on a flattened dim: the mesh of its tensors has an axis that the whole mesh has not."""
    half = dist.get_world_size() // 2
    mesh = _mesh(1, half, 2, names=("dp_replicate", "dp_shard", "cp"))
    flat = mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    module, state = state_of(_fsdp2(flat))
    held = {"model": get_model_state_dict(module), "optimizer": state["optimizer"]}
    return held, {"model": module}


# FSDP1 --------------------------------------------------------------------------------------------


def fsdp1(mesh: bool = False) -> tuple[State, dict[str, Any]]:
    given = {"device_mesh": _mesh(dist.get_world_size(), names=("dp_shard",))} if mesh else {}
    made = {}
    for section in ("model", *SLOTS):
        made[section] = FullyShardedDataParallel(
            Net(values(section)), use_orig_params=True, device_id=torch.device("cpu"), **given
        )
    module = made["model"]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25)
    for parameter, *slots in zip(*(list(m.parameters()) for m in made.values()), strict=True):
        held = {slot: p.detach().clone() for slot, p in zip(SLOTS, slots, strict=True)}
        optimizer.state[parameter] = {"step": torch.tensor(5.0), **held}
    return {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer),
        "step": 7,
    }, {"model": module}


# Tensors that describe themselves -----------------------------------------------------------------


def _rows(name: str, full: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Cuts a tensor into 2·n pieces of rows; rank r holds pieces r and r + n in one tensor.

    Returns:
        The local tensor, and `(row in the global tensor, row in the local one, rows)` of each.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    edges = [len(full) * i // (2 * n) for i in range(2 * n + 1)]
    pieces, at = [], 0
    for i in (rank, rank + n):
        rows = edges[i + 1] - edges[i]
        if rows:
            pieces.append((edges[i], at, rows))
            at += rows
    held = [full[start : start + rows] for start, _, rows in pieces]
    return torch.cat([*held, full[:0]]).clone(), pieces


def _attributes(name: str, full: torch.Tensor) -> torch.Tensor:
    local, pieces = _rows(name, full)
    rest = (0,) * (full.dim() - 1)
    local.global_shape = tuple(full.shape)
    local.global_offsets = tuple((start, *rest) for start, _, _ in pieces)
    local.local_offsets = tuple((at, *rest) for _, at, _ in pieces)
    local.local_sizes = tuple((rows, *full.shape[1:]) for _, _, rows in pieces)
    return local


class _Hooks:
    """DCP's three hooks over the pieces of a tensor."""

    def __init__(self, shape: torch.Size, pieces: list[tuple[int, int, int]]) -> None:
        self.shape, self.pieces = shape, pieces

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size((start, *[0] * (len(self.shape) - 1))),
                torch.Size((rows, *self.shape[1:])),
            )
            for start, _, rows in self.pieces
        ]

    def items(self, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties(dtype=tensor.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self.chunks()
        ]

    def shard(self, tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
        at, rows = next((a, n) for s, a, n in self.pieces if s == index.offset[0])
        return torch.Tensor.narrow(tensor.detach(), 0, at, rows)


def _instance_hooks(name: str, full: torch.Tensor) -> torch.Tensor:
    local, pieces = _rows(name, full)
    hooks = _Hooks(full.shape, pieces)
    local.__create_write_items__ = hooks.items
    local.__create_chunk_list__ = hooks.chunks
    local.__get_tensor_shard__ = lambda index: hooks.shard(local, index)
    return local


class Rows(torch.Tensor):
    """A tensor whose class has DCP's hooks."""

    hooks: _Hooks

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return self.hooks.items(fqn, self)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.hooks.chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.hooks.shard(self, index)


def _class_hooks(name: str, full: torch.Tensor) -> torch.Tensor:
    local, pieces = _rows(name, full)
    found = local.as_subclass(Rows)
    found.hooks = _Hooks(full.shape, pieces)
    return found


def _described(cut: Callable[[str, torch.Tensor], torch.Tensor]) -> tuple[State, dict[str, Any]]:
    state = {
        name: {slot: cut(name, number(f"{slot}.{name}", shape)) for slot in SLOTS}
        for name, shape in SHAPES.items()
    }
    model = {name: cut(name, tensor) for name, tensor in values("model").items()}
    return {"model": model, "optimizer": {"state": state}, "step": 7}, {}


# Flat optimizer shards ----------------------------------------------------------------------------


def _partitions(alignment: int) -> tuple[BufferDescription, dict[str, tuple[int, int]]]:
    """A flat buffer of all parameters and the part `[start, stop)` of each that this rank holds."""
    buffer = BufferDescription(SHAPES, dist.get_world_size(), alignment, axes=("dp_replicate",))
    first = dist.get_rank() * buffer.slice_length
    ranges = {}
    for name, offset in buffer.offsets.items():
        numel = math.prod(SHAPES[name])
        start = min(max(first - offset, 0), numel)
        ranges[name] = start, min(max(first + buffer.slice_length - offset, 0), numel)
    return buffer, ranges


def zero() -> tuple[State, dict[str, Any]]:
    """Whole parameters on every rank and one flat shard of each optimizer tensor (ZeRO 1)."""
    module, state = state_of(Net)
    buffer, ranges = _partitions(alignment=1)
    for name, slots in state["optimizer"]["state"].items():
        start, stop = ranges[name]
        for slot in SLOTS:
            slots[slot] = slots[slot].reshape(-1)[start:stop].clone()
    layouts = (FSDPFlatBuffer(buffers=[buffer]),)
    return state, {"model": module, "optimizer_layouts": layouts}


def deepspeed() -> tuple[State, dict[str, Any]]:
    """One flat partition of each optimizer slot, aligned and padded; parameters are views of it."""
    module, state = state_of(Net)
    buffer, ranges = _partitions(alignment=4)
    first = dist.get_rank() * buffer.slice_length
    for slot in SLOTS:
        partition = torch.full((buffer.slice_length,), -1.0)
        for name, (start, stop) in ranges.items():
            at = max(buffer.offsets[name] - first, 0)
            view = partition[at : at + stop - start] if stop > start else partition[:0]
            view.copy_(number(f"{slot}.{name}", SHAPES[name]).reshape(-1)[start:stop])
            state["optimizer"]["state"][name][slot] = view
    layouts = (FSDPFlatBuffer(buffers=[buffer]),)
    return state, {"model": module, "optimizer_layouts": layouts}


FLAT = {"model_key": "{}", "slots": "optimizer.state.{}.{}"}
SOURCES: dict[str, Source] = {
    "plain tensors": Source(1, plain),
    "replicas, no model given": Source(2, nothing_given),
    "DDP": Source(2, ddp),
    "FSDP2": Source(4, fsdp2),
    "FSDP2, no model given": Source(2, lambda: fsdp2(given=False)),
    "FSDP2 + tensor parallelism": Source(4, fsdp2_tp),
    "HSDP": Source(4, hsdp),
    "DTensor on a submesh": Source(4, submesh),
    "experts on their own mesh": Source(4, experts, SHAPES | EXPERTS),
    "FSDP1 (ShardedTensor)": Source(2, fsdp1),
    "FSDP1 with a mesh": Source(2, lambda: fsdp1(mesh=True)),
    "CheckpointableTensor attributes": Source(2, lambda: _described(_attributes), stock=False),
    "hooks on a tensor": Source(2, lambda: _described(_instance_hooks), stock=False),
    "hooks of a class": Source(2, lambda: _described(_class_hooks), stock=False),
    "torchtitan": Source(2, torchtitan, **FLAT),
    "accelerate": Source(4, accelerate),
    "ZeRO flat shards": Source(4, zero, stock=False),
    "DeepSpeed partitions": Source(2, deepspeed, stock=False),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The local tensors of everything in a state dict, in order."""
    if isinstance(value, _Stateful):
        return tensors_in(value.state)
    if isinstance(value, PerRank):
        return []
    if isinstance(value, Mapping):
        return [t for child in value.values() for t in tensors_in(child)]
    if isinstance(value, list | tuple):
        return [t for child in value for t in tensors_in(child)]
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, DTensor):
        return [value._local_tensor]
    return [value.as_subclass(torch.Tensor)] if isinstance(value, torch.Tensor) else []


def objects_in(value: Any) -> Any:
    """A state dict without its tensors."""
    if isinstance(value, _Stateful):
        return objects_in(value.state)
    if isinstance(value, Mapping):
        return {k: objects_in(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [objects_in(v) for v in value]
    return None if isinstance(value, torch.Tensor) else copy.deepcopy(value)
