"""Sends tokens to the ranks of their experts and brings the results back.

Ranks of an expert group hold packed documents and so different numbers of tokens, at times none.
Every rank pads to the largest count of the group before it sends; padding has weight 0, and is
trimmed after the results are combined.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from collectives import exchange_rows
from groups import group_size


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens that arrived for this rank's experts, and how to send them back.

    Attributes:
        rows: Tokens sorted by local expert `[arrived, hidden]`.
        rows_per_expert: Number of rows of each local expert.
        order: Place of each sorted row in order of arrival `[arrived]`.
        sent_order: Place of each sent row among this rank's token-expert pairs.
        sent: Rows that this rank sent to each rank of the group.
        arrived: Rows that it got from each.
        weights: Weight of each token's experts, padding included `[padded, top-k]`.
        tokens: Number of tokens without padding.
    """

    rows: Tensor
    rows_per_expert: list[int]
    order: Tensor
    sent_order: Tensor
    sent: list[int]
    arrived: list[int]
    weights: Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenDispatcher:
    """All-to-all over the expert-parallel group.

    Attributes:
        num_experts: Experts over all ranks; rank i holds the i-th run of them.
        group: The expert-parallel group; None keeps every token where it is.
    """

    num_experts: int
    group: dist.ProcessGroup | None

    def dispatch(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Dispatched:
        """Sends each token to its experts; called by all ranks of the group together.

        Args:
            hidden: Tokens of this rank `[tokens, hidden]`.
            weights: Weight of each chosen expert `[tokens, top-k]`.
            experts: Global indices of the chosen experts `[tokens, top-k]`.
        """
        tokens, top_k = experts.shape
        missing = self._largest_count(tokens) - tokens
        hidden = functional.pad(hidden, (0, 0, 0, missing))
        weights = functional.pad(weights, (0, 0, 0, missing))
        filler = torch.arange(missing * top_k) % self.num_experts
        pairs = torch.cat((experts.flatten(), filler))

        sent_order = pairs.argsort(stable=True)
        counts = torch.bincount(pairs, minlength=self.num_experts).view(group_size(self.group), -1)
        arrived_counts = self._exchange_counts(counts)
        sent, arrived = counts.sum(1).tolist(), arrived_counts.sum(1).tolist()
        rows = exchange_rows(hidden[sent_order // top_k], sent, arrived, self.group)

        local = torch.arange(counts.shape[1]).repeat(counts.shape[0])
        order = local.repeat_interleave(arrived_counts.flatten()).argsort(stable=True)
        return Dispatched(
            rows=rows[order],
            rows_per_expert=arrived_counts.sum(0).tolist(),
            order=order,
            sent_order=sent_order,
            sent=sent,
            arrived=arrived,
            weights=weights,
            tokens=tokens,
        )

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """Brings expert outputs back and sums them by weight: `[tokens, hidden]`."""
        by_arrival = torch.zeros_like(results).index_copy(0, dispatched.order, results)
        back = exchange_rows(by_arrival, dispatched.arrived, dispatched.sent, self.group)
        pairs = torch.zeros_like(back).index_copy(0, dispatched.sent_order, back)
        per_expert = pairs.view(*dispatched.weights.shape, pairs.shape[-1])
        combined = (per_expert * dispatched.weights.unsqueeze(-1)).sum(1)
        return combined[: dispatched.tokens]

    def _largest_count(self, tokens: int) -> int:
        if self.group is None:
            return tokens
        largest = torch.tensor(tokens)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """`[rank, expert of that rank]` that I send → `[rank, my expert]` that I get."""
        if self.group is None:
            return counts
        arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts, group=self.group)
        return arrived
