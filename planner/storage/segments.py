"""Which bytes of a data file a load reads: exact ranges, and what it costs to check them.

| name | is |
|---|---|
| `Want` | part of a saved chunk, and the tensors that it fills |
| `Part` | all that is wanted of one chunk |
| `Range`, `Rows` | bytes that are read together: one range of a chunk, or runs at equal distances |
| `segments_of` | the ranges and rows for all wants of one file |

A chunk that is wanted whole is read once and checked by its checksum in the header. Of a part only
the part is read; the blocks in it that are whole are checked against the table at the file's end. A
block that a part touches at its edge is read whole and checked as long as that stays cheap; see
`Verify`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from shardplan.layouts.slab import Shape

from .checks import Check
from .stats import Stats
from .sums import BLOCK

# True: what a load reads is checked, and edges of blocks up to 1/256 of it, or 256 KiB of a file.
# "all": edges always. False: nothing.
Verify = bool | Literal["all"]
_CHEAP_SHARE = 256
_CHEAP_NBYTES = 256 << 10


@dataclass(eq=False, slots=True)
class Want:
    """Part of a saved chunk, and the tensors that it fills.

    Attributes:
        offsets: First element of the part, relative to the chunk.
        lengths: Extent of the part.
        items: The read items, which the planner gets back.
        targets: A tensor for each item; it has the extent of the part.
    """

    offsets: Shape
    lengths: Shape
    items: list[Any] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)

    def meets(self, other: "Want") -> bool:
        """Returns whether two parts of one chunk have an element in common."""
        return all(
            a < b + m and b < a + n
            for a, n, b, m in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )


@dataclass(eq=False, slots=True)
class Part:
    """All that is wanted of one chunk.

    Attributes:
        where: File, key and rank, for errors.
        position: Of the chunk's first byte in the file.
        sizes: Shape of the chunk.
        dtype: Data type of its elements.
        total: Its checksum.
        row: Its first row in the table of block checksums, None if it has one block.
        wants: The parts of it, no two of them equal.
        pending: How many segments are under way.
        issued: Whether all of its segments are.
    """

    where: str
    position: int
    sizes: Shape
    dtype: torch.dtype
    total: bytes
    row: int | None = None
    wants: list[Want] = field(default_factory=list)
    pending: int = 0
    issued: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize


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
    def total(self) -> int:
        """Bytes of all runs."""
        return self.nbytes * math.prod(count for count, _ in self.loops)

    def starts(self) -> Iterator[int]:
        """Yields the first byte of each run."""
        for indices in itertools.product(*(range(count) for count, _ in self.loops)):
            yield self.start + sum(
                i * stride for i, (_, stride) in zip(indices, self.loops, strict=True)
            )


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
    verify: Verify,
    table_of: Callable[[Part], bytes],
    stats: Stats,
) -> Iterator[Range | Rows]:
    """Yields ranges and rows for all wants of one file, in the order of the file.

    Args:
        parts: The wanted chunks.
        limit: Bytes that may be read together, a multiple of a block.
        verify: What is checked.
        table_of: Returns the checksums of a chunk's blocks.
        stats: Counts what is needed and what is not checked.
    """
    needed = sum(math.prod(w.lengths) * p.dtype.itemsize for p in parts for w in p.wants)
    stats.needed += needed
    cheap = max(_CHEAP_NBYTES, needed // _CHEAP_SHARE) if verify else 0
    cheap = 1 << 62 if verify == "all" else cheap
    for part in sorted(parts, key=lambda part: part.position):
        nbytes = part.nbytes
        runs = [runs_of(part.sizes, w.offsets, w.lengths, part.dtype.itemsize) for w in part.wants]
        more = max(nbytes - sum(run.total for run in runs), 0)
        small = nbytes <= BLOCK or verify == "all"
        if more == 0 or (verify and small and more <= cheap):
            cheap -= more
            yield from _pieces(part, 0, nbytes, limit, Check(part) if verify else None)
            continue
        overlap = any(a.meets(b) for a, b in itertools.combinations(part.wants, 2))
        if overlap or all(not run.loops for run in runs):
            for start, stop in _union(runs, overlap):
                spent = 0
                if verify:
                    wide = (start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, nbytes))
                    spent = (start - wide[0]) + (wide[1] - stop)
                    if spent <= cheap:
                        start, stop, cheap = *wide, cheap - spent
                    check = Check(part, table_of(part) if part.row is not None else part.total)
                    yield from _aligned(part, start, stop, limit, check, stats)
                else:
                    yield from _pieces(part, start, stop, limit, None)
            continue
        for want, run in zip(part.wants, runs, strict=True):
            stats.unchecked += run.total if verify else 0
            yield from _rows(part, want, run, limit)


def _union(runs: Sequence[Runs], overlap: bool) -> list[tuple[int, int]]:
    """Returns the ranges that runs span; one range for all if wants have elements in common."""
    spans = sorted((run.start, run.stop) for run in runs)
    if overlap:
        return [(spans[0][0], max(stop for _, stop in spans))]
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _pieces(part: Part, start: int, stop: int, limit: int, check: Check | None) -> Iterator[Range]:
    for at in range(start, max(stop, start + 1), limit):
        yield Range(part, at, min(at + limit, stop), check)


def _aligned(
    part: Part, start: int, stop: int, limit: int, check: Check, stats: Stats
) -> Iterator[Range]:
    """Yields a range whose ends may lie inside of blocks; those ends are not checked."""
    first = min(-(-start // BLOCK) * BLOCK, stop)
    last = stop if stop == part.nbytes else max(stop // BLOCK * BLOCK, first)
    if start < first:
        stats.unchecked += first - start
        yield Range(part, start, first)
    if first < last:
        yield from _pieces(part, first, last, limit, check)
    if last < stop:
        stats.unchecked += stop - last
        yield Range(part, last, stop)


def _rows(part: Part, want: Want, run: Runs, limit: int) -> Iterator[Range | Rows]:
    count = max(limit // run.nbytes, 1)
    starts = run.starts()
    first = 0
    while some := list(itertools.islice(starts, count)):
        if run.nbytes > limit:
            yield from _pieces(part, some[0], some[0] + run.nbytes, limit, None)
        else:
            yield Rows(part, want, run.nbytes, some, first)
        first += len(some)
