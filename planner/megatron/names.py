"""Names of parameters across ranks, for tools; with integers they need no process group.

All go by the model's own expert grid. Where neither integers nor a collection are given,
Megatron's global grid counts if Megatron is imported and initialised, else expert parallelism is
off.

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py, whose functions of these names ask
the global grid only.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from shardplan.layouts import (
    Grid,
    Grids,
    Layout,
    LayoutError,
    LayoutProvider,
    carried_pg_collection,
)
from shardplan.layouts import ep_rank_and_size as of_collection
from shardplan.layouts.model import own_names
from shardplan.layouts.variants import variants

from ..planning.manifest import separate_parts, value_names
from ..planning.table import build_table
from ..state.entries import Known
from .state import chunks_of, inner_optimizers

_MARKS = ("experts", "local_experts")
_GROUPED = re.compile(r"(weight|bias)(\d+)((?:_[a-z]+)?)$")


def ep_rank_and_size(
    model: Any = None,
    *,
    pg_collection: object | None = None,
    ep_rank: int | None = None,
    ep_size: int | None = None,
) -> tuple[int, int] | tuple[None, None]:
    """Returns the expert-parallel rank and size of a model.

    | given | answer |
    |---|---|
    | `ep_rank` and `ep_size` | these |
    | `pg_collection`, or one that the model carries at any wrapper level | its `ep`; `(0, 1)` if that is None |
    | a collection whose `ep` was never set, or nothing | Megatron's global grid if it is initialised, else `(None, None)` |

    Raises:
        ValueError: If only one of `ep_rank` and `ep_size` is given.
    """
    collection = pg_collection
    for chunk in chunks_of(model) if model is not None and collection is None else ():
        collection = carried_pg_collection(chunk)
        if collection is not None:
            break
    return of_collection(collection, ep_rank=ep_rank, ep_size=ep_size, default=_global_grid())


def _global_grid() -> tuple[int, int] | None:
    """Returns Megatron's global expert-parallel rank and size, if it runs in this process."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return None
    size = state.get_expert_model_parallel_world_size()
    return state.get_expert_model_parallel_rank(), size


def get_ep_layer_offset(
    num_experts: int | None = None,
    *,
    ep_rank: int | None = None,
    ep_size: int | None = None,
    pg_collection: object | None = None,
) -> int:
    """Returns the global index of a rank's first expert.

    Args:
        num_experts: Experts of a layer over all ranks; 0 is returned without.
        ep_rank: Expert-parallel rank; needs `ep_size`.
        ep_size: Expert-parallel size; needs `ep_rank`.
        pg_collection: Process groups to ask instead.

    Raises:
        ValueError: If only one of rank and size is given, or the experts do not divide.

    >>> get_ep_layer_offset(8, ep_rank=3, ep_size=4)
    6
    """
    rank, size = _grid(pg_collection, ep_rank, ep_size)
    return rank * _local_count(num_experts, size) if num_experts else 0


def _grid(pg_collection: object | None, rank: int | None, size: int | None) -> tuple[int, int]:
    found = ep_rank_and_size(pg_collection=pg_collection, ep_rank=rank, ep_size=size)
    return (0, 1) if found[0] is None or found[1] is None else found


def _local_count(num_experts: int, size: int) -> int:
    if num_experts % size:
        raise LayoutError(
            f"{num_experts} experts can't be divided by {size} expert-parallel ranks. Choose an "
            "ep size that divides the number of experts."
        )
    return num_experts // size


def expert_global_key(
    key: str,
    num_experts: int | None = None,
    *,
    ep_rank: int | None = None,
    ep_size: int | None = None,
    pg_collection: object | None = None,
) -> str:
    """Returns a key with its local expert's index replaced by the global one.

    Any key of a state dict will do, with prefixes, slots and component suffixes; one of no
    expert comes back as it is.

    Raises:
        ValueError: If only one of rank and size is given, the experts do not divide, or the
            index is none of the rank's local ones.

    >>> expert_global_key("mlp.experts.linear_fc1.weight1_w", 8, ep_rank=3, ep_size=4)
    'mlp.experts.linear_fc1.weight7_w'
    """
    if not num_experts:
        return key
    rank, size = _grid(pg_collection, ep_rank, ep_size)
    count = _local_count(num_experts, size)
    return _renumbered(key, 0, count, rank * count, f"local expert of {count} on a rank")


def expert_local_key(
    key: str,
    num_experts: int | None = None,
    *,
    ep_rank: int | None = None,
    ep_size: int | None = None,
    pg_collection: object | None = None,
) -> str:
    """Returns a key with its global expert's index replaced by the rank's local one.

    Raises:
        ValueError: If only one of rank and size is given, the experts do not divide, or the
            expert is not one of the rank's.

    >>> expert_local_key("mlp.experts.local_experts.6.linear_fc1.weight", 8, ep_rank=3, ep_size=4)
    'mlp.experts.local_experts.0.linear_fc1.weight'
    """
    if not num_experts:
        return key
    rank, size = _grid(pg_collection, ep_rank, ep_size)
    count = _local_count(num_experts, size)
    first = rank * count
    what = f"expert of ep rank {rank} of {size}, which holds [{first}, {first + count})"
    return _renumbered(key, first, count, -first, what)


