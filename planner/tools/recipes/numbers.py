"""A model's numbers, from a recipe or from a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardplan.layouts import LayoutError


@dataclass(frozen=True, slots=True)
class Latent:
    """Numbers of multi-head latent attention (MLA).

    Attributes:
        q_rank: Rows of the queries' down-projection; 0 where there is none.
        kv_rank: Rows of the keys' and values' down-projection, without the rotary ones.
        nope_dim: Dims of a query or key head without position.
        rope_dim: Dims of a query or key head with position.
        value_dim: Dims of a value head.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Numbers of Gated DeltaNet layers.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values.
        key_dim: Dims of a query or key head.
        value_dim: Dims of a value head.
        kernel: Length of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    @property
    def qk(self) -> int:
        """Rows of all queries, or of all keys."""
        return self.key_heads * self.key_dim

    @property
    def v(self) -> int:
        """Rows of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a transformer, in Megatron-Core's sense of the words.

    Attributes:
        kind: `qwen3_next`, `qwen3_5_moe`, `qwen3_moe`, `deepseek_v3` or `llama`.
        layers: Number of layers.
        hidden: Size of the hidden state.
        vocabulary: True size of the vocabulary.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Dims of a head.
        ffn: Hidden size of a dense feed-forward layer.
        tied: Whether the output layer is the embedding.
        output_gate: Whether attention has a gate of the queries' size.
        qk_norm: Whether queries and keys are normed.
        experts: Experts of a layer; 0 for a dense model.
        expert_ffn: Hidden size of one expert.
        shared_ffn: Hidden size of the shared experts; 0 where there are none.
        shared_gate: Whether the shared experts have a gate.
        expert_bias: Whether the router has a bias for balance.
        dense_layers: Leading layers without experts.
        attention_every: Every n-th layer has attention, the others Gated DeltaNet; 1 for all.
        delta: Numbers of the Gated DeltaNet layers.
        latent: Numbers of latent attention, where it is that.
    """

    kind: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int = 0
    tied: bool = False
    output_gate: bool = False
    qk_norm: bool = False
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    dense_layers: int = 0
    attention_every: int = 1
    delta: Delta | None = None
    latent: Latent | None = None

    def has_attention(self, layer: int) -> bool:
        """Returns whether a layer has attention (rather than Gated DeltaNet)."""
        return (layer + 1) % self.attention_every == 0

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers


def numbers_from_table(table: Mapping[str, Any], where: str) -> Numbers:
    """Returns the numbers of a recipe's `[model]` table.

    Raises:
        LayoutError: If a number is missing or has an unknown name.
    """
    values = dict(table)
    try:
        for name, cls in (("delta", Delta), ("latent", Latent)):
            if name in values:
                values[name] = cls(**values[name])
        return Numbers(**values)
    except TypeError as error:
        known = ", ".join(field.name for field in fields(Numbers))
        raise LayoutError(f"{where}: [model]: {error}. It takes {known}.") from None


def read_config(path: str | Path) -> Numbers:
    """Returns the numbers of a Hugging Face `config.json`.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        LayoutError: If there is no such file, or no mapping for its model type.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f"{path}: no model configuration ({error}).") from error
    config = {**config, **config.get("text_config", {})}
    kind = str(config.get("model_type", "")).removesuffix("_text")
    try:
        return _KINDS[kind](config)
    except KeyError as error:
        if kind in _KINDS:
            raise LayoutError(f"{path}: the configuration lacks {error}.") from None
        raise LayoutError(
            f"{path}: no mapping for the model type {kind!r}; there are {', '.join(_KINDS)}. "
            "Write its rules (see shardplan.planner.tools.huggingface.rules) and pass them."
        ) from None


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn": config.get("intermediate_size", 0),
        "tied": config.get("tie_word_embeddings", False),
    }


def _experts(config: Mapping[str, Any]) -> int:
    """Returns the number of experts; transformers has had two names for it."""
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def _llama(config: Mapping[str, Any]) -> Numbers:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise LayoutError("attention_bias and mlp_bias: no mapping for biases. Add rules for them.")
    return Numbers("llama", **_attention(config))


def _qwen3_moe(config: Mapping[str, Any]) -> Numbers:
    return Numbers(
        "qwen3_moe",
        **_attention(config),
        qk_norm=True,
        experts=_experts(config),
        expert_ffn=config["moe_intermediate_size"],
    )


def _hybrid(kind: str, config: Mapping[str, Any]) -> Numbers:
    every = config.get("full_attention_interval") or 4
    types = config.get("layer_types") or []
    attention = [i + 1 for i, name in enumerate(types) if name == "full_attention"]
    if attention:
        every = attention[0]
        expected = [i for i in range(1, len(types) + 1) if i % every == 0]
        if attention != expected:
            raise LayoutError(
                f"layer_types: attention in layers {attention}, not in every {every}th. Give "
                "the layers a regular order, or describe the model by hand."
            )
    elif types:
        every = len(types) + 1
    return Numbers(
        kind,
        **_attention(config),
        output_gate=True,
        qk_norm=True,
        experts=_experts(config),
        expert_ffn=config["moe_intermediate_size"],
        shared_ffn=config["shared_expert_intermediate_size"],
        shared_gate=True,
        attention_every=every,
        delta=Delta(
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config.get("linear_conv_kernel_dim", 4),
        ),
    )


_KINDS = {
    "qwen3_next": lambda config: _hybrid("qwen3_next", config),
    "qwen3_5_moe": lambda config: _hybrid("qwen3_5_moe", config),
    "qwen3_moe": _qwen3_moe,
    "llama": _llama,
}
