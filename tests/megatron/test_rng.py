"""Megatron's random states: what each rank saves of them, and whose a rank takes. Megatron is not needed."""

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardplan.layouts import Grids
from shardplan.planner import PerRank
from shardplan.planner.megatron import load_checkpoint, save_checkpoint
from shardplan.planner.megatron.rng import RngLoad, is_rng_state, saved_forms


def states(seed, pp=0, tp=0):
    return {f"({pp}, {tp})": [{"torch_rng_state": torch.full((4,), seed, dtype=torch.uint8)}]}


def seed_of(states):
    ((found,),) = states.values()
    return int(found["torch_rng_state"][0])


@pytest.mark.parametrize(
    ("sizes", "rank", "key", "forms"),
    [
        ({"tp": 2}, 0, (0, 0), {"rng", "rng_per_rank"}),
        ({"tp": 2}, 1, (0, 1), {"rng", "rng_per_rank"}),
        ({"pp": 2}, 1, (1, 0), {"rng", "rng_per_rank"}),
        ({"dp_shard": 2, "ep": 2}, 0, (0, 0), {"rng", "rng_per_rank"}),
        ({"dp_shard": 2, "ep": 2}, 1, (0, 0), {"rng_per_rank"}),
        ({"dp_shard": 2, "tp": 2}, 3, (0, 1), {"rng_per_rank"}),
        ({"dp_replicate": 2}, 1, (0, 1), {"rng", "rng_per_rank"}),  # this grid knows no tp
    ],
)
def test_first_rank_of_a_key_saves_it_in_megatrons_form(sizes, rank, key, forms):
    found = saved_forms("rng", states(7, *key), Grids.from_sizes(rank, **sizes))
    assert forms == found.keys()
    assert isinstance(found["rng_per_rank"], PerRank)


@pytest.mark.parametrize(
    "value", [{}, {"a": 1}, {"(0, 0)": 1, "(0, 1)": 2}, {"(0,0)": 1}, [1], None]
)
def test_other_values_are_not_random_states(value):
    assert not is_rng_state(value)


STORED = ["rng.(0, 0).0.torch_rng_state", "rng_per_rank.rank_0", "rng_per_rank.rank_1"]


def test_as_many_ranks_ask_for_their_own_and_others_for_megatrons_form():
    assert {"rng", "rng_per_rank"} == RngLoad("rng", states(1), STORED, 2).sections.keys()
    assert {"rng"} == RngLoad("rng", states(1), STORED, 4).sections.keys()
    assert set() == RngLoad("rng", states(1, tp=1), STORED, 4).sections.keys()


def test_own_state_counts_before_megatrons_form_unless_it_is_of_another_key():
    load = RngLoad("rng", states(1), STORED, 2)
    load.sections["rng"] = states(2)
    load.sections["rng_per_rank"].value = states(3)
    assert (3, None) == (seed_of(load.chosen()[0]), load.chosen()[1])
    load.sections["rng_per_rank"].value = states(3, tp=1)
    assert 2 == seed_of(load.chosen()[0])


def test_rank_without_a_saved_state_keeps_its_own_and_says_so():
    taken, missing = RngLoad("rng", states(9, tp=1), STORED, 4).chosen()
    assert 9 == seed_of(taken)
    assert "rng.(0, 1): no random state was saved for this rank" == missing


def test_one_process_saves_and_loads_it(tmp_path):
    model = torch.nn.Linear(2, 2)
    save_checkpoint(model, None, tmp_path, extra={"rng_state": states(5), "more": {"a": 1}})
    keys = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "rng_state.(0, 0).0.torch_rng_state" in keys  # as Megatron-LM's own loop reads it
    live = states(6)
    loaded = load_checkpoint(model, None, tmp_path, extra={"rng_state": live, "more": {"a": 0}})
    assert 5 == seed_of(loaded.extra["rng_state"]) and {"a": 1} == loaded.extra["more"]
    assert 6 == seed_of(live), "the caller's own value stays as it is"
    other = load_checkpoint(model, None, tmp_path, extra={"rng_state": states(8, tp=1)})
    assert 8 == seed_of(other.extra["rng_state"])
    assert any("rng_state.(0, 1)" in key for key in other.report.missing)
