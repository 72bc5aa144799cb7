"""Training steps from weights that are equal in every parallel configuration."""

import re

import hybrid
import logical
import torch
from hybrid import Parallel

from shardplan.planner.megatron import load_checkpoint, save_checkpoint


class Job:
    """A sharded model whose weights depend on the global element alone, and its optimizer."""

    def __init__(self, parallel: dict, *, offload: bool = False, **changes):
        self.parallel = Parallel(**parallel)
        groups = hybrid.process_groups(self.parallel)
        bare = hybrid.build(self.parallel, groups, **changes)
        self.ranks = logical.Ranks(groups, bare.config)
        with torch.no_grad():
            for name, parameter in bare.named_parameters():
                number = logical.local(name, parameter.shape, self.ranks)
                wave = 0.3 * torch.sin(0.37 * number + 1)
                parameter.copy_(1 + wave if "norm" in name else wave)
        self.model = hybrid.shard(bare, self.parallel, groups)
        self.optimizer = hybrid.make_optimizer(self.model, offload=offload)
        self.squares: dict[str, float] = {}

    def step(self, seed: int) -> float:
        """Trains one step, every rank on the same tokens; keeps the squares of its gradients."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = hybrid.loss(self.model, seed)
        loss.backward()
        self.model.finish_grad_sync()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                local = parameter.grad.to_local()
                self.squares[self.global_name(name)] = float(local.double().square().sum())
        self.optimizer.step()
        return float(loss)

    def global_name(self, name: str) -> str:
        return re.sub(
            r"local_experts\.(\d+)",
            lambda found: f"local_experts.{int(found[1]) + self.ranks.first_expert}",
            name.replace("module.", ""),
        )


def train(
    parallel: dict, steps: int, path: str | None = None, load: bool = False, **options
) -> dict:
    """Returns the losses, and this rank's share of the squared gradients of the last step.

    Args:
        steps: How many; the first is number 0, or the one after a checkpoint.
        path: Checkpoint that is saved at the end, or loaded first.
        load: Which of the two.
        options: Whether the optimizer's state is on the CPU; changes of the model.
    """
    job = Job(parallel, **options)
    first = 0
    if load:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.zero_()
        first = load_checkpoint(job.model, job.optimizer, path).iteration
    losses = [job.step(first + number) for number in range(steps)]
    if path is not None and not load:
        save_checkpoint(job.model, job.optimizer, path, iteration=steps)
    return {"losses": losses, "squares": job.squares}
