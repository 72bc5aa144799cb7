"""`param_groups` at load: options come back by parameter name, whatever the groups were."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary

from ..planning.optimizer import Forms
from ..state.conversion import exact_number
from ..state.entries import Known, Path, key_of, put, reach
from ..state.snapshot import Snapshot
from ..state.values import same_value
from .reading import Saved

_MEMBERS = ("params", "param_names")


class GroupLoad:
    """Loads a list of parameter groups by the names of their parameters.

    The checkpoint has either `param_groups.{name}.{option}` for each parameter (torch's
    flattened form, which ranks with different names need) or `param_groups.{i}.{option}` as
    stock DCP writes a list; the second has `param_groups.{i}.params` and is read through the names
    there. An option that is a mapping is `….{option}.{key}` in both.

    Args:
        section: Path of the optimizer state that has the list.
        groups: The live groups, filled in place.
        members: Names on disk of each group's parameters, in every form they may have there.
        prefix: Key of the list on disk.
        saved: The checkpoint.

    Attributes:
        kept: Options of groups without parameters that the checkpoint does not tell; no error,
            since nothing is trained with them.
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
        self.kept: list[str] = []
        below = [key[len(prefix) :] for key in saved.below(prefix, self._known(saved))]
        listed = any(n.isdigit() and o == "params" for n, _, o in (k.partition(".") for k in below))
        self._known_names = Known(
            name for group in members for forms in group for names in forms for name in names
        )
        for rest in below:
            if listed:
                first, _, option = rest.partition(".")
                if first.isdigit():
                    self._by_position.setdefault(int(first), {})[option] = prefix + rest
                continue
            name, option = self._split(rest)
            exact = f"{name}.{option}"
            if option and (exact == rest or prefix + exact not in saved.stored):
                self._by_name.setdefault(name, {})[option] = prefix + rest

    def _known(self, saved: Saved) -> Iterable[Iterable[str]]:
        """Yields for each parameter the keys by which its options would be found, if by name."""
        if f"{self.prefix}0.params" in saved.stored:
            return  # a list, whose groups are known once all of it is
        for group, members in zip(self._groups, self._members, strict=True):
            options = [key_of(path) for path in Snapshot(group).paths if path[0] not in _MEMBERS]
            for forms in members:
                for name in forms[0]:
                    yield [f"{self.prefix}{name}.{option}" for option in options]

    def wanted(self) -> Iterable[str]:
        """Returns the keys to read."""
        return [
            key
            for options in (*self._by_position.values(), *self._by_name.values())
            for option, key in options.items()
            if self._by_position or option not in _MEMBERS
        ]

    def receive(self, key: str, value: Any) -> None:
        """Takes the value of a key that was read."""
        self._values[key] = value

    def finish(self, strict: bool) -> list[str]:
        """Puts the options into the live groups; none if it is strict and any is missing.

        A group without parameters takes the options of the saved group at its place, if all others
        come from the groups at theirs; else it stays as it is, and `kept` names its options.

        Returns:
            The keys that the checkpoint lacks.

        Raises:
            CheckpointError: If parameters of one group were saved with different options, or an
                option has no place in the form that the live group has.
        """
        options_of, place_of = self._options()
        in_place = len(self._by_position) == len(self._groups)
        found_in: list[dict[str, tuple[str, Any]]] = []
        missing: list[str] = []
        faults: list[str] = []
        for number, (group, members) in enumerate(zip(self._groups, self._members, strict=True)):
            found: dict[str, tuple[str, Any]] = {}
            names: list[str] = []
            for forms in members:
                form = next((f for f in forms if all(n in options_of for n in f)), None)
                if form is None:
                    missing.append(f"{self.prefix}{forms[0][0]}")
                names += form or ()
            for name in names:
                in_place = in_place and place_of.get(name) == number
                for option, value in options_of[name].items():
                    first, known = found.setdefault(option, (name, value))
                    if not same_value(known, value):
                        faults.append(
                            f"{self.prefix}{number}.{option}: {first} was saved with {known!r} "
                            f"and {name} with {value!r}"
                        )
            found_in.append(found)
            if names:
                missing += (f"{self.prefix}{number}.{o}" for o in _lacking(group, found))
        if faults:
            raise CheckpointError(
                f"{summary(faults)}, but one group holds both now. Build the optimizer with the "
                "groups that were saved, or leave param_groups out of the state dict."
            )
        if strict and missing:
            return missing
        for number, (group, found) in enumerate(zip(self._groups, found_in, strict=True)):
            if not self._members[number]:
                keys = self._by_position.get(number, {}) if in_place else {}
                found.update((o, ("", self._values[k])) for o, k in keys.items())
                self.kept += (f"{self.prefix}{number}.{o}" for o in _lacking(group, found))
            paths = {key_of(path): path for path in Snapshot(group).paths}
            for option, (_, value) in found.items():
                if option not in _MEMBERS:
                    self._fill(number, option, paths.get(option), value)
        return missing

    def _fill(self, number: int, option: str, path: Path | None, value: Any) -> None:
        """Puts one option into a live group, at its path there if it has it."""
        group = self._groups[number]
        try:
            if path is not None:
                put(group, path, _into(reach(group, path), value))
                return
            *outer, last = option.split(".")
            holder: Any = group
            for name in outer:
                holder = holder.setdefault(name, {})
            holder[last] = value
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.prefix}{number}.{option}: {error}. Load it into an option of the kind that "
                "was saved."
            ) from None

    def _split(self, rest: str) -> tuple[str, str]:
        """Splits a key into a parameter's name, the longest that is known, and an option."""
        name, _, inner = rest.rpartition(".")
        while name:
            known = self._known_names.find(name, stored=True)
            if known is not None:
                return known, inner
            name, _, _ = name.rpartition(".")
            inner = rest[len(name) + 1 :]
        return "", ""

    def _options(self) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
        """Returns the saved options of each parameter, and its group, by its name on disk."""
        options_of: dict[str, dict[str, Any]] = {
            name: {o: self._values[k] for o, k in options.items() if k in self._values}
            for name, options in self._by_name.items()
            if any(key in self._values for key in options.values())
        }
        place_of: dict[str, int] = {}
        saved_by: dict[str, tuple[dict[str, Any], int]] = {}
        for position, keys in self._by_position.items():
            values = {option: self._values[key] for option, key in keys.items()}
            names = values.pop("params", [])
            values.pop("param_names", None)
            if names and all(map(self._is_number, names)):
                names = self._numbered(position, len(names))
            for name in map(str, names):
                saved_by[name] = (values, position)
        for name, (values, position) in saved_by.items():
            own = self._known_names.find(name, stored=True) or name
            if own == name or own not in saved_by:
                options_of[own], place_of[own] = values, position
        return options_of, place_of

    def _is_number(self, name: Any) -> bool:
        """Whether an entry of a saved group is a number, which may be written as text."""
        text = str(name)
        return isinstance(name, int) or (
            text.isdecimal() and self._known_names.find(text, stored=True) is None
        )

    def _numbered(self, position: int, count: int) -> Sequence[str]:
        """Takes a group of integers for the live group at the same place, if they are as many."""
        if position < len(self._members) and len(self._members[position]) == count:
            return [name for forms in self._members[position] for name in forms[0]]
        live = len(self._members[position]) if position < len(self._members) else "none"
        raise CheckpointError(
            f"{self.prefix}{position}: the checkpoint numbers the {count} parameters of this group, "
            f"and the live optimizer's group at its place has {live}. Build the optimizer with the "
            "groups that were saved."
        )


