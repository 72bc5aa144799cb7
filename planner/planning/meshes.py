"""The grids that DTensors' own meshes describe, where no process groups were given.

A mesh may be cut from its root in three ways, and the grid follows each:

| cut | mesh of a tensor | axes of the grid |
|---|---|---|
| by name, `root["tp"]` | some of the root's axes | the root's |
| flattened, `root["dp_shard", "cp"]` as `dp_shard_cp` | an axis that the root has not | those of the tensors' meshes, and the root's where they leave some of its ranks |
| unflattened, one `world` axis cut several ways | likewise | those of the tensors' meshes, if they leave no ranks: nothing names the others |
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from shardplan.layouts import Grid, Grids, LayoutError, expert_name
from shardplan.layouts.experts import TOKENS, cut_by_experts
from shardplan.layouts.grid import DATA_PARALLEL, KNOWN_AXES, mesh_axes

from ..compat import root_mesh


class UnplacedError(LayoutError):
    """DTensors' meshes do not say where each rank of the default group belongs."""


class _Axis(NamedTuple):
    """An axis of a mesh: how far apart in the root's order its ranks are, and how many."""

    stride: int
    size: int
    name: str


def grids_from_tensors(
    named: Iterable[tuple[str, Any]], tokens: frozenset[str] = TOKENS
) -> Grids | None:
    """Returns the grids that DTensors' own meshes describe, None if there is no DTensor.

    Dense parameters and experts may live on different meshes.

    Args:
        named: Names and tensors; those that are no DTensors count for nothing.
        tokens: Name tokens that mark experts.

    Raises:
        UnplacedError: If the meshes do not say where each rank of the default group belongs.
    """
    dense: dict[Any, str] = {}
    expert: dict[Any, str] = {}
    for fqn, tensor in named:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and hasattr(tensor, "placements"):
            of_experts = cut_by_experts(tensor) or expert_name(fqn, tokens) is not None
            (expert if of_experts else dense).setdefault(mesh, fqn)
    if not dense and not expert:
        return None
    grids = Grids(grid_of_meshes(dense or expert), grid_of_meshes(expert or dense))
    world = dist.get_world_size()
    if grids.world_size != world:
        fqn = next(iter((dense or expert).values()))
        raise UnplacedError(
            f"{fqn}: its mesh was cut from one of {grids.world_size} ranks, but there are {world}, "
            "and nothing says how the others belong to them. Pass grid=."
        )
    return grids


def is_placed(mesh: Any, grids: Sequence[Grid], world: int) -> bool:
    """Returns whether all ranks that save hold a DTensor, or one of the model's grids has its mesh.

    Ranks outside of a mesh may hold other keys, or other values under the same one.

    Args:
        mesh: The DTensor's mesh.
        grids: The model's grids, if they are known.
        world: Number of ranks that save.
    """
    if mesh.get_coordinate() is None:
        return False
    return int(mesh.size()) == world or any(_has_mesh(grid, mesh) for grid in grids)


def _has_mesh(grid: Grid, mesh: Any) -> bool:
    axes = [grid.resolve(name) for name in mesh_axes(mesh)]
    sizes = [0 if axis is None else grid.size(axis) for axis in axes]
    same = sizes == list(mesh.shape) and int(root_mesh(mesh).size()) == grid.world_size
    return same and len(set(axes)) == len(axes)


def are_replicas(mesh: Any, world: int) -> bool:
    """Returns whether the names of a mesh's root say that its sisters hold the same values.

    That is so if all axes of the root that the mesh lacks are data-parallel ones: along others,
    such as `pp`, or ones with names that only their user knows, ranks may hold different values.

    Args:
        mesh: The mesh of a DTensor, with this rank on it.
        world: Number of ranks that save.
    """
    root = root_mesh(mesh)
    if int(root.size()) != world or not root.mesh_dim_names:
        return False
    places = {int(rank): place for place, rank in np.ndenumerate(root.mesh.numpy())}
    own = zip(*(places[rank] for rank in mesh.mesh.flatten().tolist()), strict=True)
    left = {
        name: int(size)
        for name, size, indices in zip(root.mesh_dim_names, root.shape, own, strict=True)
        if len(set(indices)) == 1
    }
    whole = math.prod(left.values()) * int(mesh.size()) == world
    return whole and all(name in DATA_PARALLEL or size == 1 for name, size in left.items())


