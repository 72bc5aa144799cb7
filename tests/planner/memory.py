"""Storage in memory: DCP's writer and reader without files, so that a matrix of loads is quick."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import world
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

Place = tuple[str, tuple[int, ...] | None]


class Memory:
    """What all ranks wrote: tensors by key and offset, bytes by key."""

    def __init__(self) -> None:
        self.data: dict[Place, torch.Tensor | bytes] = {}
        self.written_by: dict[Place, int] = {}
        self.metadata: Metadata | None = None

    def tensor(self, key: str) -> torch.Tensor:
        """A global tensor, put together from its chunks; -1 where nobody wrote."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata[key]
        whole = torch.full(tuple(stored.size), -1, dtype=stored.properties.dtype)
        for (fqn, offset), data in self.data.items():
            if fqn == key:
                place = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
                whole[place] = data
        return whole

    def value(self, key: str) -> Any:
        return torch.load(io.BytesIO(self.data[key, None]), weights_only=False)


def _place(index: MetadataIndex) -> Place:
    return index.fqn, None if index.offset is None else tuple(index.offset)


class MemoryWriter(StorageWriter):
    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.rank = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def storage_meta(self) -> StorageMeta | None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            place = _place(item.index)
            assert place not in self.memory.data, f"{place} was written twice"
            if item.tensor_data is not None:
                assert item.tensor_data.chunk.sizes == data.shape
            stored = data.getvalue() if isinstance(data, io.BytesIO) else data.clone()
            self.memory.data[place] = stored
            self.memory.written_by[place] = self.rank
            results.append(WriteResult(item.index, 0, place))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.memory.metadata = metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class MemoryReader(StorageReader):
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert self.memory.metadata is not None
        return self.memory.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            data = self.memory.data[_place(item.storage_index)]
            if item.type == LoadItemType.BYTE_IO:
                assert isinstance(data, bytes)
                planner.load_bytes(item, io.BytesIO(data))
                continue
            assert isinstance(data, torch.Tensor)
            for dim, (start, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                data = data.narrow(dim, start, size)
            target = planner.resolve_tensor(item)
            assert target.shape == data.shape
            target.copy_(data)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


# All ranks in one process, in memory --------------------------------------------------------------


def save(states: Sequence[dict[str, Any]], planners: Sequence[Any]) -> Memory:
    """What all ranks together write of their state dicts."""
    memory = Memory()
    world.save(Path(), states, planners, lambda path: MemoryWriter(memory))
    return memory


def load(memory: Memory, states: Sequence[dict[str, Any]], planners: Sequence[Any]) -> None:
    """Fills every rank's state dict in place."""
    world.load(Path(), states, planners, lambda path: MemoryReader(memory))


def stored(**tensors: tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]) -> Memory:
    """A checkpoint with chunks as given: key → global shape and `(offsets, data)` of each."""
    memory, entries = Memory(), {}
    for key, (shape, chunks) in tensors.items():
        listed = [ChunkStorageMetadata(torch.Size(offsets), data.shape) for offsets, data in chunks]
        dtype = chunks[0][1].dtype
        properties = TensorProperties(dtype=dtype)
        entries[key] = TensorStorageMetadata(properties, torch.Size(shape), listed)
        memory.data |= {(key, offsets): data for offsets, data in chunks}
    memory.metadata = Metadata(entries)
    return memory


def boxes(
    planner: Any, state: dict[str, Any]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Key, offsets and sizes of every tensor that one rank plans to write."""
    planner.set_up_planner(state)
    return [
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for item in planner.create_local_plan().items
        if item.tensor_data is not None
    ]
