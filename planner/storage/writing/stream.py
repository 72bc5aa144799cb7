"""Streams chunks to a file: device → page-locked buffer → checksum → file, all at once.

Small chunks are gathered in a buffer and written with one call. A large chunk that lies contiguous
in host memory is written from where it lies. Everything else passes through a buffer, so no more
memory is needed than the buffers have. The calling thread resolves and copies; worker threads
compute checksums and write.
"""

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from shardplan.layouts import CheckpointError
from shardplan.layouts.slab import flat_boxes

from ..buffers import Buffer, Buffers, Copies, Mark, memory_of
from ..format.sums import BLOCK, block_count, block_sum, chunk_sum

# Chunks up to this size are gathered; larger ones are worth a call of their own.
GATHERED = 256 << 10


class Piece(NamedTuple):
    """One chunk that is to be written.

    Attributes:
        name: Its name in the file.
        dtype: Data type of its tensor.
        sizes: Shape of its tensor.
        nbytes: Its size.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    nbytes: int


class Sink(Protocol):
    """Where bytes go.

    Attributes:
        in_order: Whether they must come one after another, from the first on.
    """

    in_order: bool

    def write(self, data: Any, position: int) -> None:
        """Writes all of `data` at a position in the file."""


class Nowhere:
    """A sink that only lets checksums be computed."""

    in_order = False

    def write(self, data: Any, position: int) -> None:
        """Does nothing."""


class _Part(NamedTuple):
    """Part of a chunk in a job's memory: whole blocks, the last one of the chunk excepted."""

    number: int
    block: int
    start: int
    stop: int


class _Jobs:
    """Hands memory to worker threads and takes note of the checksums."""

    def __init__(self, pieces: Sequence[Piece], sink: Sink, buffers: Buffers, threads: int) -> None:
        self.sums = [[b""] * block_count(piece.nbytes) for piece in pieces]
        self._sink = sink
        self._buffers = buffers
        self._threads = 1 if sink.in_order else threads
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="shardplan-write")
        self._running: deque[Future[None]] = deque()

    def __enter__(self) -> "_Jobs":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(
        self,
        memory: Any,
        position: int,
        parts: list[_Part],
        buffer: Buffer | None = None,
        copied: Mark = (),
    ) -> None:
        """Queues memory for the workers; raises what an earlier job failed with."""
        while self._running and (len(self._running) > 2 * self._threads or self._running[0].done()):
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._do, memory, position, parts, buffer, copied))

    def _do(
        self, memory: Any, position: int, parts: list[_Part], buffer: Buffer | None, copied: Mark
    ) -> None:
        try:
            for event in copied:
                event.synchronize()
            for number, block, start, stop in parts:
                sums = self.sums[number]
                for at in range(start, stop, BLOCK):
                    sums[block] = block_sum(memory[at : min(at + BLOCK, stop)])
                    block += 1
            self._sink.write(memory, position)
        finally:
            if buffer is not None:
                self._buffers.give_back(buffer)

    def wait(self) -> None:
        """Waits for all jobs and raises what one of them failed with."""
        while self._running:
            self._running.popleft().result()


class _Gather:
    """Small chunks on their way into one buffer."""

    def __init__(self, jobs: _Jobs, buffers: Buffers) -> None:
        self._jobs = jobs
        self._buffers = buffers
        self._buffer: Buffer | None = None
        self._used = 0
        self._position = 0
        self._parts: list[_Part] = []
        self._copies = Copies()
        self._waiting: list[torch.Tensor] = []  # of one GPU, one behind the other
        self._first = 0

    def add(self, number: int, tensor: torch.Tensor, nbytes: int, position: int) -> None:
        """Copies a chunk behind those that wait."""
        if self._buffer is not None and self._used + nbytes > self._buffers.size:
            self.flush()
        if self._buffer is None:
            self._buffer = self._buffers.borrow()
            self._position = position
        used = self._used
        if self._waiting and self._waiting[0].device != tensor.device:
            self._bring()
        if tensor.is_cuda:
            if not self._waiting:
                self._first = used
            self._waiting.append(tensor)
        elif tensor.is_cpu and tensor.is_contiguous():
            ctypes.memmove(self._buffer.address + used, tensor.data_ptr(), nbytes)
        else:
            target = self._buffer.tensor[used : used + nbytes].view(tensor.dtype)
            self._copies.to_host(target.view(tensor.shape), tensor)
        self._parts.append(_Part(number, 0, used, used + nbytes))
        self._used = used + nbytes

    def _bring(self) -> None:
        """Copies what waits on a GPU."""
        if self._waiting and self._buffer is not None:
            target = self._buffer.tensor[self._first : self._used]
            self._copies.together_to_host(target, self._waiting)
            self._waiting = []

    def flush(self) -> None:
        """Hands what was gathered to the workers."""
        if self._buffer is None:
            return
        self._bring()
        memory = self._buffer.memory[: self._used]
        self._jobs.submit(memory, self._position, self._parts, self._buffer, self._copies.mark())
        self._buffer, self._used, self._parts = None, 0, []


