"""Which values a stage saves, when no rank knows what the others hold.

| name | does |
|---|---|
| `vouched` | the values that one rank's word counts for |
| `join_stages` | the manifests of all stages, complete with what the other ranks vouch for |

A rank without elements of a parameter often has no optimizer state for it, so a stage's first rank
can't say what the stage saves. For each parameter one rank's word counts: the first one that stores
any of it, by the layouts. All ranks' words together are as long as the list of parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardplan.layouts import CheckpointError, Grid, Layout

from ...planning.manifest import Extra, Kind, Members, StageManifest

Groups = dict[Kind, Members]


def first_holder(layout: Layout, grid: Grid) -> Grid:
    """Returns the coordinate of the rank whose word counts for a parameter.

    Args:
        layout: The parameter's layout.
        grid: Its family's grid, at any coordinate of the pipeline stage.
    """
    start = grid.at(**{axis: 0 for axis in grid.axes if axis != "pp"})
    return next(iter(layout.storage.holders(start)), start)


class _Holders:
    """First holders, found once for each chain of stages."""

    def __init__(self, manifest: StageManifest) -> None:
        self._manifest = manifest
        self._known: dict[tuple[int, int, str], bool] = {}
        self._kept: list[Any] = []

    def is_this_rank(self, chunk: int, layout: Layout) -> bool:
        ident = (chunk, id(layout.stages), layout.family)
        known = self._known.get(ident)
        if known is None:
            self._kept.append(layout.stages)  # an id stays taken while its object lives
            grid = self._manifest.chunks[chunk].grids.of(layout.family)
            known = first_holder(layout, grid).coordinate == grid.coordinate
            self._known[ident] = known
        return known


def vouched(manifest: StageManifest) -> Groups:
    """Returns the values that this rank's word counts for.

    Args:
        manifest: What the rank itself plans, at its own coordinate.
    """
    holders = _Holders(manifest)
    found: Groups = {}
    for kind, members in manifest.groups.items():
        layouts = manifest.layouts(kind)
        own = Members.of(i for i in members if holders.is_this_rank(kind.chunk, layouts[i]))
        if own.bits:
            found[kind] = own
    return found


def join_stages(
    stages: Sequence[StageManifest], more: Sequence[Mapping[Kind, Members]]
) -> list[StageManifest]:
    """Returns the manifests of all stages, each with all that its ranks vouch for.

    An extra that several stages have is the first one's.

    Args:
        stages: What each stage's first rank vouches for.
        more: What the other ranks of each stage vouch for.

    Raises:
        CheckpointError: If two stages have different values under one key.
    """
    seen: dict[str, tuple[int, Extra]] = {}
    joined = []
    for number, stage in enumerate(stages):
        groups = dict(stage.groups)
        for kind, members in more[number].items() if number < len(more) else ():
            groups[kind] = groups[kind].union(members) if kind in groups else members
        for extra in stage.extras:
            where, other = seen.setdefault(extra.key, (number, extra))
            if other.digest != extra.digest:
                raise CheckpointError(
                    f"{extra.key}: pipeline stages {where} and {number} hold different values "
                    "under this key, and no layout explains it. Give each its own key, or make "
                    "them equal."
                )
        extras = tuple(e for e in stage.extras if seen[e.key][0] == number)
        joined.append(replace(stage, groups=groups, extras=extras))
    return joined
