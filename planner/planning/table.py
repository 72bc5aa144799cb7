"""The layouts of everything that one rank may hold, made once from the model."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import torch.distributed as dist

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    EXPERT,
    Grid,
    Grids,
    Layout,
    LayoutError,
    LayoutProvider,
    LayoutRegistry,
    Level,
    ModelLayouts,
    carried_pg_collection,
    installed_layouts,
    model_layouts,
)
from shardplan.layouts.experts import TOKENS, expert_tokens
from shardplan.layouts.layout import digest
from shardplan.layouts.megatron_fsdp import carried_dist_index, dist_index_grids
from shardplan.layouts.model import own_names
from shardplan.layouts.serial import stage_to_json

from ..compat import is_flattened
from ..state.described import described_parameters
from ..state.entries import Names
from ..without_gc import without_gc
from .meshes import UnplacedError, grids_from_tensors

_LOG = logging.getLogger("shardplan")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One module of the model: its grids and where its parameters lie.

    Attributes:
        section: The state-dict prefix it answers for, None for any.
        grids: This rank's grids of the module.
        layouts: Layout of each parameter and buffer, by clean name.
        state_layouts: Layout of each parameter's optimizer state, where it differs.
        described: Names of parameters that describe themselves.
        unplaced: Why the module's parameters have no layouts: what its meshes do not say.
    """

    section: str | None
    grids: Grids
    layouts: ModelLayouts
    state_layouts: dict[str, Layout]
    described: frozenset[str] = frozenset()
    unplaced: str = ""

    def layout(self, fqn: str, slot: str) -> Layout:
        """Returns the layout of a parameter's value; a slot may have one of its own."""
        if slot and fqn in self.state_layouts:
            return self.state_layouts[fqn]
        return self.layouts[fqn]


class LayoutOptions(TypedDict, total=False):
    """Where a model lies, and what places its parameters.

    Attributes:
        pg_collection: Process groups of the model; by default those it carries.
        grid: Plain integers instead of process groups.
        layouts: Providers; the built-in ones and those of installed packages if not given.
        optimizer_layouts: Storage providers for optimizer state that is cut otherwise than its
            parameter (ZeRO's flat shards, say).
        ep_rank: Expert-parallel rank instead of the collection's; needs `ep_size`.
        ep_size: Expert-parallel size instead of the collection's; needs `ep_rank`.
    """

    pg_collection: Any
    grid: Grids | None
    layouts: Iterable[LayoutProvider] | None
    optimizer_layouts: Iterable[LayoutProvider]
    ep_rank: int | None
    ep_size: int | None


class LayoutTable:
    """Where all of a model's parameters lie, on every rank; made once, for any number of planners.

    Both planners take one in place of the model, with all that was said when it was made:

        table = LayoutTable.of(model, pg_collection=groups, optimizer=optimizer)
        dcp.save(state, checkpoint_id=path, planner=LayoutAwareSavePlanner(table))
        dcp.load(state, checkpoint_id=path, planner=LayoutAwareLoadPlanner(table))

    It holds integers and names only, so it pickles and outlives the tensors.

    Attributes:
        ids: Names of the optimizer's parameters by their integer in `optimizer.state_dict()`.
        group_sizes: Number of parameters of each of the optimizer's groups.
        chunks: The chunks.
        names: Finds their parameters in a state dict.
        tokens: Name tokens that mark experts.
        digest: Equal on all ranks of a pipeline stage.
        names_differ: Whether ranks know different parameters: those of other pipeline stages, or
            other experts by index.
    """

    ids: Mapping[int, str] = MappingProxyType({})
    group_sizes: tuple[int, ...] = ()

    def __init__(self, chunks: Sequence[Chunk], tokens: frozenset[str] = TOKENS) -> None:
        self.chunks = tuple(chunks)
        self.tokens = tokens
        self.names = Names((chunk.section, chunk.layouts) for chunk in self.chunks)
        self.digest = _digest(self.chunks)
        self.names_differ = len(self.chunks) > 1 or any(map(_names_differ, self.chunks))

    @classmethod
    def of(
        cls, model: Any = None, *, optimizer: Any = None, **options: Unpack[LayoutOptions]
    ) -> "LayoutTable":
        """Reads a model once.

        Args:
            model: A module; a list of modules (virtual pipeline chunks, sections `model0`, …); a
                mapping from state-dict sections to modules with a `pg_collection` of their own; or
                a mapping from names to local shapes in place of any module. Without a model only
                tensors that describe themselves (DTensors) and replicas can be saved. A table is
                returned as it is.
            optimizer: The optimizer of a raw `optimizer.state_dict()`, whose integers name its
                parameters; not needed for the form of `torch.distributed.checkpoint.state_dict`.
            options: Where the model lies, and what places its parameters; see `LayoutOptions`.

        Raises:
            LayoutError: If a parameter can't be placed, or the grids do not fit together.
            ValueError: If only one of `ep_rank` and `ep_size` is given, or anything beside a table.
        """
        if isinstance(model, LayoutTable):
            said = {"optimizer": optimizer, **options}
            beside = [f"{name}=" for name, value in said.items() if value not in (None, (), [])]
            if beside:
                raise ValueError(
                    f"{', '.join(beside)} given beside a LayoutTable, which was made without. Pass "
                    "them to LayoutTable.of."
                )
            return model
        table = build_table(model, **options)
        table.ids = _optimizer_names(model, optimizer)
        groups = optimizer.param_groups if optimizer is not None else ()
        table.group_sizes = tuple(len(group["params"]) for group in groups)
        return table

    @property
    def grids(self) -> Grids:
        """The grids of the first chunk; all chunks span the same ranks."""
        return self.chunks[0].grids


