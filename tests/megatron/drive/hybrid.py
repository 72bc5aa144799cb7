"""A small hybrid model of real Megatron parts: GDN and attention layers, MoE or dense MLPs."""

import copy
import dataclasses

import machine
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A parallel configuration of the ranks that run.

    Attributes:
        global_ep: Expert-parallel size of Megatron's global grid, where the model's differs.
    """

    tp: int = 1
    ep: int = 1
    global_ep: int | None = None
    etp: int = 1
    outer: int = 1
    zero: str = "optim_grads_params"
    outer_zero: str = "no_shard"


def process_groups(parallel: Parallel) -> ProcessGroupCollection:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        expert_model_parallel_size=parallel.global_ep or parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        num_distributed_optimizer_instances=parallel.outer,
        create_gloo_process_groups=False,
    )
    machine.without_cuda_rng()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if parallel.global_ep is not None:
        replace_expert_groups(groups, parallel)
    return groups


def replace_expert_groups(groups, parallel: Parallel) -> None:
    """Gives a collection expert groups of its own, in Megatron's order: etp fastest, then ep."""
    world = torch.arange(dist.get_world_size()).reshape(-1, parallel.ep, parallel.etp)
    members = {
        "expt_tp": world.reshape(-1, parallel.etp),
        "ep": world.permute(0, 2, 1).reshape(-1, parallel.ep),
        "tp_ep": world.reshape(world.shape[0], -1),
        "expt_dp": world.permute(1, 2, 0).reshape(-1, world.shape[0]),
    }
    for name, rows in members.items():
        for row in rows.tolist():
            group = dist.new_group(row)  # every rank makes every group
            if dist.get_rank() in row:
                setattr(groups, name, group)


def config(parallel: Parallel, *, layers=2, experts=4, hidden=16, **changes) -> TransformerConfig:
    fields = dict(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        ffn_hidden_size=2 * hidden,
        num_moe_experts=experts,
        moe_ffn_hidden_size=8 if experts else None,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=8 if experts else None,
        moe_shared_expert_gate=bool(experts),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        tensor_model_parallel_size=parallel.tp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        qk_layernorm=True,
        linear_key_head_dim=2,
        linear_value_head_dim=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_conv_kernel_dim=4,
    )
    made = TransformerConfig(**{**fields, **changes})
    made.init_model_with_meta_device = False
    return made


def build(parallel: Parallel, groups, *, gdn=(True, False), vocabulary=32, **changes):
    """Returns a GPTModel whose layer i has a Gated DeltaNet where `gdn[i]` says so."""
    settings = config(parallel, layers=len(gdn), **changes)
    experts = settings.num_moe_experts
    layers = []
    for recurrent in gdn:
        spec = copy.deepcopy(
            get_gpt_layer_local_spec(
                num_experts=experts,
                moe_grouped_gemm=False,
                qk_layernorm=True,
                normalization="RMSNorm",
            )
        )
        if recurrent:
            spec.submodules.self_attention = ModuleSpec(
                module=gated_delta_net.GatedDeltaNet,
                submodules=gated_delta_net.GatedDeltaNetSubmodules(
                    in_proj=ColumnParallelLinear,
                    out_norm=WrappedTorchNorm,
                    out_proj=RowParallelLinear,
                ),
            )
        layers.append(spec)
    torch.manual_seed(1)
    return GPTModel(
        config=settings,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=WrappedTorchNorm
        ),
        vocab_size=vocabulary,
        max_sequence_length=8,
        pre_process=True,
        post_process=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=groups,
    )


class MixedPrecisionWrapper(torch.nn.Module):
    """Stands where Float16Module does, without its 16 bits: the state dict is the inner one's."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.config = module.config
        self.pg_collection = module.pg_collection

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state, strict=True):
        return self.module.load_state_dict(state, strict=strict)

    def set_input_tensor(self, tensor):
        return self.module.set_input_tensor(tensor)


def shard(model, parallel: Parallel, groups) -> FullyShardedDataParallel:
    """Wraps a model in Megatron-FSDP by Megatron-Core's own adapter."""
    return FullyShardedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=parallel.zero,
            outer_dp_sharding_strategy=parallel.outer_zero,
            num_distributed_optimizer_instances=parallel.outer,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=False,  # gloo has no PREMUL_SUM
        ),
        MixedPrecisionWrapper(model),
        device=torch.device("cpu"),
        pg_collection=groups,
    )


def make_optimizer(model):
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        use_distributed_optimizer=True,
        clip_grad=0.0,
        bf16=False,
        fp16=False,
        params_dtype=torch.float32,
    )
    return get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def step(model, optimizer, seed: int) -> float:
    """Trains one step on tokens that depend on the seed alone; returns the loss."""
    tokens = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, torch.arange(8)[None], mask).float().square().mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    return float(loss)
