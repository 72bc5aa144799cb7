"""The save planner: every rank writes down its part of the checkpoint alone."""

import copy
import dataclasses
import io
import math
import threading
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from shardplan.layouts import (
    CheckpointError,
    Grids,
    Layout,
    LayoutError,
    RanksDisagreeError,
)

from .compat import SaveCall, calling_save, keeps_one_chunk_per_key, stores_aliases
from .planning.manifest import StageManifest, value_names
from .planning.metadata import checkpoint_metadata
from .planning.optimizer import Named, by_name, group_members, lists_members
from .planning.table import LayoutOptions, LayoutTable
from .planning.tied import with_aliases
from .saving.agreement import compare, first_difference
from .saving.messages import PlanMessage, PlanReply, WriterMeta
from .saving.subgroup import ranks_of, restrict_grids
from .saving.turn import Turn
from .saving.writing import Source, WritePlan, write_plan
from .state.described import part_of
from .state.entries import Path
from .state.per_rank import PerRank
from .state.snapshot import Snapshot
from .state.storable import check_storable
from .state.values import to_bytes
from .state.views import copy_of, view
from .storage.folder import check_stock_save
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

    A plan travels without its items: each rank sends its place on the grid, a digest, one bit for
    each value and digests of what no layout explains, the first rank of each pipeline stage its
    layouts too. The planner holds layouts, and no tensor once a save is over, so it pickles, works
    under `async_save` and serves for the next save, where an unchanged plan is reused. A save that
    begins while another thread's still runs waits for it.

    Args:
        model: The model, or a `LayoutTable` of it; see `LayoutTable.of` for what it may be.
        optimizer: The optimizer of a raw `optimizer.state_dict()`, likewise.
        process_group: The group that saves, as given to `dcp.save`; by default the one that
            `dcp.save` was called with. Its ranks must hold everything, as those of one replica do.
        options: `pg_collection=`, `grid=`, `layouts=`, `optimizer_layouts=`, `ep_rank=`, `ep_size=`:
            where the model lies, and what places its parameters; see `LayoutOptions`.

    Raises:
        LayoutError: If a parameter can't be placed or the grids do not fit together.
        ValueError: If only one of `ep_rank` and `ep_size` is given.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        process_group: Any = None,
        **options: Unpack[LayoutOptions],
    ) -> None:
        self._table = LayoutTable.of(model, optimizer=optimizer, **options)
        self._ranks = ranks_of(process_group)
        self._turn = Turn()
        self._warned = False
        self._writer: Any = None  # of this save, if it stores layouts
        self._state_dict: dict[str, Any] | None = None
        self._snapshot: Snapshot | None = None
        self._named: list[Named] | None = None  # None: each value under its own path
        self._plan: WritePlan | None = None
        self._values: list[Any] | dict[int, Any] = []
        self._manifest: StageManifest | None = None
        self._items: list[WriteItem] = []
        self._waiting: list[Source] = []
        self._sources: dict[tuple[str, Any], Source] = {}
        self._spare: dict[int, Any] = {}
        self._unresolved = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_spare": {}}

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
        """Takes the state dict of this save; see `torch.distributed.checkpoint.SavePlanner`.

        Waits if a save in another thread has the planner.

        Raises:
            CheckpointExistsError: If torch's writer saves into a folder that holds a checkpoint of
                the library's own format.
        """
        self._turn.take()
        self._state_dict = state_dict
        self._writer = storage_meta.writer if isinstance(storage_meta, WriterMeta) else None
        self._spare = {}
        path = None if storage_meta is None else storage_meta.checkpoint_id
        if self._writer is None and is_coordinator and path is not None:
            check_stock_save(path)

    def create_local_plan(self) -> SavePlan:
        """Returns the rank's write items, in a plan that travels without them.

        Raises:
            LayoutError: If a tensor does not fit its parameter's layout.
            CheckpointError: If two values have one key, or the storage writer would lose data.
        """
        call = calling_save()
        ranks = self._ranks
        if ranks is None and call is not None and not call.no_dist:
            ranks = ranks_of(call.process_group)
        try:
            return self._plan_locally(call, ranks)
        except Exception as error:
            # Without collectives the others would wait for this rank until they give up.
            if self._writer is not None and not self._writer.collective:
                self._writer.plan_failed(error, self._grids(ranks), ranks)
            raise

    def _plan_locally(self, call: SaveCall | None, ranks: tuple[int, ...] | None) -> SavePlan:
        state_dict, self._state_dict = self._state_dict, None
        if state_dict is None:
            raise CheckpointError("create_local_plan was called before set_up_planner")
        with without_gc():
            raw = None
            if self._snapshot is not None and self._plan is not None and self._plan.ranks == ranks:
                raw = self._snapshot.unchanged(state_dict)
            if raw is None:
                raw = self._plan_anew(state_dict, ranks)
            plan = self._plan
            assert plan is not None  # _plan_anew made it
            if call is not None:
                self._check_call(call, plan)
            self._values = raw if self._named is None else [_value(raw, n) for n in self._named]
            self._manifest = manifest = plan.manifest(self._values)
            told = plan.told(self._values, manifest)
            message = PlanMessage(
                tuple(chunk.grids for chunk in plan.chunks),
                plan.digest(self._table),
                plan.groups,
                manifest if manifest.chunks[0].grids.leads_stage else None,
                dataclasses.replace(told, aliases=call is not None and stores_aliases(call.writer)),
                ranks,
            )
        return QuietSavePlan(items=plan.items, planner_data=message)

    def _grids(self, ranks: tuple[int, ...] | None) -> Grids:
        """Returns the grids of the ranks that save, as far as they can be told."""
        try:
            return restrict_grids(self._table.grids, ranks)
        except LayoutError:
            return self._table.grids

    def _plan_anew(self, state_dict: dict[str, Any], ranks: tuple[int, ...] | None) -> list[Any]:
        self._snapshot = None  # a plan that fails leaves none to be reused
        snapshot = Snapshot(state_dict)
        raw = snapshot.take_values()
        for number, path in enumerate(snapshot.paths):
            if lists_members(path):
                snapshot.pin(number, raw[number])
        table = self._table
        apart = _leaves_out(table, snapshot.paths, raw, self._table.ids)
        if apart:
            table = copy.copy(table)
            table.names_differ = True
        self._named = by_name(snapshot.paths, raw, table, self._table.ids)
        values: list[tuple[Path, Any]]
        if self._named is None:
            values = list(zip(snapshot.paths, raw, strict=True))
        else:
            values = [(named.path, _value(raw, named)) for named in self._named]
        self._plan = write_plan(self._table, values, ranks, apart)
        self._snapshot = snapshot
        return raw

    def _check_call(self, call: SaveCall, plan: WritePlan) -> None:
        """Refuses early what would lose chunks, and warns of a hazard."""
        if keeps_one_chunk_per_key(call.writer):
            _check_one_chunk_per_key(type(call.writer).__name__, plan.items)
        world = plan.chunks[0].grids.world_size
        apart = call.no_dist or not call.use_collectives
        if self._writer is None and apart and world > 1:
            raise CheckpointError(self._apart(type(call.writer).__name__, world))
        beside = threading.current_thread() is not threading.main_thread()
        if beside and not apart and call.process_group is None and world > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "async_save exchanges plans in the default process group, beside the collectives "
                "of training, and may hang. Pass a process group of its own: "
                "async_save(..., process_group=dist.new_group(backend='gloo')).",
                stacklevel=2,
            )

    def _apart(self, name: str, world: int) -> str:
        return (
            f"{name} would store this rank's chunks without those of the other {world - 1} ranks "
            f"({self._table.grids.facts()}), and a load would miss them: it saves with no_dist=True, "
            "use_collectives=False or a process_group that the planner does not know of. Save with "
            "collectives from all ranks, use SafetensorsWriter of shardplan.planner with "
            "use_collectives=False (a driver of your own passes its storage_meta() to "
            "set_up_planner), or pass process_group= to the planner too."
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compares all ranks' digests and returns the metadata of the whole checkpoint.

        Raises:
            RanksDisagreeError: If the ranks' grids do not fit together, a rank lacks a value of
                which it stores a part, or two ranks hold different values under one key.
            CheckpointError: If two values have one key, a tensor is not covered, or this is one of
                several ranks and nobody learns of the others' plans.
        """
        messages = [plan.planner_data for plan in all_plans]
        for rank, message in enumerate(messages):
            if not isinstance(message, PlanMessage):
                raise RanksDisagreeError(
                    f"rank {rank} saves with another planner. Pass a LayoutAwareSavePlanner on "
                    "every rank."
                )
        world = messages[0].grids[0].world_size
        if len(messages) == 1 and world > 1:
            if self._writer is not None and not self._writer.collective:
                return self._alone(all_plans)
            raise CheckpointError(self._apart("the storage writer", world))
        with without_gc():
            agreement = compare(messages)
            plans = [SavePlan([], planner_data=reply) for reply in agreement.replies]
            if agreement.fault:
                return plans, Metadata({})
            settled = agreement.settled
            metadata = checkpoint_metadata(agreement.stages, settled.entries)
            # Where dcp.save is not to be seen, its writer was not checked before it wrote.
            if settled.aliases or (self._writer is None and calling_save() is None):
                metadata = with_aliases(metadata, settled.aliases)
            return plans, metadata

    def _alone(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plans without the other ranks: the writer carries the messages, and compares them."""
        plan = dataclasses.replace(all_plans[0], planner_data=PlanReply())
        return [plan], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan with this rank's items, for the storage writer.

        Raises:
            RanksDisagreeError: If the ranks do not plan the same checkpoint; nothing was written.
        """
        reply = new_plan.planner_data
        plan = self._plan
        assert plan is not None and self._manifest is not None  # create_local_plan came before
        if isinstance(reply, PlanReply) and reply.fault:
            fault = reply.fault
            if reply.other is not None:
                fault = f"{first_difference(self._manifest, reply.other)}. Rank {fault}"
            self._values = []
            raise RanksDisagreeError(f"{fault} ({plan.chunks[0].grids.facts()})")
        if isinstance(reply, PlanReply) and reply.extras:
            own = {extra.key for extra in self._manifest.extras} - reply.skip
            kept = [extra for extra in self._manifest.extras if extra.key in own]
            extras = tuple(sorted((*kept, *reply.extras), key=lambda extra: extra.key))
            self._manifest = dataclasses.replace(self._manifest, extras=extras)
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
        if _is_of_huggingface(new_plan.storage_data):
            _check_one_chunk_per_key("HuggingFaceStorageWriter", items)
        if self._writer is not None and not self._writer.collective:
            self._spare = {source.number: self._values[source.number] for _, source in plan.spare}
        self._expect(items, sources)
        return dataclasses.replace(new_plan, items=items, planner_data=None)

    def _expect(self, items: list[WriteItem], sources: list[Source]) -> None:
        """Sets what is to be resolved, with the values that are there."""
        self._items, self._waiting, self._sources = items, sources, {}
        self._unresolved = len(items)
        if not items:
            self._values = []

    def spare_items(self, keys: Collection[str]) -> list[WriteItem]:
        """Returns write items of extras that this rank must write beside its plan.

        For storage writers without collectives: after `finish_plan`'s items are written, `compare`
        of all ranks' messages says in `PlanReply.write` which extras no first rank of a stage
        holds. The items are resolved once each, like those of the plan; then all values are let go.

        Args:
            keys: `PlanReply.write` of this rank; may be empty.
        """
        plan, self._values, self._spare = self._plan, self._spare, {}
        pairs = [p for p in plan.spare if p[0].index.fqn in keys] if plan is not None else []
        self._expect([item for item, _ in pairs], [source for _, source in pairs])
        return self._items

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


def _leaves_out(
    table: LayoutTable, paths: Sequence[Path], values: Sequence[Any], ids: Mapping[int, str]
) -> bool:
    """Whether an optimizer's groups list no parameter of which this rank stores nothing.

    Other ranks then list others, so the options go by name; where a rank lists all, its lists serve.
    """
    if table.names_differ:
        return False
    groups = group_members(paths, values, table, ids)
    listed = {n for section in groups.values() for group in section for f in group for n in f[0]}
    if not groups:
        return False
    empty = [
        name
        for chunk in table.chunks
        for layout in chunk.layouts.values()
        if math.prod(layout.local_shape) and not layout.storage.numel(chunk.grids.of(layout.family))
        for name in value_names(layout, chunk.grids.of(layout.family))
    ]
    return bool(empty) and listed.isdisjoint(empty)


def _is_of_huggingface(storage_data: Any) -> bool:
    """Whether torch's Hugging Face writers sent a plan back: their files are dictionaries by fqn."""
    marks = {"fqn_to_index_mapping", "shard_index"}
    return isinstance(storage_data, dict) and not marks.isdisjoint(storage_data)


def _check_one_chunk_per_key(name: str, items: Iterable[WriteItem]) -> None:
    """Refuses a writer that would keep only the last of several chunks, before a byte is written."""
    for key, count in Counter(item.index.fqn for item in items).items():
        if count > 1:
            raise CheckpointError(
                f"{key}: {name} keeps only the last chunk of a key in each file, and this rank "
                f"writes {count}. Use torch's FileSystemWriter in its torch_save format, or "
                "SafetensorsWriter of shardplan.planner."
            )


def _value(raw: list[Any], named: Named) -> Any:
    return raw[named.number] if named.names is None else list(named.names)
