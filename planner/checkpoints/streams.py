"""Tensors that are read block by block, and the files that are written of them."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shardplan.layouts import CheckpointError, UnstorableValueError
from shardplan.layouts.slab import Shape

from ..storage.format.dtypes import CODES, stored_form
from .blocks import row_blocks
from .opened import as_bytes

Read = Callable[[Shape, Shape], torch.Tensor]
Advance = Callable[[int], None]


class Source(NamedTuple):
    """A tensor that can be read box by box.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        read: Returns the box at given offsets, of given sizes.
    """

    dtype: torch.dtype
    shape: Shape
    read: Read

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def block(self, offsets: Shape, sizes: Shape, advance: Advance) -> torch.Tensor:
        """Returns a box in contiguous memory, and counts its bytes."""
        block = self.read(offsets, sizes).contiguous()
        advance(block.numel() * block.element_size())
        return block

    def write(self, stream: Any, advance: Advance) -> None:
        """Writes the elements in row-major order, with one block in memory at a time."""
        for offsets, sizes in row_blocks(self.shape, self.dtype.itemsize):
            stream.write(as_bytes(self.block(offsets, sizes, advance)).data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Gives a file to write to, which has its name only when it is complete and on the disk.

    Raises:
        CheckpointError: If it can't be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}. Free space, or choose another place."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Source],
    metadata: Mapping[str, str] | None = None,
    advance: Advance = lambda n: None,
) -> None:
    """Writes a safetensors file; it appears under its name only when it is complete.

    Args:
        path: The file.
        tensors: The tensors, in the order in which they shall lie.
        metadata: Texts for the header.
        advance: Told the bytes of each block that is written.

    Raises:
        UnstorableValueError: If the format can't hold a key or a dtype.
        CheckpointError: If the file can't be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for key, source in tensors.items():
        _check(key, source)
        code, shape = stored_form(source.dtype, source.shape)
        end = place + source.nbytes
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for source in tensors.values():
            source.write(stream, advance)


def _check(key: str, source: Source) -> None:
    """Checks that safetensors can hold a tensor under its key."""
    if key == "__metadata__":
        raise UnstorableValueError(
            f"{key}: a tensor can't have this key in a safetensors file, which keeps it for texts. "
            "Rename the tensor, or convert to dcp or torch."
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise UnstorableValueError(
            f"{key!a}: this key is not valid text ({error.reason}), and no other tool could read the "
            "safetensors file. Rename the tensor, or convert to dcp or torch."
        ) from None
    # stored_form stores as bytes what safetensors has no dtype for; readers would not know.
    if CODES.get(source.dtype) != stored_form(source.dtype, source.shape)[0]:
        raise UnstorableValueError(
            f"{key}: safetensors can't hold {source.dtype} of shape {source.shape}. Convert it, or "
            "write dcp or torch."
        )
