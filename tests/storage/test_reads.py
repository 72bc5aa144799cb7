"""What a load reads: exact ranges, each byte once, and which of them are checked."""

import math
import os

import alone
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shardplan.layouts import Cut, DTensorStorage, Grids
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
)
from shardplan.planner.storage.format.sums import BLOCK
from shardplan.planner.storage.reading.segments import runs_of

ROWS, COLUMNS = 1500, 700  # 4.2 MB: four blocks and a bit


class Boxes:
    """A load planner for boxes of one tensor."""

    def __init__(self, boxes, shape, targets=None):
        self.targets = targets or [torch.full(n, -1.0) for _, n in boxes]
        self.items = [
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex("model.w", None, i),
                torch.Size([0] * len(n)),
                MetadataIndex("model.w", torch.Size([0] * len(shape)), 0),
                torch.Size(o),
                torch.Size(n),
            )
            for i, (o, n) in enumerate(boxes)
        ]
        self.committed = []

    def resolve_tensor(self, item):
        return self.targets[item.dest_index.index]

    def commit_tensor(self, item, tensor):
        self.committed.append(item.dest_index.index)


def save(path, tensor):
    planner = LayoutAwareSavePlanner({"w": tuple(tensor.shape)}, grid=Grids.from_sizes(0))
    alone.saved(path, [{"model": {"w": tensor}}], [planner])


def read(path, tensor, boxes, **options):
    planner = Boxes(boxes, tensor.shape, options.pop("targets", None))
    reader = SafetensorsReader(path, **options)
    reader.read_metadata()
    reader.read_data(LoadPlan(planner.items), planner).wait()
    for (offsets, sizes), target in zip(boxes, planner.targets, strict=True):
        place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert torch.equal(tensor[place], target), (offsets, sizes)
    assert sorted(planner.committed) == list(range(len(boxes)))
    return reader.stats


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    tensor = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    save(path, tensor)
    return path, tensor


BOXES = {
    "whole": [((0, 0), (ROWS, COLUMNS))],
    "rows": [((100, 0), (900, COLUMNS))],
    "one row": [((700, 0), (1, COLUMNS))],
    "columns": [((0, 100), (ROWS, 250))],
    "middle": [((10, 10), (50, 5))],
    "disjoint columns": [((0, 0), (ROWS, 8)), ((0, 16), (ROWS, 8))],
    "adjacent rows": [((0, 0), (700, COLUMNS)), ((700, 0), (800, COLUMNS))],
}


@pytest.mark.parametrize("name", BOXES)
def test_exactly_what_is_needed_is_read(large, name):
    path, tensor = large
    stats = read(path, tensor, BOXES[name], verify=False)
    needed = 4 * sum(math.prod(n) for _, n in BOXES[name])
    assert (needed, needed) == (stats.needed, stats.read)


@pytest.mark.parametrize("verify", [True, False, "all"])
@pytest.mark.parametrize("gap", [1, 999, 4 * COLUMNS, 1 << 20])
@pytest.mark.parametrize("name", BOXES)
def test_gaps_are_read_along_and_nothing_else(large, name, gap, verify):
    path, tensor = large
    exact = read(path, tensor, BOXES[name], verify=False)
    stats = read(path, tensor, BOXES[name], verify=verify, gap_bytes=gap)
    assert exact.needed == stats.needed <= stats.read <= 4 * ROWS * COLUMNS
    if not verify:  # else it is read in pieces that fit the processor's cache
        assert stats.reads <= exact.reads


@pytest.mark.parametrize("verify", [True, False])
def test_columns_with_their_gaps_are_one_read(large, verify):
    path, tensor = large
    exact = read(path, tensor, BOXES["columns"], verify=verify)
    stats = read(path, tensor, BOXES["columns"], verify=verify, gap_bytes=4 * (COLUMNS - 250))
    assert ROWS == exact.reads and stats.reads <= 8
    if not verify:
        assert 4 * ((ROWS - 1) * COLUMNS + 250) == stats.read
    else:  # blocks that are read whole are checked
        assert stats.read <= 4 * ROWS * COLUMNS
        assert stats.unchecked < 2 * BLOCK < exact.unchecked
    less = read(path, tensor, BOXES["columns"], verify=verify, gap_bytes=4 * (COLUMNS - 250) - 1)
    assert exact == less


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("verify", [True, "all"])
def test_checks_read_little_more(large, name, verify):
    path, tensor = large
    stats = read(path, tensor, BOXES[name], verify=verify)
    if verify == "all":
        assert 0 == stats.unchecked
        assert stats.read <= 4 * ROWS * COLUMNS
    else:
        assert stats.read - stats.needed <= stats.needed // 256


@pytest.mark.parametrize("verify", [True, False, "all"])
@pytest.mark.parametrize("name", BOXES)
def test_what_is_counted_is_what_system_calls_return(large, monkeypatch, name, verify):
    path, tensor = large
    counted = []
    for call in ("read", "preadv"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a, real=real: (r := real(*a), counted.append(r))[0])
    stats = read(path, tensor, BOXES[name], verify=verify)
    nbytes = sum(r if isinstance(r, int) else len(r) for r in counted)
    assert nbytes == stats.read + stats.headers + stats.manifest
    manifest = [path / "checkpoint.json", *path.glob("*/*.json")]
    assert stats.manifest == sum(p.stat().st_size for p in manifest)


