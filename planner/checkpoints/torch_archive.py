"""Writes the file that `torch.load` opens, tensor by tensor, so that no whole state is in memory."""

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from shardplan.layouts import UnstorableValueError
from shardplan.layouts.slab import contiguous_strides

from ..compat import untyped_tensor
from .streams import Advance, Source, atomic_file

_ALIGNMENT = 64
_PADDING = b"FB"  # the extra field in which torch pads its records
_WHEN = (1980, 1, 1, 0, 0, 0)


class _Storage:
    """Stands for the storage of a tensor that is written later."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes


class _Pickler(pickle.Pickler):
    """Pickles sources as the tensors that they will be."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.sources: list[Source] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        _, storage_type = untyped_tensor()
        return "storage", storage_type, str(obj.number), "cpu", obj.nbytes

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Source):
            return NotImplemented
        rebuild, _ = untyped_tensor()
        storage = _Storage(len(self.sources), obj.nbytes)
        self.sources.append(obj)
        steps = contiguous_strides(obj.shape)
        return rebuild, (storage, 0, obj.shape, steps, False, {}, obj.dtype)


def write_archive(path: Path, state: Any, advance: Advance) -> None:
    """Writes a state dict, whose tensors are `Source`s, as `torch.save` would.

    Args:
        path: The file; it appears under its name only when it is complete.
        state: Nested dicts and lists of sources and plain values.
        advance: Told the bytes of each block that is written.

    Raises:
        UnstorableValueError: If a value can't be pickled.
        CheckpointError: If the file can't be written.

    Source: torch/serialization.py, _save.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    try:
        pickler.dump(state)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise UnstorableValueError(f"{path}: a value can't be stored: {error}") from error
    with (
        atomic_file(path) as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive,
    ):
        with _record(archive, stream, "data.pkl") as record:
            record.write(text.getvalue())
        with _record(archive, stream, "byteorder") as record:
            record.write(b"little")
        for number, source in enumerate(pickler.sources):
            with _record(archive, stream, f"data/{number}") as record:
                source.write(record, advance)
        with _record(archive, stream, "version") as record:
            record.write(b"3\n")


def _record(archive: zipfile.ZipFile, stream: Any, name: str) -> Any:
    """Opens a record whose data begins at a multiple of 64 bytes, as torch maps it."""
    info = zipfile.ZipInfo("archive/" + name, _WHEN)
    head = 30 + len(info.filename) + 20 + 4  # local header, name, zip64 sizes, our own field
    pad = -(stream.tell() + head) % _ALIGNMENT
    info.extra = _PADDING + struct.pack("<H", pad) + b"\0" * pad
    return archive.open(info, "w", force_zip64=True)
