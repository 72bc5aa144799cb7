"""Writes the library's own format from sources that are read tensor by tensor, by one process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from shardplan.layouts import Grids

from ..save import LayoutAwareSavePlanner
from ..storage import SafetensorsWriter
from .streams import Source
from .unbacked import unbacked


class _SourcePlanner(LayoutAwareSavePlanner):
    """Plans a save of one rank that holds everything; a tensor is read when it is written."""

    def __init__(self, tensors: Mapping[str, Source], advance: Callable[[int], None]) -> None:
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
        block: torch.Tensor = source.read(tuple(chunk.offsets), tuple(chunk.sizes))
        self._advance(block.numel() * block.element_size())
        return block.contiguous()


def write_own(
    path: Path,
    tensors: Mapping[str, Source],
    objects: Mapping[str, Any],
    advance: Callable[[int], None] = lambda n: None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint in the library's own format; one tensor is in memory at a time.

    Args:
        path: The folder.
        tensors: The tensors by key.
        objects: Values that are no tensors by key; plain data.
        advance: Told the bytes of each tensor that is read.
        overwrite: Whether a complete checkpoint that is there may be replaced.

    Raises:
        CheckpointError: If a value is no plain data, or the files can't be written.
    """
    names = list(tensors)
    blanks = unbacked((tensors[key].dtype, tensors[key].shape) for key in names)
    state: dict[str, Any] = {**dict(zip(names, blanks, strict=True)), **objects}
    planner = _SourcePlanner(tensors, advance)
    writer = SafetensorsWriter(path, overwrite=overwrite)
    planner.set_up_planner(state, None, True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])
