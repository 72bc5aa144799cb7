"""FSDP storage: flat buffers and DTensors, as described and as read from live parameters."""

import types

import pytest

from shardplan.layouts import (
    BufferDescription,
    Cut,
    Cuts,
    DTensorStorage,
    FlatBuffer,
    FlatRanges,
    FSDPFlatBuffer,
    Grid,
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    Whole,
    prove,
)


def dense(**sizes):
    return Grids.from_sizes(0, **sizes).dense


def info(fqn="w", shape=(4, 2), grid=None, **more):
    return ParamInfo(fqn, shape, grid or dense(dp_shard=2), **more)


def rows(provider, param, *axes):
    """(offsets, sizes) of the slabs at each coordinate of `axes`."""
    layout = LayoutRegistry([provider]).layout(param)
    return [
        [(slab.offsets, slab.sizes) for slab in layout.slabs(place)]
        for place in param.grid.walk(axes)
    ]


# Flat ranges by name --------------------------------------------------------------------------------------


def test_ranges_by_name():
    provider = FSDPFlatBuffer({"*.weight": ((0, 3), (3, 8))})
    assert Level.STORAGE is provider.level
    assert provider.claims(info("a.weight"))
    assert not provider.claims(info("weight"))
    assert not provider.claims(info("a.weight1"))
    assert (FlatRanges((4, 2), ("dp_shard",), ((0, 3), (3, 8))),) == provider.stages(
        info("a.weight")
    )


def test_ranges_of_experts_run_over_the_experts_own_axis():
    provider = FSDPFlatBuffer({"*": ((0, 3), (3, 8))})
    grid = Grids.from_sizes(0, dp_shard=4, ep=2).expert
    (stage,) = provider.stages(info("experts.w0", grid=grid, is_expert=True))
    assert ("edp_shard",) == stage.shard_axes


def test_ranges_over_given_axes():
    provider = FSDPFlatBuffer(
        {"*": ((0, 2), (2, 4), (4, 6), (6, 8))}, axes=("dp_shard", "dp_replicate")
    )
    param = info(grid=dense(dp_replicate=2, dp_shard=2))
    assert [
        [((0, 0), (1, 2))],
        [((2, 0), (1, 2))],
        [((1, 0), (1, 2))],
        [((3, 0), (1, 2))],
    ] == rows(provider, param, "dp_replicate", "dp_shard")


def test_the_first_pattern_that_matches_counts():
    provider = FSDPFlatBuffer({"a": ((0, 8), (8, 8)), "*": ((0, 4), (4, 8))})
    assert ((0, 8), (8, 8)) == provider.stages(info("a"))[0].ranges
    assert ((0, 4), (4, 8)) == provider.stages(info("b"))[0].ranges


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            ((0, 8),),
            "w: 1 flat ranges for 2 ranks of ('dp_shard',) (dp_shard 0/2). Give one range for "
            "each rank, empty ones included.",
        ),
        (
            ((0, 4), (4, 9)),
            "w: the flat range [4, 9) is not inside the local tensor's [0, 8) (shape (4, 2)). "
            "Ranges count elements of the flattened local tensor, without the buffer's padding. "
            "(dp_shard 0/2). Mend the ranges.",
        ),
    ],
)
def test_wrong_ranges_are_refused_with_the_numbers(bounds, message):
    with pytest.raises(LayoutError) as error:
        FSDPFlatBuffer({"*": bounds}).stages(info())
    assert message == str(error.value)


# Buffers by description -------------------------------------------------------------------------------------


def test_bucket_padding_of_two_ranks_lies_inside_the_second():
    """p0 (3,) and p1 (4,) in a buffer padded to 8: p0 (0)+3; p1 (0)+1 and (1)+3."""
    buffer = BufferDescription({"p0": (3,), "p1": (4,)}, shard_count=2)
    assert (4, {"p0": 0, "p1": 3}) == (buffer.slice_length, buffer.offsets)
    provider = FSDPFlatBuffer(buffers=[buffer])
    assert [[((0,), (3,))], []] == rows(provider, info("p0", (3,)), "dp_shard")
    assert [[((0,), (1,))], [((1,), (3,))]] == rows(provider, info("p1", (4,)), "dp_shard")


def test_bucket_padding_may_fill_several_ranks():
    """World 4, padded to 12: rank 2 partly and rank 3 wholly padding."""
    buffer = BufferDescription({"p0": (3,), "p1": (4,)}, shard_count=4, shard_size=3)
    provider, grid = FSDPFlatBuffer(buffers=[buffer]), dense(dp_shard=4)
    for name, shape, right in (
        ("p0", (3,), [[((0,), (3,))], [], [], []]),
        ("p1", (4,), [[], [((0,), (3,))], [((3,), (1,))], []]),
    ):
        param = info(name, shape, grid)
        assert right == rows(provider, param, "dp_shard")
        prove(LayoutRegistry([provider]).layout(param), grid)