def _renumbered(key: str, first: int, count: int, shift: int, what: str) -> str:
    """Adds `shift` to the expert's index in a key, by whole tokens."""
    parts = key.split(".")
    marks = [i for i, part in enumerate(parts) if part in _MARKS]
    if not marks:
        return key
    mark = marks[-1]

    def number(index: int) -> int:
        if not first <= index < first + count:
            raise LayoutError(f"{key}: {index} is no {what}. Give the grid of the model itself.")
        return index + shift

    if mark + 1 < len(parts) and parts[mark + 1].isdigit():
        parts[mark + 1] = str(number(int(parts[mark + 1])))
        return ".".join(parts)
    for at in range(mark + 1, len(parts)):
        grouped = _GROUPED.match(parts[at])
        if grouped:
            parts[at] = f"{grouped[1]}{number(int(grouped[2]))}{grouped[3]}"
            break
    return ".".join(parts)


def global_param_name(
    model_chunks: Any,
    param: Any,
    *,
    pg_collection: Any = None,
    grid: Grids | None = None,
    layouts: Iterable[LayoutProvider] | None = None,
    ep_rank: int | None = None,
    ep_size: int | None = None,
) -> str:
    """Returns the name that a parameter has in every parallel configuration.

    Layers are numbered over all pipeline stages, experts over all ranks; wrappers' tokens are
    left out.

    Args:
        model_chunks: The model or its chunks; or names with local shapes, offline.
        param: The parameter, or its name.
        pg_collection: Process groups, by default those that the model carries.
        grid: Plain integers instead of process groups.
        layouts: Providers; the built-in and the installed ones if not given.
        ep_rank: Expert-parallel rank instead of the collection's; needs `ep_size`.
        ep_size: Expert-parallel size instead of the collection's; needs `ep_rank`.

    Raises:
        LayoutError: If no chunk has the parameter.
        ValueError: If only one of `ep_rank` and `ep_size` is given.

    >>> shapes = {f"mlp.experts.linear_fc1.weight{i}": (4, 2) for i in range(2)}
    >>> grids = Grids.from_sizes(3, dp_shard=4, ep=4)
    >>> global_param_name(shapes, "mlp.experts.linear_fc1.weight1", grid=grids)
    'mlp.experts.linear_fc1.weight7'
    """
    described = isinstance(model_chunks, Mapping)
    chunks = [model_chunks] if described else chunks_of(model_chunks)
    table = build_table(
        model_chunks,
        pg_collection=pg_collection,
        grid=grid,
        layouts=layouts,
        ep_rank=ep_rank,
        ep_size=ep_size,
    )
    for module, chunk in zip(chunks, table.chunks, strict=True):
        fqn = _fqn(module, param, chunk.layouts)
        if fqn is not None and fqn in chunk.layouts:
            layout = chunk.layouts[fqn]
            return global_name(layout, chunk.grids.of(layout.family))
    shown = param if isinstance(param, str) else f"a parameter of shape {tuple(param.shape)}"
    raise LayoutError(f"{shown}: none of the {len(chunks)} model chunks has it. Pass all chunks.")


def global_name(layout: Layout, grid: Grid) -> str:
    """Returns the one name of a parameter, whatever it is cut into on disk."""
    if separate_parts(layout):
        # One parameter here and several in other models: by its own name in the module.
        layout = next(form for form in variants(layout, grid) if not separate_parts(form))
    return value_names(layout, grid)[0]


def _fqn(module: Any, param: Any, names: Iterable[str]) -> str | None:
    """Returns a parameter's name among those of a module, None if it is another module's."""
    if isinstance(param, str):
        return Known(names).find(param)
    for name, own in own_names(module):
        if own is param or getattr(own, "orig_param", own) is param:
            return name
    return None


def param_to_group_names(model_chunks: Any, optimizer: Any, **options: Any) -> dict[str, int]:
    """Returns the number of each parameter's group, by the parameter's global name.

    Groups are numbered through all chained optimizers, as Megatron's own dump numbers them.

    Args:
        model_chunks: The model or its chunks.
        optimizer: Its optimizer.
        options: As for `global_param_name`.
    """
    table = build_table(model_chunks, **options)
    names: dict[int, str] = {}
    for module, chunk in zip(chunks_of(model_chunks), table.chunks, strict=True):
        for name, own in own_names(module):
            layout = chunk.layouts[name]
            names.setdefault(id(own), global_name(layout, chunk.grids.of(layout.family)))
    found: dict[str, int] = {}
    numbers: dict[int, int] = {}
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            numbers[id(group)] = len(numbers)
        for parameter, group, _ in part.entries():
            found[names[id(parameter)]] = numbers[id(group)]
    return found