def grid_of_meshes(meshes: dict[Any, str]) -> Grid:
    """Returns the grid that several meshes belong to."""
    roots = {root_mesh(mesh): fqn for mesh, fqn in meshes.items()}
    root = max(roots, key=lambda mesh: int(mesh.size()))
    names = set(mesh_axes(root))
    if all(set(mesh_axes(mesh)) <= names for mesh in roots) and all(
        set(mesh_axes(mesh)) <= names and _is_slice(mesh, root) for mesh in meshes
    ):
        used = {name for mesh in meshes for name in mesh_axes(mesh)}
        _check_known(root, names - used, roots[root])
        return Grid(mesh_axes(root), tuple(root.shape), _coordinate(root, roots[root]))
    for mesh, fqn in roots.items():
        if mesh is not root and mesh != root:
            raise UnplacedError(
                f"{fqn}: its mesh {mesh} and {roots[root]}'s {root} were not cut from one mesh. "
                "Cut both from one, or pass grid=."
            )
    return _rebuilt(root, meshes)


def _is_slice(mesh: Any, root: Any) -> bool:
    """Whether a mesh is the root's ranks along axes of its names, in the same order.

    A flattened axis may have the name of another one, and a second root its names with the ranks in
    another order.
    """
    own, names, place = mesh_axes(mesh), mesh_axes(root), root.get_coordinate()
    if place is None:
        return False
    cut = tuple(slice(None) if name in own else i for name, i in zip(names, place, strict=True))
    kept = [name for name in names if name in own]
    ranks = root.mesh.numpy()[cut].transpose([kept.index(name) for name in own])
    return bool(np.array_equal(ranks, mesh.mesh.numpy()))


def _coordinate(mesh: Any, fqn: str) -> tuple[int, ...]:
    found = mesh.get_coordinate()
    if found is None:
        raise UnplacedError(
            f"{fqn}: this rank is not on its mesh {mesh}. Plan only on ranks that hold a shard."
        )
    return tuple(found)


