"""Random layouts against brute force: see tests/oracle.py for what is right.

`EXAMPLES` says how many layouts each test tries. More than 10,000 of them are different, with the
sizes of their grids; the last test of this file counts them. Under the environment variable CI hypothesis' own profile makes the
draws the same in every run; elsewhere they are new each time.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import Program, faults, replica_faults

from shardplan.layouts import (
    Concat,
    Cut,
    Cuts,
    ExpertIndex,
    FlatBuffer,
    FlatRanges,
    Fuse,
    Grid,
    Interleave,
    Join,
    Layout,
    LayoutError,
    Permute,
    Shard,
    Stack,
    Unpad,
    Unstack,
    Whole,
    prove,
    tiling_faults,
)

EXAMPLES = {
    "flat": 3000,
    "cuts": 2700,
    "experts": 2700,
    "chains": 2600,
    "replicas": 500,
    "broken": 1200,
    "ranges": 500,
    "tilings": 1000,
}
pytestmark = pytest.mark.timeout(300)  # seconds of each test on a quiet machine are 2 to 15

COUNTED: Counter[str] = Counter()
PROGRAMS: set[Program] = set()
DIGESTS: dict[str, Layout] = {}


def examples(name):
    return settings(
        max_examples=EXAMPLES[name],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


# From the oracle's plain data to the library's stages ------------------------------------------------


def stage(step):
    match step:
        case ("concat", dim, parts):
            return Concat(dim, parts)
        case ("interleave", dim, groups, parts):
            return Interleave(dim, groups, parts)
        case ("shard", dim, axis):
            return Shard(dim, axis)
        case ("fuse", dim):
            return Fuse(dim)
        case ("join", dim, joined):
            return Join(dim, joined)
        case ("unpad", dim, size):
            return Unpad(dim, size)
        case ("permute", dims):
            return Permute(dims)
        case ("expert", local, count, axis, table):
            return ExpertIndex(local, count, axis, table)
        case ("unstack",):
            return Unstack()
        case ("stack", count):
            return Stack(count)
    raise AssertionError(step)


def first_stage(program):
    match program.storage:
        case ("whole",):
            return Whole(program.shape)
        case ("buffer", axes, offset, shard_size):
            return FlatBuffer(program.shape, axes, offset, shard_size)
        case ("ranges", axes, ranges):
            return FlatRanges(program.shape, axes, ranges)
        case ("cuts", cuts):
            return Cuts(program.shape, tuple(Cut(*cut) for cut in cuts))
    raise AssertionError(program.storage)


def layout_of(program):
    kinds = [step[0] for step in program.steps]
    single = "stack" not in kinds and ("expert" in kinds or "unstack" in kinds)
    stages = (first_stage(program), *map(stage, program.steps))
    return Layout("w", "w{expert}" if single else "w", stages)


def key(suffix, expert):
    return f"w{'' if expert is None else expert}{suffix}"


def grid_at(program, at):
    return Grid(tuple(program.sizes), tuple(program.sizes.values()), tuple(at.values()))


def boxes(program, layout):
    def at(coordinate):
        return [
            (s.key, s.global_shape, s.offsets, s.sizes, s.start, s.strides)
            for s in layout.slabs(grid_at(program, coordinate))
        ]

    return at


# Random layouts ------------------------------------------------------------------------------------

SIZES = st.sampled_from((2, 1, 3, 4, 5, 0))
SUFFIXES = (("_w", "_v"), (".query", ".key", ".value", ".z"), (".a", ".b", ".c"))


@st.composite
def grids(draw, names):
    """Axes with 1 to 4 ranks each, not more than 32 in all."""
    axes = tuple((name, draw(st.sampled_from((2, 1, 3, 4)))) for name in names)
    assume(math.prod(size for _, size in axes) <= 32)
    return axes


@st.composite
def components(draw, shape, names):
    """A cut into components along one dim, and the local shape that it needs."""
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(SIZES, min_size=1, max_size=len(names)))
    parts = tuple(zip(names, sizes, strict=False))
    groups = draw(st.sampled_from((None, 1, 2, 3)))
    rows = sum(sizes) * (groups or 1)
    shape = (*shape[:dim], rows, *shape[dim + 1 :])
    if groups is None:
        return shape, ("concat", dim, parts)
    return shape, ("interleave", dim, groups, parts)


def part_sizes(step):
    return [size * (step[2] if step[0] == "interleave" else 1) for _, size in step[-1]]


@st.composite
def flat_storage(draw, shape, axes):
    """Bounds anywhere: in mid-row, empty, on ranks in any order, with padding around."""
    numel = math.prod(shape)
    names = tuple(draw(st.permutations(axes)))[: draw(st.integers(1, len(axes)))]
    sizes = dict(axes)
    names = tuple(name for name, _ in names)
    world = math.prod(sizes[name] for name in names)
    if draw(st.booleans()):
        offset = draw(st.integers(0, 7))
        need = max(-(-(offset + numel) // world), 1)
        return ("buffer", names, offset, need + draw(st.sampled_from((0, 1, 3, numel))))
    edges = [
        0,
        *sorted(draw(st.lists(st.integers(0, numel), min_size=world - 1, max_size=world - 1))),
        numel,
    ]
    ranges = list(itertools.pairwise(edges))
    if draw(st.booleans()):
        ranges = draw(st.permutations(ranges))
    return ("ranges", names, tuple(ranges))


@st.composite
def cut_storage(draw, shape, axes):
    """DTensor's cuts: uneven, strided, several on one dim, of given sizes."""
    cuts, seen = [], set()
    for axis, size in draw(st.permutations(axes))[: draw(st.integers(1, len(axes)))]:
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(("chunk", "strided", "sizes")))
        if kind == "sizes" and dim not in seen:
            ends = st.lists(st.integers(0, shape[dim]), min_size=size - 1, max_size=size - 1)
            edges = [0, *sorted(draw(ends)), shape[dim]]
            cuts.append((dim, axis, 1, tuple(b - a for a, b in itertools.pairwise(edges))))
        else:
            factor = draw(st.integers(2, 4)) if kind == "strided" else 1
            cuts.append((dim, axis, factor, None))
        seen.add(dim)
    return ("cuts", tuple(cuts))


