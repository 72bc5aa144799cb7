"""AdamW with and without weight decay, frozen parameters, and the learning rate's schedule."""

import math

import torch
from torch import nn

FROZEN = ("decoder.layers.0.input_layernorm.weight", "decoder.layers.1.self_attention.A_log")
PEAK, LAST, WARMUP, HORIZON = 4e-3, 4e-4, 6, 60


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Freezes what is frozen and groups the rest; after FSDP has replaced the parameters."""
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name in FROZEN:
            parameter.requires_grad_(False)
        elif parameter.ndim >= 2 and not name.endswith(("conv1d.weight", "gate_weight")):
            decay.append(parameter)
        else:
            no_decay.append(parameter)
    groups = [
        {"params": decay, "weight_decay": 0.05},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    # Larger than the default: rounding noise would else move parameters with hardly any gradient.
    return torch.optim.AdamW(groups, lr=learning_rate(0), betas=(0.9, 0.95), eps=1e-6)


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / (HORIZON - WARMUP))
    return LAST + (PEAK - LAST) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Gives every group of parameters the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = value
