"""Small models of real Megatron parts: attention of each kind, MoE or dense MLPs; Mamba stacks."""

import copy
import dataclasses

import machine
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from offload import use_local_parts


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A parallel configuration of the ranks that run.

    Attributes:
        global_ep: Expert-parallel size of Megatron's global grid, where the model's differs.
        chunks: Virtual pipeline chunks of each stage.
    """

    pp: int = 1
    chunks: int = 1
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
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
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


def config(
    parallel: Parallel, *, layers=2, experts=4, hidden=16, mla=False, **changes
) -> TransformerConfig:
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
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
        pipeline_dtype=torch.float32,
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
        mamba_state_dim=3,
        mamba_head_dim=4,
        mamba_num_groups=2,
    )
    if mla:
        fields |= dict(
            num_query_groups=4,
            q_lora_rank=12,
            kv_lora_rank=6,
            qk_head_dim=4,
            qk_pos_emb_head_dim=2,
            v_head_dim=4,
            rope_type="rope",
        )
    made = (MLATransformerConfig if mla else TransformerConfig)(**{**fields, **changes})
    made.init_model_with_meta_device = False
    return made


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """Stands for Transformer Engine's, which has a norm's weight beside the linear layer's own.

    Its name is what Megatron-FSDP goes by.
    """

    def __init__(self, width, *args, **kwargs):
        super().__init__(width, *args, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(width))


class LatentCoreAttention(DotProductAttention):
    """Megatron's own attention with the arguments that latent attention passes and it lacks."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


def layer(kind: str, experts: int | None) -> ModuleSpec:
    """Returns a transformer layer of Megatron's own parts.

    Args:
        kind: `attention`, `gdn`, `mla`, `mla fused` (one down-projection) or `mla absorbed` (and
            the norm before it is part of it).
        experts: Number of experts, None for a dense MLP.
    """
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=experts,
            moe_grouped_gemm=False,
            qk_layernorm=True,
            multi_latent_attention=kind.startswith("mla"),
            normalization="RMSNorm",
        )
    )
    attention = spec.submodules.self_attention
    if kind.startswith("mla"):
        attention.submodules.core_attention = LatentCoreAttention
    if kind == "gdn":
        spec.submodules.self_attention = ModuleSpec(
            module=gated_delta_net.GatedDeltaNet,
            submodules=gated_delta_net.GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear,
                out_norm=WrappedTorchNorm,
                out_proj=RowParallelLinear,
            ),
        )
    elif kind in ("mla fused", "mla absorbed"):
        attention.module = multi_latent_attention.FusedMLASelfAttention
        attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
        if kind == "mla absorbed":
            multi_latent_attention.TELayerNormColumnParallelLinear = TELayerNormColumnParallelLinear
            attention.submodules.linear_qkv_down_proj = TELayerNormColumnParallelLinear
            spec.submodules.input_layernorm = IdentityOp
    return spec


def build(
    parallel: Parallel, groups, *, kinds=("gdn", "attention"), vocabulary=32, tied=False, **changes
):
    """Returns a GPTModel with layers of these kinds, in a pipeline the list of its chunks."""
    settings = config(
        parallel, layers=len(kinds), mla=any(kind.startswith("mla") for kind in kinds), **changes
    )
    torch.manual_seed(1)
    each = len(kinds) // (parallel.pp * parallel.chunks)
    stage = groups.pp.rank()
    made = []
    for number in range(parallel.chunks):
        first = (number * parallel.pp + stage) * each
        last = first + each == len(kinds)
        block = TransformerBlockSubmodules(
            layer_specs=[
                layer(kind, settings.num_moe_experts) for kind in kinds[first : first + each]
            ],
            layer_norm=WrappedTorchNorm,
        )
        chunk = number if parallel.chunks > 1 else None
        mtp = None
        if settings.mtp_num_layers and last:
            mtp = get_gpt_mtp_block_spec(settings, block, False, vp_stage=chunk)
        made.append(
            GPTModel(
                config=settings,
                transformer_layer_spec=block,
                mtp_block_spec=mtp,
                vocab_size=vocabulary,
                max_sequence_length=8,
                pre_process=first == 0,
                post_process=last,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
                pg_collection=groups,
                vp_stage=chunk,
            )
        )
    return made if parallel.pp > 1 else made[0]


def build_stack(parallel: Parallel, groups, *, pattern: str, vocabulary=32, **changes):
    """Returns a HybridModel, `M` for Mamba, `*` for attention, `E` for MoE, `-` for a dense MLP."""
    hybrid_block.TENorm = WrappedTorchNorm
    whole = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm").submodules
    mixture = layer("attention", 4).submodules
    block = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(
                        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                    ),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=part(
            input_layernorm=WrappedTorchNorm,
            self_attention=whole.self_attention,
            self_attn_bda=get_bias_dropout_add,
        ),
        moe_layer=part(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=mixture.mlp, mlp_bda=get_bias_dropout_add
        ),
        mlp_layer=part(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=whole.mlp, mlp_bda=get_bias_dropout_add
        ),
    )
    torch.manual_seed(1)
    return HybridModel(
        config=config(parallel, layers=len(pattern), **changes),
        hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=block),
        vocab_size=vocabulary,
        max_sequence_length=8,
        hybrid_layer_pattern=pattern,
        pg_collection=groups,
    )


def make(parallel: Parallel, groups, **changes):
    """Returns a HybridModel if a pattern is given, else a GPTModel."""
    return (build_stack if "pattern" in changes else build)(parallel, groups, **changes)


def part(**submodules) -> ModuleSpec:
    """Returns a transformer layer that has only these submodules."""
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**submodules))


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


def make_optimizer(model, *, offload=False):
    if offload:
        use_local_parts()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        use_distributed_optimizer=True,
        clip_grad=0.0,
        bf16=False,
        fp16=False,
        params_dtype=torch.float32,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=float(offload),
    )
    return get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def loss(model, seed: int) -> torch.Tensor:
    """The loss on tokens that depend on the seed alone."""
    tokens = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    return model(tokens, torch.arange(8)[None], mask).float().square().mean()
