"""The bitwise proof's own reader: whole global tensors from every rank's shards.

Shares no code with the library under test. Shards travel to rank 0 as they are, and are put
together there with `torch.cat`, innermost cut first: FSDP, then tensor or expert-tensor
parallelism, then experts by their global index.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import HybridConfig, Parallelism
from parts import EXPERT, join, parts_of, same_bits, split_local

OPTIONS = ("lr", "weight_decay", "eps")
PER_PARAMETER = ("buffer", "step", *OPTIONS)
"""Slots with one value for the whole parameter, the same on every rank that holds some of it."""

Shards = dict[str, dict[str, Tensor]]
"""Local tensors of one rank, by slot ('parameter', 'exp_avg', ...) and local fqn."""


@dataclass(frozen=True, slots=True)
class GlobalTensors:
    """What all ranks hold together.

    Attributes:
        tensors: Whole tensors under `slot/global name`.
        disagreeing: Names whose replicas are not the same on all ranks.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)

    def num_values(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def differences(self, expected: "GlobalTensors") -> list[str]:
        """Names that differ in a bit, shape or dtype, stand on one side only, or disagree."""
        names = self.tensors.keys() | expected.tensors.keys()
        common = self.tensors.keys() & expected.tensors.keys()
        equal = {name for name in common if same_bits(self.tensors[name], expected.tensors[name])}
        return sorted((names - equal) | {*self.disagreeing, *expected.disagreeing})


def gather(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: HybridConfig,
    parallelism: Parallelism,
) -> GlobalTensors | None:
    """Every parameter, buffer and optimizer value as whole global tensors.

    Called by all ranks together; None except on rank 0.
    """
    shards = local_shards(model, optimizer)
    gathered: list[Shards] | None = None
    if dist.get_rank() == 0:
        gathered = [shards] * parallelism.world_size
    dist.gather_object(shards, gathered)
    return None if gathered is None else assemble(gathered, config, parallelism)


def local_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Shards:
    """Copies of what this rank holds."""
    slots = ("parameter", "exp_avg", "exp_avg_sq", *PER_PARAMETER)
    shards: Shards = {slot: {} for slot in slots}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        shards["parameter"][name] = _storage(parameter)
        for slot, value in optimizer.state.get(parameter, {}).items():
            shards[slot][name] = _storage(value)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for option in OPTIONS:
                value = torch.tensor(group[option], dtype=torch.float64)
                shards[option][names[parameter]] = value
    for name, buffer in model.named_buffers():
        shards["buffer"][name] = _storage(buffer)
    return shards


def assemble(
    shards: Sequence[Shards], config: HybridConfig, parallelism: Parallelism
) -> GlobalTensors:
    """Whole global tensors from the shards of all ranks, in the order of ranks.

    Raises:
        ValueError: Ranks hold different names, or a tensor is too short.
    """
    of_expert = {parallelism.expert_coordinate(rank): shard for rank, shard in enumerate(shards)}
    of_dense = {parallelism.dense_coordinate(rank): shard for rank, shard in enumerate(shards)}
    dp, tp, edp, ep, etp = (
        range(size)
        for size in (
            parallelism.dp_size,
            parallelism.tp_size,
            parallelism.edp_size,
            parallelism.ep_size,
            parallelism.etp_size,
        )
    )
    result = GlobalTensors()
    for slot, names in shards[0].items():
        for rank, other in enumerate(shards):
            if other[slot].keys() != names.keys():
                odd = sorted(other[slot].keys() ^ names.keys())
                raise ValueError(f"{slot}: ranks 0 and {rank} hold different names: {odd[:8]}")
        for name in names:
            if not EXPERT.match(name):
                grid = [[of_dense[d, t][slot][name] for d in dp] for t in tp]
                _add(result, slot, name, grid, config, ())
                continue
            for e in ep:
                grid = [[of_expert[d, e, t][slot][name] for d in edp] for t in etp]
                experts = parallelism.local_expert_indices(
                    e * parallelism.etp_size, config.num_moe_experts
                )
                _add(result, slot, name, grid, config, experts)
    return result


def _add(
    result: GlobalTensors,
    slot: str,
    name: str,
    grid: list[list[Tensor]],
    config: HybridConfig,
    experts: Sequence[int],
) -> None:
    """Adds the global tensors of one local name, from its shards by TP rank and FSDP rank."""
    parts = parts_of(name, config, experts)
    if slot in PER_PARAMETER:
        replicas = [replica for row in grid for replica in row]
        parts, pieces = parts[:1], [[replica] for replica in replicas]
    else:
        replicas = [torch.cat(row) for row in grid]
        pieces = [split_local(local, parts) for local in replicas]
    for place, part in enumerate(parts):
        key = f"{slot}/{part.name}"
        own = [piece[place] for piece in pieces]
        if slot in PER_PARAMETER or part.dim is None:
            result.tensors[key] = own[0]
            if not all(same_bits(replica, own[0]) for replica in own):
                result.disagreeing.append(key)
        else:
            result.tensors[key] = join(own, part)


def _storage(value: Tensor) -> Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().clone()
