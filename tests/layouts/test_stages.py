"""The stages after storage, one by one: what each makes of known boxes, and what it says."""

import pytest

from shardplan.layouts import (
    EXPERT,
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
    replicated,
    tiling_faults,
)


def grid(**axes):
    return Grid(tuple(axes), tuple(axes.values()), (0,) * len(axes))


ONE = grid(tp=1)


def slabs(layout, place=ONE):
    """The slabs as (key, offsets, sizes, start, strides)."""
    return [(s.key, s.offsets, s.sizes, s.start, s.strides) for s in layout.slabs(place)]


def chain(*stages, name="w"):
    return Layout("w", name, stages)


def shapes(layout, place=ONE):
    return {layout.key(frame): frame.shape for frame in layout.frames(place)}


# Concat ------------------------------------------------------------------------------------------------


def test_concat_cuts_at_the_borders():
    layout = chain(Whole((4, 2)), Concat(0, (("_w", 1), ("_v", 3))))
    assert [
        ("w_w", (0, 0), (1, 2), 0, (2, 1)),
        ("w_v", (0, 0), (3, 2), 2, (2, 1)),
    ] == slabs(layout)
    assert {"w_w": (1, 2), "w_v": (3, 2)} == shapes(layout)


def test_concat_along_the_last_dim_keeps_the_row_stride():
    layout = chain(Whole((2, 5)), Concat(1, (("_w", 2), ("_v", 3))))
    assert [
        ("w_w", (0, 0), (2, 2), 0, (5, 1)),
        ("w_v", (0, 0), (2, 3), 2, (5, 1)),
    ] == slabs(layout)


def test_concat_of_a_slice_leaves_a_rank_without_boxes_of_a_part_but_with_its_shape():
    layout = chain(FlatRanges((4,), ("dp",), ((0, 2), (2, 4))), Concat(0, (("_w", 2), ("_v", 2))))
    second = grid(dp=2).at(dp=1)
    assert [("w_v", (0,), (2,), 0, (1,))] == slabs(layout, second)
    assert {"w_w": (2,), "w_v": (2,)} == shapes(layout, second)


def test_concat_of_other_sizes_says_what_is_covered_and_by_what():
    layout = chain(Whole((2820, 2)), Concat(0, (("_w", 1408), ("_v", 1408)), "SwiGLU halves"))
    with pytest.raises(LayoutError) as error:
        layout.slabs(Grid(("tp", "dp_shard"), (2, 8), (1, 3)))
    assert str(error.value) == (
        "w: SwiGLU halves cover 2816 rows of dim 0 (w 1408 + v 1408) but the local tensor has "
        "2820 (tp 1/2, dp_shard 3/8). Give the sizes that this tensor-parallel rank holds."
    )


# Interleave --------------------------------------------------------------------------------------------


def test_interleave_gathers_what_repeats_in_groups():
    """Two groups of q2 k1: rows q q k q q k."""
    layout = chain(Whole((6,)), Interleave(0, 2, ((".q", 2), (".k", 1))))
    assert [
        ("w.q", (0,), (2,), 0, (1,)),
        ("w.q", (2,), (2,), 3, (1,)),
        ("w.k", (0,), (1,), 2, (1,)),
        ("w.k", (1,), (1,), 5, (1,)),
    ] == slabs(layout)
    assert {"w.q": (4,), "w.k": (2,)} == shapes(layout)


def test_interleave_of_one_group_is_concat():
    parts = ((".q", 2), (".k", 1))
    assert slabs(chain(Whole((3, 2)), Concat(0, parts))) == slabs(
        chain(Whole((3, 2)), Interleave(0, 1, parts))
    )


def test_interleave_of_a_slice_that_starts_inside_a_group():
    """Rows 1 to 4 of q q k q q k: one q, k, one q."""
    layout = chain(
        FlatRanges((6,), ("dp",), ((1, 4), (0, 1), (4, 6))),
        Interleave(0, 2, ((".q", 2), (".k", 1))),
    )
    assert [
        ("w.q", (1,), (1,), 0, (1,)),
        ("w.q", (2,), (1,), 2, (1,)),
        ("w.k", (0,), (1,), 1, (1,)),
    ] == slabs(layout, grid(dp=3))
    prove(layout, grid(dp=3))


