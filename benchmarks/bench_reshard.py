"""Loading under another layout: bytes read ÷ bytes needed, and time, for a matrix of changes.

    scripts/launch/torchrun_local.sh -n 8 benchmarks/bench_reshard.py --out FILE

All ranks save; some of them load. Every load is cold. Bytes are those that system calls returned
from files; what a reader takes through memory maps can't be counted so, and shows in the time alone.
`SafetensorsReader` tells which of its bytes were what: tensors, headers with tables of checksums and
manifest, and what was read for checksums alone. With fewer processes than eight the numbers of ranks
shrink in proportion.

| way | saved by | loaded by |
|---|---|---|
| `own` | our planner and `SafetensorsWriter` | our planner and `SafetensorsReader` |
| `own-unverified` | the same | the same with `verify=False`: no byte is read for a checksum alone |
| `own-gap` | the same | the same with `gap_bytes=65536`: what lies between near runs is read along |
| `ours` | our planner and torch's `FileSystemWriter` | our planner and torch's `FileSystemReader` |
| `stock` | torch's planner and `FileSystemWriter` | torch's; our planner where torch has no layout |
| `stock-hf` | torch's `HuggingFaceStorageWriter` | its reader |
"""

import argparse
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import Reads
from disk import bytes_read, drop_cache, files_of, make_durable, storage_facts
from measure import Results, Team, spread
from placed import Placed, Placement
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from shardplan.planner import SafetensorsReader, SafetensorsWriter

# What is counted in bytes: what system calls returned and the disk gave; of that, where it is known,
# headers and manifest, what was read for checksums alone, and what no checksum covers.
_COUNTED = ("calls", "disk", "headers", "checks", "unchecked")

# What is saved under, what is loaded under, with the number of ranks of eight.
CHANGES = (
    (Placement("rows", 8), Placement("rows", 8)),
    (Placement("rows", 8), Placement("rows", 3)),
    (Placement("rows", 8), Placement("columns", 2)),
    (Placement("rows", 8), Placement("columns", 4)),
    (Placement("rows", 8), Placement("columns", 8)),
    (Placement("rows", 8), Placement("halves", 2)),
    (Placement("flat", 8), Placement("rows", 8)),
    (Placement("flat", 8), Placement("columns", 4)),
)


def save(way: str, placed: Placed, path: Path) -> None:
    """Saves in one of the ways."""
    if way.startswith("own"):
        writer: Any = SafetensorsWriter(path)
        state, planner = placed.local_state(), placed.save_planner()
        dcp.save(state, storage_writer=writer, planner=planner, use_collectives=False)
    elif way == "ours" or not placed.stock:
        writer = dcp.FileSystemWriter(path)
        planner = placed.save_planner("split" if way == "ours" else "fused")
        dcp.save(placed.local_state(), storage_writer=writer, planner=planner)
    elif way == "stock":
        dcp.save(placed.dtensor_state(), storage_writer=dcp.FileSystemWriter(path))
    else:
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        dcp.save(placed.dtensor_state(), storage_writer=writer)


def load(way: str, placed: Placed, path: Path) -> dict[str, int]:
    """Loads in one of the ways; called by the ranks that take part.

    Returns:
        How many bytes the reader says were headers and manifest, and how many were read for
        checksums alone; nothing where it does not say.
    """
    reader: Any = dcp.FileSystemReader(path)
    state, planner = placed.local_state(), None
    if way.startswith("own"):
        gap = 64 << 10 if way == "own-gap" else 0
        reader = SafetensorsReader(path, verify=way != "own-unverified", gap_bytes=gap)
        planner = placed.load_planner()
    elif way == "ours" or not placed.stock:
        planner = placed.load_planner("split" if way == "ours" else "fused")
    else:
        state = placed.dtensor_state()
        reader = HuggingFaceStorageReader(str(path)) if way == "stock-hf" else reader
    dcp.load(state, storage_reader=reader, planner=planner, process_group=placed.group)
    if not isinstance(reader, SafetensorsReader):
        return {}
    stats = reader.stats
    return {
        "headers": stats.headers + stats.manifest,
        "checks": stats.read - stats.needed,
        "unchecked": stats.unchecked,
    }


def able(way: str, source: Placed, target: Placed) -> bool:
    """Whether a way can make a change: safetensors files of torch's are read by its planner alone."""
    return way != "stock-hf" or (source.stock and target.stock)


