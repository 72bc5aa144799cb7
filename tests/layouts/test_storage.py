"""Storage stages: what a rank holds of the local tensor, with the bounds written out."""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from shardplan.layouts import (
    Concat,
    Cut,
    Cuts,
    FlatBuffer,
    FlatRanges,
    Grid,
    Layout,
    LayoutError,
    Whole,
    prove,
)


def grid(**axes):
    return Grid(tuple(axes), tuple(axes.values()), (0,) * len(axes))


def held(stage, grid, *axes):
    """The boxes at each coordinate of `axes`, as (offsets, sizes, start)."""
    layout = Layout("w", "w", (stage,))
    return [
        [(slab.offsets, slab.sizes, slab.start) for slab in layout.slabs(place)]
        for place in grid.walk(axes)
    ]


# Whole -----------------------------------------------------------------------------------------------


def test_whole_is_one_slab_on_every_rank_and_uses_no_axis():
    layout = Layout("w", "w", (Whole((2, 3)),))
    places = grid(dp_shard=2, tp=2).walk(("dp_shard", "tp"))
    (slabs,) = {layout.slabs(place) for place in places}
    assert [((0, 0), (2, 3), 0, (3, 1))] == [
        (s.offsets, s.sizes, s.start, s.strides) for s in slabs
    ]
    assert () == layout.axes
    assert ("dp_shard", "tp") == layout.replica_axes(grid(pp=2, dp_shard=2, tp=2))


def test_a_scalar_is_one_slab_and_an_empty_tensor_none():
    assert [[((), (), 0)]] == held(Whole(()), grid(dp=1), "dp")
    assert [[]] == held(Whole((3, 0)), grid(dp=1), "dp")
    prove(Layout("w", "w", (Whole((3, 0)),)), grid(dp=2))


# Flat buffers ------------------------------------------------------------------------------------------


def test_flat_buffer_padding_belongs_to_nobody():
    """p0 (3,) and p1 (4,) padded to 8 over 2 ranks, and to 12 over 4: padding gives no slab."""
    two, four = grid(dp=2), grid(dp=4)
    assert [[((0,), (3,), 0)], []] == held(FlatBuffer((3,), ("dp",), 0, 4), two, "dp")
    assert [[((0,), (1,), 0)], [((1,), (3,), 0)]] == held(
        FlatBuffer((4,), ("dp",), 3, 4), two, "dp"
    )
    assert [[((0,), (3,), 0)], [], [], []] == held(FlatBuffer((3,), ("dp",), 0, 3), four, "dp")
    assert [[], [((0,), (3,), 0)], [((3,), (1,), 0)], []] == held(
        FlatBuffer((4,), ("dp",), 3, 3), four, "dp"
    )


def test_flat_buffer_cuts_in_mid_row():
    """(3, 4) from offset 2 of a buffer of 3 × 5: the ranks hold 3, 5 and 4 elements."""
    assert [
        [((0, 0), (1, 3), 0)],
        [((0, 3), (1, 1), 0), ((1, 0), (1, 4), 1)],
        [((2, 0), (1, 4), 0)],
    ] == held(FlatBuffer((3, 4), ("dp",), 2, 5), grid(dp=3), "dp")


def test_flat_buffer_over_two_axes_counts_the_last_one_fastest():
    buffer = FlatBuffer((4,), ("dp_shard", "dp_replicate"), 0, 1)
    found = held(buffer, grid(dp_replicate=2, dp_shard=2), "dp_replicate", "dp_shard")
    # coordinates (replicate, shard): (0, 0), (0, 1), (1, 0), (1, 1)
    assert [[((0,), (1,), 0)], [((2,), (1,), 0)], [((1,), (1,), 0)], [((3,), (1,), 0)]] == found


def test_flat_buffer_knows_who_holds_anything_without_asking_every_rank():
    buffer = FlatBuffer((4,), ("dp",), 1_000_000, 4)
    holders = list(buffer.holders(grid(dp=1_000_000)))
    assert [250_000] == [place.index("dp") for place in holders]
    assert [] == list(FlatBuffer((0, 4), ("dp",), 3, 4).holders(grid(dp=2)))


