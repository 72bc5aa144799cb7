"""Safetensors: one file, or a folder of them, as Hugging Face and torch's own writers make them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError
from shardplan.layouts.slab import Shape

from .arrays import Array
from .files import Files
from .opened import Checkpoint, Fault

INDEX = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


def read_header(files: Files, name: str) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file and the position of its first data byte.

    Raises:
        CheckpointError: If the file is no safetensors file.
    """
    size = files.size(name)
    if size is None:
        raise CheckpointError(f"{files.path(name)}: the file is missing. Restore it.")
    length = int.from_bytes(files.take(name, 0, 8), "little") if size >= 8 else -1
    if not 0 < length <= min(_LONGEST_HEADER, size - 8):
        raise CheckpointError(
            f"{files.path(name)}: no safetensors file: its header would have {length} bytes and "
            f"the file has {size}."
        )
    try:
        header = json.loads(files.take(name, 8, length))
        if not isinstance(header, dict):
            raise ValueError("the header is no mapping")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{files.path(name)}: its header can't be read ({error}).") from None
    return header, 8 + length


class SafetensorsFiles(Checkpoint):
    """A `.safetensors` file, or a folder of them with or without an index.

    Args:
        path: The file or folder.

    Raises:
        CheckpointError: If a header is damaged, a file that the index names is missing, or two
            files hold one key.
    """

    format = "safetensors"
    has_checksums = False

    def __init__(self, path: Path) -> None:
        files = Files(path if path.is_dir() else path.parent)
        names = self._names(path, files)
        self._arrays: dict[tuple[str, Shape], Array] = {}
        self._sizes: dict[str, int] = {}
        self._extra: dict[str, Any] = {}
        self.unknown: list[Fault] = []
        stored: dict[str, Any] = {}
        for name in names:
            header, base = read_header(files, name)
            self._take(files, name, header, base, stored)
        super().__init__(path, files, Metadata(stored))

    @staticmethod
    def _names(path: Path, files: Files) -> list[str]:
        if not path.is_dir():
            return [path.name]
        index = path / INDEX
        if index.is_file():
            try:
                weights = json.loads(index.read_text())["weight_map"]
                return sorted({str(name) for name in weights.values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: no index of safetensors ({error!r}).") from None
        return sorted(p.name for p in path.glob("*.safetensors"))

    def _take(
        self, files: Files, name: str, header: dict[str, Any], base: int, stored: dict[str, Any]
    ) -> None:
        """Adds the tensors of one file; a tensor may be in several files, in chunks."""
        extra = header.pop("__metadata__", None) or {}
        sharding: dict[str, Any] = {}
        try:
            self._extra.update(extra)
            if "DCP_SHARDING_INFO" in extra:
                sharding = json.loads(extra["DCP_SHARDING_INFO"])
            end = base
            for key, entry in header.items():
                dtype = DTYPES.get(entry["dtype"])
                sizes = tuple(int(n) for n in entry["shape"])
                begin, stop = (int(n) for n in entry["data_offsets"])
                if dtype is None:
                    raise CheckpointError(
                        f"{key}: {files.path(name)}: torch has no dtype {entry['dtype']!r}."
                    )
                if stop - begin != math.prod(sizes) * dtype.itemsize or begin < 0:
                    raise CheckpointError(
                        f"{key}: {files.path(name)}: {stop - begin} bytes for shape {sizes} of "
                        f"{dtype}, which needs {math.prod(sizes) * dtype.itemsize}."
                    )
                end = max(end, base + stop)
                info = sharding.get(key, {})
                offsets = tuple(info.get("saved_offsets", (0,) * len(sizes)))
                self._arrays[key, offsets] = Array(name, base + begin, dtype.itemsize, sizes)
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                if key not in stored:
                    stored[key] = TensorStorageMetadata(
                        TensorProperties(dtype=dtype), torch.Size(sizes), []
                    )
                known = stored[key]
                if known.chunks and not sharding:
                    raise CheckpointError(
                        f"{key}: two files hold it, {self._arrays[key, offsets].file} and another."
                    )
                known.chunks.append(chunk)
                known.size = torch.Size(
                    max(a, o + s) for a, o, s in zip(known.size, offsets, sizes, strict=True)
                )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{files.path(name)}: its header can't be read ({error!r}). Restore the file."
            ) from None
        self._sizes[name] = end

    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        return self._arrays[key, tuple(chunk.offsets)]

    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        raise NotImplementedError  # `array` knows them all

    def object_bytes(self, key: str) -> bytes:
        raise CheckpointError(f"{key}: safetensors files hold tensors only.")

    def file_bytes(self) -> dict[str, int]:
        return dict(self._sizes)

    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        array = self._arrays[key, tuple(chunk.offsets)]
        return array.file, array.start, math.prod(array.shape) * array.itemsize

    def structure_faults(self) -> Iterator[Fault]:
        for name, end in self._sizes.items():
            size = self.files.size(name)
            if size is None:
                yield Fault(name, "the file is missing")
            elif size < end:
                yield Fault(name, f"the file has {size} bytes and needs {end}: truncated")
            elif size > end:
                yield Fault(name, f"the file has {size - end} bytes more than its header names")
        if self.path.is_dir() and (self.path / INDEX).is_file():
            weights = json.loads((self.path / INDEX).read_text())["weight_map"]
            found = {key: array.file for (key, _), array in self._arrays.items()}
            for key, name in weights.items():
                if found.get(key) != name:
                    yield Fault(key, f"the index says {name}, but it is in {found.get(key)}")
            for key in found.keys() - weights.keys():
                yield Fault(key, f"in {found[key]}, but not in the index")

    def checksum_faults(self, key: str) -> Iterator[Fault]:
        return iter(())  # the format has none