def _names_differ(chunk: Chunk) -> bool:
    if chunk.grids.dense.size("pp") > 1:
        return True
    return chunk.grids.expert.size("ep") > 1 and any(
        EXPERT in layout.name for layout in chunk.layouts.values()
    )


def _digest(chunks: Iterable[Chunk]) -> str:
    """Returns a digest of all layouts, equal on all ranks of a pipeline stage."""
    known: dict[int, str] = {}

    def text(layout: Layout) -> str:
        chain = known.get(id(layout.stages))
        if chain is None:
            chain = known[id(layout.stages)] = repr([stage_to_json(s) for s in layout.stages])
        return f"{layout.name}|{layout.family}|{chain}"

    return digest(
        (
            chunk.section,
            [chunk.grids.dense.axes, chunk.grids.dense.sizes],
            [chunk.grids.expert.axes, chunk.grids.expert.sizes],
            "\n".join(text(layout) for layout in chunk.layouts.values()),
            "\n".join(text(layout) for layout in chunk.state_layouts.values()),
        )
        for chunk in chunks
    )


def build_table(
    model: Any,
    *,
    pg_collection: Any = None,
    grid: Grids | None = None,
    layouts: Iterable[LayoutProvider] | None = None,
    optimizer_layouts: Iterable[LayoutProvider] = (),
    ep_rank: int | None = None,
    ep_size: int | None = None,
) -> LayoutTable:
    """Reads a model once; see `LayoutTable.of` and `LayoutOptions`."""
    if (ep_rank is None) != (ep_size is None):
        raise ValueError(
            f"ep_rank ({ep_rank}) and ep_size ({ep_size}) must be given together, or neither"
        )
    with without_gc():
        providers = (
            tuple(layouts) if layouts is not None else (*DEFAULT_LAYOUTS, *installed_layouts())
        )
        registry, tokens = LayoutRegistry(providers), expert_tokens(providers)
        state_providers = tuple(optimizer_layouts)
        state_registry = (
            LayoutRegistry(
                (*(p for p in providers if p.level is not Level.STORAGE), *state_providers)
            )
            if state_providers
            else None
        )
        chunks = []
        for section, given in modules_of(model):
            # FSDP1's state dict describes itself, and its parameters do not.
            module = None if is_flattened(given) else given
            _check_gathered(module)
            carried = carried_pg_collection(module)
            collection = carried if section is not None and carried is not None else pg_collection
            unplaced = ""
            try:
                grids = grid or _grids(module, collection or carried, tokens, ep_rank, ep_size)
            except UnplacedError as error:
                # Its tensors describe themselves, as they do where no model is given.
                grids, module, unplaced = replicas(), None, str(error)
                _LOG.warning(
                    "%s Until then ranks send each other the places of their shards.", error
                )
            own = ModelLayouts() if module is None else model_layouts(module, grids, registry)
            state: dict[str, Layout] = {}
            if state_registry is not None:
                described = {fqn: layout.local_shape for fqn, layout in own.items()}
                made = model_layouts(described if module is None else module, grids, state_registry)
                claimed = {
                    fqn
                    for fqn, layout in made.items()
                    if layout.stages[0] != own[fqn].stages[0]
                    and type(layout.storage).__name__ != "Whole"
                }
                state = {fqn: made[fqn] for fqn in claimed}
            chunks.append(
                Chunk(
                    section,
                    grids,
                    own,
                    dict(sorted(state.items())),
                    described_parameters(module),
                    unplaced,
                )
            )
    world = {chunk.grids.world_size for chunk in chunks}
    if len(world) > 1:
        raise LayoutError(
            f"the model's modules span {sorted(world)} ranks. All must span the ranks that save; "
            "give a pg_collection or grid= for each."
        )
    return LayoutTable(chunks, tokens)