@st.composite
def flat_programs(draw):
    """FSDP over components over tensor parallelism: the usual layout of a dense parameter."""
    axes = draw(grids(("pp", "dp_replicate", "dp_shard", "tp")))
    shape = tuple(draw(st.lists(SIZES, max_size=4)))
    steps = []
    if shape and draw(st.booleans()):
        shape, step = draw(components(shape, draw(st.sampled_from(SUFFIXES))))
        steps.append(step)
    if shape and draw(st.booleans()):
        steps.append(("shard", draw(st.integers(0, len(shape) - 1)), "tp"))
    storage = draw(flat_storage(shape, axes[1:3]))
    return Program(axes, shape, storage, tuple(steps))


@st.composite
def cut_programs(draw):
    """DTensors: alone, over components, with tensor parallelism in the mesh or beside it."""
    axes = draw(grids(("dp_replicate", "dp_shard", "tp")))
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    steps, mesh = [], axes
    if draw(st.booleans()):
        shape, step = draw(components(shape, draw(st.sampled_from(SUFFIXES))))
        steps.append(step)
    if draw(st.booleans()):
        steps.append(("shard", draw(st.integers(0, len(shape) - 1)), "tp"))
        mesh = axes[:2]
    return Program(axes, shape, draw(cut_storage(shape, mesh)), tuple(steps))


@st.composite
def storages(draw, shape, axes):
    kind = draw(st.sampled_from(("flat", "whole", "cuts")))
    if kind == "flat":
        return draw(flat_storage(shape, axes))
    if kind == "cuts" and shape:
        return draw(cut_storage(shape, axes))
    return ("whole",)


