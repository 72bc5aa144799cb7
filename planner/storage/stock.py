"""Lets stock tools open a checkpoint: `.metadata`, and data files that `torch.load` can read too.

| name | is |
|---|---|
| `finalize` | writes the stock `.metadata` of a complete checkpoint |
| `torch_head` | what stands before a chunk so that `torch.load` reads the two together as a tensor |

| saved with | `.metadata` of `finalize` is for |
|---|---|
| `SafetensorsWriter(stock=True)` | everything that reads DCP: `dcp.load(checkpoint_id=path)`, `FileSystemReader`, `dcp_to_torch_save` |
| `SafetensorsWriter()` | tools that look at metadata only; a stock load stops with an error that names `SafetensorsReader` |

torch's older file form has all that describes a tensor in front and its bytes behind. So with
`stock=True` each chunk has such a head before it, some 350 bytes long, as an entry of its own; the
file stays a safetensors file. A stock planner reads any of these checkpoints through
`SafetensorsReader`, without `.metadata`.
"""

import io
import os
import pickle
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from shardplan.layouts import CheckpointError, IncompleteCheckpointError
from shardplan.layouts.slab import contiguous_strides

from ..compat import rebuild_tensor, storage_info
from ..planning.manifest import Extra
from ..planning.metadata import Origins, checkpoint_metadata
from ..state.values import to_bytes
from ..without_gc import without_gc
from .folder import STOCK, put_stock
from .format.commit import CHECKPOINT, Commit, read_commit
from .format.header import HEAD, chunk_name
from .format.plain import from_plain
from .places.files import Files, files_at
from .reading.datafile import DataFile
from .reading.owners import Owners
from .reading.stats import Stats

_RAW = "shardplan.raw: load with SafetensorsReader, or save with SafetensorsWriter(stock=True)"
# The first values of a file in torch's older form; see torch/serialization.py.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_ALIGNMENT = 64


class _Storage:
    """Stands for the bytes behind a head while it is pickled."""


class _Tensor:
    """Pickles as a tensor of a dtype and shape."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self._dtype, self._sizes = dtype, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        strides = contiguous_strides(self._sizes)
        size = torch.Size(self._sizes)
        hooks: OrderedDict[str, Any] = OrderedDict()
        return rebuild_tensor(), (_Storage(), 0, size, strides, False, hooks, self._dtype)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, nbytes: int) -> None:
        super().__init__(stream, 2)
        self._nbytes = nbytes

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", torch.ByteStorage, "0", "cpu", self._nbytes, None)
        return None


@lru_cache(maxsize=1024)
def torch_head(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """Returns what stands before a chunk's bytes so that `torch.load` reads both as a tensor.

    It is a multiple of 64 bytes long, so that the chunk stays aligned.
    """
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    body = io.BytesIO()
    _Pickler(body, nbytes).dump(_Tensor(dtype, sizes))
    pickle.dump(["0"], body, 2)
    tail = body.getvalue() + nbytes.to_bytes(8, "little", signed=True)
    for fill in range(_ALIGNMENT):
        front = io.BytesIO()
        pickle.dump(_MAGIC, front, 2)
        pickle.dump(_PROTOCOL, front, 2)
        pickle.dump({"little_endian": True, "fill": " " * fill}, front, 2)
        head = front.getvalue() + tail
        if len(head) % _ALIGNMENT == 0:
            return head
    raise AssertionError("a text of 64 lengths reaches every remainder")


def finalize(path: str | os.PathLike[str]) -> bool:
    """Writes the stock `.metadata` of a complete checkpoint.

    Args:
        path: The checkpoint's path or URL.

    Returns:
        Whether stock tools can read its data too; see the table of this module.

    Raises:
        CheckpointError: If there is no complete checkpoint, or it is damaged.
    """
    files = files_at(path)
    commit = read_commit(files)
    if commit is None:
        why = f"there is no {CHECKPOINT}, which a save of SafetensorsWriter ends with"
        if files.read(STOCK) is not None:
            why = f"its {STOCK} is there already, and no {CHECKPOINT}: stock DCP wrote it"
        raise IncompleteCheckpointError(f"{files.root}: no complete checkpoint to finalize: {why}")
    with without_gc():
        origins: Origins = {}
        metadata = checkpoint_metadata(commit.stages, origins=origins, rules=commit.ownership)
        places, readable = _places(files, commit, metadata, origins, Owners(commit))
        metadata.storage_data = places
        put_stock(files, commit, pickle.dumps(metadata))
    return readable


def _places(
    files: Files, commit: Commit, metadata: Metadata, origins: Origins, owners: Owners
) -> tuple[dict[MetadataIndex, Any], bool]:
    """Returns where everything lies in stock DCP's terms, and whether it can be read there."""
    wanted: dict[tuple[int, bool], list[tuple[str, Any]]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        chunks = [None] if isinstance(stored, BytesStorageMetadata) else stored.chunks
        for chunk in chunks:
            if chunk is not None and 0 in chunk.sizes:
                continue
            offsets = None if chunk is None else tuple(chunk.offsets)
            stage, origin = origins[key]
            place = owners.place(stage, origin, key, offsets)
            late = isinstance(origin, Extra) and origin.late
            wanted.setdefault((place, late), []).append((key, chunk))
    info, readable = storage_info(), True
    found: dict[MetadataIndex, Any] = {}
    blob = io.BytesIO()
    values_name = f"{commit.save}/values.distcp"
    for (place, late), entries in sorted(wanted.items(), key=lambda item: item[0]):
        file = DataFile(files, commit, place, Stats(), late=late)
        try:
            values = file.values(True)
        finally:
            file.file.close()
        name = file.where.removeprefix(f"{files.root}/")
        for key, chunk in entries:
            if chunk is None:
                start = blob.tell()
                blob.write(to_bytes(key, from_plain(key, values[key])).getbuffer())
                found[MetadataIndex(key)] = info(values_name, start, blob.tell() - start)
                continue
            title = chunk_name(key, chunk.offsets)
            entry, head = (file.header.entries.get(n) for n in (title, HEAD + title))
            if entry is None:
                raise CheckpointError(
                    f"{file.where}: rank {file.rank} did not write {key} at "
                    f"{tuple(chunk.offsets)}, though the manifest says so"
                )
            first = entry if head is None else head
            at = file.header.data_start + first.start
            index = MetadataIndex(key, chunk.offsets)
            raw = None if head is not None else [_RAW]
            found[index] = info(name, at, entry.stop - first.start, transform_descriptors=raw)
            readable = readable and head is not None
    if blob.tell():
        files.put(values_name, blob.getvalue(), sync=True)
    return found, readable
