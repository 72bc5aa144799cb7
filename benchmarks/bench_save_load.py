"""Saving and loading a sharded state: ours, torch's own, other libraries, and the limit, in turns.

    scripts/launch/torchrun_local.sh -n 2 benchmarks/bench_save_load.py --gib 0.5 --out FILE
    torchrun --nproc-per-node=8 benchmarks/bench_save_load.py --gib 100 --sharding tp2 --load fsdp

Any number of processes, CPUs with gloo or GPUs with NCCL (gloo where ranks share a GPU). In every
round each way saves, and loads cold and warm under the same sharding and cold under the others; the
order changes from round to round. Times are of the slowest rank, until the files are durable. The
limit is a plain write with fsync, or a plain read, of the same bytes by the same processes, in the
same round.
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from async_saves import async_rounds
from disk import drop_cache, files_of, make_durable, plain_read, plain_write, storage_facts
from measure import Results, Team, spread, versions
from states import Sharding, Sizes, Subject, build, whole_sums
from ways import Way, ways

_HOST = 1 << 30  # bytes of host memory that plain files are written from, for state on a GPU
LIMIT = "limit"


class Bench:
    """The states, the folder and the team of one run.

    Args:
        args: The command line.
        team: All ranks.
        folder: Where checkpoints go; the same on all ranks.
    """

    def __init__(self, args: argparse.Namespace, team: Team, folder: Path) -> None:
        self.begun = time.monotonic()
        self.args = args
        self.team = team
        self.folder = folder
        sizes = Sizes.of_bytes(int(args.gib * 2**30), args.small)
        self.source = build(sizes, Sharding.of(args.sharding), args.device, seed=1)
        self.targets = {args.sharding: build(sizes, Sharding.of(args.sharding), args.device)}
        for text in args.load:
            self.targets.setdefault(text, build(sizes, Sharding.of(text), args.device))
        self.sums = whole_sums(self.source)
        self.parameters = len(self.source.state["model"])
        self.total = sum(
            tensor.numel() * tensor.element_size() for _, tensor in self.source.tensors()
        )
        self.seconds: dict[tuple[str, ...], list[float]] = defaultdict(list)
        self.facts: dict[tuple[str, ...], dict[str, Any]] = defaultdict(dict)
        self.errors: dict[tuple[str, str], str] = {}  # by way and operation

    def note(self, key: tuple[str, ...], outcome: Any, **facts: Any) -> None:
        """Keeps a measurement; `key` is operation, way, sharding, cache."""
        self.seconds[key].append(outcome.seconds)
        if self.args.verbose:
            self.team.say(f"  {' '.join(key)}: {outcome.seconds:.3f} s")
        known = self.facts[key]
        for name in ("host_bytes", "device_bytes"):
            known[name] = max(known.get(name, 0), getattr(outcome, name))
        known.update(facts)

    def limit(self, number: int) -> None:
        """Writes and reads the same bytes by plain system calls."""
        path = self.folder / f"plain-{self.team.rank}"
        writes = self._host(self.total // self.team.ranks)
        self.note(("save", LIMIT), self.team.run(lambda: plain_write(path, writes)))
        # A rank may need more than it wrote, so files of the needed length are made first.
        for text, target in self.targets.items():
            reads = self._host(target.nbytes)
            plain_write(path, reads)
            for cache in ("cold", "warm") if text == self.args.sharding else ("cold",):
                if cache == "cold":
                    drop_cache([path])
                outcome = self.team.run(lambda reads=reads: plain_read(path, reads))  # type: ignore[misc]
                self.note(("load", LIMIT, text, cache), outcome)
        path.unlink()

    def _host(self, nbytes: int) -> list[torch.Tensor]:
        """Returns host tensors of `nbytes` in all, large ones for what is large in the state."""
        if not hasattr(self, "_buffer"):
            size = nbytes if self.args.device == "cpu" else min(nbytes, _HOST)
            self._buffer = torch.empty(max(size, 1), dtype=torch.uint8).random_()
        if self._buffer.numel() < min(nbytes, _HOST):
            self._buffer = torch.empty(nbytes, dtype=torch.uint8).random_()
        full, rest = divmod(nbytes, self._buffer.numel())
        return [self._buffer] * full + [self._buffer[:rest]]

    def way(self, way: Way, number: int) -> None:
        """Saves and loads once."""
        path = self.folder / f"{way.name}-{number}"
        try:
            self._way(way, path)
        finally:
            self.team.barrier()
            if self.team.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            gc.collect()
            self.team.barrier()

    def _way(self, way: Way, path: Path) -> None:
        team = self.team

        def save() -> None:
            way.save(self.source, path)
            make_durable(path, team.rank, team.ranks)

        outcome = team.run(save)
        if self._failed(way, "save", outcome.error):
            return
        nbytes = sum(file.stat().st_size for file in files_of(path))
        metadata = path / ".metadata"
        self.note(
            ("save", way.name),
            outcome,
            disk_bytes=nbytes,
            files=len(files_of(path)),
            metadata_bytes=metadata.stat().st_size if metadata.exists() else None,
        )
        for text, target in self.targets.items():
            same = text == self.args.sharding
            for cache in ("cold", "warm") if same else ("cold",):
                able = same or (way.reshards and (target.group is None or way.subgroups))
                if able and (way.name, f"load {text}") not in self.errors:
                    self._load(way, path, text, target, cache)

    def _load(self, way: Way, path: Path, text: str, target: Subject, cache: str) -> None:
        team = self.team
        target.fill(None)
        if cache == "cold":
            drop_cache(files_of(path)[team.rank :: team.ranks])

        def load() -> None:
            if target.member:
                way.load(target, path)

        outcome = team.run(load)
        if self._failed(way, f"load {text}", outcome.error):
            return
        key = ("load", way.name, text, cache)
        wrong = 0
        if key not in self.seconds and target.member:
            sums = whole_sums(target)
            wrong = sum(
                sums[name] != known
                for name, known in self.sums.items()
                if way.leaves_out is None or not name.endswith(way.leaves_out)
            )
        wrong = int(team.highest(wrong)[0])
        if self._failed(way, f"load {text}", f"{wrong} tensors came back wrong" if wrong else None):
            return
        self.note(key, outcome)

    def _failed(self, way: Way, what: str, error: str | None) -> bool:
        if error is not None:
            self.errors[way.name, what] = error
            self.team.say(f"  {way.name}: {what}: {error}")
        return error is not None

    def report(self, results: Results) -> None:
        """Adds the result lines: medians, spread, ratios to the limit of the same round."""
        for key, seconds in self.seconds.items():
            operation, way, *where = key
            limits = self.seconds.get((operation, LIMIT, *where), [])
            ratios = [s / limit for s, limit in zip(seconds, limits, strict=False)]
            results.add(
                kind=operation,
                way=way,
                sharding=self.args.sharding,
                to=where[0] if where else None,
                cache=where[1] if where else None,
                ranks=self.team.ranks,
                device=self.args.device,
                state_bytes=self.total,
                parameters=self.parameters,
                seconds=spread(seconds),
                gib_per_s=self.total / 2**30 / statistics.median(seconds),
                to_limit=statistics.median(ratios) if ratios else None,
                **self.facts[key],
            )
        for (way, operation), error in self.errors.items():
            results.add(kind="error", way=way, operation=operation, error=error)


def measure(bench: Bench, chosen: list[Way]) -> None:
    """Runs all rounds; what fails in one is left out of the later ones.

    Nothing is begun that would end beyond the budget, to judge from how long it took before.
    """
    took: dict[str, float] = {}
    for number in range(bench.args.rounds):
        calls: list[tuple[str, Callable[[int], None]]] = [(LIMIT, bench.limit)]
        calls += [(way.name, lambda n, way=way: bench.way(way, n)) for way in chosen]  # type: ignore[misc]
        turn = number * max(1, len(calls) // max(1, bench.args.rounds)) % len(calls)
        for name, call in calls[turn:] + calls[:turn]:
            if (name, "save") in bench.errors:
                continue
            start = time.monotonic()
            needed = start - bench.begun + took.get(name, 0)
            if bench.team.highest(needed)[0] > bench.args.budget:
                bench.team.say(f"  {name}: left out of round {number + 1}, the budget is spent")
                continue
            call(number)
            took[name] = time.monotonic() - start
        bench.team.say(f"round {number + 1} of {bench.args.rounds} is over")


def warm_up(bench: Bench, chosen: list[Way]) -> None:
    """Saves and loads a tiny state in every way, so that imports and first connections are over."""
    tiny = argparse.Namespace(**{**vars(bench.args), "gib": 0.002, "small": 0, "load": []})
    trial = Bench(tiny, bench.team, bench.folder)
    for way in chosen:
        trial.way(way, -1)
        way.close()
    bench.errors.update({key: error for key, error in trial.errors.items() if key[1] == "save"})


def arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=0.25, help="size of the whole state")
    parser.add_argument("--small", type=int, default=0, help="further parameters of 64 elements")
    parser.add_argument("--sharding", default="fsdp", help="how it is sharded when it is saved")
    parser.add_argument("--load", nargs="*", default=["tp2", "shard1"], help="other shardings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=[], help="some only; see ways.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which no round goes on"
    )
    parser.add_argument("--no-sync", action="store_true", help="leave synchronous saves out")
    parser.add_argument("--async-saves", type=int, default=0, help="saves of each way, in a row")
    parser.add_argument("--async-ways", nargs="*", default=[], help="some only")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a training step")
    parser.add_argument("--dir", type=Path, help="where checkpoints go; default: TMPDIR")
    parser.add_argument("--timeout", type=int, default=300, help="of a collective, in seconds")
    parser.add_argument("--verbose", action="store_true", help="print traces of errors")
    parser.add_argument("--out", type=Path, help="JSON lines file to append results to")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) % 2:
        args.load = [text for text in args.load if "2" not in text]
    return args


def tables(results: Results) -> None:
    """Prints what was measured."""
    columns = {
        "way": "way",
        "seconds": "seconds",
        "to_limit": "÷ limit",
        "gib_per_s": "GiB/s",
        "host_bytes": "peak host bytes",
        "device_bytes": "peak GPU bytes",
    }
    results.table("Save, until durable", columns, kind="save")
    seen = dict.fromkeys((r["to"], r["cache"]) for r in results.rows if r["kind"] == "load")
    for to, cache in seen:
        results.table(f"Load under {to}, {cache}", columns, kind="load", to=to, cache=cache)
    columns = {
        "way": "way",
        "save": "save",
        "call_s": "call returns, s",
        "held_s": "training held up, s",
        "held_to_copy": "÷ plain copy",
        "durable_s": "durable after, s",
        "host_bytes": "peak host bytes",
    }
    results.table("Asynchronous saves", columns, kind="async")
    results.table("Left out", {"way": "way", "operation": "when", "error": "why"}, kind="error")


def main() -> None:
    """Runs the benchmark as the command line says."""
    warnings.simplefilter("ignore", FutureWarning)
    args = arguments()
    backend = "gloo"
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= gpus:  # NCCL takes one rank on a GPU
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    team = Team(args.verbose, patience=args.timeout + 30)
    name: list[str] = [""]
    if team.rank == 0:
        name = [tempfile.mkdtemp(prefix="shardplan-bench-", dir=args.dir)]
    dist.broadcast_object_list(name)
    folder = Path(name[0])
    try:
        bench = Bench(args, team, folder)
        team.say(
            f"{bench.total / 2**30:.3g} GiB, {bench.parameters} parameters, {team.ranks} ranks"
        )
        chosen, missing = ways(args.threads, args.ways, folder)
        bench.errors.update({(way, "save"): why for way, why in missing.items()})
        facts = {
            "versions": versions("torch_checkpointing", "bytecheckpoint", "safetensors"),
            "storage": storage_facts(folder),
        }
        results = Results("save_load", **facts)
        if not args.no_sync:
            warm_up(bench, chosen)
            measure(bench, [way for way in chosen if (way.name, "save") not in bench.errors])
            bench.report(results)
        for way in chosen:
            way.close()
        if args.async_saves:
            async_rounds(results, bench.source, team, folder, args)
        if team.rank == 0:
            tables(results)
            results.write(args.out)
        team.barrier()
    finally:
        if team.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
