"""Where what is read goes: into a tensor, a number, a place in the state dict."""

import dataclasses
from typing import Any

import torch

from shardplan.layouts import CheckpointError
from shardplan.layouts.slab import Box

from ..compat import local_tensor
from ..report import LoadReport
from ..state.conversion import exact_number
from ..state.entries import Path, put, reach
from ..state.per_rank import PerRank
from .groups import EqualValues, FlattenedGroups, GroupLoad
from .numbered import NumberedState


@dataclasses.dataclass(slots=True)
class Target:
    """Where what is read for one key goes.

    Attributes:
        key: The key that is read.
        path: Path in the state dict, for values that are set rather than filled.
        tensor: The tensor to fill, None for a Python value.
        box: The requested box with its view of the tensor's storage.
        group: What takes the value instead: parameter groups, or values that must be equal.
        scalar: The value that is replaced.
        as_number: Whether what is read is a number of another kind.
        holder: What takes the value instead, as its own value of this rank.
    """

    key: str
    path: Path
    tensor: torch.Tensor | None
    box: Box | None = None
    group: GroupLoad | FlattenedGroups | EqualValues | NumberedState | None = None
    scalar: Any = None
    as_number: bool = False
    holder: PerRank | None = None


class Delivery:
    """Puts what was read where it belongs.

    Args:
        root: The state dict.
        report: Where conversions are written down.
    """

    def __init__(self, root: dict[str, Any], report: LoadReport) -> None:
        self._root = root
        self._report = report

    def deliver(self, target: Target, tensor: torch.Tensor) -> None:
        """Passes a tensor that was read for something else than itself on to its place."""
        if target.group is not None:
            target.group.receive(target.key, tensor)
        elif target.as_number:
            self.set_number(target, tensor.item())
        elif target.path and _get(self._root, target.path) is not tensor:
            self.set(target.path, tensor)

    def set_number(self, target: Target, value: Any, rounds: bool = False) -> None:
        """Puts a number where the state dict has one of another kind, if it stays the same.

        Args:
            target: Where it goes.
            value: The number.
            rounds: Whether it was saved as a Python number; such a float takes a tensor's dtype.

        Raises:
            CheckpointError: If it would not stay the same.
        """
        wanted = target.scalar
        kind = wanted.dtype if isinstance(wanted, torch.Tensor) else type(wanted)
        try:
            number = exact_number(value, kind, rounds=rounds and isinstance(value, float))
        except (ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{target.key}: {error}. Load it into a value of the kind that was saved."
            ) from None
        self._report.converted[target.key] = (repr(value), str(kind))
        if isinstance(wanted, torch.Tensor):
            local_tensor(wanted).detach().fill_(number)
        else:
            self.set(target.path, number)

    def settle(self, target: Target, value: Any) -> None:
        """Puts a value that was read apart where it belongs, in the kind that is there."""
        wanted = target.scalar
        rounds = not isinstance(value, torch.Tensor)
        if isinstance(value, torch.Tensor):
            if isinstance(wanted, torch.Tensor) and value.dtype == wanted.dtype:
                local = local_tensor(wanted).detach()
                local.copy_(value.reshape(local.shape))
                return
            value = value.item()
        if isinstance(wanted, torch.Tensor):
            self.set_number(target, value, rounds)
        else:
            self.set(target.path, value)

    def set(self, path: Path, value: Any) -> None:
        put(self._root, path, value)


def _get(root: Any, path: Path) -> Any:
    try:
        return reach(root, path)
    except (KeyError, IndexError, TypeError):
        return None
