"""Checkpoints that Megatron-LM writes and the planners read, and the other way round."""

import contextlib
import threading
import time
from types import SimpleNamespace

import hybrid
import logical
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import Calls
from hybrid import Parallel
from megatron.core.transformer import fsdp_dtensor_checkpoint
from megatron.training import checkpointing
from torch.distributed.tensor import DTensor

from shardplan.planner.megatron import load_checkpoint, save_checkpoint, whole_projections

SLOTS = ("exp_avg", "exp_avg_sq")


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Job:
    """A sharded model with its optimizer; every value says which global element it is."""

    def __init__(
        self,
        parallel: dict,
        *,
        fill: bool,
        everywhere: bool,
        flat: bool = False,
        words: int | None = None,
        **changes,
    ):
        self.words = words
        self.slots = (*SLOTS, "master_param") if flat else SLOTS
        self.flat = flat
        self.parallel = Parallel(**parallel)
        self.groups = hybrid.process_groups(self.parallel)
        bare = hybrid.make(self.parallel, self.groups, **changes)
        self.config = bare.config
        self.ranks = logical.Ranks(self.groups, bare.config)
        self.model = hybrid.shard(bare, self.parallel, self.groups)
        self.optimizer = hybrid.make_optimizer(self.model)
        self.model.state_dict()  # puts the sharded parameters in place
        self.fill(fill, everywhere)

    def parameters(self):
        for name, parameter in self.model.named_parameters():
            yield name.replace("module.", ""), parameter

    def buffers(self):
        """The buffers that a state dict has."""
        kept = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name.removeprefix("module.") in kept or name in kept:
                yield name.replace("module.", ""), buffer

    def expected(self, name, parameter, salt=""):
        whole = logical.local(name, parameter.orig_param.shape, self.ranks, salt)
        if self.words is not None and name.split(".")[-2] in ("word_embeddings", "output_layer"):
            rank = self.ranks.tp[0]
            whole[max(self.words - rank * len(whole), 0) :] = 0  # padding
        cut = getattr(parameter, "megatron_fsdp_slice", None)
        return whole.flatten() if cut is None else whole.flatten()[cut.start : cut.stop]

    def fill(self, right: bool, everywhere: bool) -> None:
        """Fills weights and state with right values, or with -1.

        Args:
            right: Whether the values are the right ones.
            everywhere: Whether ranks without a part of a parameter have state of it too, as
                Transformer Engine's optimizer does; torch's makes none.
        """
        inner = self.optimizer.optimizer
        with torch.no_grad():
            for name, parameter in self.parameters():
                local = own(parameter)
                local.fill_(-1)
                if right:
                    local.copy_(self.expected(name, parameter).view_as(local))
                if not everywhere and not local.numel():
                    continue
                state = {"step": torch.tensor(7.0 if right else -1.0)}
                for slot in self.slots:
                    # Offloaded state is plain and flat, on the CPU.
                    state[slot] = torch.full_like(local.flatten() if self.flat else parameter, -1.0)
                    if right:
                        values = self.expected(name, parameter, slot)
                        own(state[slot]).copy_(values.view_as(own(state[slot])))
                inner.state[parameter] = state
            for group in inner.param_groups:
                group["lr"] = 0.125 if right else 0.5
            for name, buffer in self.buffers():
                buffer.copy_(logical.numbered(name, buffer.shape) if right else -1)

    def wrong(self) -> dict[str, int]:
        """Counts elements that are not what they must be, by parameter and slot."""
        found = {}
        inner = self.optimizer.optimizer
        for name, parameter in self.parameters():
            state = inner.state.get(parameter, {})
            held = {"": own(parameter)}
            for slot in self.slots:
                if slot in state:
                    held[slot] = own(state[slot])
                elif own(parameter).numel():
                    found[f"{name} {slot}"] = -1
            for slot, local in held.items():
                count = int((local.flatten() != self.expected(name, parameter, slot)).sum())
                if count:
                    found[f"{name} {slot}"] = count
            if "step" in state and float(state["step"]) != 7.0:
                found[f"{name} step"] = 1
        for name, buffer in self.buffers():
            count = int((buffer != logical.numbered(name, buffer.shape)).sum())
            if count:
                found[name] = count
        if any(group["lr"] != 0.125 for group in inner.param_groups):
            found["lr"] = 1
        return found

    def their_state(self, *, gdn: bool, loading: bool = False) -> dict:
        wrapped = self.model.module
        state = {
            "model": wrapped.state_dict_for_save_checkpoint(),
            "optimizer": self.optimizer.sharded_state_dict(
                {}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
            ),
        }
        self.raw_optimizer = state["optimizer"].copy()
        if gdn:
            state["model"], state["optimizer"] = fsdp_dtensor_checkpoint.handle_gdn_in_state_dict(
                wrapped, state["model"], state["optimizer"]
            )
        arguments = SimpleNamespace(swiglu=True, num_experts=self.config.num_moe_experts)
        return checkpointing.preprocess_fsdp_dtensor_state_dict(arguments, state, wrapped)


