"""The load planner: the same layouts as the save, the other way round."""

import dataclasses
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from shardplan.layouts import (
    CheckpointError,
    MissingKeyError,
    UnexpectedKeyError,
)
from shardplan.layouts.errors import summary
from shardplan.layouts.slab import Box

from .compat import local_tensor
from .loading.delivery import Delivery, Target
from .loading.groups import FlattenedGroups, GroupLoad
from .loading.leftover import loaded_parts, skipped_parts, unexpected_keys, unfilled
from .loading.reading import Saved
from .loading.requests import Requests
from .loading.twins import Twins
from .planning.holdings import sort_values
from .planning.manifest import SHARD
from .planning.optimizer import (
    Named,
    Numbering,
    by_name,
    group_members,
    names_of,
    numberings,
)
from .planning.table import LayoutOptions, LayoutTable
from .planning.tied import meeting_memory, shared_memory
from .policies import LoadPolicies, PaddingPolicy
from .report import LoadReport
from .state.conversion import DTypePolicy
from .state.entries import Path, key_of, reach
from .state.materialize import materialize
from .state.per_rank import Seat
from .state.snapshot import Snapshot
from .state.values import from_bytes
from .state.views import is_all, view, write_back
from .without_gc import without_gc


class LayoutAwareLoadPlanner(LoadPlanner):
    """Plans a load from layouts: any checkpoint into any parallel configuration.

    The order of DCP's calls: `set_up_planner`, `create_local_plan` and `finish_plan` on all
    ranks, `create_global_plan` on the coordinator; then for each item `resolve_tensor` and
    `commit_tensor`, or `load_bytes`. No call sends anything, and what a plan says of a rank stays
    on that rank, so ranks may ask for different keys.

    Every requested box is checked against the checkpoint's chunks before anything is read: a
    box that the checkpoint does not cover is an error that names it. Tensors are filled in
    place, also through views of flat buffers. Experts are found under the index that the model's
    own expert-parallel rank and size give them. Checkpoints of stock planners load too.

    Args:
        model: The model, or a `LayoutTable` of it; see `LayoutTable.of` for what it may be.
        optimizer: The optimizer of a raw `optimizer.state_dict()`, likewise.
        policies: What to do where checkpoint and state dict differ; see `LoadPolicies`.
        strict: True for the policy `missing='error'`, False for `missing='report'`.
        dtype: The policy `dtype`.
        padding: The policy `padding`.
        trust_pickle: Whether stored Python objects that are no plain data may be unpickled;
            that can run code from the checkpoint.
        options: `pg_collection=`, `grid=`, `layouts=`, `optimizer_layouts=`, `ep_rank=`, `ep_size=`:
            where the model lies, and what places its parameters; see `LayoutOptions`.

    Attributes:
        report: What was loaded, missed and changed on this rank; complete once `dcp.load` is.

    Raises:
        LayoutError: If a parameter can't be placed or the grids do not fit together.
        ValueError: If only one of `ep_rank` and `ep_size` is given.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        policies: LoadPolicies | None = None,
        strict: bool | None = None,
        dtype: DTypePolicy | None = None,
        padding: PaddingPolicy | None = None,
        trust_pickle: bool = False,
        **options: Unpack[LayoutOptions],
    ) -> None:
        self._table = LayoutTable.of(model, optimizer=optimizer, **options)
        missing = None if strict is None else ("error" if strict else "report")
        given = policies if policies is not None else LoadPolicies()
        self._policies = given.changed(missing=missing, dtype=dtype, padding=padding)
        self._trust_pickle = trust_pickle
        self.report = LoadReport()
        self._root: dict[str, Any] = {}
        self._saved = Saved(Metadata({}))
        self._begin()

    def _begin(self) -> None:
        """Starts with nothing asked for; also lets go of the last load's tensors."""
        self._delivery = Delivery(self._root, self.report)
        self._requests = Requests(
            self._saved, self._table.grids, self._policies, self.report, self._delivery
        )
        self._twins = Twins()
        self._apart: set[tuple[int | None, torch.Size]] = set()  # items that no view can show
        self._left = 0

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state dict to fill; see `torch.distributed.checkpoint.LoadPlanner`."""
        if metadata is None:
            raise CheckpointError("the storage reader gave no metadata; is this a checkpoint?")
        self._root = state_dict
        self._saved = Saved(metadata)
        self.report = LoadReport()
        self._begin()

    def create_local_plan(self) -> LoadPlan:
        """Returns the rank's read items, in a plan that travels without them.

        Raises:
            CheckpointError: With every key that is missing, has another size or dtype, or is not
                covered by the checkpoint's chunks. Nothing has been read then.
        """
        with without_gc():
            snapshot = Snapshot(self._root)
            raw = snapshot.take_values()
            if self._policies.meta != "error":
                made = materialize(self._root, snapshot.paths, raw, self._policies.meta)
                self.report.materialized += map(key_of, made)
            named = self._named(snapshot.paths, raw)
            holdings = sort_values(self._table, [(n.path, raw[n.number]) for n in named])
            values = [raw[n.number] for n in named]
            shared = shared_memory(values)
            self._twins = Twins(shared, meeting_memory(values, shared))
            others = (*holdings.extras, *holdings.described, *holdings.per_rank)
            self._requests.tell_apart(
                holdings.held, holdings.chunks, (key_of(path) for _, path in others)
            )
            live = numberings(snapshot.paths, raw, self._table, self._table.ids)
            self._requests.find_numbered(
                holdings.held,
                holdings.chunks,
                {self._table.names.prefix(section): found for section, found in live.items()},
                Numbering(self._table.ids, self._table.group_sizes),
            )
            numbered = self._requests.numbered.values()
            for held in holdings.held:
                value, path = (
                    raw[named[held.number].number],
                    snapshot.paths[named[held.number].number],
                )
                chunk = holdings.chunks[held.kind.chunk]
                if held.kind.role == SHARD:
                    ask = partial(self._requests.shard, held, grids=chunk.grids)
                    if held.number in self._twins:
                        form = self._requests.form(held, chunk.grids)
                        self._twins.add(held.number, value, form.keys, form.found, ask)
                    else:
                        self._requests.shard(held, value, chunk.grids)
                else:
                    forms = names_of(held.layout, chunk.grids.of(held.layout.family))
                    first = self._twins.first(held.number)
                    self._requests.scalar(held, forms, path, value, first)
            for number, path in holdings.extras:
                key, value = key_of(path), raw[named[number].number]
                if number in self._twins:
                    ask = partial(self._requests.value, key, ())  # filled in place
                    self._twins.add(number, value, [key], [self._saved.key(key)], ask)
                else:
                    self._requests.value(key, snapshot.paths[named[number].number], value)
            self._twins.plan(self._saved, self.report)
            for number, path in holdings.described:
                self._requests.described(key_of(path), raw[named[number].number])
            for number, path in holdings.per_rank:
                key, value = key_of(path), raw[named[number].number]
                self._requests.per_rank(key, value, Seat(key, value, self._table.grids))
            asked = {key for state in numbered for key in state.wanted()}
            for group in self._requests.groups:
                for key in group.wanted() if isinstance(group, GroupLoad | FlattenedGroups) else ():
                    if key not in asked:
                        self._requests.group_value(group, key)
        self._requests.check()
        known = [*self.report.loaded, *self._requests.empty]
        counts = loaded_parts(known, snapshot.paths, raw)
        self.report.skipped = partial(skipped_parts, self._saved.stored, counts)
        self.report.unexpected = partial(
            unexpected_keys,
            self._saved.stored,
            known,
            holdings.held,
            holdings.chunks,
            [g.prefix for g in self._requests.groups if isinstance(g, GroupLoad)],
            self._requests.rank_prefixes,
            counts,
            [state.named for state in numbered],
        )
        empty = self._requests.empty and unfilled(
            self._requests.empty,
            self.report.unexpected,
            holdings.chunks,
            any(chunk.layouts for chunk in self._table.chunks),
        )
        if empty and self._policies.missing == "error":
            raise MissingKeyError(
                summary(
                    f"{key}: empty here, but the checkpoint has {len(keys)} values below it, such "
                    f"as {keys[0]} ({self._table.grids.facts()})"
                    for key, keys in empty.items()
                )
                + " Build the state before loading: torch's get_optimizer_state_dict does so for an "
                "optimizer that has not stepped. Or pass strict=False to go on without these values."
            )
        if self._policies.unexpected == "error" and self.report.unexpected:
            raise UnexpectedKeyError(
                summary(f"{key}: nothing asks for it" for key in self.report.unexpected)
                + " Ask for these keys of the checkpoint too, or pass the policy "
                "unexpected='report'."
            )
        return QuietLoadPlan(items=self._requests.items)

    def _named(self, paths: list[Path], raw: list[Any]) -> list[Named]:
        """Returns the values by parameter name; lists of parameter groups go to `_groups`."""
        found = group_members(paths, raw, self._table, self._table.ids, self._saved_by_name)
        for section, members in found.items():
            holder = reach(self._root, section)
            prefix = key_of(self._table.names.on_disk((*section, "param_groups")))
            listed = [holder["param_groups"][number] for number in range(len(members))]
            groups = GroupLoad(section, listed, members, prefix, self._saved)
            self._requests.groups.append(groups)
        taken = [
            (*g.section, "param_groups") for g in self._requests.groups if isinstance(g, GroupLoad)
        ]
        everything = by_name(paths, raw, self._table, self._table.ids)
        if everything is None:
            return [Named(path, number) for number, path in enumerate(paths)]
        return [named for named in everything if not any(named.path[: len(t)] == t for t in taken)]

    def _saved_by_name(self, section: Path, names: Sequence[str]) -> bool:
        """Whether the checkpoint has the options of any of these parameters under its name."""
        prefix = key_of(self._table.names.on_disk((*section, "param_groups")))
        groups = reach(self._root, section)["param_groups"]
        options = {option for number in range(len(groups)) for option in groups[number]}
        stored = self._saved.stored
        return f"{prefix}.0.params" not in stored and any(
            f"{prefix}.{name}.{option}" in stored for name in names for option in options
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are: every rank has planned for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Returns the plan with this rank's items, for the storage reader."""
        self._left = len(self._requests.items)
        if not self._left:
            self._finish()
        return dataclasses.replace(central_plan, items=self._requests.items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns the tensor of `read_item.lengths` that the reader fills, in place if possible."""
        target = self._target(read_item)
        assert target.tensor is not None  # read items of tensors have one
        part, local = self._part(target, read_item), local_tensor(target.tensor)
        if is_all(local, part):
            return local
        shown = view(target.tensor, part)
        if shown is not None:
            return shown
        self._apart.add((read_item.dest_index.index, read_item.dest_offsets))
        return torch.empty(read_item.lengths, dtype=local.dtype, device=local.device)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Takes the tensor that `resolve_tensor` gave, filled."""
        target = self._target(read_item)
        assert target.tensor is not None  # read items of tensors have one
        if self._apart and (read_item.dest_index.index, read_item.dest_offsets) in self._apart:
            write_back(target.tensor, self._part(target, read_item), tensor)
        if target.path or target.group is not None or target.as_number:
            self._delivery.deliver(target, target.tensor)
        self._done()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes the stored bytes of a Python value and puts it into the state dict."""
        target = self._target(read_item)
        self._receive(target, from_bytes(target.key, value, self._trust_pickle, _like(target)))

    def load_value(self, read_item: ReadItem, read: Callable[[Any], Any]) -> None:
        """Takes a Python value from a storage reader that has no pickles.

        Args:
            read_item: The item.
            read: Returns the value, given the one that it replaces.
        """
        target = self._target(read_item)
        self._receive(target, read(_like(target)))

    def _receive(self, target: Target, loaded: Any) -> None:
        if target.holder is not None:
            target.holder.value = loaded
        elif target.group is not None:
            target.group.receive(target.key, loaded)
        elif isinstance(target.scalar, torch.Tensor):
            self._delivery.set_number(target, loaded, rounds=True)
        else:
            self._delivery.set(target.path, loaded)
        self._done()

    def _target(self, read_item: ReadItem) -> Target:
        number = read_item.dest_index.index
        if number is None or not 0 <= number < len(self._requests.targets):
            raise CheckpointError(
                f"{read_item.dest_index.fqn}: not an item of this rank's plan. A storage reader "
                "must hand back the items that it was given."
            )
        return self._requests.targets[number]

    @staticmethod
    def _part(target: Target, read_item: ReadItem) -> Box:
        box = target.box
        assert box is not None  # read items of tensors have one
        if read_item.lengths == box.sizes:
            return box
        start = box.start + sum(
            o * s for o, s in zip(read_item.dest_offsets, box.strides, strict=True)
        )
        return Box(box.offsets, tuple(read_item.lengths), start, box.strides)

    def _done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        """Completes what needs all reads: padding and parameter groups; lets go of tensors."""
        for key, tensor, boxes in self._requests.pads:
            self.report.padded.append(key)
            for box in boxes if self._policies.padding == "zero" else ():
                shown = view(tensor, box)
                if shown is None:
                    local = local_tensor(tensor)
                    zeros = torch.zeros(box.sizes, dtype=local.dtype, device=local.device)
                    write_back(tensor, box, zeros)
                else:
                    shown.zero_()
        self._twins.check()
        for group in self._requests.groups:
            missing = group.finish(self._policies.missing == "error")
            if missing and self._policies.missing == "error":
                raise MissingKeyError(
                    summary(f"{key}: not in the checkpoint." for key in missing)
                    + " Pass strict=False to load what there is."
                )
            self.report.missing += missing
            if isinstance(group, GroupLoad):
                self.report.missing += group.kept
        self._root, self._saved = {}, Saved(Metadata({}))
        self._begin()


def _like(target: Target) -> Any:
    """Returns the value that a target replaces."""
    return target.scalar if target.holder is None else target.holder.value


class QuietLoadPlan(LoadPlan):
    """A plan that keeps its items when it is sent: they stay with the rank that made them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadPlan, ([], self.storage_data, self.planner_data)
