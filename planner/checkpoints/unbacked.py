"""Tensors that have addresses but no memory behind them, to plan with."""

import math
import mmap
from collections.abc import Iterable

import torch

from shardplan.layouts.slab import Shape

_ALIGNMENT = 64
# Not in Python 3.11's mmap; the value is Linux's.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def unbacked(forms: Iterable[tuple[torch.dtype, Shape]]) -> list[torch.Tensor]:
    """Returns tensors of given dtypes and shapes, each at an address of its own.

    They are zeros that take no memory until they are written to; nothing here writes.
    """
    listed = list(forms)
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in listed]
    steps = [-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, max(sum(steps), 1), flags=flags), dtype=torch.uint8)
    made, place = [], 0
    for (dtype, shape), size, step in zip(listed, sizes, steps, strict=True):
        made.append(memory[place : place + size].view(dtype).view(shape))
        place += step
    return made
