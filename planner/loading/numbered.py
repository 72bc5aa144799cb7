"""Optimizer state that a checkpoint has by number, as `optimizer.state_dict()` gives it.

torch numbers an optimizer's parameters in the order of its groups. `optim.state.0.exp_avg` is then
the state of the first one, whichever that was when it was saved: the live optimizer must have its
parameters in the same order. Their count is checked, their shapes are, and their names where the
groups list some; an order that differs among parameters of one shape can't be seen.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from shardplan.layouts import CheckpointError
from shardplan.layouts.model import clean_name

from ..planning.optimizer import Numbering
from ..state.entries import Place
from .groups import GroupLoad
from .reading import Saved

_STATE, _GROUPS = "state.", "param_groups."


def optimizer_prefix(place: Place) -> str | None:
    """Returns what stands before `state` or `param_groups` in the key of a slot, None for others."""
    before = "".join(f"{element}." for element in place.before) + place.head
    for mark in (_STATE, _GROUPS) if place.slot else ():
        if before.endswith(mark) and before[: -len(mark)][-1:] in ("", "."):
            return before[: -len(mark)]
    return None


def numbers_below(saved: Saved, prefix: str) -> set[int]:
    """Returns the numbers that stand behind a prefix in the checkpoint's keys."""
    heads = {key[len(prefix) :].partition(".")[0] for key in saved.below(prefix)}
    return {int(head) for head in heads if head.isdecimal()}


class NumberedState:
    """One optimizer's state that the checkpoint has by number.

    Args:
        prefix: What stands before `state` and `param_groups` in its keys.
        numbering: The live optimizer's parameters, by number and in groups.
        saved: The checkpoint.
        groups: What loads its list of groups, if the state dict has one.
    """

    def __init__(
        self, prefix: str, numbering: Numbering, saved: Saved, groups: GroupLoad | None = None
    ) -> None:
        self._prefix = prefix
        self._names = numbering.names
        self._sizes = numbering.sizes
        self._saved = saved
        self._groups = groups
        self._numbers: dict[str, int | None] = {}
        for number, name in numbering.names.items():
            # Two of one name are of two chunks of a model, and nothing says which is meant.
            self._numbers[name] = None if name in self._numbers else number

    def key(self, place: Place, fqn: str) -> str | None:
        """Returns the key by number of a parameter's value, None if the number is not known."""
        number = self._numbers.get(fqn)
        if number is None:
            return None
        if not place.key("").startswith(self._prefix + _GROUPS):
            return place.key(str(number))
        groups = (g for g in range(len(self._sizes)) if number in self._members(g))
        group = next(groups, None)
        return None if group is None else place.key(str(group))

    def named(self, key: str) -> str:
        """Returns the key by name for one by number, any other as it is."""
        before = self._prefix + _STATE
        number, dot, rest = key[len(before) :].partition(".")
        if not key.startswith(before) or not number.isdecimal():
            return key
        name = self._names.get(int(number))
        return key if name is None else before + name + dot + rest

    def faults(self) -> Iterator[str]:
        """Yields how the saved parameters and groups differ in number from the live ones."""
        below = self._prefix + _STATE
        count, last = sum(self._sizes), max(numbers_below(self._saved, below))
        if last >= count:
            yield (
                f"{below}{last}: the checkpoint numbers at least {last + 1} parameters, and the live "
                f"optimizer has {count}. Build the optimizer with the parameters that were saved."
            )
        below = self._prefix + _GROUPS
        groups = numbers_below(self._saved, below)
        if groups and len(groups) != len(self._sizes):
            yield (
                f"{below.rstrip('.')}: the checkpoint has {len(groups)} groups of numbered parameters, "
                f"and the live optimizer {len(self._sizes)}. Build the optimizer with the groups that "
                "were saved."
            )

    def wanted(self) -> list[str]:
        """Returns the keys that list the groups' parameters."""
        keys = (
            f"{self._prefix}{_GROUPS}{group}.{listed}"
            for group in range(len(self._sizes))
            for listed in ("params", "param_names")
        )
        return [key for key in keys if key in self._saved.stored]

    def receive(self, key: str, value: Any) -> None:
        """Checks a group's list of parameters.

        Raises:
            CheckpointError: If it has another length, other numbers or other names.
        """
        head, _, listed = key.rpartition(".")
        group = int(head.rpartition(".")[2])
        if listed == "params":
            check_numbers(head, value, self._members(group))
        else:
            self._check_names(head, value, self._members(group))
        if self._groups is not None:
            self._groups.receive(key, value)

    def finish(self, strict: bool) -> list[str]:
        """Has nothing left to do; nothing can be missing."""
        return []

    def _members(self, group: int) -> range:
        start = sum(self._sizes[:group])
        return range(start, start + self._sizes[group])

    def _check_names(self, head: str, saved: Sequence[str], members: range) -> None:
        for number, name in zip(members, saved, strict=False):
            live = self._names.get(number)
            if live is not None and clean_name(live) != clean_name(str(name)):
                raise CheckpointError(
                    f"{head}: parameter number {number} is {name} in the checkpoint and {live} in the "
                    "live optimizer. Build the optimizer with its parameters in the order in which "
                    "they were saved."
                )


def check_numbers(key: str, saved: Sequence[Any], live: range) -> None:
    """Compares the numbers of a saved group's parameters with those of the live one."""
    if len(saved) != len(live):
        raise CheckpointError(
            f"{key}: the checkpoint numbers the {len(saved)} parameters of this group, and the live "
            f"optimizer's group at its place has {len(live)}. Build the optimizer with the groups "
            "that were saved."
        )
    if [str(number) for number in saved] != [str(number) for number in live]:
        raise CheckpointError(
            f"{key}: the checkpoint numbers the parameters of this group {list(saved)[:8]}, and the "
            f"live optimizer {list(live)[:8]}. Load it with optimizer.load_state_dict, and save it "
            "with LayoutAwareSavePlanner(model, optimizer=optimizer), which keeps names."
        )
