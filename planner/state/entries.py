"""From a state dict to named values: which leaf belongs to which parameter, in which role.

| name | is |
|---|---|
| `Place` | what stands around a parameter's name in a key: section, slot |
| `Names` | finds the parameter that a path speaks of |
| `reach`, `put` | what lies at a path of a state dict |

The keys are those of stock DCP: path elements joined by dots. `model.layers.0.w` is the parameter
`layers.0.w` in the section `model`; `optimizer.state.layers.0.w.exp_avg` is its slot `exp_avg`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from shardplan.layouts import LayoutError
from shardplan.layouts.model import clean_name

Path = tuple[Any, ...]

_BEFORE_NAMES = ("state", "param_groups")  # what an optimizer's state dict has before names


class Index(int):
    """A position in a list, as an element of a path; plain integers are keys of mappings."""

    __slots__ = ()


def is_value(value: list[Any]) -> bool:
    """Returns whether a list is stored as one value: it holds no tensor and no structure.

    Mappings are always entered and other values never; these are stock DCP's rules, but that an
    empty mapping is a value too and integer keys stay integers.
    """
    return not any(
        isinstance(entry, torch.Tensor | Mapping)
        or (isinstance(entry, list) and not is_value(entry))
        for entry in value
    )


def key_of(path: Path) -> str:
    """Returns the key that stock DCP gives a path."""
    return ".".join(map(str, path))


def stock_path(path: Path) -> Path:
    """Returns a path as stock DCP stores it: positions as integers, all keys as text."""
    return tuple([int(e) if type(e) is Index else str(e) for e in path])


def reach(root: Any, path: Path) -> Any:
    """Returns what lies at a path of a state dict."""
    for element in path:
        root = root[int(element) if isinstance(element, Index) else element]
    return root


def put(root: Any, path: Path, value: Any) -> None:
    """Sets what lies at a path of a state dict."""
    last = path[-1]
    reach(root, path[:-1])[int(last) if isinstance(last, Index) else last] = value


class Place(NamedTuple):
    """What stands around a parameter's name in the key of one of its values.

    Attributes:
        before: Path elements before the element that holds the name.
        head: Text before the name in that element, `'state.'` in a flattened optimizer state.
        tail: Text after it, `'.exp_avg'` likewise.
        after: Path elements after it, `('exp_avg',)`.
    """

    before: Path
    head: str
    tail: str
    after: Path

    def path(self, name: str) -> Path:
        """Returns the path of the value that belongs to a parameter's name."""
        return (*self.before, self.head + name + self.tail, *self.after)

    def key(self, name: str) -> str:
        """Returns the key on disk of the value that belongs to a parameter's name."""
        return key_of(self.path(name))

    @property
    def slot(self) -> str:
        """The optimizer's name for the value, empty for the parameter itself."""
        return key_of(self.after) if self.after else self.tail.lstrip(".")


class Found(NamedTuple):
    """The parameter that a path speaks of.

    Attributes:
        chunk: Which of the model's chunks has it.
        fqn: Its name there.
        place: What stands around the name.
    """

    chunk: int
    fqn: str
    place: Place


class Names:
    """Finds parameters by the paths of a state dict.

    Args:
        chunks: Names of each chunk of the model and the section it answers for: `None` for any.
    """

    def __init__(self, chunks: Iterable[tuple[str | None, Iterable[str]]]) -> None:
        self._chunks = [(section, dict.fromkeys(names)) for section, names in chunks]
        self._virtual = len(self._chunks) > 1 and all(s is None for s, _ in self._chunks)

    def chunks_of(self, path: Path) -> list[int]:
        """Returns the chunks of the model that may answer for a path, by its first element."""
        _, number = _section(path[0])
        sections = [own for own, _ in self._chunks]
        # A section that no model is named for, such as an optimizer's, may be of any of them.
        anyone = str(path[0]) not in sections
        return [
            chunk
            for chunk, own in enumerate(sections)
            if (anyone or own in (None, str(path[0])))
            and not (self._virtual and number is not None and number != chunk)
        ]

    def on_disk(self, path: Path) -> Path:
        """Returns a path by the section it has on disk: `model1` is a chunk of `model`."""
        section, number = _section(path[0])
        return (section, *path[1:]) if self._virtual and number is not None else path

    def find(self, path: Path) -> Found | None:
        """Returns the parameter that a path speaks of, None if it speaks of none.

        Raises:
            LayoutError: If it may speak of a parameter of two chunks of the model.
        """
        places = []
        for chunk in self.chunks_of(path):
            found = _find(path, self._chunks[chunk][1])
            if found is not None:
                places.append((chunk, *found))
        if not places:
            return None
        if len(places) > 1:
            raise LayoutError(
                f"{key_of(path)}: chunks {places[0][0]} and {places[1][0]} of the model both have "
                f"a parameter {places[0][1]}. Name the sections after the chunks (model0, model1 "
                "and optimizer0, optimizer1), or say whose the section is: "
                f"model={{{str(path[0])!r}: module, ...}}."
            )
        chunk, fqn, place = places[0]
        if place.before:
            place = place._replace(before=self.on_disk(place.before))
        return Found(chunk, fqn, place)


def _section(name: Any) -> tuple[Any, int | None]:
    """Splits the name of a virtual pipeline chunk's section: `'model1'` → `('model', 1)`."""
    text = str(name)
    stem = text.rstrip("0123456789")
    return (stem, int(text[len(stem) :])) if stem and stem != text else (name, None)


def _find(path: Path, names: Mapping[str, None]) -> tuple[str, Place] | None:
    """Finds a parameter's name in a path: the element itself, or part of a dotted element."""
    last = len(path) - 1
    # Behind `state` and `param_groups` the name comes first and the slot last, also where a
    # parameter has the slot's name.
    slotted = last >= 2 and path[last - 2] in _BEFORE_NAMES
    for at in (last - 1, last) if slotted else (last, last - 1):
        element, after = path[at], path[at + 1 :]
        if at < 0 or not isinstance(element, str):
            continue
        if element in names:
            return element, Place(path[:at], "", "", after)
        clean = clean_name(element)
        if clean != element and clean in names:
            return clean, Place(path[:at], "", "", after)
    element = path[-1]
    if isinstance(element, str) and "." in element:
        return _inside(path, element, names)
    return None


def _inside(path: Path, element: str, names: Mapping[str, None]) -> tuple[str, Place] | None:
    """Finds a name inside a dotted element such as `state.layers.0.w.exp_avg`."""
    tokens = element.split(".")
    starts = list(range(len(tokens)))
    if tokens[0] in _BEFORE_NAMES:
        starts = [*starts[1:], 0]
    for start in starts:
        for stop in (len(tokens), len(tokens) - 1):
            inner = ".".join(tokens[start:stop])
            fqn = inner if inner in names else clean_name(inner)
            if inner and fqn in names and (start or stop < len(tokens)):
                head = "".join(token + "." for token in tokens[:start])
                tail = "".join("." + token for token in tokens[stop:])
                return fqn, Place(path[:-1], head, tail, ())
    return None
