"""A single file that `torch.save` wrote, opened by mapping it into memory; plain data only."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError

from ..state.entries import key_of
from ..state.snapshot import Snapshot
from .arrays import Array
from .files import Files
from .opened import Checkpoint, Fault, nbytes


class TorchFile(Checkpoint):
    """A state dict in one file.

    Args:
        path: The file.
        trust_pickle: Whether objects that are no plain data may be unpickled.

    Raises:
        CheckpointError: If it is no such file or holds objects that are no plain data.
    """

    format = "torch"

    def __init__(self, path: Path, *, trust_pickle: bool = False) -> None:
        try:
            loaded = torch.load(
                path,
                map_location="cpu",
                weights_only=not trust_pickle,
                mmap=zipfile.is_zipfile(path),
            )
        except Exception as error:  # torch raises many kinds on damaged or foreign files
            raise CheckpointError(
                f"{path}: not a file of tensors and plain data that torch.save wrote "
                f"({type(error).__name__}: {str(error).splitlines()[0][:160]}). Pass --trust-pickle "
                "if you trust where it comes from; that runs whatever code it holds."
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path}: holds a {type(loaded).__name__}, not a state dict.")
        snapshot = Snapshot(loaded)
        self._values: dict[str, Any] = {}
        paths = {}
        stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for where, value in zip(snapshot.paths, snapshot.take_values(), strict=True):
            key = key_of(where)
            if key in stored:
                raise CheckpointError(f"{path}: two values have the key {key}.")
            self._values[key] = value
            paths[key] = where
            if isinstance(value, torch.Tensor):
                size = value.shape
                zeros = torch.Size([0] * len(size))
                stored[key] = TensorStorageMetadata(
                    TensorProperties(dtype=value.dtype), size, [ChunkStorageMetadata(zeros, size)]
                )
            else:
                stored[key] = BytesStorageMetadata()
        super().__init__(path, Files(path.parent), Metadata(stored, planner_data=paths))

    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        return None

    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        value: torch.Tensor = self._values[key]
        return value.detach()

    def object_bytes(self, key: str) -> bytes:
        stream = io.BytesIO()
        torch.save(self._values[key], stream)
        return stream.getvalue()

    def file_bytes(self) -> dict[str, int]:
        return {self.path.name: self.path.stat().st_size}

    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        return self.path.name, 0, nbytes(self.tensor(key))

    def structure_faults(self) -> Iterator[Fault]:
        if not zipfile.is_zipfile(self.path):
            return  # the old form of torch.save has no checksums
        with zipfile.ZipFile(self.path) as archive:
            try:
                bad = archive.testzip()
            except (zipfile.BadZipFile, NotImplementedError) as error:
                yield Fault(self.path.name, str(error))
                return
        if bad is not None:
            yield Fault(self.path.name, f"the checksum of its record {bad} differs")

    def checksum_faults(self, key: str) -> Iterator[Fault]:
        return iter(())