@pytest.mark.parametrize(
    ("shapes", "options", "offsets", "length"),
    [
        ({}, {}, {}, 1),
        ({"a": (3,), "b": (2, 2), "c": ()}, {}, {"a": 0, "b": 3, "c": 7}, 4),
        ({"a": (3,), "b": (2, 2)}, {"alignment": 4}, {"a": 0, "b": 4}, 4),
        ({"a": (5,), "b": (2, 2)}, {"alignment": 4}, {"a": 0, "b": 8}, 8),
        ({"a": (3,), "b": (0, 2), "c": (1,)}, {}, {"a": 0, "b": 3, "c": 3}, 2),
        ({"a": (3,)}, {"shard_size": 7}, {"a": 0}, 7),
    ],
)
def test_buffer_offsets_and_slice_length(shapes, options, offsets, length):
    buffer = BufferDescription(shapes, shard_count=2, **options)
    assert offsets == buffer.offsets
    assert length == buffer.slice_length


def test_a_buffer_of_experts_is_cut_along_the_experts_own_axis():
    provider = FSDPFlatBuffer(buffers=[BufferDescription({"experts.w0": (4, 2)}, 2)])
    grid = Grids.from_sizes(0, dp_shard=4, ep=2).expert
    assert (FlatBuffer((4, 2), ("edp_shard",), 0, 4),) == provider.stages(
        info("experts.w0", grid=grid, is_expert=True)
    )


def test_a_buffer_over_given_axes():
    axes = ("dp_shard", "dp_replicate")
    provider = FSDPFlatBuffer(buffers=[BufferDescription({"w": (4, 2)}, 4, axes=axes)])
    assert (FlatBuffer((4, 2), axes, 0, 2),) == provider.stages(
        info(grid=dense(dp_replicate=2, dp_shard=2))
    )


def test_a_parameter_lies_in_one_buffer():
    buffers = [BufferDescription({"w": (4, 2)}, 2), BufferDescription({"w": (4, 2)}, 2)]
    with pytest.raises(LayoutError, match=r"^w: two flat buffers hold it\. Describe it once\.$"):
        FSDPFlatBuffer(buffers=buffers)


def test_a_buffer_that_contradicts_the_parameter_or_the_grid_is_refused():
    with pytest.raises(LayoutError) as error:
        FSDPFlatBuffer(buffers=[BufferDescription({"w": (4, 3)}, 2)]).stages(info())
    assert str(error.value) == (
        "w: the buffer holds it with shape (4, 3) but it has (4, 2) (dp_shard 0/2). Describe the "
        "buffer with the shapes that this rank holds."
    )
    with pytest.raises(LayoutError) as error:
        FSDPFlatBuffer(buffers=[BufferDescription({"w": (4, 2)}, 3)]).stages(info())
    assert str(error.value) == (
        "w: its buffer is cut into 3 slices but ('dp_shard',) has 2 ranks (dp_shard 0/2). Give "
        "the buffer's axes, or the grid that cut it."
    )


def test_a_parameter_that_its_buffer_has_no_room_for_is_refused():
    """What lies behind the last slice would be on no rank, and so not in the checkpoint."""
    buffer = BufferDescription({"w": (4, 2)}, 2, shard_size=3)
    with pytest.raises(LayoutError) as error:
        FSDPFlatBuffer(buffers=[buffer]).stages(info())
    assert str(error.value) == (
        "w: its elements [0, 8) do not fit into the buffer's 2 slices of 3 (dp_shard 0/2). Give "
        "the buffer's real shard_size."
    )


# Megatron-FSDP's live parameters ----------------------------------------------------------------------------------


def megatron(shape=(4, 2), offset=100, bucket=97, size=20, world=2, buffer="model_weight_buffer"):
    """A parameter as Megatron-FSDP leaves it, with the buffer that holds it."""
    original = types.SimpleNamespace(shape=shape)
    held = types.SimpleNamespace(
        item_index_map={5: types.SimpleNamespace(global_data_index=offset)},
        param_idx={id(original): 5},
        bucket_index=types.SimpleNamespace(global_data_index=bucket, size=size),
        dp_world_size=world,
    )
    held.param_idx = {_Key(original): 5}
    group = types.SimpleNamespace(model_weight_buffer=None, main_weight_buffer=None)
    setattr(group, buffer, held)
    model = types.SimpleNamespace(
        param_and_grad_buffer=types.SimpleNamespace(
            parameter_groups=[None, group], param_to_param_group={_Key(original): 1}
        )
    )
    return types.SimpleNamespace(
        megatron_fsdp_slice=slice(0, 7),
        orig_param=_Key(original),
        _megatron_fsdp_model=model,
        placements=(),  # a DTensor too, but its placements do not say where it lies
    )


