"""Grids: rank orders, and where they come from, with the coordinates written out."""

import dataclasses
import types

import pytest

from shardplan.layouts import Grid, Grids, LayoutError, ep_rank_and_size

# Grid ----------------------------------------------------------------------------------------------------


def test_from_rank_counts_the_last_axis_fastest():
    axes = {"pp": 2, "dp_shard": 2, "tp": 2}
    coordinates = [Grid.from_rank(axes, rank).coordinate for rank in range(8)]
    assert [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ] == coordinates


def test_a_grid_answers_for_its_axes_and_counts_others_as_one_rank():
    grid = Grid(("dp_shard", "tp"), (4, 2), (3, 1))
    assert 8 == grid.world_size
    assert (4, 3) == (grid.size("dp_shard"), grid.index("dp_shard"))
    assert (1, 0) == (grid.size("ep"), grid.index("ep"))
    assert 7 == grid.linear(("dp_shard", "tp"))
    assert 7 == grid.linear(("tp", "dp_shard"))
    assert 5 == grid.at(dp_shard=1).linear(("tp", "dp_shard"))
    assert 3 == grid.at(dp_shard=1).linear(("dp_shard", "tp"))
    assert 3 == grid.linear(("dp_shard", "ep"))
    assert 8 == grid.count(("dp_shard", "tp", "ep"))
    assert 1 == grid.count(())


def test_walk_goes_over_the_named_axes_and_leaves_the_others():
    grid = Grid(("dp", "cp", "tp"), (2, 3, 2), (1, 2, 1))
    assert [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)] == [
        place.coordinate for place in grid.walk(("dp", "tp"))
    ]
    assert [(1, 2, 1)] == [place.coordinate for place in grid.walk(())]
    assert [(1, 2, 1)] == [place.coordinate for place in grid.walk(("ep",))]


