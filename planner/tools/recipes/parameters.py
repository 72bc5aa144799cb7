"""The parameters that follow from a model's numbers, under Megatron-Core's names.

Names are those of Megatron-Core's GPT model with Transformer Engine layers, where the norm before
a projection belongs to the projection (`linear_qkv.layer_norm_weight`).

Source: megatron/core/models/gpt, megatron/core/ssm/gated_delta_net.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.layouts.slab import Shape

from .numbers import Delta, Latent, Numbers

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model, no parallelism applied.

    Attributes:
        name: Its name; an expert's has the global expert index at its end.
        shape: Its shape.
        dim: Dim that tensor parallelism shards, None for a replicated parameter.
        parts: Global rows of each of its components along dim 0; empty if it has none.
        layer: Its layer, None for what stands before or after all layers.
        expert: Its expert, None for a dense parameter.
    """

    name: str
    shape: Shape
    dim: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    layer: int | None = None
    expert: int | None = None


def parameters(numbers: Numbers) -> Iterator[Parameter]:
    """Yields all parameters of a model: the embedding, the layers, the output layer."""
    n = numbers
    yield Parameter(EMBEDDING, (n.vocabulary, n.hidden), 0)
    for layer in range(n.layers):
        yield from layer_parameters(n, layer)
    yield Parameter("decoder.final_layernorm.weight", (n.hidden,))
    if not n.tied:
        yield Parameter(OUTPUT, (n.vocabulary, n.hidden), 0)


def layer_parameters(numbers: Numbers, layer: int) -> Iterator[Parameter]:
    """Yields the parameters of one layer."""
    prefix = f"decoder.layers.{layer}."

    def place(found: Iterator[Parameter], below: str) -> Iterator[Parameter]:
        for p in found:
            yield Parameter(prefix + below + p.name, p.shape, p.dim, p.parts, layer, p.expert)

    if not numbers.has_attention(layer) and numbers.delta is not None:
        yield from place(_delta(numbers, numbers.delta), "self_attention.")
    elif numbers.latent is not None:
        yield from place(_latent(numbers, numbers.latent), "")
    else:
        yield from place(_attention(numbers), "self_attention.")
    experts = numbers.has_experts(layer)
    yield from place(_experts(numbers) if experts else _dense(numbers), "")


def _attention(n: Numbers) -> Iterator[Parameter]:
    queries = n.heads * n.head_dim * (2 if n.output_gate else 1)
    rows = queries + 2 * n.kv_heads * n.head_dim
    yield Parameter("linear_qkv.layer_norm_weight", (n.hidden,))
    yield Parameter("linear_qkv.weight", (rows, n.hidden), 0)
    if n.qk_norm:
        yield Parameter("q_layernorm.weight", (n.head_dim,))
        yield Parameter("k_layernorm.weight", (n.head_dim,))
    yield Parameter("linear_proj.weight", (n.hidden, n.heads * n.head_dim), 1)


def _latent(n: Numbers, mla: Latent) -> Iterator[Parameter]:
    key = mla.nope_dim + mla.rope_dim
    at = "self_attention."
    yield Parameter("input_layernorm.weight", (n.hidden,))
    if mla.q_rank:
        yield Parameter(at + "linear_q_down_proj.weight", (mla.q_rank, n.hidden))
        yield Parameter(at + "linear_q_up_proj.layer_norm_weight", (mla.q_rank,))
        yield Parameter(at + "linear_q_up_proj.weight", (n.heads * key, mla.q_rank), 0)
    else:
        yield Parameter(at + "linear_q_proj.weight", (n.heads * key, n.hidden), 0)
    yield Parameter(at + "linear_kv_down_proj.weight", (mla.kv_rank + mla.rope_dim, n.hidden))
    yield Parameter(at + "linear_kv_up_proj.layer_norm_weight", (mla.kv_rank,))
    up = n.heads * (mla.nope_dim + mla.value_dim)
    yield Parameter(at + "linear_kv_up_proj.weight", (up, mla.kv_rank), 0)
    yield Parameter(at + "linear_proj.weight", (n.hidden, n.heads * mla.value_dim), 1)


def _delta(n: Numbers, d: Delta) -> Iterator[Parameter]:
    convolved = (("query", d.qk), ("key", d.qk), ("value", d.v))
    parts = (*convolved, ("z", d.v), ("beta", d.value_heads), ("alpha", d.value_heads))
    rows = sum(size for _, size in parts)
    yield Parameter("in_proj.layer_norm_weight", (n.hidden,))
    yield Parameter("in_proj.weight", (rows, n.hidden), 0, parts)
    yield Parameter("conv1d.weight", (2 * d.qk + d.v, 1, d.kernel), 0, convolved)
    yield Parameter("A_log", (d.value_heads,), 0)
    yield Parameter("dt_bias", (d.value_heads,), 0)
    yield Parameter("out_norm.weight", (d.value_dim,))
    yield Parameter("out_proj.weight", (n.hidden, d.v), 1)


def _dense(n: Numbers) -> Iterator[Parameter]:
    yield Parameter("mlp.linear_fc1.layer_norm_weight", (n.hidden,))
    yield from _swiglu("mlp.", n.hidden, n.ffn)


def _experts(n: Numbers) -> Iterator[Parameter]:
    yield Parameter("pre_mlp_layernorm.weight", (n.hidden,))
    yield Parameter("mlp.router.weight", (n.experts, n.hidden))
    if n.expert_bias:
        yield Parameter("mlp.router.expert_bias", (n.experts,))
    for e in range(n.experts):
        at = "mlp.experts."
        halves = (("gate", n.expert_ffn), ("up", n.expert_ffn))
        fc1, fc2 = (2 * n.expert_ffn, n.hidden), (n.hidden, n.expert_ffn)
        yield Parameter(f"{at}linear_fc1.weight{e}", fc1, 0, halves, None, e)
        yield Parameter(f"{at}linear_fc2.weight{e}", fc2, 1, (), None, e)
    if n.shared_ffn:
        yield from _swiglu("mlp.shared_experts.", n.hidden, n.shared_ffn)
        if n.shared_gate:
            yield Parameter("mlp.shared_experts.gate_weight", (1, n.hidden))


def _swiglu(at: str, hidden: int, ffn: int) -> Iterator[Parameter]:
    yield Parameter(at + "linear_fc1.weight", (2 * ffn, hidden), 0, (("gate", ffn), ("up", ffn)))
    yield Parameter(at + "linear_fc2.weight", (hidden, ffn), 1)
