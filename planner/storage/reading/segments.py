"""Which bytes of a data file a load reads: exact ranges, and what it costs to check them.

| name | is |
|---|---|
| `Range`, `Rows` | bytes that are read together: one range of a chunk, or runs at equal distances |
| `Allowance` | how much may be read for checksums alone |
| `segments_of` | the ranges and rows for all wants of one file |

A chunk that is wanted whole is read once and checked by its checksum in the header. Of a part only
the part is read; the blocks in it that are whole are checked against the table at the file's end. A
block that a part touches at its edge is read whole and checked as long as that stays cheap over the
whole load; see `Verify`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from shardplan.layouts.slab import Shape

from ..format.sums import BLOCK
from .checks import Check
from .stats import Stats
from .wanted import Part, Want

# True: blocks that are read whole, and others while the rest of them adds at most 1/256 to what the
# load needs. "all": all blocks. False: none.
Verify = bool | Literal["all"]
_CHEAP_SHARE = 256
# A chunk of at most one page, which a disk reads whole anyway, is read whole for its checksum.
_PAGE = 4 << 10
# So many runs are handed to a worker at once.
_MOST_RUNS = 1 << 14


class Allowance:
    """How many bytes a load may read for nothing but the checksums of blocks that it touches.

    Args:
        verify: What is checked.
    """

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._needed = 0
        self._spent = 0

    def need(self, nbytes: int) -> None:
        """Takes note of bytes that the load needs."""
        self._needed += nbytes

    def spend(self, nbytes: int) -> bool:
        """Returns whether the load may read so many bytes that it does not need; spends them."""
        if self._verify == "all":
            return True
        if not self._verify or self._spent + nbytes > self._needed // _CHEAP_SHARE:
            return False
        self._spent += nbytes
        return True


class Range(NamedTuple):
    """One range of a chunk's bytes; its wants pick what they need of it.

    Attributes:
        part: The chunk.
        start: First byte, relative to the chunk.
        stop: One past the last byte.
        check: Takes the blocks of the range, which are whole then; None if it is not checked.
    """

    part: Part
    start: int
    stop: int
    check: Check | None = None


class Rows(NamedTuple):
    """Some of the contiguous runs that a want has in its chunk, read one behind the other.

    Attributes:
        part: The chunk.
        want: The want.
        nbytes: Length of each run.
        starts: First byte of each, relative to the chunk.
        first: Number of the first run among all of the want's.
    """

    part: Part
    want: Want
    nbytes: int
    starts: Sequence[int]
    first: int


class Runs(NamedTuple):
    """The contiguous runs that a box has in a row-major chunk, in bytes.

    Attributes:
        start: First byte of the first run.
        nbytes: Length of each run.
        loops: `(count, stride)` of each dim that is walked, slowest first; empty for one run.
    """

    start: int
    nbytes: int
    loops: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        """One past the last byte of the last run."""
        return self.start + self.nbytes + sum((n - 1) * stride for n, stride in self.loops)

    @property
    def gap(self) -> int:
        """Most bytes that lie between two runs that follow one another, 0 for one run."""
        span, gap = self.nbytes, 0
        for count, stride in reversed(self.loops):
            gap = max(gap, stride - span)
            span += (count - 1) * stride
        return gap

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return self.nbytes * math.prod(count for count, _ in self.loops)

    def starts(self) -> Iterator[int]:
        """Yields the first byte of each run."""
        *outer, (count, stride) = self.loops or ((1, 1),)
        for indices in itertools.product(*(range(many) for many, _ in outer)):
            at = self.start + sum(i * step for i, (_, step) in zip(indices, outer, strict=True))
            yield from range(at, at + count * stride, stride)


def runs_of(sizes: Shape, offsets: Shape, lengths: Shape, itemsize: int) -> Runs:
    """Returns the contiguous runs that a box has in a row-major chunk.

    >>> runs_of((8, 4), (2, 0), (3, 4), 4)
    Runs(start=32, nbytes=48, loops=())
    >>> runs_of((8, 4), (0, 2), (8, 2), 4)
    Runs(start=8, nbytes=8, loops=((8, 16),))
    """
    start, run, stride, whole = 0, itemsize, itemsize, True
    loops: list[tuple[int, int]] = []
    for size, offset, length in zip(
        reversed(sizes), reversed(offsets), reversed(lengths), strict=True
    ):
        start += offset * stride
        if whole:
            run = length * stride
            whole = length == size
        elif length > 1:
            loops.append((length, stride))
        stride *= size
    return Runs(start, run, tuple(reversed(loops)))


def segments_of(
    parts: Sequence[Part],
    limit: int,
    gap: int,
    verify: Verify,
    allowance: Allowance,
    table_of: Callable[[Part], bytes],
    stats: Stats,
) -> Iterator[Range | Rows]:
    """Yields ranges and rows for all wants of one file, in the order of the file.

    Args:
        parts: The wanted chunks.
        limit: Bytes that may be read together, a multiple of a block.
        gap: Bytes between two runs that are read along with them.
        verify: What is checked.
        allowance: What the load may read for checksums alone.
        table_of: Returns the checksums of a chunk's blocks.
        stats: Counts what is needed and what is not checked.
    """
    needed = 0
    for part in parts:
        for want in part.wants:
            needed += math.prod(want.lengths) * part.dtype.itemsize
    stats.needed += needed
    allowance.need(needed)
    for part in sorted(parts, key=attrgetter("position")):
        nbytes = part.nbytes
        if len(part.wants) == 1 and part.wants[0].lengths == part.sizes:
            check = Check(part) if verify else None
            if nbytes <= limit:
                yield Range(part, 0, nbytes, check)
            else:
                yield from _pieces(part, 0, nbytes, limit, check)
            continue
        runs = [runs_of(part.sizes, w.offsets, w.lengths, part.dtype.itemsize) for w in part.wants]
        more = max(nbytes - sum(run.total for run in runs), 0)
        small = nbytes <= BLOCK or verify == "all"
        free = more == 0 or (verify and nbytes <= _PAGE)
        if free or (verify and small and allowance.spend(more)):
            yield from _pieces(part, 0, nbytes, limit, Check(part) if verify else None)
            continue
        overlap = any(a.meets(b) for a, b in itertools.combinations(part.wants, 2))
        if overlap or all(run.gap <= gap for run in runs):
            for start, stop in _union(runs, overlap, gap):
                if not verify:
                    yield from _pieces(part, start, stop, limit, None)
                    continue
                first, last = start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, nbytes)
                start = first if allowance.spend(start - first) else start
                stop = last if allowance.spend(last - stop) else stop
                yield from _aligned(part, start, stop, limit, table_of, stats)
            continue
        for want, run in zip(part.wants, runs, strict=True):
            stats.unchecked += run.total if verify else 0
            yield from _rows(part, want, run, limit)


def _union(runs: Sequence[Runs], overlap: bool, gap: int) -> list[tuple[int, int]]:
    """Returns the ranges that runs span; one range for all if wants have elements in common."""
    spans = sorted((run.start, run.stop) for run in runs)
    if overlap:
        return [(spans[0][0], max(stop for _, stop in spans))]
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _pieces(part: Part, start: int, stop: int, limit: int, check: Check | None) -> Iterator[Range]:
    if stop - start <= limit:
        yield Range(part, start, stop, check)
        return
    for at in range(start, stop, limit):
        yield Range(part, at, min(at + limit, stop), check)


def _aligned(
    part: Part,
    start: int,
    stop: int,
    limit: int,
    table_of: Callable[[Part], bytes],
    stats: Stats,
) -> Iterator[Range]:
    """Yields a range whose ends may lie inside of blocks; those ends are not checked."""
    first = min(-(-start // BLOCK) * BLOCK, stop)
    last = stop if stop == part.nbytes else max(stop // BLOCK * BLOCK, first)
    if first >= last:
        stats.unchecked += stop - start
        yield from _pieces(part, start, stop, limit, None)
        return
    check = Check(part, None if part.row is None else table_of(part))
    if start < first:
        stats.unchecked += first - start
        yield Range(part, start, first)
    yield from _pieces(part, first, last, limit, check)
    if last < stop:
        stats.unchecked += stop - last
        yield Range(part, last, stop)


def _rows(part: Part, want: Want, run: Runs, limit: int) -> Iterator[Range | Rows]:
    starts = run.starts()
    if run.nbytes > limit:
        for start in starts:
            yield from _pieces(part, start, start + run.nbytes, limit, None)
        return
    count, first = min(limit // run.nbytes, _MOST_RUNS), 0
    while some := list(itertools.islice(starts, count)):
        yield Rows(part, want, run.nbytes, some, first)
        first += len(some)
