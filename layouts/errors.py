"""The two errors of this library.

| error | raised for |
|---|---|
| `LayoutError` | a layout that contradicts itself, its parameter or its grid |
| `CheckpointError` | what is on disk, or is about to be: missing, incomplete, contradictory |
"""

from collections.abc import Iterable

_SHOWN = 8


class LayoutError(ValueError):
    """A layout, a provider or a grid that can't be right.

    The message has the form `<fqn>: <rule with both numbers> (<rank's facts>). <what to do>`.
    """


class CheckpointError(RuntimeError):
    """A checkpoint, or a plan for one, that is missing something or contradicts itself."""


def summary(problems: Iterable[str]) -> str:
    """Returns one text for several problems: the first eight, and how many there are."""
    rows = list(problems)
    text = "\n  ".join(rows[:_SHOWN])
    if len(rows) > _SHOWN:
        text += f"\n  … and {len(rows) - _SHOWN} more"
    return text if len(rows) == 1 else f"{len(rows)} problems:\n  {text}"
