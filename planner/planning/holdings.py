"""What one rank holds: the state dict's values sorted into parameters, slots and extras."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardplan.layouts import (
    Cuts,
    Grid,
    Grids,
    Layout,
    LayoutError,
    LayoutRegistry,
    ParamInfo,
    expert_name,
)
from shardplan.layouts.fsdp import DTensorStorage, dtensor_cuts
from shardplan.layouts.grid import mesh_axes
from shardplan.layouts.model import ModelLayouts
from shardplan.layouts.storage import FlatBuffer, FlatRanges, Whole

from ..compat import local_tensor, root_mesh
from ..state.described import describes_itself
from ..state.entries import Found, Path, Place, key_of
from ..state.per_rank import PerRank
from ..state.storable import check_storable
from .manifest import OBJECT, SHARD, VALUE, Kind
from .meshes import MeshGroups, are_replicas, is_placed
from .table import Chunk, LayoutTable


class Holding(NamedTuple):
    """One value that belongs to a parameter.

    Attributes:
        number: Its position among the state dict's values.
        kind: Section, slot, role and dtype.
        order: The parameter's position among the layouts of its chunk.
        layout: Where it lies.
    """

    number: int
    kind: Kind
    order: int
    layout: Layout


@dataclass(slots=True)
class Holdings:
    """All values of a state dict.

    Attributes:
        chunks: The table's chunks, and one for each grid of DTensors that are no parameters.
        held: Values that belong to a parameter.
        extras: Positions and paths of the others.
        described: Positions and paths of tensors that describe themselves.
        alike: Whether the meshes of such DTensors say that all ranks which hold a box of it hold
            the same; by position.
        per_rank: Positions and paths of `PerRank` values.
    """

    chunks: tuple[Chunk, ...]
    held: list[Holding] = field(default_factory=list)
    extras: list[tuple[int, Path]] = field(default_factory=list)
    described: list[tuple[int, Path]] = field(default_factory=list)
    alike: dict[int, bool] = field(default_factory=dict)
    per_rank: list[tuple[int, Path]] = field(default_factory=list)


def sort_values(table: LayoutTable, values: Sequence[tuple[Path, Any]]) -> Holdings:
    """Sorts a state dict's values by what they belong to.

    Args:
        table: The model's layouts.
        values: Paths and values, as `leaves` returns them.

    Raises:
        LayoutError: If a tensor does not fit the layout of its parameter.
    """
    holdings = Holdings(table.chunks)
    checks = [_Checks(chunk) for chunk in table.chunks]
    orders = [{fqn: i for i, fqn in enumerate(chunk.layouts)} for chunk in table.chunks]
    kinds: dict[tuple[int, Place, str, torch.dtype | None], Kind] = {}
    lone: list[tuple[int, Path, DTensor]] = []
    moved: list[Holding] = []
    for number, (path, value) in enumerate(values):
        found = table.names.find(path)
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor:
            if describes_itself(value) and not _is_flat(table, found):
                holdings.described.append((number, path))
                continue
            check_storable(path, value)
            if found is not None and found.fqn in table.chunks[found.chunk].described:
                _check_description(table, path, found, value)
        elif isinstance(value, PerRank):
            holdings.per_rank.append((number, path))
            continue
        if found is None:
            if is_tensor and isinstance(value, DTensor):
                lone.append((number, path, value))
            else:
                holdings.extras.append((number, path))
            continue
        chunk, fqn, place = found
        slot = place.slot
        if not is_tensor:
            if not slot:
                holdings.extras.append((number, path))
                continue
            role, dtype, layout = OBJECT, None, table.chunks[chunk].layout(fqn, slot)
        else:
            layout, role = checks[chunk].fit(found, slot, value)
            dtype = value.dtype
            if layout is not table.chunks[chunk].layout(fqn, slot):
                moved.append(Holding(number, Kind(chunk, place, role, dtype), 0, layout))
                continue
        ident = (chunk, place, role, dtype)
        if role == VALUE:
            kind = Kind(chunk, place, role, dtype, tuple(value.shape))
        else:
            kind = kinds.get(ident) or kinds.setdefault(ident, Kind(*ident))
        holdings.held.append(Holding(number, kind, orders[chunk][fqn], layout))
    if moved:
        _place_moved(holdings, moved)
    if lone:
        known = (
            [table.grids.dense, table.grids.expert] if any(c.layouts for c in table.chunks) else []
        )
        _place_lone(table.tokens, holdings, _apart(table, holdings, lone, known), known)
    return holdings


def _apart(
    table: LayoutTable,
    holdings: Holdings,
    lone: list[tuple[int, Path, DTensor]],
    known: Sequence[Grid],
) -> list[tuple[int, Path, DTensor]]:
    """Lets DTensors describe themselves that some ranks may not hold, and returns the others."""
    world = table.grids.world_size
    meshes = {tensor.device_mesh for _, _, tensor in lone}
    placed = {mesh for mesh in meshes if is_placed(mesh, known, world)}
    alike = {mesh: are_replicas(mesh, world) for mesh in meshes - placed}
    kept = []
    for number, path, tensor in lone:
        mesh = tensor.device_mesh
        if mesh in placed:
            kept.append((number, path, tensor))
        else:
            facts = table.grids.facts()
            _check_expert(key_of(path), mesh_axes(mesh), root_mesh(mesh), facts, table.tokens)
            holdings.described.append((number, path))
            holdings.alike[number] = alike[mesh]
    return kept


def _place_moved(holdings: Holdings, moved: list[Holding]) -> None:
    """Gives DTensors that are cut otherwise than their parameter a chunk of their own layouts.

    ZeRO's optimizer state of a replicated parameter is one, a replicated average of a sharded one
    another.
    """
    sources = dict.fromkeys(held.kind.chunk for held in moved)
    for source in sources:
        layouts = ModelLayouts()
        for held in moved:
            if held.kind.chunk == source:
                key = held.kind.place.key(held.layout.name)
                layout = dataclasses.replace(held.layout, fqn=key)
                kind = dataclasses.replace(held.kind, chunk=len(holdings.chunks))
                layouts[key] = layout
                holdings.held.append(Holding(held.number, kind, len(layouts) - 1, layout))
        grids = holdings.chunks[source].grids
        holdings.chunks = (*holdings.chunks, Chunk(None, grids, layouts, {}))


def _check_description(table: LayoutTable, path: Path, found: Found, tensor: torch.Tensor) -> None:
    """Refuses a copy of a parameter that described itself: the copy does not."""
    if found.place.slot or _is_flat(table, found):
        return
    raise LayoutError(
        f"{key_of(path)}: the parameter describes its own boxes, but the {type(tensor).__name__} of "
        f"shape {tuple(tensor.shape)} in the state dict does not ({table.grids.facts()}). A copy "
        "such as async_save makes keeps attributes and loses the class: set the attributes of "
        "CheckpointableTensor or the hooks on the tensor itself, or save with dcp.save."
    )


def _is_flat(table: LayoutTable, found: Found | None) -> bool:
    """Whether a tensor is a parameter whose flat shards the layouts know for every rank."""
    if found is None:
        return False
    layout = table.chunks[found.chunk].layout(found.fqn, found.place.slot)
    return isinstance(layout.storage, FlatBuffer | FlatRanges)


class _Checks:
    """Checks tensors against the layouts of a chunk; what was found once is remembered."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._numel: dict[int, int] = {}
        self._cuts: dict[Any, Cuts] = {}
        self._same: set[Any] = set()

    def fit(self, found: Found, slot: str, tensor: torch.Tensor) -> tuple[Layout, str]:
        """Returns the layout that a tensor follows and its role.

        Raises:
            LayoutError: If its size or its placements contradict the parameter's layout.
        """
        layout = self._chunk.layout(found.fqn, slot)
        numel = self._numel.get(id(layout.stages))
        if numel is None:
            numel = layout.storage.numel(self._chunk.grids.of(layout.family))
            self._numel[id(layout.stages)] = numel
        local = local_tensor(tensor)
        held = local.numel()
        single = slot and held == 1 and tensor.numel() == 1
        number = tensor.dim() == 0 and len(layout.local_shape) > 0
        if single and (slot == "step" or number or numel != 1):
            return layout, VALUE
        if isinstance(tensor, DTensor) and not isinstance(layout.storage, FlatBuffer | FlatRanges):
            placed = self._placed(found.fqn, layout, tensor)
            if placed is not layout:
                layout = placed
                numel = layout.storage.numel(self._chunk.grids.of(layout.family))
        if held == numel and self._has_shape(layout, tensor, local):
            return layout, SHARD
        # What is whole on every rank may have any shape: factors of rows, preconditioners.
        if slot and self._chunk.grids.of(layout.family).count(layout.axes) == 1:
            return layout, VALUE
        raise self._misfit(layout, slot, tensor, local, numel)

    def _has_shape(self, layout: Layout, tensor: torch.Tensor, local: torch.Tensor) -> bool:
        """Whether a local tensor with the right number of elements has them in the right shape."""
        storage, shape = layout.storage, tuple(local.shape)
        if local.dim() == 1 and tensor is local:
            return True  # flattened, row by row
        if isinstance(storage, FlatBuffer | FlatRanges):
            # A slice of the flattened parameter, which may be shown as rows of it.
            return not local.numel() or local.dim() == 1 or shape[1:] == layout.local_shape[1:]
        if isinstance(storage, Cuts):
            held = storage.held(self._chunk.grids.of(layout.family))
            expected = tuple(sum(stop - start for start, stop in dim) for dim in held)
            # Without elements a tensor has nothing that could lie elsewhere.
            return not local.numel() or shape == expected
        return shape == layout.local_shape or not isinstance(storage, Whole)

    def _placed(self, fqn: str, layout: Layout, tensor: DTensor) -> Layout:
        """Returns the layout with the cuts that a DTensor's own placements make."""
        ident = (tensor.placements, id(tensor.device_mesh), tensor.shape, id(layout.stages))
        if ident in self._same:
            return layout
        cuts = self._cuts.get(ident)
        if cuts is None:
            grid = self._chunk.grids.of(layout.family)
            _check_mesh_of_expert(fqn, layout, tensor, grid)
            shape = tuple(tensor.shape)
            info = ParamInfo(fqn, shape, grid, layout.family == "expert", None, tensor)
            cuts = self._cuts[ident] = dtensor_cuts(info)
        storage = layout.storage
        if (isinstance(storage, Cuts) and cuts == storage) or not (
            cuts.cuts or isinstance(storage, Cuts)
        ):
            self._same.add(ident)
            return layout
        if cuts.shape != storage.shape:
            raise LayoutError(
                f"{fqn}: a DTensor of shape {cuts.shape} stands for a parameter of shape "
                f"{storage.shape} ({self._chunk.grids.facts()}). Build the planner with the model "
                "as it is when it is saved or loaded."
            )
        return Layout(layout.fqn, layout.name, (cuts, *layout.stages[1:]), layout.family)

    def _misfit(
        self, layout: Layout, slot: str, tensor: torch.Tensor, local: torch.Tensor, numel: int
    ) -> LayoutError:
        kind = "DTensor's local part" if tensor is not local else "tensor"
        name = f"{layout.fqn}: slot {slot!r}" if slot else layout.fqn
        facts = self._chunk.grids.facts()
        if slot and tuple(tensor.shape) != layout.local_shape:
            return LayoutError(
                f"{name}: the {kind} has shape {tuple(local.shape)} but the parameter's local tensor "
                f"{layout.local_shape}, of which this rank stores {numel} elements ({facts}). Say how "
                "it is cut with a provider in optimizer_layouts=, wrap it in PerRank if each rank has "
                "its own, or leave the slot out of the state dict."
            )
        if local.numel() == numel:
            return LayoutError(
                f"{name}: the {kind} has shape {tuple(local.shape)} but the parameter "
                f"{layout.local_shape} ({facts}). Build the planner with the model as it is when it "
                "is saved or loaded, and DTensors with the shape that their placements give."
            )
        return LayoutError(
            f"{name}: the {kind} has {local.numel()} elements in shape {tuple(local.shape)} "
            f"but its layout stores {numel} of a local tensor of shape {layout.local_shape} on this "
            f"rank ({facts}). Pass the provider that knows how it is cut, such as "
            "FSDPFlatBuffer({name: ranges})."
        )


