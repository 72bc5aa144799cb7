"""What a load did: every key that was loaded, missed, left over or changed on the way."""

from dataclasses import dataclass, field, fields
from typing import Any, overload

from shardplan.layouts import CheckpointError

Keys = list[str]


class _Later:
    """A field that holds a list of keys, or the call that makes it when it is first asked for."""

    @overload
    def __get__(self, report: None, kind: type) -> tuple[()]: ...
    @overload
    def __get__(self, report: object, kind: type) -> Keys: ...
    def __get__(self, report: Any, kind: type) -> Any:
        if report is None:
            return ()  # the default
        held = report.__dict__[self._name]
        if callable(held):
            held = report.__dict__[self._name] = held()
        return held

    def __set_name__(self, report: type, name: str) -> None:
        self._name = name

    def __set__(self, report: Any, value: Any) -> None:
        report.__dict__[self._name] = value if callable(value) else list(value)


@dataclass
class LoadReport:
    """What one rank's load did.

    Attributes:
        loaded: Keys that were found in the checkpoint.
        missing: Keys that the checkpoint lacks; empty after a strict load, but for
            `_extra_state`, which may come and go, and options of groups without parameters.
        unexpected: Keys in the sections that were loaded which nothing asked for, other experts
            of the same layers aside, and keys beside the sections if any of those was asked for.
            With pipeline stages each stage lists the others' layers.
        skipped: Whole sections that nothing asked for, such as an optimizer's where only the model
            is loaded, and keys beside the sections if none of those was asked for. No error.
        converted: Key → saved and wanted form, where they differ: dtype, or kind of a scalar.
        padded: Keys whose padding was filled by the padding policy.
        replaced: Keys of blobs that were replaced whole by one of another size.
        materialized: Keys of meta tensors that were given memory.
        tied: Keys that the checkpoint lacks and that share their memory with one it has.
        numbered: Key of optimizer state that the checkpoint has by number → the key by name that it
            was taken for, by the order of the live optimizer. Nothing can tell whether the saved
            one had another order among parameters of one shape.
        ranks: Key of a `PerRank` value → what was done where the numbers of ranks differ.

    `unexpected` and `skipped` are made when they are first asked for. That may read more of the
    checkpoint's manifest than the load did, and is a `CheckpointError` if this can't be read any
    more.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: _Later = _Later()
    skipped: _Later = _Later()
    converted: dict[str, tuple[str, str]] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    materialized: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    numbered: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # sent as keys, not as a call

    def __str__(self) -> str:
        counts = [f"{len(self.loaded)} loaded"]
        for name in (f.name for f in fields(self) if f.name != "loaded"):
            try:
                found = list(getattr(self, name))
            except CheckpointError as error:  # the checkpoint may be gone by now
                counts.append(f"{name} not known: {error}")
                continue
            if found:
                more = ", …" if len(found) > 3 else ""
                counts.append(f"{len(found)} {name} ({', '.join(found[:3])}{more})")
        return "; ".join(counts)
