"""Tied tensors: two keys, one memory, one stored copy.

A tied weight is written once; its other key points to the same bytes, so that any reader finds
both. At load:

| checkpoint | state dict | comes out |
|---|---|---|
| one copy, two keys | two tensors | both are filled |
| one copy, two keys | one memory | filled once |
| two copies | one memory | filled, if both are equal; else an error that names both keys |
| one key only | one memory | filled; the other key is in the report's `tied` |
| one key only | two tensors | the other key is missing |
| two copies | a tensor and a view of a part of it | filled, if that part is equal; else an error |
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardplan.layouts import CheckpointError

from ..compat import ShardedTensor, local_tensor
from ..state.storable import PLAIN, overlaps


def shared_memory(values: Sequence[Any]) -> dict[int, int]:
    """Returns the positions of tensors that are the same memory as an earlier one, with its own.

    The same memory means the same elements in the same order; overlapping views do not count,
    nor do tensors without elements.
    """
    first: dict[tuple[Any, ...], int] = {}
    shared: dict[int, int] = {}
    seen: set[int] = set()
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        local = local_tensor(value)
        if type(local) not in PLAIN and isinstance(local, ShardedTensor):
            continue  # it is several tensors, or none
        pointer = local.data_ptr()
        if pointer not in seen:  # almost every tensor
            seen.add(pointer)
            if pointer:
                first[_identity(local)] = number
            continue
        if pointer and local.numel():
            other = first.setdefault(_identity(local), number)
            if other != number:
                shared[number] = other
    return shared


def meeting_memory(values: Sequence[Any], shared: Mapping[int, int]) -> list[list[int]]:
    """Returns the positions of tensors whose runs of memory meet, those that are linked together.

    A run goes from a tensor's first byte to its last, so that two columns of a matrix meet too.

    Args:
        values: The values.
        shared: Positions of tensors that are all the memory of an earlier one; they do not count.
    """
    runs: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, value in enumerate(values):
        if number in shared or not isinstance(value, torch.Tensor):
            continue
        local = local_tensor(value)
        if type(local) not in PLAIN and isinstance(local, ShardedTensor):
            continue  # it is several tensors, or none
        pointer = local.data_ptr()
        if pointer and local.numel() and not overlaps(local):
            runs.setdefault(local.device, []).append((pointer, pointer + _extent(local), number))
    met = []
    for found in runs.values():
        found.sort()
        cluster, end = [found[0][2]], found[0][1]
        for start, stop, number in found[1:]:
            if start >= end:
                met.append(cluster)
                cluster = []
            cluster.append(number)
            end = max(end, stop)
        met.append(cluster)
    return [cluster for cluster in met if len(cluster) > 1]


def _extent(local: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first to its last."""
    if local.is_contiguous():
        return local.nbytes
    last = sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
    return (last + 1) * local.itemsize


def same_memory(a: Any, b: Any) -> bool:
    """Returns whether two values are tensors of the same memory."""
    return _identity(local_tensor(a)) == _identity(local_tensor(b))


def _identity(local: torch.Tensor) -> tuple[Any, ...]:
    return (local.data_ptr(), local.dtype, local.shape, local.stride())


class AliasedMetadata(Metadata):
    """Metadata in which some keys are other names of stored ones; see `with_aliases`.

    The storage writer sets `storage_data` when it knows where everything lies; then the other
    names get the places of what they stand for, and the object becomes plain `Metadata`, which is
    what is pickled.
    """

    _names: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "storage_data" and value is not None:
            _check_places(value)
            value = {**value, **dict(_aliases(value, self._names))}
            self.__class__ = Metadata  # type: ignore[assignment]
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (vars(self),)


def with_aliases(metadata: Metadata, aliases: Mapping[str, str]) -> Metadata:
    """Returns metadata in which some keys are other names of stored ones, and no chunk is lost.

    Args:
        metadata: DCP's metadata.
        aliases: Key that is not stored → the one that stands for it.
    """
    names: dict[str, list[str]] = {}
    for alias, key in aliases.items():
        names.setdefault(key, []).append(alias)
    # A class of its own holds the names, so that `dataclasses.replace`, by which torch 2.11 sets
    # the version, keeps them, whatever fields the constructor takes.
    kind = type("AliasedMetadata", (AliasedMetadata,), {"_names": names})
    made: Metadata = object.__new__(kind)
    made.__dict__.update(vars(metadata))
    return made


def _check_places(places: Mapping[Any, Any]) -> None:
    """Refuses two chunks of one key at one place: a writer kept the last of them only."""
    known: dict[tuple[str, str, int], Any] = {}
    for index, place in places.items():
        if getattr(place, "length", 0):
            ident = (index.fqn, str(place.relative_path), int(place.offset))
            other = known.setdefault(ident, index)
            if other is not index:
                raise CheckpointError(
                    f"{index.fqn}: the storage writer put its chunks at {tuple(other.offset)} and "
                    f"{tuple(index.offset)} at one place of {place.relative_path}, so one of them is "
                    "lost, and the checkpoint was not completed. Use torch's FileSystemWriter in its "
                    "torch_save format, or SafetensorsWriter of shardplan.planner."
                )


def _plain(fields: Mapping[str, Any]) -> Metadata:
    made = object.__new__(Metadata)
    made.__dict__.update(fields)
    return made


def _aliases(
    places: Mapping[Any, Any], names: Mapping[str, Sequence[str]]
) -> Iterable[tuple[Any, Any]]:
    for index, place in places.items():
        for alias in names.get(index.fqn, ()):
            yield MetadataIndex(alias, index.offset, index.index), place
