"""Layouts as plain data: what is stored in a checkpoint, sent in a message, hashed in a digest."""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from .errors import LayoutError
from .join import Join as Join  # registers itself
from .stages import STAGES
from .storage import Cut


def stage_to_json(stage: Any) -> list[Any]:
    """Returns a stage as `[name, {field: value}]`, plain data."""
    return [type(stage).__name__, _fields(stage)]


def stage_from_json(data: Any) -> Any:
    """Returns the stage that `stage_to_json` wrote.

    Raises:
        LayoutError: If the data is no stage of this version.
    """
    try:
        name, values = data
        cls = STAGES.get(name)
        if cls is None or not is_dataclass(cls):
            raise LayoutError(
                f"no stage {str(name)[:60]!r} is known here. Import the package that has it, or "
                "register its provider as an entry point shardplan.layouts."
            )
        if name == "Cuts":
            values = {**values, "cuts": [Cut(**_tuples(cut)) for cut in values["cuts"]]}
        made: Any = cls
        return made(**{key: _tuple(value) for key, value in values.items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"{data!r} is no stage of a layout: {error}") from error


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _fields(made: Any) -> dict[str, Any]:
    kind: Any = type(made)
    return {name: _plain(getattr(made, name)) for name in _names(kind)}


def _plain(value: Any) -> Any:
    if type(value) is int or type(value) is str:
        return value
    if isinstance(value, Cut):
        return _fields(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _tuple(value) for key, value in values.items()}