def test_flat_buffers_of_one_pattern_have_the_same_boxes_on_some_rank():
    place = grid(dp=3)
    found = {}
    for offset in range(12):
        stage = FlatBuffer((3, 2), ("dp",), offset=offset, shard_size=6)
        boxes = [(o, s) for rank in held(stage, place, "dp") for o, s, _ in rank]
        assert boxes == found.setdefault(stage.pattern(place), boxes)
    assert 6 == len(found)  # within one slice, and cut after 1, 2, 3, 4 or 5 elements


def test_the_pattern_of_a_flat_buffer_that_is_too_small_is_refused():
    stage = FlatBuffer((4, 3), ("dp",), offset=1, shard_size=6)
    with pytest.raises(LayoutError, match="12 elements from 1 on end after the buffer's 2 slices"):
        stage.pattern(grid(dp=2))


def test_flat_buffer_that_is_too_small_is_refused_by_prove():
    layout = Layout("w", "w", (FlatBuffer((10,), ("dp",), 1, 5),))
    prove(layout, grid(dp=3))
    with pytest.raises(LayoutError) as error:
        prove(layout, grid(dp=2))
    assert str(error.value) == (
        "the tensor's 10 elements from 1 on end after the buffer's 2 slices of 5. Give the "
        "buffer's real shard size."
    )


@pytest.mark.parametrize(("offset", "shard_size"), [(-1, 4), (0, 0)])
def test_flat_buffer_refuses_impossible_numbers(offset, shard_size):
    with pytest.raises(LayoutError, match=f"not {offset} and {shard_size}"):
        FlatBuffer((4,), ("dp",), offset, shard_size)


# Flat ranges -------------------------------------------------------------------------------------------


def test_flat_ranges_may_be_empty_and_in_any_order():
    ranges = FlatRanges((2, 3), ("dp",), ((4, 6), (0, 0), (0, 4), (6, 6)))
    assert [
        [((1, 1), (1, 2), 0)],
        [],
        [((0, 0), (1, 3), 0), ((1, 0), (1, 1), 3)],
        [],
    ] == held(ranges, grid(dp=4), "dp")
    assert [0, 2] == [place.index("dp") for place in ranges.holders(grid(dp=4))]
    prove(Layout("w", "w", (ranges,)), grid(dp=4))


def test_flat_ranges_outside_the_tensor_are_refused_with_the_numbers():
    with pytest.raises(LayoutError) as error:
        FlatRanges((2, 3), ("dp",), ((0, 4), (4, 8)))
    assert str(error.value) == (
        "the flat range [4, 8) is not inside the local tensor's [0, 6) (shape (2, 3)). Ranges "
        "count elements of the flattened local tensor, without the buffer's padding."
    )


@pytest.mark.parametrize("bounds", [(3, 2), (-1, 2)])
def test_flat_ranges_that_run_backwards_are_refused(bounds):
    with pytest.raises(LayoutError, match="not inside"):
        FlatRanges((6,), ("dp",), (bounds,))


def test_flat_ranges_need_one_range_for_each_rank():
    layout = Layout("w", "w", (FlatRanges((4,), ("dp",), ((0, 2), (2, 4))),))
    with pytest.raises(LayoutError) as error:
        layout.slabs(grid(dp=3))
    assert str(error.value) == (
        "w: 2 flat ranges for 3 ranks of ('dp',) (dp 0/3). Give one range for each rank, empty "
        "ones included."
    )


# Cuts --------------------------------------------------------------------------------------------------


def test_cuts_follow_torch_chunk():
    """Six rows over four ranks make 2, 2, 2, 0 as torch.chunk does, not 2, 2, 1, 1."""
    cuts = Cuts((6, 2), (Cut(0, "dp"),))
    assert [
        [((0, 0), (2, 2), 0)],
        [((2, 0), (2, 2), 0)],
        [((4, 0), (2, 2), 0)],
        [],
    ] == held(cuts, grid(dp=4), "dp")


