"""SwiGLU feed-forward layer; also the shared expert."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from config import HybridConfig
from tensor_parallel import ColumnParallelLinear, RowParallelLinear, local_parameter


def swiglu(fused: Tensor) -> Tensor:
    """`[tokens, 2 * features]`, gate first → `[tokens, features]`."""
    gate, up = fused.chunk(2, dim=-1)
    return functional.silu(gate) * up


class SwiGLU(nn.Module):
    """Feed-forward layer whose local `linear_fc1.weight` is `[gate of this rank; up of this rank]`.

    Attributes:
        config: The model's sizes; `config.gated_linear_unit` tells that fc1 is fused.
    """

    def __init__(
        self, config: HybridConfig, features: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.config = config
        self.linear_fc1 = ColumnParallelLinear(config.hidden_size, 2 * features, group)
        self.linear_fc2 = RowParallelLinear(features, config.hidden_size, group)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`."""
        return self.linear_fc2(swiglu(self.linear_fc1(hidden)))


class SharedExperts(SwiGLU):
    """The expert that sees every token, behind a sigmoid gate."""

    def __init__(self, config: HybridConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__(config, config.moe_shared_expert_intermediate_size, group)
        self.gate_weight = local_parameter(1, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`."""
        gate = torch.sigmoid(functional.linear(hidden, self.gate_weight))
        return gate * super().forward(hidden)
