"""Gated DeltaNet: linear attention whose state forgets by a gate and learns by a delta rule.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024); fused projections are laid out as in
Megatron-Core's `ssm/gated_delta_net`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from collectives import copy_to_group
from config import HybridConfig
from groups import group_size
from packing import PaddedView
from tensor_parallel import ColumnParallelLinear, RowParallelLinear, sharded_parameter


class CausalConv1d(nn.Module):
    """Depthwise causal convolution over this rank's rows of query, key and value."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = sharded_parameter(channels, 1, kernel, dim=0)
        self.bias = sharded_parameter(channels, dim=0)

    def forward(self, value: Tensor) -> Tensor:
        """`[documents, length, channels]` → the same."""
        channels, _, kernel = self.weight.shape
        past = functional.pad(value.transpose(1, 2), (kernel - 1, 0))
        return functional.conv1d(past, self.weight, self.bias, groups=channels).transpose(1, 2)


class GatedDeltaNet(nn.Module):
    """The layer; `in_proj` and `conv1d` are fused along their rows.

    Attributes:
        in_proj_split_names: Components of `in_proj.weight`, in order.
        in_proj_split_sections: Rows of each component on this rank.
        qk_dim: Global rows of the query, and of the key.
        v_dim: Global rows of the value.
        num_value_heads: Global number of value heads.

    Raises:
        ValueError: The key heads do not divide among the tensor-parallel ranks.
    """

    def __init__(self, config: HybridConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        ways = group_size(group)
        if config.linear_num_key_heads % ways:
            raise ValueError(
                f"{config.linear_num_key_heads} key heads do not divide among tp {ways}"
            )
        self.config = config
        self.group = group
        self.qk_dim, self.v_dim = config.qk_dim, config.v_dim
        self.num_value_heads = config.linear_num_value_heads
        self.num_value_heads_local = self.num_value_heads // ways
        sections = (
            self.qk_dim,
            self.qk_dim,
            self.v_dim,
            self.v_dim,
            self.num_value_heads,
            self.num_value_heads,
        )
        self.in_proj_split_names = ("query", "key", "value", "z", "beta", "alpha")
        self.in_proj_split_sections = tuple(rows // ways for rows in sections)

        self.in_proj = ColumnParallelLinear(config.hidden_size, sum(sections), group)
        channels = sum(self.in_proj_split_sections[:3])
        self.conv1d = CausalConv1d(channels, config.linear_conv_kernel_dim)
        self.dt_bias = sharded_parameter(self.num_value_heads_local, dim=0)
        self.A_log = sharded_parameter(self.num_value_heads_local, dim=0)
        self.out_norm = nn.RMSNorm(config.linear_value_head_dim, config.norm_epsilon)
        self.out_proj = RowParallelLinear(self.v_dim, config.hidden_size, group)

    def forward(self, hidden: Tensor, view: PaddedView) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`."""
        config = self.config
        fused = view.pad(self.in_proj(hidden))
        convolved, z, beta, alpha = fused.split(
            (sum(self.in_proj_split_sections[:3]), *self.in_proj_split_sections[3:]), dim=-1
        )
        mixed = functional.silu(self.conv1d(convolved))
        query, key, value = mixed.split(self.in_proj_split_sections[:3], dim=-1)

        value = value.unflatten(-1, (-1, config.linear_value_head_dim))
        query, key = (self._key_heads(part) for part in (query, key))
        decay = torch.exp(-self.A_log.exp() * functional.softplus(alpha + self.dt_bias))
        out = gated_delta_rule(query, key, value, decay, beta.sigmoid())

        weight = copy_to_group(self.out_norm.weight, self.group)
        normed = functional.rms_norm(
            out, self.out_norm.normalized_shape, weight, config.norm_epsilon
        )
        return self.out_proj(view.unpad(normed.flatten(2) * functional.silu(z)))

    def _key_heads(self, part: Tensor) -> Tensor:
        """Rows of query or key → one unit vector per value head of this rank."""
        heads = part.unflatten(-1, (-1, self.config.linear_key_head_dim))
        repeats = self.num_value_heads_local // heads.shape[-2]
        return functional.normalize(heads, dim=-1, eps=1e-6).repeat_interleave(repeats, dim=-2)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The recurrence, one token after the other.

    Args:
        query: `[documents, length, heads, key dim]`; `key` has the same shape.
        key: Unit vectors that the state is addressed by.
        value: `[documents, length, heads, value dim]`.
        decay: How much of the state is kept `[documents, length, heads]`.
        beta: How much of the value's error is written, same shape as `decay`.

    Returns:
        `[documents, length, heads, value dim]`.
    """
    scaled = query * query.shape[-1] ** -0.5
    state = value.new_zeros(*value.shape[:1], *value.shape[2:3], key.shape[-1], value.shape[-1])
    outputs = []
    for q, k, v, kept, written in zip(
        scaled.unsqueeze(-2).unbind(1),
        key.unsqueeze(-2).unbind(1),
        value.unsqueeze(-2).unbind(1),
        decay[..., None, None].unbind(1),
        beta[..., None, None].unbind(1),
        strict=True,
    ):
        state = state * kept
        error = (v - k @ state) * written
        state = state + k.transpose(-1, -2) * error
        outputs.append(q @ state)
    return torch.stack(outputs, dim=1).squeeze(-2)
