"""What a rank tells in the plan step that no layout says, and how the coordinator settles it.

| what | where it comes from | settled as |
|---|---|---|
| values that belong to no parameter | every rank | equal on all ranks that have the key; the first rank of a stage writes it if it holds it, else the lowest that does |
| `PerRank` values | every rank | on all ranks of a stage, equal along the axes that they do not name |
| boxes of tensors that describe themselves | the rank that holds them | they must cover the tensor once; equal boxes are dealt out |
| tied tensors | every rank | one copy, if they are tied wherever they have elements |
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError, IncompleteCheckpointError, RanksDisagreeError
from shardplan.layouts.coverage import tiling_faults
from shardplan.layouts.errors import summary
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Shape

from ..planning.manifest import Extra, StageManifest
from ..planning.metadata import Entry
from ..state.described import Description, Part
from ..state.entries import Path, key_of
from .messages import PER_RANK, PlanMessage, Tie, global_rank, unpack

Box = tuple[str, Shape]


@dataclass(slots=True)
class Settled:
    """What the coordinator decides.

    Attributes:
        entries: Key, path, stored form and origin of what no stage's manifest has.
        skip: Keys that a rank does not write, by rank.
        write: Keys of extras that a rank writes although it does not lead its stage.
        skip_boxes: Key and offsets of boxes that another rank writes.
        aliases: Key that is not stored → the one that stands for it.
    """

    entries: list[Entry] = field(default_factory=list)
    skip: dict[int, set[str]] = field(default_factory=dict)
    write: dict[int, set[str]] = field(default_factory=dict)
    skip_boxes: dict[int, set[Box]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def settle(
    messages: Sequence[PlanMessage],
    leaders: Mapping[int, int],
    stages: Sequence[StageManifest],
) -> tuple[Settled, list[StageManifest]]:
    """Decides what layouts do not.

    Args:
        messages: One for each rank.
        leaders: First rank of each pipeline stage.
        stages: The joined manifest of each stage, in the order of the stages.

    Returns:
        What was decided, and the manifests with the extras that each stage's ranks write.

    Raises:
        RanksDisagreeError: If ranks hold different values under one key.
        IncompleteCheckpointError: If the boxes of a tensor that describes itself do not cover it
            exactly once.
    """
    settled = Settled()
    _per_rank(messages, leaders)
    joined = _extras(settled, messages, leaders, stages)
    _boxes(settled, messages)
    if all(message.told.aliases for message in messages):
        _ties(settled, messages, leaders, joined)
    return settled, joined


def _extras(
    settled: Settled,
    messages: Sequence[PlanMessage],
    leaders: Mapping[int, int],
    stages: Sequence[StageManifest],
) -> list[StageManifest]:
    """Compares values that belong to no parameter and finds one writer for each."""
    alike: dict[bytes, list[int]] = {}
    for rank, message in enumerate(messages):
        alike.setdefault(message.told.extras, []).append(rank)
    leading = set(leaders.values())
    known: dict[str, tuple[Extra, int]] = {}
    writers: dict[str, tuple[bool, int]] = {}
    for packed, ranks in alike.items():
        best = min((rank not in leading, rank) for rank in ranks)
        for extra in unpack(packed):
            key = extra.key
            first, other = known.setdefault(key, (extra, ranks[0]))
            if (first.digest, first.dtype, first.shape) != (
                extra.digest,
                extra.dtype,
                extra.shape,
            ):
                raise _differ(messages, first, other, extra, ranks[0])
            writers[key] = min(writers.get(key, best), best)
            for rank in leading.intersection(ranks):
                settled.skip.setdefault(rank, set()).add(key)
    _check_named_options(messages, known)
    written: dict[int, list[Extra]] = {}
    for key, (follows, rank) in writers.items():
        extra = known[key][0]
        if follows:
            settled.write.setdefault(rank, set()).add(key)
            extra = replace(extra, writer=messages[rank].place)
        else:
            settled.skip[rank].discard(key)
        written.setdefault(messages[rank].grids[0].stage, []).append(extra)
    joined = []
    for stage, manifest in zip(sorted(leaders), stages, strict=True):
        # A leader knows its own paths better than they travel: its integer keys stay integers.
        own = {extra.key: extra for extra in manifest.extras}
        extras = [extra for extra in manifest.extras if extra.digest == PER_RANK]
        for extra in written.get(stage, ()):
            extras.append(own[extra.key] if extra.writer is None else extra)
        joined.append(replace(manifest, extras=tuple(sorted(extras, key=lambda e: e.key))))
    return joined


def _check_named_options(
    messages: Sequence[PlanMessage], known: Mapping[str, tuple[Extra, int]]
) -> None:
    """Refuses an option by parameter name of a value that no list of groups has.

    Ranks whose optimizers leave out what they store nothing of save options by name, beside the
    lists of ranks that leave out nothing. Both are stored: a list may not have every parameter.
    """
    lists: dict[Path, dict[Path, set[str]]] = {}
    named: list[tuple[Path, Path, str]] = []
    for key, (extra, _) in known.items():
        path = extra.path
        at = path.index("param_groups") if "param_groups" in path else len(path)
        if len(path) > at + 2:
            section, option = path[:at], path[at + 2 :]
            if isinstance(path[at + 1], int):
                lists.setdefault(section, {}).setdefault(option, set()).add(extra.digest)
            else:
                named.append((section, option, key))
    for section, option, key in named:
        extra, rank = known[key]
        if section in lists and extra.digest not in lists[section].get(option, ()):
            raise RanksDisagreeError(
                f"{key}: rank {global_rank(messages, rank)} has another value than any group in the "
                "lists of other ranks. Build every rank's optimizer with the same groups."
            )


def _differ(
    messages: Sequence[PlanMessage], first: Extra, a: int, second: Extra, b: int
) -> RanksDisagreeError:
    forms = [
        "a Python value" if extra.dtype is None else f"{extra.dtype} of shape {extra.shape}"
        for extra in (first, second)
    ]
    how = "" if forms[0] == forms[1] else f" ({forms[0]} and {forms[1]})"
    a, b = global_rank(messages, a), global_rank(messages, b)
    advice = (
        "Make them equal, give each its own key, or wrap the value in PerRank if every rank is "
        "meant to have its own."
    )
    if "param_groups" in first.path:
        advice = (
            "Make them equal. If each rank optimizes other parameters, pass the model and grid= to "
            "the planner, or save the options by parameter name with "
            "StateDictOptions(flatten_optimizer_state_dict=True)."
        )
    return RanksDisagreeError(
        f"{first.key}: ranks {a} and {b} hold different values under this key{how}, and no layout "
        f"explains it. {advice}"
    )


def _per_rank(messages: Sequence[PlanMessage], leaders: Mapping[int, int]) -> None:
    """Checks that all ranks of a stage have the same `PerRank` keys, and replicas equal values."""
    known: dict[str, tuple[str, int]] = {}
    for rank, message in enumerate(messages):
        leader = leaders[message.grids[0].stage]
        own, theirs = (
            {(key.rpartition(".")[0], label) for key, label, _ in messages[r].told.per_rank}
            for r in (rank, leader)
        )
        for key, label in sorted(own ^ theirs):
            holder, other = (rank, leader) if (key, label) in own else (leader, rank)
            raise RanksDisagreeError(
                f"{key}: a PerRank value on rank {global_rank(messages, holder)} and not on rank "
                f"{global_rank(messages, other)}, or along other axes than {label!r} there. Give every "
                "rank of the stage one, with the same axes."
            )
        for key, _, digest in message.told.per_rank:
            if not digest:
                continue
            first, other = known.setdefault(key, (digest, rank))
            if first != digest:
                raise RanksDisagreeError(
                    f"{key}: ranks {global_rank(messages, other)} and {global_rank(messages, rank)} hold "
                    "different values, but are at one place of the axes that the key names. Name "
                    "the axes along which it differs in PerRank(value, axes=...)."
                )


def _boxes(settled: Settled, messages: Sequence[PlanMessage]) -> None:
    """Joins the boxes of tensors that describe themselves; equal ones are dealt to their ranks."""
    tensors: dict[str, tuple[Path, Description, int]] = {}
    holders: dict[str, dict[tuple[Shape, Shape], list[int]]] = {}
    nowhere: dict[str, int] = {}
    marks: dict[tuple[str, Part], tuple[str, int]] = {}
    for rank, message in enumerate(messages):
        for path, said in message.told.described:
            key = key_of(path)
            if said.shape is None:
                nowhere.setdefault(key, rank)
                continue
            _, first, other = tensors.setdefault(key, (path, said, rank))
            if (first.shape, first.dtype) != (said.shape, said.dtype):
                raise RanksDisagreeError(
                    f"{key}: rank {global_rank(messages, other)} says that it has shape {first.shape} "
                    f"and {first.dtype}, rank {global_rank(messages, rank)} says {said.shape} and "
                    f"{said.dtype}. Fix what describes it."
                )
            for part in said.parts:
                holders.setdefault(key, {}).setdefault(part, []).append(rank)
                mark, other = marks.setdefault((key, part), (said.mark, rank))
                if mark != said.mark:
                    raise _unrelated(messages, key, part, other, rank)
    loads = [0] * len(messages)
    for key in nowhere.keys() - tensors.keys():
        raise CheckpointError(
            f"{key}: rank {nowhere[key]} has it without a box and so has every other rank, and "
            "nobody says its shape. Leave it out, or set global_shape on it."
        )
    faults: list[str] = []
    for key, (path, said, _) in tensors.items():
        shape = said.shape or ()
        parts = holders.get(key, {})
        for fault in tiling_faults(shape, parts):
            faults.append(f"{key}: {fault} of shape {shape}{_clash(parts)}")
        for (offsets, sizes), ranks in parts.items():
            writer = min(ranks, key=lambda r: (loads[r], r))
            loads[writer] += math.prod(sizes) * said.dtype.itemsize
            for rank in ranks:
                if rank != writer:
                    settled.skip_boxes.setdefault(rank, set()).add((key, offsets))
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in parts]
        if not chunks and math.prod(shape) == 0:
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))]
        properties = TensorProperties(dtype=said.dtype)
        stored = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        settled.entries.append((key, path, stored, key))
    if faults:
        raise IncompleteCheckpointError(
            f"{summary(faults)}. What the ranks say of their own tensors does not fit together; "
            "nothing was written. Save from all ranks that hold a part of it."
        )


def _unrelated(
    messages: Sequence[PlanMessage], key: str, part: Part, a: int, b: int
) -> RanksDisagreeError:
    a, b = global_rank(messages, a), global_rank(messages, b)
    return RanksDisagreeError(
        f"{key}: ranks {a} and {b} hold different values of the box at {part[0]} of sizes {part[1]}, "
        "on meshes of which no name says how their ranks belong together. If the ranks are "
        "pipeline stages or expert-parallel, pass every planner the model and "
        "grid=Grids.from_sizes(rank, pp=…, ep=…, …), or name what each of them has differently."
    )


def _clash(parts: Mapping[tuple[Shape, Shape], Sequence[int]]) -> str:
    """Says which two boxes begin at one place and differ in size, if any do."""
    starts: dict[Shape, tuple[Shape, int]] = {}
    for (offsets, sizes), ranks in parts.items():
        other, rank = starts.setdefault(offsets, (sizes, ranks[0]))
        if other != sizes:
            return (
                f" (two boxes at {offsets} differ in size, {other} on rank {rank} and {sizes} on "
                f"rank {ranks[0]})"
            )
    return ""


def _ties(
    settled: Settled,
    messages: Sequence[PlanMessage],
    leaders: Mapping[int, int],
    stages: Sequence[StageManifest],
) -> None:
    """Finds the keys that need no copy of their own."""
    for (stage, leader), manifest in zip(sorted(leaders.items()), stages, strict=True):
        members = [(r, m) for r, m in enumerate(messages) if m.grids[0].stage == stage]
        aliases: dict[str, str] = dict(messages[leader].told.tied_extras)
        claimed = dict.fromkeys(itertools.chain.from_iterable(m.told.ties for _, m in members))
        for tie in claimed:
            if all(tie in m.told.ties or not _holds(tie, manifest, m) for _, m in members):
                aliases.update(_keys(tie, manifest, members[0][1]))
        skipped = settled.skip.get(leader, set())
        aliases = {a: k for a, k in aliases.items() if a not in skipped and k not in skipped}
        settled.aliases.update(aliases)
        if aliases:
            for rank, _ in members:
                settled.skip.setdefault(rank, set()).update(aliases)


def _holds(tie: Tie, manifest: StageManifest, message: PlanMessage) -> bool:
    """Whether a rank stores anything of a tied parameter, so that it can tell whether it is."""
    layout = manifest.layouts(tie.kind)[tie.alias]
    grid = message.grids[tie.kind.chunk].of(layout.family)
    return bool(layout.storage.numel(grid))


def _keys(tie: Tie, manifest: StageManifest, message: PlanMessage) -> dict[str, str]:
    """Returns the keys of the parts of a tied parameter, each with that of its stored twin."""
    layouts = manifest.layouts(tie.kind)
    alias, stored = layouts[tie.alias], layouts[tie.stored]
    grid = message.grids[tie.kind.chunk].of(alias.family)
    place = tie.kind.place
    return {
        place.key(alias.key(frame)): place.key(stored.key(frame))
        for frame in evaluate(alias.stages, grid, alias.fqn)
    }