class FlattenedGroups:
    """Loads options by parameter name, `param_groups.{name}.{option}`, from a list of groups.

    Args:
        prefix: What stands before the groups' numbers, up to the dot.
        saved: The checkpoint.
    """

    def __init__(self, prefix: str, saved: Saved) -> None:
        self._prefix = prefix
        self._keys = saved.below(prefix)
        self._values: dict[str, Any] = {}
        self._asked: list[tuple[Sequence[Sequence[str]], Any, Callable[[Any], None]]] = []

    def add(
        self, forms: Sequence[Sequence[str]], ident: Any, settle: Callable[[Any], None]
    ) -> None:
        """Asks for one option.

        Args:
            forms: Keys by name that it may have, in each form; all of one form hold it.
            ident: The place that it goes to; two options of one place must be equal.
            settle: Takes the value in the end.
        """
        self._asked.append((forms, ident, settle))

    def wanted(self) -> Iterable[str]:
        """Returns the keys to read."""
        return [key for key in self._keys if not key.endswith(".param_names")]

    def receive(self, key: str, value: Any) -> None:
        """Takes the value of a key that was read."""
        self._values[key] = value

    def finish(self, strict: bool) -> list[str]:
        """Puts the options into their places; none if it is strict and any is missing.

        Returns:
            The keys that the checkpoint lacks.

        Raises:
            CheckpointError: If the groups list numbers, or two parameters that have one option
                together were saved in groups with different ones.
        """
        group_of: dict[str, str] = {}
        for key, listed in self._values.items():
            group, _, option = key[len(self._prefix) :].partition(".")
            if option == "params":
                if any(isinstance(entry, int) for entry in listed):
                    raise CheckpointError(
                        f"{key}: the checkpoint numbers the parameters of its groups, and the state "
                        "dict names them. Load into optimizer.state_dict(), and pass optimizer= to "
                        "the planner."
                    )
                group_of.update((str(name), group) for name in listed)
        known = Known(group_of)
        missing: list[str] = []
        faults: list[str] = []
        found: list[tuple[Callable[[Any], None], Any]] = []
        places: dict[Any, tuple[str, Any]] = {}
        for forms, ident, settle in self._asked:
            pairs = [
                [(key, self._in_group(key, known, group_of)) for key in form] for form in forms
            ]
            form = next((f for f in pairs if all(at in self._values for _, at in f)), None)
            if form is None:
                missing += forms[0]
                continue
            for key, at in form:
                first, value = places.setdefault(ident, (key, self._values[at]))
                if not same_value(value, self._values[at]):
                    faults.append(
                        f"{key}: saved as {self._values[at]!r}, but {first} as {value!r}, and one "
                        "value holds both now"
                    )
            found.append((settle, self._values[form[0][1]]))
        if faults:
            raise CheckpointError(
                f"{summary(faults)}. Build the optimizer with the groups that were saved."
            )
        if not (strict and missing):
            for settle, value in found:
                settle(value)
        return missing

    def _in_group(self, key: str, known: Known, group_of: Mapping[str, str]) -> str:
        """Returns the key in the saved list for one by name, the key itself if there is none."""
        name, _, option = key[len(self._prefix) :].rpartition(".")
        while name:
            own = known.find(name, stored=True)
            if own is not None:
                return f"{self._prefix}{group_of[own]}.{option}"
            name, _, last = name.rpartition(".")
            option = f"{last}.{option}"
        return key


