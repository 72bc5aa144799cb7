"""Trains a hybrid GDN + MoE model under real Megatron-FSDP, saves it, goes on under other layouts.

    PYTHONPATH=PACKAGES:scripts/typing torchrun --standalone --nproc_per_node 2 \
        scripts/gpu/megatron_fsdp_resume.py [--out result.json]

PACKAGES is a folder with megatron-core 0.19.2, megatron-fsdp 0.6.1 and einops (scripts/setup_megatron
makes one; `pip install --no-deps --target PACKAGES *.whl` does from wheels). `--device cpu` runs the
same on gloo, with stand-ins for CUDA.

Every rank gets the same tokens, so that the loss is the same under each layout. A run that never
stopped is compared with runs that load its checkpoint: the first loss after the load, and the losses
of a run that is loaded under the other layout, saved there, and loaded back, which must be equal to
the bit. The last run keeps its optimizer state on the CPU; what does not work there is said in the
result, and is no failure.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling a step takes longer than the run
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "megatron" / "drive"))

import machine

STEPS, STOP = 4, 2


def prepare(device: str) -> None:
    if device == "cpu":
        machine.without_triton()
    machine.without_fla()
    if device == "cpu":
        machine.without_cuda()


def layouts(world: int) -> dict:
    """What each run is laid out as; the first is the one that is saved."""
    return {
        f"dp {world}": {},
        f"ep {world}": {"ep": world},
        f"tp {world}": {"tp": world},
        "zero-1": {"zero": "optim"},
    }


class Run:
    """A model and its optimizer under one layout."""

    def __init__(self, layout: dict, device: str, *, seed: int, offload: bool = False):
        import hybrid
        import torch
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.device = device
        parallel = hybrid.Parallel(**layout)
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            create_gloo_process_groups=False,
        )
        if device == "cpu":
            machine.without_cuda_rng()
        else:
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = hybrid.build(parallel, groups, kinds=("gdn", "gdn", "gdn", "attention"), hidden=64)
        # hybrid.build seeds with a constant; other numbers show what a load has really filled.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.add_(0.1 * (seed % 7) * noise.to(parameter.device))
        if device != "cpu":
            model = model.cuda()
        config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=parallel.zero,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=device != "cpu",
        )
        where = torch.device("cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.model = FullyShardedDataParallel(
            model.config,
            config,
            hybrid.MixedPrecisionWrapper(model),
            device=where,
            pg_collection=groups,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                use_distributed_optimizer=True,
                clip_grad=0.0,
                bf16=False,
                fp16=False,
                params_dtype=torch.float32,
                optimizer_cpu_offload=offload,
                optimizer_offload_fraction=1.0 if offload else 0.0,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )

    def train(self, first: int, last: int) -> list[float]:
        import torch

        losses = []
        device = "cpu" if self.device == "cpu" else "cuda"
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 32, (1, 8), generator=generator).to(device)
            mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=device).triu(1)
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            output = self.model(tokens, torch.arange(8, device=device)[None], mask)
            loss = output.float().square().mean() / self.tp  # each rank has its vocabulary's share
            losses.append(float(self.whole(loss)))
            loss.backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
        return losses

    @property
    def tp(self) -> int:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_world_size()

    def whole(self, loss):
        """The loss over the whole vocabulary."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        total = loss.detach().clone()
        if self.tp > 1:
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total


def resumed(name: str, layout: dict, device: str, path: str, expected: list, offload=False) -> dict:
    """Loads under a layout into other weights, and trains on."""
    from shardplan.planner.megatron import load_checkpoint, save_checkpoint

    run = Run(layout, device, seed=99, offload=offload)
    start = time.perf_counter()
    loaded = load_checkpoint(run.model, run.optimizer, path)
    found: dict = {
        "layout": name,
        "load_seconds": round(time.perf_counter() - start, 3),
        "missing": loaded.report.missing,
        "unexpected": len(loaded.report.unexpected),
    }
    if not offload:
        # Saved again as it lies here, and loaded where it was first: whatever the layouts' own
        # arithmetic, the run must go on to the bit as if it had never been anywhere else.
        again = f"{path}-{name.replace(' ', '-')}"
        save_checkpoint(run.model, run.optimizer, again, iteration=loaded.iteration)
        back = Run({}, device, seed=98)
        load_checkpoint(back.model, back.optimizer, again)
        found["losses_after_coming_back"] = back.train(loaded.iteration, STEPS)
        found["came_back_equal"] = found["losses_after_coming_back"] == expected
        run = Run(layout, device, seed=97)  # Megatron's groups are global: the last built counts
        load_checkpoint(run.model, run.optimizer, path)
    try:
        losses = run.train(loaded.iteration, STEPS)
    except ValueError as error:  # Megatron refuses to train some layouts without further options
        return {**found, "not_trained": str(error)[:200]}
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {
        **found,
        "losses": losses,
        "worst_relative_difference": worst,
        "first_loss_after_load_differs_by": abs(losses[0] - expected[0]),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--out", help="file that rank 0 writes the result to, as JSON")
    options.add_argument("--tolerance", type=float, default=1e-4)
    chosen = options.parse_args()
    prepare(chosen.device)

    import torch
    import torch.distributed as dist

    from shardplan.planner.megatron import save_checkpoint

    if chosen.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = [tempfile.mkdtemp(prefix="megatron-resume-") if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    path = place[0]

    (first, layout), *others = layouts(world).items()
    whole = Run(layout, chosen.device, seed=1).train(0, STEPS)
    run = Run(layout, chosen.device, seed=1)
    begun = run.train(0, STOP)
    start = time.perf_counter()
    save_checkpoint(run.model, run.optimizer, path, iteration=STOP)
    result = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu",
        "ranks": world,
        "saved_under": first,
        "save_seconds": round(time.perf_counter() - start, 3),
        "losses_without_a_stop": whole,
        "losses_before_the_stop": begun,
        "resumed": [],
        "not_run": {},
    }
    broken = 0
    runs = [(name, other, False) for name, other in [(first, layout), *others]]
    runs.append((f"{first}, optimizer state on the CPU", layout, True))
    for name, other, offload in runs:
        if chosen.device == "cpu" and (other.get("tp", 1) > 1 or other.get("ep", 1) > 1):
            result["not_run"][name] = "Megatron's forward with tp or ep needs CUDA"
            continue
        try:
            found = resumed(name, other, chosen.device, path, whole[STOP:], offload)
        except Exception as error:  # the same on every rank; the next layout may still work
            result["not_run"][name] = f"{type(error).__name__}: {str(error)[:300]}"
            broken += not offload
            if rank == 0:
                traceback.print_exc(limit=-6)
            continue
        result["resumed"].append(found)
    # The loss right after a load is that of the loaded weights. What a step then makes of them may
    # differ with the layout (experts' gradients are averaged over other ranks), and is only told.
    failed = [
        found
        for found in result["resumed"]
        if not found.get("came_back_equal", True)
        or found.get("first_loss_after_load_differs_by", 0.0) > chosen.tolerance * whole[STOP]
    ]
    result["passed"] = not failed and not broken and whole[:STOP] == begun
    if rank == 0:
        text = json.dumps(result, indent=2)
        print(text, flush=True)
        if chosen.out:
            Path(chosen.out).write_text(text + "\n")
        import shutil

        for folder in [path, *(f"{path}-{name.replace(' ', '-')}" for name, *_ in runs)]:
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0 if result["passed"] else 1)  # a failed offload may leave NCCL work behind


if __name__ == "__main__":
    main()