def test_facts_names_only_axes_with_several_ranks():
    assert "dp 3/4, tp 1/2" == Grid(("pp", "dp", "tp"), (1, 4, 2), (0, 3, 1)).facts()
    assert "one rank" == Grid(("pp",), (1,), (0,)).facts()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (("dp", "tp"), (2,), (0, 0)),
            "grid: 2 axes ('dp', 'tp') with 1 sizes (2,) and 2 coordinates (0, 0). Give one size "
            "and one coordinate for each axis.",
        ),
        ((("dp", "dp"), (2, 2), (0, 0)), "grid: an axis is named twice in ('dp', 'dp')"),
        ((("dp",), (2,), (2,)), "grid: dp rank 2 is not in [0, 2)"),
        ((("dp",), (2,), (-1,)), "grid: dp rank -1 is not in [0, 2)"),
        ((("dp",), (0,), (0,)), "grid: dp rank 0 is not in [0, 0)"),
    ],
)
def test_a_grid_that_can_not_be_is_refused(arguments, message):
    with pytest.raises(LayoutError) as error:
        Grid(*arguments)
    assert message == str(error.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(LayoutError, match=rf"rank {rank} is not in \[0, 4\)"):
        Grid.from_rank({"dp": 2, "tp": 2}, rank)


@pytest.mark.parametrize(
    ("axes", "name", "resolved"),
    [
        (("pp", "dp_replicate", "dp_shard", "tp"), "tp", "tp"),
        (("pp", "dp_replicate", "dp_shard", "tp"), "dp_cp", "dp_shard"),
        (("pp", "dp_replicate", "dp_shard", "tp"), "fsdp", "dp_shard"),
        (("pp", "dp_replicate", "dp_shard", "tp"), "outer_fsdp_dp", "dp_replicate"),
        (("pp", "dp_replicate", "dp_shard", "tp"), "ep", None),
        (("pp", "edp_replicate", "edp_shard", "ep", "etp"), "tp", "etp"),
        (("pp", "edp_replicate", "edp_shard", "ep", "etp"), "dp_cp", "edp_shard"),
        (("pp", "edp_replicate", "edp_shard", "ep", "etp"), "dp_shard", "edp_shard"),
        (("pp", "edp_replicate", "edp_shard", "ep", "etp"), "dp_replicate", "edp_replicate"),
        (("dp_cp", "tp"), "dp_cp", "dp_cp"),
    ],
)
def test_names_of_other_projects_find_the_grids_own(axes, name, resolved):
    assert resolved == Grid(axes, (1,) * len(axes), (0,) * len(axes)).resolve(name)


# From plain sizes ------------------------------------------------------------------------------------------


def test_from_sizes_orders_dense_ranks_as_megatron_does():
    """tp fastest, then dp, then pp: PP 2 × DP 2 × TP 2."""
    coordinates = [
        Grids.from_sizes(rank, pp=2, dp_shard=2, tp=2).dense.coordinate for rank in range(8)
    ]
    # pp, dp_replicate, dp_shard, tp
    assert [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (0, 0, 1, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 0, 1, 0),
        (1, 0, 1, 1),
    ] == coordinates


def test_from_sizes_orders_experts_as_megatron_does():
    """etp fastest, then ep, then expert data parallel: 8 ranks as EDP 2 × EP 2 × ETP 2."""
    grids = [Grids.from_sizes(rank, dp_shard=4, tp=2, ep=2) for rank in range(8)]
    # pp, edp_replicate, edp_shard, ep, etp
    assert [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 1, 1),
        (0, 0, 1, 0, 0),
        (0, 0, 1, 0, 1),
        (0, 0, 1, 1, 0),
        (0, 0, 1, 1, 1),
    ] == [g.expert.coordinate for g in grids]
    # The same ranks on the dense grid: dp_shard 4 × tp 2.
    assert [(0, 0, r // 2, r % 2) for r in range(8)] == [g.dense.coordinate for g in grids]


def test_from_sizes_lets_experts_be_whole_where_dense_parameters_are_sharded():
    """TP 2 with ETP 1: the tensor-parallel ranks hold different experts."""
    grids = [Grids.from_sizes(rank, dp_shard=2, tp=2, ep=4, etp=1) for rank in range(4)]
    assert [0, 1, 2, 3] == [g.expert.index("ep") for g in grids]
    assert {(1, 4, 1)} == {
        (g.expert.size("edp_shard"), g.expert.size("ep"), g.expert.size("etp")) for g in grids
    }


def test_from_sizes_replicates_experts_where_dense_parameters_are_replicated():
    grids = Grids.from_sizes(5, dp_replicate=2, dp_shard=4, ep=2)
    assert (1, 2, 2, 2, 1) == grids.expert.sizes
    assert (0, 1, 0, 1, 0) == grids.expert.coordinate
    other = Grids.from_sizes(5, dp_replicate=2, dp_shard=4, ep=2, edp_replicate=1)
    assert (1, 1, 4, 2, 1) == other.expert.sizes
    assert (0, 0, 2, 1, 0) == other.expert.coordinate


def test_from_sizes_that_do_not_divide_are_refused_with_all_numbers():
    with pytest.raises(LayoutError) as error:
        Grids.from_sizes(0, dp_shard=6, ep=4)
    assert str(error.value) == (
        "grid: 6 ranks (pp 1, dp_replicate 1, dp_shard 6, tp 1) do not divide by pp 1 × "
        "edp_replicate 1 × ep 4 × etp 1 = 4. Choose ep and etp so that they do."
    )


def test_grids_of_different_worlds_are_refused():
    with pytest.raises(LayoutError) as error:
        Grids(Grid(("dp",), (4,), (0,)), Grid(("edp", "ep"), (2, 3), (0, 0)))
    assert str(error.value) == (
        "grid: the dense axes {'dp': 4} have 4 ranks and the expert axes {'edp': 2, 'ep': 3} have "
        "6. Both must span the same ranks."
    )


def test_grids_know_the_stage_and_who_leads_it():
    grids = [Grids.from_sizes(rank, pp=2, dp_shard=2) for rank in range(4)]
    assert [0, 0, 1, 1] == [g.stage for g in grids]
    assert [True, False, True, False] == [g.leads_stage for g in grids]
    assert 4 == grids[0].world_size
    assert grids[0].expert is grids[0].of("expert")
    assert grids[0].dense is grids[0].of("dense")


@pytest.mark.parametrize(
    ("grids", "facts"),
    [
        (Grids.from_sizes(3, dp_shard=2, tp=2), "dp_shard 1/2, tp 1/2"),
        (Grids.from_sizes(3, dp_shard=4, ep=2), "dp_shard 3/4, ep 1/2"),
        (Grids.from_sizes(0), "one rank"),
    ],
)
def test_facts_of_both_grids(grids, facts):
    assert facts == grids.facts()


# From process groups -----------------------------------------------------------------------------------------


class Group:
    """A process group, as far as it is asked: its rank and size."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


class Collection:
    """Like Megatron's ProcessGroupCollection: a field that was never set answers None."""

    def __init__(self, **groups):
        vars(self).update(groups)

    def __getattr__(self, name):
        return None


def test_the_collection_here_answers_as_megatrons():
    assert hasattr(Collection(), "ep")
    assert getattr(Collection(), "ep", "default") is None
    assert {"ep": None} == vars(Collection(ep=None))
    assert {} == vars(Collection())


def collections(*, pp=1, dp=1, tp=1, ep=None, etp=None, instances=1):
    """What each rank's collection holds, in Megatron's rank order tp-ep-dp-pp."""
    found = []
    for rank in range(pp * dp * tp):
        stage, inside = divmod(rank, dp * tp)
        groups = {
            "pp": Group(stage, pp),
            "tp": Group(inside % tp, tp),
            "dp_cp": Group(inside // tp, dp),
        }
        if ep is not None:
            each = etp or tp
            edp = dp * tp // (ep * each)
            groups |= {
                "ep": Group(inside // each % ep, ep),
                "expt_tp": Group(inside % each, each),
                "expt_dp": Group(inside // (each * ep), edp),
            }
        if instances > 1:
            inner = dp // instances
            groups |= {
                "inter_dist_opt": Group(inside // tp // inner, instances),
                "intra_dp_cp": Group(inside // tp % inner, inner),
            }
        found.append(Collection(**groups))
    return found


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ({}, {}),
        ({"dp": 4}, {"dp_shard": 4}),
        ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "tp": 2}),
        ({"dp": 4, "ep": 2}, {"dp_shard": 4, "ep": 2}),
        ({"pp": 2, "dp": 4, "tp": 2, "ep": 4}, {"pp": 2, "dp_shard": 4, "tp": 2, "ep": 4}),
        (
            {"dp": 4, "tp": 2, "ep": 4, "etp": 1},
            {"dp_shard": 4, "tp": 2, "ep": 4, "etp": 1},
        ),
        ({"dp": 8, "tp": 2, "ep": 2, "etp": 2}, {"dp_shard": 8, "tp": 2, "ep": 2, "etp": 2}),
        ({"dp": 4, "instances": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        ({"dp": 8, "tp": 2, "instances": 2}, {"dp_replicate": 2, "dp_shard": 4, "tp": 2}),
        ({"dp": 8, "ep": 2, "instances": 2}, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}),
    ],
)
def test_from_pg_collection_is_from_sizes_on_every_rank(groups, sizes):
    for rank, collection in enumerate(collections(**groups)):
        assert Grids.from_sizes(rank, **sizes) == Grids.from_pg_collection(collection), rank


def test_from_pg_collection_without_expert_groups_shards_experts_like_the_rest():
    collection = Collection(tp=Group(1, 2), dp_cp=Group(2, 4))
    grids = Grids.from_pg_collection(collection)
    assert (1, 1, 4, 1, 2) == grids.expert.sizes
    assert (0, 0, 2, 0, 1) == grids.expert.coordinate


def test_from_pg_collection_takes_dp_where_dp_cp_is_not_set():
    grids = Grids.from_pg_collection(Collection(dp=Group(1, 2)))
    assert (0, 0, 1, 0) == grids.dense.coordinate
    assert (1, 1, 2, 1) == grids.dense.sizes


def test_from_pg_collection_works_out_the_expert_data_parallel_rank_if_it_is_not_set():
    """DP 4 × TP 2, EP 2, ETP 1: 8 ranks are EDP 4 × EP 2; rank 5 is edp 2, ep 1."""
    collection = Collection(tp=Group(1, 2), dp_cp=Group(2, 4), ep=Group(1, 2), expt_tp=Group(0, 1))
    assert Grids.from_sizes(5, dp_shard=4, tp=2, ep=2, etp=1) == Grids.from_pg_collection(
        collection
    )


def test_from_pg_collection_with_ep_none_has_expert_parallelism_off():
    grids = Grids.from_pg_collection(Collection(dp_cp=Group(3, 4), ep=None))
    assert (1, 0) == (grids.expert.size("ep"), grids.expert.index("ep"))


def test_from_pg_collection_with_a_given_expert_rank():
    collection = Collection(dp_cp=Group(3, 4))
    grids = Grids.from_pg_collection(collection, ep_rank=1, ep_size=2)
    assert Grids.from_sizes(3, dp_shard=4, ep=2) == grids
    with pytest.raises(ValueError, match="together"):
        Grids.from_pg_collection(collection, ep_rank=1)


def test_from_pg_collection_with_groups_of_different_worlds_is_refused():
    collection = Collection(dp_cp=Group(0, 4), ep=Group(0, 8), expt_dp=Group(0, 1))
    with pytest.raises(LayoutError, match=r"have 4 ranks and the expert axes .* have 8"):
        Grids.from_pg_collection(collection)


# The expert-parallel rank and size -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collection", "answer"),
    [
        (None, (None, None)),
        (Collection(), (None, None)),
        (Collection(ep=None), (0, 1)),
        (Collection(ep=Group(3, 4)), (3, 4)),
    ],
)
def test_ep_rank_and_size_tells_unset_from_none(collection, answer):
    assert answer == ep_rank_and_size(collection)


@pytest.mark.parametrize(
    ("collection", "answer"),
    [
        (None, (1, 2)),
        (Collection(), (1, 2)),
        (Collection(ep=None), (0, 1)),
        (Collection(ep=Group(3, 4)), (3, 4)),
    ],
)
def test_only_an_unset_group_falls_back_to_the_default(collection, answer):
    assert answer == ep_rank_and_size(collection, default=(1, 2))


def test_given_numbers_come_before_the_collection():
    assert (5, 8) == ep_rank_and_size(Collection(ep=Group(3, 4)), ep_rank=5, ep_size=8)
    assert (0, 8) == ep_rank_and_size(ep_rank=0, ep_size=8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ep_rank": 0}, "ep_rank (0) and ep_size (None) must be given together, or neither"),
        ({"ep_size": 4}, "ep_rank (None) and ep_size (4) must be given together, or neither"),
        ({"ep_rank": 4, "ep_size": 4}, "ep_rank 4 is not in [0, 4)"),
        ({"ep_rank": -1, "ep_size": 4}, "ep_rank -1 is not in [0, 4)"),
    ],
)
def test_a_rank_without_a_size_is_refused(given, message):
    with pytest.raises(ValueError, match="ep_rank") as error:
        ep_rank_and_size(Collection(ep=Group(0, 2)), **given)
    assert message == str(error.value)


# From meshes ------------------------------------------------------------------------------------------------------


def mesh(names, shape, coordinate):
    """A DeviceMesh, as far as it is asked."""
    return types.SimpleNamespace(
        mesh_dim_names=names, shape=shape, ndim=len(shape), get_coordinate=lambda: coordinate
    )


def test_from_mesh_keeps_the_meshs_own_names():
    grids = Grids.from_mesh(mesh(("dp_replicate", "dp_shard", "tp"), (2, 2, 2), [1, 0, 1]))
    assert Grid(("dp_replicate", "dp_shard", "tp"), (2, 2, 2), (1, 0, 1)) == grids.dense
    assert grids.dense == grids.expert


def test_from_mesh_with_a_mesh_of_experts():
    grids = Grids.from_mesh(
        mesh(("dp_shard", "tp"), (4, 2), [3, 1]), mesh(("edp_shard", "ep"), (2, 4), [1, 3])
    )
    assert Grid(("edp_shard", "ep"), (2, 4), (1, 3)) == grids.expert


def test_from_mesh_numbers_axes_without_names():
    assert ("axis0", "axis1") == Grids.from_mesh(mesh(None, (2, 2), [0, 1])).dense.axes


def test_from_mesh_on_a_rank_outside_is_refused():
    with pytest.raises(LayoutError, match="this rank is not on the mesh"):
        Grids.from_mesh(mesh(("dp",), (2,), None))


def test_from_mesh_with_an_expert_mesh_of_another_size_is_refused():
    with pytest.raises(LayoutError, match="Both must span the same ranks"):
        Grids.from_mesh(mesh(("dp",), (4,), [0]), mesh(("ep",), (2,), [0]))


def test_a_collection_with_slots_is_read_like_any_other():
    @dataclasses.dataclass(slots=True)
    class Slots:
        tp: object = None
        ep: object = None
        pp: object = dataclasses.field(init=False)

    assert Grids.from_pg_collection(Slots()).facts() == "one rank"
    assert (0, 1) == ep_rank_and_size(Slots())
