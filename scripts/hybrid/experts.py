"""Mixture of experts: router, grouped experts, shared expert."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from collectives import copy_to_group, gather_rows, reduce_from_group, split_rows
from config import HybridConfig
from dispatcher import TokenDispatcher
from groups import ProcessGroups, group_rank, group_size
from mlp import SharedExperts, swiglu
from tensor_parallel import local_parameter, sharded_parameter


class TopKRouter(nn.Module):
    """Softmax router; a bias per expert steers the choice, not the weights, towards balance.

    The bias follows Wang et al., "Auxiliary-Loss-Free Load Balancing" (2024): it lives in the state
    dict as a plain buffer.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.top_k = config.moe_router_topk
        self.rate = config.moe_router_bias_update_rate
        self.weight = local_parameter(config.num_moe_experts, config.hidden_size)
        self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts))
        self.expert_bias: Tensor
        self.tokens_per_expert = torch.zeros(config.num_moe_experts)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`[tokens, hidden]` → weights and global expert indices, both `[tokens, top-k]`."""
        scores = functional.linear(hidden, self.weight).softmax(-1)
        experts = (scores.detach() + self.expert_bias).topk(self.top_k).indices
        self.tokens_per_expert = torch.bincount(experts.flatten(), minlength=scores.shape[-1])
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True), experts

    @torch.no_grad()
    def update_bias(self, data_group: dist.ProcessGroup | None) -> None:
        """Moves each bias one step towards balance, by the counts of all data-parallel ranks."""
        counts = self.tokens_per_expert.clone()
        if data_group is not None:
            dist.all_reduce(counts, group=data_group)
        load = counts * len(counts)
        self.expert_bias += self.rate * torch.sign(counts.sum() - load)


class ExpertWeights(nn.Module):
    """Weights of one linear layer of all local experts, named `weight0`, `weight1`, ..."""

    def __init__(self, num_local_experts: int, outputs: int, inputs: int, dim: int) -> None:
        super().__init__()
        for index in range(num_local_experts):
            weight = sharded_parameter(outputs, inputs, dim=dim, expert=True)
            self.register_parameter(f"weight{index}", weight)

    def __getitem__(self, local_expert_index: int) -> Tensor:
        weight = getattr(self, f"weight{local_expert_index}")
        return weight  # type: ignore[no-any-return]


class GroupedExperts(nn.Module):
    """This rank's experts, each a SwiGLU layer, themselves cut over the expert-TP group."""

    def __init__(self, config: HybridConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.config = config
        self.group = groups.expt_tp
        self.num_local_experts = config.num_moe_experts // group_size(groups.ep)
        features = config.moe_ffn_hidden_size // group_size(self.group)
        hidden = config.hidden_size
        self.linear_fc1 = ExpertWeights(self.num_local_experts, 2 * features, hidden, dim=0)
        self.linear_fc2 = ExpertWeights(self.num_local_experts, hidden, features, dim=1)

    def forward(self, rows: Tensor, rows_per_expert: list[int]) -> Tensor:
        """Rows sorted by local expert `[rows, hidden]` → `[rows, hidden]`."""
        runs = copy_to_group(rows, self.group).split(rows_per_expert)
        results = []
        for index, run in enumerate(runs):
            activated = swiglu(functional.linear(run, self.linear_fc1[index]))
            results.append(functional.linear(activated, self.linear_fc2[index]))
        return reduce_from_group(torch.cat(results), self.group)


class MoELayer(nn.Module):
    """Router, dispatcher, experts and shared expert.

    Where experts are whole (expert TP 1) each tensor-parallel rank handles its own run of the
    tokens, so that no token is computed twice.

    Attributes:
        local_expert_indices: Global indices of this rank's experts.
    """

    def __init__(self, config: HybridConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.config = config
        self.split_group = groups.tp if groups.expt_tp is None else None
        count = config.num_moe_experts // group_size(groups.ep)
        first = group_rank(groups.ep) * count
        self.local_expert_indices = list(range(first, first + count))
        self.router = TopKRouter(config)
        self.experts = GroupedExperts(config, groups)
        self.shared_experts = SharedExperts(config, groups.tp)
        self.dispatcher = TokenDispatcher(config.num_moe_experts, groups.ep)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`."""
        weights, experts = self.router(hidden)
        dispatched = self.dispatcher.dispatch(
            *(split_rows(part, self.split_group) for part in (hidden, weights, experts))
        )
        results = self.experts(dispatched.rows, dispatched.rows_per_expert)
        own = self.dispatcher.combine(results, dispatched)
        routed = gather_rows(own, hidden.shape[0], self.split_group)
        return routed + self.shared_experts(hidden)
