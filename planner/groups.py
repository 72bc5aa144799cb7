"""`param_groups` at load: options come back by parameter name, whatever the groups were.

| name | is |
|---|---|
| `GroupLoad` | one optimizer's `param_groups` list: what to read, and how to put it together |
| `EqualValues` | one value that was saved under several names: one step of stacked experts |
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary

from .conversion import exact_number
from .entries import Path
from .optimizer import Forms
from .reading import Saved

_MEMBERS = ("params", "param_names")


class GroupLoad:
    """Loads a list of parameter groups by the names of their parameters.

    The checkpoint has either `param_groups.{name}.{option}` for each parameter (torch's
    flattened form, which ranks with different names need) or `param_groups.{i}.{option}` as
    stock DCP writes a list; the second is read through the names in its `params`.

    Args:
        section: Path of the optimizer state that has the list.
        groups: The live groups, filled in place.
        members: Names on disk of each group's parameters, in every form they may have there.
        prefix: Key of the list on disk.
        saved: The checkpoint.
    """

    def __init__(
        self,
        section: Path,
        groups: list[dict[str, Any]],
        members: Sequence[Sequence[Forms]],
        prefix: str,
        saved: Saved,
    ) -> None:
        self.section = section
        self._groups = groups
        self._members = members
        self._values: dict[str, Any] = {}
        self.prefix = prefix = prefix + "."
        self._by_name: dict[str, dict[str, str]] = {}
        self._by_position: dict[int, dict[str, str]] = {}
        for key in saved.stored:
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            first, _, option = rest.partition(".")
            if first.isdigit() and "." not in option:
                self._by_position.setdefault(int(first), {})[option] = key
            else:
                name, _, option = rest.rpartition(".")
                self._by_name.setdefault(name, {})[option] = key

    def wanted(self) -> Iterable[str]:
        """Returns the keys to read."""
        if self._by_name:
            wanted = [
                name
                for group in self._members
                for forms in group
                for names in forms
                for name in names
            ]
            return [
                key
                for name in dict.fromkeys(wanted)
                for option, key in self._by_name.get(name, {}).items()
                if option not in _MEMBERS
            ]
        return [key for options in self._by_position.values() for key in options.values()]

    def receive(self, key: str, value: Any) -> None:
        """Takes the value of a key that was read."""
        self._values[key] = value

    def finish(self, strict: bool) -> list[str]:
        """Puts the options into the live groups.

        Returns:
            The keys that the checkpoint lacks.

        Raises:
            CheckpointError: If parameters of one group were saved with different options.
        """
        saved_options = self._options()
        missing: list[str] = []
        faults: list[str] = []
        for number, (group, members) in enumerate(zip(self._groups, self._members, strict=True)):
            found: dict[str, tuple[str, Any]] = {}
            names: list[str] = []
            for forms in members:
                form = next((f for f in forms if all(n in saved_options for n in f)), None)
                if form is None:
                    missing.append(f"{self.prefix}{forms[0][0]}")
                names += form or ()
            for name in names:
                for option, value in saved_options[name].items():
                    first, known = found.setdefault(option, (name, value))
                    if known != value:
                        faults.append(
                            f"{self.prefix}{number}.{option}: {first} was saved with {known!r} "
                            f"and {name} with {value!r}"
                        )
            if not faults and not (strict and missing):
                for option, (_, value) in found.items():
                    group[option] = _into(group.get(option), value)
        if faults:
            raise CheckpointError(
                f"{summary(faults)}, but one group holds both now. Build the optimizer with the "
                "groups that were saved, or leave param_groups out of the state dict."
            )
        return missing

    def _options(self) -> dict[str, dict[str, Any]]:
        """Returns the saved options of each parameter, by its name on disk."""
        if self._by_name:
            return {
                name: {o: self._values[k] for o, k in options.items() if k in self._values}
                for name, options in self._by_name.items()
                if any(key in self._values for key in options.values())
            }
        options_of: dict[str, dict[str, Any]] = {}
        for position, keys in self._by_position.items():
            values = {option: self._values[key] for option, key in keys.items()}
            names = values.pop("params", [])
            values.pop("param_names", None)
            if names and all(isinstance(name, int) for name in names):
                names = self._numbered(position, len(names))
            for name in names:
                options_of[str(name)] = values
        return options_of

    def _numbered(self, position: int, count: int) -> Sequence[str]:
        """Takes a group of integers for the live group at the same place, if they are as many."""
        if position < len(self._members) and len(self._members[position]) == count:
            return [name for forms in self._members[position] for name in forms[0]]
        raise CheckpointError(
            f"{self.prefix}{position}: the checkpoint numbers the {count} parameters of this "
            f"group, and the live optimizer has no group of {count} at its place. Build the "
            "optimizer with the groups that were saved."
        )


class EqualValues:
    """Loads one value that the checkpoint has several times; it must be the same each time.

    Args:
        settle: Takes the value in the end.
    """

    def __init__(self, settle: Callable[[Any], None]) -> None:
        self._settle = settle
        self._values: dict[str, Any] = {}

    def receive(self, key: str, value: Any) -> None:
        """Takes the value of a key that was read."""
        self._values[key] = value

    def finish(self, strict: bool) -> list[str]:
        """Puts the value into its place; nothing can be missing.

        Raises:
            CheckpointError: If two of the keys were saved with different values.
        """
        (first, value), *others = self._values.items()
        for key, other in others:
            if bool(other != value):
                raise CheckpointError(
                    f"{key}: saved as {other!r}, but {first} as {value!r}, and one stacked "
                    "parameter holds both now. Load into single experts, or make them equal."
                )
        self._settle(value)
        return []


def _into(current: Any, value: Any) -> Any:
    """Returns a saved option in the form that the live group has: a tensor stays a tensor."""
    fill = getattr(current, "fill_", None)
    if fill is not None and not hasattr(value, "fill_"):
        fill(exact_number(value, current.dtype))
        return current
    if hasattr(current, "copy_") and hasattr(value, "fill_"):
        current.copy_(value)
        return current
    if hasattr(value, "fill_") and current is not None and not hasattr(current, "fill_"):
        return exact_number(value.item(), type(current))
    return value
