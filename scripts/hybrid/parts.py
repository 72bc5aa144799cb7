"""Which global tensors a local parameter is made of: the job's own table.

The job uses it to cut initial weights and to join shards for the bitwise proof. It knows nothing of
the library under test, nor of the attributes that the modules carry for it: names and sizes only.

| local parameter | parts, in order of rows |
|---|---|
| `in_proj.weight` | query, key, value, z, beta, alpha |
| `conv1d.weight`, `conv1d.bias` | query, key, value |
| `linear_fc1.weight` | gate, up |
| `experts.linear_fc1.weight{i}` | gate, up of a global expert |
| anything else | itself |
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config import HybridConfig

EXPERT = re.compile(r"^(.*\.experts)\.linear_fc([12])\.weight(\d+)$")


@dataclass(frozen=True, slots=True)
class Part:
    """One global tensor that a local parameter holds a piece of.

    Attributes:
        name: Name of the global tensor.
        rows: Its length along `dim`, in elements, without padding; 0 where it is replicated.
        dim: The dim that is cut over ranks; None for a replicated tensor.
        expert: It is cut over the expert-TP ranks instead of the TP ranks.
    """

    name: str
    rows: int = 0
    dim: int | None = None
    expert: bool = False


def parts_of(name: str, config: HybridConfig, experts: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a local parameter, in the order of its rows.

    Args:
        name: The parameter's local fqn.
        config: The model's sizes.
        experts: Global indices of the experts on the rank that holds it.
    """
    found = EXPERT.match(name)
    if found:
        owner = f"{found[1]}.{experts[int(found[3])]}"
        rows = config.moe_ffn_hidden_size
        if found[2] == "1":
            return tuple(Part(f"{owner}.{half}", rows, 0, True) for half in ("gate", "up"))
        return (Part(f"{owner}.down", rows, 1, True),)

    layer, leaf = _split_name(name)
    shared = ".shared_experts." in name
    features = config.moe_shared_expert_intermediate_size if shared else config.ffn_hidden_size
    qk, v, heads = config.qk_dim, config.v_dim, config.linear_num_value_heads
    fused: dict[str, tuple[tuple[str, int], ...]] = {
        "in_proj.weight": (
            ("query", qk),
            ("key", qk),
            ("value", v),
            ("z", v),
            ("beta", heads),
            ("alpha", heads),
        ),
        "conv1d.weight": (("query", qk), ("key", qk), ("value", v)),
        "conv1d.bias": (("query", qk), ("key", qk), ("value", v)),
        "linear_fc1.weight": (("gate", features), ("up", features)),
    }
    if leaf in fused:
        return tuple(Part(f"{name}.{part}", rows, 0) for part, rows in fused[leaf])
    single = {
        "word_embeddings.weight": (config.vocab_size, 0),
        "linear_qkv.weight": (config.qkv_rows, 0),
        "linear_proj.weight": (config.num_attention_heads * config.kv_channels, 1),
        "out_proj.weight": (v, 1),
        "linear_fc2.weight": (features, 1),
        f"{layer}.dt_bias": (heads, 0),
        f"{layer}.A_log": (heads, 0),
    }
    return (Part(name, *single[leaf]),) if leaf in single else (Part(name),)


def cut(full: Tensor, part: Part, index: int, count: int, length: int) -> Tensor:
    """Piece `index` of `count` pieces of a global tensor.

    Args:
        full: The global tensor, without padding.
        part: How it is cut.
        index: Which piece.
        count: Number of pieces.
        length: Length of a piece along `part.dim`; what lies beyond the tensor is zeros.
    """
    if part.dim is None:
        return full
    shape = list(full.shape)
    shape[part.dim] = length * count
    padded = full.new_zeros(shape)
    padded.narrow(part.dim, 0, full.shape[part.dim]).copy_(full)
    return padded.narrow(part.dim, index * length, length)


def join(pieces: Sequence[Tensor], part: Part) -> Tensor:
    """The global tensor from all its pieces in order, padding dropped.

    Raises:
        ValueError: The pieces are too short together.
    """
    if part.dim is None:
        raise ValueError(f"{part.name} is not cut")
    joined = torch.cat(list(pieces), dim=part.dim)
    if joined.shape[part.dim] < part.rows:
        raise ValueError(f"{part.name}: has {joined.shape[part.dim]} rows, not {part.rows}")
    return joined.narrow(part.dim, 0, part.rows)


def split_local(local: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """A local parameter's pieces, one per part."""
    if len(parts) == 1:
        return [local]
    total = sum(part.rows for part in parts)
    return list(local.split([part.rows * local.shape[0] // total for part in parts]))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def _split_name(name: str) -> tuple[str, str]:
    """The owning module's last name, and the last two names."""
    names = name.split(".")
    return names[-2], ".".join(names[-2:])
