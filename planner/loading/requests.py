"""What a rank asks a checkpoint for: read items, and every fault found while planning them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardplan.layouts import (
    CheckpointError,
    DtypeMismatchError,
    Grid,
    Grids,
    IncompleteCheckpointError,
    Layout,
    MissingKeyError,
    ShapeMismatchError,
    Unpad,
)
from shardplan.layouts.errors import summary
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Box, Frame, contiguous_strides
from shardplan.layouts.stages import Stage
from shardplan.layouts.variants import variants

from ..compat import local_tensor
from ..planning.holdings import Holding
from ..planning.manifest import SHARD
from ..planning.optimizer import Forms, Numbering, names_of
from ..planning.table import Chunk
from ..policies import LoadPolicies
from ..report import LoadReport
from ..state.conversion import PACKED, conversion_fault
from ..state.described import describe, part_of
from ..state.entries import Path, Place
from ..state.per_rank import PerRank, Seat, indices_saved
from ..state.storable import overlaps
from .delivery import Delivery, Target
from .groups import EqualValues, FlattenedGroups, GroupLoad
from .numbered import NumberedState, numbers_below, optimizer_prefix
from .per_rank import choose
from .reading import Saved


class Form(NamedTuple):
    """One of the forms that a parameter may have on disk.

    Attributes:
        layout: The layout of that form.
        frames: The tensors that it consists of.
        keys: Their keys.
        found: The checkpoint's names of them, None for those that it lacks.
    """

    layout: Layout
    frames: tuple[Frame, ...]
    keys: list[str]
    found: list[str | None]


class Requests:
    """The read items of one rank's load.

    Args:
        saved: The checkpoint.
        grids: The rank's grids, for errors.
        policies: What may be missing, converted, padded.
        report: Where all of that is written down.
        delivery: Takes values that were read apart.

    Attributes:
        items: The read items; the number in an item's `dest_index` is that of its target.
        targets: Where what is read goes.
        groups: Parameter groups and scalars that are put together once all is read.
        numbered: Optimizer states that the checkpoint has by number, by what is before their keys.
        pads: Key, tensor and boxes of padding, which nothing on disk fills.
        faults: What does not fit.
        empty: Keys of empty containers that the checkpoint does not have as such.
        rank_prefixes: Keys of values of which every rank has its own, up to the index.
    """

    def __init__(
        self,
        saved: Saved,
        grids: Grids,
        policies: LoadPolicies,
        report: LoadReport,
        delivery: Delivery,
    ) -> None:
        self._saved = saved
        self._grids = grids
        self._policies = policies
        self._report = report
        self._delivery = delivery
        self.items: list[ReadItem] = []
        self.targets: list[Target] = []
        self.groups: list[GroupLoad | FlattenedGroups | EqualValues | NumberedState] = []
        self._equal: dict[int | None, EqualValues] = {}
        self._flat: dict[str, FlattenedGroups] = {}
        self.numbered: dict[str, NumberedState] = {}
        self._lacking: dict[str, str] = {}
        self._unknown: list[str] = []
        self.pads: list[tuple[str, torch.Tensor, list[Box]]] = []
        self.faults: list[str] = []
        self._kind: type[CheckpointError] = CheckpointError
        self.empty: list[str] = []
        self.rank_prefixes: list[str] = []
        self._frames: dict[tuple[int, Grid], tuple[tuple[Stage, ...], tuple[Frame, ...]]] = {}

    def tell_apart(
        self, held: Sequence[Holding], chunks: Sequence[Chunk], others: Iterable[str]
    ) -> None:
        """Finds keys that are equal but for wrappers' tokens under their exact names only."""
        saved, others = self._saved, list(others)
        named = [(h, h.kind.place.key(h.layout.fqn)) for h in held]
        saved.tell_apart([*(key for _, key in named), *others])
        keys = []
        for holding, key in named:
            if saved.rivals(key):
                grid = chunks[holding.kind.chunk].grids.of(holding.layout.family)
                place = holding.kind.place
                for layout in variants(holding.layout, grid):
                    frames = evaluate(layout.stages, grid, layout.fqn)
                    keys += [place.key(layout.key(frame)) for frame in frames]
                for names in names_of(holding.layout, grid):
                    keys += map(place.key, names)
        saved.tell_apart([*keys, *(key for key in others if saved.rivals(key))])

    def find_numbered(
        self,
        held: Sequence[Holding],
        chunks: Sequence[Chunk],
        live: Mapping[str, Numbering],
        given: Numbering,
    ) -> None:
        """Finds the optimizer states that the checkpoint has by number and not by name.

        Args:
            held: What this rank asks for.
            chunks: The model's chunks.
            live: How the state dict's own optimizer states number their parameters, by what is
                before their keys.
            given: How the given optimizer does, for those that do not.
        """
        prefixes = {place: optimizer_prefix(place) for place in {h.kind.place for h in held}}
        slots: dict[str, list[Holding]] = {}
        for holding in held:
            prefix = prefixes[holding.kind.place]
            if prefix is not None:
                slots.setdefault(prefix, []).append(holding)
        loads = {g.prefix: g for g in self.groups if isinstance(g, GroupLoad)}
        for prefix, holdings in slots.items():
            if not self._by_number(prefix, holdings, chunks):
                continue
            numbering = live.get(prefix, given)
            if not numbering.names:
                self._unknown.append(prefix)
                continue
            groups = loads.get(f"{prefix}param_groups.")
            state = NumberedState(prefix, numbering, self._saved, groups)
            self.numbered[prefix] = state
            for fault in state.faults():
                self.fault(CheckpointError, fault)
            for key in state.wanted():  # first, so that nothing is filled if they do not fit
                self.group_value(state, key)

    def _by_number(self, prefix: str, held: Sequence[Holding], chunks: Sequence[Chunk]) -> bool:
        """Whether the checkpoint has numbers where it could have any of some values by name."""
        asked = False
        for holding in held:
            place, grids = holding.kind.place, chunks[holding.kind.chunk].grids
            if holding.kind.role == SHARD:
                form = self.form(holding, grids)
                found = any(form.found)
                asked = asked or bool(form.keys)
            else:
                names = names_of(holding.layout, grids.of(holding.layout.family))
                found = any(all(map(self._saved.key, map(place.key, f))) for f in names)
                asked = True
            if found:  # almost always the first one
                return False
        return asked and bool(numbers_below(self._saved, f"{prefix}state."))

    def _number_key(self, held: Holding, key: str) -> str | None:
        """Returns the checkpoint's key by number for one by name, None if it has none."""
        prefix = optimizer_prefix(held.kind.place) if self.numbered else None
        state = self.numbered.get(prefix) if prefix is not None else None
        if state is None:
            return None
        place, layout = held.kind.place, held.layout
        # A DTensor that is cut otherwise than its parameter has a layout of another fqn.
        numbered = state.key(place, layout.fqn) or state.key(place, layout.name)
        if numbered is None:
            return None
        if numbered not in self._saved.stored:
            self._lacking[key] = numbered
            return None
        self._report.numbered[numbered] = key
        return numbered

    def form(self, held: Holding, grids: Grids) -> Form:
        """Returns the form of a parameter that the checkpoint has, its own if it has none."""
        grid = grids.of(held.layout.family)
        forms = (self._form(form, held.kind.place, grid) for form in variants(held.layout, grid))
        own = next(forms)
        tried = [own]
        while not any(tried[-1].found):
            form = next(forms, None)
            if form is None:
                return self._numbered_form(held, tried) if self.numbered else own
            tried.append(form)
        return tried[-1]

    def _numbered_form(self, held: Holding, forms: Sequence[Form]) -> Form:
        """Returns the form of a parameter that the checkpoint has whole, by number."""
        name = self._number_key(held, forms[0].keys[0]) if forms[0].keys else None
        if name is None:
            return forms[0]
        stored = self._saved.stored[name]
        size = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None
        whole = [f for f in forms if len(f.frames) == 1]
        form = next((f for f in whole if f.frames[0].shape == size), (*whole, None)[0])
        if form is None:
            self.fault(
                CheckpointError,
                f"{name}: one tensor by number, and {' and '.join(forms[0].keys)} here "
                f"({self._grids.facts()}). Load it into the optimizer that saved it, and save it with "
                "LayoutAwareSavePlanner(model, optimizer=optimizer), which keeps names.",
            )
            return Form(forms[0].layout, (), [], [])
        return form._replace(found=[name])

    def _form(self, layout: Layout, place: Place, grid: Grid) -> Form:
        ident = (id(layout.stages), grid)
        known = self._frames.get(ident)
        if known is None:
            frames = evaluate(layout.stages, grid, layout.fqn)
            # The stages are kept so that nothing else gets their id.
            known = self._frames[ident] = (layout.stages, frames)
        keys = [place.key(layout.key(frame)) for frame in known[1]]
        return Form(layout, known[1], keys, [self._saved.key(key) for key in keys])

    def shard(self, held: Holding, tensor: torch.Tensor, grids: Grids) -> None:
        """Plans the reads that fill what a rank holds of a parameter."""
        saved = self._saved
        assert held.kind.dtype is not None  # shards are tensors
        layout, frames, keys, found = self.form(held, grids)
        padding = {s.dim for s in layout.stages if isinstance(s, Unpad)}
        for frame, key, name in zip(frames, keys, found, strict=True):
            if name is None:
                self._report.missing.append(key)
                continue
            stored = saved.stored[name]
            if not self._fits(name, stored, frame.shape, held.kind.dtype, padding, grids):
                continue
            self._report.loaded.append(name)
            for box in frame.boxes:
                self._read_box(name, tensor, box, grids)
        if padding and not any(name is None for name in found):
            self._pad(keys[0], layout, tensor, [b for f in frames for b in f.boxes], grids)

    def described(self, key: str, tensor: torch.Tensor) -> None:
        """Plans the reads that fill the boxes of a tensor that describes itself."""
        said = describe(key, tensor)
        name = self._saved.key(key)
        if name is None:
            self._report.missing.append(key)
            return
        stored = self._saved.stored[name]
        shape = said.shape
        if shape is not None and not self._fits(
            name, stored, shape, said.dtype, set(), self._grids
        ):
            return
        self._report.loaded.append(name)
        for offsets, sizes in said.parts:
            box = Box(offsets, sizes, 0, contiguous_strides(sizes))
            self._read_box(name, part_of(key, tensor, offsets), box, self._grids)

    def per_rank(self, key: str, value: PerRank, seat: Seat) -> None:
        """Plans the read of this rank's own value."""
        prefix = f"{key}.{value.label}_"
        self.rank_prefixes.append(prefix)
        found = indices_saved(self._saved.below(prefix), prefix)
        whole = self._saved.key(key)
        if not found:
            if whole is None:
                self._report.missing.append(key)
            else:
                self._report.ranks[key] = "one value was saved for all ranks"
                self._request(Target(whole, (), None, holder=value), None)
            return
        choice = choose(key, value, seat, found, self._policies, self._grids.facts())
        if choice.fault:
            self.fault(CheckpointError, choice.fault)
            return
        if choice.note:
            self._report.ranks[key] = choice.note
        if choice.taken is not None:
            self._request(Target(f"{prefix}{choice.taken}", (), None, holder=value), None)

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
            self.fault(
                DtypeMismatchError,
                f"{key}: the checkpoint holds a Python value, the state dict a tensor of shape "
                f"{shape} ({grids.facts()}). Load it into a value of the kind that was saved.",
            )
            return False
        size = tuple(stored.size)
        if size == shape:
            return self._converts(key, stored.properties.dtype, dtype)
        padded = () if self._saved.unpadded(key) else padding
        same = len(size) == len(shape) and all(
            a == b or (d in padded and a > b)
            for d, (a, b) in enumerate(zip(size, shape, strict=True))
        )
        if not same:
            hint = "Is it another model?"
            if size[1:] == shape[1:]:
                hint += (
                    " For a padded vocabulary pass layouts=(*DEFAULT_LAYOUTS, "
                    "VocabularyPadding({name: true size})), in place of the default one."
                )
            if padding:
                hint = "The true sizes of the vocabulary differ."
            if key in self._report.numbered:
                hint = (
                    f"Its number makes it {self._report.numbered[key]}: build the optimizer with its "
                    "parameters in the order in which they were saved."
                )
            self.fault(
                ShapeMismatchError,
                f"{key}: the checkpoint has shape {size}, this model needs {shape} "
                f"({grids.facts()}; size mismatch). {hint}",
            )
            return False
        return self._converts(key, stored.properties.dtype, dtype)

    def _converts(self, key: str, saved: torch.dtype, wanted: torch.dtype) -> bool:
        fault = conversion_fault(saved, wanted, self._policies.dtype)
        if fault is not None:
            self.fault(DtypeMismatchError, f"{key}: saved as {saved}, wanted as {wanted}: {fault}.")
            return False
        if saved != wanted:
            self._report.converted[key] = (str(saved), str(wanted))
        return True

    def _cause(self, key: str, fault: str) -> str:
        """Returns what a fault of coverage most likely comes from."""
        files = self._saved.files(key)
        if not fault.endswith("times") or len(files) < 2:
            return "The checkpoint is incomplete, or holds one rank's part only."
        return (
            f"Its chunks are in {', '.join(files[:8])}{', …' if len(files) > 8 else ''}. Files of an "
            "older save were probably left in the folder: remove those that are not of the newest "
            "save, and save into empty folders."
        )

    def _read_box(self, key: str, tensor: torch.Tensor, box: Box, grids: Grids) -> None:
        meetings, faults = self._saved.meetings(key, box.offsets, box.sizes)
        if faults:
            for fault in faults:
                what = fault.replace("is covered by no chunk", "not covered by the checkpoint")
                self.fault(
                    IncompleteCheckpointError,
                    f"{key}: {what} ({grids.facts()}). {self._cause(key, fault)}",
                )
            return
        if overlaps(tensor):
            self.fault(
                CheckpointError,
                f"{key}: several elements of the tensor to fill share memory (strides "
                f"{local_tensor(tensor).stride()}). Load into a tensor of its own, such as its clone().",
            )
            return
        number = len(self.targets)
        self.targets.append(Target(key, (), tensor, box))
        dest = MetadataIndex(key, box.offsets, number)
        for meeting in meetings:
            self.items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    dest,
                    meeting.dest_offsets,
                    MetadataIndex(key, meeting.chunk_offsets, meeting.chunk),
                    meeting.storage_offsets,
                    meeting.sizes,
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
            self.pads.append((key, tensor, pads))

    def scalar(
        self, held: Holding, forms: Forms, path: Path, value: Any, first: int | None = None
    ) -> None:
        """Plans the read of a parameter's scalar, under the names that the checkpoint has.

        Scalars that are one tensor have the same `first`; what was saved for them must be equal.
        """
        saved, place = self._saved, held.kind.place
        written = [[place.key(name) for name in names] for names in forms]
        keys = next((f for f in written if all(saved.key(k) for k in f)), None)
        if keys is None:
            numbered = self._number_key(held, written[0][0])
            if numbered is None and self._flattened(written, path, value):
                return
            keys = written[0] if numbered is None else [numbered]
        found = [name for key in keys if (name := saved.key(key)) is not None]
        one_tensor = first is not None and local_tensor(value).numel() == 1
        if one_tensor and len(found) == len(keys) and all(map(self._is_number, found)):
            target = Target(keys[0], path, None, scalar=value)
            equal = self._equal.get(first)
            if equal is None:
                equal = self._equal[first] = EqualValues(
                    partial(self._delivery.settle, target),
                    "one tensor holds both now. Load into a tensor for each.",
                )
                self.groups.append(equal)
            for name in found:
                self.group_value(equal, name)
            return
        if len(keys) == 1 or not all(saved.key(key) for key in keys):
            for key in keys:
                self.value(key, path, value)
            return
        target = Target(keys[0], path, None, scalar=value)
        one = EqualValues(
            partial(self._delivery.settle, target),
            "one stacked parameter holds both now. Load into single experts, or make them equal.",
        )
        self.groups.append(one)
        for key in keys:
            self.group_value(one, saved.key(key) or key)

    def _is_number(self, name: str) -> bool:
        """Whether what the checkpoint has under a name can be one number."""
        stored = self._saved.stored[name]
        if isinstance(stored, BytesStorageMetadata):
            return True
        return math.prod(stored.size) == 1 and stored.properties.dtype is not PACKED

    def _flattened(self, forms: Sequence[Sequence[str]], path: Path, value: Any) -> bool:
        """Asks for an option by its parameter's name where the checkpoint has a list of groups."""
        before, mark, _ = f".{forms[0][0]}".partition(".param_groups.")
        prefix = f"{before}{mark}"[1:]
        if not mark or not path or f"{prefix}0.params" not in self._saved.stored:
            return False
        groups = self._flat.get(prefix)
        if groups is None:
            groups = self._flat[prefix] = FlattenedGroups(prefix, self._saved)
            self.groups.append(groups)
        target = Target(forms[0][0], path, None, scalar=value)
        # Parameters of one group may share a tensor.
        ident = local_tensor(value).data_ptr() if isinstance(value, torch.Tensor) else path
        groups.add(forms, ident, partial(self._delivery.settle, target))
        return True

    def value(self, key: str, path: Path, value: Any) -> None:
        """Plans the read of a value that every rank loads whole."""
        saved = self._saved
        name = saved.key(key)
        if name is None:
            # An empty container that the checkpoint lacks asks for nothing.
            if isinstance(value, Mapping | list) and not value:
                self.empty.append(key)
            elif not self._flattened([[key]], path, value):
                self._report.missing.append(key)
            return
        stored = saved.stored[name]
        if isinstance(stored, BytesStorageMetadata):
            tensor = value if isinstance(value, torch.Tensor) else None
            if tensor is not None and local_tensor(tensor).numel() != 1 and not _is_blob(key):
                self.fault(
                    DtypeMismatchError,
                    f"{name}: the checkpoint holds a Python value, the state dict a tensor of "
                    f"shape {tuple(tensor.shape)}. Load it into a value of the kind that was saved.",
                )
                return
            self._request(Target(name, path, None, scalar=value), None)
            return
        target = self._value_target(name, path, value, stored)
        if target is not None:
            self._request(target, stored)

    def _value_target(
        self, key: str, path: Path, value: Any, stored: TensorStorageMetadata
    ) -> Target | None:
        """Returns where a whole stored tensor goes: into a tensor, a number, or a new tensor."""
        size, dtype = tuple(stored.size), stored.properties.dtype
        box = Box((0,) * len(size), size, 0, contiguous_strides(size))
        if isinstance(value, torch.Tensor):
            local = local_tensor(value)
            one = local.numel() == 1 and math.prod(size) == 1
            one = one and PACKED not in (dtype, local.dtype)
            if tuple(local.shape) == size and dtype == local.dtype:
                return Target(key, path, value, box)
            if one:
                return Target(
                    key, path, torch.empty(size, dtype=dtype), box, scalar=value, as_number=True
                )
            if _is_blob(key):
                self._report.replaced.append(key)
                return Target(key, path, torch.empty(size, dtype=dtype), box, scalar=value)
            if tuple(local.shape) != size:
                self.fault(
                    ShapeMismatchError,
                    f"{key}: the checkpoint has shape {size}, the state dict {tuple(local.shape)}, "
                    "and no layout explains it (size mismatch). Pass the model, or a tensor of the saved shape.",
                )
                return None
            return (
                Target(key, path, value, box) if self._converts(key, dtype, local.dtype) else None
            )
        if value is None:
            return Target(key, path, torch.empty(size, dtype=dtype), box)
        number = math.prod(size) == 1 and dtype is not PACKED
        if number and isinstance(value, int | float | bool):
            return Target(
                key, path, torch.empty(size, dtype=dtype), box, scalar=value, as_number=True
            )
        self.fault(
            DtypeMismatchError,
            f"{key}: the checkpoint holds a tensor of shape {size}, the state dict a "
            f"{type(value).__name__}. Load it into a value of the kind that was saved.",
        )
        return None

    def group_value(
        self, group: GroupLoad | FlattenedGroups | EqualValues | NumberedState, key: str
    ) -> None:
        """Plans the read of a value that something else takes."""
        stored = self._saved.stored[key]
        if isinstance(stored, BytesStorageMetadata):
            self._request(Target(key, (), None, group=group), None)
            return
        size = tuple(stored.size)
        box = Box((0,) * len(size), size, 0, contiguous_strides(size))
        tensor = torch.empty(size, dtype=stored.properties.dtype)
        self._request(Target(key, (), tensor, box, group=group), stored)

    def _request(self, target: Target, stored: TensorStorageMetadata | None) -> None:
        """Adds the read items of a target that is loaded whole."""
        self._report.loaded.append(target.key)
        if stored is not None and target.tensor is not None and target.box is not None:
            before = len(self.items)
            self._read_box(target.key, target.tensor, target.box, self._grids)
            if len(self.targets) and self.targets[-1].key == target.key:
                self.targets[-1] = target
            if len(self.items) == before and not math.prod(target.box.sizes):
                self._delivery.deliver(target, target.tensor)
            return
        zero = torch.Size((0,))
        dest = MetadataIndex(target.key, None, len(self.targets))
        self.targets.append(target)
        self.items.append(
            ReadItem(LoadItemType.BYTE_IO, dest, zero, MetadataIndex(target.key), zero, zero)
        )

    def check(self) -> None:
        """Raises what planning found, all at once, before anything is read."""
        tolerated = [key for key in self._report.missing if _is_blob(key)]
        missing = [key for key in self._report.missing if not _is_blob(key)]
        facts = self._grids.facts()
        if (missing or tolerated) and not self._report.loaded:
            raise MissingKeyError(
                f"Missing keys: none of the {len(self._report.missing)} requested keys is in the checkpoint; the "
                f"first is {self._report.missing[0]} ({facts}). Does the state dict have the "
                f"sections that were saved? The checkpoint has {self._sample()}.{self._ask_for_optimizer()}"
            )
        if missing and self._policies.missing == "error":
            for key in missing:
                numbered = self._lacking.get(key)
                there = "" if numbered is None else f", where it would be {numbered}"
                self.fault(MissingKeyError, f"{key}: not in the checkpoint{there} ({facts}).")
        if self.faults:
            hint = (
                " Missing keys: pass strict=False to load what there is."
                if missing and self._policies.missing == "error"
                else ""
            )
            raise self._kind(summary(self.faults) + hint + self._ask_for_optimizer())

    def _ask_for_optimizer(self) -> str:
        if not self._unknown:
            return ""
        return (
            f" The checkpoint has {self._unknown[0]}state by number, which the order of the optimizer's "
            "parameters turns into names: pass optimizer= to the planner."
        )

    def fault(self, kind: type[CheckpointError], text: str) -> None:
        """Notes what does not fit; `check` raises the kind of the first."""
        if not self.faults:
            self._kind = kind
        self.faults.append(text)

    def _sample(self) -> str:
        keys = list(self._saved.stored)
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _is_blob(key: str) -> bool:
    """Whether a value is an opaque blob of any size: a module's `_extra_state`."""
    return key.rpartition(".")[2] == "_extra_state"
