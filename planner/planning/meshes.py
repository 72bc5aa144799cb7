"""The grids that DTensors' own meshes describe, where no process groups were given.

| name | is |
|---|---|
| `grids_from_tensors` | the dense and the expert grid of a model's DTensors |
| `MeshGroups` | DTensors sorted by the grid that their meshes belong to |
| `grid_of_meshes` | one grid for meshes that were cut from one root mesh |

A mesh may be cut from its root in three ways, and the grid follows each:

| cut | mesh of a tensor | axes of the grid |
|---|---|---|
| by name, `root["tp"]` | some of the root's axes | the root's |
| flattened, `root["dp_shard", "cp"]` as `dp_shard_cp` | an axis that the root has not | those of the tensors' meshes; what they leave of the root's ranks are replicas |
| unflattened, one `world` axis cut several ways | likewise | likewise, for dense parameters and experts apart |
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardplan.layouts import Grid, Grids, LayoutError, expert_name
from shardplan.layouts.grid import mesh_axes

from ..compat import root_mesh


class _Axis(NamedTuple):
    """An axis of a mesh: how far apart in the root's order its ranks are, and how many."""

    stride: int
    size: int
    name: str


def grids_from_tensors(named: Iterable[tuple[str, Any]]) -> Grids | None:
    """Returns the grids that DTensors' own meshes describe, None if there is no DTensor.

    Dense parameters and experts may live on different meshes.

    Args:
        named: Names and tensors; those that are no DTensors count for nothing.

    Raises:
        LayoutError: If the dense parameters live on meshes that do not belong together.
    """
    dense: dict[Any, str] = {}
    expert: dict[Any, str] = {}
    for fqn, tensor in named:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and hasattr(tensor, "placements"):
            (expert if expert_name(fqn) else dense).setdefault(mesh, fqn)
    if not dense and not expert:
        return None
    return Grids(grid_of_meshes(dense or expert), grid_of_meshes(expert or dense))


def grid_of_meshes(meshes: dict[Any, str]) -> Grid:
    """Returns the grid that several meshes belong to.

    Args:
        meshes: The meshes, each with the name of a tensor on it, for errors.

    Raises:
        LayoutError: If they were not cut from one root, or their axes overlap in part.
    """
    roots = {root_mesh(mesh): fqn for mesh, fqn in meshes.items()}
    root = max(roots, key=lambda mesh: int(mesh.size()))
    names = set(mesh_axes(root))
    if all(set(mesh_axes(mesh)) <= names for mesh in roots) and all(
        set(mesh_axes(mesh)) <= names and _is_slice(mesh, root) for mesh in meshes
    ):
        return Grid(mesh_axes(root), tuple(root.shape), _coordinate(root, roots[root]))
    for mesh, fqn in roots.items():
        if mesh is not root and mesh != root:
            raise LayoutError(
                f"{fqn}: its mesh {mesh} and {roots[root]}'s {root} were not cut from one mesh. "
                "Cut both from one, or pass grid=."
            )
    return _rebuilt(root, meshes)


def _is_slice(mesh: Any, root: Any) -> bool:
    """Whether axes of one name have one size in both: no flattened axis took the name."""
    sizes = dict(zip(mesh_axes(root), root.shape, strict=True))
    return all(sizes[a] == n for a, n in zip(mesh_axes(mesh), mesh.shape, strict=True))


def _coordinate(mesh: Any, fqn: str) -> tuple[int, ...]:
    found = mesh.get_coordinate()
    if found is None:
        raise LayoutError(
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
            raise LayoutError(
                f"{axes[axis]}: its mesh axis {axis.name!r} of size {axis.size} overlaps in part "
                f"with the other tensors' axes ({known}). Pass grid=Grids.from_mesh(...) of a mesh "
                "whose axes all of them name."
            )
        if axis.stride > reached:
            filled.append(_Axis(reached, axis.stride // reached, f"replica{reached}"))
        filled.append(axis)
        reached = axis.stride * axis.size
    if world > reached:
        filled.append(_Axis(reached, world // reached, f"replica{reached}"))
    single = [axis for axis in axes if axis.size == 1 and axis.name not in {a.name for a in filled}]
    ordered = [*reversed(filled), *{axis.name: axis for axis in single}.values()]
    return Grid(
        tuple(axis.name for axis in ordered),
        tuple(axis.size for axis in ordered),
        tuple(own // axis.stride % axis.size for axis in ordered),
    )


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
            raise LayoutError(
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
            axes = [grid.resolve(name) for name in mesh_axes(mesh)]
            sizes = [0 if axis is None else grid.size(axis) for axis in axes]
            same = sizes == list(mesh.shape) and int(root_mesh(mesh).size()) == grid.world_size
            if same and len(set(axes)) == len(axes):
                return number
        for number, group in enumerate(self._groups):
            try:
                grid_of_meshes({**group, mesh: key})
            except LayoutError:
                continue
            group[mesh] = key
            return len(self._known) + number
        self._groups.append({mesh: key})
        return len(self._known) + len(self._groups) - 1

    def grids(self) -> list[Grid]:
        """Returns the grids by number."""
        return [*self._known, *(grid_of_meshes(group) for group in self._groups)]
