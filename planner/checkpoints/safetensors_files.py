"""Safetensors: one file, or a folder of them, as Hugging Face and torch's own writers make them."""

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import DamagedCheckpointError, IncompleteCheckpointError, MissingKeyError
from shardplan.layouts.slab import Shape

from ..storage.format.dtypes import CODES, torch_form
from ..storage.format.header import Header, header_length, parse_header
from .arrays import Array
from .files import Files
from .opened import Checkpoint, Fault

INDEX = "model.safetensors.index.json"
NAMES = CODES
_SHARDING = "DCP_SHARDING_INFO"
_LEFT_OVER = (
    "Files of an older save were probably left in the folder: remove those that are not of the "
    "newest save, and save into empty folders."
)


def read_header(files: Files, name: str) -> Header:
    """Returns the checked header of a safetensors file.

    Raises:
        CheckpointError: If the file is missing, or not a safetensors file without hole or overlap.
    """
    size = files.size(name)
    if size is None:
        raise IncompleteCheckpointError(f"{files.path(name)}: the file is missing. Restore it.")
    where = files.path(name)
    length = header_length(where, files.take(name, 0, min(8, size)), size)
    return parse_header(where, files.take(name, 8, length), size)


class SafetensorsFiles(Checkpoint):
    """A safetensors file, or a folder of them with or without an index.

    Args:
        files: The folder's files.
        name: The one file, None for all in the folder.

    Raises:
        CheckpointError: If a header is damaged, a file that the index names is missing, or two
            files hold one key.
    """

    format = "safetensors"
    has_checksums = False

    def __init__(self, files: Files, name: str | None = None) -> None:
        self._index: dict[str, str] | None = None
        if name is None and files.size(INDEX) is not None:
            self._index = _weight_map(files)
        names = [name] if name is not None else sorted(set((self._index or {}).values()))
        names = names or [n for n in files.names() if n.endswith(".safetensors")]
        self._arrays: dict[tuple[str, Shape], Array] = {}
        self._sizes: dict[str, int] = {}
        self._twice: list[tuple[str, str, str]] = []
        stored: dict[str, Any] = {}
        for each in names:
            self._take(files, each, read_header(files, each), stored)
        path = files.root if name is None else files.path(name)
        super().__init__(path, files, Metadata(stored))

    def _take(self, files: Files, name: str, header: Header, stored: dict[str, Any]) -> None:
        """Adds the tensors of one file; a tensor may be in several files, in chunks."""
        where = files.path(name)
        sharding = _sharding(where, header)
        for key, entry in header.entries.items():
            try:
                dtype, sizes = torch_form(entry.code, entry.shape)
            except ValueError as error:
                raise DamagedCheckpointError(
                    f"{key}: {where}: {error}. Open it with another tool."
                ) from None
            offsets = sharding.get(key, (0,) * len(sizes))
            if len(offsets) != len(sizes):
                raise DamagedCheckpointError(
                    f"{key}: {where}: its chunk of shape {sizes} lies at {offsets}. Restore the file."
                )
            new = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(sizes), [])
            known = stored.setdefault(key, new)
            other = known.chunks and self._arrays[key, tuple(known.chunks[0].offsets)].file
            if other and (not sharding or len(known.size) != len(sizes)):
                raise DamagedCheckpointError(
                    f"{key}: two files hold it, {other} and {name}. {_LEFT_OVER}"
                )
            if known.properties.dtype != dtype:
                raise DamagedCheckpointError(
                    f"{key}: {dtype} in {name}, but {known.properties.dtype} in {other}. {_LEFT_OVER}"
                )
            if (key, offsets) in self._arrays:
                self._twice.append((key, self._arrays[key, offsets].file, name))
            place = header.data_start + entry.start
            self._arrays[key, offsets] = Array(name, place, dtype.itemsize, sizes)
            known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            ends = (max(a, o + s) for a, o, s in zip(known.size, offsets, sizes, strict=True))
            known.size = torch.Size(ends)
        self._sizes[name] = header.data_start + max(
            (entry.stop for entry in header.entries.values()), default=0
        )

    def coverage_text(self, key: str) -> str:
        files = sorted({array.file for (k, _), array in self._arrays.items() if k == key})
        files += [old for k, old, _ in self._twice if k == key and old not in files]
        return f" (its chunks are in {', '.join(files)}). {_LEFT_OVER}" if len(files) > 1 else ""

    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        return self._arrays[key, tuple(chunk.offsets)]

    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        raise NotImplementedError  # `array` knows them all

    def object_bytes(self, key: str) -> bytes:
        raise MissingKeyError(f"{key}: safetensors files hold tensors only.")

    def file_bytes(self) -> dict[str, int]:
        return dict(self._sizes)

    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        array = self._arrays[key, tuple(chunk.offsets)]
        return array.file, array.start, math.prod(array.shape) * array.itemsize

    def structure_faults(self) -> Iterator[Fault]:
        if self._index is None:
            return
        found = {key: array.file for (key, _), array in self._arrays.items()}
        for key, name in self._index.items():
            if found.get(key) != name:
                yield Fault(key, f"the index says {name}, but it is in {found.get(key)}")
        for key in found.keys() - self._index.keys():
            yield Fault(key, f"in {found[key]}, but not in the index")

    def checksum_faults(self, key: str) -> Iterator[Fault]:
        return iter(())  # the format has none


def _weight_map(files: Files) -> dict[str, str]:
    """Returns which file holds each key, by a folder's index."""
    try:
        weights = json.loads(files.whole(INDEX))["weight_map"]
        return {str(key): str(name) for key, name in weights.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{files.path(INDEX)}: not an index of safetensors ({error!r}). Restore the file, or "
            "remove it."
        ) from None


def _sharding(where: str, header: Header) -> dict[str, Shape]:
    """Returns where the chunks of a file lie that torch's sharded safetensors writer made."""
    try:
        told = json.loads(header.metadata.get(_SHARDING, "{}"))
        found = {key: tuple(info["saved_offsets"]) for key, info in told.items()}
        if not all(type(n) is int and n >= 0 for offsets in found.values() for n in offsets):
            raise ValueError("offsets that are not numbers")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{where}: its {_SHARDING} can't be read ({error!r}). Restore the file."
        ) from None
