"""Values that say which element of which global tensor they are, for any rank's own part.

Worked out from what the modules are, without the product: a tensor-parallel rank's rows of a
fused projection are its share of each component, one after another.
"""

import re
import zlib

import torch


def numbered(key: str, shape) -> torch.Tensor:
    """A global tensor whose elements all differ, and differ from other keys'."""
    count = int(torch.Size(shape).numel())
    start = zlib.crc32(key.encode()) % 1000
    return (torch.arange(count, dtype=torch.float64) + start * 1000).reshape(tuple(shape)).float()


def share(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    each = whole.shape[dim] // size
    return whole.narrow(dim, rank * each, each)


class Ranks:
    """This rank's place in the tensor- and expert-parallel groups of a model."""

    def __init__(self, groups, config):
        self.tp = (groups.tp.rank(), groups.tp.size())
        self.etp = (groups.expt_tp.rank(), groups.expt_tp.size())
        ep = (groups.ep.rank(), groups.ep.size()) if groups.ep is not None else (0, 1)
        experts = config.num_moe_experts
        self.first_expert = ep[0] * (experts // ep[1]) if experts else 0
        self.config = config


def local(name: str, shape, ranks: Ranks, salt: str = "") -> torch.Tensor:
    """What this rank's tensor-parallel part of a parameter must hold.

    Args:
        name: The parameter's name in the model, without wrappers' tokens.
        shape: Its shape on this rank, before any FSDP cut.
        ranks: Where this rank is.
        salt: Tells a weight from its moments.
    """
    shape = tuple(shape)
    expert = re.search(r"\.local_experts\.(\d+)\.", name)
    rank, size = ranks.etp if expert else ranks.tp
    key = name
    if expert:
        place = f".local_experts.{int(expert[1]) + ranks.first_expert}."
        key = name.replace(expert[0], place)
    key = f"{salt}{key}"
    config = ranks.config

    def column(suffix: str, rows: int) -> torch.Tensor:
        return share(numbered(key + suffix, (rows * size, *shape[1:])), 0, rank, size)

    if name.endswith("linear_fc1.weight") or name.endswith("linear_fc1.bias"):
        half = shape[0] // 2
        return torch.cat([column("_w", half), column("_v", half)])
    if ".mixer." in name and re.search(r"\.(in_proj\.weight|conv1d_weight|conv1d_bias)$", name):
        heads = 2 * config.hidden_size // config.mamba_head_dim
        inner = heads * config.mamba_head_dim
        states = config.mamba_num_groups * config.mamba_state_dim
        parts = {"x": inner, "B": states, "C": states}
        if ".in_proj." in name:
            parts = {"z": inner, **parts, "dt": heads}
        return torch.cat([column("." + part, rows // size) for part, rows in parts.items()])
    if name.endswith("linear_qkv_down_proj.weight"):  # two projections in one
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        rows = {"linear_q_down_proj": config.q_lora_rank, "linear_kv_down_proj": latent}
        parts = [
            numbered(key.replace("linear_qkv_down_proj", one), (count, *shape[1:]))
            for one, count in rows.items()
        ]
        return torch.cat([share(whole, 0, rank, size) for whole in parts])
    if name.endswith("linear_qkv_down_proj.layer_norm_weight"):
        return numbered(
            key.replace("self_attention.linear_qkv_down_proj.layer_norm_", "input_layernorm."),
            shape,
        )
    if re.search(r"\.(in_proj|conv1d)\.weight$", name):
        qk = config.linear_key_head_dim * config.linear_num_key_heads
        v = config.linear_value_head_dim * config.linear_num_value_heads
        heads = config.linear_num_value_heads
        parts = {"query": qk, "key": qk, "value": v}
        if ".in_proj." in name:
            parts |= {"z": v, "beta": heads, "alpha": heads}
        return torch.cat([column("." + part, rows // size) for part, rows in parts.items()])
    if re.search(r"(linear_fc2|linear_proj|out_proj)\.weight$", name):
        whole = numbered(key, (shape[0], shape[1] * size, *shape[2:]))
        return share(whole, 1, rank, size)
    if re.search(
        r"(linear_qkv|linear_q_proj|linear_(q|kv)_(down|up)_proj|eh_proj"
        r"|word_embeddings|output_layer)\.(weight|bias)$",
        name,
    ) or re.search(r"\.(A_log|dt_bias|D|mixer\.norm\.weight)$", name):
        return column("", shape[0])
    return numbered(key, shape)
