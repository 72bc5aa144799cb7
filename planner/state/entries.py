"""From a state dict to named values: which leaf belongs to which parameter, in which role.

The keys are those of stock DCP: path elements joined by dots. `model.layers.0.w` is the parameter
`layers.0.w` in the section `model`; `optimizer.state.layers.0.w.exp_avg` is its slot `exp_avg`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from shardplan.layouts import LayoutError
from shardplan.layouts.model import WRAPPERS, clean_name

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


class Known:
    """The names of a module's parameters, found as they are or but for wrappers' tokens.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._clean: dict[str, list[str]] = {}
        for name in self._names:
            self._clean.setdefault(clean_name(name), []).append(name)
        # The tokens before all names: of a wrapper that nobody knows, or of a user's own module.
        self._common = min((_leading(name) for name in self._names), default=0)

    def find(self, text: str, stored: bool = False) -> str | None:
        """Returns the name that a text stands for, None if it is not one.

        Args:
            text: A name, or one with wrappers' tokens.
            stored: Whether it is a checkpoint's, which may also lack tokens that a name has.

        Raises:
            LayoutError: If it is two of them but for wrappers' tokens.
        """
        if text in self._names:
            return text
        names = self._clean.get(clean_name(text), [])
        if not stored:
            depth = text.count(".") + self._common
            names = [name for name in names if name.count(".") <= depth]
        if len(names) > 1:
            raise LayoutError(
                f"{text}: the model has the parameters {names[0]} and {names[1]}, which are both "
                "this name but for wrappers' tokens. Pass model= without its wrappers, and its own "
                "state_dict()."
            )
        return names[0] if names else None


def _leading(name: str) -> int:
    return next((i for i, token in enumerate(name.split(".")) if token not in WRAPPERS), 0)


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
        self._chunks = [(section, Known(names)) for section, names in chunks]
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

    def own(self, section: Path, name: str) -> str:
        """Returns the model's own name for one in a section, the name itself if it has none."""
        known = (self._chunks[chunk][1].find(name) for chunk in self.chunks_of((*section, name)))
        return next((fqn for fqn in known if fqn is not None), name)

    def on_disk(self, path: Path) -> Path:
        """Returns a path by the section it has on disk: `model1` is a chunk of `model`."""
        section, number = _section(path[0])
        return (section, *path[1:]) if self._virtual and number is not None else path

    def prefix(self, section: Path) -> str:
        """Returns what stands before the keys on disk of a section, with the last dot."""
        return key_of((*self.on_disk(section), "")) if section else ""

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


def _find(path: Path, names: Known) -> tuple[str, Place] | None:
    """Finds a parameter's name in a path: the element itself, or part of a dotted element."""
    last = len(path) - 1
    # Behind `state` and `param_groups` the name comes first and the slot last, also where a
    # parameter has the slot's name.
    slotted = last >= 2 and path[last - 2] in _BEFORE_NAMES
    for at in (last - 1, last) if slotted else (last, last - 1):
        element, after = path[at], path[at + 1 :]
        if at < 0 or not isinstance(element, str):
            continue
        fqn = names.find(element)
        if fqn is not None:
            return fqn, Place(path[:at], "", "", after)
    element = path[-1]
    if isinstance(element, str) and "." in element:
        return _inside(path, element, names)
    return None


def _inside(path: Path, element: str, names: Known) -> tuple[str, Place] | None:
    """Finds a name inside a dotted element such as `state.layers.0.w.exp_avg`."""
    tokens = element.split(".")
    starts = list(range(len(tokens)))
    if tokens[0] in _BEFORE_NAMES:
        starts = [*starts[1:], 0]
    for start in starts:
        for stop in (len(tokens), len(tokens) - 1):
            inner = ".".join(tokens[start:stop])
            fqn = names.find(inner) if inner and (start or stop < len(tokens)) else None
            if fqn is not None:
                head = "".join(token + "." for token in tokens[:start])
                tail = "".join("." + token for token in tokens[stop:])
                return fqn, Place(path[:-1], head, tail, ())
    return None
