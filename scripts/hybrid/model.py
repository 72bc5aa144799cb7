"""The hybrid language model: embedding, layers, tied head."""

import torch
from torch import Tensor, nn

from attention import SelfAttention
from config import HybridConfig
from experts import MoELayer
from gated_delta import GatedDeltaNet
from groups import ProcessGroups
from mlp import SwiGLU
from packing import PackedBatch, PaddedView
from tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy


class TransformerLayer(nn.Module):
    """Sequence mixing and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: HybridConfig, index: int, groups: ProcessGroups) -> None:
        super().__init__()
        mixer = GatedDeltaNet if config.layer_types[index] == "gdn" else SelfAttention
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attention = mixer(config, groups.tp)
        self.pre_mlp_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp: nn.Module = (
            SwiGLU(config, config.ffn_hidden_size, groups.tp)
            if index < config.num_dense_layers
            else MoELayer(config, groups)
        )

    def forward(self, hidden: Tensor, view: PaddedView) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), view)
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Holds the word embeddings under Megatron's name."""

    def __init__(self, config: HybridConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config, groups.tp)


class Decoder(nn.Module):
    """The layers and the last norm."""

    def __init__(self, config: HybridConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(config, index, groups) for index in range(len(config.layer_types))
        )
        self.final_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)


class HybridModel(nn.Module):
    """The language model, cut for this rank; the output head is the embedding's weight.

    Attributes:
        pg_collection: This rank's process groups.
    """

    def __init__(self, config: HybridConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.config = config
        self.pg_collection = groups
        self.embedding = Embedding(config, groups)
        self.decoder = Decoder(config, groups)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Sum of the losses of this rank's tokens; 0-d, replicated over tensor-parallel ranks."""
        vocabulary = self.embedding.word_embeddings
        view = batch.padded()
        hidden = vocabulary(batch.inputs)
        for layer in self.decoder.layers:
            hidden = layer(hidden, view)
        logits = vocabulary.logits(self.decoder.final_layernorm(hidden))
        losses = vocab_parallel_cross_entropy(
            logits, batch.targets, vocabulary.vocab_start_index, vocabulary.group
        )
        return losses.sum()

    def moe_layers(self) -> list[MoELayer]:
        """The mixture-of-experts layers, in order."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    @torch.no_grad()
    def update_router_biases(self) -> None:
        """Follows the balance of the step's tokens; called by every rank after each step."""
        for layer in self.moe_layers():
            layer.router.update_bias(self.pg_collection.dp_cp)