def test_interleave_of_other_sizes_says_how_many_rows_the_groups_cover():
    layout = chain(Whole((7,)), Interleave(0, 2, ((".q", 2), (".k", 1)), "QKV parts"))
    with pytest.raises(LayoutError) as error:
        layout.slabs(grid(tp=2))
    assert str(error.value) == (
        "w: QKV parts of 2 groups of 3 rows cover 6 rows of dim 0 but the local tensor has 7 "
        "(tp 0/2). Give the number of groups that this tensor-parallel rank holds."
    )


# Shard and Fuse ----------------------------------------------------------------------------------------


def test_shard_shifts_the_offsets_and_widens_the_shape():
    layout = chain(Whole((3, 2)), Shard(1, "tp"))
    place = grid(tp=4).at(tp=3)
    assert [("w", (0, 6), (3, 2), 0, (2, 1))] == slabs(layout, place)
    assert {"w": (3, 8)} == shapes(layout, place)
    assert ("tp",) == layout.axes


def test_two_shards_of_one_dim_count_the_later_one_slower():
    layout = chain(Whole((2,)), Shard(0, "tp"), Shard(0, "cp"))
    places = grid(cp=2, tp=2).walk(("cp", "tp"))
    assert [(0,), (2,), (4,), (6,)] == [layout.slabs(place)[0].offsets for place in places]


def test_an_axis_that_the_grid_has_not_is_one_rank():
    assert {"w": (3,)} == shapes(chain(Whole((3,)), Shard(0, "tp")), grid(dp=2))


def test_fuse_puts_the_parts_in_the_order_of_a_model_without_tensor_parallelism():
    """Local rows [gate_t; up_t] of two ranks, F = 4: canonical [gate; up]."""
    layout = chain(Whole((4,)), Concat(0, (("_w", 2), ("_v", 2))), Shard(0, "tp"), Fuse(0))
    found = [slabs(layout, place) for place in grid(tp=2).walk(("tp",))]
    assert [
        [("w", (0,), (2,), 0, (1,)), ("w", (4,), (2,), 2, (1,))],
        [("w", (2,), (2,), 0, (1,)), ("w", (6,), (2,), 2, (1,))],
    ] == found
    assert {"w": (8,)} == shapes(layout, grid(tp=2))


# Unpad, Permute ----------------------------------------------------------------------------------------


def test_unpad_drops_the_end_on_the_ranks_that_hold_it():
    layout = chain(Whole((4, 1)), Shard(0, "tp"), Unpad(0, 10))
    found = [slabs(layout, place) for place in grid(tp=4).walk(("tp",))]
    assert [
        [("w", (0, 0), (4, 1), 0, (1, 1))],
        [("w", (4, 0), (4, 1), 0, (1, 1))],
        [("w", (8, 0), (2, 1), 0, (1, 1))],
        [],
    ] == found
    assert {"w": (10, 1)} == shapes(layout, grid(tp=4).at(tp=3))


def test_unpad_to_more_than_there_is_says_both_sizes():
    with pytest.raises(LayoutError) as error:
        chain(Whole((4, 1)), Shard(0, "tp"), Unpad(0, 10)).slabs(grid(tp=2))
    assert str(error.value) == (
        "w: the true size 10 of dim 0 is larger than the padded tensor's 8 (tp 0/2). Padding can "
        "only add."
    )


def test_permute_reorders_offsets_sizes_and_strides():
    layout = chain(Whole((2, 3, 4)), Permute((2, 0, 1)))
    assert [("w", (0, 0, 0), (4, 2, 3), 0, (1, 12, 4))] == slabs(layout)
    assert {"w": (4, 2, 3)} == shapes(layout)


@pytest.mark.parametrize("dims", [(0, 1), (0, 0, 1), (0, 1, 3), (1, 2, 3)])
def test_permute_of_other_dims_is_refused(dims):
    with pytest.raises(LayoutError, match=r"does not reorder the 3 dims of shape \(2, 3, 4\)"):
        chain(Whole((2, 3, 4)), Permute(dims)).slabs(ONE)


