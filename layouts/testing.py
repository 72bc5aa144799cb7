"""For tests of your own layouts: a suite that a provider has to pass, and random grids.

| name | is |
|---|---|
| `LayoutProviderConformance` | the tests that every provider passes; subclass it |
| `param_info` | a parameter as a provider sees it, from a name and a shape |
| `every_rank` | the grids of each rank of a world |
| `GRID_SIZES` | the worlds that the suite goes through |
| `grid_sizes`, `grids`, `shapes`, `param_infos` | hypothesis strategies for tests of your own |

    from shardplan.layouts.testing import LayoutProviderConformance, param_info

    class TestGateUp(LayoutProviderConformance):
        provider = GateUp()
        companions = (TensorParallel({"*.gate_up.weight": 0}),)

        def params(self, grids):
            rows = 8 // grids.dense.size("tp")
            return [param_info(grids, "layers.0.gate_up.weight", (rows, 3))]

Run it with pytest. This module alone needs hypothesis (`pip install shardplan[test]`), and no other
imports it.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from .coverage import Extent, prove, tiling_faults
from .experts import expert_name
from .grid import Grids
from .layout import Layout
from .provider import LayoutProvider, Level, ParamInfo
from .registry import LayoutRegistry
from .serial import stage_from_json, stage_to_json
from .slab import Shape, Slab
from .stages import STAGES, Stage

Sizes = Mapping[str, int]

GRID_SIZES: tuple[Sizes, ...] = tuple(
    MappingProxyType(sizes)
    for sizes in (
        {},
        {"dp_shard": 2},
        {"dp_shard": 3},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2},
        {"tp": 4},
        {"dp_shard": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 4, "tp": 2, "ep": 2},
        {"dp_shard": 2, "tp": 2, "ep": 4, "etp": 1},
        {"dp_replicate": 2, "dp_shard": 4, "ep": 2},
    )
)


def every_rank(sizes: Sizes) -> Iterator[Grids]:
    """Yields the grids of each rank of a world of these sizes, as `Grids.from_sizes` takes them.

    >>> [grids.dense.coordinate for grids in every_rank({"dp_shard": 2})]
    [(0, 0, 0, 0), (0, 0, 1, 0)]
    """
    first = Grids.from_sizes(0, **sizes)
    yield first
    for rank in range(1, first.world_size):
        yield Grids.from_sizes(rank, **sizes)


def param_info(
    grids: Grids,
    fqn: str,
    local_shape: Shape,
    *,
    num_local_experts: int | None = None,
    param: Any = None,
    owners: Sequence[tuple[str, Any]] = (),
) -> ParamInfo:
    """Returns a parameter as a provider sees it; its name tells whether it is an expert's.

    Args:
        grids: The grids of the rank.
        fqn: Its name.
        local_shape: Its shape before any FSDP cut.
        num_local_experts: How many experts of its layer the rank holds.
        param: The live parameter, or what stands for it.
        owners: `(path, module)` from the root to the module that owns it.

    >>> param_info(Grids.from_sizes(0, tp=2), "experts.0.w", (4, 2)).grid.axes
    ('pp', 'edp_replicate', 'edp_shard', 'ep', 'etp')
    """
    is_expert = expert_name(fqn) is not None
    grid = grids.expert if is_expert else grids.dense
    return ParamInfo(fqn, local_shape, grid, is_expert, num_local_experts, param, tuple(owners))


class LayoutProviderConformance:
    """What every layout provider has to do; subclass it as `Test…`, set `provider` and `params`.

    Every test goes through every rank of the worlds in `grid_sizes`, in one process.

    Attributes:
        provider: The provider, an instance.
        companions: Other providers that place the same parameters at other levels, such as
            `TensorParallel` for one that only splits components.
        grid_sizes: The worlds to go through, as `Grids.from_sizes` takes them. Leave out those
            that the provider refuses, such as a tensor-parallel size that divides nothing.
    """

    provider: LayoutProvider
    companions: Sequence[LayoutProvider] = ()
    grid_sizes: Sequence[Sizes] = GRID_SIZES

    def params(self, grids: Grids) -> Sequence[ParamInfo]:
        """Returns what one rank holds: parameters that the provider claims, and some others.

        Of a layer with experts, give every local one: they may share a tensor on disk.

        Args:
            grids: The grids of the rank that is asked.
        """
        raise NotImplementedError("return the parameters that one rank holds")

    def test_it_is_an_instance_with_a_name_and_a_level(self) -> None:
        provider = self.provider
        assert not isinstance(provider, type), f"{provider!r} is a class: set an instance"
        assert isinstance(provider, LayoutProvider), (
            f"{provider!r} needs name, level, claims(param) and stages(param)"
        )
        name = provider.name
        assert isinstance(name, str) and name, f"the name {name!r} is no text"
        assert isinstance(provider.level, Level), f"the level {provider.level!r} is no Level"
        LayoutRegistry([provider, *self.companions])

    def test_it_claims_something(self) -> None:
        claimed = [param for _, param in self._params() if self.provider.claims(param)]
        assert claimed, f"{self.provider.name!r} claims nothing that params() gives, on no grid"

    def test_it_answers_for_any_parameter(self) -> None:
        """A registry asks every provider about every parameter: one must not raise for others'."""
        for sizes in self.grid_sizes:
            for fqn in ("of.nobody", "experts.0.of.nobody"):
                for shape in ((), (3,), (3, 5), (2, 3, 5)):
                    param = param_info(Grids.from_sizes(0, **sizes), fqn, shape)
                    claims = self.provider.claims(param)
                    assert isinstance(claims, bool), f"claims({fqn!r}) gave {claims!r}, no bool"

    def test_it_is_pure_and_deterministic(self) -> None:
        """Asked again, in another order, it gives equal answers."""
        params = [param for _, param in self._params()]
        first = [self._answer(param) for param in params]
        again = [self._answer(param) for param in reversed(params)]
        for param, one, other in zip(params, first, reversed(again), strict=True):
            assert one == other, f"{_of(param)}: first {one}, then {other}"

    def test_its_stages_are_plain_values(self) -> None:
        """Stages are hashed, compared, and stored in checkpoints by their class's name."""
        for _, param in self._params():
            for stage in self._answer(param):
                hash(stage)
                assert STAGES.get(type(stage).__name__) is type(stage), (
                    f"{_of(param)}: {stage!r} is not a subclass of shardplan.layouts.Stage, so that "
                    "no checkpoint can name it"
                )
                back = stage_from_json(json.loads(json.dumps(stage_to_json(stage))))
                assert stage == back, f"{_of(param)}: {stage!r} comes back from JSON as {back!r}"

    def test_its_layouts_do_not_depend_on_the_rank(self) -> None:
        """All ranks of a pipeline stage write the same layout down for a parameter."""
        for sizes in self.grid_sizes:
            seen: dict[tuple[int, str], tuple[Layout, str]] = {}
            for grids in every_rank(sizes):
                for layout in self._layouts(grids):
                    here = (layout, grids.facts())
                    other, where = seen.setdefault((grids.stage, layout.fqn), here)
                    assert layout == other, (
                        f"{layout.fqn}: {other.stages} named {other.name!r} at {where}, but "
                        f"{layout.stages} named {layout.name!r} at {grids.facts()}"
                    )

    def test_every_element_is_covered_exactly_once(self) -> None:
        """Over all ranks of a stage, replicas once, each tensor on disk is tiled."""
        for sizes in self.grid_sizes:
            boxes: dict[tuple[int, str, Shape], list[Extent]] = {}
            for grids in every_rank(sizes):
                for layout, slab in self._slabs(grids):
                    grid = grids.of(layout.family)
                    if any(grid.index(axis) for axis in layout.replica_axes(grid)):
                        continue
                    place = (grids.stage, slab.key, slab.global_shape)
                    boxes.setdefault(place, []).append((slab.offsets, slab.sizes))
            shapes = {(stage, key): shape for stage, key, shape in boxes}
            for (stage, key, shape), extents in boxes.items():
                assert shapes[stage, key] == shape, f"{key} has two shapes: {shape} is one"
                faults = tiling_faults(shape, extents)
                assert not faults, f"{key} of shape {shape} at {dict(sizes)}: {faults[0]}"

    def test_its_layouts_are_proved(self) -> None:
        """`prove` accepts each layout that has its tensors for itself."""
        for sizes in self.grid_sizes:
            grids = Grids.from_sizes(0, **sizes)
            writers: dict[str, set[str]] = {}
            for layout, slab in self._slabs(grids):
                writers.setdefault(slab.key, set()).add(layout.fqn)
            shared = set().union(*(fqns for fqns in writers.values() if len(fqns) > 1))
            for layout in self._layouts(grids):
                if layout.fqn not in shared:
                    prove(layout, grids.of(layout.family))

    def test_its_keys_are_different(self) -> None:
        """One rank's boxes of one tensor on disk come from one place of its storage each."""
        for sizes in self.grid_sizes:
            for grids in every_rank(sizes):
                seen: dict[tuple[str, Shape], str] = {}
                for layout, slab in self._slabs(grids):
                    other = seen.setdefault((slab.key, slab.offsets), layout.fqn)
                    assert other == layout.fqn, (
                        f"{layout.fqn} and {other} both write {slab.key} at {slab.offsets} "
                        f"({grids.facts()})"
                    )
                for layout in self._layouts(grids):
                    frames = layout.frames(grids.of(layout.family))
                    keys = [layout.key(frame) for frame in frames]
                    assert len(keys) == len(set(keys)), f"{layout.fqn}: a key twice in {keys}"

    def test_its_views_lie_in_storage_and_apart(self) -> None:
        """No two slabs of a rank read one element of its storage, and none reads beyond it."""
        for sizes in self.grid_sizes:
            for grids in every_rank(sizes):
                for layout in self._layouts(grids):
                    grid = grids.of(layout.family)
                    numel = layout.storage.numel(grid)
                    read: set[int] = set()
                    for slab in layout.slabs(grid):
                        assert math.prod(slab.sizes) > 0, f"{layout.fqn}: {slab} is empty"
                        places = list(_places(slab))
                        assert min(places) >= 0 and max(places) < numel, (
                            f"{layout.fqn}: {slab} reads beyond the {numel} elements of storage "
                            f"({grids.facts()})"
                        )
                        assert read.isdisjoint(places), (
                            f"{layout.fqn}: {slab} reads what another slab reads ({grids.facts()})"
                        )
                        read.update(places)

    def _params(self) -> Iterator[tuple[Grids, ParamInfo]]:
        for sizes in self.grid_sizes:
            for grids in every_rank(sizes):
                for param in self.params(grids):
                    yield grids, param

    def _answer(self, param: ParamInfo) -> tuple[Stage, ...]:
        if not self.provider.claims(param):
            return ()
        stages = self.provider.stages(param)
        assert isinstance(stages, tuple), f"{_of(param)}: stages gave {stages!r}, no tuple"
        return stages

    def _layouts(self, grids: Grids) -> list[Layout]:
        registry = LayoutRegistry([self.provider, *self.companions])
        return [registry.layout(param) for param in self.params(grids)]

    def _slabs(self, grids: Grids) -> Iterator[tuple[Layout, Slab]]:
        for layout in self._layouts(grids):
            for slab in layout.slabs(grids.of(layout.family)):
                yield layout, slab


