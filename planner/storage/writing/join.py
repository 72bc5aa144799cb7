"""Joins what all ranks told of a save, and checks that they planned one checkpoint.

| name | does |
|---|---|
| `commit_of` | the `Commit` of a save from its ranks' markers |
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary

from ...planning.manifest import StageManifest
from ...save import checkpoint_metadata
from ...without_gc import without_gc
from ..format.claims import Groups
from ..format.commit import Commit, groups_from_json, part_name
from ..format.index import KeyIndex
from ..format.sums import block_sum
from ..places.files import Files
from ..reading.keys import StageKeys
from ..reading.parts import read_stages
from .session import Marker


class PlansDiffer(CheckpointError):
    """Ranks of one stage do not plan the same checkpoint."""


def commit_of(
    files: Files, save: str, markers: Sequence[Marker], agreed: Metadata | None = None
) -> Commit:
    """Returns what makes a save complete, once its ranks turn out to have planned one checkpoint.

    Args:
        files: Where the checkpoint lies.
        save: Id of the save.
        markers: Those of all ranks.
        agreed: The metadata that ranks agreed on in the plan step, where there was one.

    Raises:
        CheckpointError: If ranks disagree, two have one place, two values have one key, or a value
            is in no manifest, so that no reader would find it.
    """
    markers = sorted(markers, key=lambda marker: marker.place)
    _check_places(markers)
    leaders: dict[int, Marker] = {}
    groups: dict[int, Groups] = {}
    faults = []
    for marker in markers:
        leader = leaders.setdefault(marker.stage, marker)
        if marker.digest != leader.digest:
            faults.append(
                f"ranks {leader.rank} and {marker.rank} of pipeline stage {marker.stage} do not "
                "plan the same checkpoint"
            )
        if marker.groups:
            told = groups.setdefault(marker.stage, {})
            for kind, members in groups_from_json(marker.groups).items():
                told[kind] = told[kind].union(members) if kind in told else members
    if faults:
        raise PlansDiffer(
            f"{summary(faults)}. Nothing was saved. The error of a rank that differs names the "
            "difference."
        )
    if sorted(leaders) != list(range(len(leaders))):
        raise CheckpointError(f"the ranks name the pipeline stages {sorted(leaders)}")
    names = [part_name(save, stage) for stage in sorted(leaders)]
    raws = [files.read(name) for name in names]
    missing = [name for name, raw in zip(names, raws, strict=True) if raw is None]
    if missing:
        raise CheckpointError(f"{files.root}: no part of the manifest at {', '.join(missing)}")
    commit = Commit(
        save,
        len(markers),
        tuple(block_sum(raw).hex() for raw in raws if raw is not None),
        tuple(groups.get(stage, {}) for stage in sorted(leaders)),
        _tables(markers),
        None
        if all(marker.rank == marker.place for marker in markers)
        else tuple(marker.rank for marker in markers),
    )
    with without_gc():
        stages, _ = read_stages(files, commit)
        metadata = checkpoint_metadata(stages)
        if len(stages) > 1:
            commit = replace(commit, index=_index(stages))
    known = metadata.state_dict_metadata
    unknown = [] if agreed is None else [k for k in agreed.state_dict_metadata if k not in known]
    if unknown:
        raise CheckpointError(
            f"{summary(unknown)}: in no manifest of layouts, since only the ranks that hold it know "
            "of it. Save it with torch's FileSystemWriter, or pass the provider that knows how it "
            "is cut."
        )
    return commit


def _index(stages: Sequence[StageManifest]) -> KeyIndex:
    """Returns what tells a reader in which stage's part a key is."""
    keys = [StageKeys(stage) for stage in stages]
    arounds = [pair for own in keys for pair in own.arounds()]
    return KeyIndex.of(arounds, [own.names() for own in keys])


def _check_places(markers: Sequence[Marker]) -> None:
    faults = [
        f"ranks {a.rank} and {b.rank} are both at place {a.place}"
        for a, b in itertools.pairwise(markers)
        if a.place == b.place
    ]
    faults += [
        f"rank {m.rank} plans for {m.ranks} ranks, but {len(markers)} save"
        for m in markers
        if m.ranks != len(markers)
    ]
    if faults:
        raise CheckpointError(
            f"the ranks' grids do not fit together: {summary(faults)}. Give every planner the "
            "pg_collection or grid of its own rank, and save from all of these ranks."
        )


def _tables(markers: Sequence[Marker]) -> tuple[tuple[tuple[int, ...] | None, ...], ...]:
    """Returns for each chunk the place of the rank at each position of its two grids."""
    tables = []
    for chunk in range(max(len(marker.positions) for marker in markers)):
        pair: list[tuple[int, ...] | None] = []
        for family in (0, 1):
            at: dict[int, Marker] = {}
            for marker in markers:
                if chunk >= len(marker.positions):
                    continue
                position = marker.positions[chunk][family]
                other = at.setdefault(position, marker)
                if other is not marker:
                    raise CheckpointError(
                        f"ranks {other.rank} and {marker.rank} are at one position of the "
                        f"{('dense', 'expert')[family]} grid ({position}). Give every planner the "
                        "pg_collection or grid of its own rank."
                    )
            if all(position == marker.place for position, marker in at.items()):
                pair.append(None)
                continue
            # Positions that only stages without this chunk have are never asked for.
            spare = iter({m.place for m in markers} - {m.place for m in at.values()})
            pair.append(tuple(at[p].place if p in at else next(spare) for p in range(len(markers))))
        tables.append(tuple(pair))
    return tuple(tables) if any(table for pair in tables for table in pair) else ()
