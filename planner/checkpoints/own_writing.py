"""Writes the library's own format from sources that are read tensor by tensor, by one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from shardplan.layouts import Grids

from ..save import LayoutAwareSavePlanner
from ..storage import SafetensorsWriter
from .streamed import drive_save
from .streams import Advance, Source
from .unbacked import unbacked


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One stored value, whatever it contains: the planner would make keys of a dict's entries."""

    value: Any


class _SourcePlanner(LayoutAwareSavePlanner):
    """Plans a save of one rank that holds everything; a tensor is read when it is written."""

    def __init__(self, tensors: Mapping[str, Source], advance: Advance) -> None:
        shapes = {key: source.shape for key, source in tensors.items()}
        super().__init__(shapes, grid=Grids.from_sizes(0), layouts=())
        self._tensors = dict(tensors)
        self._advance = advance

    def resolve_data(self, write_item: WriteItem) -> Any:
        source = self._tensors.get(write_item.index.fqn)
        if source is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        self._take(write_item)
        chunk = write_item.tensor_data.chunk
        block: torch.Tensor = source.block(tuple(chunk.offsets), tuple(chunk.sizes), self._advance)
        return block

    def resolve_value(self, write_item: WriteItem) -> Any:
        value = super().resolve_value(write_item)
        return value.value if isinstance(value, _Leaf) else value


def write_own(
    path: Path,
    tensors: Mapping[str, Source],
    objects: Mapping[str, Any],
    advance: Advance = lambda n: None,
) -> None:
    """Writes a checkpoint in the library's own format; one tensor is in memory at a time.

    Args:
        path: The folder.
        tensors: The tensors by key.
        objects: The other values by key; plain data.
        advance: Told the bytes of each tensor that is read.

    Raises:
        CheckpointExistsError: If a complete checkpoint is there.
        UnstorableValueError: If the format can't hold a key.
        CheckpointError: If a value is not plain data, or the files can't be written.
    """
    blanks = unbacked((source.dtype, source.shape) for source in tensors.values())
    state: dict[str, Any] = {key: _Leaf(value) for key, value in objects.items()}
    state |= zip(tensors, blanks, strict=True)
    drive_save(_SourcePlanner(tensors, advance), SafetensorsWriter(path), state)
