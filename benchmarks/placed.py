"""Tensors of known values under a layout, as plain local tensors and as DTensors.

| name | is |
|---|---|
| `Placement` | a layout and its number of ranks, such as rows over 3 |
| `Placed` | the tensors of this rank, and the planners that know where they lie |

| kind | a rank holds |
|---|---|
| `rows` | its share of dim 0 |
| `columns` | its share of dim 1; of dim 0 where there is none |
| `halves` | of a SwiGLU projection its share of both halves, as Megatron's tensor parallelism cuts it; of others its columns |
| `flat` | its slice of one flat buffer of all tensors, cut anywhere |

Each element is its place in the global tensor, so that one in the wrong place is found.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.layouts import (
    BufferDescription,
    Cut,
    DTensorStorage,
    FSDPFlatBuffer,
    Grids,
    SwiGLU,
    TensorParallel,
)
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

SWIGLU = "*linear_fc1.weight"
Components = Literal["split", "fused"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout and its number of ranks.

    Attributes:
        kind: `rows`, `columns`, `halves` or `flat`.
        ranks: How many of eight ranks share the tensors.
    """

    kind: str
    ranks: int

    def scaled(self, world: int) -> "Placement":
        """Returns the placement for a world that has not eight ranks."""
        return dataclasses.replace(self, ranks=max(1, self.ranks * world // 8))

    def __str__(self) -> str:
        return f"{self.kind} × {self.ranks}"


class Placed:
    """The tensors of one rank under a placement; all ranks of the world make it.

    Args:
        placement: The layout.
        hidden: Hidden size.
        layers: Number of layers.

    Attributes:
        member: Whether this rank is one of those that share the tensors.
        stock: Whether torch's planners know this kind of layout.
        group: The ranks that share the tensors; None for all.
        needed: Bytes of this rank's tensors, the same on all members but for rounding.
    """

    def __init__(self, placement: Placement, hidden: int, layers: int) -> None:
        self.placement = placement
        self.shapes = {
            f"layers.{i}.{name}": shape
            for i in range(layers)
            for name, shape in (
                ("linear_fc1.weight", (8 * hidden, hidden)),
                ("linear_fc2.weight", (hidden, 4 * hidden)),
                ("norm.weight", (hidden,)),
            )
        }
        world, self.rank = dist.get_world_size(), dist.get_rank()
        self.member = self.rank < placement.ranks
        self.stock = placement.kind in ("rows", "columns")
        everyone = placement.ranks == world
        self.group = None if everyone else dist.new_group(list(range(placement.ranks)))
        self._mesh = None
        if self.stock:
            self._mesh = DeviceMesh(
                "cpu", list(range(placement.ranks)), mesh_dim_names=("dp_shard",)
            )
        self._buffer: BufferDescription | None = None
        if placement.kind == "flat":
            self._buffer = BufferDescription(self.shapes, placement.ranks, alignment=16)
        self._local: dict[str, torch.Tensor] = {}
        if self.member:
            self._local = {
                fqn: torch.empty_like(self._values(fqn, shape))
                for fqn, shape in self.shapes.items()
            }
        total = sum(4 * math.prod(shape) for shape in self.shapes.values())
        self.needed = total / placement.ranks if placement.kind != "halves" else self._mine()

    def _mine(self) -> float:
        mine = sum(4 * tensor.numel() for tensor in self._local.values())
        sizes = [0.0] * dist.get_world_size()
        dist.all_gather_object(sizes, float(mine))
        return sum(sizes) / self.placement.ranks

    def _values(self, fqn: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns what this rank must hold of a tensor."""
        # float32 holds every integer below 2 ** 24; larger places wrap round.
        whole = (torch.arange(math.prod(shape)) % 16_777_213).float().view(shape)
        kind, count = self.placement.kind, self.placement.ranks
        if kind == "flat" and self._buffer is not None:
            length = self._buffer.slice_length
            offset = self._buffer.offsets[fqn]
            first = min(max(self.rank * length - offset, 0), whole.numel())
            last = min(max((self.rank + 1) * length - offset, 0), whole.numel())
            return whole.view(-1)[first:last].clone()
        if kind == "halves" and "fc1" in fqn:
            halves = [half.chunk(count)[self.rank] for half in whole.chunk(2)]
            return torch.cat(halves)
        dim = 0 if kind == "rows" or len(shape) == 1 else 1
        if kind == "halves" and len(shape) == 1:
            return whole
        parts = whole.chunk(count, dim)
        if self.rank < len(parts):
            return parts[self.rank].contiguous()
        return whole.narrow(dim, 0, 0).contiguous()

    def fill(self) -> None:
        """Gives every element its value."""
        for fqn, local in self._local.items():
            local.copy_(self._values(fqn, self.shapes[fqn]))

    def clear(self) -> None:
        """Gives every element a value that none has."""
        for local in self._local.values():
            local.fill_(-1)

    def wrong(self) -> int:
        """Returns how many elements do not have their value."""
        return sum(
            int((local != self._values(fqn, self.shapes[fqn])).sum())
            for fqn, local in self._local.items()
        )

    def local_state(self) -> dict[str, Any]:
        """Returns the tensors as they lie in this rank's memory."""
        return {"model": dict(self._local)}

    def dtensor_state(self) -> dict[str, Any]:
        """Returns the tensors as DTensors, for torch's planners."""
        assert self._mesh is not None  # asked of stock layouts only
        state = {}
        for fqn, local in self._local.items():
            shape = torch.Size(self.shapes[fqn])
            dim = 0 if self.placement.kind == "rows" or len(shape) == 1 else 1
            stride = torch.empty(shape, device="meta").stride()
            state[f"model.{fqn}"] = DTensor.from_local(
                local, self._mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
            )
        return state

    def save_planner(self, components: Components = "split") -> LayoutAwareSavePlanner:
        """Returns a planner that knows where the tensors lie.

        Args:
            components: Whether SwiGLU halves are tensors of their own on disk, or fused, as
                torch's planner has them.
        """
        return self._planner(LayoutAwareSavePlanner, components)

    def load_planner(self, components: Components = "split") -> LayoutAwareLoadPlanner:
        """Returns a planner that knows where the tensors lie; see `save_planner`."""
        return self._planner(LayoutAwareLoadPlanner, components)

    def _planner(self, kind: Callable[..., Any], components: Components) -> Any:
        count = self.placement.ranks
        providers: list[Any] = [SwiGLU([SWIGLU], components=components)]
        shapes = dict(self.shapes)
        axis = "dp_shard"
        if self.placement.kind == "halves":
            axis = "tp"
            providers.append(TensorParallel({SWIGLU: 0, "*linear_fc2.weight": 1}))
            shapes = {fqn: tuple(local.shape) for fqn, local in self._local.items()}
        elif self._buffer is not None:
            providers.append(FSDPFlatBuffer(buffers=[self._buffer]))
        else:
            dim = int(self.placement.kind == "columns")
            cut = (Cut(dim, axis),)
            providers.append(DTensorStorage({"*linear*": cut, "*norm.weight": (Cut(0, axis),)}))
        grid = Grids.from_sizes(self.rank, **{axis: count})
        return kind(shapes, grid=grid, layouts=providers)