@st.composite
def expert_programs(draw):
    """Grouped and sequential experts by index, stacked ones, and each kept as the other on disk."""
    axes = draw(grids(("edp_replicate", "edp_shard", "ep", "etp")))
    ep = dict(axes)["ep"]
    kind = draw(st.sampled_from(("index", "index to stack", "stacked", "stacked to index")))
    count = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    steps, lead = [], 0
    if kind.startswith("stacked"):
        shape, lead = (count, *shape), 1
    if len(shape) > lead and draw(st.booleans()):
        inner, step = draw(components(shape[lead:], draw(st.sampled_from(SUFFIXES))))
        shape = shape[:lead] + inner
        steps.append((step[0], step[1] + lead, *step[2:]))
    joined = steps and draw(st.booleans())
    if len(shape) > lead and draw(st.booleans()):
        steps.append(("shard", draw(st.integers(lead, len(shape) - 1)), "etp"))
    if joined:
        steps.append(("fuse", steps[0][1]))
    if lead:
        steps.append(("shard", 0, "ep"))
        if kind == "stacked to index":
            steps.append(("unstack",))
    else:
        table = None
        if draw(st.booleans()):
            order = draw(st.permutations(range(count * ep)))
            table = tuple(tuple(order[i * count : (i + 1) * count]) for i in range(ep))
        local = draw(st.integers(0, count - 1))
        steps.append(("expert", local, count, "ep", table))
        if kind == "index to stack":
            # The whole stack is covered only by all local experts together, so there is one.
            steps[-1] = ("expert", 0, 1, "ep", None)
            steps.append(("stack", ep))
    return Program(axes, shape, draw(storages(shape, axes[:2])), tuple(steps))


@st.composite
def joins(draw, dim, sizes):
    """Components put together in any order, whole or woven in groups that divide them."""
    names = draw(st.permutations(list(sizes)))
    edges = [0, *sorted(draw(st.sets(st.integers(1, len(names)))) - {len(names)}), len(names)]
    joined = []
    for i, (first, last) in enumerate(itertools.pairwise(edges)):
        parts = tuple(names[first:last])
        common = math.gcd(*(sizes[part] for part in parts)) or 3
        groups = draw(st.sampled_from([n for n in range(1, common + 1) if common % n == 0]))
        joined.append((f".{i}", parts, groups))
    return ("join", dim, tuple(joined))


@st.composite
def chains(draw):
    """Stages that built-in providers do not combine: nested components, padding, transposes."""
    axes = draw(grids(("dp_replicate", "dp_shard", "cp", "tp")))
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    shape, step = draw(components(shape, ("_w", "_v", "_u")))
    steps = [step]
    sizes = part_sizes(step)
    nested = len(shape) > 1 and draw(st.booleans())
    if nested:
        at = step[1]
        other, inner = draw(components((*shape[:at], *shape[at + 1 :]), (".a", ".b")))
        dim = inner[1] + (inner[1] >= at)
        shape = (*other[:at], shape[at], *other[at:])
        steps.append((inner[0], dim, *inner[2:]))
    size_of = dict(axes)
    shapes = [shape[: step[1]] + (size,) + shape[step[1] + 1 :] for size in sizes]
    if nested:
        shapes = [s[:dim] + (size,) + s[dim + 1 :] for s in shapes for size in part_sizes(steps[1])]
    for axis in draw(st.permutations(("cp", "tp")))[: draw(st.integers(0, 2))]:
        at = draw(st.integers(0, len(shape) - 1))
        steps.append(("shard", at, axis))
        shapes = [s[:at] + (s[at] * size_of[axis],) + s[at + 1 :] for s in shapes]
    form = "apart" if nested else draw(st.sampled_from(("apart", "fused", "joined")))
    at = step[1]
    if form == "fused":
        steps.append(("fuse", at))
        shapes = [shapes[0][:at] + (sum(s[at] for s in shapes),) + shapes[0][at + 1 :]]
    elif form == "joined":
        size = {name: s[at] for (name, _), s in zip(step[-1], shapes, strict=True)}
        steps.append(draw(joins(at, size)))
        shapes = [
            shapes[0][:at] + (sum(size[part] for part in parts),) + shapes[0][at + 1 :]
            for _, parts, _ in steps[-1][2]
        ]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(shape) - 1))
        steps.append(("unpad", at, draw(st.integers(0, min(s[at] for s in shapes)))))
    if draw(st.booleans()):
        steps.append(("permute", tuple(draw(st.permutations(range(len(shape)))))))
    return Program(axes, shape, draw(storages(shape, axes[:2])), tuple(steps))


