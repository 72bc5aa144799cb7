"""A rank's documents, packed end to end, and the padded view that sequence layers work on."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Documents of unequal length laid end to end; a rank may have none.

    Attributes:
        inputs: Token ids `[tokens]`.
        targets: The token that follows each input `[tokens]`.
        lengths: Tokens of each document, in order.
    """

    inputs: Tensor
    targets: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, documents: list[bytes], separator: int) -> "PackedBatch":
        """Packs documents; each is read after the separator and ends by predicting it."""
        inputs: list[int] = []
        targets: list[int] = []
        for document in documents:
            inputs += [separator, *document]
            targets += [*document, separator]
        return cls(
            torch.tensor(inputs, dtype=torch.long),
            torch.tensor(targets, dtype=torch.long),
            tuple(len(document) + 1 for document in documents),
        )

    def padded(self) -> "PaddedView":
        """The index arithmetic between packed rows and a padded batch."""
        longest = max((1, *self.lengths))
        rows = [torch.arange(length) + place * longest for place, length in enumerate(self.lengths)]
        empty = torch.empty(0, dtype=torch.long)
        return PaddedView(max(1, len(self.lengths)), longest, torch.cat([empty, *rows]))


@dataclass(frozen=True, slots=True)
class PaddedView:
    """Moves rows between packed `[tokens, ...]` and padded `[documents, length, ...]`.

    The padded batch is never smaller than 1 x 1, so that a rank without documents runs the same
    operations as the others and its gradients are zeros instead of missing: FSDP's reductions
    would otherwise differ in size between ranks.

    Attributes:
        documents: Rows of the padded batch.
        length: Tokens of the longest document.
        index: Place of each packed token in the flattened padded batch `[tokens]`.
    """

    documents: int
    length: int
    index: Tensor

    def pad(self, packed: Tensor) -> Tensor:
        """`[tokens, ...]` → `[documents, length, ...]`, zeros where there is no token."""
        flat = packed.new_zeros(self.documents * self.length, *packed.shape[1:])
        flat = flat.index_copy(0, self.index, packed)
        return flat.view(self.documents, self.length, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """`[documents, length, ...]` → `[tokens, ...]`."""
        return padded.flatten(0, 1)[self.index]
