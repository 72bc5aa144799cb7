"""Saves tensors that are read block by block, by one process, through any DCP storage writer."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter

from .blocks import row_blocks
from .streams import Advance, Source

_LARGEST_CHUNK = 256 << 20


class StreamedSavePlanner(SavePlanner):
    """Plans one process's save of everything; a block is read when the writer asks for it.

    Args:
        tensors: What to save, by key.
        objects: Values that are no tensors, as `torch.save` made bytes of them.
        paths: Place of each key in the nested state dict.
        advance: Told the bytes of each block.
        largest: Most bytes of one chunk, and so of what is in memory at a time.
    """

    def __init__(
        self,
        tensors: Mapping[str, Source],
        objects: Mapping[str, io.BytesIO],
        paths: Mapping[str, tuple[Any, ...]],
        advance: Advance = lambda n: None,
        largest: int = _LARGEST_CHUNK,
    ) -> None:
        self._tensors = dict(tensors)
        self._objects = dict(objects)
        self._paths = dict(paths)
        self._advance = advance
        self._largest = largest

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Does nothing: the planner has its sources."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, source in self._tensors.items():
            properties, size = TensorProperties(dtype=source.dtype), torch.Size(source.shape)
            for offsets, sizes in row_blocks(source.shape, source.dtype.itemsize, self._largest):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, properties, size)
                index = MetadataIndex(key, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += (WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects)
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        stored: dict[str, Any] = {key: BytesStorageMetadata() for key in self._objects}
        for item in all_plans[0].items:
            data = item.tensor_data
            if data is not None:
                found = stored.setdefault(
                    item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
                )
                found.chunks.append(data.chunk)
        return all_plans, Metadata(stored, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        data = write_item.tensor_data
        if data is None:
            return self._objects[key]
        chunk = data.chunk
        return self._tensors[key].block(tuple(chunk.offsets), tuple(chunk.sizes), self._advance)


def drive_save(
    planner: SavePlanner, writer: StorageWriter, state_dict: Mapping[str, Any] | None = None
) -> None:
    """Saves with one process and without a process group: DCP's own steps in order.

    Args:
        planner: Plans the save.
        writer: Writes it.
        state_dict: What the planner is given; a planner that has its sources needs nothing.
    """
    planner.set_up_planner(dict(state_dict or {}), writer.storage_meta(), True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = writer.prepare_global_plan(plans)[0]
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
