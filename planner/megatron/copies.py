"""Word embeddings of which a later pipeline stage keeps a copy, for its output layer or for MTP.

The first stage saves the embedding, its moments and its options; the copy, which training keeps
equal, is left out of a save and filled from the same keys by a load. So the checkpoint opens with
any number of stages.

Source: megatron/core/models/common/language_module/language_module.py,
setup_embeddings_and_output_layer, which marks copies as `shared`.
"""

from typing import Any

from shardplan.layouts import Level, ParamInfo
from shardplan.layouts.model import clean_name
from shardplan.layouts.stages import Stage

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def copied_names(chunk: Any) -> frozenset[str]:
    """Returns the names, without wrappers' tokens, of a chunk's copies of word embeddings."""
    return frozenset(
        name
        for long, parameter in chunk.named_parameters()
        if getattr(parameter, "shared", False)
        and (name := clean_name(long)).endswith((_EMBEDDING, _OUTPUT))
    )


class EmbeddingCopies:
    """Names an output layer's copy of the word embeddings as the embeddings."""

    name = "megatron-embedding-copies"
    level = Level.NAME

    def claims(self, param: ParamInfo) -> bool:
        return param.fqn.endswith(_OUTPUT) and param.attribute("shared") is True

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        return ()

    def rename(self, param: ParamInfo, name: str) -> str:
        """Returns the name of the first stage's embeddings."""
        return name.removesuffix(_OUTPUT) + _EMBEDDING