@pytest.mark.parametrize(
    "stage", [Concat(2, (("_w", 2),)), Interleave(2, 1, (("_w", 2),)), Shard(2, "tp"), Unpad(2, 1)]
)
def test_a_dim_that_is_not_there_is_refused(stage):
    with pytest.raises(LayoutError, match=r"^w: dim 2 of a tensor with 2 dims \(shape \(4, 2\)\)"):
        chain(Whole((4, 2)), stage).slabs(ONE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Concat(0, (("_w", -1), ("_v", 5)), "SwiGLU halves"),
            "SwiGLU halves: the part '_w' can't have -1 rows. Give sizes of at least 0.",
        ),
        (
            lambda: Interleave(0, 2, (("_w", 3), ("_v", -1))),
            "components: the part '_v' can't have -1 rows. Give sizes of at least 0.",
        ),
        (lambda: Interleave(0, -1, (("_w", 3),)), "components: there can't be -1 groups"),
        (
            lambda: Join(0, (("_qk", ("_w", "_v"), 0),)),
            "'_qk' can't be woven in 0 groups",
        ),
        (lambda: Unpad(0, -1), "the true size of dim 0 can't be -1"),
    ],
)
def test_impossible_sizes_are_refused(make, message):
    """-1 and 5 rows add up to 4, and would be cut beside the tensor."""
    with pytest.raises(LayoutError) as error:
        make()
    assert message == str(error.value)


def test_a_negative_dim_is_refused():
    with pytest.raises(LayoutError, match="dim -1 of a tensor"):
        chain(Whole((4, 2)), Shard(-1, "tp")).slabs(ONE)


# Experts -----------------------------------------------------------------------------------------------


def test_expert_index_fills_the_hole_in_the_name():
    """8 experts over EP 4: rank 3's local experts 0 and 1 are 6 and 7."""
    place = grid(ep=4).at(ep=3)
    names = [
        chain(Whole((2,)), ExpertIndex(i, 2), name=f"experts.{EXPERT}.w").slabs(place)[0].key
        for i in (0, 1)
    ]
    assert ["experts.6.w", "experts.7.w"] == names


def test_expert_index_by_a_table():
    layout = chain(Whole((2,)), ExpertIndex(1, 2, "ep", ((0, 2), (1, 3))), name="w{expert}")
    assert ["w2", "w3"] == [layout.slabs(g)[0].key for g in grid(ep=2).walk(("ep",))]


def test_an_expert_that_no_rank_holds_is_refused():
    with pytest.raises(LayoutError) as error:
        ExpertIndex(4, 4)
    assert str(error.value) == (
        "local expert 4 is not in [0, 4), the experts that each rank holds. Are the names global "
        "already?"
    )


def test_an_expert_needs_a_place_in_the_name():
    with pytest.raises(LayoutError) as error:
        chain(Whole((2,)), ExpertIndex(1, 2)).slabs(grid(ep=2))
    assert str(error.value) == (
        "w: expert 1 has no place in the name 'w'. The name of an expert's tensor needs {expert}."
    )


def test_stack_puts_an_expert_into_its_row():
    layout = chain(Whole((3,)), ExpertIndex(1, 2), Stack(4))
    assert [("w", (3, 0), (1, 3), 0, (1, 1))] == slabs(layout, grid(ep=2).at(ep=1))
    assert {"w": (4, 3)} == shapes(layout, grid(ep=2))


def test_all_local_experts_together_cover_the_stack():
    rows = [
        (slab.offsets, slab.sizes)
        for local in (0, 1)
        for place in grid(ep=2).walk(("ep",))
        for slab in chain(Whole((3,)), ExpertIndex(local, 2), Stack(4)).slabs(place)
    ]
    assert [] == tiling_faults((4, 3), rows)


def test_stack_of_fewer_experts_than_there_are_says_so():
    with pytest.raises(LayoutError) as error:
        chain(Whole((3,)), ExpertIndex(1, 2), Stack(2)).slabs(grid(ep=2).at(ep=1))
    assert str(error.value) == (
        "w: expert 3 can't be stacked as one of 2 (ep 1/2). Give the number of experts of the "
        "whole layer."
    )


def test_stack_needs_an_expert():
    with pytest.raises(LayoutError, match="expert None can't be stacked"):
        chain(Whole((3,)), Stack(2)).slabs(ONE)


def test_unstack_gives_each_row_a_name_of_its_own():
    layout = chain(Whole((2, 3)), Shard(0, "ep"), Unstack(), name="experts.{expert}.w")
    second = grid(ep=2).at(ep=1)
    assert [
        ("experts.2.w", (0,), (3,), 0, (1,)),
        ("experts.3.w", (0,), (3,), 3, (1,)),
    ] == slabs(layout, second)
    assert {f"experts.{i}.w": (3,) for i in range(4)} == shapes(layout, second)