def _place_lone(
    tokens: frozenset[str],
    holdings: Holdings,
    lone: list[tuple[int, Path, DTensor]],
    known: Sequence[Grid],
) -> None:
    """Gives DTensors that are no parameters chunks of their own; their meshes describe them.

    There is one chunk for each grid that the meshes belong to: dense tensors and experts may live
    on different ones.
    """
    lone.sort(key=lambda entry: key_of(entry[1]))  # ranks may list their keys in any order
    meshes = MeshGroups(dict.fromkeys(known))
    groups: dict[int, list[tuple[int, Path, DTensor]]] = {}
    for number, path, tensor in lone:
        group = meshes.add(key_of(path), tensor.device_mesh)
        groups.setdefault(group, []).append((number, path, tensor))
    grids = meshes.grids()
    registry = LayoutRegistry([DTensorStorage()])
    for group, members in sorted(groups.items()):
        grid = grids[group]
        layouts = ModelLayouts()
        chunk = Chunk(None, Grids(grid, grid), layouts, {})
        checks = _Checks(chunk)
        for number, path, tensor in members:
            key = key_of(path)
            layout = registry.layout(ParamInfo(key, tuple(tensor.shape), grid, False, None, tensor))
            _check_expert(key, layout.axes, root_mesh(tensor.device_mesh), grid.facts(), tokens)
            layouts[key] = Layout(key, str(path[-1]), layout.stages)
            place = Place(path[:-1], "", "", ())
            checks.fit(Found(0, key, place), "", tensor)
            kind = Kind(len(holdings.chunks), place, SHARD, tensor.dtype)
            holdings.held.append(Holding(number, kind, len(layouts) - 1, layouts[key]))
        holdings.chunks = (*holdings.chunks, chunk)