def _optimizer_names(model: Any, optimizer: Any) -> dict[int, str]:
    """Returns the name of each parameter of an optimizer by its integer in `state_dict()`.

    Args:
        model: The planner's `model`.
        optimizer: A `torch.optim.Optimizer`, or None.
    """
    if optimizer is None:
        return {}
    names: dict[int, str] = {}
    for _, module in modules_of(model):
        for fqn, parameter in own_names(module) if hasattr(module, "named_parameters") else ():
            names.setdefault(id(parameter), fqn)
    found: dict[int, str] = {}
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                found[number] = names[id(parameter)]
            number += 1
    return found


def _check_gathered(module: Any) -> None:
    """Refuses a model whose parameters DeepSpeed's ZeRO-3 has taken apart: they are empty."""
    named = module.named_parameters() if hasattr(module, "named_parameters") else ()
    for fqn, parameter in named:
        shape = getattr(parameter, "ds_shape", None)
        if shape is not None and tuple(parameter.shape) != tuple(shape):
            raise LayoutError(
                f"{fqn}: DeepSpeed's ZeRO-3 keeps a partition of this parameter of shape "
                f"{tuple(shape)} in ds_tensor, and the parameter itself has shape "
                f"{tuple(parameter.shape)}. Build the planner, and save or load, inside "
                "deepspeed.zero.GatheredParameters(list(model.parameters())), where parameters are "
                "whole; or describe the partitions with FSDPFlatBuffer."
            )


def modules_of(model: Any) -> list[tuple[str | None, Any]]:
    """Returns the sections and modules that `model=` names."""
    if isinstance(model, Mapping) and not _is_description(model):
        return [
            (str(section), module)
            for section, value in model.items()
            for module in (value if isinstance(value, list | tuple) else [value])
        ]
    if isinstance(model, list | tuple) or type(model).__name__ == "ModuleList":
        return [(None, module) for module in model]
    return [(None, model)]


def _is_description(model: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a model's names and local shapes rather than sections and modules."""
    return all(
        isinstance(shape, Sequence) and all(isinstance(n, int) for n in shape)
        for shape in model.values()
    )


def _grids(
    module: Any,
    collection: Any,
    tokens: frozenset[str],
    ep_rank: int | None,
    ep_size: int | None,
) -> Grids:
    """Finds the grids of a module: of its groups, its wrapper's or DTensors' mesh, or replicas."""
    if collection is not None:
        return Grids.from_pg_collection(collection, ep_rank=ep_rank, ep_size=ep_size)
    if module is not None and not isinstance(module, Mapping):
        index = carried_dist_index(module)
        if index is not None:
            world = dist.get_world_size()
            return dist_index_grids(index, world_size=world, ep_rank=ep_rank, ep_size=ep_size)
        grids = grids_from_tensors(module.named_parameters(), tokens)
        if grids is not None:
            return grids
    return replicas()


def replicas() -> Grids:
    """Returns the grids of plain data parallelism: every rank of the default group a replica."""
    rank, size = (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else (0, 1)
    )
    dense = Grid(("dp_replicate",), (size,), (rank,))
    return Grids(dense, dense)
