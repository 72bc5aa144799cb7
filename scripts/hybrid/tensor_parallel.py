"""Local shards of linear layers and of the vocabulary, with Megatron's attributes on them.

| part | local weight |
|---|---|
| `ColumnParallelLinear` | `[out / T, in]` |
| `RowParallelLinear` | `[out, in / T]` |
| `VocabParallelEmbedding` | `[padded vocabulary / T, hidden]` |
| `vocab_parallel_cross_entropy` | loss from logits cut along the vocabulary |
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from collectives import copy_to_group, reduce_from_group
from config import HybridConfig
from groups import group_rank, group_size


def local_parameter(*shape: int) -> nn.Parameter:
    """A parameter that `initial.fill` gives its values."""
    return nn.Parameter(torch.zeros(shape))


def sharded_parameter(*local_shape: int, dim: int, expert: bool = False) -> nn.Parameter:
    """A tensor-parallel shard, marked as Megatron marks it.

    Args:
        local_shape: Shape of this rank's shard.
        dim: Tensor dim that the shards are cut along.
        expert: The parameter belongs to an expert; Megatron sets `allreduce=False` there.
    """
    parameter = local_parameter(*local_shape)
    marks: dict[str, object] = {
        "tensor_model_parallel": True,
        "partition_dim": dim,
        "partition_stride": 1,
    }
    if expert:
        marks["allreduce"] = False
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


class ColumnParallelLinear(nn.Module):
    """Replicated input, output features cut over the group."""

    def __init__(self, inputs: int, outputs: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.weight = sharded_parameter(outputs // group_size(group), inputs, dim=0)

    def forward(self, value: Tensor) -> Tensor:
        """`[tokens, in]` → `[tokens, out / T]`."""
        return functional.linear(copy_to_group(value, self.group), self.weight)


class RowParallelLinear(nn.Module):
    """Input features cut over the group, replicated output."""

    def __init__(self, inputs: int, outputs: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.weight = sharded_parameter(outputs, inputs // group_size(group), dim=1)

    def forward(self, value: Tensor) -> Tensor:
        """`[tokens, in / T]` → `[tokens, out]`."""
        return reduce_from_group(functional.linear(value, self.weight), self.group)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with a padded vocabulary, tied to the output head.

    Attributes:
        vocab_size: The true vocabulary; rows from there on are padding.
        vocab_start_index: First global row of this rank.
    """

    def __init__(self, config: HybridConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = config.vocab_size
        rows = config.padded_vocab_size(group_size(group)) // group_size(group)
        self.vocab_start_index = group_rank(group) * rows
        self.weight = sharded_parameter(rows, config.hidden_size, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[tokens]` → `[tokens, hidden]`."""
        row = tokens - self.vocab_start_index
        here = (row >= 0) & (row < self.weight.shape[0])
        embedded = functional.embedding(row * here, self.weight) * here.unsqueeze(-1)
        return reduce_from_group(embedded, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden]` → `[tokens, rows]` with minus infinity for padding rows."""
        logits = functional.linear(copy_to_group(hidden, self.group), self.weight)
        row = torch.arange(logits.shape[-1]) + self.vocab_start_index
        return logits.masked_fill(row >= self.vocab_size, -torch.inf)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, start: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Loss of each token, from logits cut along the vocabulary.

    Args:
        logits: This rank's columns `[tokens, columns]`.
        targets: Global token ids `[tokens]`.
        start: Global index of this rank's first column.
        group: Ranks that hold the other columns.

    Returns:
        `[tokens]`, replicated.
    """
    largest = logits.detach().amax(-1)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)
    total = reduce_from_group(shifted.exp().sum(-1), group)
    column = targets - start
    here = (column >= 0) & (column < logits.shape[-1])
    picked = shifted.gather(-1, (column * here).unsqueeze(-1)).squeeze(-1)
    target = reduce_from_group(torch.where(here, picked, 0.0), group)
    return total.log() - target
