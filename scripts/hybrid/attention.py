"""Causal attention with a fused, grouped QKV projection, within each document."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from collectives import copy_to_group
from config import HybridConfig
from groups import group_size
from packing import PaddedView
from tensor_parallel import ColumnParallelLinear, RowParallelLinear


class SelfAttention(nn.Module):
    """Grouped-query attention; rows of `linear_qkv` repeat `[queries, key, value]` per group.

    Raises:
        ValueError: The query groups do not divide among the tensor-parallel ranks.
    """

    def __init__(self, config: HybridConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        if config.num_query_groups % group_size(group):
            raise ValueError(
                f"{config.num_query_groups} query groups do not divide among tp {group_size(group)}"
            )
        self.config = config
        self.group = group
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, config.qkv_rows, group)
        self.q_layernorm = nn.RMSNorm(config.kv_channels, config.norm_epsilon)
        self.k_layernorm = nn.RMSNorm(config.kv_channels, config.norm_epsilon)
        attended = config.num_attention_heads * config.kv_channels
        self.linear_proj = RowParallelLinear(attended, config.hidden_size, group)

    def forward(self, hidden: Tensor, view: PaddedView) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`."""
        config = self.config
        queries = config.num_attention_heads // config.num_query_groups
        fused = view.pad(self.linear_qkv(hidden))
        grouped = fused.unflatten(-1, (-1, queries + 2, config.kv_channels))
        query, key, value = grouped.split((queries, 1, 1), dim=3)
        key, value = key.expand_as(query), value.expand_as(query)
        query = self._prepare(query, self.q_layernorm)
        key = self._prepare(key, self.k_layernorm)
        value = value.flatten(2, 3).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear_proj(view.unpad(attended.transpose(1, 2).flatten(2)))

    def _prepare(self, heads: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Normalises and rotates: `[docs, length, groups, n, dim]` → `[docs, heads, length, dim]`.

        The norm's weight is replicated but each rank has other heads: its gradients are summed.
        """
        weight = copy_to_group(norm.weight, self.group)
        normed = functional.rms_norm(heads, norm.normalized_shape, weight, norm.eps)
        return rotate(normed.flatten(2, 3).transpose(1, 2), self.config.rotary_base)


def rotate(heads: Tensor, base: float) -> Tensor:
    """Rotary position embedding of `[..., length, dim]`, positions counted per document."""
    length, dim = heads.shape[-2:]
    frequency = base ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(length), frequency)
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
