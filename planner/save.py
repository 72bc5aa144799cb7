"""The save planner: every rank writes down its part of the checkpoint alone.

| name | is |
|---|---|
| `LayoutAwareSavePlanner` | the planner for `dcp.save` and `dcp.async_save` |
"""

import dataclasses
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from shardplan.layouts import CheckpointError, Grids, Layout, LayoutProvider

from .compat import SaveCall, calling_save, keeps_one_chunk_per_key, stores_aliases
from .loading.reading import UNPADDED
from .planning.manifest import Extra, Laid, StageManifest, Stored, stage_metadata
from .planning.optimizer import Named, by_name, lists_members, optimizer_names
from .planning.table import build_table
from .planning.tied import AliasedMetadata
from .saving.agreement import compare, first_difference
from .saving.messages import PlanMessage, PlanReply
from .saving.settling import Entry
from .saving.writing import Source, WritePlan, write_plan
from .state.described import part_of
from .state.entries import Path, key_of, stock_path
from .state.per_rank import PerRank
from .state.snapshot import Snapshot
from .state.storable import check_storable
from .state.values import to_bytes
from .state.views import copy_of, view
from .without_gc import without_gc


class LayoutAwareSavePlanner(SavePlanner):
    """Plans a save from layouts: no rank asks another where its shards lie.

    The order of DCP's calls, and who makes them:

    | call | ranks | does here |
    |---|---|---|
    | `set_up_planner` | all | takes the state dict |
    | `create_local_plan` | all | the rank's write items; nothing is sent |
    | `create_global_plan` | coordinator | compares digests, writes down the whole metadata |
    | `finish_plan` | all | puts the rank's own items back |
    | `resolve_data` | all | the view of the tensor that an item names |

    A plan travels without its items: each rank sends its place on the grid, a digest and one bit
    for each value, the first rank of each pipeline stage its layouts too. The planner holds
    layouts, and no tensor once a save is over, so it pickles, works under `async_save` and
    serves for the next save, where an unchanged plan is reused.

    Args:
        model: A module; a list of modules (virtual pipeline chunks, sections `model0`, …); a
            mapping from state-dict sections to modules with a `pg_collection` of their own; or a
            mapping from names to local shapes in place of any module. Without a model only
            tensors that describe themselves (DTensors) and replicas can be saved.
        pg_collection: Process groups of the model; by default those it carries.
        grid: Plain integers instead of process groups.
        layouts: Providers; the built-in ones and those of installed packages if not given.
        optimizer_layouts: Storage providers for optimizer state that is cut otherwise than its
            parameter.
        optimizer: The optimizer of a raw `optimizer.state_dict()`, whose integers name its
            parameters; not needed for the form of `torch.distributed.checkpoint.state_dict`.
        ep_rank: Expert-parallel rank instead of the collection's; needs `ep_size`.
        ep_size: Expert-parallel size instead of the collection's; needs `ep_rank`.

    Raises:
        LayoutError: If a parameter can't be placed or the grids do not fit together.
        ValueError: If only one of `ep_rank` and `ep_size` is given.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        pg_collection: Any = None,
        grid: Grids | None = None,
        layouts: Iterable[LayoutProvider] | None = None,
        optimizer_layouts: Iterable[LayoutProvider] = (),
        optimizer: torch.optim.Optimizer | None = None,
        ep_rank: int | None = None,
        ep_size: int | None = None,
    ) -> None:
        self._table = build_table(
            model,
            pg_collection=pg_collection,
            grid=grid,
            layouts=layouts,
            optimizer_layouts=optimizer_layouts,
            ep_rank=ep_rank,
            ep_size=ep_size,
        )
        self._ids = optimizer_names(model, optimizer)
        self._state_dict: dict[str, Any] | None = None
        self._snapshot: Snapshot | None = None
        self._named: list[Named] | None = None  # None: each value under its own path
        self._plan: WritePlan | None = None
        self._values: list[Any] = []
        self._manifest: StageManifest | None = None
        self._items: list[WriteItem] = []
        self._waiting: list[Source] = []
        self._sources: dict[tuple[str, Any], Source] = {}
        self._unresolved = 0

    @property
    def manifest(self) -> StageManifest:
        """What this rank plans, as plain data; for storage writers that store layouts.

        Raises:
            CheckpointError: If nothing was planned yet.
        """
        if self._manifest is None:
            raise CheckpointError("there is no manifest before create_local_plan")
        return self._manifest

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layout of each parameter and buffer, by clean name; the first chunk's of several."""
        return dict(self._table.chunks[0].layouts)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state dict of this save; see `torch.distributed.checkpoint.SavePlanner`."""
        self._state_dict = state_dict

    def create_local_plan(self) -> SavePlan:
        """Returns the rank's write items, in a plan that travels without them.

        Raises:
            LayoutError: If a tensor does not fit its parameter's layout.
            CheckpointError: If two values have one key, or the storage writer would lose data.
        """
        call = calling_save()
        try:
            return self._plan_locally(call)
        except Exception as error:
            # Without collectives the others would wait for this rank until they give up.
            if call is not None and self._is_alone(call) and hasattr(call.writer, "plan_failed"):
                dense = self._table.grids.dense
                call.writer.plan_failed(error, dense.linear(dense.axes), dense.world_size)
            raise

    def _plan_locally(self, call: SaveCall | None) -> SavePlan:
        alone = self._is_alone(call)
        if call is not None:
            self._check_writer(call)
        state_dict, self._state_dict = self._state_dict, None
        if state_dict is None:
            raise CheckpointError("create_local_plan was called before set_up_planner")
        with without_gc():
            raw = None if self._snapshot is None else self._snapshot.unchanged(state_dict)
            if raw is None or self._plan is None:
                raw = self._plan_anew(state_dict)
            self._values = raw if self._named is None else [_value(raw, n) for n in self._named]
            self._manifest = self._plan.manifest(self._values) if self._plan else None
        # Such a writer's readers know what layouts say, and nothing that ranks tell each other.
        by_layout = call is not None and getattr(call.writer, "stores_layouts", False)
        if (alone or by_layout) and self._plan is not None and self._plan.described:
            raise CheckpointError(
                f"{key_of(self._plan.described[0][1])}: it describes this rank's boxes only, and "
                f"nobody learns the others' without collectives, or from a writer that stores "
                f"layouts ({self._table.grids.facts()}). Save with collectives and torch's "
                "FileSystemWriter, or pass the provider that knows how it is cut."
            )
        return self._quiet_plan(
            alone or by_layout, call is not None and stores_aliases(call.writer)
        )

    def _plan_anew(self, state_dict: dict[str, Any]) -> list[Any]:
        self._snapshot = None  # a plan that fails leaves none to be reused
        snapshot = Snapshot(state_dict)
        raw = snapshot.take_values()
        for number, path in enumerate(snapshot.paths):
            if lists_members(path):
                snapshot.pin(number, raw[number])
        self._named = by_name(snapshot.paths, raw, self._table, self._ids)
        values: list[tuple[Path, Any]]
        if self._named is None:
            values = list(zip(snapshot.paths, raw, strict=True))
        else:
            values = [(named.path, _value(raw, named)) for named in self._named]
        self._plan = write_plan(self._table, values, self._table.grids.leads_stage)
        self._snapshot = snapshot
        return raw

    def _quiet_plan(self, strict: bool, aliases: bool) -> SavePlan:
        """Returns the plan and what is told of it.

        Args:
            strict: Whether every rank of a stage must have the same Python values, because none
                but the first one's would be found again.
            aliases: Whether the storage writer can give one stored tensor two keys.
        """
        plan, manifest = self._plan, self._manifest
        assert plan is not None and manifest is not None  # create_local_plan made them
        leads = self._table.grids.leads_stage
        message = PlanMessage(
            tuple(chunk.grids for chunk in plan.chunks),
            plan.digest(self._table, manifest, objects=strict),
            plan.groups,
            manifest if leads else None,
            dataclasses.replace(plan.told(self._values, manifest, leads), aliases=aliases),
        )
        return QuietSavePlan(items=plan.items, planner_data=message)

    def _check_writer(self, call: SaveCall) -> None:
        """Refuses a writer that would lose chunks, before a byte is written."""
        name = type(call.writer).__name__
        if keeps_one_chunk_per_key(call.writer):
            raise CheckpointError(
                f"{name} keeps only the last chunk of a key in each file, and a rank of this plan "
                "may write several. Use torch's FileSystemWriter in its torch_save format, or "
                "SafetensorsWriter of shardplan.planner."
            )
        world = self._table.grids.world_size
        if self._is_alone(call) and not getattr(call.writer, "stores_layouts", False):
            how = "no_dist=True" if call.no_dist else "use_collectives=False"
            raise CheckpointError(
                f"{name} with {how} would store this rank's chunks without those of the other "
                f"{world - 1} ranks ({self._table.grids.facts()}), and a load would miss them. "
                "Save with collectives, or use SafetensorsWriter of shardplan.planner."
            )

    def _is_alone(self, call: SaveCall | None) -> bool:
        """Whether this rank's plan will never meet those of the other ranks."""
        apart = call is not None and (call.no_dist or not call.use_collectives)
        return apart and self._table.grids.world_size > 1

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compares all ranks' digests and returns the metadata of the whole checkpoint.

        Raises:
            CheckpointError: If the ranks' grids do not fit together, a rank lacks a value that
                it is needed for, two values have one key, or a tensor is not covered.
        """
        messages = [plan.planner_data for plan in all_plans]
        for rank, message in enumerate(messages):
            if not isinstance(message, PlanMessage):
                raise CheckpointError(
                    f"rank {rank} saves with another planner. Pass a LayoutAwareSavePlanner on "
                    "every rank."
                )
        if len(messages) == 1 and self._table.grids.world_size > 1:
            return self._alone(all_plans)
        with without_gc():
            agreement = compare(messages)
            plans = [SavePlan([], planner_data=reply) for reply in agreement.replies]
            if agreement.fault:
                return plans, Metadata({})
            settled = agreement.settled
            metadata = checkpoint_metadata(agreement.stages, settled.entries)
            if settled.aliases:
                metadata = AliasedMetadata(metadata, settled.aliases)
            return plans, metadata

    def _alone(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plans without the other ranks: the writer stores the layouts, and readers compare."""
        plan = dataclasses.replace(all_plans[0], planner_data=PlanReply())
        return [plan], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan with this rank's items, for the storage writer.

        Raises:
            CheckpointError: If the ranks do not plan the same checkpoint; nothing was written.
        """
        reply = new_plan.planner_data
        plan = self._plan
        assert plan is not None and self._manifest is not None  # create_local_plan came before
        if isinstance(reply, PlanReply) and reply.fault:
            fault = reply.fault
            if reply.other is not None:
                fault = f"{first_difference(self._manifest, reply.other)}. This rank {fault}"
            self._values = []
            raise CheckpointError(f"{fault} ({self._table.grids.facts()})")
        items, sources = plan.items, plan.sources
        if isinstance(reply, PlanReply) and (reply.skip or reply.skip_boxes or reply.write):
            pairs = [
                (item, source)
                for item, source in zip(items, sources, strict=True)
                if item.index.fqn not in reply.skip
                and (source.part is None or (item.index.fqn, source.part) not in reply.skip_boxes)
            ]
            pairs += [pair for pair in plan.spare if pair[0].index.fqn in reply.write]
            items, sources = [item for item, _ in pairs], [source for _, source in pairs]
        self._items, self._waiting, self._sources = items, sources, {}
        self._unresolved = len(items)
        if not items:
            self._values = []
        return dataclasses.replace(new_plan, items=items, planner_data=None)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the data of a write item: a view of the tensor where that is possible.

        Raises:
            CheckpointError: If the item is not of this plan, or a value can't be stored.
        """
        key = write_item.index.fqn
        value, source = self._take(write_item)
        if source.part is not None:
            value = part_of(key, value, source.part)  # the whole may be no one tensor
        if isinstance(value, torch.Tensor):
            check_storable((key,), value)
        if source.box is None:
            return to_bytes(key, value)
        shown = view(value, source.box)
        return copy_of(value, source.box) if shown is None else shown

    def resolve_value(self, write_item: WriteItem) -> Any:
        """Returns the Python value of a write item, for a storage writer that has no pickles.

        Raises:
            CheckpointError: If the item is not of this plan.
        """
        return self._take(write_item)[0]

    def _take(self, write_item: WriteItem) -> tuple[Any, Source]:
        """Returns value and source of a write item, and lets go of all values after the last."""
        if not self._sources:
            self._sources = {
                (item.index.fqn, item.index.offset): source
                for item, source in zip(self._items, self._waiting, strict=True)
            }
        index = write_item.index
        source = self._sources.get((index.fqn, index.offset))
        if source is None or not self._values:
            raise CheckpointError(
                f"{index.fqn} at {index.offset}: not an item of this rank's plan, or its save is "
                "over. A storage writer resolves each item once."
            )
        value = self._values[source.number]
        self._unresolved -= 1
        if self._unresolved == 0:
            self._values = []
        return value.value if isinstance(value, PerRank) else value, source