def test_cuts_of_given_sizes_may_be_empty():
    """A rank of size 0 between others holds nothing: no slab, not an empty one."""
    cuts = Cuts((5, 2), (Cut(0, "dp", sizes=(4, 0, 1)),))
    assert [[((0, 0), (4, 2), 0)], [], [((4, 0), (1, 2), 0)]] == held(cuts, grid(dp=3), "dp")
    both = Cuts((2, 2), (Cut(0, "dp"), Cut(1, "tp", sizes=(1, 0, 1))))
    assert [0, 2] == [g.index("tp") for g in both.holders(grid(dp=1, tp=3))]


def test_strided_cut_leaves_several_pieces_that_lie_one_after_another():
    """_StridedShard(0, split_factor=2) over 2 ranks: rank 0 has rows 0, 1, 4, 5 of 8."""
    cuts = Cuts((8, 1), (Cut(0, "tp", split_factor=2),))
    assert [
        [((0, 0), (2, 1), 0), ((4, 0), (2, 1), 2)],
        [((2, 0), (2, 1), 0), ((6, 0), (2, 1), 2)],
    ] == held(cuts, grid(tp=2), "tp")


def test_packed_column_parallel_weight_is_two_disjoint_pieces():
    """gate_up (8, 1) at TP 2 as two disjoint pieces: rank 0 rows 0, 1, 4, 5; rank 1 the others."""
    layout = Layout("gate_up", "gate_up", (Cuts((8, 1), (Cut(0, "tp", 2),)),))
    prove(layout, grid(tp=2))
    rows = [[(s.offsets[0], s.sizes[0]) for s in layout.slabs(g)] for g in grid(tp=2).walk(["tp"])]
    assert [[(0, 2), (4, 2)], [(2, 2), (6, 2)]] == rows


def test_two_cuts_of_one_dim_are_made_from_left_to_right():
    cuts = Cuts((8,), (Cut(0, "dp"), Cut(0, "tp")))
    assert [[((0,), (2,), 0)], [((2,), (2,), 0)], [((4,), (2,), 0)], [((6,), (2,), 0)]] == held(
        cuts, grid(dp=2, tp=2), "dp", "tp"
    )


def test_cuts_of_two_dims_make_the_product_of_their_pieces():
    """Both dims strided: four boxes, and a view with the row stride of the rank's own shard."""
    layout = Layout("w", "w", (Cuts((4, 4), (Cut(0, "dp", 2), Cut(1, "tp", 2))),))
    slabs = layout.slabs(grid(dp=2, tp=2).at(dp=1, tp=0))
    assert [
        ((1, 0), (1, 1), 0, (2, 1)),
        ((1, 2), (1, 1), 1, (2, 1)),
        ((3, 0), (1, 1), 2, (2, 1)),
        ((3, 2), (1, 1), 3, (2, 1)),
    ] == [(s.offsets, s.sizes, s.start, s.strides) for s in slabs]


def test_cuts_of_sizes_that_do_not_add_up_are_refused():
    layout = Layout("w", "w", (Cuts((5,), (Cut(0, "dp", sizes=(4, 2)),)),))
    with pytest.raises(LayoutError) as error:
        layout.slabs(grid(dp=2))
    assert str(error.value) == (
        "w: sizes (4, 2) of dim 0 must be 2 numbers, one for each rank of dp, that add up to 5 "
        "(dp 0/2)"
    )
    with pytest.raises(LayoutError, match="must be 3 numbers"):
        layout.slabs(grid(dp=3))


@pytest.mark.parametrize("dim", [2, -1])
def test_a_cut_of_a_dim_that_is_not_there_is_refused(dim):
    with pytest.raises(LayoutError, match=f"names dim {dim} of a tensor with 2 dims"):
        Cuts((5, 2), (Cut(dim, "dp"),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_factor": 0}, "a cut along dp can't have the split factor 0"),
        ({"sizes": (6, -1)}, "a cut along dp has a negative size in (6, -1)"),
    ],
)
def test_a_cut_that_can_not_be_is_refused(options, message):
    with pytest.raises(LayoutError) as error:
        Cut(0, "dp", **options)
    assert message == str(error.value)


