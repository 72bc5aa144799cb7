"""The expert-parallel grid: a rank's local experts under their global index."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from .grid import Grid
from .layout import EXPERT
from .provider import Level, ParamInfo
from .stages import ExpertIndex, Shard, Stage, Unstack

_GROUPED = re.compile(r"(weight|bias)(\d+)$")


TOKENS = frozenset(("experts", "local_experts"))


class ExpertName(NamedTuple):
    """Where a local expert's index stands in a parameter's name.

    Attributes:
        head: The name before the index, `'mlp.experts.linear_fc1.weight'`.
        local_expert_index: The index itself; None where the experts are stacked.
        tail: The name after it, `'.linear_fc1.weight'` for sequential experts.
    """

    head: str
    local_expert_index: int | None
    tail: str


def expert_name(fqn: str, tokens: Iterable[str] = TOKENS) -> ExpertName | None:
    """Returns where the expert index stands in a name; None for a dense parameter.

    | kind | name |
    |---|---|
    | sequential | `….experts.local_experts.{i}.…` or `….experts.{i}.…` |
    | grouped | `….experts.linear_fc1.weight{i}` or `bias{i}`: the last token |
    | stacked | any other name with the token `experts`: no index |

    `shared_experts` is another token, and so is `experts_gate`. Only whole tokens count, so
    `layers.1.` in the path, or `weight1` of a dense layer, stays as it is.

    >>> expert_name("layers.1.mlp.experts.linear_fc1.weight15")
    ExpertName(head='layers.1.mlp.experts.linear_fc1.weight', local_expert_index=15, tail='')
    """
    if not any(token in fqn for token in tokens):
        return None
    parts = fqn.split(".")
    marks = [i for i, part in enumerate(parts) if part in tokens]
    if not marks:
        return None
    last = marks[-1]
    if last + 1 < len(parts) and parts[last + 1].isdigit():
        head = ".".join(parts[: last + 1]) + "."
        tail = "".join("." + part for part in parts[last + 2 :])
        return ExpertName(head, int(parts[last + 1]), tail)
    grouped = _GROUPED.match(parts[-1])
    if grouped and len(parts) > last + 1:
        head = "".join(part + "." for part in parts[:-1]) + grouped[1]
        return ExpertName(head, int(grouped[2]), "")
    return ExpertName(fqn, None, "")


def cut_by_experts(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor that its mesh's axis `ep` cuts.

    What a tensor says of itself counts before its name.
    """
    mesh = getattr(tensor, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return "ep" in names and not tensor.placements[names.index("ep")].is_replicate()


class ExpertGrid:
    """Names experts by their global index, by the model's own expert grid.

    | form | reads |
    |---|---|
    | `ExpertGrid()` | names, `local_expert_indices` of the layer where it has them, `num_moe_experts` of its config; ep rank and size from the grid |
    | `ExpertGrid(num_experts=8)` | the number of experts of every layer |
    | `ExpertGrid(indices=((0, 2), (1, 3)))` | the global index of each local expert of each ep rank |

    Args:
        num_experts: Experts of a layer, over all ranks; must divide by the ep size.
        indices: Global indices for each ep rank, where they are no contiguous blocks.
        tokens: Name tokens that mark a parameter as one of several experts.
        stacked: What stacked experts `[E, …]` become on disk: one tensor (`'stacked'`), or one
            for each expert (`'single'`), named `….experts.{index}.…`.

    Source: megatron/core/transformer/moe; grouped and sequential names of its fsdp_dtensor path.
    """

    name = "expert-grid"
    level = Level.EXPERT

    def __init__(
        self,
        num_experts: int | None = None,
        *,
        indices: Sequence[Sequence[int]] | None = None,
        tokens: Iterable[str] = TOKENS,
        stacked: Literal["stacked", "single"] = "stacked",
    ) -> None:
        self._num_experts = num_experts
        self._table = None if indices is None else tuple(tuple(row) for row in indices)
        self.tokens = frozenset(tokens)
        self._unstack = stacked == "single"

    def claims(self, param: ParamInfo) -> bool:
        return param.is_expert

    def rename(self, param: ParamInfo, name: str) -> str:
        """Returns the name on disk, with a hole where the expert's index stands."""
        found = expert_name(name, self.tokens)
        if found is None:
            return name
        if found.local_expert_index is not None:
            return found.head + EXPERT + found.tail
        return self.single_name(name) if Unstack() in self.stages(param) else name

    def single_name(self, name: str) -> str:
        """Returns the name that one of stacked experts has alone; empty if no token marks it."""
        parts = name.split(".")
        marks = [i for i, part in enumerate(parts) if part in self.tokens]
        return ".".join([*parts[: marks[-1] + 1], EXPERT, *parts[marks[-1] + 1 :]]) if marks else ""

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        found = expert_name(param.fqn, self.tokens)
        local = found.local_expert_index if found else None
        if local is None:
            return self._stacked(param)
        count = self._local_count(param, param.num_local_experts)
        if count is None:
            raise param.fail(
                "the number of experts of its layer is not known",
                "Pass ExpertGrid(num_experts=...).",
            )
        if local >= count:
            raise param.fail(
                f"local expert {local} is not in [0, {count}), the experts of one rank",
                "Name experts locally, from 0 on every rank, or pass the layer's number of "
                "experts to ExpertGrid(num_experts=...).",
            )
        return (ExpertIndex(local, count, "ep", self._table),)

    def _stacked(self, param: ParamInfo) -> tuple[Stage, ...]:
        """Places stacked experts `[local experts, …]`, or what all experts share."""
        shape = param.local_shape
        known = self._local_count(param, None)
        mesh = getattr(param.param, "device_mesh", None)
        placed = mesh is not None and "ep" in (mesh.mesh_dim_names or ())
        if len(shape) < 3 and known != (shape[0] if shape else None):
            if known is None and not placed and param.grid.size("ep") > 1:
                raise param.fail(
                    f"its shape {shape} does not tell whether it is stacked by expert or shared by "
                    "all, and the number of experts of its layer is not known",
                    "Pass ExpertGrid(num_experts=...).",
                )
            return ()
        stages: list[Stage] = [] if placed else [Shard(0, "ep")]
        if not placed and known is not None and known != shape[0]:
            raise param.fail(
                f"dim 0 of stacked experts has {shape[0]} rows but a rank holds {known} experts",
                "Mend the number of experts, or pass ExpertGrid(num_experts=...).",
            )
        order = [index for row in self._table or () for index in row]
        if not placed and order != sorted(order):
            raise param.fail(
                f"ExpertGrid(indices=...) puts stacked experts in the order {order}",
                "Stacked experts lie on disk in the order of the ranks; give one block after "
                "another.",
            )
        if self._unstack and self.single_name(param.fqn):
            stages.append(Unstack())
        return tuple(stages)

    def _local_count(self, param: ParamInfo, counted: int | None) -> int | None:
        """Returns how many experts each rank holds, all that is known about it agreeing."""
        size = param.grid.size("ep")
        if self._table is not None:
            self._check_table(param, size)
            return len(self._table[0])
        total = self._num_experts
        _, live = param.nearest("local_expert_indices")
        if live is not None:
            _check_block(param, [int(index) for index in live])
            counted = len(live)
        if total is None:
            for _, module in reversed(param.owners):
                total = getattr(getattr(module, "config", None), "num_moe_experts", None)
                if total is not None:
                    break
        if total is None:
            return counted
        if total % size:
            raise param.fail(
                f"{total} experts can't be divided by {size} expert-parallel ranks",
                "Choose an ep size that divides the number of experts.",
            )
        if counted is not None and counted != total // size:
            raise param.fail(
                f"the rank has {counted} local experts but {total} experts over {size} "
                f"expert-parallel ranks make {total // size}",
                "Pass the model's own pg_collection (or grid=): its ep size is not the one "
                "that the model was built with.",
            )
        return int(total) // size

    def _check_table(self, param: ParamInfo, size: int) -> None:
        table = self._table or ()
        flat = sorted(index for row in table for index in row)
        if len(table) != size or len({len(row) for row in table}) != 1:
            raise param.fail(
                f"ExpertGrid(indices=...) has {len(table)} rows for {size} expert-parallel ranks",
                "Give one row of equal length for each rank.",
            )
        if flat != list(range(len(flat))):
            raise param.fail(
                f"ExpertGrid(indices=...) names the experts {flat}, not each of "
                f"0 … {len(flat) - 1} once",
                "Give every global expert index once.",
            )


def _check_block(param: ParamInfo, indices: list[int]) -> None:
    """Checks that a rank's live expert indices are the block that its coordinate says."""
    first = param.grid.index("ep") * len(indices)
    expected = list(range(first, first + len(indices)))
    if indices != expected:
        raise param.fail(
            f"the layer's local_expert_indices are {indices}, but ep rank "
            f"{param.grid.index('ep')} of {param.grid.size('ep')} holds {expected}",
            "Pass the model's own pg_collection, or ExpertGrid(indices=...) for a placement "
            "that is not in blocks.",
        )


def global_expert_index(grid: Grid, local_expert_index: int, num_experts: int) -> int:
    """Returns the global index of a rank's local expert."""
    info = ParamInfo("experts", (), grid, is_expert=True)
    count = ExpertGrid(num_experts)._local_count(info, None) or 0
    return ExpertIndex(local_expert_index, count).expert_index(grid)


def expert_tokens(providers: Iterable[object]) -> frozenset[str]:
    """Returns the name tokens that mark experts for a set of providers."""
    return next((p.tokens for p in providers if isinstance(p, ExpertGrid)), TOKENS)
