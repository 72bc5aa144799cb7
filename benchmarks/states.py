"""The states that are saved and loaded: a hybrid model's shapes under FSDP2, and other kinds.

| name | is |
|---|---|
| `Sizes` | the numbers of a hybrid model; `Sizes.of_bytes` picks them for a total size |
| `Sharding` | how ranks share a model: `fsdp`, `tp2`, `tp4ep2`, `rep2`, `shard1` |
| `Subject` | a model, its optimizer state, and what both need to be saved |
| `build` | makes a subject on this rank |
| `whole_sums` | checksums of all tensors, equal for equal states under any sharding |

Models are what users have: modules on the meta device, tensor-parallel parameters as DTensors,
`fully_shard` over the rest, then memory. Nothing is ever held whole on one rank.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the hybrid model: three Gated DeltaNet layers, then one of attention; MoE but for the first layer.

    Attributes:
        hidden: Hidden size; all other widths follow from it.
        layers: Number of layers.
        experts: Experts of each MoE layer, stacked in one tensor.
        vocabulary: Rows of the embedding.
        small: Further parameters of 64 elements each.
    """

    hidden: int
    layers: int
    experts: int = 8
    vocabulary: int = 4096
    small: int = 0

    @classmethod
    def of_bytes(cls, nbytes: int, small: int = 0) -> "Sizes":
        """Returns sizes whose parameters and two moments in float32 have about `nbytes` in all."""
        hidden = next((h for h in (2048, 1024, 512, 256, 128) if nbytes >= 2**30 * (h / 1024)), 64)
        one, two = (cls(hidden, n, small=small).numel() for n in (1, 2))
        wanted = nbytes / 4 / (1 + len(MOMENTS))
        return cls(hidden, max(2, 1 + round((wanted - one) / (two - one))), small=small)

    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for _, shape, _ in self.parameters())

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Yields name, global shape and tensor-parallel dim of each parameter."""
        h = self.hidden
        heads, head = h // 64, 64
        qk, v, ffn, expert = h, 2 * h, 4 * h, h
        yield "embedding.weight", (self.vocabulary, h), 0
        for i in range(self.layers):
            layer = f"layers.{i}."
            yield layer + "input_layernorm.weight", (h,), None
            if i % 4 == 3:
                yield layer + "self_attention.linear_qkv.weight", (2 * h, h), 0
                yield layer + "self_attention.linear_proj.weight", (h, h), 1
                yield layer + "self_attention.q_layernorm.weight", (head,), None
                yield layer + "self_attention.k_layernorm.weight", (head,), None
            else:
                yield layer + "self_attention.in_proj.weight", (2 * qk + 2 * v + 2 * heads, h), 0
                yield layer + "self_attention.conv1d.weight", (2 * qk + v, 1, 4), 0
                yield layer + "self_attention.A_log", (heads,), 0
                yield layer + "self_attention.dt_bias", (heads,), 0
                yield layer + "self_attention.out_norm.weight", (head,), None
                yield layer + "self_attention.out_proj.weight", (h, v), 1
            yield layer + "pre_mlp_layernorm.weight", (h,), None
            if i == 0:
                yield layer + "mlp.linear_fc1.weight", (2 * ffn, h), 0
                yield layer + "mlp.linear_fc2.weight", (h, ffn), 1
            else:
                yield layer + "mlp.router.weight", (self.experts, h), None
                yield layer + "mlp.experts.linear_fc1.weight", (self.experts, 2 * expert, h), 1
                yield layer + "mlp.experts.linear_fc2.weight", (self.experts, h, expert), 2
        for i in range(self.small):
            yield f"small.{i}.weight", (64,), None
        yield "final_layernorm.weight", (h,), None
        yield "output_layer.weight", (self.vocabulary, h), 0


@dataclass(frozen=True, slots=True)
class Sharding:
    """How ranks share a model.

    | text | ranks |
    |---|---|
    | `fsdp` | all shard dim 0 |
    | `shard1` | all shard dim 1 where there is one, else dim 0 |
    | `tp2` | tensor parallelism of 2, FSDP over the rest |
    | `tp4ep2` | the same of 4; experts over 2, FSDP of experts over the rest |
    | `rep2` | 2 replicas, each FSDP over the rest |
    | `fsdp/3` | as `fsdp`, on the first 3 ranks only |
    """

    text: str
    tp: int = 1
    ep: int = 1
    replicas: int = 1
    dim: int = 0
    ranks: int | None = None

    @classmethod
    def of(cls, text: str) -> "Sharding":
        """Returns the sharding that a text names.

        Raises:
            ValueError: If it names none.
        """
        match = re.fullmatch(
            r"(fsdp|shard1)?(?:rep(\d+))?(?:tp(\d+))?(?:ep(\d+))?(?:/(\d+))?", text
        )
        if not text or match is None:
            raise ValueError(
                f"{text!r} is no sharding; say fsdp, shard1, tp2, tp4ep2, rep2, fsdp/3"
            )
        kind, replicas, tp, ep, ranks = match.groups()
        return cls(
            text,
            tp=int(tp or 1),
            ep=int(ep or 1),
            replicas=int(replicas or 1),
            dim=int(kind == "shard1"),
            ranks=int(ranks) if ranks else None,
        )


@dataclass(slots=True)
class Subject:
    """A model with its optimizer state on one rank.

    Attributes:
        model: The sharded model.
        state: What is saved: `{"model": ..., "optimizer": {"state": ...}}`.
        group: The ranks that share it; None for all.
        member: Whether this rank is one of them.
    """

    model: nn.Module
    state: dict[str, Any]
    group: dist.ProcessGroup | None = None
    member: bool = True
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(local.numel() * local.itemsize for _, local in self.locals())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields key and tensor of everything in the state."""
        yield from self.state["model"].items()
        for fqn, slots in self.state["optimizer"]["state"].items():
            for slot, tensor in slots.items():
                yield f"{fqn}.{slot}", tensor

    def locals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields key and local tensor of everything in the state, without autograd."""
        for key, tensor in self.tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            yield key, local.detach()

    def fill(self, seed: int | None) -> None:
        """Fills everything with random numbers, with zeros if there is no seed."""
        pairs = zip(self.tensors(), self.locals(), strict=True)
        for number, ((_, tensor), (_, local)) in enumerate(pairs):
            if seed is None:
                local.zero_()
            else:
                # Shards draw from seeds of their own, replicas from one.
                mixed = (seed * 100_003 + number) * 100_003 + _shard_index(tensor)
                local.normal_(generator=torch.Generator(local.device).manual_seed(mixed))


class _Container(nn.Module):
    """A module that has what Megatron's modules say of themselves."""


