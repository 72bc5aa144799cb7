"""Optimizer state by parameter name: integers and positions become names before a save.

| what the state dict has | what is saved |
|---|---|
| `state.{fqn}.{slot}` | the same, experts under their global name |
| `state.{integer}.{slot}` | `state.{fqn}.{slot}` |
| `param_groups` as a list, one name for a parameter on all ranks | the list; `params` by name |
| the same with pipeline stages or experts, where each rank has other names | `param_groups.{fqn}.{option}`, torch's flattened form |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.layouts import CheckpointError, Concat, Grid, Interleave, Layout, LayoutError
from shardplan.layouts.variants import variants

from ..state.entries import Path, key_of
from .manifest import separate_parts, value_names
from .table import Chunk, LayoutTable

_GROUPS = "param_groups"
_MEMBERS = ("params", "param_names")

# The names that one parameter has on disk, for each form in which it may have been saved: its own
# first, then as one of stacked experts, or one name for each of them, or for each component.
Forms = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Named:
    """One value of a state dict under the path that it is saved by.

    Attributes:
        path: The path, by parameter name.
        number: Position of the value among the state dict's own values.
        names: The value itself where it is a list of parameters: their names on disk.
    """

    path: Path
    number: int
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Numbering:
    """The order in which an optimizer numbers its parameters.

    Attributes:
        names: Name of each parameter by its number, those that the model has.
        sizes: How many parameters each group has.
    """

    names: Mapping[int, str]
    sizes: tuple[int, ...]


def by_name(
    paths: Sequence[Path], values: Sequence[Any], table: LayoutTable, ids: Mapping[int, str]
) -> list[Named] | None:
    """Returns the values of a state dict under the paths that they are saved by.

    None if every value is saved under its own path.

    Args:
        paths: Path of each value.
        values: The values; only those of `param_groups` are looked at.
        table: The model's layouts.
        ids: Names of a raw optimizer state's integers, if they are known.

    Raises:
        CheckpointError: If an integer names no known parameter.
    """
    groups = _group_sections(paths, values)
    if not groups:
        return None
    members = {section: _members(section, paths, values, table, ids) for section in groups}
    named: list[Named] = []
    for number, path in enumerate(paths):
        section = next((s for s in groups if path[: len(s)] == s), None)
        rest = path[len(section) :] if section is not None else ()
        if section is None or len(rest) < 2:
            named.append(Named(path, number))
            continue
        known = members[section]
        if rest[0] == "state" and isinstance(rest[1], int) and known is not None:
            fqn = _name(path, rest[1], known.ids)
            named.append(Named((*section, "state", fqn, *rest[2:]), number))
        elif rest[0] == _GROUPS and len(rest) >= 3 and known is not None:
            named += _group_value(section, rest, number, known.groups, table)
        else:
            named.append(Named(path, number))
    return named


def group_members(
    paths: Sequence[Path],
    values: Sequence[Any],
    table: LayoutTable,
    ids: Mapping[int, str],
    saved_by_name: Callable[[Path, Sequence[str]], bool] = lambda section, names: False,
) -> dict[Path, list[list[Forms]]]:
    """Returns the names on disk of the parameters of each group, for each list of groups.

    Optimizer states without a model that knows their parameters are left out, unless the
    checkpoint has their options by the names that the groups list.

    Args:
        paths: Path of each value.
        values: The values; only those of `param_groups` are looked at.
        table: The model's layouts.
        ids: Names of a raw optimizer state's integers, if they are known.
        saved_by_name: Whether a checkpoint has the options of a section's parameters by name.
    """
    found = {}
    for section in _group_sections(paths, values):
        members = _members(section, paths, values, table, ids)
        if members is not None:
            found[section] = [
                [value_forms(table, section, fqn) for fqn in listed]
                for _, listed in sorted(members.groups.items())
            ]
            continue
        groups = [listed for _, listed in sorted(_listed(section, paths, values).items())]
        names = [name for listed in groups for name in listed]
        if all(isinstance(name, str) for name in names) and saved_by_name(section, names):
            found[section] = [[((name,),) for name in listed] for listed in groups]
    return found


def numberings(
    paths: Sequence[Path], values: Sequence[Any], table: LayoutTable, ids: Mapping[int, str]
) -> dict[Path, Numbering]:
    """Returns how each optimizer state of a state dict numbers its parameters, if it does."""
    found = {}
    for section in _group_sections(paths, values):
        members = _members(section, paths, values, table, ids)
        if members is not None and members.ids:
            sizes = tuple(len(listed) for _, listed in sorted(members.groups.items()))
            found[section] = Numbering(members.ids, sizes)
    return found


def _listed(
    section: Path, paths: Sequence[Path], values: Sequence[Any], key: str = "params"
) -> dict[int, list[Any]]:
    """Returns what each group of an optimizer lists under a key, by the group's number."""
    return {
        path[-2]: list(value)
        for path, value in zip(paths, values, strict=True)
        if len(path) == len(section) + 3 and path[:-2] == (*section, _GROUPS) and path[-1] == key
    }


