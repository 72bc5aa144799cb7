"""From what all ranks planned to the contents of `checkpoint.json`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.layouts import RanksDisagreeError
from shardplan.layouts.slab import Shape

from ...planning.manifest import Extra
from ...planning.metadata import checkpoint_metadata
from ...saving.agreement import Agreement, compare
from ...saving.messages import PER_RANK, PlanMessage
from ...state.entries import key_of
from ...state.per_rank import PerRank, Seat
from ...without_gc import without_gc
from ..format.commit import Commit


@dataclass(frozen=True, slots=True)
class Joined:
    """What all ranks' messages make together.

    Attributes:
        commit: What `checkpoint.json` will say.
        late: By place, the keys that a rank has yet to write, since only now it is known that no
            rank before it holds them.
    """

    commit: Commit
    late: dict[int, list[str]]


class PlansDiffer(RanksDisagreeError):
    """Ranks of one pipeline stage have other layouts.

    Attributes:
        place: Place of the first rank that differs.
        other: The manifest of its stage's first rank.
    """

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement.fault)
        self.place, self.other = next(
            (place, reply.other)
            for place, reply in enumerate(agreement.replies)
            if reply.other is not None
        )


def join(save: str, messages: Sequence[tuple[PlanMessage, int]], together: bool) -> Joined:
    """Returns what a save comes to, once its ranks turn out to have planned one checkpoint.

    Args:
        save: Id of the save.
        messages: Each rank's message, with its number.
        together: Whether the ranks exchanged plans before they wrote, so that none is late.

    Raises:
        RanksDisagreeError: If ranks disagree, or two are at one place.
        CheckpointError: If two values have one key, or a tensor is not covered.
    """
    ordered = sorted(messages, key=lambda m: m[0].place)
    plans = [message for message, _ in ordered]
    with without_gc():
        agreement = compare(plans)
        if agreement.fault:
            raise PlansDiffer(agreement)
        # Raises where keys meet, also of different kinds, or chunks do not cover a tensor.
        checkpoint_metadata(agreement.stages, agreement.settled.entries)
        extras = _extras(agreement, plans)
        stages = [replace(stage, extras=()) for stage in agreement.stages]
        stages[0] = replace(stages[0], extras=extras)
    late: dict[int, list[str]] = {}
    if not together:
        for place, reply in enumerate(agreement.replies):
            if reply.write:
                late[place] = sorted(reply.write)
        written = {(place, key) for place, keys in late.items() for key in keys}
        extras = tuple(replace(e, late=(e.writer, e.key) in written) for e in extras)
        stages[0] = replace(stages[0], extras=extras)
    numbers = tuple(rank for _, rank in ordered)
    digests = {m.grids[0].stage: m.digest for m in plans if m.grids[0].leads_stage}
    return Joined(
        Commit(
            save,
            len(plans),
            tuple(stages),
            tuple(digest for _, digest in sorted(digests.items())),
            _tables(plans),
            None if numbers == tuple(range(len(numbers))) else numbers,
        ),
        late,
    )


def _extras(agreement: Agreement, plans: Sequence[PlanMessage]) -> tuple[Extra, ...]:
    """Returns the values that belong to no parameter, each with the place of its writer."""
    leads = {m.grids[0].stage: m.place for m in plans if m.grids[0].leads_stage}
    per_rank = _writers_of_own(plans)
    found: dict[str, Extra] = {}
    for (_, lead), stage in zip(sorted(leads.items()), agreement.stages, strict=True):
        for extra in stage.extras:
            writer = per_rank[extra.key] if extra.digest == PER_RANK else extra.writer
            writer = lead if writer is None else writer
            found.setdefault(extra.key, replace(extra, writer=writer))
    boxes: dict[str, dict[Shape, tuple[Shape, int]]] = {}
    for place, (message, reply) in enumerate(zip(plans, agreement.replies, strict=True)):
        for path, said in message.told.described:
            key = key_of(path)
            own = boxes.setdefault(key, {})
            for offsets, sizes in said.parts:
                if (key, offsets) not in reply.skip_boxes:
                    own.setdefault(offsets, (sizes, place))
            if said.shape is not None:
                found[key] = Extra(path, "", said.dtype, said.shape)
    for key, own in boxes.items():
        parts = tuple((offsets, sizes, place) for offsets, (sizes, place) in own.items())
        found[key] = replace(found[key], boxes=parts)
    return tuple(extra for _, extra in sorted(found.items()))


def _writers_of_own(plans: Sequence[PlanMessage]) -> dict[str, int]:
    """Returns the place of the rank that wrote each `PerRank` value, by its key."""
    found: dict[str, int] = {}
    for message in plans:
        for key, label, _ in message.told.per_rank:
            value = PerRank(None, None if label == "rank" else label.split("-"))
            if Seat(key, value, message.grids[0]).first:
                found.setdefault(key, message.place)
    return found


def _tables(plans: Sequence[PlanMessage]) -> tuple[tuple[tuple[int, ...] | None, ...], ...]:
    """Returns for each chunk the place of the rank at each position of its two grids."""
    tables = []
    for chunk in range(max(len(message.grids) for message in plans)):
        pair: list[tuple[int, ...] | None] = []
        for family in ("dense", "expert"):
            at: dict[int, int] = {}
            for place, message in enumerate(plans):
                if chunk < len(message.grids):
                    grid = message.grids[chunk].of(family)
                    at[grid.linear(grid.axes)] = place
            if all(position == place for position, place in at.items()):
                pair.append(None)
                continue
            # Positions that only stages without this chunk have are never asked for.
            spare = iter(set(range(len(plans))) - set(at.values()))
            pair.append(tuple(at[p] if p in at else next(spare) for p in range(len(plans))))
        tables.append(tuple(pair))
    return tuple(tables) if any(table for pair in tables for table in pair) else ()