class _Key:
    """Stands for a tensor: hashed by identity."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return self.tensor is other.tensor

    def __hash__(self):
        return id(self.tensor)


@pytest.mark.parametrize("buffer", ["model_weight_buffer", "main_weight_buffer"])
def test_a_live_parameter_says_where_it_lies_in_its_buffer(buffer):
    """Element 100 of all buffers, its bucket from 97 on, 20 elements over 2 ranks."""
    param = info(param=megatron(buffer=buffer))
    provider = FSDPFlatBuffer()
    assert provider.claims(param)
    assert not DTensorStorage().claims(param)
    assert (FlatBuffer((4, 2), ("dp_shard",), 3, 10),) == provider.stages(param)
    assert [[((0, 0), (3, 2)), ((3, 0), (1, 1))], [((3, 1), (1, 1))]] == rows(
        provider, param, "dp_shard"
    )


def test_a_live_expert_lies_in_the_buffer_of_its_own_axis():
    grid = Grids.from_sizes(0, dp_shard=4, ep=2).expert
    param = info("experts.w0", grid=grid, is_expert=True, param=megatron())
    assert (FlatBuffer((4, 2), ("edp_shard",), 3, 10),) == FSDPFlatBuffer().stages(param)


def test_hybrid_fsdp_cuts_the_buffer_along_both_axes_the_outer_one_faster():
    live = megatron(world=4)
    live.megatron_fsdp_slice = slice(0, 2)  # elements 3 and 4 of a slice of 5
    param = info(grid=dense(dp_replicate=2, dp_shard=2), param=live)
    assert (FlatBuffer((4, 2), ("dp_shard", "dp_replicate"), 3, 5),) == FSDPFlatBuffer().stages(
        param
    )


def test_hybrid_sharding_with_replicas_leaves_the_outer_axis_alone():
    param = info(grid=dense(dp_replicate=2, dp_shard=2), param=megatron(world=2))
    assert (FlatBuffer((4, 2), ("dp_shard",), 3, 10),) == FSDPFlatBuffer().stages(param)


def test_a_live_buffer_of_another_world_is_refused():
    with pytest.raises(LayoutError) as error:
        FSDPFlatBuffer().stages(info(param=megatron(world=5)))
    assert str(error.value) == (
        "w: its buffer is cut into 5 slices but ('dp_shard', 'dp_replicate') has 2 ranks "
        "(dp_shard 0/2). Pass the pg_collection that Megatron-FSDP was given."
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: setattr(p, "_megatron_fsdp_model", None),
        lambda p: delattr(p, "_megatron_fsdp_model"),
        lambda p: p._megatron_fsdp_model.param_and_grad_buffer.param_to_param_group.clear(),
        lambda p: setattr(
            p._megatron_fsdp_model.param_and_grad_buffer.parameter_groups[1],
            "model_weight_buffer",
            None,
        ),
    ],
)
def test_a_live_parameter_without_a_readable_buffer_says_what_to_do(spoil):
    param = megatron()
    spoil(param)
    with pytest.raises(
        LayoutError, match=r"^w: it has a megatron_fsdp_slice but no readable buffer"
    ):
        FSDPFlatBuffer().stages(info(param=param))


def test_a_given_description_comes_before_the_live_parameter():
    provider = FSDPFlatBuffer({"w": ((0, 8), (8, 8))})
    assert (FlatRanges((4, 2), ("dp_shard",), ((0, 8), (8, 8))),) == provider.stages(
        info(param=megatron())
    )


# DTensors ----------------------------------------------------------------------------------------------------------


class Placement:
    """Replicate, Shard, _StridedShard and Partial, as far as they are asked."""

    def __init__(self, dim=None, split_factor=None, replicate=False):
        self._replicate = replicate
        if dim is not None:
            self.dim = dim
        if split_factor is not None:
            self.split_factor = split_factor

    def is_replicate(self):
        return self._replicate

    def __repr__(self):
        return "Partial(sum)"


REPLICATE, PARTIAL = Placement(replicate=True), Placement()


def dtensor(names, shape, *placements):
    mesh = types.SimpleNamespace(mesh_dim_names=names, shape=shape, ndim=len(shape))
    return types.SimpleNamespace(device_mesh=mesh, placements=placements)


def test_cuts_by_name():
    provider = DTensorStorage({"*.weight": (Cut(0, "dp_shard", sizes=(1, 3)),)})
    assert not provider.claims(info("weight"))
    assert (Cuts((4, 2), (Cut(0, "dp_shard", sizes=(1, 3)),)),) == provider.stages(info("a.weight"))
    assert [[((0, 0), (1, 2))], [((1, 0), (3, 2))]] == rows(provider, info("a.weight"), "dp_shard")


@pytest.mark.parametrize(
    ("names", "shape", "placements", "cuts"),
    [
        (("dp_shard",), (2,), (Placement(0),), (Cut(0, "dp_shard"),)),
        (("dp_shard",), (2,), (Placement(1),), (Cut(1, "dp_shard"),)),
        (("dp_shard",), (2,), (REPLICATE,), ()),
        (("dp_replicate", "dp_shard"), (1, 2), (REPLICATE, Placement(0)), (Cut(0, "dp_shard"),)),
        (
            ("dp_shard", "tp"),
            (2, 2),
            (Placement(0), Placement(1)),
            (Cut(0, "dp_shard"), Cut(1, "tp")),
        ),
        # FSDP2 over tensor parallelism: made from right to left.
        (
            ("dp_shard", "tp"),
            (2, 2),
            (Placement(0, 2), Placement(0)),
            (Cut(0, "tp"), Cut(0, "dp_shard")),
        ),
        (
            ("dp_replicate", "dp_shard", "tp"),
            (1, 2, 2),
            (REPLICATE, Placement(0, 2), Placement(0)),
            (Cut(0, "tp"), Cut(0, "dp_shard")),
        ),
        # A packed projection: the split factor is its own; then FSDP2 over it.
        (("tp",), (2,), (Placement(0, 2),), (Cut(0, "tp", 2),)),
        (("tp",), (2,), (Placement(0, 3),), (Cut(0, "tp", 3),)),
        (
            ("dp_shard", "tp"),
            (2, 2),
            (Placement(0, 2), Placement(0, 3)),
            (Cut(0, "tp", 3), Cut(0, "dp_shard")),
        ),
        # The split factor counts cuts of its own dim only.
        (
            ("dp_shard", "tp"),
            (2, 2),
            (Placement(0, 2), Placement(1)),
            (Cut(0, "dp_shard", 2), Cut(1, "tp")),
        ),
        (("dp_cp", "tp"), (2, 2), (Placement(0), REPLICATE), (Cut(0, "dp_shard"),)),
        (("fsdp",), (2,), (Placement(0),), (Cut(0, "dp_shard"),)),
    ],
)
def test_placements_become_cuts(names, shape, placements, cuts):
    param = info(grid=dense(dp_shard=2, tp=2), param=dtensor(names, shape, *placements))
    provider = DTensorStorage()
    assert provider.claims(param)
    assert not FSDPFlatBuffer().claims(param)
    assert (Cuts((4, 2), cuts),) == provider.stages(param)


def test_an_experts_placements_become_cuts_along_the_experts_axes():
    grid = Grids.from_sizes(0, dp_shard=4, tp=1, ep=2).expert
    param = info(
        "experts.w", grid=grid, is_expert=True, param=dtensor(("dp_shard",), (2,), Placement(0))
    )
    assert (Cuts((4, 2), (Cut(0, "edp_shard"),)),) == DTensorStorage().stages(param)


def test_a_mesh_without_names_matches_a_grid_made_from_it():
    grid = Grid(("axis0", "axis1"), (2, 2), (0, 0))
    param = info(grid=grid, param=dtensor(None, (2, 2), Placement(0), Placement(1)))
    assert (Cut(0, "axis0"), Cut(1, "axis1")) == DTensorStorage().stages(param)[0].cuts


@pytest.mark.parametrize(
    ("names", "size"),
    [(("model",), 2), (("dp_shard",), 4)],
)
def test_a_mesh_axis_that_the_grid_has_not_is_refused(names, size):
    with pytest.raises(LayoutError) as error:
        DTensorStorage().stages(info(param=dtensor(names, (size,), Placement(0))))
    assert str(error.value) == (
        f"w: its mesh axis {names[0]!r} of size {size} is not one of the grid's axes (pp 1, "
        "dp_replicate 1, dp_shard 2, tp 1) (dp_shard 0/2). Pass the grid that the mesh was made "
        "from (grid=Grids.from_mesh(mesh)), or name the mesh's axes as the grid's."
    )


def test_a_partial_sum_is_refused():
    with pytest.raises(LayoutError) as error:
        DTensorStorage().stages(info(param=dtensor(("dp_shard",), (2,), PARTIAL)))
    assert str(error.value) == (
        "w: its placement along 'dp_shard' is Partial(sum), neither a shard nor a replica "
        "(dp_shard 0/2). Reduce partial sums before saving."
    )


def test_a_plain_parameter_is_whole():
    param = info(param=types.SimpleNamespace())
    assert not DTensorStorage().claims(param)
    assert not FSDPFlatBuffer().claims(param)
    layout = LayoutRegistry([DTensorStorage(), FSDPFlatBuffer()]).layout(param)
    assert (Whole((4, 2)),) == layout.stages