def build(sizes: Sizes, sharding: Sharding, device: str, seed: int | None = None) -> Subject:
    """Makes a model with Adam's state on this rank; all ranks call it.

    Args:
        sizes: Sizes of the model.
        sharding: How ranks share it.
        device: `'cpu'` or `'cuda'`.
        seed: Seed of its values; zeros if None.
    """
    world = dist.get_world_size() if sharding.ranks is None else sharding.ranks
    dense = _mesh(device, world, ("dp_replicate", "dp_shard", "tp"), sharding.replicas, sharding.tp)
    expert = dense
    if sharding.ep > 1:
        expert = _mesh(device, world, ("edp_replicate", "edp_shard", "ep"), 1, sharding.ep)
    group = None
    if world < dist.get_world_size():
        group = dist.new_group(list(range(world)))  # like the meshes, called by all ranks
    if dist.get_rank() >= world:
        return Subject(nn.Module(), {"model": {}, "optimizer": {"state": {}}}, group, False)
    model = _module(sizes, sharding, dense, expert)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    state = {
        fqn: {slot: torch.empty_like(p.detach()) for slot in MOMENTS}
        | {"step": torch.zeros((), device="cpu")}
        for fqn, p in parameters.items()
    }
    subject = Subject(model, {"model": model.state_dict(), "optimizer": {"state": state}}, group)
    subject.fill(seed)
    return subject