def layouts(fused: int | None = None):
    """The built-in providers, or those for whole projections of so many tensor-parallel ranks."""
    return None if fused is None else whole_projections(fused)


def save_theirs(parallel: dict, path: str, gdn: bool = True, **changes) -> dict:
    job = Job(parallel, fill=True, everywhere=True, **changes)
    start = time.perf_counter()
    with Calls() as calls:
        state = job.their_state(gdn=gdn)
    seconds = time.perf_counter() - start
    dcp.save(state, checkpoint_id=path)
    return {"collectives": calls.count, "seconds": seconds}


def load_theirs(parallel: dict, path: str, gdn: bool = True, **changes) -> dict:
    job = Job(parallel, fill=False, everywhere=True, **changes)
    state = job.their_state(gdn=gdn)
    dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=False))
    job.raw_optimizer["param_to_group_meta"] = state["optimizer"]["param_to_group_meta"]
    job.optimizer.load_state_dict(job.raw_optimizer)
    return {"wrong": job.wrong()}


def save_ours(
    parallel: dict,
    path: str,
    fused: int | None = None,
    everywhere: bool = False,
    keys: str = "fsdp_dtensor",
    **changes,
) -> dict:
    job = Job(parallel, fill=True, everywhere=everywhere, **changes)
    with Calls() as calls:
        save_checkpoint(
            job.model,
            job.optimizer,
            path,
            iteration=11,
            layouts=layouts(fused),
            vocab_size=job.words,
            keys=keys,
        )
    return {"collectives": calls.by_name, "states": len(job.optimizer.optimizer.state)}


def load_ours(
    parallel: dict, path: str, fused: int | None = None, fresh: bool = False, **changes
) -> dict:
    """Loads into a model of -1s; `fresh` leaves the optimizer as it is before its first step."""
    job = Job(parallel, fill=False, everywhere=False, **changes)
    if fresh:
        job.optimizer.optimizer.state.clear()
    with Calls() as calls:
        loaded = load_checkpoint(
            job.model, job.optimizer, path, layouts=layouts(fused), vocab_size=job.words
        )
    return {
        "wrong": job.wrong(),
        "iteration": loaded.iteration,
        "collectives": calls.by_name,
        "missing": loaded.report.missing,
        "unexpected": loaded.report.unexpected,
    }


def hang_theirs(parallel: dict, seconds: float) -> dict:
    """Megatron's own preprocessing where ranks hold different optimizer state."""
    job = Job(parallel, fill=True, everywhere=False)
    dist.barrier()
    ended = []

    def preprocess():
        with contextlib.suppress(RuntimeError):  # a peer that gave up closes the connection
            job.their_state(gdn=False)
            ended.append(True)

    thread = threading.Thread(target=preprocess, daemon=True)
    thread.start()
    thread.join(seconds)
    return {"ended": bool(ended), "states": len(job.optimizer.optimizer.state)}