def _check_mesh_of_expert(fqn: str, layout: Layout, tensor: DTensor, grid: Grid) -> None:
    """Refuses an expert whose placements say that all expert-parallel ranks hold the same."""
    if grid.size("ep") == 1 or layout.family != "expert":
        return
    for name, placement in zip(mesh_axes(tensor.device_mesh), tensor.placements, strict=True):
        if grid.resolve(name) == "ep" and placement.is_replicate():
            raise LayoutError(
                f"{fqn}: its placements {tensor.placements} say that all {grid.size('ep')} ranks of the "
                f"expert axis {name!r} hold the same experts, but each has its own ({grid.facts()})."
                " Shard it on that axis, or build it on a mesh without it."
            )


def _check_expert(
    key: str, axes: Sequence[str], mesh: Any, facts: str, tokens: frozenset[str]
) -> None:
    """Refuses an expert whose mesh forgets that each expert-parallel rank has its own experts."""
    sizes = dict(zip(mesh_axes(mesh), mesh.shape, strict=True))
    if sizes.get("ep", 1) > 1 and "ep" not in axes and expert_name(key, tokens) is not None:
        raise LayoutError(
            f"{key}: an expert's mesh has the axes {axes}, without the expert axis ep of "
            f"size {sizes['ep']} ({facts}), so each of its ranks' experts would count as "
            "a replica of the same one. Shard it on a mesh with ep, or pass the model and ExpertGrid."
        )
