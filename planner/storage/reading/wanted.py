"""What a load wants of one saved chunk.

| name | is |
|---|---|
| `Want` | a box of a chunk, and the tensors that it fills |
| `Part` | all that is wanted of one chunk |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardplan.layouts.slab import Shape


@dataclass(eq=False, slots=True)
class Want:
    """Part of a saved chunk, and the tensors that it fills.

    Attributes:
        offsets: First element of the part, relative to the chunk.
        lengths: Extent of the part.
        items: The read items, which the planner gets back.
        targets: A tensor for each item; it has the extent of the part.
    """

    offsets: Shape
    lengths: Shape
    items: list[Any] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)

    def meets(self, other: "Want") -> bool:
        """Returns whether two parts of one chunk have an element in common."""
        return all(
            a < b + m and b < a + n
            for a, n, b, m in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )


class Part:
    """All that is wanted of one chunk.

    Args:
        name: What errors call it: file, key, offsets of the chunk, rank; no offsets for a value.
        position: Of the chunk's first byte in the file.
        nbytes: Size of the chunk in bytes.
        sizes: Shape of the chunk.
        dtype: Data type of its elements.
        total: Its checksum.
        row: Its first row in the table of block checksums, None if it has one block.

    Attributes:
        wants: The parts of it, no two of them equal.
        pending: How many segments are under way.
        issued: Whether all of its segments are.
    """

    __slots__ = (
        "_name",
        "dtype",
        "issued",
        "nbytes",
        "pending",
        "position",
        "row",
        "sizes",
        "total",
        "wants",
    )

    def __init__(
        self,
        name: tuple[str, str, Sequence[int] | None, int],
        position: int,
        nbytes: int,
        sizes: Shape,
        dtype: torch.dtype,
        total: bytes,
        row: int | None = None,
    ) -> None:
        self._name = name
        self.position = position
        self.nbytes = nbytes
        self.sizes = sizes
        self.dtype = dtype
        self.total = total
        self.row = row
        self.wants: list[Want] = []
        self.pending = 0
        self.issued = False

    @property
    def where(self) -> str:
        """File, key, place and rank, for errors."""
        file, key, offsets, rank = self._name
        at = "" if offsets is None else f" at {tuple(offsets)}"
        return f"{file}: {key}{at} (rank {rank})"
