"""Staged state dicts: training may go on, memory is made once, ties and views stay what they were."""

import io

import alone
import numpy
import pytest
import test_failures as small
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager

from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter
from shardplan.planner.storage import PinnedStager


def test_staged_values_do_not_change_with_training():
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(3)},
        "groups": [{"lr": 0.5, "betas": (0.9, 0.95)}],
        "blob": io.BytesIO(b"abc"),
    }
    stager = PinnedStager()
    assert isinstance(stager, AsyncStager)
    staged = stager.stage(state)
    state["model"]["w"].zero_()
    state["model"]["s"].fill_(9)
    state["groups"][0]["lr"] = 0.0
    state["blob"].write(b"x")
    assert torch.equal(torch.arange(6.0).view(2, 3), staged["model"]["w"])
    assert torch.equal(torch.tensor(3), staged["model"]["s"])
    assert [{"lr": 0.5, "betas": (0.9, 0.95)}] == staged["groups"]
    assert b"abc" == staged["blob"].getvalue()


def test_views_of_one_buffer_are_copied_with_it_once():
    buffer = torch.arange(1000.0)
    state = {"a": buffer[10:400], "b": buffer[400:].view(30, 20).t(), "tied": buffer[10:400]}
    stager = PinnedStager()
    staged = stager.stage(state)
    for key, tensor in state.items():
        assert torch.equal(tensor, staged[key]), key
        assert tensor.stride() == staged[key].stride()
    assert staged["a"].data_ptr() == staged["tied"].data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in staged.values()}) == 1
    assert 990 * 4 <= stager.nbytes <= 1000 * 4 + 64


def test_small_view_of_a_large_buffer_does_not_take_it_along():
    buffer = torch.arange(1_000_000.0)
    stager = PinnedStager()
    staged = stager.stage({"a": buffer[:100], "b": buffer[-100:]})
    assert torch.equal(buffer[-100:], staged["b"]) and torch.equal(buffer[:100], staged["a"])
    assert stager.nbytes == 2 * 448  # 400 bytes each, at multiples of 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_dtypes_and_empty_tensors(dtype):
    ones = torch.ones(5, 3).to(dtype)
    staged = PinnedStager().stage({"a": ones[1:, 1:], "e": torch.empty(0, 4, dtype=dtype)})
    assert torch.equal(ones[1:, 1:].to(torch.float32), staged["a"].to(torch.float32))
    assert (0, 4) == tuple(staged["e"].shape) and staged["e"].dtype is dtype


def test_conjugate_and_negative_views_keep_their_values():
    """Their storage has other bytes: async saves wrote these, without an error."""
    values = torch.complex(torch.arange(40.0), torch.arange(1.0, 41.0))
    state = {"w": values, "conjugate": values.conj(), "negative": values.conj().imag}
    staged = PinnedStager().stage(state)
    for key, tensor in state.items():
        assert torch.equal(tensor, staged[key]), key


def test_arrays_of_one_memory_and_several_sizes():
    array = numpy.arange(1000.0)
    state = {"all": torch.from_numpy(array), "first": torch.from_numpy(array[:900])}
    staged = PinnedStager().stage(state)
    assert all(torch.equal(tensor, staged[key]) for key, tensor in state.items())


def test_memory_is_made_once():
    stager = PinnedStager()
    stager.prepare({"w": torch.zeros(100)})
    places = set()
    for value in range(3):
        staged = stager.stage({"w": torch.full((100,), float(value))})
        assert torch.equal(torch.full((100,), float(value)), staged["w"])
        places.add(staged["w"].data_ptr())
        del staged
    assert 1 == len(places) and 448 == stager.nbytes
    stager.close()
    assert 0 == stager.nbytes


def test_async_save_from_staged_memory(tmp_path):
    stager, state = PinnedStager(), small.state(1, 1)
    planner = small.planner(LayoutAwareSavePlanner, 0, 1)
    for value in (1.0, 2.0):
        for tensor in state["model"].values():
            tensor.fill_(value)
        writer = SafetensorsWriter(tmp_path / str(value), sync=False)
        future = dcp.async_save(
            state, storage_writer=writer, planner=planner, async_stager=stager, no_dist=True
        )
        for tensor in state["model"].values():
            tensor.fill_(-5.0)
        future.result()
        assert value == small.loaded(tmp_path / str(value))


def test_each_rank_stages_its_own(tmp_path):
    stagers = [PinnedStager() for _ in range(2)]
    states = [stager.stage(small.state(4, 2)) for stager in stagers]
    planners = [small.planner(LayoutAwareSavePlanner, rank, 2) for rank in range(2)]
    alone.saved(tmp_path, states, planners)
    assert 4 == small.loaded(tmp_path)
