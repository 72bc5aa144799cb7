"""What becomes of a value that two ranks hold: it comes back as each rank had it, or is refused.

Every kind of value, under a parameter's slot and under another key, from every source, in every
storage and way to drive it, with a model and without. `docs/agreement.md` is the table of outcomes;
`SHARDPLAN_WRITE_DOCS=1 pytest tests/planner/test_agreement_matrix.py` writes it anew.
"""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import alone
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import Cut, DTensorStorage, FSDPFlatBuffer, Grids
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
    PerRank,
    SafetensorsReader,
    SafetensorsWriter,
)

# Whether SafetensorsWriter compares the ranks' messages where they exchange nothing.
ALONE_COMPARES = True

DOCUMENT = Path(__file__).parents[2] / "docs" / "agreement.md"
SHAPE = (4, 2)
ABSENT = object()

SOURCES = ("plain", "flat buffer", "DTensor")
PLACES = {"slot": "optim.state.w.m", "other key": "train.m"}
STORAGES = ("stock", "own", "own, no collectives")


def full(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(100, 100 + count, dtype=torch.float32).view(shape).to(dtype)


def tensor(source: str, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a tensor of the parameter's kind."""
    if source == "plain":
        return whole.clone()
    half = whole.chunk(2)[rank].clone()
    if source == "flat buffer":
        return half.reshape(-1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    return DTensor.from_local(
        half, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


# What a rank holds: by the source and the rank.
VALUES: dict[str, Callable[[str, int], Any]] = {
    "tensor like the parameter": lambda source, rank: tensor(source, rank, full()),
    "scalar tensor, equal": lambda source, rank: torch.tensor(7.0),
    "scalar tensor, other value": lambda source, rank: torch.tensor(100.0 + rank),
    "tuple, equal": lambda source, rank: (1, torch.tensor([2.0, 3.0])),
    "tuple, other value": lambda source, rank: (1, torch.tensor([2.0, 3.0 + rank])),
    "object, equal": lambda source, rank: {"a": [1, "b"]}["a"],
    "object, other value": lambda source, rank: 100 + rank,
    "PerRank": lambda source, rank: PerRank(100 + rank),
    "bare tensor, other value": lambda source, rank: torch.full((3,), 100.0 + rank),
    "missing on one rank": lambda source, rank: (
        tensor(source, rank, full()) if rank == 0 else ABSENT
    ),
    "other dtype": lambda source, rank: tensor(
        source, rank, full((torch.float32, torch.float64)[rank])
    ),
    "other shape": lambda source, rank: tensor(source, rank, full(shape=((4, 2), (4, 4))[rank])),
}
# What is right, by the kind of value and the place: for every source, unless one is named, and
# with a model unless said otherwise.
BACK, REFUSED = "comes back", "refused"


def expected(kind: str, place: str, source: str, model: bool) -> str:
    # A flat buffer's slice says nothing of itself: only a layout tells it from a bare tensor.
    sliced = source == "flat buffer" and not (model and place == "slot")
    if kind == "tensor like the parameter":
        return REFUSED if sliced else BACK
    if kind in ("scalar tensor, equal", "tuple, equal", "object, equal", "PerRank"):
        return BACK
    if kind == "missing on one rank":
        # Under a key of its own a bare tensor is the value of whoever holds it.
        bare = sliced or (source == "plain" and not (model and place == "slot"))
        return BACK if bare else REFUSED
    return REFUSED


@contextlib.contextmanager
def on(rank: int) -> Iterator[None]:
    """A process group of two ranks that sends nothing, for meshes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def planner(kind: Any, source: str, rank: int, model: bool) -> Any:
    sizes = {"dp_replicate": 2} if source == "plain" else {"dp_shard": 2}
    layouts: list[Any] = []
    if source == "flat buffer":
        layouts = [FSDPFlatBuffer({"w": ((0, 4), (4, 8))})]
    elif source == "DTensor":
        layouts = [DTensorStorage({"w": (Cut(0, "dp_shard"),)})]
    given = {"layouts": layouts} if model else {}
    return kind({"w": SHAPE} if model else None, grid=Grids.from_sizes(rank, **sizes), **given)


def state(source: str, place: str, rank: int, value: Any) -> dict[str, Any]:
    """The value at its place; the parameter itself would be refused as a slice without a model."""
    found: dict[str, Any] = {"train": {"n": 1}}
    if value is not ABSENT and place == "slot":
        found["optim"] = {"state": {"w": {"m": value}}}
    elif value is not ABSENT:
        found["train"]["m"] = value
    return found


def blank(value: Any) -> Any:
    if isinstance(value, PerRank):
        return PerRank(None)
    if isinstance(value, DTensor):  # an operation would take the mesh of the rank before
        local = torch.zeros_like(value.to_local())
        return DTensor.from_local(
            local, value.device_mesh, [Shard(0)], run_check=False, shape=value.shape, stride=(2, 1)
        )
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return type(value)(map(blank, value)) if isinstance(value, list | tuple) else None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, PerRank):
        a, b = a.value, b.value
    if isinstance(a, DTensor):
        a, b = a.to_local(), b.to_local()
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def at(found: dict[str, Any], place: str) -> Any:
    slots = found.get("optim", {"state": {"w": {}}})["state"]["w"]
    return (slots if place == "slot" else found["train"]).get("m", ABSENT)


def save(folder: Path, storage: str, states: list[Any], planners: list[Any]) -> list[Any]:
    """Saves and returns the errors: those of ranks that fail, as `dcp.save` gathers them."""
    if storage == "own, no collectives":
        return [error for error in alone.save(folder, states, planners) if error is not None]
    writers: list[Any] = [
        dcp.FileSystemWriter(folder, sync_files=False)
        if storage == "stock"
        else SafetensorsWriter(folder, sync=False)
        for _ in states
    ]

    def plan(rank: int) -> Any:
        meta = writers[rank].storage_meta()
        planners[rank].set_up_planner(states[rank], meta, rank == 0)
        writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        return world.sent(writers[rank].prepare_local_plan(planners[rank].create_local_plan()))

    def plan_all() -> Any:
        joined, metadata = planners[0].create_global_plan(plans)
        return writers[0].prepare_global_plan(joined), metadata

    def write(rank: int) -> Any:
        final = planners[rank].finish_plan(world.sent(joined[rank]))
        return writers[rank].write_data(final, planners[rank]).wait()

    plans, errors = on_all(plan, planners)
    if not errors:
        (found,), errors = on_all(lambda _: plan_all(), [0])
    if not errors:
        joined, metadata = found
        results, errors = on_all(write, planners)
    if not errors:
        writers[0].finish(metadata, results)
    return errors


def on_all(step: Callable[[int], Any], ranks: Sequence[Any]) -> tuple[list[Any], list[Exception]]:
    """What each rank returns of a step, and the errors of those that fail."""
    found, errors = [], []
    for rank in range(len(ranks)):
        try:
            found.append(step(rank))
        except Exception as error:
            found.append(None)
            errors.append(error)
    return found, errors


def outcome(folder: Path, cell: tuple[str, str, str, str, bool]) -> str:
    """What becomes of a value; anything but `BACK` and `REFUSED` is a fault."""
    kind, place, source, storage, model = cell
    states, planners, loaders, targets = [], [], [], []
    for rank in range(2):
        with on(rank):
            value = VALUES[kind](source, rank)
            states.append(state(source, place, rank, value))
            empty = ABSENT if value is ABSENT else blank(value)
            targets.append(state(source, place, rank, empty))
            planners.append(planner(LayoutAwareSavePlanner, source, rank, model))
            loaders.append(planner(LayoutAwareLoadPlanner, source, rank, model))
    errors = save(folder, storage, states, planners)
    complete = [n for n in (".metadata", "checkpoint.json") if (folder / n).exists()]
    if errors:
        return f"complete all the same: {complete}" if complete else named(errors, PLACES[place])
    if not complete:
        return "neither saved nor refused"
    world.load(
        folder, targets, loaders, dcp.FileSystemReader if storage == "stock" else SafetensorsReader
    )
    for rank in range(2):
        value = at(states[rank], place)
        if value is not ABSENT and not same(value, at(targets[rank], place)):
            return f"rank {rank} saved {value} and loads {at(targets[rank], place)}"
    return BACK


def named(errors: list[Any], key: str) -> str:
    """`REFUSED` if one error has the key and both ranks, or each rank's own error has the key."""
    known = (CheckpointError, LayoutError)
    if not all(isinstance(error, known) for error in errors):
        return f"refused with {errors!r}"
    keyed = [str(error) for error in errors if key in str(error) or "w: " in str(error)[:60]]
    both = [t for t in keyed if re.search(r"ranks? 0\b", t) and re.search(r"(rank|and) 1\b", t)]
    own = [t for t in keyed if re.search(r"dp_(shard|replicate) [01]/2", t)]
    return REFUSED if both or own else f"refused without the key or a rank: {errors}"


CELLS = [
    cell
    for cell in itertools.product(VALUES, PLACES, SOURCES, STORAGES, (True, False))
    if ALONE_COMPARES or cell[3] != "own, no collectives"
]


@functools.cache
def known(folder: Path, cell: tuple[str, str, str, str, bool]) -> str:
    return outcome(folder / str(CELLS.index(cell)), cell)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda c: " | ".join([*c[:4], "model" if c[4] else "no model"])
)
def test_it_comes_back_or_is_refused(folder: Path, cell: tuple[str, str, str, str, bool]) -> None:
    kind, place, source, _, model = cell
    assert expected(kind, place, source, model) == known(folder, cell)


INTRODUCTION = """# What ranks must agree on

One rule holds for every value of a state dict, in every storage, with collectives and without:

- boxes of tensors are covered exactly once;
- everything else is equal on all ranks that hold it, or each rank's own by declaration (`PerRank`),
  or held by some ranks only, under a key of their own.

Anything else is an error that names the key and the ranks, before the checkpoint counts as complete.
Values are equal if their bytes are: NaN equals NaN, and 0.0 is not -0.0.

A rank that stores some of a parameter must hold the same slots for it as the other ranks that do. A
slot that is no tensor of the parameter's shape (a step, a tuple, a number) is one value for the
whole parameter. A key that no layout explains belongs to whoever holds it: the first rank of the
pipeline stage writes it if it holds it, else the lowest rank that does.

The table is what two ranks get, from tests/planner/test_agreement_matrix.py. *Flat buffer* is each
rank's slice of a flat buffer that `FSDPFlatBuffer` describes, which only a layout tells from a bare
tensor. All storages give the same.
"""


def document(folder: Path) -> str:
    columns = list(itertools.product(SOURCES, (True, False)))
    heads = [f"{source}, {'model' if model else 'no model'}" for source, model in columns]
    lines = [f"| value | under | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for kind, place in itertools.product(VALUES, PLACES):
        row = []
        for source, model in columns:
            found = {
                known(folder, cell)
                for cell in CELLS
                if (cell[0], cell[1], cell[2], cell[4]) == (kind, place, source, model)
            }
            row.append(" / ".join(sorted(found)))
        lines.append(f"| {kind} | {place} | {' | '.join(row)} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


def test_the_document_says_what_happens(folder: Path) -> None:
    text = document(folder)
    if os.environ.get("SHARDPLAN_WRITE_DOCS"):
        DOCUMENT.write_text(text)
    assert text == DOCUMENT.read_text()