class Bench:
    """All changes of one run.

    Args:
        args: The command line.
        team: All ranks.
        folder: Where checkpoints go; the same on all ranks.
    """

    def __init__(self, args: argparse.Namespace, team: Team, folder: Path) -> None:
        self._args = args
        self._team = team
        self._folder = folder
        self._placed: dict[Placement, Placed] = {}
        self._seen: dict[tuple[str, Placement, Placement], list[dict[str, float]]]
        self._seen = defaultdict(list)
        self.results = Results("reshard", storage=storage_facts(folder))

    def placed(self, placement: Placement) -> Placed:
        """Returns the tensors under a placement; all ranks call it in the same order."""
        own = placement.scaled(self._team.ranks)
        if own not in self._placed:
            self._placed[own] = Placed(own, self._args.hidden, self._args.layers)
        return self._placed[own]

    def run(self) -> None:
        """Makes all changes in all ways, in turns."""
        for source, target in CHANGES:
            self.placed(source), self.placed(target)
        for source in dict.fromkeys(source for source, _ in CHANGES):
            self._from(source)
        for (way, source, target), rounds in self._seen.items():
            needed = self.placed(target).needed
            total = needed * target.scaled(self._team.ranks).ranks
            mapped = way == "stock-hf"
            most = {name: max(r[name] for r in rounds) for name in _COUNTED}
            own = way.startswith("own")
            self.results.add(
                kind="reshard",
                way=way,
                source=str(source.scaled(self._team.ranks)),
                target=str(target.scaled(self._team.ranks)),
                seconds=spread([r["seconds"] for r in rounds]),
                needed_bytes=total,
                read_bytes=None if mapped else most["calls"],
                read_to_needed=None if mapped else most["calls"] / total,
                header_bytes=most["headers"] if own else None,
                check_bytes=most["checks"] if own else None,
                unchecked_bytes=most["unchecked"] if own else None,
                tensors_to_needed=(most["calls"] - most["headers"]) / total if own else None,
                disk_bytes=most["disk"],
            )

    def _from(self, source: Placement) -> None:
        placed = self.placed(source)
        ways = [way for way in self._args.ways if able(way, placed, placed)]
        placed.fill()
        paths = {way: self._folder / f"{way}-{source.kind}" for way in ways}
        for way, path in paths.items():
            outcome = self._team.run(lambda: save(way, placed, path))  # noqa: B023
            if outcome.error:
                self._lost(way, source, source, outcome.error)
            make_durable(path, self._team.rank, self._team.ranks)
        self._team.barrier()
        # One round more than is kept: first loads import, and reading that would be counted.
        for number in range(-1, self._args.rounds):
            for start, target in CHANGES:
                for way in ways if start == source else ():
                    if able(way, placed, self.placed(target)):
                        self._change(way, source, target, paths[way], number)
        self._team.barrier()
        if self._team.rank == 0:
            for path in paths.values():
                shutil.rmtree(path, ignore_errors=True)

    def _change(
        self, way: str, source: Placement, target: Placement, path: Path, number: int
    ) -> None:
        placed = self.placed(target)
        placed.clear()
        drop_cache(files_of(path)[self._team.rank :: self._team.ranks])
        read: dict[str, int] = {}

        def call() -> None:
            if placed.member:
                before = bytes_read()
                with Reads() as reads:
                    read.update(load(way, placed, path))
                read["calls"] = reads.nbytes
                read["disk"] = bytes_read() - before

        outcome = self._team.run(call)
        error = outcome.error or self._wrong(placed)
        if error:
            self._lost(way, source, target, error)
            return
        sums = dict(
            zip(_COUNTED, self._team.sums(*(read.get(n, 0) for n in _COUNTED)), strict=True)
        )
        if number >= 0:
            self._seen[way, source, target].append({"seconds": outcome.seconds, **sums})

    def _wrong(self, placed: Placed) -> str | None:
        wrong = int(self._team.highest(placed.wrong() if placed.member else 0)[0])
        return f"{wrong} elements came back wrong" if wrong else None

    def _lost(self, way: str, source: Placement, target: Placement, error: str) -> None:
        self._team.say(f"  {way}: {source} → {target}: {error}")
        self.results.add(kind="error", way=way, source=str(source), target=str(target), error=error)


def main() -> None:
    """Runs the benchmark as the command line says."""
    warnings.simplefilter("ignore", FutureWarning)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 24")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    ways = ["own", "own-gap", "own-unverified", "ours", "stock", "stock-hf"]
    parser.add_argument("--ways", nargs="*", default=ways, choices=ways)
    parser.add_argument("--dir", type=Path, help="where checkpoints go; default: TMPDIR")
    parser.add_argument("--timeout", type=int, default=300, help="of a collective, in seconds")
    parser.add_argument("--verbose", action="store_true", help="print traces of errors")
    parser.add_argument("--out", type=Path, help="JSON lines file to append results to")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("run it with torchrun, on eight processes: see benchmarks/README.md")
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    team = Team(args.verbose, patience=args.timeout + 30)
    name: list[str] = [""]
    if team.rank == 0:
        name = [tempfile.mkdtemp(prefix="shardplan-bench-", dir=args.dir)]
    dist.broadcast_object_list(name)
    try:
        bench = Bench(args, team, Path(name[0]))
        bench.run()
        if team.rank == 0:
            columns = {
                "source": "saved under",
                "target": "loaded under",
                "way": "way",
                "read_to_needed": "bytes read ÷ needed",
                "tensors_to_needed": "without headers",
                "header_bytes": "headers, manifest",
                "check_bytes": "for checksums alone",
                "seconds": "seconds",
            }
            bench.results.table("Loads under another layout, cold", columns, kind="reshard")
            bench.results.write(args.out)
        team.barrier()
    finally:
        if team.rank == 0:
            shutil.rmtree(name[0], ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
