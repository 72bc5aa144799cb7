"""The same on real ranks: FSDP2, tensor parallelism by attributes, HSDP, experts on their own mesh."""

import gloo_jobs
import hybrid
import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from hybrid import Config

pytestmark = pytest.mark.gloo

CONFIGS = {
    config.name: config
    for config in (
        Config("fsdp4", dp=4, storage="cuts"),
        Config("tp2-fsdp2", dp=2, tp=2, etp=2, storage="cuts"),
        Config("hsdp", rep=2, dp=2, storage="cuts"),
        Config("ep2", dp=4, ep=2, storage="cuts", experts="single"),
        Config("ep2-tp2", dp=2, tp=2, ep=2, storage="cuts"),
        Config("two", dp=2, ep=2, storage="cuts"),
        Config("tp2", tp=2, etp=2, storage="whole"),
        Config("one", storage="whole"),
    )
}


@pytest.fixture(scope="module")
def processes():
    with ranks.started(4) as started:
        yield started


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    """Saves a configuration's state once; returns the folder."""
    known = {}

    def save(name):
        if name not in known:
            path = str(tmp_path_factory.mktemp(name) / "checkpoint")
            collectives = processes.run("save", CONFIGS[name].world, CONFIGS[name], path)
            known[name] = path, collectives
        return known[name]

    return save


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp4", "two"),
        ("tp2-fsdp2", "fsdp4"),
        ("hsdp", "tp2"),
        ("ep2", "one"),
        ("ep2-tp2", "hsdp"),
        ("two", "ep2-tp2"),
        ("tp2", "ep2"),
        ("one", "tp2-fsdp2"),
    ],
)
def test_saved_and_loaded(processes, saved, source, target):
    path, _ = saved(source)
    for wrong, missing, unexpected in processes.run(
        "load", CONFIGS[target].world, CONFIGS[target], path
    ):
        assert ([], [], []) == (wrong, missing, unexpected)


@pytest.mark.parametrize("source", CONFIGS)
def test_stock_load_of_one_process(saved, source):
    """What real ranks wrote opens with the stock planner, with the right global tensors."""
    path, _ = saved(source)
    expected = {f"model.{k}": v for k, v in hybrid.tensors_on_disk(CONFIGS[source]).items()}
    for slot in hybrid.SLOTS:
        for key, tensor in hybrid.tensors_on_disk(CONFIGS[source], slot).items():
            expected[f"optimizer.state.{key}.{slot}"] = tensor
    state = {key: torch.full_like(tensor, -1) for key, tensor in expected.items()}
    dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert [] == [key for key in expected if not torch.equal(expected[key], state[key])]


def test_four_object_collectives_a_save(saved):
    """Stock `dcp.save` makes its own four on every rank, and the planner not one more."""
    expected = ["broadcast_object_list", "gather_object", "gather_object", "scatter_object_list"]
    for name in ("fsdp4", "ep2-tp2"):
        _, collectives = saved(name)
        assert [expected] * 4 == [sorted(names) for names in collectives]


def test_saves_again_and_lets_go_of_tensors(processes, tmp_path):
    """Twice with new tensors: the second values are written, one plan made, no tensor kept."""
    config = CONFIGS["ep2-tp2"]
    for alive, plans, wrong in processes.run("save_twice_and_let_go", 4, config, str(tmp_path)):
        assert (0, 1, []) == (alive, plans, wrong)


@pytest.mark.parametrize(("mode", "name"), [("thread", "tp2-fsdp2"), ("process", "two")])
def test_async_save(processes, tmp_path, mode, name):
    """`async_save` hands the planner plain tensors: the same bytes as the synchronous save."""
    config, path = CONFIGS[name], str(tmp_path / "checkpoint")
    found = processes.run("save_async", config.world, config, path, mode == "process")
    assert [[]] * config.world == found


def test_ranks_that_disagree_write_nothing(processes, tmp_path):
    """An error on every rank, in bounded time, that names both ranks and the parameter."""
    config = CONFIGS["fsdp4"]
    for text, files in processes.run("disagree", 4, config, str(tmp_path)):
        assert "ranks 0 and 3 of one pipeline stage do not plan the same checkpoint" in text
        assert "decoder.layers.0.mlp.linear_fc1.weight: laid out as" in text
        assert [] == files


def test_ranks_with_different_keys(processes, tmp_path):
    """Other keys on other ranks, in another order: no hang, no wrong value."""
    config = Config("fsdp4", dp=4, storage="cuts", ep=4)
    answers = processes.run("different_keys", 4, config, str(tmp_path))
    assert [[]] * 4 == [wrong for _, wrong in answers]
    assert any(empty for empty, _ in answers) and answers[0][0] != answers[3][0]


def test_a_fault_on_a_rank_is_found(processes, tmp_path):
    """The harness itself: a job that raises on its ranks is a failure here."""
    assert "load" in vars(gloo_jobs)
    with pytest.raises(ranks.RankFailure, match="rank 1"):
        processes.run("load", 2, CONFIGS["two"], str(tmp_path / "nothing"))
