"""Named mesh axes with sizes, and one rank's coordinate on each.

Process groups and meshes are read here once and become integers; nothing is sent.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .errors import LayoutError

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")

# Names that other projects give to these axes (Megatron-FSDP, torchtitan, accelerate).
_ALIASES = {
    "dp": ("dp_shard", "edp_shard"),
    "dp_cp": ("dp_shard", "edp_shard"),
    "dp_shard": ("edp_shard",),
    "dp_shard_cp": ("dp_shard", "edp_shard"),
    "fsdp": ("dp_shard", "edp_shard"),
    "efsdp": ("edp_shard",),
    "dp_mod_ep": ("edp_shard",),
    "dp_shard_mod_ep": ("edp_shard",),
    "dp_replicate": ("edp_replicate",),
    "replicate": ("dp_replicate", "edp_replicate"),
    "ddp": ("dp_replicate", "edp_replicate"),
    "outer_fsdp_dp": ("dp_replicate", "edp_replicate"),
    "tp": ("etp",),
}


# Ranks that differ along these axes only hold the same values of what is not cut along them.
DATA_PARALLEL = frozenset((*_ALIASES, *itertools.chain(*_ALIASES.values()), "cp")) - {"tp", "etp"}
KNOWN_AXES = DATA_PARALLEL | {"pp", "tp", "ep", "etp"}


@dataclass(frozen=True, slots=True)
class Grid:
    """Mesh axes with sizes, slowest first, and one rank's coordinate on each.

    Attributes:
        axes: Names of the axes.
        sizes: Number of ranks along each axis.
        coordinate: The rank's index along each axis.

    >>> Grid(("dp_shard", "tp"), (4, 2), (3, 1)).facts()
    'dp_shard 3/4, tp 1/2'
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.axes) == len(self.sizes) == len(self.coordinate):
            raise LayoutError(
                f"grid: {len(self.axes)} axes {self.axes} with {len(self.sizes)} sizes "
                f"{self.sizes} and {len(self.coordinate)} coordinates {self.coordinate}. "
                "Give one size and one coordinate for each axis."
            )
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"grid: an axis is named twice in {self.axes}")
        for axis, size, index in zip(self.axes, self.sizes, self.coordinate, strict=True):
            if size < 1 or not 0 <= index < size:
                raise LayoutError(f"grid: {axis} rank {index} is not in [0, {size})")

    @classmethod
    def from_rank(cls, axes: Mapping[str, int], rank: int) -> "Grid":
        """Returns the grid of `rank` where ranks count up along the last axis first.

        Raises:
            LayoutError: If the rank is not below the product of the sizes.
        """
        world = math.prod(axes.values())
        if not 0 <= rank < world:
            raise LayoutError(f"grid: rank {rank} is not in [0, {world}) of axes {dict(axes)}")
        coordinate = []
        for size in reversed(tuple(axes.values())):
            rank, index = divmod(rank, size)
            coordinate.append(index)
        return cls(tuple(axes), tuple(axes.values()), tuple(reversed(coordinate)))

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`; 1 if the grid has no such axis."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def index(self, axis: str) -> int:
        """Returns the rank's index along `axis`; 0 if the grid has no such axis."""
        return self.coordinate[self.axes.index(axis)] if axis in self.axes else 0

    def linear(self, axes: Sequence[str]) -> int:
        """Returns the rank's position in the row-major order of `axes`, first axis slowest."""
        position = 0
        for axis in axes:
            position = position * self.size(axis) + self.index(axis)
        return position

    def count(self, axes: Sequence[str]) -> int:
        """Returns how many coordinates `axes` have together."""
        return math.prod(self.size(axis) for axis in axes)

    def at(self, **indices: int) -> "Grid":
        """Returns the same grid at another coordinate."""
        return _grid(self.axes, self.sizes, tuple(map(indices.get, self.axes, self.coordinate)))

    def walk(self, axes: Sequence[str]) -> "Iterator[Grid]":
        """Yields the grid at every coordinate of `axes`, the other axes as they are."""
        places = [self.axes.index(axis) for axis in axes if axis in self.axes]
        coordinate = list(self.coordinate)
        for indices in itertools.product(*(range(self.sizes[place]) for place in places)):
            for place, index in zip(places, indices, strict=True):
                coordinate[place] = index
            yield _grid(self.axes, self.sizes, tuple(coordinate))

    def resolve(self, axis: str) -> str | None:
        """Returns this grid's name for a mesh axis that another project named, if it has one."""
        if axis in self.axes:
            return axis
        return next((name for name in _ALIASES.get(axis, ()) if name in self.axes), None)

    def facts(self) -> str:
        """Returns the axes that are larger than one as `'tp 1/2, dp_shard 3/8'`, for errors."""
        facts = ", ".join(
            f"{axis} {index}/{size}"
            for axis, size, index in zip(self.axes, self.sizes, self.coordinate, strict=True)
            if size > 1
        )
        return facts or "one rank"


@lru_cache(maxsize=1 << 14)
def _grid(axes: tuple[str, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Grid:
    """Returns a grid, the one made before if there is one: plans visit the same places often."""
    return Grid(axes, sizes, coordinate)


@dataclass(frozen=True, slots=True)
class Grids:
    """The grid of the dense parameters and the grid of the experts, of one rank.

    | made by | from |
    |---|---|
    | `Grids.from_sizes` | plain integers, ranks in Megatron's order |
    | `Grids.from_pg_collection` | the process groups that a Megatron model carries |
    | `Grids.from_mesh` | a `DeviceMesh`, and one more for experts |
    """

    dense: Grid
    expert: Grid

    def __post_init__(self) -> None:
        if self.dense.world_size != self.expert.world_size:
            raise LayoutError(
                f"grid: the dense axes {dict(zip(self.dense.axes, self.dense.sizes, strict=True))} "
                f"have {self.dense.world_size} ranks and the expert axes "
                f"{dict(zip(self.expert.axes, self.expert.sizes, strict=True))} have "
                f"{self.expert.world_size}. Both must span the same ranks."
            )

    @property
    def world_size(self) -> int:
        """Number of ranks that both grids span."""
        return self.dense.world_size

    @property
    def stage(self) -> int:
        """The pipeline stage of the rank."""
        return self.dense.index("pp")

    @property
    def leads_stage(self) -> bool:
        """Whether the rank is the first of its pipeline stage."""
        return all(
            index == 0
            for axis, index in zip(self.dense.axes, self.dense.coordinate, strict=True)
            if axis != "pp"
        )

    def of(self, family: str) -> Grid:
        """Returns the grid of a family, `'dense'` or `'expert'`."""
        return self.expert if family == "expert" else self.dense

    def facts(self) -> str:
        """Returns the axes larger than one of both grids, for errors."""
        if self.expert.axes == self.dense.axes:
            return self.dense.facts()
        facts = [self.dense.facts()] if self.dense.facts() != "one rank" else []
        facts += [
            f"{axis} {index}/{size}"
            for axis, size, index in zip(
                self.expert.axes, self.expert.sizes, self.expert.coordinate, strict=True
            )
            if size > 1 and axis in ("ep", "etp") and self.expert.size("ep") > 1
        ]
        return ", ".join(facts) or "one rank"

    @classmethod
    def from_sizes(
        cls,
        rank: int = 0,
        *,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = 1,
        tp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        edp_replicate: int | None = None,
    ) -> "Grids":
        """Returns the grids of one rank from plain integers; no process group is needed.

        Ranks count up along the last axis first: dense `pp, dp_replicate, dp_shard, tp`, experts
        `pp, edp_replicate, edp_shard, ep, etp` (Megatron's order tp-cp-ep-dp-pp).

        Args:
            rank: Global rank.
            pp: Pipeline stages.
            dp_replicate: Replicas of the sharded state (HSDP's outer axis).
            dp_shard: Ranks that share the state between them (FSDP's axis, context included).
            tp: Tensor-parallel size of the dense parameters.
            ep: Expert-parallel size.
            etp: Tensor-parallel size of each expert; the dense one if not given.
            edp_replicate: Replicas of sharded experts; `dp_replicate` if not given.

        Raises:
            LayoutError: If the expert axes do not divide the world.
        """
        etp = tp if etp is None else etp
        edp_replicate = dp_replicate if edp_replicate is None else edp_replicate
        world = pp * dp_replicate * dp_shard * tp
        taken = pp * edp_replicate * ep * etp
        if world % taken:
            raise LayoutError(
                f"grid: {world} ranks (pp {pp}, dp_replicate {dp_replicate}, dp_shard {dp_shard}, "
                f"tp {tp}) do not divide by pp {pp} × edp_replicate {edp_replicate} × ep {ep} × "
                f"etp {etp} = {taken}. Choose ep and etp so that they do."
            )
        dense = dict(zip(DENSE_AXES, (pp, dp_replicate, dp_shard, tp), strict=True))
        sizes = (pp, edp_replicate, world // taken, ep, etp)
        expert = dict(zip(EXPERT_AXES, sizes, strict=True))
        return cls(Grid.from_rank(dense, rank), Grid.from_rank(expert, rank))

    @classmethod
    def from_pg_collection(
        cls,
        pg_collection: object,
        *,
        ep_rank: int | None = None,
        ep_size: int | None = None,
    ) -> "Grids":
        """Returns the grids of this rank from a Megatron `ProcessGroupCollection`.

        Only `rank()` and `size()` of its groups are asked. An unset field counts as one that
        the model does not use; for `ep` see `ep_rank_and_size`.

        | axis | group |
        |---|---|
        | pp, tp | `pp`, `tp` |
        | dp_shard | `dp_cp`, else `dp`; with HSDP `intra_dp_cp` |
        | dp_replicate | `inter_dist_opt`, when larger than one |
        | ep, etp | `ep`, `expt_tp` (unset: as `tp` when ep is one, else one) |
        | edp_shard | `expt_dp`; with HSDP `intra_expt_dp` |

        Args:
            pg_collection: An object with process groups as attributes.
            ep_rank: Expert-parallel rank to use instead of the collection's.
            ep_size: Expert-parallel size to use instead of the collection's.

        Raises:
            ValueError: If only one of `ep_rank` and `ep_size` is given.
            LayoutError: If the groups do not span the same ranks.

        Source: megatron/core/process_groups_config.py.
        """
        fields = _set_fields(pg_collection)

        def read(*names: str) -> tuple[int, int] | None:
            for name in names:
                if fields.get(name) is not None:
                    group = fields[name]
                    return int(group.rank()), int(group.size())
            return None

        tp, pp = read("tp") or (0, 1), read("pp") or (0, 1)
        dp = read("dp_cp", "dp") or (0, 1)
        replicate, shard = (0, 1), dp
        outer = read("inter_dist_opt")
        if outer is not None and outer[1] > 1:
            replicate, shard = outer, read("intra_dp_cp") or (dp[0] % (dp[1] // outer[1]), 0)
            shard = (shard[0], dp[1] // outer[1])
        rank, size = ep_rank_and_size(pg_collection, ep_rank=ep_rank, ep_size=ep_size)
        ep = (0, 1) if rank is None or size is None else (rank, size)
        etp = read("expt_tp") or (tp if ep[1] == 1 else (0, 1))
        world = pp[1] * dp[1] * tp[1]
        edp_size = world // (pp[1] * ep[1] * etp[1])
        edp = read("expt_dp")
        if edp is None:
            # Megatron's rank order: the position inside the stage, divided by ep × etp.
            position = dp[0] * tp[1] + tp[0]
            edp = (position // (ep[1] * etp[1]), max(edp_size, 1))
        ereplicate, eshard = (0, 1), edp
        if replicate[1] > 1:
            ereplicate = replicate
            eshard = (edp[0] % max(edp[1] // replicate[1], 1), edp[1] // replicate[1])
        dense = (pp, replicate, shard, tp)
        expert = (pp, ereplicate, eshard, ep, etp)
        return cls(
            Grid(DENSE_AXES, tuple(s for _, s in dense), tuple(r for r, _ in dense)),
            Grid(EXPERT_AXES, tuple(s for _, s in expert), tuple(r for r, _ in expert)),
        )

    @classmethod
    def from_mesh(cls, mesh: Any, expert_mesh: Any = None) -> "Grids":
        """Returns the grids of this rank from a `DeviceMesh`; the mesh's own axis names stay.

        Args:
            mesh: The mesh of the dense parameters, all of its axes.
            expert_mesh: The mesh of the experts; the dense one if not given.

        Raises:
            LayoutError: If the rank is not on the mesh, or the meshes differ in size.
        """
        dense = _mesh_grid(mesh)
        return cls(dense, dense if expert_mesh is None else _mesh_grid(expert_mesh))


def _set_fields(pg_collection: object) -> dict[str, Any]:
    """Returns the fields of a collection that were set, None among them.

    A `ProcessGroupCollection` answers None for a field that was never set, so its own
    dictionary must be asked; a class with slots has those that hold something.
    """
    fields = dict(getattr(pg_collection, "__dict__", {}))
    for cls in type(pg_collection).__mro__:
        for name in cls.__dict__.get("__slots__", ()):
            if name in cls.__dict__ and hasattr(pg_collection, name):
                fields.setdefault(name, getattr(pg_collection, name))
    return fields


def mesh_axes(mesh: Any) -> tuple[str, ...]:
    """Returns the axis names of a `DeviceMesh`; `axis0`, `axis1`, … where it has none."""
    names = mesh.mesh_dim_names
    return tuple(names) if names else tuple(f"axis{i}" for i in range(mesh.ndim))


def _mesh_grid(mesh: Any) -> Grid:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(
            f"grid: this rank is not on the mesh {mesh}. Plan only on ranks that hold a shard."
        )
    return Grid(mesh_axes(mesh), tuple(mesh.shape), tuple(coordinate))


def ep_rank_and_size(
    pg_collection: object | None = None,
    *,
    ep_rank: int | None = None,
    ep_size: int | None = None,
    default: tuple[int, int] | None = None,
) -> tuple[int, int] | tuple[None, None]:
    """Returns the expert-parallel rank and size of a model, by its own collection.

    | `pg_collection` | answer |
    |---|---|
    | `ep` is a group | its rank and size |
    | `ep=None` | `(0, 1)`: expert parallelism is off |
    | `ep` unset, or no collection | `default`, else `(None, None)` |

    A `ProcessGroupCollection` answers None for a field that was never set, so only `vars()`
    tells unset from None.

    Args:
        pg_collection: An object with process groups as attributes, or None.
        ep_rank: Rank to use instead; needs `ep_size`.
        ep_size: Size to use instead; needs `ep_rank`.
        default: Rank and size of the global expert grid, for a collection that leaves it unset.

    Raises:
        ValueError: If only one of `ep_rank` and `ep_size` is given, or the rank is not below
            the size.

    >>> ep_rank_and_size(ep_rank=3, ep_size=4)
    (3, 4)
    """
    if (ep_rank is None) != (ep_size is None):
        raise ValueError(
            f"ep_rank ({ep_rank}) and ep_size ({ep_size}) must be given together, or neither"
        )
    if ep_rank is not None and ep_size is not None:
        if not 0 <= ep_rank < ep_size:
            raise ValueError(f"ep_rank {ep_rank} is not in [0, {ep_size})")
        return ep_rank, ep_size
    fields = {} if pg_collection is None else _set_fields(pg_collection)
    if "ep" in fields:
        group = fields["ep"]
        return (0, 1) if group is None else (int(group.rank()), int(group.size()))
    return default if default is not None else (None, None)
