"""The proof of coverage: what counts as a fault, what it says, and how its time grows."""

import itertools
import random
import time

import pytest

from shardplan.layouts import (
    Concat,
    FlatBuffer,
    FlatRanges,
    Grid,
    Layout,
    LayoutError,
    Permute,
    Shard,
    Whole,
    prove,
    tiling_faults,
)


def grid(**axes):
    return Grid(tuple(axes), tuple(axes.values()), (0,) * len(axes))


@pytest.mark.parametrize(
    ("shape", "boxes", "faults"),
    [
        ((), [((), ())], []),
        ((), [], ["the only element is covered 0 times"]),
        ((), [((), ()), ((), ())], ["the only element is covered 2 times"]),
        ((0,), [], []),
        ((3, 0), [((0, 0), (3, 0))], []),
        ((8,), [((0,), (4,)), ((4,), (4,))], []),
        ((8,), [((4,), (4,)), ((0,), (4,)), ((2,), (0,))], []),
        ((8,), [((0,), (4,))], ["[4, 8) is covered by no rank"]),
        ((8,), [((4,), (4,))], ["[0, 4) is covered by no rank"]),
        ((8,), [((0,), (3,)), ((5,), (3,))], ["[3, 5) is covered by no rank"]),
        ((8,), [], ["[0, 8) is covered by no rank"]),
        ((8,), [((0,), (5,)), ((4,), (4,))], ["[4, 5) is covered 2 times"]),
        ((8,), [((0,), (8,)), ((0,), (4,)), ((4,), (4,))], ["[0, 4) is covered 2 times"]),
        ((8,), [((0,), (8,))] * 3, ["[0, 8) is covered 3 times"]),
        ((2, 3), [((0, 0), (2, 2))], ["[0, 2), [2, 3) is covered by no rank"]),
        ((2, 3), [((0, 0), (2, 3)), ((1, 1), (1, 1))], ["[1, 2), [1, 2) is covered 2 times"]),
        (
            (8,),
            [((0,), (4,)), ((4,), (5,))],
            ["the box [4, 9) is not inside the tensor's shape (8,)"],
        ),
        ((8,), [((-1,), (9,))], ["the box [-1, 8) is not inside the tensor's shape (8,)"]),
        (
            (8,),
            [((0, 0), (8, 1))],
            ["a box with offsets (0, 0) and sizes (8, 1) in a tensor of shape (8,)"],
        ),
        # A pinwheel: no straight cut separates the five boxes.
        (
            (3, 3),
            [
                ((0, 0), (1, 2)),
                ((0, 2), (2, 1)),
                ((2, 1), (1, 2)),
                ((1, 0), (2, 1)),
                ((1, 1), (1, 1)),
            ],
            [],
        ),
    ],
)
def test_tiling_faults(shape, boxes, faults):
    assert faults == tiling_faults(shape, boxes)


def test_a_prime_axis_may_be_covered_unevenly_on_every_row():
    """Rows cut at different columns: what FSDP leaves of a matrix after a mid-row cut."""
    boxes = [
        ((0, 0), (1, 3)),
        ((0, 3), (1, 1)),
        ((1, 0), (1, 4)),
        ((2, 0), (1, 1)),
        ((2, 1), (1, 3)),
    ]
    assert [] == tiling_faults((3, 4), boxes)
    assert ["[2, 3), [1, 4) is covered by no rank"] == tiling_faults((3, 4), boxes[:-1])


# prove ---------------------------------------------------------------------------------------------------


def test_prove_names_each_key_the_range_the_shape_and_the_axes():
    layout = Layout(
        "fc1",
        "fc1",
        (
            FlatRanges((4, 2), ("dp_shard",), ((0, 3), (4, 8))),
            Concat(0, (("_w", 2), ("_v", 2))),
            Shard(0, "tp"),
        ),
    )
    with pytest.raises(LayoutError) as error:
        prove(layout, grid(dp_shard=2, tp=2))
    assert str(error.value) == (
        "fc1: fc1_w: [1, 2), [1, 2) is covered by no rank of shape (4, 2) (axes ('dp_shard', 'tp'))"
    )


