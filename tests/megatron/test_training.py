"""What training steps make of the same weights under data parallelism and expert parallelism."""

import pytest

pytestmark = pytest.mark.gloo

DP2, EP2 = {}, {"ep": 2}


def gradients(results) -> dict[str, float]:
    """The squared norm of each parameter's gradient, over all ranks."""
    found: dict[str, float] = {}
    for result in results:
        for name, value in result["squares"].items():
            found[name] = found.get(name, 0.0) + value
    return found


def test_experts_on_other_ranks_have_the_same_gradients_with_and_without_a_checkpoint(
    megatron, tmp_path
):
    """Two ranks, the same tokens on both, so that neither layout changes what is learned.

    First without a checkpoint: Megatron averages experts' gradients over the ranks that saw their
    tokens, whatever ranks hold them. Then two steps come after a load of the first two.
    """
    path = str(tmp_path)
    whole = megatron.run("training:train", ranks=2, parallel=DP2, steps=4)
    other = megatron.run("training:train", ranks=2, parallel=EP2, steps=4)
    megatron.run("training:train", ranks=2, parallel=DP2, steps=2, path=path)
    loaded = megatron.run("training:train", ranks=2, parallel=EP2, steps=2, path=path, load=True)
    expected = gradients(whole)
    assert 41 == len(expected)
    assert pytest.approx(expected, rel=1e-4) == gradients(other)
    assert pytest.approx(expected, rel=1e-4) == gradients(loaded)
    assert pytest.approx(whole[0]["losses"], rel=1e-6) == other[0]["losses"]
    assert pytest.approx(whole[0]["losses"][2:], rel=1e-6) == loaded[0]["losses"]


def test_training_goes_on_with_the_optimizer_on_the_cpu_and_back(megatron, tmp_path):
    """HybridDeviceOptimizer under Megatron-FSDP; its state is plain, and on some ranks only."""
    whole = megatron.run("training:train", ranks=2, parallel=DP2, steps=4)[0]["losses"]
    for number, offloaded in enumerate([(False, True), (True, False), (True, True)]):
        path = str(tmp_path / str(number))
        saves, loads = ({"offload": offload} for offload in offloaded)
        megatron.run("training:train", ranks=2, parallel=DP2, steps=2, path=path, **saves)
        (first, _) = megatron.run(
            "training:train", ranks=2, parallel=EP2, steps=2, path=path, load=True, **loads
        )
        assert pytest.approx(whole[2:], rel=1e-6) == first["losses"]