def test_headers_are_read_with_little_more(tmp_path):
    shapes = {f"layers.{i}.w": (8, 3) for i in range(200)}
    rules = [DTensorStorage({"*": (Cut(0, "dp_shard"),)})]
    grids = [Grids.from_sizes(rank, dp_shard=4) for rank in range(4)]
    planners = [LayoutAwareSavePlanner(shapes, grid=grid, layouts=rules) for grid in grids]
    states = [{"model": {n: torch.ones(2, 3) for n in shapes}} for _ in grids]
    alone.saved(tmp_path, states, planners)
    headers = []
    for file in sorted(tmp_path.glob("*/*.safetensors")):
        with file.open("rb") as stream:
            headers.append(8 + int.from_bytes(stream.read(8), "little"))
    assert min(headers) > 10_000
    whole = {"model": {n: torch.zeros(8, 3) for n in shapes}}
    loader = LayoutAwareLoadPlanner(shapes, grid=Grids.from_sizes(0), layouts=[])
    (reader,) = alone.load(tmp_path, [whole], [loader])
    assert sum(headers) <= reader.stats.headers <= sum(headers) + 4 * 64


def test_small_chunks_are_read_whole_and_others_within_the_share(tmp_path):
    small = torch.arange(1024, dtype=torch.float32).view(32, 32)  # 4 KiB
    save(tmp_path / "a", small)
    stats = read(tmp_path / "a", small, [((0, 0), (32, 1))])
    assert (4096, 0) == (stats.read, stats.unchecked)
    one_more = torch.arange(1056, dtype=torch.float32).view(33, 32)
    save(tmp_path / "b", one_more)
    stats = read(tmp_path / "b", one_more, [((0, 0), (33, 1))])
    assert (132, 132) == (stats.read, stats.unchecked)


def test_equal_boxes_are_read_once(large):
    path, tensor = large
    stats = read(path, tensor, [((5, 0), (600, COLUMNS))] * 2, verify=False)
    assert 4 * 600 * COLUMNS == stats.read


def test_boxes_that_overlap_are_read_once(large):
    path, tensor = large
    boxes = [((0, 0), (600, COLUMNS)), ((300, 0), (600, COLUMNS))]
    assert 4 * 900 * COLUMNS == read(path, tensor, boxes, verify=False).read


def test_flipped_byte_in_a_block_that_is_read_whole(large, tmp_path):
    path, tensor = tmp_path / "c", large[1]
    save(path, tensor)
    (file,) = path.glob("*/*.safetensors")
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + (1 << 20) + 17] ^= 1  # in the second block
    file.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"model.w at \(0, 0\) \(rank 0\), bytes from 1048576"
    ):
        read(path, tensor, BOXES["rows"])
    with pytest.raises(CheckpointError, match="checksum does not match"):
        read(path, tensor, BOXES["whole"])
    with pytest.raises(CheckpointError, match="checksum does not match"):
        read(path, tensor, BOXES["columns"], verify="all")
    read(path, tensor, [((1000, 0), (500, COLUMNS))])  # blocks that are as they were


def test_targets_of_other_strides_and_dtypes(large):
    path, tensor = large
    target = torch.zeros(COLUMNS, ROWS).t()
    read(path, tensor, BOXES["whole"], targets=[target])
    wide = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    planner = Boxes(BOXES["whole"], tensor.shape, [wide])
    reader = SafetensorsReader(path)
    reader.read_metadata()
    reader.read_data(LoadPlan(planner.items), planner)
    assert torch.equal(tensor.double(), wide)


def test_small_buffers_are_enough(large, tmp_path):
    path, tensor = large
    for name in BOXES:
        read(path, tensor, BOXES[name], buffer_bytes=1 << 20)
    turned = tensor.t()  # not contiguous: it passes through buffers while it is saved
    planner = LayoutAwareSavePlanner({"w": tuple(turned.shape)}, grid=Grids.from_sizes(0))
    state = {"model": {"w": turned}}
    alone.saved(tmp_path / "c", [state], [planner], buffer_bytes=1 << 20)
    read(tmp_path / "c", turned, [((0, 0), (COLUMNS, ROWS))])


@st.composite
def box(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    pairs = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        pairs.append((start, draw(st.integers(1, size - start))))
    return tuple(shape), tuple(o for o, _ in pairs), tuple(n for _, n in pairs)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(box())
def test_runs_name_the_bytes_of_a_box(case):
    shape, offsets, sizes = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    runs = runs_of(shape, offsets, sizes, 1)
    found = [i for start in runs.starts() for i in range(start, start + runs.nbytes)]
    assert numbers[place].reshape(-1).tolist() == found
    assert found[-1] + 1 == runs.stop and len(found) == runs.total
