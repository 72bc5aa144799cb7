"""Reads segments of data files into tensors, several at once.

| name | is |
|---|---|
| `Fetch` | one load's reads: planner's calls on the calling thread, reads on workers |

Bytes go straight into the tensor where that is contiguous host memory of the saved dtype. Else they
pass through a buffer, as small segments do together; from a page-locked buffer they go on to the
device on a stream of their own.
"""

import ctypes
import math
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shardplan.layouts import CheckpointError
from shardplan.layouts.slab import flat_boxes

from ..buffers import Buffer, Buffers, Copies, memory_of
from ..places.place import InFile
from .segments import Range, Rows, runs_of
from .stats import Stats
from .wanted import Part, Want

# Segments up to this size share a buffer; more bytes or segments at once would wait too long.
GATHERED = 256 << 10
_TOGETHER = 4 << 20
_MOST = 2048

Segment = Range | Rows


class Fetch:
    """One load's reads.

    Args:
        planner: The load planner; all its calls are made on the calling thread.
        buffers: The memory that may be used.
        threads: How many reads are made at once.
        stats: Counts them.
    """

    def __init__(self, planner: Any, buffers: Buffers, threads: int, stats: Stats) -> None:
        self._planner = planner
        self._buffers = buffers
        self._threads = threads
        self._stats = stats
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardplan-read")
        self._running: deque[tuple[Future[tuple[int, int]], list[Part]]] = deque()
        self._synced: set[torch.device] = set()
        self._together = min(buffers.size, _TOGETHER)

    def __enter__(self) -> "Fetch":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, file: InFile, where: str, segments: Iterable[Segment]) -> None:
        """Reads segments of one file, and gives tensors back to the planner as they are filled.

        Args:
            file: The file.
            where: Its name, for errors.
            segments: What to read; all segments of a chunk come one after another.

        Raises:
            CheckpointError: If the file ends too soon, or a checksum does not match.
        """
        batch: list[tuple[Segment, int]] = []
        used = 0
        last: Part | None = None
        for segment in segments:
            part = segment.part
            if part is not last:
                self._issued(last)
                self._resolve(part)
                last = part
            part.pending += 1
            nbytes = _nbytes(segment)
            direct = _direct(segment) if nbytes > GATHERED else None
            if direct is not None:
                self._submit(file, where, [(segment, 0)], direct)
                continue
            itemsize = part.dtype.itemsize
            used = -(-used // itemsize) * itemsize
            if batch and (used + nbytes > self._together or len(batch) >= _MOST):
                self._submit(file, where, batch)
                batch, used = [], 0
            batch.append((segment, used))
            used += nbytes
        self._issued(last)
        if batch:
            self._submit(file, where, batch)

    def wait(self) -> None:
        """Waits for all reads, and raises what one of them failed with."""
        while self._running:
            self._take()

    def _resolve(self, part: Part) -> None:
        """Asks the planner for the tensors of a chunk's parts."""
        for want in part.wants:
            for item in want.items:
                target = self._planner.resolve_tensor(item)
                if target.requires_grad:
                    target = target.detach()
                if target.shape != want.lengths:
                    raise CheckpointError(
                        f"{part.where}: {tuple(want.lengths)} is asked for and the planner gives a tensor "
                        f"of shape {tuple(target.shape)}"
                    )
                if target.is_cuda and target.device not in self._synced:
                    # The copies run on streams of their own, after what is under way here.
                    torch.cuda.current_stream(target.device).synchronize()
                    self._synced.add(target.device)
                want.targets.append(target)

    def _issued(self, part: Part | None) -> None:
        if part is not None:
            part.issued = True
            self._commit(part)

    def _commit(self, part: Part) -> None:
        """Gives a chunk's tensors back to the planner once they are filled."""
        if part.issued and not part.pending:
            for want in part.wants:
                for item, target in zip(want.items, want.targets, strict=True):
                    self._planner.commit_tensor(item, target)
            part.wants = []

    def _submit(
        self, file: InFile, where: str, batch: list[tuple[Segment, int]], direct: Any = None
    ) -> None:
        while self._running and (
            len(self._running) > 2 * self._threads or self._running[0][0].done()
        ):
            self._take()
        buffer = None if direct is not None else self._buffers.borrow()
        future = self._pool.submit(self._do, file, where, batch, direct, buffer)
        self._running.append((future, [segment.part for segment, _ in batch]))

    def _take(self) -> None:
        future, parts = self._running.popleft()
        reads, nbytes = future.result()
        self._stats.reads += reads
        self._stats.read += nbytes
        for part in parts:
            part.pending -= 1
            self._commit(part)

    def _do(
        self,
        file: InFile,
        where: str,
        batch: list[tuple[Segment, int]],
        direct: Any,
        buffer: Buffer | None,
    ) -> tuple[int, int]:
        """Reads, checks and spreads a batch; returns how many reads and bytes that took."""
        try:
            if buffer is None:
                return _read_direct(file, where, batch[0][0], direct)
            memory = buffer.memory
            reads = _read(file, where, batch, memory)
            copies = Copies()
            total = 0
            for segment, at in batch:
                nbytes = _nbytes(segment)
                total += nbytes
                if isinstance(segment, Range) and segment.check is not None:
                    segment.check.run(segment.start, memory[at : at + nbytes])
                _spread(segment, buffer, at, nbytes, copies)
            for event in copies.mark():
                event.synchronize()
            return reads, total
        finally:
            if buffer is not None:
                self._buffers.give_back(buffer)


def _nbytes(segment: Segment) -> int:
    if isinstance(segment, Range):
        return segment.stop - segment.start
    return segment.nbytes * len(segment.starts)


def _direct(segment: Segment) -> Any:
    """Returns the memory that a segment's bytes belong into as they are, None if there is none."""
    part = segment.part
    if len(part.wants) != 1 or len(part.wants[0].targets) != 1:
        return None
    want = part.wants[0]
    target = want.targets[0]
    if not (target.is_cpu and target.dtype is part.dtype and target.is_contiguous()):
        return None
    if isinstance(segment, Rows):
        start = segment.first * segment.nbytes
        return memory_of(target)[start : start + _nbytes(segment)]
    run = runs_of(part.sizes, want.offsets, want.lengths, part.dtype.itemsize)
    if run.loops or not run.start <= segment.start <= segment.stop <= run.stop:
        return None
    return memory_of(target)[segment.start - run.start : segment.stop - run.start]


def _read_direct(file: InFile, where: str, segment: Segment, memory: Any) -> tuple[int, int]:
    """Reads and checks what belongs into memory as it is; returns how many reads and bytes."""
    if isinstance(segment, Rows):
        return _pull_rows(file, where, segment, memory), len(memory)
    position, check = segment.part.position + segment.start, segment.check
    step = len(memory) if check is None else file.piece
    for at in range(0, len(memory), step):
        piece = memory[at : at + step]
        _pull(file, where, piece, position + at)
        if check is not None:
            check.run(segment.start + at, piece)
    return -(-len(memory) // step), len(memory)


def _read(file: InFile, where: str, batch: Sequence[tuple[Segment, int]], memory: Any) -> int:
    """Reads a batch's bytes, adjacent ranges with one call; returns the number of calls."""
    reads = 0
    begin, end, place = 0, 0, 0
    for segment, at in batch:
        if isinstance(segment, Rows):
            rows = memory[at : at + _nbytes(segment)]
            reads += _pull_rows(file, where, segment, rows)
            continue
        first = segment.part.position + segment.start
        if first != end or at != place + end - begin:
            reads += _pull(file, where, memory[place : place + end - begin], begin)
            begin, place = first, at
        end = first + segment.stop - segment.start
    return reads + _pull(file, where, memory[place : place + end - begin], begin)


def _pull_rows(file: InFile, where: str, rows: Rows, memory: Any) -> int:
    position = rows.part.position
    starts = [position + start for start in rows.starts]
    count = file.read_runs(memory, rows.nbytes, starts)
    if count != len(memory):
        raise _truncated(where, starts[count // rows.nbytes], rows.nbytes)
    return len(starts)


def _pull(file: InFile, where: str, memory: Any, position: int) -> int:
    if not len(memory):
        return 0
    count = file.read_into(memory, position)
    if count != len(memory):
        raise _truncated(where, position + count, len(memory) - count)
    return 1


def _truncated(where: str, end: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{where}: ends at byte {end}, but bytes up to {end + needed} are needed. The file was "
        "truncated; load another checkpoint."
    )


def _spread(segment: Segment, buffer: Buffer, at: int, nbytes: int, copies: Copies) -> None:
    """Copies bytes from a buffer to where they belong."""
    part = segment.part
    itemsize = part.dtype.itemsize
    if isinstance(segment, Rows):
        first = segment.first * segment.nbytes // itemsize
        flat = buffer.tensor[at : at + nbytes].view(part.dtype)
        want = segment.want
        _fill(want, want.lengths, (0,) * len(want.lengths), flat, first, copies)
        return
    first = segment.start // itemsize
    for want in part.wants:
        whole = first == 0 and nbytes == part.nbytes and want.lengths == part.sizes
        for target in want.targets if whole else ():
            if target.is_cpu and target.dtype is part.dtype and target.is_contiguous():
                ctypes.memmove(target.data_ptr(), buffer.address + at, nbytes)
            else:
                flat = buffer.tensor[at : at + nbytes].view(part.dtype)
                copies.to_device(target, flat.view(want.lengths))
        if not whole:
            flat = buffer.tensor[at : at + nbytes].view(part.dtype)
            _fill(want, part.sizes, want.offsets, flat, first, copies)


def _fill(
    want: Want,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    flat: torch.Tensor,
    first: int,
    copies: Copies,
) -> None:
    """Fills a want's tensors with what a flat range of a row-major tensor has of it.

    Args:
        want: The want.
        shape: Shape of that tensor.
        offsets: First element of the want in it.
        flat: The elements of the range.
        first: Number of the first of them.
        copies: Makes the copies.
    """
    for box in flat_boxes(shape, first, first + flat.numel()):
        source = flat[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
        pairs = []
        for dim, (a, n, b, m) in enumerate(
            zip(box.offsets, box.sizes, offsets, want.lengths, strict=True)
        ):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                break
            source = source.narrow(dim, start - a, stop - start)
            pairs.append((dim, start - b, stop - start))
        else:
            for target in want.targets:
                for dim, start, length in pairs:
                    target = target.narrow(dim, start, length)
                copies.to_device(target, source)
