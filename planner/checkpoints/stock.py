"""A checkpoint that torch's own file system writer made, read without executing its pickle."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError, DamagedCheckpointError, IncompleteCheckpointError

from ..state.entries import Index
from ..storage.format.dtypes import torch_form
from ..storage.format.header import Header
from .arrays import Array
from .files import Files
from .opened import Checkpoint, Fault
from .records import Section, damaged, find_array
from .safe_metadata import metadata_from_bytes
from .safetensors_files import read_header

METADATA = ".metadata"


class StockCheckpoint(Checkpoint):
    """A folder with `.metadata` and `__{rank}_{n}.distcp` files.

    Args:
        files: The folder's files.
        trust_pickle: Whether to unpickle `.metadata` whatever it names.

    Raises:
        CheckpointError: If `.metadata` is missing, damaged, or names more than DCP's types.
    """

    format = "dcp"

    def __init__(self, files: Files, *, trust_pickle: bool = False) -> None:
        where = files.path(METADATA)
        metadata = metadata_from_bytes(files.whole(METADATA), where, trust_pickle=trust_pickle)
        if not isinstance(metadata.storage_data, dict):
            raise DamagedCheckpointError(
                f"{where}: it does not say where the data lies. Restore the file."
            )
        super().__init__(files.root, files, metadata)
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._headers: dict[str, Header | None] = {}
        self._arrays: dict[tuple[str, torch.Size], Array | None] = {}

    def state_path(self, key: str) -> tuple[Any, ...]:
        path = super().state_path(key)
        return tuple(Index(e) if isinstance(e, int) else e for e in path)

    def _place(self, key: str, offsets: torch.Size | None) -> Any:
        place = self._places.get(MetadataIndex(key, offsets))
        if place is None:
            at = f" the chunk at {tuple(offsets)}" if offsets is not None else ""
            raise IncompleteCheckpointError(
                f"{key}: the metadata does not say where{at} lies. The save did not finish, or "
                "a writer lost it."
            )
        return place

    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        place = self._place(key, chunk.offsets)
        return place.relative_path, place.offset, place.length

    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        ident = (key, chunk.offsets)
        if ident not in self._arrays:
            place = self._place(*ident)
            if place.transform_descriptors:
                raise CheckpointError(
                    f"{key}: stored with the transforms {place.transform_descriptors}, which only "
                    "the extension that wrote it can undo."
                )
            if len(self._arrays) > 4096:
                self._arrays.clear()
            self._arrays[ident] = self._find(key, chunk, place)
        return self._arrays[ident]

    def _find(self, key: str, chunk: ChunkStorageMetadata, place: Any) -> Array | None:
        name = place.relative_path
        header = self._header(name)
        if header is None:
            return find_array(self.files, name, place.offset, place.length, key)
        entry = header.entries.get(key)
        if entry is None:
            raise DamagedCheckpointError(
                f"{key}: {self.files.path(name)}: not in this file, though the metadata says so. "
                "Restore the file."
            )
        dtype, shape = torch_form(entry.code, entry.shape)
        return Array(name, header.data_start + entry.start, dtype.itemsize, shape)

    def _header(self, name: str) -> Header | None:
        """Returns a data file's header if torch's writer was asked for safetensors, else None."""
        if name not in self._headers:
            head = self.files.take(name, 0, 9) if (self.files.size(name) or 0) > 8 else b""
            plain = head[:4] != b"PK\x03\x04" and head[8:] == b"{"
            self._headers[name] = read_header(self.files, name) if plain else None
        return self._headers[name]

    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        place = self._place(key, chunk.offsets)
        section = Section(self.files, place.relative_path, place.offset, place.length)
        try:
            found: torch.Tensor = torch.load(
                section.stream(), map_location="cpu", weights_only=True
            )
        except Exception as error:  # torch raises many kinds on damaged bytes
            raise DamagedCheckpointError(
                f"{key}: {self.files.path(place.relative_path)}: the chunk at "
                f"{tuple(chunk.offsets)} can't be read ({type(error).__name__}: "
                f"{str(error)[:120]}). Restore the file."
            ) from error
        return found

    def object_bytes(self, key: str) -> bytes:
        place = self._place(key, None)
        return self.files.take(place.relative_path, place.offset, place.length)

    def file_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for place in self._places.values():
            sizes[place.relative_path] = sizes.get(place.relative_path, 0) + place.length
        return sizes

    def facts(self) -> dict[str, Any]:
        ranks = {name.strip("_").split("_")[0] for name in self.file_bytes()}
        return {"ranks that wrote": len(ranks)}

    def structure_faults(self) -> Iterator[Fault]:
        ends: dict[str, int] = {}
        spans: dict[str, list[tuple[int, int, str]]] = {}
        for index, place in self._places.items():
            name = place.relative_path
            ends[name] = max(ends.get(name, 0), place.offset + place.length)
            spans.setdefault(name, []).append((place.offset, place.length, index.fqn))
        for name, end in sorted(ends.items()):
            size = self.files.size(name)
            try:
                if self._header(name) is not None:
                    continue  # which leaves no hole and no overlap; the places have no offsets
            except DamagedCheckpointError as error:
                yield Fault(name, str(error))
                continue
            if size is None:
                yield Fault(name, f"the file is missing; needed by {_keys(spans[name])}")
            elif size < end:
                yield Fault(name, f"the file has {size} bytes and needs {end}: truncated")
            reached, holder = 0, ""
            for start, length, fqn in sorted(spans[name]):
                if start < reached:
                    yield Fault(
                        fqn, f"{name}: its bytes [{start}, {start + length}) overlap {holder}'s"
                    )
                    break
                reached, holder = start + length, fqn

    def checksum_faults(self, key: str) -> Iterator[Fault]:
        stored = self.metadata.state_dict_metadata[key]
        chunks: list[torch.Size | None] = [None]
        if isinstance(stored, TensorStorageMetadata):
            # Nobody needs to write what has no elements.
            chunks = [chunk.offsets for chunk in stored.chunks if math.prod(chunk.sizes)]
        for offsets in chunks:
            place = self._places.get(MetadataIndex(key, offsets))
            if place is None:
                at = f"the chunk at {tuple(offsets)}" if offsets is not None else "the value"
                yield Fault(key, f"the metadata does not say where {at} lies")
                continue
            if self.files.size(place.relative_path) is None:
                continue  # said once, for the file
            if place.transform_descriptors:
                continue
            try:
                if self._header(place.relative_path) is not None:
                    if isinstance(stored, TensorStorageMetadata):
                        self.array(key, next(c for c in stored.chunks if c.offsets == offsets))
                    continue
            except DamagedCheckpointError as error:
                yield Fault(key, str(error))
                continue
            if isinstance(stored, BytesStorageMetadata) and not self._is_archive(place):
                continue
            for text in damaged(self.files, place.relative_path, place.offset, place.length):
                yield Fault(key, text)

    def _is_archive(self, place: Any) -> bool:
        head = min(4, place.length)
        return self.files.take(place.relative_path, place.offset, head) == b"PK\x03\x04"


def _keys(spans: list[tuple[int, int, str]]) -> str:
    count = len({key for *_, key in spans})
    return f"{count} keys" if count != 1 else f"1 key, {spans[0][2]}"