# Laws -----------------------------------------------------------------------------------------------


def check(name, program):
    COUNTED[name] += 1
    PROGRAMS.add(program)
    layout = layout_of(program)
    assert [] == faults(program, boxes(program, layout), key)
    prove(layout, grid_at(program, dict.fromkeys(program.sizes, 0)))
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert layout == again
    assert hash(layout) == hash(again)
    assert layout.digest == again.digest
    assert layout == DIGESTS.setdefault(layout.digest, layout)  # equal digest, equal layout
    assert set(program.used) <= set(layout.axes)
    for at in program.coordinates(program.used):
        grid = grid_at(program, at)
        holds = layout.storage.numel(grid)
        assert holds >= sum(slab.numel for slab in layout.slabs(grid))
    return layout


@examples("flat")
@given(flat_programs())
def test_flat_buffers_over_components_and_tensor_parallelism(program):
    check("flat", program)


@examples("cuts")
@given(cut_programs())
def test_dtensor_cuts_over_components_and_tensor_parallelism(program):
    check("cuts", program)


@examples("experts")
@given(expert_programs())
def test_expert_grids(program):
    check("experts", program)


@examples("chains")
@given(chains())
def test_chains_of_any_stages(program):
    check("chains", program)


ANY = st.one_of(flat_programs(), cut_programs(), expert_programs(), chains())


@examples("replicas")
@given(ANY)
def test_replicas_hold_the_same_slabs(program):
    layout = check("replicas", program)
    assert [] == replica_faults(program, boxes(program, layout))
    grid = grid_at(program, dict.fromkeys(program.sizes, 0))
    unused = [axis for axis in program.sizes if axis not in layout.axes and axis != "pp"]
    assert tuple(unused) == layout.replica_axes(grid)


# Layouts with a mistake -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """A last stage that spoils one box of one rank, as a wrong provider would."""

    axes: tuple[str, ...]
    coordinate: tuple[int, ...]
    number: int  # of the box, counted over all frames
    kind: str
    dim: int

    def apply(self, frames, grid):
        if self.coordinate != tuple(grid.index(axis) for axis in self.axes):
            return frames
        spoiled, number = [], 0
        for frame in frames:
            boxes = []
            for box in frame.boxes:
                boxes += self.spoil(box) if number == self.number else [box]
                number += 1
            spoiled.append(frame._replace(boxes=tuple(boxes)))
        return tuple(spoiled)

    def spoil(self, box):
        def changed(values, by):
            return (*values[: self.dim], values[self.dim] + by, *values[self.dim + 1 :])

        return {
            "drop": lambda: [],
            "twice": lambda: [box, box],
            "shift up": lambda: [box._replace(offsets=changed(box.offsets, 1))],
            "shift down": lambda: [box._replace(offsets=changed(box.offsets, -1))],
            "grow": lambda: [box._replace(sizes=changed(box.sizes, 1))],
            "shrink": lambda: [box._replace(sizes=changed(box.sizes, -1))],
        }[self.kind]()


@examples("broken")
@given(ANY, st.data())
def test_prove_refuses_a_layout_with_one_mistake(program, data):
    layout = check("broken", program)
    places = [
        (at, number)
        for at in program.coordinates(program.used)
        for number in range(len(layout.slabs(grid_at(program, at))))
    ]
    assume(places)
    at, number = data.draw(st.sampled_from(places))
    dims = len(layout.slabs(grid_at(program, at))[number].sizes)
    kinds = ["drop", "twice"]
    kinds += ["shift up", "shift down", "grow", "shrink"] if dims else []
    mistake = Mistake(
        layout.axes,
        tuple(at[axis] for axis in layout.axes),
        number,
        data.draw(st.sampled_from(kinds)),
        data.draw(st.integers(0, max(dims - 1, 0))),
    )
    spoiled = dataclasses.replace(layout, stages=(*layout.stages, mistake))
    with pytest.raises(LayoutError, match=r"^w: "):
        prove(spoiled, grid_at(program, at))