def _of(param: ParamInfo) -> str:
    return f"{param.fqn} ({param.grid.facts()})"


def _places(slab: Slab) -> Iterator[int]:
    """Yields the position in storage of every element of a slab."""
    for index in itertools.product(*map(range, slab.sizes)):
        yield slab.start + sum(i * step for i, step in zip(index, slab.strides, strict=True))


# Strategies ---------------------------------------------------------------------------------------


@st.composite
def grid_sizes(draw: st.DrawFn, *, max_world: int = 16) -> dict[str, int]:
    """Draws sizes that `Grids.from_sizes` takes: all axes, expert parallelism included.

    Args:
        draw: Given by hypothesis.
        max_world: Largest number of ranks.
    """
    sizes: dict[str, int] = {}
    world = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        size = draw(st.integers(1, min(4, max_world // world)))
        sizes[axis] = size
        world *= size
    inside = sizes["dp_shard"] * sizes["tp"]
    sizes["etp"] = draw(st.sampled_from(sorted({1, sizes["tp"]})))
    sizes["ep"] = draw(st.sampled_from(_divisors(inside // sizes["etp"])))
    return sizes


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def grids(draw: st.DrawFn, *, max_world: int = 16) -> Grids:
    """Draws the grids of one rank of a world.

    Args:
        draw: Given by hypothesis.
        max_world: Largest number of ranks.
    """
    sizes = draw(grid_sizes(max_world=max_world))
    world = Grids.from_sizes(0, **sizes).world_size
    return Grids.from_sizes(draw(st.integers(0, world - 1)), **sizes)


@st.composite
def shapes(
    draw: st.DrawFn, *, min_dims: int = 0, max_dims: int = 4, min_size: int = 0, max_size: int = 6
) -> Shape:
    """Draws shapes: scalars, sizes of 1 and, unless `min_size` is larger, empty tensors.

    Args:
        draw: Given by hypothesis.
        min_dims: Fewest dims.
        max_dims: Most dims.
        min_size: Smallest size of a dim.
        max_size: Largest size of a dim.
    """
    sizes = st.integers(min_size, max_size)
    return tuple(draw(st.lists(sizes, min_size=min_dims, max_size=max_dims)))


@st.composite
def param_infos(
    draw: st.DrawFn,
    fqns: Iterable[str] = ("layers.0.weight", "layers.1.mlp.experts.0.weight", "embedding.weight"),
    *,
    max_world: int = 16,
    max_local_experts: int = 4,
) -> ParamInfo:
    """Draws parameters without live objects: a name, a shape, and a rank's grid.

    Args:
        draw: Given by hypothesis.
        fqns: Names to draw from; those of experts get the experts' grid.
        max_world: Largest number of ranks.
        max_local_experts: Most experts of a layer on one rank.
    """
    fqn = draw(st.sampled_from(list(fqns)))
    place = expert_name(fqn)
    count = None
    if place is not None and place.local_expert_index is not None:
        first = place.local_expert_index + 1
        count = draw(st.integers(first, max(first, max_local_experts)))
    return param_info(
        draw(grids(max_world=max_world)), fqn, draw(shapes()), num_local_experts=count
    )