class QuietSavePlan(SavePlan):
    """A plan that keeps its items when it is sent: they stay with the rank that made them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePlan, ([], self.storage_data, self.planner_data, self.usable)


Origins = dict[str, tuple[int, Laid | Extra]]


def checkpoint_metadata(
    stages: Iterable[StageManifest], told: Iterable[Entry] = (), origins: Origins | None = None
) -> Metadata:
    """Returns DCP's metadata of a checkpoint from the manifests of its pipeline stages.

    Args:
        stages: The manifests.
        told: What no manifest has: key, path, stored form and origin.
        origins: Takes the pipeline stage of each key, and what it stands for there.

    Raises:
        CheckpointError: If two values have one key, or a tensor is not covered exactly once.
    """
    stored: dict[str, Stored] = {}
    paths: dict[str, Path] = {}
    unpadded: list[str] = []
    origins = {} if origins is None else origins
    for number, stage in enumerate(stages):
        for key, path, entry, origin in stage_metadata(stage):
            if key in stored:
                where, other = origins[key]
                raise CheckpointError(
                    f"{key}: both {_name(other)} of pipeline stage {where} and {_name(origin)} of "
                    f"stage {number} have this key. If stages count their layers from 0, give the "
                    "layers a layer_number or pass PipelineLayers(offset=...)."
                )
            stored[key] = entry
            paths[key] = stock_path(path)
            origins[key] = (number, origin)
            if isinstance(origin, Laid) and origin.unpadded:
                unpadded.append(key)
    if unpadded:
        paths[UNPADDED] = tuple(unpadded)  # no key of a value, so nothing else looks it up
    for key, path, entry, _ in told:
        if key in stored:
            raise CheckpointError(
                f"{key}: {_name(origins[key][1])} of the model has this key, and so has a value that "
                "belongs to no parameter. Rename one of them."
            )
        stored[key] = entry
        paths[key] = stock_path(path)
    return Metadata(stored, planner_data=paths)


def _name(origin: Laid | Extra) -> str:
    return origin.key if isinstance(origin, Extra) else origin.layout.fqn


def _value(raw: list[Any], named: Named) -> Any:
    return raw[named.number] if named.names is None else list(named.names)
