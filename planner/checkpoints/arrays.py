"""Reads a box of a row-major array that lies in a file: only its bytes, in bounded memory.

| name | does |
|---|---|
| `Array` | where a row-major array lies |
| `read_box` | fills a contiguous buffer with a box of it |
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardplan.layouts import CheckpointError
from shardplan.layouts.slab import Shape, contiguous_strides

from .files import Files

_BLOCK = 4 << 20
_WORTH_A_READ = 64 << 10  # a shorter run is read with its neighbours if they are near


class Array(NamedTuple):
    """Where a row-major array lies.

    Attributes:
        file: Path of the file, relative to the checkpoint's folder.
        start: Position of its first byte.
        itemsize: Bytes of one element.
        shape: Its shape, in elements.
    """

    file: str
    start: int
    itemsize: int
    shape: Shape


def read_box(
    files: Files, array: Array, offsets: Shape, sizes: Shape, out: npt.NDArray[np.uint8]
) -> int:
    """Fills `out` with the elements of a box, row-major.

    Args:
        files: The checkpoint's open files.
        array: The array.
        offsets: First element of the box on each dim.
        sizes: Extent of the box, inside the array.
        out: One-dimensional buffer of exactly the box's bytes.

    Returns:
        How many bytes were read from the file.

    Raises:
        CheckpointError: If the file ends before the box does, or can't be read.
    """
    size = array.itemsize
    if out.nbytes != math.prod(sizes) * size:
        raise CheckpointError(
            f"{array.file}: a buffer of {out.nbytes} bytes for {math.prod(sizes) * size}"
        )
    if not out.nbytes:
        return 0
    strides = contiguous_strides(array.shape)
    last = max((d for d, n in enumerate(sizes) if n != array.shape[d]), default=0)
    run = math.prod(sizes[last:]) * size
    first = array.start + size * sum(o * s for o, s in zip(offsets, strides, strict=True))
    outer = range(last)
    if not outer:
        files.read(array.file, first, out)
        return run
    row = strides[last - 1] * size
    rows = sizes[last - 1]
    near = run < _WORTH_A_READ and (run * 4 >= row or row <= 4096)
    done = taken = 0
    for index in itertools.product(*(range(sizes[d]) for d in outer[:-1])):
        start = first + size * sum(i * strides[d] for d, i in enumerate(index))
        if near:
            taken += _rows(files, array.file, start, rows, row, run, out[done : done + rows * run])
            done += rows * run
            continue
        for i in range(rows):
            files.read(array.file, start + i * row, out[done : done + run])
            done += run
            taken += run
    return taken


def _rows(
    files: Files,
    file: str,
    start: int,
    rows: int,
    row: int,
    run: int,
    out: npt.NDArray[np.uint8],
) -> int:
    """Reads equal runs with what lies between them, block by block."""
    each = max(1, _BLOCK // row)
    taken = 0
    for begin in range(0, rows, each):
        count = min(each, rows - begin)
        block = np.empty((count - 1) * row + run, dtype=np.uint8)
        files.read(file, start + begin * row, block)
        shown = np.lib.stride_tricks.as_strided(block, (count, run), (row, 1))
        out[begin * run : (begin + count) * run].reshape(count, run)[:] = shown
        taken += block.nbytes
    return taken
