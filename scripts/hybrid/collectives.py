"""Collectives with a gradient; each does nothing for a group that is None.

| function | forward | backward |
|---|---|---|
| `copy_to_group` | identity | all-reduce (Megatron's f) |
| `reduce_from_group` | all-reduce | identity (Megatron's g) |
| `split_rows` | this rank's run of rows | all-gather |
| `gather_rows` | all-gather | this rank's run of rows |
| `exchange_rows` | all-to-all | all-to-all the other way |

Row runs may be unequal and empty: of `total` rows rank i holds `[i * c, (i + 1) * c)`, cut off at
`total`, where `c = ceil(total / size)`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def copy_to_group(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Hands a replicated tensor to computations that differ per rank of the group."""
    return value if group is None else _Copy.apply(value, group)


def reduce_from_group(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums partial results over the group; the sum is replicated."""
    return value if group is None else _Reduce.apply(value, group)


def split_rows(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Takes this rank's run of the rows of a replicated tensor."""
    return value if group is None else _Split.apply(value, group)


def gather_rows(value: Tensor, total: int, group: dist.ProcessGroup | None) -> Tensor:
    """Joins the runs of all ranks to the `total` rows of a replicated tensor."""
    return value if group is None else _Gather.apply(value, total, group)


def exchange_rows(
    value: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Sends `sent[i]` rows to rank i of the group and gets `received[i]` rows from it."""
    return value if group is None else _Exchange.apply(value, sent, received, group)


def run_of_rows(total: int, group: dist.ProcessGroup) -> slice:
    """The rows that this rank holds of `total` rows split over the group."""
    chunk = -(-total // group.size())
    return slice(min(total, group.rank() * chunk), min(total, (group.rank() + 1) * chunk))


def _all_reduce(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _all_gather_rows(value: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    chunk = -(-total // group.size())
    padded = value.new_zeros(chunk, *value.shape[1:])
    padded[: value.shape[0]] = value
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered)[:total]


def _all_to_all(
    value: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = value.new_empty(sum(received), *value.shape[1:])
    dist.all_to_all_single(result, value.contiguous(), received, sent, group=group)
    return result


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.total = group, value.shape[0]
        return value[run_of_rows(ctx.total, group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather_rows(grad, ctx.total, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.total = group, total
        return _all_gather_rows(value, total, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[run_of_rows(ctx.total, ctx.group)].clone(), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(value, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None
