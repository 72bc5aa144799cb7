"""Tiny random models of transformers, saved as it saves them, and what they compute."""

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

VOCABULARY = 50
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
HYBRID = {
    **SMALL,
    **EXPERTS,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 16,
}
MODELS = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, intermediate_size=48)),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**HYBRID)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, **EXPERTS, num_hidden_layers=2, intermediate_size=48)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_hidden_layers=2, intermediate_size=48)
    ),
}
CLASSES = {
    "qwen3_next": Qwen3NextForCausalLM,
    "qwen3_5_moe": Qwen3_5MoeForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "llama": LlamaForCausalLM,
}


def make(kind, path):
    """Saves a random model; every parameter has values of its own, norms too."""
    torch.manual_seed(7)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return model


def reopen(kind, path):
    """Loads a folder as a user would; nothing may be missing, left over or of another shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = CLASSES[kind].from_pretrained(path, output_loading_info=True)
    assert {name: [] for name in info} == {name: list(found) for name, found in info.items()}
    return model.eval()


def logits(model):
    tokens = torch.arange(20).reshape(2, 10) * 7 % VOCABULARY
    with torch.no_grad():
        return model(tokens).logits
