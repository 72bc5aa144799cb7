"""One rank's data file, as a load sees it: opened, its header checked.

| name | is |
|---|---|
| `DataFile` | an open data file of a checkpoint |
"""

import json
from typing import Any

import torch

from shardplan.layouts import CheckpointError

from ..format.commit import Commit, data_name
from ..format.dtypes import stored_form
from ..format.header import SUMS, VALUES, Header, chunk_name, header_length, parse_header
from ..format.sums import block_count
from ..places.files import Files
from .checks import Check
from .stats import Stats
from .wanted import Part


class DataFile:
    """An open data file of a checkpoint.

    Args:
        files: Where the checkpoint lies.
        commit: What it says of its ranks.
        place: Place of the rank that wrote the file.
        stats: Counts what is read.
        expected: How long its header with its length may be, in bytes: files of one save have
            headers of nearly one length.
        late: Whether it is the rank's second file.

    Attributes:
        where: Its name with the checkpoint's, for errors.
        rank: The rank that wrote it.
        file: The open file.
        header: Its header.

    Raises:
        CheckpointError: If it is missing, damaged, of another save or of a newer version.
    """

    def __init__(
        self,
        files: Files,
        commit: Commit,
        place: int,
        stats: Stats,
        expected: int = 0,
        late: bool = False,
    ) -> None:
        name = data_name(commit.save, place, commit.ranks, late)
        self.where = f"{files.root}/{name}"
        self.rank = commit.rank(place)
        self.file = files.open(name)
        self._stats = stats
        try:
            self.header = self._read_header(expected)
            told = self.header.facts
            if (told.get("save"), told.get("place")) != (commit.save, place):
                raise CheckpointError(
                    f"{self.where}: belongs to save {told.get('save')} and place "
                    f"{told.get('place')}, not to save {commit.save} and place {place}. Files of "
                    "two saves were mixed."
                )
        except BaseException:
            self.file.close()
            raise
        stats.files += 1

    def _read_header(self, expected: int) -> Header:
        size = self.file.nbytes
        first = self._pull(0, min(max(expected, self.file.least_read), size))
        length = header_length(self.where, first[:8], size)
        text = first[8 : 8 + length]
        if len(text) < length:
            text += self._pull(8 + len(text), length - len(text))
        self._stats.headers += max(len(first), 8 + length)
        return parse_header(self.where, text, size)

    def _pull(self, position: int, nbytes: int) -> bytes:
        memory = bytearray(nbytes)
        if self.file.read_into(memory, position) != nbytes:
            raise CheckpointError(
                f"{self.where}: ends before byte {position + nbytes}. The file was truncated; load "
                "another checkpoint."
            )
        return bytes(memory)

    def part(self, key: str, chunk: Any, dtype: torch.dtype) -> tuple[str, Part]:
        """Returns the name of a chunk in the file, and what must be known to read of it.

        Args:
            key: The tensor's key.
            chunk: The chunk's offsets and sizes by the manifest.
            dtype: The tensor's dtype by the manifest.

        Raises:
            CheckpointError: If the file does not have such a chunk.
        """
        name = chunk_name(key, chunk.offsets)
        entry = self.header.entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.where}: rank {self.rank} did not write {key} at {tuple(chunk.offsets)}, "
                "though the manifest says so. The ranks of this save did not hold the same values."
            )
        sizes = chunk.sizes
        # Bytes in one more dim: what older versions wrote for dtypes that safetensors has since got.
        forms = (stored_form(dtype, sizes), ("U8", (*sizes, dtype.itemsize)))
        if (entry.code, entry.shape) not in forms:
            raise CheckpointError(
                f"{self.where}: {name} has dtype {entry.code} and shape {entry.shape}, but the "
                f"manifest says {dtype} and {tuple(sizes)} (rank {self.rank})"
            )
        header = self.header
        part = Part(
            (self.where, key, chunk.offsets, self.rank),
            header.data_start + entry.start,
            entry.stop - entry.start,
            sizes,
            dtype,
            header.sums.get(name, b""),
            header.table.get(name),
        )
        return name, part

    def table_of(self, part: Part) -> bytes:
        """Returns the checksums of a chunk's blocks."""
        assert part.row is not None  # only chunks of several blocks have rows in the table
        nbytes = 8 * block_count(part.nbytes)
        start = self.header.data_start + self.header.entries[SUMS].start + 8 * part.row
        self._stats.headers += nbytes
        return self._pull(start, nbytes)

    def values(self, verify: bool) -> dict[str, Any]:
        """Returns the Python values in the file, as plain data by key."""
        entry = self.header.entries.get(VALUES)
        if entry is None:
            return {}
        raw = self._pull(self.header.data_start + entry.start, entry.stop - entry.start)
        self._stats.headers += len(raw)
        if verify:
            name, nbytes = (self.where, "Python values", None, self.rank), len(raw)
            total = self.header.sums.get(VALUES, b"")
            Check(Part(name, 0, nbytes, (nbytes,), torch.uint8, total)).run(0, raw)
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.where}: Python values are no JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.where}: Python values are no JSON object")
        return values
