"""Reads stock DCP's `.metadata` without running it: only DCP's own types come out of the pickle.

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
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError, DamagedCheckpointError, IncompleteCheckpointError

from ..compat import memory_format_of, storage_info
from ..without_gc import without_gc


class _Refused(Exception):
    """The pickle asks for more than DCP's own types."""


class _Sealed(type):
    """The type of types that a pickle may make but not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise _Refused(f"it sets {name!r} on the type {cls.__name__}")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise _Refused(f"{name!r} is not a layout of torch")
    return found


def _callable(function: Any) -> Any:
    """Returns a sealed type that makes what `function` makes."""

    def new(cls: type, *args: Any) -> Any:
        return function(*args)

    return _Sealed(f"safe_{function.__name__}", (), {"__new__": new, "__slots__": ()})


def _bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise _Refused(f"{encoding!r} is not how pickle writes bytes")
    return text.encode("latin1")


_windows = _callable(lambda *parts: "\\".join(parts))


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
# Until torch 2.2 DCP used the properties of sharded tensors; their state is the same.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_SEALED[_SHARDED, "TensorProperties"] = _SEALED[_METADATA, "TensorProperties"]
# Megatron-Core's own metadata has one more attribute, and none of a type that DCP's lack.
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_SEALED[_MCORE, "MCoreMetadata"] = _SEALED[_METADATA, "Metadata"]
# Python 3.13 pickles the names of a private module.
_PATHS = ("pathlib", "pathlib._local")
_CALLABLES = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): _callable(memory_format_of),
    (_SHARDED, "MEM_FORMAT_ENCODING"): _callable(memory_format_of),
    ("torch", "Size"): torch.Size,  # of C, and so sealed by itself
    ("torch.serialization", "_get_layout"): _callable(_layout),
    ("collections", "OrderedDict"): _callable(OrderedDict),
    **{(m, n): _callable(Path) for m in _PATHS for n in ("PosixPath", "PurePosixPath")},
    **{(m, n): _windows for m in _PATHS for n in ("WindowsPath", "PureWindowsPath")},
    # What protocols before 3 write bytes and sets as.
    ("_codecs", "encode"): _callable(_bytes),
    **{
        (m, t.__name__): _callable(t)
        for m in ("builtins", "__builtin__")
        for t in (set, frozenset, complex)
    },
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
        raise _Refused(f"it names {module}.{name}, which neither DCP nor Megatron-Core writes")


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
        raise IncompleteCheckpointError(
            f"{path}: {error.strerror or error}. Is it a checkpoint?"
        ) from error
    return metadata_from_bytes(data, str(path), trust_pickle=trust_pickle)


def metadata_from_bytes(data: bytes, where: str, *, trust_pickle: bool = False) -> Metadata:
    """Returns the metadata that the bytes of a `.metadata` file hold; see `read_metadata`."""
    with without_gc():
        try:
            found: Any = pickle.loads(data) if trust_pickle else _Unpickler(io.BytesIO(data)).load()
        except _Refused as error:
            raise CheckpointError(
                f"{where}: not read, since {error}. Pass trust_pickle=True (--trust-pickle) if you "
                "trust where it comes from; that runs whatever code it holds."
            ) from error
        except Exception as error:
            raise DamagedCheckpointError(
                f"{where}: damaged, or not metadata of DCP ({type(error).__name__}: {error}). "
                "Restore the file, or inspect an older checkpoint."
            ) from error
        if not isinstance(found, Metadata):
            raise DamagedCheckpointError(
                f"{where}: holds a {type(found).__name__}, not DCP's Metadata."
            )
        return _plain(found, where)


def _plain(metadata: Metadata, where: str) -> Metadata:
    """Turns sealed instances into DCP's own types and checks that all is where it belongs."""
    # A checkpoint may have a million chunks: what is done for each is written out here.
    set_class, sealed_chunk = object.__setattr__, _SEALED[_METADATA, "ChunkStorageMetadata"]
    try:
        _unseal(metadata, Metadata)
        for key, stored in metadata.state_dict_metadata.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            if isinstance(stored, BytesStorageMetadata):
                _unseal(stored, BytesStorageMetadata)
                continue
            _unseal(stored, TensorStorageMetadata)
            _unseal(stored.properties, TensorProperties)
            if not isinstance(stored.properties.dtype, torch.dtype):
                raise TypeError(f"{key}: its dtype is {stored.properties.dtype!r}")
            stored.size = _size(key, stored.size)
            rank = len(stored.size)
            if min(stored.size, default=0) < 0:
                raise TypeError(f"{key}: its shape is {tuple(stored.size)}")
            for chunk in stored.chunks:
                if type(chunk) is sealed_chunk:
                    set_class(chunk, "__class__", ChunkStorageMetadata)
                else:
                    _unseal(chunk, ChunkStorageMetadata)
                offsets, sizes = chunk.offsets, chunk.sizes
                if not (type(offsets) is type(sizes) is torch.Size):
                    # Megatron-FSDP plans its uneven shards with tuples.
                    offsets, sizes = _size(key, offsets), _size(key, sizes)
                    object.__setattr__(chunk, "offsets", offsets)
                    object.__setattr__(chunk, "sizes", sizes)
                negative = min(offsets, default=0) < 0 or min(sizes, default=0) < 0
                if negative or not len(offsets) == len(sizes) == rank:
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
            kinds = (
                type(index.fqn),
                type(place.relative_path),
                type(place.offset),
                type(place.length),
            )
            if kinds != (str, str, int, int):
                raise TypeError(f"{index.fqn!r} lies in {place.relative_path!r}, {place.offset!r}")
        if metadata.storage_meta is not None:
            _unseal(metadata.storage_meta, StorageMeta)
    except (TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{where}: damaged, or not metadata of DCP ({error}). Restore the file, or inspect an "
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


def _size(key: str, value: Any) -> torch.Size:
    if type(value) is torch.Size:
        return value
    if not isinstance(value, tuple | list) or any(type(n) is not int for n in value):
        raise TypeError(f"{key}: {value!r} stands where a size belongs")
    return torch.Size(value)
