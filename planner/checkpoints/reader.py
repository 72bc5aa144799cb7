"""A DCP storage reader over an open checkpoint of any format: `dcp.load` from any of them."""

import io
import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..storage import SafetensorsReader
from .opened import Checkpoint
from .opening import open_checkpoint
from .own import OwnCheckpoint


class CheckpointReader(StorageReader):
    """Reads stock DCP folders, files of `torch.save` and safetensors without executing a pickle.

    Each rank opens the files itself and reads no byte more than its boxes need. Of tensors that a
    rank reads from all their chunks, it first compares the checksums that the format has.

    Args:
        path: The checkpoint's folder or file, or its URL.
        trust_pickle: Whether objects that are not plain data may be unpickled.

    >>> from torch.distributed.checkpoint import load  # load(state, storage_reader=CheckpointReader(path))
    """

    def __init__(self, path: str | os.PathLike[str], *, trust_pickle: bool = False) -> None:
        self._path = os.fspath(path)
        self._trust = trust_pickle
        self._open: Checkpoint | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The open checkpoint."""
        if self._open is None:
            self._open = open_checkpoint(self._path, trust_pickle=self._trust)
        return self._open

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        if self._open is not None:
            self._open.close()
        self._open = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        # DCP looks for a parameter named kwargs and would ask again for this rank's own metadata.
        metadata = self.checkpoint.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: every rank opens the checkpoint when it first reads."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self.checkpoint
        if isinstance(
            checkpoint, OwnCheckpoint
        ):  # its own reader compares checksums block by block
            own = SafetensorsReader(self._path)
            own.read_metadata()
            return own.read_data(plan, planner)
        asked: dict[str, set[tuple[int, ...]]] = {}
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO and item.storage_index.offset is not None:
                asked.setdefault(item.storage_index.fqn, set()).add(item.storage_index.offset)
        for key, offsets in asked.items():
            # The sums of these formats are of whole chunks: to compare them is to read all of them.
            if offsets >= {tuple(chunk.offsets) for chunk in checkpoint.tensor(key).chunks}:
                checkpoint.check(key)
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(checkpoint.object_bytes(key)))
                continue
            chunks = checkpoint.tensor(key).chunks
            number = item.storage_index.index
            hinted = number is not None and number < len(chunks)
            chunk = chunks[number] if hinted and number is not None else None
            if chunk is None or chunk.offsets != item.storage_index.offset:
                chunk = next(c for c in chunks if c.offsets == item.storage_index.offset)
            target = planner.resolve_tensor(item).detach()
            checkpoint.read_into(
                key, chunk, tuple(item.storage_offsets), tuple(item.lengths), target
            )
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return "://" in os.fspath(checkpoint_id) or Path(checkpoint_id).exists()
