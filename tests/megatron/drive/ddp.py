"""Megatron-Core's DistributedOptimizer over DDP: whole weights, flat optimizer shards; pipelines."""

import contextlib
import re

import hybrid
import logical
import torch
from hybrid import Parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module

from shardplan.planner.megatron import load_checkpoint, save_checkpoint
from shardplan.planner.megatron.state import inner_optimizers

SLOTS = ("exp_avg", "exp_avg_sq")


def types_as_on_cuda() -> None:
    """DistributedOptimizer tells dtypes by the names that tensors have on a CUDA device."""
    real = torch.Tensor.type

    def name(tensor, dtype=None, **kwargs):
        if dtype is None:
            return real(tensor).replace("torch.", "torch.cuda.")
        return real(tensor, dtype, **kwargs)

    torch.Tensor.type = name


@contextlib.contextmanager
def as_if_on_cuda(fake: bool):
    """HybridDeviceOptimizer takes to the CPU what is on a CUDA device: here, what it has not moved."""

    def cpu(tensor, *args, **kwargs):
        moved = tensor.detach().clone()
        moved._is_on_cpu = True
        return moved

    real = {name: getattr(torch.Tensor, name) for name in ("is_cuda", "cpu", "pin_memory")}
    if fake:
        torch.Tensor.is_cuda = property(lambda tensor: not getattr(tensor, "_is_on_cpu", False))
        torch.Tensor.cpu = cpu
        torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        for name, value in real.items():
            setattr(torch.Tensor, name, value)


