"""Writes tensors to one safetensors file block by block, so that no whole tensor is in memory."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from shardplan.layouts import CheckpointError
from shardplan.layouts.slab import Shape

from .blocks import row_blocks
from .opened import as_bytes
from .safetensors_files import NAMES

Read = Callable[[Shape, Shape], torch.Tensor]


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


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Source],
    metadata: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> None:
    """Writes a safetensors file; it appears under its name only when it is complete.

    Args:
        path: The file.
        tensors: The tensors, in the order in which they shall lie.
        metadata: Texts for the header.
        advance: Told the bytes of each block that is written.

    Raises:
        CheckpointError: If the format has no name for a dtype, or the file can't be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for key, source in tensors.items():
        if source.dtype not in NAMES:
            raise CheckpointError(f"{key}: safetensors has no dtype for {source.dtype}.")
        end = place + source.nbytes
        header[key] = {
            "dtype": NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for source in tensors.values():
                for offsets, sizes in row_blocks(source.shape, source.dtype.itemsize):
                    block = source.read(offsets, sizes).contiguous()
                    stream.write(as_bytes(block).data)
                    advance(block.numel() * block.element_size())
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}. Free space, or choose another place."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
