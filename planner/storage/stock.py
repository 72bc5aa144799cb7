"""`finalize`: lets stock tools open a checkpoint.

| saved with | `.metadata` of `finalize` is for |
|---|---|
| `SafetensorsWriter(stock=True)` | everything that reads DCP: `dcp.load(checkpoint_id=path)`, `FileSystemReader`, `dcp_to_torch_save` |
| `SafetensorsWriter()` | tools that look at metadata only; a stock load stops with an error that names `SafetensorsReader` |

A stock planner reads any of these checkpoints through `SafetensorsReader`, without `.metadata`.
"""

import io
import os
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from shardplan.layouts import CheckpointError, IncompleteCheckpointError

from ..compat import storage_info
from ..planning.manifest import Extra
from ..planning.metadata import Origins, checkpoint_metadata
from ..state.values import to_bytes
from ..without_gc import without_gc
from .folder import STOCK, check_alone, is_finalized, put_stock, put_values
from .format.commit import CHECKPOINT, Commit, read_commit
from .format.header import HEAD, chunk_name
from .format.plain import from_plain
from .places.files import Files, files_at
from .reading.datafile import DataFile
from .reading.owners import Owners
from .reading.stats import Stats

_RAW = "shardplan.raw: load with SafetensorsReader, or save with SafetensorsWriter(stock=True)"


def finalize(path: str | os.PathLike[str]) -> bool:
    """Writes the stock `.metadata` of a complete checkpoint.

    Args:
        path: The checkpoint's path or URL.

    Returns:
        Whether stock tools can read its data too; see the table of this module.

    Raises:
        CheckpointError: If there is no complete checkpoint, it is damaged, or a `.metadata` is there
            that `finalize` did not write.
    """
    files = files_at(path)
    commit = read_commit(files)
    if commit is None:
        why = f"there is no {CHECKPOINT}, which a save of SafetensorsWriter ends with"
        if files.read(STOCK) is not None:
            why = f"its {STOCK} is there already, and no {CHECKPOINT}: stock DCP wrote it"
        raise IncompleteCheckpointError(f"{files.root}: no complete checkpoint to finalize: {why}")
    if not is_finalized(files):
        check_alone(files, commit)
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
        put_values(files, commit, blob.getvalue())
    return found, readable
