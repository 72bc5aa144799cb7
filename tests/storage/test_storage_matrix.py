"""Every configuration saves without a message, and loads under every other one, bit for bit."""

import functools
import shutil
import tempfile
from pathlib import Path

import alone
import hybrid
import pytest
import safetensors
import test_matrix as matrix
import torch

from shardplan.planner import LayoutAwareSavePlanner


@pytest.fixture(scope="module")
def saved():
    """Returns the folder of a configuration's checkpoint, saved once."""
    root = Path(tempfile.mkdtemp(prefix="shardplan-"))

    @functools.cache
    def make(name: str) -> Path:
        config = matrix.BY_NAME[name]
        ranks = range(config.world)
        states = [hybrid.state_dict(config, rank) for rank in ranks]
        planners = [matrix.planner(LayoutAwareSavePlanner, config, rank) for rank in ranks]
        alone.saved(root / name, states, planners)
        return root / name

    yield make
    shutil.rmtree(root)


@pytest.mark.parametrize("target", matrix.BY_NAME)
@pytest.mark.parametrize("source", matrix.BY_NAME)
def test_every_ordered_pair(saved, source, target):
    config = matrix.BY_NAME[target]
    states = [hybrid.state_dict(config, rank, blank=True) for rank in range(config.world)]
    planners = matrix.load_planners(target)
    readers = alone.load(saved(source), states, planners)
    for rank, state in enumerate(states):
        assert [] == matrix.differences(hybrid.after_load(config, rank), state), f"rank {rank}"
        assert [] == planners[rank].report.missing
        assert readers[rank].stats.unchecked == 0


@pytest.mark.parametrize("name", matrix.BY_NAME)
def test_files_are_plain_safetensors_and_hold_each_element_once(saved, name):
    config = matrix.BY_NAME[name]
    names = sorted(saved(name).glob("*/*.safetensors"))
    assert config.world == len(names)
    found: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    for path in names:
        with safetensors.safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                if key.startswith("model."):
                    stem, _, at = key.partition("@")
                    tensor = file.get_tensor(key)
                    offsets = tuple(map(int, at.split(","))) if at else (0,) * tensor.dim()
                    found.setdefault(stem, []).append((offsets, tensor))
    expected = {f"model.{k}": v for k, v in hybrid.tensors_on_disk(config).items()}
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        counted = torch.zeros_like(tensor)
        for offsets, chunk in found[key]:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, chunk.shape, strict=True))
            assert torch.equal(tensor[place], chunk), key
            counted[place] += 1
        assert torch.equal(torch.ones_like(tensor), counted), key
