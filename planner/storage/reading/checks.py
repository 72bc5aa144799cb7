"""Compares what was read with the checksums in its file.

| name | is |
|---|---|
| `Check` | the checksums of one chunk, as its blocks come in |
"""

import threading
from typing import Any

from shardplan.layouts import CheckpointError

from ..format.sums import BLOCK, block_count, block_sum, chunk_sum
from .wanted import Part


class Check:
    """The checksums of one chunk, as its blocks come in; threads may bring them in any order.

    Args:
        part: The chunk.
        table: Checksums of its blocks; None if all of them will come, so that the chunk's own
            checksum tells.
    """

    __slots__ = ("_left", "_lock", "_part", "_sums", "_table")

    def __init__(self, part: Part, table: bytes | None = None) -> None:
        self._part = part
        self._table = part.total if table is None and part.nbytes <= BLOCK else table
        if self._table is None:
            self._sums = [b""] * block_count(part.nbytes)
            self._left = len(self._sums)
            self._lock = threading.Lock()

    def run(self, start: int, memory: Any) -> None:
        """Checks blocks that are whole, the chunk's last one excepted.

        Args:
            start: First byte of `memory`, relative to the chunk.
            memory: The blocks.

        Raises:
            CheckpointError: If one of them is not what was written.
        """
        first, table = start // BLOCK, self._table
        sums = [block_sum(memory[at : at + BLOCK]) for at in range(0, len(memory) or 1, BLOCK)]
        if table is not None:
            if b"".join(sums) != table[8 * first : 8 * (first + len(sums))]:
                raise _damaged(self._where(first, sums, table))
            return
        self._sums[first : first + len(sums)] = sums
        with self._lock:
            self._left -= len(sums)
            done = self._left == 0
        if done and chunk_sum(self._sums) != self._part.total:
            raise _damaged(self._part.where)

    def _where(self, first: int, sums: list[bytes], table: bytes) -> str:
        """Returns where the first block is that differs."""
        if self._part.nbytes <= BLOCK:
            return self._part.where
        for block, found in enumerate(sums, first):
            if found != table[8 * block : 8 * block + 8]:
                return f"{self._part.where}, bytes from {block * BLOCK} on"
        raise AssertionError("called where one differs")


def _damaged(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the checksum does not match, so these are not the bytes that were written. "
        "Load another checkpoint, or pass verify=False to read them as they are."
    )
