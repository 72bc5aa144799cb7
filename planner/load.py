"""The load planner: the same layouts as the save, the other way round.

| name | is |
|---|---|
| `LayoutAwareLoadPlanner` | the planner for `dcp.load` |
"""

import dataclasses
import io
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from shardplan.layouts import CheckpointError, Grids, Layout, LayoutProvider, Unpad
from shardplan.layouts.errors import summary
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Box, contiguous_strides
from shardplan.layouts.variants import variants

from .compat import local_tensor
from .conversion import DTypePolicy, conversion_fault, exact_number
from .entries import Path, Place, key_of, put, reach
from .groups import EqualValues, GroupLoad
from .holdings import Holding, sort_values
from .leftover import unexpected_keys
from .manifest import SHARD
from .materialize import materialize
from .optimizer import Forms, Named, by_name, group_members, names_of, optimizer_names
from .policies import LoadPolicies, PaddingPolicy
from .reading import Saved
from .report import LoadReport
from .snapshot import Snapshot
from .table import build_table
from .values import from_bytes
from .views import view, write_back
from .without_gc import without_gc


@dataclasses.dataclass(slots=True)
class _Target:
    """Where what is read for one key goes.

    Attributes:
        key: The key that is read.
        path: Path in the state dict, for values that are set rather than filled.
        tensor: The tensor to fill, None for a Python value.
        box: The requested box with its view of the tensor's storage.
        group: What takes the value instead: parameter groups, or values that must be equal.
    """

    key: str
    path: Path
    tensor: torch.Tensor | None
    box: Box | None = None
    group: GroupLoad | EqualValues | None = None
    scalar: Any = None
    as_number: bool = False


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
        model: As for `LayoutAwareSavePlanner`.
        pg_collection: Process groups of the model; by default those it carries.
        grid: Plain integers instead of process groups.
        layouts: Providers; the built-in ones and those of installed packages if not given.
        optimizer_layouts: Storage providers for optimizer state that is cut otherwise than its
            parameter.
        optimizer: The optimizer of a raw `optimizer.state_dict()`.
        ep_rank: Expert-parallel rank instead of the collection's; needs `ep_size`.
        ep_size: Expert-parallel size instead of the collection's; needs `ep_rank`.
        policies: What to do where checkpoint and state dict differ; see `LoadPolicies`.
        strict: True for the policy `missing='error'`, False for `missing='report'`.
        dtype: The policy `dtype`.
        padding: The policy `padding`.
        trust_pickle: Whether stored Python objects that are no plain data may be unpickled;
            that can run code from the checkpoint.

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
        pg_collection: Any = None,
        grid: Grids | None = None,
        layouts: Iterable[LayoutProvider] | None = None,
        optimizer_layouts: Iterable[LayoutProvider] = (),
        optimizer: torch.optim.Optimizer | None = None,
        ep_rank: int | None = None,
        ep_size: int | None = None,
        policies: LoadPolicies | None = None,
        strict: bool | None = None,
        dtype: DTypePolicy | None = None,
        padding: PaddingPolicy | None = None,
        trust_pickle: bool = False,
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
        missing = None if strict is None else ("error" if strict else "report")
        given = policies if policies is not None else LoadPolicies()
        self._policies = given.changed(missing=missing, dtype=dtype, padding=padding)
        self._trust_pickle = trust_pickle
        self.report = LoadReport()
        self._saved: Saved | None = None
        self._root: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._targets: list[_Target] = []
        self._items: list[ReadItem] = []
        self._groups: list[GroupLoad | EqualValues] = []
        self._faults: list[str] = []
        self._pads: list[tuple[str, torch.Tensor, list[Box]]] = []
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
        self._reset()

    def create_local_plan(self) -> LoadPlan:
        """Returns the rank's read items, in a plan that travels without them.

        Raises:
            CheckpointError: With every key that is missing, has another size or dtype, or is not
                covered by the checkpoint's chunks. Nothing has been read then.
        """
        assert self._saved is not None  # set_up_planner came before
        with without_gc():
            snapshot = Snapshot(self._root)
            raw = snapshot.take_values()
            if self._policies.meta != "error":
                made = materialize(self._root, snapshot.paths, raw, self._policies.meta)
                self.report.materialized += map(key_of, made)
            named = self._named(snapshot.paths, raw)
            holdings = sort_values(self._table, [(n.path, raw[n.number]) for n in named])
            for held in holdings.held:
                value, path = (
                    raw[named[held.number].number],
                    snapshot.paths[named[held.number].number],
                )
                chunk = holdings.chunks[held.kind.chunk]
                if held.kind.role == SHARD:
                    self._plan_shard(held, value, chunk.grids)
                else:
                    forms = names_of(held.layout, chunk.grids.of(held.layout.family))
                    self._plan_scalar(held.kind.place, forms, path, value)
            for number, path in holdings.extras:
                self._plan_value(
                    key_of(path), snapshot.paths[named[number].number], raw[named[number].number]
                )
            for group in self._groups:
                for key in group.wanted() if isinstance(group, GroupLoad) else ():
                    self._plan_group_value(group, key)
        self._check()
        self.report.unexpected = unexpected_keys(
            self._saved.stored,
            self.report.loaded,
            holdings.held,
            holdings.chunks,
            [g.prefix for g in self._groups if isinstance(g, GroupLoad)],
        )
        if self.report.unexpected and self._policies.unexpected == "error":
            raise CheckpointError(
                summary(f"{key}: nothing asks for it" for key in self.report.unexpected)
                + " Ask for these keys of the checkpoint too, or pass the policy "
                "unexpected='report'."
            )
        return QuietLoadPlan(items=self._items)

    def _named(self, paths: list[Path], raw: list[Any]) -> list[Named]:
        """Returns the values by parameter name; lists of parameter groups go to `_groups`."""
        assert self._saved is not None  # set_up_planner came before
        for section, members in group_members(paths, raw, self._table, self._ids).items():
            holder = reach(self._root, section)
            prefix = key_of(self._table.names.on_disk((*section, "param_groups")))
            groups = GroupLoad(section, holder["param_groups"], members, prefix, self._saved)
            self._groups.append(groups)
        taken = [(*g.section, "param_groups") for g in self._groups if isinstance(g, GroupLoad)]
        everything = by_name(paths, raw, self._table, self._ids)
        if everything is None:
            return [Named(path, number) for number, path in enumerate(paths)]
        return [named for named in everything if not any(named.path[: len(t)] == t for t in taken)]

    def _plan_shard(self, held: Holding, tensor: torch.Tensor, grids: Grids) -> None:
        """Plans the reads that fill what a rank holds of a parameter."""
        saved = self._saved
        assert saved is not None and held.kind.dtype is not None  # shards are tensors
        grid = grids.of(held.layout.family)
        for layout in variants(held.layout, grid):
            frames = evaluate(layout.stages, grid, layout.fqn)
            keys = [held.kind.place.key(layout.key(frame)) for frame in frames]
            found = [saved.key(key) for key in keys]
            if any(found):
                break
        else:
            layout = held.layout
            frames = evaluate(layout.stages, grid, layout.fqn)
            keys = [held.kind.place.key(layout.key(frame)) for frame in frames]
            found = [None] * len(keys)
        padding = {s.dim for s in layout.stages if isinstance(s, Unpad)}
        for frame, key, name in zip(frames, keys, found, strict=True):
            if name is None:
                self.report.missing.append(key)
                continue
            stored = saved.stored[name]
            if not self._fits(name, stored, frame.shape, held.kind.dtype, padding, grids):
                continue
            self.report.loaded.append(name)
            for box in frame.boxes:
                self._read_box(name, tensor, box, grids)
        if padding and not any(name is None for name in found):
            self._pad(keys[0], layout, tensor, [b for f in frames for b in f.boxes], grids)

    def _fits(
        self,
        key: str,
        stored: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        padding: set[int],
        grids: Grids,
    ) -> bool:
        """Checks a stored tensor's kind, shape and dtype; what does not fit is a fault."""
        if isinstance(stored, BytesStorageMetadata):
            self._faults.append(
                f"{key}: the checkpoint holds a Python value, the state dict a tensor of shape "
                f"{shape} ({grids.facts()}). Load it into a value of the kind that was saved."
            )
            return False
        assert self._saved is not None  # set_up_planner came before
        size = tuple(stored.size)
        padded = padding if key not in self._saved.unpadded else ()
        same = len(size) == len(shape) and all(
            a == b or (d in padded and a > b)
            for d, (a, b) in enumerate(zip(size, shape, strict=True))
        )
        if not same:
            hint = "Is it another model"
            hint += ", or a padded vocabulary? Then pass VocabularyPadding({name: true size})."
            if padding:
                hint = "The true sizes of the vocabulary differ."
            self._faults.append(
                f"{key}: the checkpoint has shape {size}, this model needs {shape} "
                f"({grids.facts()}). {hint}"
            )
            return False
        return self._converts(key, stored.properties.dtype, dtype)

    def _converts(self, key: str, saved: torch.dtype, wanted: torch.dtype) -> bool:
        fault = conversion_fault(saved, wanted, self._policies.dtype)
        if fault is not None:
            self._faults.append(f"{key}: saved as {saved}, wanted as {wanted}: {fault}.")
            return False
        if saved != wanted:
            self.report.converted[key] = (str(saved), str(wanted))
        return True

    def _read_box(self, key: str, tensor: torch.Tensor, box: Box, grids: Grids) -> None:
        assert self._saved is not None  # set_up_planner came before
        meetings, faults = self._saved.meetings(key, box.offsets, box.sizes)
        if faults:
            self._faults += (
                f"{key}: {fault.replace('is covered by no chunk', 'not covered by the checkpoint')}"
                f" ({grids.facts()}). The checkpoint is incomplete, or holds one rank's part only."
                for fault in faults
            )
            return
        number = len(self._targets)
        self._targets.append(_Target(key, (), tensor, box))
        dest = MetadataIndex(key, box.offsets, number)
        for meeting in meetings:
            self._items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    dest,
                    torch.Size(meeting.dest_offsets),
                    MetadataIndex(key, meeting.chunk_offsets, meeting.chunk),
                    torch.Size(meeting.storage_offsets),
                    torch.Size(meeting.sizes),
                )
            )

    def _pad(
        self, key: str, layout: Layout, tensor: torch.Tensor, kept: list[Box], grids: Grids
    ) -> None:
        """Remembers the rows that padding leaves without a value on disk."""
        stages = tuple(s for s in layout.stages if not isinstance(s, Unpad))
        whole = evaluate(stages, grids.of(layout.family), layout.fqn)
        sizes = {s.dim: s.size for s in layout.stages if isinstance(s, Unpad)}
        pads = []
        for box in (b for frame in whole for b in frame.boxes):
            for dim, size in sizes.items():
                part = box.narrow(dim, size, box.offsets[dim] + box.sizes[dim])
                if part is not None:
                    pads.append(part)
        if pads:
            self._pads.append((key, tensor, pads))

    def _plan_scalar(self, place: Place, forms: Forms, path: Path, value: Any) -> None:
        """Plans the read of a parameter's scalar, under the names that the checkpoint has."""
        saved = self._saved
        assert saved is not None  # set_up_planner came before
        written = [[place.key(name) for name in names] for names in forms]
        keys = next((f for f in written if all(saved.key(k) for k in f)), written[0])
        if len(keys) == 1 or not all(saved.key(key) for key in keys):
            for key in keys:
                self._plan_value(key, path, value)
            return
        target = _Target(keys[0], path, None, scalar=value)
        one = EqualValues(lambda found: self._settle(target, found))
        self._groups.append(one)
        for key in keys:
            self._plan_group_value(one, saved.key(key) or key)

    def _plan_value(self, key: str, path: Path, value: Any) -> None:
        """Plans the read of a value that every rank loads whole."""
        saved = self._saved
        assert saved is not None  # set_up_planner came before
        name = saved.key(key)
        if name is None:
            self.report.missing.append(key)
            return
        stored = saved.stored[name]
        if isinstance(stored, BytesStorageMetadata):
            tensor = value if isinstance(value, torch.Tensor) else None
            if tensor is not None and local_tensor(tensor).numel() != 1 and not _is_blob(path):
                self._faults.append(
                    f"{name}: the checkpoint holds a Python value, the state dict a tensor of "
                    f"shape {tuple(tensor.shape)}. Load it into a value of the kind that was saved."
                )
                return
            self._request(_Target(name, path, None, scalar=value), None)
            return
        target = self._value_target(name, path, value, stored)
        if target is not None:
            self._request(target, stored)

    def _value_target(
        self, key: str, path: Path, value: Any, stored: TensorStorageMetadata
    ) -> _Target | None:
        """Returns where a whole stored tensor goes: into a tensor, a number, or a new tensor."""
        size, dtype = tuple(stored.size), stored.properties.dtype
        box = Box((0,) * len(size), size, 0, contiguous_strides(size))
        if isinstance(value, torch.Tensor):
            local = local_tensor(value)
            one = local.numel() == 1 and math.prod(size) == 1
            if tuple(local.shape) == size and dtype == local.dtype:
                return _Target(key, path, value, box)
            if one:
                return _Target(
                    key, path, torch.empty(size, dtype=dtype), box, scalar=value, as_number=True
                )
            if _is_blob(path):
                self.report.replaced.append(key)
                return _Target(key, path, torch.empty(size, dtype=dtype), box, scalar=value)
            if tuple(local.shape) != size:
                self._faults.append(
                    f"{key}: the checkpoint has shape {size}, the state dict {tuple(local.shape)}, "
                    "and no layout explains it. Pass the model, or a tensor of the saved shape."
                )
                return None
            return (
                _Target(key, path, value, box) if self._converts(key, dtype, local.dtype) else None
            )
        if value is None:
            return _Target(key, path, torch.empty(size, dtype=dtype), box)
        if math.prod(size) == 1 and isinstance(value, int | float | bool):
            return _Target(
                key, path, torch.empty(size, dtype=dtype), box, scalar=value, as_number=True
            )
        self._faults.append(
            f"{key}: the checkpoint holds a tensor of shape {size}, the state dict a "
            f"{type(value).__name__}. Load it into a value of the kind that was saved."
        )
        return None

    def _plan_group_value(self, group: GroupLoad | EqualValues, key: str) -> None:
        assert self._saved is not None  # set_up_planner came before
        stored = self._saved.stored[key]
        if isinstance(stored, BytesStorageMetadata):
            self._request(_Target(key, (), None, group=group), None)
            return
        size = tuple(stored.size)
        box = Box((0,) * len(size), size, 0, contiguous_strides(size))
        tensor = torch.empty(size, dtype=stored.properties.dtype)
        self._request(_Target(key, (), tensor, box, group=group), stored)

    def _request(self, target: _Target, stored: TensorStorageMetadata | None) -> None:
        """Adds the read items of a target that is loaded whole."""
        self.report.loaded.append(target.key)
        if stored is not None and target.tensor is not None and target.box is not None:
            before = len(self._items)
            self._read_box(target.key, target.tensor, target.box, self._table.grids)
            if len(self._targets) and self._targets[-1].key == target.key:
                self._targets[-1] = target
            if len(self._items) == before and not math.prod(target.box.sizes):
                self._deliver(target, target.tensor)
            return
        zero = torch.Size((0,))
        dest = MetadataIndex(target.key, None, len(self._targets))
        self._targets.append(target)
        self._items.append(
            ReadItem(LoadItemType.BYTE_IO, dest, zero, MetadataIndex(target.key), zero, zero)
        )

    def _check(self) -> None:
        """Raises what planning found, all at once, before anything is read."""
        tolerated = [key for key in self.report.missing if _is_blob((key,))]
        missing = [key for key in self.report.missing if not _is_blob((key,))]
        facts = self._table.grids.facts()
        if (missing or tolerated) and not self.report.loaded:
            raise CheckpointError(
                f"none of the {len(self.report.missing)} requested keys is in the checkpoint; the "
                f"first is {self.report.missing[0]} ({facts}). Does the state dict have the "
                f"sections that were saved? The checkpoint has {self._sample()}."
            )
        if missing and self._policies.missing == "error":
            self._faults += (f"{key}: not in the checkpoint ({facts})" for key in missing)
        if self._faults:
            hint = (
                " Pass strict=False to load what there is."
                if missing and self._policies.missing == "error"
                else ""
            )
            raise CheckpointError(summary(self._faults) + hint)

    def _sample(self) -> str:
        assert self._saved is not None  # set_up_planner came before
        keys = list(self._saved.stored)
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are: every rank has planned for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Returns the plan with this rank's items, for the storage reader."""
        self._left = len(self._items)
        if not self._left:
            self._finish()
        return dataclasses.replace(central_plan, items=self._items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns the tensor of `read_item.lengths` that the reader fills, in place if possible."""
        target = self._target(read_item)
        assert target.tensor is not None  # read items of tensors have one
        shown = view(target.tensor, self._part(target, read_item))
        if shown is not None:
            return shown
        local = local_tensor(target.tensor)
        return torch.empty(read_item.lengths, dtype=local.dtype, device=local.device)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Takes the tensor that `resolve_tensor` gave, filled."""
        target = self._target(read_item)
        assert target.tensor is not None  # read items of tensors have one
        part = self._part(target, read_item)
        if view(target.tensor, part) is None:
            write_back(target.tensor, part, tensor)
        self._deliver(target, target.tensor)
        self._done()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes the stored bytes of a Python value and puts it into the state dict."""
        target = self._target(read_item)
        loaded = from_bytes(target.key, value, self._trust_pickle, target.scalar)
        if target.group is not None:
            target.group.receive(target.key, loaded)
        elif isinstance(target.scalar, torch.Tensor):
            self._set_number(target, loaded)
        else:
            self._set(target.path, loaded)
        self._done()

    def _target(self, read_item: ReadItem) -> _Target:
        number = read_item.dest_index.index
        if number is None or not 0 <= number < len(self._targets):
            raise CheckpointError(
                f"{read_item.dest_index.fqn}: not an item of this rank's plan. A storage reader "
                "must hand back the items that it was given."
            )
        return self._targets[number]

    @staticmethod
    def _part(target: _Target, read_item: ReadItem) -> Box:
        box = target.box
        assert box is not None  # read items of tensors have one
        start = box.start + sum(
            o * s for o, s in zip(read_item.dest_offsets, box.strides, strict=True)
        )
        return Box(box.offsets, tuple(read_item.lengths), start, box.strides)

    def _deliver(self, target: _Target, tensor: torch.Tensor) -> None:
        """Passes a tensor that was read for something else than itself on to its place."""
        if target.group is not None:
            target.group.receive(target.key, tensor)
        elif target.as_number:
            self._set_number(target, tensor.item())
        elif target.path and _get(self._root, target.path) is not tensor:
            self._set(target.path, tensor)

    def _set_number(self, target: _Target, value: Any) -> None:
        """Puts a number where the state dict has one of another kind, if it stays the same."""
        wanted = target.scalar
        kind = wanted.dtype if isinstance(wanted, torch.Tensor) else type(wanted)
        try:
            number = exact_number(value, kind)
        except (ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{target.key}: {error}. Load it into a value of the kind that was saved."
            ) from None
        self.report.converted[target.key] = (repr(value), str(kind))
        if isinstance(wanted, torch.Tensor):
            local_tensor(wanted).detach().fill_(number)
        else:
            self._set(target.path, number)

    def _settle(self, target: _Target, value: Any) -> None:
        """Puts a value that was read apart where it belongs, in the kind that is there."""
        wanted = target.scalar
        if isinstance(value, torch.Tensor):
            if isinstance(wanted, torch.Tensor) and value.dtype == wanted.dtype:
                local = local_tensor(wanted).detach()
                local.copy_(value.reshape(local.shape))
                return
            value = value.item()
        if isinstance(wanted, torch.Tensor):
            self._set_number(target, value)
        else:
            self._set(target.path, value)

    def _set(self, path: Path, value: Any) -> None:
        put(self._root, path, value)

    def _done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        """Completes what needs all reads: padding and parameter groups; lets go of tensors."""
        for key, tensor, boxes in self._pads:
            self.report.padded.append(key)
            for box in boxes if self._policies.padding == "zero" else ():
                shown = view(tensor, box)
                if shown is None:
                    local = local_tensor(tensor)
                    zeros = torch.zeros(box.sizes, dtype=local.dtype, device=local.device)
                    write_back(tensor, box, zeros)
                else:
                    shown.zero_()
        for group in self._groups:
            missing = group.finish(self._policies.missing == "error")
            if missing and self._policies.missing == "error":
                raise CheckpointError(
                    summary(f"{key}: not in the checkpoint" for key in missing)
                    + " Pass strict=False to load what there is."
                )
            self.report.missing += missing
        self._reset()
        self._root = {}


class QuietLoadPlan(LoadPlan):
    """A plan that keeps its items when it is sent: they stay with the rank that made them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadPlan, ([], self.storage_data, self.planner_data)


def _get(root: Any, path: Path) -> Any:
    try:
        return reach(root, path)
    except (KeyError, IndexError, TypeError):
        return None


def _is_blob(path: Path) -> bool:
    """Whether a value is an opaque blob of any size: a module's `_extra_state`."""
    return str(path[-1]).rpartition(".")[2] == "_extra_state"
