"""Rules from Megatron-Core's names to those of Hugging Face checkpoints.

| model type | differs by |
|---|---|
| `llama` | grouped QKV and SwiGLU halves become projections of their own |
| `qwen3_moe` | the same, and experts one by one |
| `qwen3_next` | the queries' output gate, woven GDN projections, shared expert with a gate |
| `qwen3_5_moe` | the same with GDN projections in a row |

Source: transformers, models/{llama,qwen3_moe,qwen3_next,qwen3_5_moe}/modeling_*.py, and
megatron/core/transformer/attention.py for the order of rows inside `linear_qkv`.
"""

from shardplan.layouts import Interleave, Join, LayoutError, Stack

from ..recipes.numbers import Delta, Numbers
from ..recipes.parameters import EMBEDDING, OUTPUT
from .names import Rule

_OURS = "decoder.layers.{layer}."
_THEIRS = "model.layers.{layer}."
_HALVES = Join(0, (("gate_proj.weight", ("_w",), 1), ("up_proj.weight", ("_v",), 1)))


def rules_for(numbers: Numbers, *, stacked_experts: bool = False) -> tuple[Rule, ...]:
    """Returns the rules for a model.

    Args:
        numbers: The model's numbers; `kind` chooses the rules.
        stacked_experts: Whether the experts of a layer are one tensor there
            (`experts.gate_up_proj`, `experts.down_proj`) rather than one each.

    Raises:
        LayoutError: If there are no rules for its kind.
    """
    if numbers.kind not in ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        raise LayoutError(
            f"{numbers.kind}: no rules for this kind of model. Pass rules of your own "
            "(shardplan.planner.tools.huggingface.Rule)."
        )
    rules = [
        Rule(EMBEDDING, "model.embed_tokens.weight"),
        Rule("decoder.final_layernorm.weight", "model.norm.weight"),
        Rule(OUTPUT, "lm_head.weight"),
        *_attention(numbers),
    ]
    if numbers.delta is not None:
        rules += _delta(numbers.delta, woven=numbers.kind == "qwen3_next")
    if numbers.experts:
        rules += _experts(numbers, stacked_experts)
    rules += (
        Rule(
            _OURS + "mlp.linear_fc1.layer_norm_weight", _THEIRS + "post_attention_layernorm.weight"
        ),
        Rule(_OURS + "mlp.linear_fc1.weight", _THEIRS + "mlp.", (_HALVES,)),
        Rule(_OURS + "mlp.linear_fc2.weight", _THEIRS + "mlp.down_proj.weight"),
    )
    return tuple(rules)


def _attention(n: Numbers) -> list[Rule]:
    ours, theirs = _OURS + "self_attention.", _THEIRS + "self_attn."
    norm = _THEIRS + "input_layernorm.weight"
    queries = n.heads // n.kv_heads * n.head_dim
    parts = [("q", queries), ("gate", queries), ("k", n.head_dim), ("v", n.head_dim)]
    woven: tuple[str, tuple[str, ...], int] = ("q_proj.weight", ("q", "gate"), n.heads)
    if not n.output_gate:
        parts.pop(1)
        woven = ("q_proj.weight", ("q",), 1)
    split = Interleave(0, n.kv_heads, tuple(parts), "QKV")
    join = Join(0, (woven, ("k_proj.weight", ("k",), 1), ("v_proj.weight", ("v",), 1)))
    return [
        Rule(_OURS + "input_layernorm.weight", norm),
        Rule(ours + "linear_qkv.layer_norm_weight", norm),
        Rule(ours + "linear_qkv.weight", theirs, (split, join)),
        Rule(ours + "linear_proj.weight", theirs + "o_proj.weight"),
        Rule(ours + "q_layernorm.weight", theirs + "q_norm.weight"),
        Rule(ours + "k_layernorm.weight", theirs + "k_norm.weight"),
    ]


def _delta(d: Delta, *, woven: bool) -> list[Rule]:
    ours, theirs = _OURS + "self_attention.", _THEIRS + "linear_attn."
    convolved = (".query", ".key", ".value")
    if woven:
        join = Join(
            0,
            (
                ("in_proj_qkvz.weight", (*convolved, ".z"), d.key_heads),
                ("in_proj_ba.weight", (".beta", ".alpha"), d.key_heads),
            ),
        )
    else:
        join = Join(
            0,
            (
                ("in_proj_qkv.weight", convolved, 1),
                ("in_proj_z.weight", (".z",), 1),
                ("in_proj_b.weight", (".beta",), 1),
                ("in_proj_a.weight", (".alpha",), 1),
            ),
        )
    return [
        Rule(ours + "in_proj.layer_norm_weight", _THEIRS + "input_layernorm.weight"),
        Rule(ours + "in_proj.weight", theirs, (join,)),
        Rule(ours + "conv1d.weight", theirs, (Join(0, (("conv1d.weight", convolved, 1),)),)),
        Rule(ours + "A_log", theirs + "A_log"),
        Rule(ours + "dt_bias", theirs + "dt_bias"),
        Rule(ours + "out_norm.weight", theirs + "norm.weight"),
        Rule(ours + "out_proj.weight", theirs + "out_proj.weight"),
    ]


def _experts(n: Numbers, stacked: bool) -> list[Rule]:
    ours, theirs = _OURS + "mlp.", _THEIRS + "mlp."
    experts, each = ours + "experts.", theirs + "experts.{expert}."
    fc1 = Rule(experts + "linear_fc1.weight{expert}", each, (_HALVES,))
    fc2 = Rule(experts + "linear_fc2.weight{expert}", each + "down_proj.weight")
    if stacked:
        join = Join(0, (("gate_up_proj", ("_w", "_v"), 1),))
        fc1 = Rule(fc1.name, theirs + "experts.", (join, Stack(n.experts)))
        fc2 = Rule(fc2.name, theirs + "experts.down_proj", (Stack(n.experts),))
    shared = ours + "shared_experts."
    return [
        Rule(ours + "router.weight", theirs + "gate.weight"),
        fc1,
        fc2,
        Rule(shared + "linear_fc1.weight", theirs + "shared_expert.", (_HALVES,)),
        Rule(shared + "linear_fc2.weight", theirs + "shared_expert.down_proj.weight"),
        Rule(shared + "gate_weight", theirs + "shared_expert_gate.weight"),
        Rule(_OURS + "pre_mlp_layernorm.weight", _THEIRS + "post_attention_layernorm.weight"),
    ]