@dataclass(frozen=True, slots=True)
class _Members:
    """The parameters of an optimizer: by integer, and of each group, by clean name."""

    ids: dict[int, str]
    groups: dict[int, list[str]]


def lists_members(path: Path) -> bool:
    """Returns whether a path leads to the parameters of a group: its form, not an option."""
    return path[-1] in _MEMBERS and _GROUPS in path


def _group_sections(paths: Sequence[Path], values: Sequence[Any]) -> list[Path]:
    """Returns the paths of the optimizer states that have `param_groups` as a list.

    Each group lists its `params`; what else has this name is a value like any other.
    """
    found: dict[Path, dict[Any, bool]] = {}
    for path, value in zip(paths, values, strict=True):
        if _GROUPS in path:
            at = path.index(_GROUPS)
            groups = found.setdefault(path[:at], {})
            group = path[at + 1] if len(path) > at + 2 else None
            lists = path[at + 2 :] == ("params",) and isinstance(value, list | tuple)
            groups[group] = groups.get(group, False) or lists
    return [
        section
        for section, groups in found.items()
        if all(groups.values()) and set(groups) == set(range(len(groups)))
    ]


def _members(
    section: Path,
    paths: Sequence[Path],
    values: Sequence[Any],
    table: LayoutTable,
    ids: Mapping[int, str],
) -> _Members | None:
    """Returns the parameters of an optimizer; None where there is no model to know them."""
    found = _listed(section, paths, values)
    names = _listed(section, paths, values, "param_names")
    known = dict(ids)
    for group, listed in names.items():
        known.update(zip(found.get(group, []), map(str, listed), strict=False))
    if not any(chunk.layouts for chunk in table.chunks):
        _refuse_numbers(section, table)
        return None
    groups = {
        group: [
            table.names.own(section, entry)
            if isinstance(entry, str)
            else _name(section, entry, known)
            for entry in listed
        ]
        for group, listed in found.items()
    }
    return _Members(known, groups)


def _refuse_numbers(section: Path, table: LayoutTable) -> None:
    """Refuses numbers of parameters if ranks that do not belong together may number others so."""
    for chunk in table.chunks:
        if chunk.unplaced:
            raise LayoutError(
                f"{key_of(section)}: its parameters are numbered, and every rank may number others "
                f"so. {chunk.unplaced} Or save get_optimizer_state_dict(model, optimizer) of "
                "torch.distributed.checkpoint.state_dict."
            )


def _name(path: Path, number: Any, ids: Mapping[int, str]) -> str:
    if number not in ids:
        raise CheckpointError(
            f"{key_of(path)}: parameter number {number!r} of the optimizer has no known name. Pass "
            "optimizer= to the planner, or save get_optimizer_state_dict(model, optimizer) of "
            "torch.distributed.checkpoint.state_dict."
        )
    return ids[number]


def value_forms(table: LayoutTable, section: Path, fqn: str) -> Forms:
    """Returns the names on disk of a parameter's scalars, for each form it may have there."""
    for chunk in _chunks(table, section):
        layout = chunk.layouts.get(fqn)
        if layout is not None:
            return names_of(layout, chunk.grids.of(layout.family))
    return ((fqn,),)


def names_of(layout: Layout, grid: Grid) -> Forms:
    """Returns the names on disk of a layout's scalars, for each form it may have there.

    Megatron-LM stores a scalar with each component: `linear_fc1.weight_w.step` and `….weight_v.step`.
    """
    forms = [value_names(form, grid) for form in variants(layout, grid)]
    parts = () if separate_parts(layout) else components(layout)
    if parts:
        forms += [tuple(name + part for name in names for part in parts) for names in forms]
    return tuple(dict.fromkeys(forms))


def components(layout: Layout) -> tuple[str, ...]:
    """Returns the suffixes of the components that a layout cuts its tensor into, if it does."""
    for stage in layout.stages:
        if isinstance(stage, Concat | Interleave):
            return tuple(suffix for suffix, _ in stage.parts)
    return ()


def _chunks(table: LayoutTable, section: Path) -> list[Chunk]:
    """Returns the chunks of the model whose parameters an optimizer state may name."""
    return [table.chunks[number] for number in table.names.chunks_of((*section, _GROUPS))]


def _group_value(
    section: Path,
    rest: Path,
    number: int,
    members: Mapping[int, list[str]],
    table: LayoutTable,
) -> list[Named]:
    group, option = rest[1], rest[2:]
    listed = members.get(group, [])
    if not table.names_differ:
        if option == ("params",):
            names = (name for fqn in listed for name in value_forms(table, section, fqn)[0])
            return [Named((*section, *rest), number, tuple(names))]
        return [Named((*section, *rest), number)]
    if option[0] in _MEMBERS:
        return []
    return [Named((*section, _GROUPS, fqn, *option), number) for fqn in listed]