def _rebuilt(root: Any, meshes: dict[Any, str]) -> Grid:
    """Returns the grid of the meshes' own axes over all ranks of their root."""
    position = {rank: i for i, rank in enumerate(root.mesh.flatten().tolist())}
    axes: dict[_Axis, str] = {}
    own = 0
    for mesh, fqn in meshes.items():
        own = position[int(mesh.mesh[_coordinate(mesh, fqn)])]
        for axis in _axes(mesh, position, fqn):
            axes.setdefault(axis, fqn)
    world = int(root.size())
    filled: list[_Axis] = []
    reached = 1
    for axis in sorted(axis for axis in axes if axis.size > 1):
        if axis.stride % reached or any(axis.name == other.name for other in filled):
            known = ", ".join(f"{a.name} {a.size}" for a in sorted(axes, reverse=True))
            raise UnplacedError(
                f"{axes[axis]}: its mesh axis {axis.name!r} of size {axis.size} overlaps in part "
                f"with the other tensors' axes ({known}). Pass grid=Grids.from_mesh(...) of a mesh "
                "whose axes all of them name."
            )
        if axis.stride > reached:
            filled += _gap(root, reached, axis.stride, axes[axis])
        filled.append(axis)
        reached = axis.stride * axis.size
    if world > reached:
        filled += _gap(root, reached, world, next(iter(meshes.values())))
    single = [axis for axis in axes if axis.size == 1 and axis.name not in {a.name for a in filled}]
    ordered = [*reversed(filled), *{axis.name: axis for axis in single}.values()]
    return Grid(
        tuple(axis.name for axis in ordered),
        tuple(axis.size for axis in ordered),
        tuple(own // axis.stride % axis.size for axis in ordered),
    )


def _check_known(root: Any, left: set[str], fqn: str) -> None:
    """Refuses axes along which ranks are apart and whose names say nothing."""
    for name, size in zip(mesh_axes(root), root.shape, strict=True):
        if name in left and size > 1 and name not in KNOWN_AXES:
            raise UnplacedError(
                f"{fqn}: the tensors' meshes leave the axis {name!r} of {root} out, and its name "
                "does not say whether its ranks are replicas, pipeline stages or something else. "
                "Pass grid=."
            )


def _gap(root: Any, start: int, stop: int, fqn: str) -> list[_Axis]:
    """Returns the root's own axes that fill what the tensors' axes leave of its ranks."""
    found, stride = [], int(root.size())
    for name, size in zip(mesh_axes(root), map(int, root.shape), strict=True):
        stride //= size
        if start <= stride and stride * size <= stop and size > 1:
            found.append(_Axis(stride, size, name))
    _check_known(root, {axis.name for axis in found}, fqn)
    if math.prod(axis.size for axis in found) != stop // start:
        raise UnplacedError(
            f"{fqn}: the tensors' meshes leave {stop // start} ranks of {root} apart, and no axis of "
            "it says whether they are replicas, pipeline stages or something else. Pass grid=."
        )
    return found[::-1]


def _axes(mesh: Any, position: dict[int, int], fqn: str) -> list[_Axis]:
    """Returns a mesh's axes by the step that each makes in the root's order of ranks."""
    ranks = mesh.mesh
    first = (0,) * ranks.ndim
    start = position[int(ranks[first])]
    strides = []
    for dim, size in enumerate(ranks.shape):
        step = (*first[:dim], 1, *first[dim + 1 :])
        strides.append(position[int(ranks[step])] - start if size > 1 else 1)
    for place in itertools.product(*(range(n) for n in ranks.shape)):
        expected = start + sum(i * stride for i, stride in zip(place, strides, strict=True))
        if position[int(ranks[place])] != expected:
            raise UnplacedError(
                f"{fqn}: the ranks of its mesh {mesh} are not evenly spaced. Pass "
                "grid=Grids.from_mesh(...)."
            )
    return [
        _Axis(stride, int(size), name)
        for stride, size, name in zip(strides, ranks.shape, mesh_axes(mesh), strict=True)
    ]


class MeshGroups:
    """Sorts DTensors by the grid that their meshes belong to: dense ones, experts, others.

    Args:
        grids: Grids that are known already; tensors whose meshes fit them go there.
    """

    def __init__(self, grids: Iterable[Grid] = ()) -> None:
        self._known = list(grids)
        self._groups: list[dict[Any, str]] = []
        self._of: dict[Any, int] = {}

    def add(self, key: str, mesh: Any) -> int:
        """Returns the number of a mesh's group: of the known grids first, then of the others.

        The same meshes in the same order have the same numbers on every rank.
        """
        number = self._of.get(mesh)
        if number is None:
            number = self._of[mesh] = self._place(key, mesh)
        return number

    def _place(self, key: str, mesh: Any) -> int:
        for number, grid in enumerate(self._known):
            if _has_mesh(grid, mesh):
                return number
        for number, group in enumerate(self._groups):
            try:
                grid_of_meshes({**group, mesh: key})
            except UnplacedError:
                continue
            group[mesh] = key
            return len(self._known) + number
        self._groups.append({mesh: key})
        return len(self._known) + len(self._groups) - 1

    def grids(self) -> list[Grid]:
        """Returns the grids by number."""
        return [*self._known, *(grid_of_meshes(group) for group in self._groups)]