class EqualValues:
    """Loads one value that the checkpoint has several times; it must be the same each time.

    Args:
        settle: Takes the value in the end.
        why: Why it is one value, and what to do, for errors.
    """

    def __init__(self, settle: Callable[[Any], None], why: str) -> None:
        self._settle = settle
        self._why = why
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
            if not same_value(other, value):
                raise CheckpointError(
                    f"{key}: saved as {other!r}, but {first} as {value!r}, and {self._why}"
                )
        self._settle(value)
        return []


def _lacking(group: Mapping[str, Any], found: Collection[str]) -> Iterable[str]:
    """Yields the options of a live group that were not found; empty containers ask for nothing."""
    snapshot = Snapshot(group)
    for path, value in zip(snapshot.paths, snapshot.take_values(), strict=True):
        empty = isinstance(value, Mapping | list) and not value
        heads = itertools.accumulate(map(str, path), "{}.{}".format)
        if path[0] not in _MEMBERS and not empty and not any(head in found for head in heads):
            yield key_of(path)


def _into(current: Any, value: Any) -> Any:
    """Returns a saved option in the form that the live group has: a tensor stays a tensor."""
    fill = getattr(current, "fill_", None)
    if fill is not None and not hasattr(value, "fill_"):
        fill(exact_number(value, current.dtype, rounds=isinstance(value, float)))
        return current
    if hasattr(current, "copy_") and hasattr(value, "fill_"):
        current.copy_(value)
        return current
    if hasattr(value, "fill_") and current is not None and not hasattr(current, "fill_"):
        return exact_number(value.item(), type(current))
    return value