# Fused QKV ---------------------------------------------------------------------------------------------


def test_concatenated_qkv_over_two_ranks():
    """Q8 K4 V4 at TP 2, canonical order: rank 0 (0)+4, (8)+2, (12)+2."""
    layout = chain(
        Whole((8,)), Concat(0, ((".q", 4), (".k", 2), (".v", 2))), Shard(0, "tp"), Fuse(0)
    )
    rows = [
        [(s.offsets[0], s.sizes[0]) for s in layout.slabs(place)]
        for place in grid(tp=2).walk(("tp",))
    ]
    assert [[(0, 4), (8, 2), (12, 2)], [(4, 4), (10, 2), (14, 2)]] == rows


def test_grouped_qkv_with_more_ranks_than_groups_is_a_plain_column():
    """2 groups of q4 k2 v2 at TP 4: raw rows, 4 a rank; no rank counts heads."""
    layout = chain(Whole((4,)), Shard(0, "tp"))
    rows = [
        [(s.offsets[0], s.sizes[0]) for s in layout.slabs(place)]
        for place in grid(tp=4).walk(("tp",))
    ]
    assert [[(0, 4)], [(4, 4)], [(8, 4)], [(12, 4)]] == rows


def test_grouped_qkv_by_parts_is_the_same_at_every_tensor_parallel_size():
    """At TP 1 and 2 the parts of grouped QKV are equal tensors: q (8,), k (4,), v (4,)."""
    parts = ((".q", 4), (".k", 2), (".v", 2))
    for tp in (1, 2):
        layout = chain(Whole((16 // tp,)), Interleave(0, 2 // tp, parts), Shard(0, "tp"))
        prove(layout, grid(tp=tp))
        assert {"w.q": (8,), "w.k": (4,), "w.v": (4,)} == shapes(layout, grid(tp=tp))
    # Rank 1 of 2 holds the second group.
    place = grid(tp=2).at(tp=1)
    assert [(4,), (2,), (2,)] == [s.offsets for s in layout.slabs(place)]


# Chains ------------------------------------------------------------------------------------------------


def test_axes_are_those_of_all_stages_once():
    layout = chain(Cuts((4, 2), (Cut(0, "dp_shard"), Cut(1, "tp"))), Shard(0, "tp"), Shard(0, "ep"))
    assert ("dp_shard", "tp", "ep") == layout.axes
    assert ("dp_replicate",) == layout.replica_axes(
        grid(pp=2, dp_replicate=2, dp_shard=2, ep=1, tp=2)
    )


def test_replicated():
    layout = replicated("norm.weight", (3,))
    assert "norm.weight" == layout.name == layout.fqn
    assert [("norm.weight", (0,), (3,), 0, (1,))] == slabs(layout, grid(tp=2).at(tp=1))
    assert "expert" == replicated("e", (3,), "expert").family


def test_a_layout_without_stages_is_refused():
    with pytest.raises(LayoutError, match="starts with a storage stage"):
        Layout("w", "w", ())


def test_a_layout_is_evaluated_at_a_coordinate_and_nothing_else():
    """The rank that made it has no say: 4,096 ranks in one process."""
    layout = chain(
        FlatBuffer((4096, 2), ("dp_shard",), 0, 2), Concat(0, (("_w", 2048), ("_v", 2048)))
    )
    big = grid(dp_shard=4096)
    assert ("w_v", (2047, 0), (1, 2), 0, (2, 1)) == slabs(layout, big.at(dp_shard=4095))[0]
    prove(layout, big)


@pytest.mark.parametrize(
    "stage",
    [
        Whole((2,)),
        Concat(0, (("_w", 2),)),
        Interleave(0, 1, (("_w", 2),)),
        Shard(0, "tp"),
        Fuse(0),
        Unpad(0, 1),
        Permute((0,)),
        ExpertIndex(0, 1),
        Unstack(),
        Stack(2),
    ],
)
def test_stages_are_values(stage):
    assert hash(stage) == hash(type(stage)(**{f: getattr(stage, f) for f in stage.__slots__}))
    for axis in stage.axes:
        assert isinstance(axis, str)
