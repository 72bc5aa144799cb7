"""The errors of this library: one family, so that a caller can tell the cases apart.

`LayoutError` is about layouts and live objects; `CheckpointError` about what is on disk, or about
to be. Each case that a script may want to handle is a class of its own under `CheckpointError`:

| error | raised when | also a |
|---|---|---|
| `MissingKeyError` | the checkpoint lacks a requested key | `KeyError` |
| `UnexpectedKeyError` | the checkpoint has a key that nothing asks for | `KeyError` |
| `ShapeMismatchError` | saved and live tensor differ in shape | `ValueError` |
| `DtypeMismatchError` | saved and live value differ in dtype or kind | `ValueError` |
| `CheckpointExistsError` | a save would replace a complete checkpoint without being asked to | |
| `SaveConflictError` | another save is using the same folder | |
| `IncompleteCheckpointError` | a save is unfinished, or chunks do not cover a tensor | |
| `DamagedCheckpointError` | bytes on disk are not what was written | |
| `RanksDisagreeError` | ranks hold or plan different things under one key | |
| `UnstorableValueError` | a value, or a key, can't be stored as it is | `ValueError` |
"""

from collections.abc import Iterable

_SHOWN = 8


class LayoutError(ValueError):
    """A layout, a provider or a grid that can't be right.

    The message has the form `<fqn>: <rule with both numbers> (<rank's facts>). <what to do>`.
    """


class CheckpointError(RuntimeError):
    """A checkpoint, or a plan for one, that is missing something or contradicts itself."""

    # KeyError, which some of the classes below are too, would show its message as a repr.
    __str__ = RuntimeError.__str__


class MissingKeyError(CheckpointError, KeyError):
    """The checkpoint lacks a key that the state dict asks for."""


class UnexpectedKeyError(CheckpointError, KeyError):
    """The checkpoint has a key that nothing asks for, and the policy calls that an error."""


class ShapeMismatchError(CheckpointError, ValueError):
    """A tensor was saved with another shape than the one that asks for it."""


class DtypeMismatchError(CheckpointError, ValueError):
    """A value was saved with another dtype or kind, and the policy allows no conversion."""


class CheckpointExistsError(CheckpointError):
    """The folder holds a complete checkpoint, and the save was not asked to replace it."""


class SaveConflictError(CheckpointError):
    """Another save is using the folder, or took it over from this one."""


class IncompleteCheckpointError(CheckpointError):
    """A save that did not end, or chunks that do not cover a tensor."""


class DamagedCheckpointError(CheckpointError):
    """Bytes on disk that are not what was written."""


class RanksDisagreeError(CheckpointError):
    """Ranks that hold or plan different things under one key, without saying that they may."""


class UnstorableValueError(CheckpointError, ValueError):
    """A value or a key that can't be stored so that it comes back as it was."""


def summary(problems: Iterable[str]) -> str:
    """Returns one text for several problems: the first eight, and how many there are."""
    rows = list(problems)
    text = "\n  ".join(rows[:_SHOWN])
    if len(rows) > _SHOWN:
        text += f"\n  … and {len(rows) - _SHOWN} more"
    return text if len(rows) == 1 else f"{len(rows)} problems:\n  {text}"
