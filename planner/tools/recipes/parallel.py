"""A parallel configuration of a model, and what a planner takes to plan for one rank of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from shardplan.layouts import (
    GDN,
    BufferDescription,
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
    LayoutError,
    LayoutProvider,
    SwiGLU,
    TensorParallel,
    VocabularyPadding,
)
from shardplan.layouts.errors import summary
from shardplan.layouts.slab import Shape

from .numbers import Numbers
from .parameters import EMBEDDING, OUTPUT, Parameter, parameters

FLAT = "flat"
DIM0 = "dim0"
NONE = "none"


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of the parallel axes.

    Attributes:
        name: What the configuration is called.
        tp: Tensor-parallel ranks of dense parameters.
        pp: Pipeline stages.
        dp_shard: Ranks that share dense parameters (FSDP).
        dp_replicate: Replicas of the sharded state (HSDP).
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of each expert.
        fsdp: `flat` (one flat buffer for the dense parameters of a layer and one for its
            experts, as Megatron-FSDP), `dim0` (each parameter by its first dim, as FSDP2), or
            `none`.
        pad_vocabulary: The vocabulary is padded to a multiple of this times `tp`; 0 for none.
    """

    name: str = ""
    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    ep: int = 1
    etp: int = 1
    fsdp: str = FLAT
    pad_vocabulary: int = 128

    def __post_init__(self) -> None:
        if self.fsdp not in (FLAT, DIM0, NONE):
            raise LayoutError(
                f"{self.title}: fsdp is {self.fsdp!r}, not {FLAT!r}, {DIM0!r} or {NONE!r}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def title(self) -> str:
        """The name, or the sizes larger than one where there is none."""
        if self.name:
            return self.name
        names = ("tp", "pp", "dp_shard", "dp_replicate", "ep", "etp")
        sizes = [f"{n} {getattr(self, n)}" for n in names if getattr(self, n) > 1]
        if self.fsdp != FLAT and self.dp_shard > 1:
            sizes.append(f"fsdp {self.fsdp}")
        return ", ".join(sizes) or "one rank"

    def grids(self, rank: int = 0) -> Grids:
        """Returns the grids of a rank.

        Raises:
            LayoutError: If the expert axes do not divide the world.
        """
        return Grids.from_sizes(
            rank,
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
        )


def parallel_from_table(table: dict[str, Any], where: str) -> Parallel:
    """Returns the configuration of a recipe's `[[parallel]]` table.

    Raises:
        LayoutError: If it has an unknown name.
    """
    try:
        return Parallel(**table)
    except TypeError as error:
        known = ", ".join(f.name for f in fields(Parallel))
        raise LayoutError(f"{where}: [[parallel]]: {error}. It takes {known}.") from None


@dataclass(frozen=True, slots=True)
class Description:
    """Everything that a planner takes for one rank of a model that is only described.

    `LayoutAwareSavePlanner(d.shapes, grid=d.grids, layouts=d.providers)`

    Attributes:
        shapes: Local shape of each parameter of the rank, before any FSDP cut, by local name.
        grids: The rank's grids.
        providers: Who places the parameters.
        globals: Global parameter that each local one is part of.
    """

    shapes: dict[str, Shape]
    grids: Grids
    providers: tuple[LayoutProvider, ...]
    globals: dict[str, Parameter] = field(default_factory=dict)


def stage_of(numbers: Numbers, pp: int, layer: int) -> int:
    """Returns the pipeline stage that has a layer; stages before have one more if uneven."""
    each, extra = divmod(numbers.layers, pp)
    border = extra * (each + 1)
    return layer // (each + 1) if layer < border else extra + (layer - border) // max(each, 1)


def describe(
    numbers: Numbers,
    parallel: Parallel,
    rank: int = 0,
    *,
    extra: Iterable[LayoutProvider] = (),
    components: bool = True,
) -> Description:
    """Returns the description of one rank's part of a model.

    Layers keep their global numbers on every pipeline stage; experts are named locally.

    Args:
        numbers: The model.
        parallel: The configuration.
        rank: The rank.
        extra: Further providers, such as Hugging Face names.
        components: Whether fused projections are split into their components on disk.

    Raises:
        LayoutError: With every parameter whose dims do not divide, by name.
    """
    grids = parallel.grids(rank)
    stage = grids.stage
    shapes: dict[str, Shape] = {}
    sources: dict[str, Parameter] = {}
    faults: list[str] = []
    if parallel.pp > numbers.layers:
        faults.append(f"{numbers.layers} layers can't fill {parallel.pp} pipeline stages")
    if numbers.experts and numbers.experts % parallel.ep:
        faults.append(
            f"mlp.experts: {numbers.experts} experts can't be divided by {parallel.ep} "
            "expert-parallel ranks (ep)"
        )
    local = numbers.experts // parallel.ep if numbers.experts else 0
    for p in parameters(numbers):
        if p.layer is not None:
            where = stage_of(numbers, parallel.pp, p.layer)
        else:
            where = 0 if p.name == EMBEDDING else parallel.pp - 1
        if where != stage or (p.expert is not None and p.expert >= local):
            continue
        shapes[p.name] = _local(p, parallel, faults)
        sources[p.name] = p
    if faults:
        kinds = dict.fromkeys(faults)
        raise LayoutError(f"{parallel.title}: {summary(kinds)}")
    providers = (
        *_storage(numbers, parallel, grids, shapes, sources),
        *_components(numbers, components),
        TensorParallel(_dims(sources)),
        VocabularyPadding({EMBEDDING: numbers.vocabulary, OUTPUT: numbers.vocabulary}),
        *((ExpertGrid(numbers.experts),) if numbers.experts else ()),
        *extra,
    )
    return Description(shapes, grids, providers, sources)


def _local(p: Parameter, parallel: Parallel, faults: list[str]) -> Shape:
    """Returns a parameter's local shape before FSDP; dims that do not divide are faults."""
    if p.dim is None:
        return p.shape
    axis = "tp" if p.expert is None else "etp"
    count = parallel.tp if p.expert is None else parallel.etp
    size = p.shape[p.dim]
    if p.name in (EMBEDDING, OUTPUT):
        unit = max(parallel.pad_vocabulary, 1) * count
        size = -(-size // unit) * unit if parallel.pad_vocabulary else size
    name = _generic(p.name)
    for part, rows in p.parts or (("", size),):
        if rows % count:
            what = (
                f"the {rows} rows of its component {part!r}" if part else f"dim {p.dim} of {rows}"
            )
            faults.append(f"{name}: {what} can't be divided by {count} ranks ({axis})")
    return p.shape[: p.dim] + (size // count,) + p.shape[p.dim + 1 :]


def _generic(name: str) -> str:
    """Returns a name with its layer and expert numbers left open."""
    tokens = name.split(".")
    if "layers" in tokens:
        tokens[tokens.index("layers") + 1] = "*"
    if "experts" in tokens:
        tokens[-1] = tokens[-1].rstrip("0123456789") + "*"
    return ".".join(tokens)


def _dims(sources: dict[str, Parameter]) -> dict[str, int | None]:
    """Returns the sharded dim of each kind of name."""
    return {_generic(name): p.dim for name, p in sources.items() if p.dim is not None}


def _components(numbers: Numbers, split: bool) -> tuple[LayoutProvider, ...]:
    how: Any = "split" if split else "fused"
    fc1 = ["*.mlp.linear_fc1.weight", "*.shared_experts.linear_fc1.weight"]
    found: list[LayoutProvider] = [SwiGLU([*fc1, "*.experts.linear_fc1.weight*"], components=how)]
    if numbers.delta is not None:
        d = numbers.delta
        convolved = {"query": d.qk, "key": d.qk, "value": d.v}
        rest = {"z": d.v, "beta": d.value_heads, "alpha": d.value_heads}
        patterns = {
            "*.self_attention.in_proj.weight": {**convolved, **rest},
            "*.self_attention.conv1d.weight": convolved,
        }
        found.append(GDN(patterns, components=how))
    return tuple(found)


def _storage(
    numbers: Numbers,
    parallel: Parallel,
    grids: Grids,
    shapes: dict[str, Shape],
    sources: dict[str, Parameter],
) -> tuple[LayoutProvider, ...]:
    """Returns the provider of what each rank stores."""
    if parallel.fsdp == NONE:
        return ()
    if parallel.fsdp == DIM0:
        cuts = {
            "*.experts.*": (Cut(0, "edp_shard"),),
            "*": (Cut(0, "dp_shard"),),
        }
        return (DTensorStorage(cuts),)
    units: dict[tuple[int | None, bool], dict[str, Shape]] = {}
    for name, shape in shapes.items():
        p = sources[name]
        unit = p.layer if p.layer is not None else -1 if name == EMBEDDING else None
        units.setdefault((unit, p.expert is not None), {})[name] = shape
    buffers = [
        BufferDescription(
            held,
            (grids.expert if expert else grids.dense).size("edp_shard" if expert else "dp_shard"),
            alignment=1,
        )
        for (_, expert), held in units.items()
    ]
    return (FSDPFlatBuffer(buffers=buffers),)
