"""State on a GPU: saved from it, loaded into it, staged from it."""

import alone
import pytest
import torch

from shardplan.layouts import Grids
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.storage import PinnedStager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Larger than a buffer of 16 MiB, between that and what is gathered, and small.
SHAPES = {"large": (5000, 1100), "middle": (700, 300), "small": (17,), "one": ()}


def state(device, strided=False, blank=False):
    torch.manual_seed(3)
    made = {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape)
        if strided and len(shape) == 2:
            tensor = tensor.t().contiguous().to(device).t()
        made[name] = tensor.to(device)
        if blank:
            made[name] = torch.full_like(made[name], -1.0)
    return {"model": made}


def planner(kind):
    return kind(SHAPES, grid=Grids.from_sizes(0))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_any_device_to_any_device(tmp_path, source, target, strided):
    saved = state(source, strided)
    alone.saved(tmp_path, [saved], [planner(LayoutAwareSavePlanner)])
    loaded = state(target, strided, blank=True)
    alone.load(tmp_path, [loaded], [planner(LayoutAwareLoadPlanner)])
    for name, tensor in saved["model"].items():
        assert torch.equal(tensor.cpu(), loaded["model"][name].cpu()), name


def bits(tensor):
    return tensor.resolve_conj().reshape(-1).view(torch.uint8)


def test_small_tensors_of_all_dtypes_make_the_same_file_from_the_gpu_as_from_the_host(tmp_path):
    """They are brought together on the GPU; a strided one and a conjugate are among them."""
    torch.manual_seed(4)
    values = {}
    for number in range(300):
        tensor = torch.randn(5 + number % 7, 4)
        dtype = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)
        values[f"v{number:03}"] = tensor.to(dtype[number % 5])
    values["strided"] = torch.randn(9, 6).t()
    values["scalar"] = torch.tensor(2.5)
    values["conjugate"] = torch.randn(4, 3, dtype=torch.complex64).conj()
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    files = []
    for device in ("cpu", "cuda"):
        saved = {"model": {name: tensor.to(device) for name, tensor in values.items()}}
        path = tmp_path / device
        alone.saved(path, [saved], [LayoutAwareSavePlanner(shapes, grid=Grids.from_sizes(0))])
        blank = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        alone.load(
            path, [{"model": blank}], [LayoutAwareLoadPlanner(shapes, grid=Grids.from_sizes(0))]
        )
        files.append(blank)
    for name, tensor in values.items():
        for loaded in files:
            assert torch.equal(bits(tensor), bits(loaded[name])), name


def test_what_is_under_way_on_the_gpu_is_saved(tmp_path):
    """The copy waits for kernels that were queued before the save."""
    saved = state("cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(30):
        busy = busy @ busy / 4096
    for tensor in saved["model"].values():
        tensor.fill_(7.0)
    alone.saved(tmp_path, [saved], [planner(LayoutAwareSavePlanner)])
    loaded = state("cpu", blank=True)
    alone.load(tmp_path, [loaded], [planner(LayoutAwareLoadPlanner)])
    assert {7.0} == {float(x) for t in loaded["model"].values() for x in t.unique()}


@pytest.mark.parametrize("shared", [False, True])
def test_stager_copies_what_is_under_way(shared):
    stager = PinnedStager(shared)
    flat = torch.zeros(1_000_000, device="cuda")
    values = {"a": flat[:600_000].view(600, 1000), "b": flat[600_000:]}
    for value in (1.0, 2.0):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(30):
            busy = busy @ busy / 4096
        flat.fill_(value)
        staged = stager.stage(values)
        flat.fill_(-1.0)
        for tensor in staged.values():
            assert not tensor.is_cuda and {value} == set(tensor.unique().tolist())
    assert staged["b"].is_pinned()
    stager.close()
