"""FSDP2 over the data-parallel axes: dense parameters over one mesh, experts over another."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from groups import ShardMeshes
from model import HybridModel


def apply_fsdp(model: HybridModel, meshes: ShardMeshes) -> None:
    """Shards the model in place, layer by layer, and keeps Megatron's marks on its parameters.

    Gradients are summed, never averaged: the loss is divided by the tokens of the whole step, so a
    rank's share of the gradient is the same however the tokens are dealt out.
    """
    marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    experts = [layer.experts for layer in model.moe_layers()]
    if meshes.edp_shard is not None:
        for module in experts:
            fully_shard(module, mesh=meshes.edp_shard)
    if meshes.dp_shard is not None:
        of_experts = {parameter for module in experts for parameter in module.parameters()}
        for unit in (*model.decoder.layers, model):
            fully_shard(unit, mesh=meshes.dp_shard, ignored_params=of_experts)
    for wrapped in model.modules():
        if isinstance(wrapped, FSDPModule):
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)
    _restore_marks(model, marks)


def _restore_marks(model: nn.Module, marks: dict[str, dict[str, object]]) -> None:
    """Puts attributes back that `fully_shard` loses with the parameters that it replaces."""
    for name, parameter in model.named_parameters():
        for mark, value in marks[name].items():
            setattr(parameter, mark, value)
