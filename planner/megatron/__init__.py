"""Checkpoints of Megatron models: two calls for a training loop, and names for tools.

| module | holds |
|---|---|
| `checkpoint` | `save_checkpoint` and `load_checkpoint` |
| `copies` | word embeddings that a later pipeline stage keeps a copy of |
| `extra` | modules' `_extra_state` by global names |
| `keys` | the keys of Megatron-LM's `fsdp_dtensor` checkpoints |
| `names` | names of parameters and experts across ranks, also from integers alone |
| `shards` | flat optimizer shards of `DistributedOptimizer` over DDP |
| `state` | a model and an optimizer as a state dict, and back |

Megatron is not imported; its objects are read by their attributes.
"""

from .checkpoint import Loaded, load_checkpoint, save_checkpoint
from .keys import FsdpDtensorSavePlanner, whole_projections
from .names import (
    ep_rank_and_size,
    expert_global_key,
    expert_local_key,
    get_ep_layer_offset,
    global_param_name,
    param_to_group_names,
)
from .shards import ddp_shards, param_range_shards
from .state import initialize_state, model_state, optimizer_state

__all__ = [
    "FsdpDtensorSavePlanner",
    "Loaded",
    "ddp_shards",
    "ep_rank_and_size",
    "expert_global_key",
    "expert_local_key",
    "get_ep_layer_offset",
    "global_param_name",
    "initialize_state",
    "load_checkpoint",
    "model_state",
    "optimizer_state",
    "param_range_shards",
    "param_to_group_names",
    "save_checkpoint",
    "whole_projections",
]
