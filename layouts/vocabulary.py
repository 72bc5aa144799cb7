"""Vocabulary padding: embeddings are padded to a multiple of the tensor-parallel size."""

from collections.abc import Mapping

from .provider import Level, ParamInfo, attribute, matcher
from .stages import Stage, Unpad


class VocabularyPadding:
    """Keeps the padding rows of an embedding or output layer out of the checkpoint.

    The padded size depends on the tensor-parallel size, the true one does not, so only the true
    rows are on disk. At load the padding rows are the load planner's `padding` policy.

    | form | reads |
    |---|---|
    | `VocabularyPadding()` | `vocab_size` of the module that owns the parameter, the true size, if the parameter has so many rows |
    | `VocabularyPadding({"*.word_embeddings.weight": 50257})` | the true size by name |

    Args:
        sizes: True vocabulary size for each pattern of names.

    Source: megatron/training/tokenizer, vocab_size_with_padding.
    """

    name = "vocabulary-padding"
    level = Level.PADDING

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._rules = [(matcher([pattern]), size) for pattern, size in (sizes or {}).items()]

    def size(self, param: ParamInfo) -> int | None:
        """Returns the true vocabulary size, None for a parameter without a vocabulary."""
        for matches, size in self._rules:
            if matches(param.fqn):
                return size
        if param.owners and param.local_shape:
            own = attribute(param.owners[-1][1], "vocab_size")
            rows = param.local_shape[0] * param.grid.size(param.axis("tp", "etp"))
            # A module may know its vocabulary and own other parameters too; they are shorter.
            return own if isinstance(own, int) and rows >= own else None
        return None

    def claims(self, param: ParamInfo) -> bool:
        return self.size(param) is not None

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        size = self.size(param)
        return () if size is None else (Unpad(0, size),)
