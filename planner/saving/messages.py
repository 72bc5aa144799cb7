"""What ranks send each other in DCP's plan step, and what the coordinator answers.

A `PlanMessage` is plain data throughout: tuples, text, integers and bytes, and `Kind`, `Members`,
`Grids`, `Description` and `Tie`, which are made of those. So it can be written as JSON.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from shardplan.layouts import Grids
from shardplan.layouts.slab import Shape

from ..planning.manifest import Extra, Kind, Members, StageManifest
from ..state.described import Description
from ..state.entries import Index, Path, stock_path

PER_RANK = "per rank"  # digest placeholder for per-rank values


@dataclass
class WriterMeta(StorageMeta):
    """What a storage writer that stores layouts hands to the planner, through DCP's own call.

    DCP passes `writer.storage_meta()` on to `planner.set_up_planner(storage_meta=…)`. The planner
    asks the writer for:

    | name | is |
    |---|---|
    | `stores_layouts` | True |
    | `collective` | whether ranks exchange plans; set in `set_up_storage_writer` |
    | `plan_failed(error, grids, ranks)` | called if this rank can't plan, without collectives |

    Attributes:
        writer: The storage writer.
    """

    writer: Any = None


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
    """What one rank says of its values beside what layouts say.

    Attributes:
        extras: Path, digest, dtype and shape of each value that belongs to no parameter, packed;
            see `pack`.
        values: Digests of the values that stand for a whole parameter, such as a step, in the
            order of the kind's members, packed; see `pack_words`.
        per_rank: Key, label and digest of each `PerRank` value; the digest is empty where no other
            rank must have an equal one.
        described: Path and description of each tensor that describes itself.
        ties: Its tied parameters.
        tied_extras: Keys of tied tensors that belong to no parameter: `(alias, stored)`.
        aliases: Whether its storage writer can give one stored tensor two keys.
    """

    extras: bytes = b""
    values: tuple[tuple[Kind, bytes], ...] = ()
    per_rank: tuple[tuple[str, str, str], ...] = ()
    described: tuple[tuple[Path, Description], ...] = ()
    ties: tuple[Tie, ...] = ()
    tied_extras: tuple[tuple[str, str], ...] = ()
    aliases: bool = False


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """One rank's part of the plan step: everything that `agreement.compare` needs.

    Attributes:
        grids: The rank's grids of each chunk of the model, of the ranks that save only.
        digest: Digest of the layouts; equal on all ranks of a pipeline stage.
        groups: Which values the rank has, one bit each.
        manifest: The stage's layouts, from the first rank of each stage only.
        told: What no layout says.
        ranks: Global ranks that save, in the order of the messages; None for all ranks of the
            default group.
    """

    grids: tuple[Grids, ...]
    digest: str
    groups: dict[Kind, Members]
    manifest: StageManifest | None = None
    told: Told = field(default_factory=Told)
    ranks: tuple[int, ...] | None = None

    @property
    def place(self) -> int:
        """The rank's place among those that save."""
        dense = self.grids[0].dense
        return dense.linear(dense.axes)


@dataclass(frozen=True, slots=True)
class PlanReply:
    """The coordinator's answer to one rank.

    Attributes:
        skip: Keys that another rank writes, or that another key stands for.
        write: Keys of `WritePlan.spare` that the rank writes, since the first rank of its stage
            does not hold them.
        skip_boxes: Key and offsets of boxes that another rank writes.
        extras: For the first rank of a stage: the extras that other ranks of the stage write.
        fault: Why nothing may be written, None if all agree.
        other: Manifest of the rank that this one differs from.
    """

    skip: frozenset[str] = frozenset()
    write: frozenset[str] = frozenset()
    skip_boxes: frozenset[tuple[str, Shape]] = frozenset()
    extras: tuple[Extra, ...] = ()
    fault: str | None = None
    other: StageManifest | None = None


def global_rank(messages: Sequence[PlanMessage], number: int) -> int:
    """Returns the global rank of the sender of a message."""
    ranks = messages[number].ranks
    return number if ranks is None else ranks[number]


def pack(extras: Iterable[Extra]) -> bytes:
    """Returns paths, digests, dtypes and shapes of extras in few bytes.

    >>> [(extra.path, extra.digest) for extra in unpack(pack([Extra(("train", "step"), "0f")]))]
    [(('train', 'step'), '0f')]
    """
    rows = [
        [stock_path(e.path), e.digest]
        if e.dtype is None
        else [stock_path(e.path), e.digest, str(e.dtype).removeprefix("torch."), e.shape]
        for e in extras
    ]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode()) if rows else b""


def unpack(packed: bytes) -> tuple[Extra, ...]:
    """Returns what `pack` packed, with paths as stock DCP stores them."""
    rows = json.loads(zlib.decompress(packed)) if packed else []
    found = []
    for path, digest, *tensor in rows:
        extra = Extra(tuple(Index(e) if type(e) is int else e for e in path), digest)
        if tensor:
            extra = replace(extra, dtype=getattr(torch, tensor[0]), shape=tuple(tensor[1]))
        found.append(extra)
    return tuple(found)


def pack_words(words: bytes, count: int) -> bytes:
    """Returns digests in few bytes where they are equal, as those of steps are.

    Args:
        words: The digests, one behind the other, all of one length.
        count: How many they are.
    """
    first = words[: len(words) // count]
    return b"=" + first if words == first * count else b"z" + zlib.compress(words, 1)


def unpack_words(packed: bytes, count: int) -> bytes:
    """Returns what `pack_words` packed."""
    return packed[1:] * count if packed[:1] == b"=" else zlib.decompress(packed[1:])
