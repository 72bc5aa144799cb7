"""How the plan messages of all ranks compare, and what they make together.

| name | is |
|---|---|
| `compare` | checks all messages and joins them to one manifest per pipeline stage |
| `first_difference` | names the first parameter or value in which two ranks differ |

Ranks that agree send and receive nothing that grows with the number of tensors, but for one bit
per value and one manifest per stage. Only when a digest differs does the coordinator send a
manifest back, so that the rank that differs can name the parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardplan.layouts import CheckpointError, Grids, Layout
from shardplan.layouts.errors import summary

from ..planning.manifest import SHARD, Kind, Members, StageManifest
from ..planning.ownership import writer_of_value
from .messages import PlanMessage, PlanReply
from .settling import Settled, settle


@dataclass(slots=True)
class Agreement:
    """The outcome of `compare`.

    Attributes:
        stages: The joined manifest of each pipeline stage.
        replies: One answer for each rank.
        settled: What the ranks told beside their layouts.
    """

    stages: list[StageManifest] = field(default_factory=list)
    replies: list[PlanReply] = field(default_factory=list)
    settled: Settled = field(default_factory=Settled)

    @property
    def fault(self) -> str | None:
        """Why nothing may be written, None if all agree."""
        return next((reply.fault for reply in self.replies if reply.fault), None)


def compare(messages: Sequence[PlanMessage]) -> Agreement:
    """Checks that all ranks' plans belong together and joins them.

    Args:
        messages: One for each rank, in rank order.

    Raises:
        CheckpointError: If the ranks' coordinates do not make up the grid, or a rank lacks a
            value that it is needed for.
    """
    _check_places(messages)
    leaders: dict[int, int] = {}
    for rank, message in enumerate(messages):
        if message.manifest is not None:
            leaders.setdefault(message.grids[0].stage, rank)
    differing = [
        rank
        for rank, message in enumerate(messages)
        if message.digest != messages[leaders[message.grids[0].stage]].digest
    ]
    if differing:
        return _disagreement(messages, leaders, differing)
    stages = []
    for stage, leader in sorted(leaders.items()):
        ranks = [r for r, m in enumerate(messages) if m.grids[0].stage == stage]
        stages.append(_join(messages, leader, ranks))
    settled = settle(messages, leaders, stages)
    replies = [
        PlanReply(
            frozenset(settled.skip.get(rank, ())),
            frozenset(settled.write.get(rank, ())),
            frozenset(settled.skip_boxes.get(rank, ())),
        )
        for rank in range(len(messages))
    ]
    unwritten = [
        settled.skip[leader] - settled.aliases.keys() for _, leader in sorted(leaders.items())
    ]
    stages = [
        replace(m, extras=tuple(e for e in m.extras if e.key not in skipped))
        for m, skipped in zip(stages, unwritten, strict=True)
    ]
    return Agreement(stages, replies, settled)


def _check_places(messages: Sequence[PlanMessage]) -> None:
    """Checks that the ranks' coordinates are each point of the grid once."""
    faults: list[str] = []
    for chunk in range(len(messages[0].grids)):
        for family in ("dense", "expert"):
            seen: dict[tuple[int, ...], int] = {}
            first = messages[0].grids[chunk].of(family)
            for rank, message in enumerate(messages):
                if len(message.grids) != len(messages[0].grids):
                    raise CheckpointError(
                        f"rank {rank} plans for {len(message.grids)} chunks of the model and rank "
                        f"0 for {len(messages[0].grids)}. Build every planner with the same model."
                    )
                grid = message.grids[chunk].of(family)
                if (grid.axes, grid.sizes) != (first.axes, first.sizes):
                    faults.append(
                        f"rank {rank} has the {family} axes {dict(zip(grid.axes, grid.sizes, strict=True))} "
                        f"but rank 0 has {dict(zip(first.axes, first.sizes, strict=True))}"
                    )
                other = seen.setdefault(grid.coordinate, rank)
                if other != rank:
                    faults.append(
                        f"ranks {other} and {rank} are at one place of the {family} grid "
                        f"({grid.facts()})"
                    )
            if first.world_size != len(messages):
                faults.append(
                    f"the {family} grid has {first.world_size} ranks but {len(messages)} save"
                )
    if faults:
        raise CheckpointError(
            f"the ranks' grids do not fit together: {summary(dict.fromkeys(faults))}. Give every "
            "planner the pg_collection or grid of its own rank, and save from all of these ranks."
        )


def _disagreement(
    messages: Sequence[PlanMessage], leaders: dict[int, int], differing: Sequence[int]
) -> Agreement:
    rank = differing[0]
    leader = leaders[messages[rank].grids[0].stage]
    fault = (
        f"ranks {leader} and {rank} of one pipeline stage do not plan the same checkpoint, and "
        f"nothing was written ({len(differing)} of {len(messages)} ranks differ from their "
        f"stage's first). Rank {rank}'s own error names the difference"
    )
    replies = []
    for number, message in enumerate(messages):
        lead = leaders[message.grids[0].stage]
        replies.append(
            PlanReply(fault=f"differs from rank {lead}", other=messages[lead].manifest)
            if number in differing
            else PlanReply(fault=fault)
        )
    return Agreement(replies=replies)


