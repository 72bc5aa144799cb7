"""Slabs, the boxes of flat ranges, and how a box is split: pure integers."""

import dataclasses
import math

import pytest

from shardplan.layouts import LayoutError, Slab
from shardplan.layouts.slab import Box, contiguous_strides, flat_boxes, split


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), ()),
        ((5,), (1,)),
        ((2, 3, 4), (12, 4, 1)),
        ((2, 1, 4), (4, 4, 1)),
        ((2, 0, 4), (4, 4, 1)),  # as torch.empty(2, 0, 4).stride()
    ],
)
def test_contiguous_strides(shape, strides):
    assert strides == contiguous_strides(shape)


# Boxes of a flat range: (offsets, sizes, start) each, in storage order.
FLAT = [
    ((), 0, 1, [((), (), 0)]),
    ((), 0, 0, []),
    ((5,), 1, 4, [((1,), (3,), 0)]),
    ((5,), 5, 5, []),
    ((0, 3), 0, 0, []),
    ((3, 4), 0, 12, [((0, 0), (3, 4), 0)]),
    ((3, 4), 4, 12, [((1, 0), (2, 4), 0)]),
    ((3, 4), 5, 7, [((1, 1), (1, 2), 0)]),  # inside one row
    ((3, 4), 3, 5, [((0, 3), (1, 1), 0), ((1, 0), (1, 1), 1)]),  # over a border, no whole row
    ((3, 4), 2, 9, [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 1), 6)]),
    (
        (2, 2, 3),
        1,
        11,
        [
            ((0, 0, 1), (1, 1, 2), 0),
            ((0, 1, 0), (1, 1, 3), 2),
            ((1, 0, 0), (1, 1, 3), 5),
            ((1, 1, 0), (1, 1, 2), 8),
        ],
    ),
    ((1, 1, 1), 0, 1, [((0, 0, 0), (1, 1, 1), 0)]),
]


@pytest.mark.parametrize(("shape", "start", "stop", "boxes"), FLAT)
def test_flat_boxes(shape, start, stop, boxes):
    found = flat_boxes(shape, start, stop)
    assert boxes == [(b.offsets, b.sizes, b.start) for b in found]
    assert all(b.strides == contiguous_strides(shape) for b in found)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 2), (2, 3, 2, 2)])
def test_flat_boxes_are_few_full_and_in_order(shape):
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            boxes = flat_boxes(shape, start, stop)
            assert len(boxes) <= 2 * len(shape) - 1
            ends = [box.start + math.prod(box.sizes) for box in boxes]
            assert [0, *ends][:-1] == [box.start for box in boxes] or not boxes
            assert (ends or [0])[-1] == stop - start


def test_narrow_moves_the_start_by_the_stride_and_the_offset_by_the_shift():
    box = Box((2, 4), (3, 4), 10, (8, 1))
    assert Box((3, 4), (2, 4), 18, (8, 1)) == box.narrow(0, 3, 9)
    assert Box((0, 4), (2, 4), 18, (8, 1)) == box.narrow(0, 3, 9, shift=3)
    assert Box((2, 4), (3, 1), 10, (8, 1)) == box.narrow(1, 0, 5)
    assert Box((2, 7), (3, 1), 13, (8, 1)) == box.narrow(1, 7, 8)
    assert box == box.narrow(0, 0, 99)
    assert box.narrow(0, 0, 2) is None
    assert box.narrow(0, 5, 9) is None
    assert box.narrow(0, 3, 3) is None


def test_move_leaves_the_view_as_it_is():
    assert Box((2, 9), (3, 4), 10, (8, 1)) == Box((2, 4), (3, 4), 10, (8, 1)).move(1, 5)


@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ((5, 2), 2, [(0, 0, 3), (0, 3, 5)]),
        ((2, 6), 3, [(1, 0, 2), (1, 2, 4), (1, 4, 6)]),
        ((3, 3), 3, [(0, 0, 1), (0, 1, 2), (0, 2, 3)]),
        ((2, 3), 8, [(1, 0, 1), (1, 1, 2), (1, 2, 3)]),  # no dim is long enough: the longest
        ((1, 1), 4, [(0, 0, 1)]),
        ((7,), 1, [(0, 0, 7)]),
        ((7,), 3, [(0, 0, 3), (0, 3, 5), (0, 5, 7)]),
    ],
)
def test_split(sizes, count, parts):
    assert parts == split(sizes, count)


def test_a_slab_counts_its_elements_and_is_a_value():
    slab = Slab("w", (4, 3), (1, 0), (2, 3), 3, (3, 1))
    assert 6 == slab.numel
    assert 1 == Slab("step", (), (), (), 0, ()).numel
    assert {slab} == {Slab("w", (4, 3), (1, 0), (2, 3), 3, (3, 1))}
    with pytest.raises(dataclasses.FrozenInstanceError):
        slab.start = 1


def test_a_slab_whose_dims_disagree_is_refused():
    with pytest.raises(LayoutError) as error:
        Slab("w", (4, 3), (1,), (2, 3), 3, (3, 1))
    assert str(error.value) == (
        "w: offsets (1,), sizes (2, 3) and strides (3, 1) must have one entry for each of the 2 "
        "dims of the global shape (4, 3)"
    )
