"""Trains a hybrid GDN + MoE model under real Megatron-FSDP, saves it, goes on elsewhere.

    PYTHONPATH=PACKAGES:scripts/typing torchrun --standalone --nproc_per_node 2 \
        scripts/gpu/megatron_fsdp_resume.py [--out result.json]

    run="torchrun --standalone --nproc_per_node 1 scripts/gpu/megatron_fsdp_resume.py --path DIR"
    $run --phase save --out saved.json && $run --phase resume --out resumed.json

PACKAGES is a folder with megatron-core 0.19.2, megatron-fsdp 0.6.1 and einops (scripts/setup_megatron
makes one; `pip install --no-deps --target PACKAGES *.whl` does from wheels). `--device cpu` runs the
same on gloo, with stand-ins for CUDA. Any number of ranks does, one too.

Every rank gets the same tokens, so that the loss is the same under each layout. The first form loads
the checkpoint under other layouts in one process. A run that never stopped is compared with runs that
load its checkpoint: the first loss after the load, and the losses of a run that is loaded under the
other layout, saved there, and loaded back, which must be equal to the bit.

The second form saves in one process and goes on in another, under the same layout: a run with its
optimizer on the GPU, and one whose state is on the CPU (HybridDeviceOptimizer, see
tests/megatron/drive/offload.py for what 0.19.2 needs there). Losses must be equal to those of a run
that never stopped.

Both also tell, and never fail for: whether Megatron's own HybridDeviceOptimizer can be made; losses
from equal weights without any checkpoint, under data and expert parallelism and without Megatron-FSDP;
what a scaled sum over one rank gives.
"""

import argparse
import json
import os
import shutil
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
    machine.without_mamba()
    if device == "cpu":
        machine.without_cuda()


def layouts(world: int) -> dict:
    """What each run is laid out as; the first is the one that is saved."""
    if world == 1:
        return {"dp 1": {}, "zero-1": {"zero": "optim"}}
    return {
        f"dp {world}": {},
        f"ep {world}": {"ep": world},
        f"tp {world}": {"tp": world},
        "zero-1": {"zero": "optim"},
    }


class Run:
    """A model and its optimizer under one layout.

    Args:
        layout: A parallel configuration.
        device: `cuda` or `cpu`.
        seed: What the weights depend on; None for weights that depend on the global element alone.
        offload: `local` for an optimizer on the CPU as tests/megatron/drive/offload.py mends it,
            `as released` for Megatron's own.
        sharded: Whether Megatron-FSDP wraps the model.
        fused: Whether NCCL scales gradients while it sums them, as Megatron's default is.
    """

    def __init__(
        self,
        layout: dict,
        device: str,
        *,
        seed: int | None,
        offload: str = "",
        sharded: bool = True,
        fused: bool = True,
    ):
        import hybrid
        import logical
        import offload as offloading
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
            tensor_parallel.model_parallel_cuda_manual_seed(seed or 1)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = hybrid.build(parallel, groups, kinds=("gdn", "gdn", "gdn", "attention"), hidden=64)
        # hybrid.build seeds with a constant; other numbers show what a load has really filled.
        generator = torch.Generator().manual_seed(seed or 0)
        ranks = logical.Ranks(groups, model.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if seed is None:
                    wave = 0.3 * torch.sin(0.37 * logical.local(name, parameter.shape, ranks) + 1)
                    parameter.copy_(1 + wave if "norm" in name else wave)
                    continue
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.add_(0.1 * (seed % 7) * noise.to(parameter.device))
        if device != "cpu":
            model = model.cuda()
        self.sharded = sharded
        if not sharded:
            self.model = model
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            return
        config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=parallel.zero,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=fused and device != "cpu",
        )
        where = torch.device("cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.model = FullyShardedDataParallel(
            model.config,
            config,
            hybrid.MixedPrecisionWrapper(model),
            device=where,
            pg_collection=groups,
        )
        if offload == "local":
            offloading.use_local_parts()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                use_distributed_optimizer=True,
                clip_grad=0.0,
                bf16=False,
                fp16=False,
                params_dtype=torch.float32,
                optimizer_cpu_offload=bool(offload),
                optimizer_offload_fraction=1.0 if offload else 0.0,
                pin_cpu_grads=False,
                pin_cpu_params=False,
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
            if self.sharded:
                self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            output = self.model(tokens, torch.arange(8, device=device)[None], mask)
            loss = output.float().square().mean() / self.tp  # each rank has its vocabulary's share
            losses.append(float(self.whole(loss)))
            loss.backward()
            if self.sharded:
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


