"""One run of the job under torchrun: train, save, or resume, prove and train on.

Rank 0 prints one JSON object per line for the driver:

| event | fields |
|---|---|
| `step` | `step`, `loss`: the mean over all tokens of the step |
| `loaded` | `step`, `tensors`, `values`, `different`: names, `seconds` |
| `saved` | `step`, `seconds` |

Exit status 1 if a loaded value differs from the one that was saved.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import checkpoint
import initial
import reference
from config import HybridConfig, Parallelism
from corpus import SEPARATOR, Corpus, deal
from groups import build_groups
from model import HybridModel
from optimizer import build_optimizer, learning_rate, set_learning_rate
from packing import PackedBatch
from sharding import apply_fsdp


class Job:
    """Model, optimizer and data of one rank.

    Attributes:
        step: Steps taken so far; the number of the next one.
        documents_seen: Documents that all ranks have read so far: the position in the data.
    """

    def __init__(self, config: HybridConfig, parallelism: Parallelism) -> None:
        self.config, self.parallelism = config, parallelism
        self.rank = dist.get_rank()
        groups, meshes = build_groups(parallelism)
        self.model = HybridModel(config, groups)
        initial.fill(self.model, config, parallelism, self.rank)
        apply_fsdp(self.model, meshes)
        self.optimizer = build_optimizer(self.model)
        self.corpus = Corpus()
        self.step = 0
        self.documents_seen = 0

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors."""
        return {
            "step": self.step,
            "documents_seen": self.documents_seen,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def train_step(self) -> float:
        """One step; returns the loss of the whole step, the same on every rank."""
        documents = self.corpus.documents(self.step)
        tokens = sum(len(document) + 1 for document in documents)
        dp, _ = self.parallelism.dense_coordinate(self.rank)
        mine = deal(documents, dp, self.parallelism.dp_size)
        loss = self.model(PackedBatch.of(mine, SEPARATOR)) / tokens
        set_learning_rate(self.optimizer, learning_rate(self.step))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.update_router_biases()
        self.step += 1
        self.documents_seen += len(documents)
        total: torch.Tensor = loss.detach().clone()
        if self.model.pg_collection.dp_cp is not None:
            dist.all_reduce(total, group=self.model.pg_collection.dp_cp)
        return float(total)

    def global_tensors(self) -> reference.GlobalTensors | None:
        """What all ranks hold, as the independent reader sees it; on rank 0 only."""
        return reference.gather(self.model, self.optimizer, self.config, self.parallelism)

    def save(self, path: Path, reference_path: Path) -> None:
        """Writes the checkpoint, and what the independent reader sees beside it.

        Raises:
            RuntimeError: Ranks disagree about a replicated tensor.
        """
        held = self.global_tensors()
        if held is not None:
            if held.disagreeing:
                raise RuntimeError(f"replicas differ before saving: {held.disagreeing[:8]}")
            torch.save({"tensors": held.tensors, "progress": self.progress()}, reference_path)
        started = time.perf_counter()
        checkpoint.save(path, self.model, self.optimizer, self.progress())
        self.emit("saved", step=self.step, seconds=time.perf_counter() - started)

    def load(self, path: Path, reference_path: Path, spoil: bool) -> bool:
        """Loads, and compares with what was saved.

        Returns:
            Whether all is the same; every rank learns it.
        """
        started = time.perf_counter()
        progress, report = checkpoint.load(path, self.model, self.optimizer, self.progress())
        seconds = time.perf_counter() - started
        self.step = progress["step"]
        self.documents_seen = progress["documents_seen"]
        if spoil:
            self._flip_a_bit()
        write_line(f"rank {self.rank}: {report}")
        irregular = self._on_any_rank([*report.missing, *report.unexpected, *report.converted])
        outcome = [True]
        held = self.global_tensors()
        if held is not None:
            saved = torch.load(reference_path)
            different = held.differences(reference.GlobalTensors(saved["tensors"]))
            if not saved["progress"] == progress == self.progress():
                different.append("progress")
            different += irregular
            self.emit(
                "loaded",
                step=self.step,
                tensors=len(held.tensors),
                values=held.num_values(),
                different=different,
                seconds=seconds,
            )
            outcome = [not different]
        dist.broadcast_object_list(outcome)
        return outcome[0]

    def _on_any_rank(self, names: list[str]) -> list[str]:
        gathered: list[list[str]] = [[]] * self.parallelism.world_size
        dist.all_gather_object(gathered, names)
        return sorted({name for each in gathered for name in each})

    @torch.no_grad()
    def _flip_a_bit(self) -> None:
        """Changes the last bit of one value, to see that the proof can fail."""
        if self.rank == 0:
            gathered = dict(self.model.named_parameters())["decoder.final_layernorm.weight"]
            local = getattr(gathered, "_local_tensor", gathered)
            local.view(torch.int32)[0] ^= 1

    def emit(self, event: str, **fields: Any) -> None:
        """Tells the driver, from rank 0."""
        if self.rank == 0:
            write_line(json.dumps({"event": event, **fields}))


def write_line(line: str) -> None:
    """Prints a line in one write, so that the ranks' lines do not mix in the pipe they share."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Runs what the command line asks for.

    Returns:
        The exit status.
    """
    options = parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallelism = Parallelism(options.tp, options.dp, options.ep, options.etp)
    if parallelism.world_size != dist.get_world_size():
        raise SystemExit(
            f"tp {options.tp} x dp {options.dp} is not the number of processes "
            f"({dist.get_world_size()})"
        )
    job = Job(HybridConfig(), parallelism)
    equal = options.load is None or job.load(
        options.load, options.load.with_suffix(".reference"), options.spoil
    )
    while equal and job.step < options.until:
        if options.save is not None and job.step == options.save_step:
            job.save(options.save, options.save.with_suffix(".reference"))
        loss = job.train_step()
        job.emit("step", step=job.step, loss=loss)
    dist.destroy_process_group()
    return 0 if equal else 1


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("tp", "dp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"size of the {axis} axis")
    parser.add_argument("--until", type=int, required=True, help="last step")
    parser.add_argument("--load", type=Path, help="checkpoint to resume from")
    parser.add_argument("--save", type=Path, help="checkpoint to write")
    parser.add_argument("--save-step", type=int, help="steps taken when it is written")
    parser.add_argument("--spoil", action="store_true", help="flip one bit after loading")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
