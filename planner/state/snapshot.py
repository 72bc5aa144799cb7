"""Tells in milliseconds whether a state dict still has the form that a plan was made for."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat import dtensor_spec, local_tensor
from .described import describe, describes_itself
from .entries import Index, Path, is_value, key_of
from .per_rank import PerRank
from .storable import PLAIN, check_storable

_shape, _dtype, _own = attrgetter("shape"), attrgetter("dtype"), attrgetter("__dict__")


class Snapshot:
    """The form of a state dict: keys, nesting, types, shapes, dtypes, placements, descriptions.

    It keeps no tensor. Values of Python objects may change without changing the form, except
    those in `pinned` and the axes of `PerRank` values.

    Args:
        state_dict: A nested state dict.
    """

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        self.paths: list[Path] = []
        values: list[Any] = []
        self._form = self._record((), state_dict, values)
        self._types = list(map(type, values))
        self._tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        self._dtensors = [i for i in self._tensors if isinstance(values[i], DTensor)]
        self._per_rank = [i for i, v in enumerate(values) if isinstance(v, PerRank)]
        known = {kind: kind in PLAIN for kind in set(self._types)}
        self._subclasses = [
            i for i in self._tensors if not known[self._types[i]] and self._types[i] is not DTensor
        ]
        try:
            self._facts = self._read(values)
        except RuntimeError:  # a nested tensor has no shape
            for number in self._tensors:
                check_storable(self.paths[number], values[number])
            raise
        self._pinned: list[tuple[int, Any]] = []
        self.first: list[Any] | None = values

    def take_values(self) -> list[Any]:
        """Returns the values of the state dict it was made of, once; then it forgets them."""
        values, self.first = self.first, None
        return values if values is not None else []

    def pin(self, number: int, value: Any) -> None:
        """Makes the value at a position part of the form."""
        self._pinned.append((number, value))

    def unchanged(self, state_dict: Mapping[Any, Any]) -> list[Any] | None:
        """Returns the values of a state dict of the same form, None if the form differs."""
        values: list[Any] = []
        if not _collect(self._form, state_dict, values):
            return None
        if list(map(type, values)) != self._types or self._read(values) != self._facts:
            return None
        if any(values[number] != value for number, value in self._pinned):
            return None
        return values

    def _record(self, path: Path, value: Any, values: list[Any]) -> Any:
        """Returns the form of a container and appends its values."""
        mapped = isinstance(value, Mapping)
        pairs = value.items() if mapped else [(Index(i), v) for i, v in enumerate(value)]
        children: list[tuple[Any, Any]] = []
        flat = True
        for key, child in pairs:
            inner = (
                (isinstance(child, Mapping) and bool(child))
                or (isinstance(child, list) and not is_value(child))
            ) and not isinstance(child, torch.Tensor)
            if inner:
                flat = False
                children.append((key, self._record((*path, key), child, values)))
            else:
                children.append((key, None))
                self.paths.append((*path, key))
                values.append(child)
        kind = dict if mapped else list
        return kind, [key for key, _ in children], None if flat else children

    def _read(self, values: list[Any]) -> tuple[list[Any], ...]:
        tensors = values
        if len(self._tensors) != len(values):
            tensors = [values[i] for i in self._tensors]
        dtensors = [values[i] for i in self._dtensors]
        shards = list(map(local_tensor, dtensors))
        return (
            list(map(_shape, tensors)),
            list(map(_dtype, tensors)),
            list(map(dtensor_spec, dtensors)),
            list(map(_shape, shards)),
            self._descriptions(values, tensors, shards),
            [values[i].axes for i in self._per_rank],
        )

    def _descriptions(
        self, values: list[Any], tensors: list[Any], shards: list[Any]
    ) -> list[tuple[int, Any]]:
        """Returns what tensors that describe themselves say; almost no tensor does."""
        odd: list[int] = []
        for numbers, owners in (self._tensors, tensors), (self._dtensors, shards):
            own = list(map(_own, owners))
            if any(own):
                odd += [i for i, has in zip(numbers, own, strict=True) if has]
        return [
            (i, describe(key_of(self.paths[i]), values[i]))
            for i in (*odd, *self._subclasses)
            if describes_itself(values[i])
        ]


def _collect(form: Any, value: Any, values: list[Any]) -> bool:
    """Appends the values of a container; False if its keys are not those of the form."""
    kind, keys, children = form
    if kind is list:
        if not isinstance(value, list) or len(value) != len(keys) or is_value(value):
            return False
        items: Any = value
    else:
        if not isinstance(value, Mapping) or list(value) != keys:
            return False
        items = value.values()
    if children is None:
        values.extend(items)
        if all(issubclass(kind, torch.Tensor) for kind in set(map(type, items))):
            return True
        return all(
            not isinstance(v, Mapping | list) or not v or (isinstance(v, list) and is_value(v))
            for v in items
            if type(v) is not torch.Tensor and not isinstance(v, torch.Tensor)
        )
    for (_, inner), child in zip(children, items, strict=True):
        if inner is None:
            if isinstance(child, Mapping) and child:
                return False
            if isinstance(child, list) and not is_value(child):
                return False
            values.append(child)
        elif not _collect(inner, child, values):
            return False
    return True