def resumed(name: str, layout: dict, device: str, path: str, expected: list) -> dict:
    """Loads under a layout into other weights, and trains on."""
    from shardplan.planner.megatron import load_checkpoint, save_checkpoint

    run = Run(layout, device, seed=99)
    start = time.perf_counter()
    loaded = load_checkpoint(run.model, run.optimizer, path)
    found: dict = {
        "layout": name,
        "load_seconds": round(time.perf_counter() - start, 3),
        "missing": loaded.report.missing,
        "unexpected": len(loaded.report.unexpected),
    }
    # Saved again as it lies here, and loaded where it was first: whatever the layouts' own
    # arithmetic, the run must go on to the bit as if it had never been anywhere else.
    again = f"{path}/{name.replace(' ', '-')}"
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


def attempt(call) -> object:
    """What a call returns, or what it failed with; the same on every rank."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def observations(device: str, world: int) -> dict:
    """What Megatron does by itself, without a checkpoint."""
    import torch
    import torch.distributed as dist

    def scaled_sum() -> list[float]:
        groups = [dist.new_group([rank]) for rank in range(world)]
        value = torch.ones(4, device="cuda")
        dist.reduce_scatter_tensor(
            value,
            value.clone(),
            op=dist._make_nccl_premul_sum(0.5),
            group=groups[dist.get_rank()],
        )
        return value.tolist()

    def train(layout: dict, **options) -> list[float]:
        return Run(layout, device, seed=None, **options).train(0, STEPS)

    found = {
        "optimizer_as_released_on_the_cpu": attempt(
            lambda: Run({}, device, seed=1, offload="as released").train(0, 1)
        ),
        "losses_from_equal_weights": {
            f"dp {world}": attempt(lambda: train({})),
            "without Megatron-FSDP": attempt(lambda: train({}, sharded=False)),
        },
    }
    if device == "cuda":
        found["half_of_ones_summed_over_one_rank"] = attempt(scaled_sum)
        found["losses_from_equal_weights"][f"dp {world}, scaled before the sum"] = attempt(
            lambda: train({}, fused=False)
        )
    if world > 1:
        for name, fused in ((f"ep {world}", True), (f"ep {world}, scaled before the sum", False)):
            found["losses_from_equal_weights"][name] = attempt(
                lambda fused=fused: train({"ep": world}, fused=fused)
            )
    return found


def other_layouts(device: str, world: int, path: str) -> dict:
    """Saves under the first layout, and loads under each in the same process."""
    import torch.distributed as dist

    from shardplan.planner.megatron import save_checkpoint

    (first, layout), *others = layouts(world).items()
    whole = Run(layout, device, seed=1).train(0, STEPS)
    run = Run(layout, device, seed=1)
    begun = run.train(0, STOP)
    start = time.perf_counter()
    save_checkpoint(run.model, run.optimizer, path, iteration=STOP)
    result: dict = {
        "saved_under": first,
        "save_seconds": round(time.perf_counter() - start, 3),
        "losses_without_a_stop": whole,
        "losses_before_the_stop": begun,
        "resumed": [],
        "not_run": {},
    }
    for name, other in [(first, layout), *others]:
        if device == "cpu" and other.get("tp", 1) > 1:
            result["not_run"][name] = "Megatron's forward with tp needs CUDA"
            continue
        try:
            result["resumed"].append(resumed(name, other, device, path, whole[STOP:]))
        except Exception as error:  # the same on every rank; the next layout may still work
            result["not_run"][name] = f"{type(error).__name__}: {str(error)[:300]}"
            result["broken"] = True
            if dist.get_rank() == 0:
                traceback.print_exc(limit=-6)
    # The loss right after a load is that of the loaded weights. What a step then makes of them may
    # differ with the layout, and is only told.
    failed = [
        found
        for found in result["resumed"]
        if not found["came_back_equal"]
        or found.get("first_loss_after_load_differs_by", 0.0) > 1e-4 * whole[STOP]
    ]
    result["passed"] = not failed and not result.pop("broken", False) and whole[:STOP] == begun
    return result


OPTIMIZERS = {"optimizer on the device": "", "optimizer state on the CPU": "local"}


def saved_here(device: str, path: str) -> dict:
    """Trains without a stop and up to one, and saves what the second comes to."""
    import torch.distributed as dist

    from shardplan.planner.megatron import save_checkpoint

    result: dict = {"losses_without_a_stop": {}, "save_seconds": {}}
    same = True
    for name, offload in OPTIMIZERS.items():
        whole = Run({}, device, seed=1, offload=offload).train(0, STEPS)
        run = Run({}, device, seed=1, offload=offload)
        same &= run.train(0, STOP) == whole[:STOP]
        start = time.perf_counter()
        save_checkpoint(run.model, run.optimizer, f"{path}/{offload or 'device'}", iteration=STOP)
        result["save_seconds"][name] = round(time.perf_counter() - start, 3)
        result["losses_without_a_stop"][name] = whole
    if dist.get_rank() == 0:
        Path(path, "expected.json").write_text(json.dumps(result))
    return {**result, "passed": same}


def resumed_here(device: str, path: str) -> dict:
    """Goes on from what another process saved: with each kind of optimizer, from either's state."""
    from shardplan.planner.megatron import load_checkpoint

    expected = json.loads(Path(path, "expected.json").read_text())["losses_without_a_stop"]
    result: dict = {"resumed": [], "passed": True}
    for saved, folder in OPTIMIZERS.items():
        for name, offload in OPTIMIZERS.items():
            run = Run({}, device, seed=99, offload=offload)
            start = time.perf_counter()
            loaded = load_checkpoint(run.model, run.optimizer, f"{path}/{folder or 'device'}")
            seconds = round(time.perf_counter() - start, 3)
            losses = run.train(loaded.iteration, STEPS)
            wanted = expected[saved][STOP:]
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
            found = {
                "saved": saved,
                "resumed": name,
                "load_seconds": seconds,
                "missing": loaded.report.missing,
                "losses": losses,
                "equal": losses == wanted,
                "worst_relative_difference": worst,
            }
            result["resumed"].append(found)
            # The two kinds round differently; each alone goes on to the bit.
            result["passed"] &= losses == wanted if saved == name else worst < 1e-4
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--phase", choices=["all", "save", "resume"], default="all")
    options.add_argument("--path", help="folder of the checkpoints, for --phase save and resume")
    options.add_argument("--out", help="file that rank 0 writes the result to, as JSON")
    chosen = options.parse_args()
    if chosen.phase != "all" and chosen.path is None:
        options.error("--phase save and --phase resume need --path")
    prepare(chosen.device)

    import torch
    import torch.distributed as dist

    device = chosen.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    result = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "ranks": world,
        "phase": chosen.phase,
    }
    if chosen.phase == "all":
        place = [tempfile.mkdtemp(prefix="megatron-resume-") if rank == 0 else None]
        dist.broadcast_object_list(place, src=0)
        result |= other_layouts(device, world, place[0])
        if rank == 0:
            shutil.rmtree(place[0], ignore_errors=True)
    elif chosen.phase == "save":
        result |= saved_here(device, chosen.path)
    else:
        result |= resumed_here(device, chosen.path)
    if chosen.phase != "resume":
        result["observed"] = observations(device, world)
    if rank == 0:
        text = json.dumps(result, indent=2)
        print(text, flush=True)
        if chosen.out:
            Path(chosen.out).write_text(text + "\n")
    sys.stdout.flush()
    os._exit(0 if result["passed"] else 1)  # a failed offload may leave NCCL work behind


if __name__ == "__main__":
    main()