PLACEMENTS = [
    (("S", 0, 1),),
    (("S", 1, 1),),
    (("S", 0, 1), ("S", 0, 1)),
    (("S", 0, 1), ("S", 1, 1)),
    (("S", 1, 1), ("S", 0, 1)),
    (("S", 0, 2), ("S", 1, 1)),
    (("S", 0, 3), ("S", 0, 1)),
    (("S", 0, 2), ("S", 0, 1)),
]


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_cuts_give_the_shape_and_first_offset_that_dtensor_computes(placements):
    """Against torch's own integers, for every shape up to (9, 4) and mesh up to (3, 3)."""
    for shape in itertools.product(range(1, 10), range(1, 5)):
        for mesh in itertools.product(range(1, 4), repeat=len(placements)):
            names = ("dp", "tp")[: len(mesh)]
            cuts = Cuts(
                shape,
                tuple(Cut(dim, n, sf) for (_, dim, sf), n in zip(placements, names, strict=True)),
            )
            theirs = [
                TorchShard(dim) if sf == 1 else _StridedShard(dim, split_factor=sf)
                for _, dim, sf in placements
            ]
            for coordinate in itertools.product(*map(range, mesh)):
                place = Grid(names, mesh, coordinate)
                local, offset = _compute_local_shape_and_global_offset(
                    shape, mesh, list(coordinate), theirs
                )
                case = (shape, mesh, coordinate)
                assert math.prod(local) == cuts.numel(place), case
                if math.prod(local):
                    first = cuts.apply((), place)[0].boxes[0]
                    assert tuple(offset) == first.offsets, case


# All storage stages --------------------------------------------------------------------------------------

STAGES = [
    Whole((4, 2)),
    FlatBuffer((4, 2), ("dp",), 1, 5),
    FlatRanges((4, 2), ("dp",), ((0, 3), (3, 8))),
    Cuts((4, 2), (Cut(0, "dp"),)),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: type(s).__name__)
def test_numel_is_what_the_slabs_hold(stage):
    layout = Layout("w", "w", (stage,))
    assert stage.numel(grid(dp=2)) == layout.storage.numel(grid(dp=2))
    for place in grid(dp=2).walk(("dp",)):
        assert stage.numel(place) == sum(slab.numel for slab in layout.slabs(place))
    assert (4, 2) == layout.local_shape


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: type(s).__name__)
def test_a_storage_stage_comes_first_and_only_there(stage):
    with pytest.raises(
        LayoutError, match=r"^w: a layout starts with a storage stage such as Whole$"
    ):
        Layout("w", "w", (Concat(0, (("_w", 4),)), stage))
    with pytest.raises(LayoutError, match=r"^w: a storage stage starts a chain"):
        Layout("w", "w", (Whole((4, 2)), stage)).slabs(grid(dp=2))


@pytest.mark.parametrize("make", [Whole, lambda s: FlatRanges(s, (), ()), lambda s: Cuts(s, ())])
def test_a_negative_size_is_refused(make):
    with pytest.raises(LayoutError, match=r"the local shape \(4, -2\) has a negative size"):
        make((4, -2))


def test_a_view_is_relative_to_the_ranks_own_storage_not_to_the_buffer_it_lies_in():
    """A slice of a flat buffer starts at its own element 0, whatever its storage offset is."""
    buffer = torch.arange(10)
    layout = Layout("w", "w", (FlatBuffer((2, 3), ("dp",), 2, 5),))
    place = grid(dp=2).at(dp=1)
    shard = buffer[5:8]  # elements 3, 4, 5 of the parameter
    (slab,) = layout.slabs(place)
    view = shard.as_strided(slab.sizes, slab.strides, shard.storage_offset() + slab.start)
    assert [[5, 6, 7]] == view.tolist()
