"""Checkpoints between Megatron-LM's own path and the planners, every element checked.

Every weight and moment is a number that says which global element it is, worked out by hand for
each kind of module (drive/logical.py).
"""

import pytest

pytestmark = pytest.mark.gloo

TP2_EP2 = {"tp": 2, "ep": 2}
ALL = {"tp": 2, "ep": 2, "etp": 2}
HYBRID = {"outer": 2, "outer_zero": "optim"}


@pytest.mark.parametrize(("saved", "loaded"), [(ALL, {}), (HYBRID, TP2_EP2)], ids=str)
def test_what_megatron_saves_loads_here(megatron, tmp_path, saved, loaded):
    """Their GDN handler is called here; Megatron-LM's own loop leaves it out (see below)."""
    megatron.run("bothways:save_theirs", parallel=saved, path=str(tmp_path))
    for result in megatron.run("bothways:load_ours", parallel=loaded, path=str(tmp_path)):
        assert {} == result["wrong"]
        assert [] == result["missing"]


@pytest.mark.parametrize(
    ("saved", "loaded"), [({"zero": "optim"}, ALL), (TP2_EP2, HYBRID)], ids=str
)
def test_what_is_saved_here_loads_in_megatron(megatron, tmp_path, saved, loaded):
    """Here some ranks have no state of some parameters; what is on disk is whole."""
    results = megatron.run("bothways:save_ours", parallel=saved, path=str(tmp_path))
    assert len({result["states"] for result in results}) > 1
    for result in megatron.run("bothways:load_theirs", parallel=loaded, path=str(tmp_path)):
        assert {} == result["wrong"]


def test_gdn_from_tp2_to_tp1_and_back(megatron, tmp_path):
    megatron.run("bothways:save_ours", parallel={"tp": 2}, path=str(tmp_path / "two"))
    (first, *_) = megatron.run("bothways:load_ours", parallel={}, path=str(tmp_path / "two"))
    assert {} == first["wrong"]
    megatron.run("bothways:save_ours", parallel={}, path=str(tmp_path / "one"))
    for result in megatron.run(
        "bothways:load_ours", parallel={"tp": 2}, path=str(tmp_path / "one"), fresh=True
    ):
        assert {} == result["wrong"]
        assert 11 == result["iteration"]


def test_megatron_lms_own_loop_loads_gdn_of_tp2_wrongly_at_tp1_and_ours_rightly(megatron, tmp_path):
    """Megatron-LM's loop never calls its GDN handler, so projections are cut in mid-component."""
    path = str(tmp_path)
    megatron.run("bothways:save_theirs", parallel={"tp": 2}, path=path, gdn=False)
    wrong: dict[str, int] = {}
    for result in megatron.run("bothways:load_theirs", parallel={}, path=path, gdn=False):
        for name, count in result["wrong"].items():
            wrong[name] = wrong.get(name, 0) + count
    layer = "decoder.layers.0.self_attention"
    # 56 of 64 rows of 16 elements, and 20 of 32 rows of 4.
    assert {
        f"{layer}.{name} {slot}": count
        for name, count in (("in_proj.weight", 896), ("conv1d.weight", 80))
        for slot in ("", "exp_avg", "exp_avg_sq")
    } == wrong
    for result in megatron.run("bothways:load_ours", parallel={}, path=path, fused=2):
        assert {} == result["wrong"]


def test_what_is_saved_here_in_rank_order_loads_in_megatron_lms_own_loop(megatron, tmp_path):
    """A layer of multi-token prediction too, under the name that 0.19 gives its inner layer."""
    path, mtp = str(tmp_path), {"mtp_num_layers": 1}
    megatron.run("bothways:save_ours", parallel={}, path=path, fused=2, everywhere=True, **mtp)
    for result in megatron.run(
        "bothways:load_theirs", parallel={"tp": 2}, path=path, gdn=False, **mtp
    ):
        assert {} == result["wrong"]
