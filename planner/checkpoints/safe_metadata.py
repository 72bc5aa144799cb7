"""Reads stock DCP's `.metadata` without running it: only DCP's own types come out of the pickle.

| name | does |
|---|---|
| `read_metadata` | the `Metadata` of a `.metadata` file |
| `SafeFileSystemReader` | torch's file system reader with it |

A pickle is a program. This reader lets it build the few types that DCP writes and nothing else:
any other global is an error before it is looked up. The types it gets are sealed, so that a
pickle can't set attributes on them either.
"""

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError

from ..compat import memory_format_of, storage_info
from ..without_gc import without_gc


class _Sealed(type):
    """The type of types that a pickle may make but not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} on the type {cls.__name__}")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout of torch")
    return found


def _callable(function: Any) -> Any:
    """Returns a sealed type that makes what `function` makes."""

    def new(cls: type, *args: Any) -> Any:
        return function(*args)

    return _Sealed(f"safe_{function.__name__}", (), {"__new__": new, "__slots__": ()})


def _sealed(cls: type) -> Any:
    """Returns a sealed subclass whose instances are made into `cls` itself at the end."""
    return _Sealed(cls.__name__, (cls,), {"__module__": cls.__module__})


_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_METADATA = "torch.distributed.checkpoint.metadata"
_TYPES: dict[tuple[str, str], type] = {
    **{
        (_METADATA, cls.__name__): cls
        for cls in (
            Metadata,
            TensorStorageMetadata,
            BytesStorageMetadata,
            ChunkStorageMetadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
        )
    },
    _INFO: storage_info(),
}
_SEALED = {name: _sealed(cls) for name, cls in _TYPES.items()}
_CALLABLES = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): _callable(memory_format_of),
    ("torch", "Size"): torch.Size,  # of C, and so sealed by itself
    ("torch.serialization", "_get_layout"): _callable(_layout),
    ("collections", "OrderedDict"): _callable(OrderedDict),
    ("pathlib", "PosixPath"): _callable(Path),
    ("pathlib", "PurePosixPath"): _callable(Path),
    ("pathlib", "WindowsPath"): _callable(lambda *parts: "\\".join(parts)),
}


class _Unpickler(pickle.Unpickler):
    """Finds DCP's types and torch's dtypes, and no other global."""

    def __init__(self, stream: io.BufferedIOBase | io.BytesIO) -> None:
        super().__init__(stream)
        self.seen: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = _SEALED.get((module, name)) or _CALLABLES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP never writes")


def read_metadata(path: str | Path, *, trust_pickle: bool = False) -> Metadata:
    """Returns the metadata that a stock DCP checkpoint's `.metadata` file holds.

    Args:
        path: The file.
        trust_pickle: Whether to unpickle it whatever it names, which can run any code.

    Raises:
        CheckpointError: If the file is missing, is no pickle of `Metadata`, or names anything
            but DCP's own types.

    Source: torch/distributed/checkpoint/filesystem.py, FileSystemReader.read_metadata.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}. Is it a checkpoint?") from error
    return metadata_from_bytes(data, str(path), trust_pickle=trust_pickle)


def metadata_from_bytes(data: bytes, where: str, *, trust_pickle: bool = False) -> Metadata:
    """Returns the metadata that the bytes of a `.metadata` file hold; see `read_metadata`."""
    with without_gc():
        try:
            found: Any = pickle.loads(data) if trust_pickle else _Unpickler(io.BytesIO(data)).load()
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{where}: not read, since {error}. Pass --trust-pickle (trust_pickle=True) if you "
                "trust where it comes from; that runs whatever code it holds."
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"{where}: damaged, or no metadata of DCP ({type(error).__name__}: {error}). "
                "Restore the file, or inspect an older checkpoint."
            ) from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{where}: holds a {type(found).__name__}, not DCP's Metadata.")
        return _plain(found, where)


def _plain(metadata: Metadata, where: str) -> Metadata:
    """Turns sealed instances into DCP's own types and checks that all is where it belongs."""
    # A checkpoint may have a million chunks: what is done for each is written out here.
    set_class, sealed_chunk = object.__setattr__, _SEALED[_METADATA, "ChunkStorageMetadata"]
    try:
        _unseal(metadata, Metadata)
        for key, stored in metadata.state_dict_metadata.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
            if isinstance(stored, BytesStorageMetadata):
                _unseal(stored, BytesStorageMetadata)
                continue
            _unseal(stored, TensorStorageMetadata)
            _unseal(stored.properties, TensorProperties)
            if not isinstance(stored.properties.dtype, torch.dtype):
                raise TypeError(f"{key}: its dtype is {stored.properties.dtype!r}")
            rank = len(_size(stored.size))
            for chunk in stored.chunks:
                if type(chunk) is sealed_chunk:
                    set_class(chunk, "__class__", ChunkStorageMetadata)
                else:
                    _unseal(chunk, ChunkStorageMetadata)
                offsets, sizes = chunk.offsets, chunk.sizes
                if not (type(offsets) is type(sizes) is torch.Size):
                    raise TypeError(f"{key}: a chunk at {offsets!r} of {sizes!r}")
                if not len(offsets) == len(sizes) == rank:
                    raise TypeError(
                        f"{key}: a chunk at {tuple(offsets)} of {tuple(sizes)} in a "
                        f"tensor of shape {tuple(stored.size)}"
                    )
        info = storage_info()
        sealed_index, sealed_info = _SEALED[_METADATA, "MetadataIndex"], _SEALED[_INFO]
        for index, place in (metadata.storage_data or {}).items():
            if type(index) is sealed_index:
                set_class(index, "__class__", MetadataIndex)
            else:
                _unseal(index, MetadataIndex)
            if type(place) is sealed_info:
                set_class(place, "__class__", info)
            else:
                _unseal(place, info)
        if metadata.storage_meta is not None:
            _unseal(metadata.storage_meta, StorageMeta)
    except (TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: damaged, or no metadata of DCP ({error}). Restore the file, or inspect an "
            "older checkpoint."
        ) from error
    return metadata


def _unseal(value: Any, cls: type) -> None:
    kind = type(value)
    if kind is cls:
        return
    if type(kind) is not _Sealed or not issubclass(kind, cls):
        raise TypeError(f"a {kind.__name__} stands where a {cls.__name__} belongs")
    object.__setattr__(value, "__class__", cls)


def _size(value: Any) -> torch.Size:
    if type(value) is not torch.Size:
        raise TypeError(f"{value!r} is no torch.Size")
    return value


class SafeFileSystemReader(FileSystemReader):
    """Torch's file system reader, but `.metadata` is read without executing it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = metadata_from_bytes(stream.read(), str(path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
