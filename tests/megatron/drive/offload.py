"""Megatron-Core's HybridDeviceOptimizer over Megatron-FSDP, which hands it DTensors.

As released (0.19.2) it can't be made there: it pins the copy of each parameter, whatever
`pin_cpu_params` says, and a DTensor can't be pinned; and it copies a DTensor's gradient into a plain
tensor of the global shape. Here its copies are the plain tensors that the rank holds; the rest is
Megatron's.
"""

import torch
from megatron.core import optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch.distributed.tensor import DTensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LocalHybridDeviceOptimizer(HybridDeviceOptimizer):
    """Steps the rank's own part of each parameter on the CPU."""

    def _get_sub_optimizer_param_groups(self, offload_fraction):
        groups, copies = [], {}
        for group in self.param_groups:
            for parameter in group["params"]:
                copies[parameter] = own(parameter).detach().float().cpu().clone()
            groups.append({**group, "params": [copies[p] for p in group["params"]]})
        return groups, [], copies, {copy: p for p, copy in copies.items()}, {}

    def _set_sub_optimizer_grads(self):
        for part in self.cpu_optimizers:
            for group in part.param_groups:
                for copied in group["params"]:
                    gradient = self.cpu_copys_map_gpu_param[copied].grad
                    some = gradient is not None and own(gradient).numel()
                    copied.grad = own(gradient).float().cpu() if some else None

    def _register_param_copy_back_gpu_hook(self):
        @torch.no_grad()
        def copy_back(part, args, kwargs):
            for group in part.param_groups:
                for copied in group["params"]:
                    own(self.cpu_copys_map_gpu_param[copied]).copy_(copied)

        for part in self.cpu_optimizers:
            part.register_step_post_hook(copy_back)


def use_local_parts() -> None:
    """Has Megatron make this optimizer where it is asked to offload."""
    optimizer.HybridDeviceOptimizer = LocalHybridDeviceOptimizer