def test_prove_collects_the_faults_of_all_keys():
    ranges = FlatRanges((4,), ("dp_shard",), ((0, 1), (3, 4)))
    layout = Layout("fc1", "fc1", (ranges, Concat(0, (("_w", 2), ("_v", 2)))))
    with pytest.raises(LayoutError) as error:
        prove(layout, grid(dp_shard=2))
    assert str(error.value) == (
        "fc1: 2 problems:\n"
        "  fc1_w: [1, 2) is covered by no rank of shape (2,)\n"
        "  fc1_v: [0, 1) is covered by no rank of shape (2,) (axes ('dp_shard',))"
    )


def test_prove_shows_eight_problems_and_how_many_more():
    parts = tuple((f".{i}", 1) for i in range(10))
    layout = Layout("w", "w", (FlatRanges((10,), ("dp",), ((0, 0),)), Concat(0, parts)))
    with pytest.raises(LayoutError, match="10 problems") as error:
        prove(layout, grid(dp=1))
    assert "w.7: " in str(error.value)
    assert "w.8: " not in str(error.value)
    assert "… and 2 more" in str(error.value)


def test_prove_does_not_care_whose_coordinate_the_grid_carries():
    layout = Layout("w", "w", (FlatBuffer((6,), ("dp",), 0, 3), Shard(0, "tp")))
    for place in grid(dp=2, tp=3).walk(("dp", "tp")):
        prove(layout, place)


def test_two_coordinates_that_disagree_about_a_shape_are_found():
    class Wider:
        axes = ("tp",)

        def apply(self, frames, grid):
            (frame,) = frames
            return (frame._replace(shape=(4 + grid.index("tp"),)),)

    with pytest.raises(LayoutError) as error:
        prove(Layout("w", "w", (Whole((4,)), Wider())), grid(tp=2))
    assert str(error.value) == (
        "w: w has the global shape (4,) at one coordinate and (5,) at another (tp 1/2). A layout "
        "must give one shape everywhere."
    )


def test_two_parts_with_one_name_are_found():
    layout = Layout("w", "w", (Whole((4,)), Concat(0, (("_w", 2), ("_w", 2)))))
    with pytest.raises(LayoutError, match=r"w_w: \[0, 2\) is covered 2 times"):
        prove(layout, grid(tp=1))


# Time ----------------------------------------------------------------------------------------------------


def seconds(work):
    """The best of three, of this process alone: others share the cores."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def rows(n):
    return (n, 4), [((i, 0), (1, 4)) for i in range(n)]


def mid_rows(n):
    """Flat ranges that end inside a row: three boxes each."""
    boxes = []
    for i in range(n // 3):
        boxes += [((2 * i, 0), (1, 1)), ((2 * i, 1), (1, 3)), ((2 * i + 1, 0), (1, 4))]
    return (2 * (n // 3), 4), boxes


def squares(n):
    side = int(n**0.5)
    return (side, side), [((i, j), (1, 1)) for i in range(side) for j in range(side)]


@pytest.mark.parametrize("tiling", [rows, mid_rows, squares])
def test_time_is_near_linear_in_the_number_of_boxes(tiling):
    """Eight times the boxes take eight times as long, not sixty-four."""
    sets = []
    for n in (12_500, 100_000):
        shape, boxes = tiling(n)
        random.Random(0).shuffle(boxes)
        sets.append((shape, boxes))
    small, large = (seconds(lambda s=s, b=b: tiling_faults(s, b)) for s, b in sets)
    assert [] == tiling_faults(*sets[0])
    assert large < 24 * small, (small, large)


def test_time_of_prove_is_near_linear_in_the_number_of_ranks():
    def layout(n):
        edges = [0, *(i * 7 + i % 7 for i in range(1, n)), n * 7]
        ranges = tuple(itertools.pairwise(edges))
        return Layout("w", "w", (FlatRanges((n, 7), ("dp",), ranges),)), grid(dp=n)

    sets = [layout(500), layout(4000)]
    small, large = (seconds(lambda s=s: prove(*s)) for s in sets)
    assert large < 24 * small, (small, large)


def test_a_transposed_layout_is_proved_too():
    layout = Layout("w", "w", (FlatBuffer((5, 3), ("dp",), 1, 4), Permute((1, 0))))
    prove(layout, grid(dp=4))
