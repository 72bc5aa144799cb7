"""Tied tensors at load: several keys that fill one memory, or a part of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary

from ..compat import local_tensor
from ..report import LoadReport
from ..state.views import bytes_of
from .reading import Saved

Ask = Callable[[Any], None]


class _Twin(NamedTuple):
    """One of several keys of one memory: the tensor, its keys and how to plan its reads."""

    tensor: torch.Tensor
    keys: tuple[str, ...]
    found: tuple[str, ...]
    ask: Ask


class _Part(NamedTuple):
    """A tensor that shares a part of its memory with others, and what was read for it apart.

    For each unit of its bytes `owners` has the position in `others` of one that is filled with it
    too, or -1.
    """

    twin: _Twin
    copy: torch.Tensor
    owners: torch.Tensor
    others: Sequence[_Twin]


class Twins:
    """The keys of one load that fill one memory, or share a part of it.

    One key of each memory is read into it. A key that the checkpoint lacks needs nothing then; one
    that lies at the same place in the checkpoint is not read twice; one that has a copy of its own
    is read apart and compared. So is a tensor of which a part is in the memory of a larger one.

    Args:
        shared: Positions of tensors that are the same memory as an earlier one, with its own.
        meeting: Positions of tensors that may share a part of their memory, as they meet.
    """

    def __init__(
        self, shared: Mapping[int, int] | None = None, meeting: Sequence[Sequence[int]] = ()
    ) -> None:
        self._first = dict(shared or {})
        self._first.update({first: first for first in self._first.values()})
        self._first.update({number: number for cluster in meeting for number in cluster})
        self._meeting = meeting
        self._groups: dict[int, list[_Twin]] = {}
        self._copies: list[tuple[_Twin, _Twin, torch.Tensor]] = []
        self._parts: list[_Part] = []

    def __contains__(self, number: int) -> bool:
        return number in self._first

    def first(self, number: int) -> int | None:
        """Returns the position of the first tensor that is the same memory, None if it is alone."""
        return self._first.get(number)

    def add(
        self,
        number: int,
        tensor: torch.Tensor,
        keys: Sequence[str],
        found: Sequence[str | None],
        ask: Ask,
    ) -> None:
        """Adds one of the tensors.

        Args:
            number: Its position.
            tensor: The tensor.
            keys: The keys that it is asked for by.
            found: The checkpoint's names of them, None for those that it lacks.
            ask: Plans the reads that fill a tensor with what these keys hold.
        """
        has = tuple(name for name in found if name is not None)
        twin = _Twin(tensor, tuple(keys), has if len(has) == len(keys) else (), ask)
        self._groups.setdefault(self._first[number], []).append(twin)

    def plan(self, saved: Saved, report: LoadReport) -> None:
        """Plans the reads of all of them."""
        first_of = {
            number: next((twin for twin in group if twin.found), group[0])
            for number, group in self._groups.items()
        }
        for cluster in self._meeting:
            self._part([first_of[number] for number in cluster if number in first_of])
        apart = {id(part.twin): part.copy for part in self._parts}
        for number, group in self._groups.items():
            chosen = first_of[number]
            chosen.ask(apart.get(id(chosen), chosen.tensor))
            for twin in group:
                if twin is chosen:
                    continue
                if not twin.found and chosen.found:
                    report.tied += twin.keys
                elif twin.found and saved.same_places(chosen.found, twin.found):
                    report.loaded += twin.found
                else:
                    copy = _copy_of(twin.tensor)
                    twin.ask(copy)
                    if twin.found:
                        self._copies.append((chosen, twin, copy))

    def _part(self, cluster: Sequence[_Twin]) -> None:
        """Finds those of some tensors that share elements with a larger one, to be read apart."""
        others = sorted(
            (t for t in cluster if t.found), key=lambda t: -local_tensor(t.tensor).nbytes
        )
        if len(others) < 2:
            return
        locals_ = [local_tensor(twin.tensor) for twin in others]
        start = min(local.data_ptr() for local in locals_)
        starts = [local.data_ptr() - start for local in locals_]
        unit = math.gcd(*starts, *(local.itemsize for local in locals_))
        # Shapes and strides in units, of which an element has one or more.
        shown = [
            (
                (*local.shape, local.itemsize // unit),
                (*(step * local.itemsize // unit for step in local.stride()), 1),
                at // unit,
            )
            for local, at in zip(locals_, starts, strict=True)
        ]
        span = max(
            at + 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            for shape, strides, at in shown
        )
        owners = torch.full((span,), -1, dtype=torch.int32, device="cpu")
        for number, (twin, place) in enumerate(zip(others, shown, strict=True)):
            own = owners.as_strided(*place)
            if (own >= 0).any():
                self._parts.append(_Part(twin, _copy_of(twin.tensor), own.clone(), others))
            own.fill_(number)

    def _merge(self) -> Iterator[str]:
        """Puts what was read apart into memory that is shared in part; yields what differs there."""
        for twin, copy, owners, others in self._parts:
            local = local_tensor(twin.tensor).detach()
            units = owners.reshape(-1)
            differs = (bytes_of(local) != bytes_of(copy)).cpu().view(units.numel(), -1).any(dim=1)
            wrong = units[differs & (units >= 0)]
            if wrong.numel():
                yield (
                    f"{others[int(wrong[0])].keys[0]} and {twin.keys[0]}: they share a part of their "
                    "memory here, and the checkpoint holds different values for it"
                )
            else:
                local.copy_(copy)

    def check(self) -> None:
        """Compares the copies that were read apart, when all is read and padded.

        Raises:
            CheckpointError: If keys that share memory were saved with different values there.
        """
        faults = [*self._merge()]
        faults += [
            f"{chosen.keys[0]} and {twin.keys[0]}: they share their memory here, and the checkpoint "
            "holds different values for them"
            for chosen, twin, copy in self._copies
            if not _same_bytes(local_tensor(chosen.tensor), copy)
        ]
        if faults:
            raise CheckpointError(
                f"{summary(faults)}. Untie them before loading, or leave one of the keys out."
            )


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns memory to read apart; what nothing fills, as kept padding, is equal from the start."""
    return local_tensor(tensor).detach().clone(memory_format=torch.contiguous_format)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bytes_of(a), bytes_of(b))