def _mesh(device: str, world: int, names: tuple[str, ...], replicas: int, inner: int) -> DeviceMesh:
    """Returns a mesh over the first `world` ranks; replicas have an axis only if there are any."""
    if world % (replicas * inner):
        raise ValueError(f"{world} ranks can't be {replicas} replicas of {names[2]} {inner}")
    shape = (replicas, world // replicas // inner, inner)
    first = 0 if replicas > 1 else 1
    if world == dist.get_world_size():
        return init_device_mesh(device, shape[first:], mesh_dim_names=names[first:])
    ranks = torch.arange(world).reshape(shape[first:])
    return DeviceMesh(device, ranks, mesh_dim_names=names[first:])


def _module(sizes: Sizes, sharding: Sharding, dense: DeviceMesh, expert: DeviceMesh) -> nn.Module:
    root = _Container()
    for fqn, shape, dim in sizes.parameters():
        *path, leaf = fqn.split(".")
        owner: nn.Module = root
        for name in path:
            if not hasattr(owner, name):
                owner.add_module(name, _Container())
            owner = getattr(owner, name)
        tensor = torch.empty(shape, device="meta")
        if ".experts." in fqn and sharding.ep > 1:
            tensor = distribute_tensor(tensor, expert["ep"], [Shard(0)])
        elif sharding.tp > 1:
            placement = Replicate() if dim is None else Shard(dim)
            tensor = distribute_tensor(tensor, dense["tp"], [placement])
        owner.register_parameter(leaf, nn.Parameter(tensor))
    _describe(root, sizes, sharding)

    def placed(dim: int, size: int) -> Callable[[nn.Parameter], Shard]:
        # FSDP2 cuts no other dim than 0 unevenly.
        return lambda param: Shard(dim if param.dim() > dim and param.shape[dim] % size == 0 else 0)

    axes = ("dp_replicate", "dp_shard") if sharding.replicas > 1 else ("dp_shard",)
    mesh = dense[axes] if len(axes) > 1 else dense["dp_shard"]
    layers = root.get_submodule("layers") if sizes.layers else _Container()
    for layer in layers.children():
        experts = dict(layer.named_modules()).get("mlp.experts")
        if experts is not None:
            inner = expert["edp_shard"] if sharding.ep > 1 else mesh
            fully_shard(experts, mesh=inner, shard_placement_fn=placed(1, inner.size(-1)))
        fully_shard(layer, mesh=mesh, shard_placement_fn=placed(sharding.dim, mesh.size(-1)))
    return fully_shard(root, mesh=mesh, shard_placement_fn=placed(sharding.dim, mesh.size(-1)))


def _describe(root: nn.Module, sizes: Sizes, sharding: Sharding) -> None:
    """Gives modules the attributes that Megatron's have, which the default layouts read."""
    h = sizes.hidden
    for name, module in root.named_modules():
        if name.endswith(("mlp", "experts")):
            module.gated_linear_unit = True
        if name.endswith("self_attention") and hasattr(module, "in_proj"):
            heads = h // 64
            module.in_proj_split_names = ("query", "key", "value", "z", "beta", "alpha")
            module.in_proj_split_sections = (h, h, 2 * h, 2 * h, heads, heads)


def _shard_index(tensor: torch.Tensor) -> int:
    """Returns which of a tensor's shards this rank holds; equal on replicas."""
    if not isinstance(tensor, DTensor):
        return 0
    index = 0
    coordinate = tensor.device_mesh.get_coordinate() or []
    for size, at, placement in zip(
        tensor.device_mesh.shape, coordinate, tensor.placements, strict=True
    ):
        index = index if placement.is_replicate() else index * size + at
    return index


def whole_sums(subject: Subject) -> dict[str, int]:
    """Returns a checksum of each tensor over all ranks, replicas counted once.

    It is a sum of the tensor's words, so it does not depend on the order of elements; that values
    lie where they belong is tested elsewhere. All ranks of the subject call it.
    """
    sums: dict[str, int] = {}
    for key, tensor in subject.tensors():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        counts = dist.get_rank() == 0
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate() or []
            counts = not any(
                index
                for index, placement in zip(coordinate, tensor.placements, strict=True)
                if placement.is_replicate()
            )
        words = local.contiguous().view(-1).view(torch.int32)
        sums[key] = int(words.sum(dtype=torch.int64)) if counts and words.numel() else 0
    total = torch.tensor(list(sums.values()), dtype=torch.int64)
    dist.all_reduce(total, group=subject.group)
    return dict(zip(sums, total.tolist(), strict=True))
