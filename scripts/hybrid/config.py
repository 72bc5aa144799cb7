"""The numbers of the job.

| part | is |
|---|---|
| `HybridConfig` | the model's sizes, under Megatron-Core's field names |
| `Parallelism` | how many ways each axis is split, and where a rank stands on each |
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Sizes of the hybrid model.

    The hidden size is no multiple of 4, so that FSDP shards of row-parallel and router weights
    come out unequal; a `[1, hidden]` gate leaves most FSDP ranks with an empty shard.
    """

    vocab_size: int = 257
    make_vocab_size_divisible_by: int = 16
    hidden_size: int = 90
    layer_types: tuple[str, ...] = ("gdn", "gdn", "attention", "gdn")
    num_dense_layers: int = 1
    norm_epsilon: float = 1e-6

    num_attention_heads: int = 8
    num_query_groups: int = 4
    kv_channels: int = 16
    rotary_base: float = 10_000.0

    linear_num_key_heads: int = 4
    linear_key_head_dim: int = 16
    linear_num_value_heads: int = 8
    linear_value_head_dim: int = 16
    linear_conv_kernel_dim: int = 4

    gated_linear_unit: bool = True
    ffn_hidden_size: int = 196
    num_moe_experts: int = 8
    moe_router_topk: int = 2
    moe_router_bias_update_rate: float = 1e-3
    moe_ffn_hidden_size: int = 44
    moe_shared_expert_intermediate_size: int = 52

    @property
    def qk_dim(self) -> int:
        """Global rows of a Gated DeltaNet query (and of its key)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def v_dim(self) -> int:
        """Global rows of a Gated DeltaNet value (and of its output gate z)."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def qkv_rows(self) -> int:
        """Global rows of the fused, grouped attention projection."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks; changes with `tp_size`."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Sizes of the parallel axes; 1 means that the axis is off.

    The order of ranks is Megatron's: `rank = dp * tp_size + tp` for dense parameters and
    `rank = (edp * ep_size + ep) * etp_size + etp` for experts.

    >>> four = Parallelism(tp_size=2, dp_size=2, ep_size=2)
    >>> four.world_size, four.edp_size
    (4, 2)
    >>> four.dense_coordinate(3), four.expert_coordinate(3)
    ((1, 1), (1, 1, 0))
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1

    def __post_init__(self) -> None:
        """Checks the sizes against each other.

        Raises:
            ValueError: The expert axes do not divide the world, or experts are cut neither
                whole nor exactly as the dense part is.
        """
        if min(self.tp_size, self.dp_size, self.ep_size, self.etp_size) < 1:
            raise ValueError(f"every axis has at least size 1, not {self}")
        if self.world_size % (self.ep_size * self.etp_size):
            raise ValueError(
                f"ep {self.ep_size} x etp {self.etp_size} does not divide the world size "
                f"{self.world_size} (tp {self.tp_size} x dp {self.dp_size})"
            )
        if self.etp_size not in (1, self.tp_size):
            raise ValueError(f"expert tp is {self.etp_size}; it must be 1 or tp ({self.tp_size})")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp_size * self.dp_size

    @property
    def edp_size(self) -> int:
        """Number of copies that the experts' parameters are sharded over."""
        return self.world_size // (self.ep_size * self.etp_size)

    def dense_coordinate(self, rank: int) -> tuple[int, int]:
        """`(dp, tp)` of a rank."""
        return divmod(rank, self.tp_size)

    def expert_coordinate(self, rank: int) -> tuple[int, int, int]:
        """`(edp, ep, etp)` of a rank."""
        rest, etp = divmod(rank, self.etp_size)
        edp, ep = divmod(rest, self.ep_size)
        return edp, ep, etp

    def local_expert_indices(self, rank: int, num_experts: int) -> list[int]:
        """Global indices of the experts that a rank holds.

        Raises:
            ValueError: `num_experts` is not divisible by the expert-parallel size.
        """
        if num_experts % self.ep_size:
            raise ValueError(f"{num_experts} experts do not divide among ep {self.ep_size}")
        count = num_experts // self.ep_size
        first = self.expert_coordinate(rank)[1] * count
        return list(range(first, first + count))
