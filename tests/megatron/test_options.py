"""Which of a group's options a load sets, with torch's own optimizer in one process."""

import pytest
import torch

from shardplan.planner.megatron import load_checkpoint, save_checkpoint

# Names of options that say which code steps the parameters; on a GPU `fused` and `capturable` want
# their step counts there, and the others on the host.
CODE = ("fused", "foreach", "capturable", "differentiable")


def job(seed, **options):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("saved", "live"), [({"fused": True}, {"foreach": True}), ({"foreach": True}, {"fused": True})]
)
def test_the_code_that_steps_stays_the_live_one(tmp_path, saved, live):
    model, optimizer = job(1, lr=0.5, betas=(0.8, 0.9), **saved)
    save_checkpoint(model, optimizer, tmp_path / "it", iteration=3)
    other, found = job(2, lr=0.1, **live)
    kept = {name: found.param_groups[0][name] for name in CODE}
    assert 3 == load_checkpoint(other, found, tmp_path / "it").iteration
    group = found.param_groups[0]
    assert kept == {name: group[name] for name in CODE}
    assert (0.5, (0.8, 0.9)) == (group["lr"], tuple(group["betas"]))
    found.step()
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["step"], found.state[other.weight]["step"])
