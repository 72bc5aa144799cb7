"""Initial weights as a pure function of each global tensor's name and shape.

Every configuration therefore starts from the same model, whatever its ranks hold.
"""

import math
import zlib

import torch
from torch import Tensor, nn

from config import HybridConfig, Parallelism
from parts import Part, cut, parts_of, split_local


@torch.no_grad()
def fill(model: nn.Module, config: HybridConfig, parallelism: Parallelism, rank: int) -> None:
    """Gives this rank's local parameters their initial values; before FSDP wraps them."""
    experts = parallelism.local_expert_indices(rank, config.num_moe_experts)
    _, tp = parallelism.dense_coordinate(rank)
    _, _, etp = parallelism.expert_coordinate(rank)
    for name, parameter in model.named_parameters():
        parts = parts_of(name, config, experts)
        for part, piece in zip(parts, split_local(parameter, parts), strict=True):
            index, count = (etp, parallelism.etp_size) if part.expert else (tp, parallelism.tp_size)
            shape = list(piece.shape)
            if part.dim is not None:
                shape[part.dim] = part.rows
            length = piece.shape[part.dim] if part.dim is not None else 0
            piece.copy_(cut(initial_values(part, shape), part, index, count, length))


def initial_values(part: Part, shape: list[int]) -> Tensor:
    """The whole global tensor of a part at step 0."""
    generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
    if part.name.endswith("norm.weight"):
        return torch.ones(shape)
    if part.name.endswith("A_log"):
        return torch.empty(shape).uniform_(1.0, 8.0, generator=generator).log()
    if part.name.endswith("dt_bias"):
        return torch.empty(shape).uniform_(-4.0, -1.0, generator=generator)
    if "conv1d" in part.name:
        bound = 0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    deviation = 0.02 if "embedding" in part.name else 0.7 / math.sqrt(shape[-1])
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
