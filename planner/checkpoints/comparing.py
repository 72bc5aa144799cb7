"""Two checkpoints compared: keys, shapes, dtypes, and values block by block in bounded memory."""

import argparse
import dataclasses
import datetime
import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardplan.layouts import CheckpointError

from ..state.values import to_bytes
from .blocks import row_blocks
from .opened import Checkpoint, as_bytes, nbytes

Key = Callable[[str], bool]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
            try:
                same = identical(left, right)
            except RecursionError:
                raise CheckpointError(
                    f"{key}: the value contains itself, or is nested too deep to be compared. Leave "
                    "it out with --filter."
                ) from None
            if not same:
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
    left, right = _unpacked(left), _unpacked(right)
    if left.dtype.is_complex or right.dtype.is_complex:
        if left.dtype != right.dtype:
            left, right = left.to(torch.complex128), right.to(torch.complex128)
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


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a tensor of half bytes, with which torch can't calculate; others as is."""
    if tensor.dtype is not torch.float4_e2m1fn_x2:
        return tensor
    packed = tensor.view(torch.uint8)
    halves = torch.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return torch.tensor([*_E2M1, *(-number for number in _E2M1)]).double()[halves.long()]


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


def identical(left: Any, right: Any) -> bool:
    """Returns whether two values have the same types and bits, at every depth.

    Unlike `same_value` of the loads, 1 is not 1.0 here, nor 0.0 -0.0; a NaN is identical to one of
    equal bits. The order of a mapping's keys does not count.

    >>> identical({"a": [1, float("nan")]}, {"a": [1, float("nan")]}), identical([1], [1.0])
    (True, False)
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if isinstance(left, Mapping):
        others = {_ident(key): value for key, value in right.items()}
        mine = {_ident(key): value for key, value in left.items()}
        return mine.keys() == others.keys() and all(
            identical(value, others[key]) for key, value in mine.items()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, set | frozenset):
        return set(map(_ident, left)) == set(map(_ident, right))
    if isinstance(left, float | complex):
        return _bits(left) == _bits(right)
    if isinstance(left, io.BytesIO):
        return bool(left.getvalue() == right.getvalue())
    if isinstance(left, argparse.Namespace):
        return identical(vars(left), vars(right))
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        names = [field.name for field in dataclasses.fields(left)]
        return all(identical(getattr(left, n, None), getattr(right, n, None)) for n in names)
    if isinstance(left, datetime.datetime | datetime.time):
        return repr(left) == repr(right)  # == also holds for one moment in two time zones
    try:
        if left == right:
            return True
    except Exception:  # a class of somebody else's, whose pickle was trusted
        pass
    return to_bytes("A", left).getvalue() == to_bytes("B", right).getvalue()


def _ident(value: Any) -> Any:
    """Returns what is equal for identical hashable values only, at every depth of a tuple."""
    if isinstance(value, tuple | frozenset):
        inner: Any = (
            tuple(map(_ident, value)) if isinstance(value, tuple) else {*map(_ident, value)}
        )
        return type(value), inner if isinstance(inner, tuple) else frozenset(inner)
    return type(value), _bits(value) if isinstance(value, float | complex) else value


def _bits(value: complex) -> bytes:
    return struct.pack("<dd", value.real, value.imag)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (
        left.dtype != right.dtype
        or left.layout != right.layout
        or left.is_quantized != right.is_quantized
    ):
        return False
    if left.layout is not torch.strided or left.is_quantized or left.is_nested:
        return to_bytes("A", left).getvalue() == to_bytes("B", right).getvalue()
    if left.shape != right.shape:
        return False
    one, two = (t.resolve_conj().resolve_neg().contiguous() for t in (left, right))
    return bool((as_bytes(one) == as_bytes(two)).all())


def _same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if isinstance(left, np.ma.MaskedArray):
        masks = np.array_equal(np.ma.getmaskarray(left), np.ma.getmaskarray(right))
        return masks and left.data.tobytes() == right.data.tobytes()
    if left.dtype.hasobject:
        return identical(left.tolist(), right.tolist())
    return left.tobytes() == right.tobytes()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