def write_pieces(
    pieces: Sequence[Piece],
    data_of: Callable[[int], torch.Tensor],
    sink: Sink,
    position: int,
    buffers: Buffers,
    threads: int,
) -> list[list[bytes]]:
    """Writes chunks one after another.

    Args:
        pieces: The chunks, in file order.
        data_of: Returns the tensor of a chunk by its number; asked once for each, in order.
        sink: Where the bytes go.
        position: Of the first chunk in the file.
        buffers: The memory that may be used.
        threads: How many workers compute checksums and write.

    Returns:
        The checksums of each chunk's blocks.

    Raises:
        CheckpointError: If a tensor has another size or dtype than its chunk.
        OSError: If the file can't be written.
    """
    with _Jobs(pieces, sink, buffers, threads) as jobs:
        gather = _Gather(jobs, buffers)
        for number, piece in enumerate(pieces):
            tensor = data_of(number)
            nbytes = piece.nbytes
            if tensor.dtype is not piece.dtype or tensor.numel() * tensor.itemsize != nbytes:
                raise CheckpointError(
                    f"{piece.name}: the plan has {math.prod(piece.sizes)} elements of "
                    f"{piece.dtype} and the tensor {tensor.numel()} of {tensor.dtype}. Plan again "
                    "when the state dict has changed."
                )
            if tensor.is_neg() or tensor.is_conj():
                tensor = tensor.resolve_conj().resolve_neg()
            if not nbytes:
                jobs.sums[number] = [block_sum(b"")]
            elif nbytes <= GATHERED:
                gather.add(number, tensor, nbytes, position)
            else:
                gather.flush()
                _write_large(jobs, buffers, number, tensor, position)
            position += nbytes
        gather.flush()
        jobs.wait()
    return jobs.sums


def _write_large(
    jobs: _Jobs, buffers: Buffers, number: int, tensor: torch.Tensor, position: int
) -> None:
    """Hands a large chunk to the workers in runs of whole blocks."""
    itemsize, nbytes = tensor.itemsize, tensor.numel() * tensor.itemsize
    contiguous = tensor.is_contiguous()
    direct = memory_of(tensor) if contiguous and tensor.is_cpu else None
    flat = tensor.view(-1) if contiguous else None
    shape = tuple(tensor.shape)
    copies = Copies()
    for start in range(0, nbytes, buffers.size):
        stop = min(start + buffers.size, nbytes)
        part = [_Part(number, start // BLOCK, 0, stop - start)]
        if direct is not None:
            jobs.submit(direct[start:stop], position + start, part)
            continue
        buffer = buffers.borrow()
        target = buffer.tensor[: stop - start].view(tensor.dtype)
        first, last = start // itemsize, stop // itemsize
        if flat is not None:
            copies.to_host(target, flat[first:last])
        else:
            for box in flat_boxes(shape, first, last):
                source = tensor
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    source = source.narrow(dim, offset, size)
                length = math.prod(box.sizes)
                copies.to_host(target[box.start : box.start + length].view(box.sizes), source)
        memory = buffer.memory[: stop - start]
        jobs.submit(memory, position + start, part, buffer, copies.mark())


def sums_of(blocks: Sequence[list[bytes]]) -> tuple[list[bytes], bytes]:
    """Returns the checksum of each chunk, and the table of those of their blocks.

    Chunks of one block are not in the table.
    """
    table = b"".join(b"".join(sums) for sums in blocks if len(sums) > 1)
    return [chunk_sum(sums) for sums in blocks], table
