"""What ranks send each other in DCP's plan step, and what the coordinator answers.

| name | is |
|---|---|
| `PlanMessage` | what a rank sends: its place, a digest of its stage, one bit per value |
| `Told` | the part of it that no layout says: Python values, `PerRank`, described boxes, ties |
| `PlanReply` | the coordinator's answer to one rank |
| `pack`, `unpack` | paths and digests of Python values in few bytes |
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardplan.layouts import Grids
from shardplan.layouts.slab import Shape

from ..planning.manifest import Extra, Kind, Members, StageManifest
from ..state.described import Description
from ..state.entries import Path, stock_path

PER_RANK = "per rank"  # stands for the digest of a value that each rank has its own of


@dataclass(frozen=True, slots=True)
class Tie:
    """Two parameters of one chunk that are one tensor, in one section or slot.

    Attributes:
        kind: The section and slot.
        alias: Number of the parameter that is not stored, among the chunk's layouts.
        stored: Number of the one that is.
    """

    kind: Kind
    alias: int
    stored: int


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells.

    Attributes:
        objects: Paths and digests of its Python values, packed; see `pack`.
        per_rank: Key and digest of each `PerRank` value that other ranks must have equal.
        described: Path and description of each tensor that describes itself.
        ties: Its tied parameters.
        tied_extras: Keys of tied tensors that belong to no parameter: `(alias, stored)`.
        aliases: Whether its storage writer can give one stored tensor two keys.
    """

    objects: bytes = b""
    per_rank: tuple[tuple[str, str], ...] = ()
    described: tuple[tuple[Path, Description], ...] = ()
    ties: tuple[Tie, ...] = ()
    tied_extras: tuple[tuple[str, str], ...] = ()
    aliases: bool = False


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """One rank's part of the plan step.

    Attributes:
        grids: The rank's grids of each chunk of the model.
        digest: Digest of the layouts and extras; equal on all ranks of a stage.
        groups: Which values the rank has, one bit each.
        manifest: The stage's layouts, from the first rank of each stage only.
        told: What no layout says.
    """

    grids: tuple[Grids, ...]
    digest: str
    groups: dict[Kind, Members]
    manifest: StageManifest | None = None
    told: Told = field(default_factory=Told)


@dataclass(frozen=True, slots=True)
class PlanReply:
    """The coordinator's answer to one rank.

    Attributes:
        skip: Keys that another stage writes, or that another key stands for.
        write: Keys of Python values that the rank writes although it does not lead its stage.
        skip_boxes: Key and offsets of boxes that another rank writes.
        fault: Why nothing may be written, None if all agree.
        other: Manifest of the rank that this one differs from.
    """

    skip: frozenset[str] = frozenset()
    write: frozenset[str] = frozenset()
    skip_boxes: frozenset[tuple[str, Shape]] = frozenset()
    fault: str | None = None
    other: StageManifest | None = None


def pack(extras: Iterable[Extra]) -> bytes:
    """Returns paths and digests of Python values in few bytes.

    >>> unpack(pack([Extra(("train", "step"), "0f")]))
    [(('train', 'step'), '0f')]
    """
    rows = [[*stock_path(extra.path), extra.digest] for extra in extras]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode()) if rows else b""


def unpack(packed: bytes) -> list[tuple[Path, str]]:
    """Returns what `pack` packed."""
    rows = json.loads(zlib.decompress(packed)) if packed else []
    return [(tuple(row[:-1]), row[-1]) for row in rows]