@examples("ranges")
@given(flat_programs(), st.data())
def test_prove_refuses_flat_ranges_with_a_hole_or_an_overlap(program, data):
    COUNTED["ranges"] += 1
    kind, axes, *rest = program.storage
    if kind == "buffer":
        numel, world = math.prod(program.shape), math.prod(program.sizes[axis] for axis in axes)
        edges = [min(i * numel, numel) for i in range(world + 1)]
        rest = [tuple(itertools.pairwise(edges))]
    (ranges,) = rest
    held = [i for i, (start, stop) in enumerate(ranges) if start < stop]
    assume(held)
    i = data.draw(st.sampled_from(held))
    start, stop = ranges[i]
    numel = math.prod(program.shape)
    wrong = [(start, start), (stop, stop), (start, stop - 1), (start + 1, stop)]
    if start:
        wrong += [(start - 1, stop), (start - 1, stop - 1), (0, stop)]
    if stop < numel:
        wrong += [(start, stop + 1), (start + 1, stop + 1), (start, numel)]
    ranges = (*ranges[:i], data.draw(st.sampled_from(wrong)), *ranges[i + 1 :])
    spoiled = layout_of(dataclasses.replace(program, storage=("ranges", axes, ranges)))
    with pytest.raises(LayoutError, match=r"(?s)^w: .*covered"):
        prove(spoiled, grid_at(program, dict.fromkeys(program.sizes, 0)))


@examples("tilings")
@given(st.data())
def test_tiling_faults_agrees_with_counting(data):
    """Random sets of boxes, most of which are no tiling."""
    COUNTED["tilings"] += 1
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    extents = []
    for _ in range(data.draw(st.integers(0, 5))):
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        sizes = tuple(
            data.draw(st.integers(0, size - offset))
            for size, offset in zip(shape, offsets, strict=True)
        )
        extents.append((offsets, sizes))
    times = torch.zeros(shape, dtype=torch.long)
    for offsets, sizes in extents:
        times[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert bool((times == 1).all()) == (not tiling_faults(shape, extents))


# Digests -------------------------------------------------------------------------------------------


PRINT_DIGESTS = r"""
from shardplan.layouts import *
def layouts():
    yield Layout("w", "w", (Whole((2, 3)),))
    yield Layout("w", "w{expert}", (Whole((2, 3)), ExpertIndex(0, 2)), "expert")
    yield Layout("\u00fc", "\u00fc", (Cuts((7, 2), (Cut(0, "dp", 2), Cut(1, "tp", 1, (1, 1)))),))
    yield Layout("w", "w", (FlatBuffer((4, 2), ("dp",), 3, 5), Concat(0, (("_w", 2), ("_v", 2))), Shard(0, "tp")))
    yield Layout("w", "w", (FlatRanges((4,), ("dp",), ((0, 1), (1, 4))), Unpad(0, 3), Permute((0,))))
for layout in layouts():
    print(layout.digest)
"""


def test_a_digest_is_the_same_in_every_process():
    answers = set()
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "0", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert 0 == done.returncode, done.stderr
        answers.add(done.stdout)
    (answer,) = answers
    digests = answer.split()
    assert 5 == len(digests) == len(set(digests))
    # What a digest is, written out: another version must not change it without notice.
    plain = b'["w","w","dense",[["Whole",{"shape":[2,3]}]]]\n'
    assert hashlib.blake2b(plain, digest_size=8).hexdigest() == digests[0]


# Every test above has run by now ---------------------------------------------------------------------


def test_more_than_ten_thousand_different_layouts_were_tried():
    if set(COUNTED) != set(EXAMPLES):
        pytest.skip("counts only when all tests of this file run")
    assert [] == [name for name, count in EXAMPLES.items() if COUNTED[name] < count]
    assert 10_000 <= len(PROGRAMS), COUNTED
