"""Two checkpoints compared: keys, shapes, dtypes, and values block by block in bounded memory.

| name | is |
|---|---|
| `Difference` | what differs under one key |
| `compare` | yields them, whatever the two layouts and formats are |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardplan.layouts import CheckpointError

from .blocks import row_blocks
from .opened import Checkpoint, as_bytes, nbytes

Key = Callable[[str], bool]


@dataclass(slots=True)
class Difference:
    """What differs between two checkpoints under one key.

    Attributes:
        key: The key.
        kind: `only in A`, `only in B`, `kind`, `shape`, `dtype`, `values` or `object`.
        a: What A has, in words.
        b: What B has.
        elements: How many elements differ.
        max_abs: Largest absolute difference; None where values were not compared.
        max_rel: Largest difference relative to the larger of the two magnitudes.
    """

    key: str
    kind: str
    a: str = ""
    b: str = ""
    elements: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    values: bool = False,
    wanted: Key = lambda key: True,
    trust_pickle: bool = False,
    advance: Callable[[int], None] = lambda n: None,
) -> Iterator[Difference]:
    """Yields the differences of two checkpoints, key by key.

    Args:
        a: The one.
        b: The other.
        values: Whether to compare values too, bit by bit.
        wanted: Which keys count.
        trust_pickle: Whether values that are no plain data may be unpickled to be compared.
        advance: Told the bytes of each block that is done.
    """
    first, second = a.metadata.state_dict_metadata, b.metadata.state_dict_metadata
    for key in dict.fromkeys((*first, *second)):
        if not wanted(key):
            continue
        if key not in second:
            yield Difference(key, "only in A", describe(first[key]))
            continue
        if key not in first:
            yield Difference(key, "only in B", "", describe(second[key]))
            continue
        one, two = first[key], second[key]
        texts = describe(one), describe(two)
        if type(one) is not type(two):
            yield Difference(key, "kind", *texts)
        elif isinstance(one, TensorStorageMetadata) and isinstance(two, TensorStorageMetadata):
            if tuple(one.size) != tuple(two.size):
                yield Difference(key, "shape", *texts)
                continue
            if one.properties.dtype != two.properties.dtype:
                yield Difference(key, "dtype", *texts)
            if values:
                found = _values(a, b, key, advance)
                if found is not None:
                    yield found
        elif values:
            left, right = (c.load_object(key, trust_pickle) for c in (a, b))
            if not _same(left, right):
                yield Difference(key, "object", _short(left), _short(right))


def _values(
    a: Checkpoint, b: Checkpoint, key: str, advance: Callable[[int], None]
) -> Difference | None:
    """Compares one tensor's values block by block."""
    shape, dtypes = a.shape(key), (a.dtype(key), b.dtype(key))
    result = Difference(key, "values", elements=0, max_abs=0.0, max_rel=0.0)
    for offsets, sizes in row_blocks(shape, max(d.itemsize for d in dtypes)):
        if not math.prod(sizes):
            continue
        left, right = a.read(key, offsets, sizes), b.read(key, offsets, sizes)
        if dtypes[0] != dtypes[1] or not (as_bytes(left) == as_bytes(right)).all():
            _add(result, left, right)
        advance(math.prod(sizes) * dtypes[0].itemsize)
    return result if result.elements else None


def _add(result: Difference, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds one block that is not bitwise equal."""
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    same_kind = left.dtype == right.dtype
    width = left.dtype.itemsize
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    one, two = left.double(), right.double()
    # Only the elements whose bits differ: two NaNs of equal bits are equal here.
    unequal = left.view(bits) != right.view(bits) if same_kind else one != two
    if not bool(unequal.any()):
        return
    gap = (one[unequal] - two[unequal]).abs()
    gap[gap.isnan()] = math.inf
    scale = torch.maximum(one[unequal].abs(), two[unequal].abs())
    relative = torch.where(scale > 0, gap / scale, torch.zeros_like(gap))
    relative[relative.isnan()] = math.inf
    result.elements = (result.elements or 0) + int(unequal.sum())
    result.max_abs = max(result.max_abs or 0.0, float(gap.max()))
    result.max_rel = max(result.max_rel or 0.0, float(relative.max()))


def total_bytes(a: Checkpoint, b: Checkpoint, wanted: Key) -> int:
    """Returns how many bytes `compare` will announce for values."""
    both = b.metadata.state_dict_metadata
    return sum(
        nbytes(stored)
        for key, stored in a.metadata.state_dict_metadata.items()
        if key in both and wanted(key)
    )


def describe(stored: Any) -> str:
    """Returns a stored value's dtype and shape in words."""
    if not isinstance(stored, TensorStorageMetadata):
        return "a Python value"
    return f"{str(stored.properties.dtype).removeprefix('torch.')} {list(stored.size)}"


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, type(right)) and torch.equal(left, right)
    if hasattr(left, "getvalue") and hasattr(right, "getvalue"):
        return bool(left.getvalue() == right.getvalue())
    try:
        return type(left) is type(right) and bool(left == right)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{type(left).__name__} values can't be compared: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
