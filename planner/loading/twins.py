"""Tied tensors at load: several keys that fill one memory."""

from collections.abc import Callable, Mapping, Sequence
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


class Twins:
    """The keys of one load that fill one memory.

    One key of each memory is read into it. A key that the checkpoint lacks needs nothing then; one
    that lies at the same place in the checkpoint is not read twice; one that has a copy of its own
    is read apart and compared.

    Args:
        shared: Positions of tensors that are the same memory as an earlier one, with its own.
    """

    def __init__(self, shared: Mapping[int, int] | None = None) -> None:
        self._first = dict(shared or {})
        self._first.update({first: first for first in self._first.values()})
        self._groups: dict[int, list[_Twin]] = {}
        self._copies: list[tuple[_Twin, _Twin, torch.Tensor]] = []

    def __contains__(self, number: int) -> bool:
        return number in self._first

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
        for group in self._groups.values():
            chosen = next((twin for twin in group if twin.found), group[0])
            chosen.ask(chosen.tensor)
            for twin in group:
                if twin is chosen:
                    continue
                if not twin.found and chosen.found:
                    report.tied += twin.keys
                elif twin.found and saved.same_places(chosen.found, twin.found):
                    report.loaded += twin.found
                else:
                    local = local_tensor(twin.tensor)
                    # What nothing fills, such as padding that is kept, is equal from the start.
                    copy = local.detach().clone(memory_format=torch.contiguous_format)
                    twin.ask(copy)
                    if twin.found:
                        self._copies.append((chosen, twin, copy))

    def check(self) -> None:
        """Compares the copies that were read apart, when all is read and padded.

        Raises:
            CheckpointError: If two keys of one memory were saved with different values.
        """
        faults = [
            f"{chosen.keys[0]} and {twin.keys[0]}: they share their memory here, and the checkpoint "
            "holds different values for them"
            for chosen, twin, copy in self._copies
            if not _same_bytes(local_tensor(chosen.tensor), copy)
        ]
        if faults:
            raise CheckpointError(
                f"{summary(faults)}. Untie them before loading, or leave one of the keys out."
            )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bytes_of(a), bytes_of(b))