def _join(messages: Sequence[PlanMessage], leader: int, ranks: Sequence[int]) -> StageManifest:
    """Joins the ranks of a stage: what any of them holds, the stage holds."""
    manifest = messages[leader].manifest
    assert manifest is not None  # leaders are the ranks that sent one
    groups: dict[Kind, Members] = {}
    for rank in ranks:
        for kind, members in messages[rank].groups.items():
            groups[kind] = groups[kind].union(members) if kind in groups else members
    joined = replace(manifest, groups=groups)
    faults: list[str] = []
    differ: dict[str, None] = {}
    for kind, members in groups.items():
        layouts = joined.layouts(kind)
        for rank in ranks:
            message = messages[rank]
            for index in message.groups.get(kind, Members()).missing(members):
                fault = _needed(kind, layouts[index], message.grids[kind.chunk])
                if fault:
                    key = kind.place.key(layouts[index].name)
                    other = _held_as(kind, index, message)
                    if other is None:
                        faults.append(f"{key}: rank {rank} lacks it {fault}")
                        continue
                    holder = next(
                        r for r in ranks if index in messages[r].groups.get(kind, Members())
                    )
                    (a, first), (b, second) = sorted([(holder, kind), (rank, other)], key=_rank)
                    told = f"{key}: {_form(first)} on rank {a} and {_form(second)} on rank {b}"
                    differ.setdefault(told)
    if differ:
        raise CheckpointError(
            f"{summary(differ)}. Give the value one dtype and one kind on every rank."
        )
    if faults:
        raise CheckpointError(
            f"{summary(faults)}. Let every rank that stores a part of a parameter hold the same "
            "slots for it, or none hold any."
        )
    return joined


def _rank(held: tuple[int, Kind]) -> int:
    return held[0]


def _held_as(kind: Kind, index: int, message: PlanMessage) -> Kind | None:
    """Returns the kind in which a rank holds a value that others hold in `kind`, if it does."""
    for own, members in message.groups.items():
        if (own.chunk, own.place) == (kind.chunk, kind.place) and own != kind and index in members:
            return own
    return None


def _form(kind: Kind) -> str:
    """Says what a value is: its dtype, and its shape if that is not the parameter's."""
    if kind.dtype is None:
        return "a Python value"
    return str(kind.dtype) if kind.role == SHARD else f"{kind.dtype} of shape {kind.shape}"


def _needed(kind: Kind, layout: Layout, grids: Grids) -> str | None:
    """Says what a rank that lacks a value would have had to write, None if nothing."""
    grid = grids.of(layout.family)
    if kind.role == SHARD:
        numel = layout.storage.numel(grid)
        return f"but stores {numel} elements of the parameter ({grids.facts()})" if numel else None
    if layout.storage.numel(grid) and writer_of_value(layout, grid):
        return f"but is among the ranks that must write it ({grids.facts()})"
    return None


def first_difference(mine: StageManifest, other: StageManifest) -> str:
    """Returns a sentence on the first thing in which two manifests of a stage differ."""
    for chunk, theirs in zip(mine.chunks, other.chunks, strict=False):
        for own, their in zip(chunk.layouts.values(), theirs.layouts.values(), strict=False):
            if own.fqn != their.fqn:
                return f"{own.fqn}: the other rank has {their.fqn} in its place"
            if own != their:
                return f"{own.fqn}: laid out as {_stages(own)} here and as {_stages(their)} there"
        if len(chunk.layouts) != len(theirs.layouts):
            return f"{len(chunk.layouts)} parameters here and {len(theirs.layouts)} there"
        if chunk.state_layouts != theirs.state_layouts:
            return "the layouts of optimizer state differ"
        if chunk.grids.dense.sizes != theirs.grids.dense.sizes:
            return f"the grids differ: {chunk.grids.facts()} here and {theirs.grids.facts()} there"
    own_extras = {extra.key: extra for extra in mine.extras}
    their_extras = {extra.key: extra for extra in other.extras}
    for key in sorted(own_extras.keys() | their_extras.keys()):
        if key not in their_extras:
            return f"{key}: only this rank has it, and no layout explains it"
        if key not in own_extras:
            return f"{key}: this rank lacks it, and no layout explains it"
        own_dtype, their_dtype = own_extras[key].dtype, their_extras[key].dtype
        if own_dtype != their_dtype:
            return (
                f"{key}: {own_dtype or 'a Python value'} here and "
                f"{their_dtype or 'a Python value'} there, and no layout explains it"
            )
        if own_extras[key] != their_extras[key]:
            return f"{key}: the two ranks hold different values, and no layout explains it"
    if len(mine.chunks) != len(other.chunks):
        return f"{len(mine.chunks)} chunks of the model here and {len(other.chunks)} there"
    return "their order of parameters or values differs"


def _stages(layout: Layout) -> str:
    return " → ".join(str(stage) for stage in layout.stages)