class Job:
    def __init__(self, parallel: dict, *, right: bool, offload: bool = False, **changes):
        types_as_on_cuda()
        self.offload = offload
        self.tied = changes.get("tied", False)
        self.parallel = Parallel(**parallel)
        self.groups = hybrid.process_groups(self.parallel)
        built = hybrid.build(
            self.parallel, self.groups, hidden=24, params_dtype=torch.bfloat16, bf16=True, **changes
        )
        chunks = built if isinstance(built, list) else [built]
        self.ranks = logical.Ranks(self.groups, chunks[0].config)
        wrapped = [
            DistributedDataParallel(
                bare.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=True, overlap_grad_reduce=False, bucket_size=3000
                ),
                Float16Module(bare.config, bare),
                pg_collection=self.groups,
            )
            for bare in chunks
        ]
        self.chunks = wrapped
        self.model = wrapped if isinstance(built, list) else wrapped[0]
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=0.0,
            optimizer_cpu_offload=offload,
            pin_cpu_grads=False,
            pin_cpu_params=False,
            optimizer_offload_fraction=1.0 if offload else 0.0,
            use_precision_aware_optimizer=False,
        )
        with as_if_on_cuda(offload):
            self.optimizer = get_megatron_optimizer(
                settings, wrapped, use_gloo_process_groups=False
            )
        self.names = {
            parameter: self.global_name(
                name.replace("module.", ""), number, len(bare.decoder.layers)
            )
            for number, (bare, chunk) in enumerate(zip(chunks, wrapped, strict=True))
            for name, parameter in chunk.named_parameters()
        }
        self.fill(right)

    def global_name(self, name: str, chunk: int, layers: int) -> str:
        """A parameter's name with its layer counted from the first of the first stage.

        A tied output layer is the word embeddings.
        """
        if self.tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        before = (chunk * self.parallel.pp + self.groups.pp.rank()) * layers
        return re.sub(
            r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{before + int(m[1])}", name
        )

    def shards(self):
        """Name, parameter, its flat shard, the shard's state and range in the flat parameter."""
        for part in inner_optimizers(self.optimizer):
            owner, inner = part.owner, part.optimizer
            for parameter, (group, order) in owner.model_param_group_index_map.items():
                shard = inner.param_groups[group]["params"][order]
                found = owner._get_model_param_range_map(parameter)["param"]
                yield self.names[parameter], parameter, inner, shard, found.start, found.end

    def expected(self, name, parameter, slot):
        return logical.local(name, parameter.shape, self.ranks, slot)

    def fill(self, right: bool) -> None:
        with torch.no_grad():
            for parameter, name in self.names.items():
                parameter.fill_(-1)
                if right:
                    parameter.copy_(self.expected(name, parameter, ""))
            for part in inner_optimizers(self.optimizer) if self.offload else ():
                part.optimizer.dummy_step()
            for name, parameter, inner, shard, start, stop in self.shards():
                state = {"step": torch.tensor(7.0 if right else -1.0)}
                for slot in ("param", *SLOTS):
                    values = torch.full((stop - start,), -1.0)
                    if right:
                        values = self.expected(name, parameter, slot).flatten()[start:stop].clone()
                    if slot == "param":
                        shard.copy_(values)
                        if self.offload:
                            inner.param_to_inner_param[shard].copy_(values)
                    elif self.offload:
                        inner.state[shard][slot].copy_(values)
                    else:
                        state[slot] = values
                if self.offload:
                    inner.state[shard]["step"].copy_(state["step"])
                else:
                    inner.state[shard] = state

    def wrong(self) -> dict[str, int]:
        found = {}
        for parameter, name in self.names.items():
            wanted = self.expected(name, parameter, "").to(parameter.dtype)
            if not torch.equal(parameter, wanted):
                found[name] = int((parameter != wanted).sum())
        for name, parameter, inner, shard, start, stop in self.shards():
            for slot in ("param", *SLOTS):
                wanted = self.expected(name, parameter, slot).flatten()[start:stop]
                held = shard if slot == "param" else inner.state[shard][slot]
                if not torch.equal(held, wanted):
                    found[f"{name} {slot}"] = int((held != wanted).sum())
            for own in [inner.param_to_inner_param[shard]] if self.offload else ():
                if not torch.equal(own, shard):
                    found[f"{name} copy that is stepped"] = int((own != shard).sum())
                if own is not shard and inner.state[shard] is not self.state_that_steps(inner, own):
                    found[f"{name} state that is stepped"] = 1
            if float(inner.state[shard]["step"]) != 7.0:
                found[f"{name} step"] = 1
        return found

    def modules(self):
        """The global name and the module of each tensor-parallel layer."""
        for number, chunk in enumerate(self.chunks):
            inner = chunk.module.module
            for path, module in inner.named_modules():
                if isinstance(module, ColumnParallelLinear):
                    name = self.global_name(path, number, len(inner.decoder.layers))
                    yield (
                        re.sub(
                            r"local_experts\.(\d+)",
                            lambda m: f"local_experts.{int(m[1]) + self.ranks.first_expert}",
                            name,
                        ),
                        module,
                    )

    def keep_histories(self, right: bool) -> None:
        """Gives layers an extra state as fp8 has it: a history of as many numbers as it takes."""
        ColumnParallelLinear.get_extra_state = lambda module: module.history
        ColumnParallelLinear.set_extra_state = lambda module, value: setattr(
            module, "history", value
        )
        for name, module in self.modules():
            module.history = logical.numbered(name, (len(name),)) if right else torch.zeros(3)

    def histories(self) -> dict[str, bool]:
        """Whether each layer has the history that goes with its name."""
        return {
            name: torch.equal(module.history, logical.numbered(name, (len(name),)))
            for name, module in self.modules()
            if hasattr(module, "history")
        }

    @staticmethod
    def state_that_steps(inner, own):
        (found,) = [sub.state[own] for sub in inner.sub_optimizers if own in sub.state]
        return found


def save(parallel: dict, path: str, extra_state: bool = False, **options) -> dict:
    job = Job(parallel, right=True, **options)
    if extra_state:
        job.keep_histories(right=True)
    save_checkpoint(job.model, job.optimizer, path, iteration=3, extra_state=extra_state)
    cut = [
        name
        for name, p, _, _, start, stop in job.shards()
        if p.dim() > 1 and (start % p[0].numel() or stop % p[0].numel())
    ]
    return {
        "cut in a row": sorted(cut),
        "optimizers": len(list(inner_optimizers(job.optimizer))),
        "offloaded": [type(part.optimizer).__name__ for part in inner_optimizers(job.optimizer)],
    }


def load(parallel: dict, path: str, extra_state: bool = False, **options) -> dict:
    job = Job(parallel, right=False, **options)
    if extra_state:
        job.keep_histories(right=False)
    loaded = load_checkpoint(job.model, job.optimizer, path, extra_state=extra_state)
    return {
        "wrong": job.wrong(),
        "histories": job.histories(),
        "iteration": loaded.iteration,
        "names": sorted(job.names.values()),
        "missing": loaded.report.missing,
    }
