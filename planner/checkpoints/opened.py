"""A checkpoint of any format, opened: keys, shapes, where the bytes lie, and any box of any tensor.

| name | is |
|---|---|
| `Checkpoint` | the common form; `open_checkpoint` makes the right kind |
| `Fault` | one thing that is wrong with a checkpoint |
"""

import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from shardplan.layouts import (
    CheckpointError,
    DamagedCheckpointError,
    DtypeMismatchError,
    IncompleteCheckpointError,
    MissingKeyError,
)
from shardplan.layouts.coverage import tiling_faults
from shardplan.layouts.slab import Shape

from ..loading.reading import Saved
from ..state.values import from_bytes
from .arrays import Array, read_box
from .files import Files


class Fault(NamedTuple):
    """One thing that is wrong with a checkpoint.

    Attributes:
        where: The key, or the file, that is at fault.
        what: What is wrong with it.
    """

    where: str
    what: str


class Checkpoint(ABC):
    """A checkpoint that is open for looking and reading; nothing in it is executed.

    Args:
        path: The folder or the file, or its URL.
        files: Its files.
        metadata: Keys, shapes, dtypes and chunks, in DCP's form.

    Attributes:
        path: The path as text.
        format: Name of the format: `dcp`, `torch`, `safetensors`, `shardplan`.
        has_checksums: Whether stored bytes can be told from damaged ones.
    """

    format: ClassVar[str]
    has_checksums: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str], files: Files, metadata: Metadata) -> None:
        self.path = os.fspath(path)
        self._checked: set[str] = set()
        self.files = files
        self.metadata = metadata
        self.saved = Saved(metadata)

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The tensors by key."""
        found = self.metadata.state_dict_metadata
        return {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}

    @property
    def objects(self) -> list[str]:
        """The keys of values that are no tensors."""
        found = self.metadata.state_dict_metadata
        return [k for k, v in found.items() if isinstance(v, BytesStorageMetadata)]

    def state_path(self, key: str) -> tuple[Any, ...]:
        """Returns where a key's value stands in the nested state dict that was saved."""
        paths = self.metadata.planner_data
        found = paths.get(key) if isinstance(paths, dict) else None
        if isinstance(found, tuple) and found:
            return found
        return (key,)

    @abstractmethod
    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        """Returns where a chunk's elements lie, None if they must be loaded whole.

        Raises:
            CheckpointError: If the chunk's bytes are missing or no such chunk.
        """

    @abstractmethod
    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Returns a whole chunk whose elements `array` can't place."""

    @abstractmethod
    def object_bytes(self, key: str) -> bytes:
        """Returns a value that is no tensor, as the bytes that `torch.save` made of it."""

    @abstractmethod
    def file_bytes(self) -> dict[str, int]:
        """Returns how many bytes of the checkpoint each of its files holds."""

    @abstractmethod
    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        """Returns file, first byte and length of what is stored for a chunk."""

    def facts(self) -> dict[str, Any]:
        """Returns what else the format knows: step, grid, ranks, layouts."""
        return {}

    def structure_faults(self) -> Iterator[Fault]:
        """Yields what is wrong with the files: missing, short, overlapping."""
        return iter(())

    @abstractmethod
    def checksum_faults(self, key: str) -> Iterator[Fault]:
        """Yields the stored parts of a key whose bytes are not those that were written."""

    def check_files(self) -> None:
        """Refuses a checkpoint whose files are missing, short or overlap.

        Raises:
            DamagedCheckpointError: Naming the first fault.
        """
        for fault in self.structure_faults():
            raise self._damaged(fault)

    def check(self, key: str) -> None:
        """Refuses a key whose bytes are not those that were written; reads them once for it.

        Raises:
            DamagedCheckpointError: Naming the first fault.
        """
        if key not in self._checked:
            for fault in self.checksum_faults(key):
                raise self._damaged(fault)
            self._checked.add(key)

    def _damaged(self, fault: Fault) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{fault.where}: {fault.what} in {self.path}. Restore the file, or take another "
            "checkpoint; shardplan verify names all that is wrong."
        )

    def dtype(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self.tensor(key).properties.dtype

    def shape(self, key: str) -> Shape:
        """Returns the global shape of a tensor."""
        return tuple(self.tensor(key).size)

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Returns what is known of a tensor.

        Raises:
            CheckpointError: If there is no such tensor; keys that look like it are named.
        """
        found = self.metadata.state_dict_metadata.get(key)
        if isinstance(found, TensorStorageMetadata):
            return found
        if found is not None:
            raise DtypeMismatchError(f"{key}: is a Python value in {self.path}, not a tensor.")
        raise MissingKeyError(f"{key}: not in {self.path}. {similar(key, self.tensors)}")

    def read_into(
        self,
        key: str,
        chunk: ChunkStorageMetadata,
        start: Shape,
        sizes: Shape,
        out: torch.Tensor,
    ) -> None:
        """Fills a tensor with a part of a chunk.

        Args:
            key: The tensor's key.
            chunk: One of its chunks.
            start: First element of the part, relative to the chunk.
            sizes: Extent of the part.
            out: Tensor of these sizes; its dtype may differ, then values are converted.

        Raises:
            CheckpointError: If the bytes are missing or damaged.
        """
        dtype = self.dtype(key)
        array = self.array(key, chunk)
        if array is None:
            whole = self.load_chunk(key, chunk)
            index = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
            out.copy_(whole[index])
            return
        if array.itemsize != dtype.itemsize or array.shape != tuple(chunk.sizes):
            raise DamagedCheckpointError(
                f"{key}: the chunk at {tuple(chunk.offsets)} holds elements of {array.itemsize} "
                f"bytes in shape {array.shape} ({self.files.path(array.file)}), but the metadata "
                f"says {dtype} and {tuple(chunk.sizes)}. Restore the file."
            )
        direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out if direct else torch.empty(sizes, dtype=dtype)
        if math.prod(sizes):
            read_box(self.files, array, start, sizes, as_bytes(target))
        if not direct:
            out.copy_(target)

    def read(self, key: str, offsets: Shape | None = None, sizes: Shape | None = None) -> Any:
        """Returns a box of a tensor, the whole of it if none is given.

        Raises:
            CheckpointError: If part of the box is not in the checkpoint, or its bytes are not.
        """
        shape = self.shape(key)
        offsets = (0,) * len(shape) if offsets is None else offsets
        sizes = shape if sizes is None else sizes
        out = torch.empty(sizes, dtype=self.dtype(key))
        meetings, faults = self.saved.meetings(key, offsets, sizes)
        if faults:
            raise IncompleteCheckpointError(
                f"{key}: {faults[0]} of {self.path}. The checkpoint is incomplete"
                f"{self.coverage_text(key) or '.'} Restore its files, or load another one."
            )
        chunks = self.tensor(key).chunks
        for meeting in meetings:
            index = tuple(
                slice(a, a + n) for a, n in zip(meeting.dest_offsets, meeting.sizes, strict=True)
            )
            self.read_into(
                key, chunks[meeting.chunk], meeting.storage_offsets, meeting.sizes, out[index]
            )
        return out

    def load_object(self, key: str, trust_pickle: bool = False) -> Any:
        """Returns a value that is no tensor; plain data only, unless pickles are trusted."""
        try:
            return from_bytes(key, io.BytesIO(self.object_bytes(key)), trust_pickle)
        except CheckpointError as error:
            text = str(error).replace("=True to the load planner", "=True (--trust-pickle)")
            raise type(error)(text) from error

    def coverage_text(self, key: str) -> str:
        """Returns what may have caused that a key's chunks do not cover it once, if known."""
        return ""

    def coverage_faults(self, keys: Iterable[str]) -> Iterator[Fault]:
        """Yields the tensors whose chunks do not cover every element once."""
        for key in keys:
            stored = self.metadata.state_dict_metadata[key]
            if isinstance(stored, TensorStorageMetadata):
                shape = tuple(stored.size)
                boxes = ((tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks)
                for text in tiling_faults(shape, boxes, who="no chunk"):
                    yield Fault(key, f"{text} of shape {shape}{self.coverage_text(key)}")

    def faults(
        self, *, checksums: bool = True, advance: Callable[[int], None] = lambda n: None
    ) -> Iterator[Fault]:
        """Yields everything that keeps the checkpoint from being sound.

        Args:
            checksums: Whether to read every byte and compare checksums.
            advance: Told the bytes of each key that is done.
        """
        broken = {fault.what: fault for fault in self.structure_faults()}
        needed = dict.fromkeys(broken, 0)
        for key, stored in self.metadata.state_dict_metadata.items():
            yield from self.coverage_faults([key])
            if checksums:
                for fault in self.checksum_faults(key):
                    if fault.what in broken:  # said once, for the file
                        needed[fault.what] += 1
                    else:
                        yield fault
            advance(nbytes(stored))
        for what, (where, _) in broken.items():
            keys = f" (needed by {needed[what]} keys)" if needed[what] else ""
            yield Fault(where, what + keys)

    def close(self) -> None:
        """Closes the files."""
        self.files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def nbytes(stored: TensorStorageMetadata | BytesStorageMetadata) -> int:
    """Returns the bytes of a tensor's elements, 0 for another value."""
    if isinstance(stored, BytesStorageMetadata):
        return 0
    return math.prod(stored.size) * stored.properties.dtype.itemsize


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the memory of a contiguous tensor of any dtype as bytes."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    found: np.ndarray[Any, np.dtype[np.uint8]] = flat.numpy()
    return found


def similar(key: str, known: Any, count: int = 3) -> str:
    """Returns a sentence that names the known keys most like one that is missing."""
    import difflib

    tail = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == tail or key in k][:2000]
    best = difflib.get_close_matches(key, near or list(known)[:2000], n=count, cutoff=0.3)
    return f"Did you mean {', '.join(best)}?" if best else "See `shardplan inspect` for its keys."
