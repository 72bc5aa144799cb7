"""The ways to save and load that are compared: ours, torch's own, other libraries, plain files.

| name | is |
|---|---|
| `Way` | what a way does; one object a rank, kept over all rounds as a training job keeps it |
| `ways` | all ways that work here, and why the others do not |

| way | saves with | loads with |
|---|---|---|
| `ours` | our planner, torch's `FileSystemWriter` | our planner, torch's `FileSystemReader` |
| `own` | our planner, our `SafetensorsWriter`, no collectives | our planner, our `SafetensorsReader` |
| `own-collectives` | the same, ranks exchange plans | the same |
| `stock`, `stock-tN` | torch's planner and `FileSystemWriter`, N threads | torch's planner and reader |
| `megatron-fsdp` | its look-up of peers' shards, then as `stock` | the same |
| `stock-hf`, `stock-hf-tN` | torch's `HuggingFaceStorageWriter`, one file a rank | its reader |
| `torch.save` | `torch.save` of the local tensors, one file a rank | `torch.load`, copied into place |
| `torch_checkpointing` | its `CheckpointManager`, synchronous | the same |
| `bytecheckpoint` | its `save` for `fsdp2`, synchronous | its `load` |
"""

import contextlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import Subject
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
)
from shardplan.planner.compat import local_tensor


class Way:
    """A way to save and load.

    Attributes:
        name: Shown in tables.
        reshards: Whether a checkpoint loads under another sharding.
        leaves_out: End of the keys that it does not save.
        subgroups: Whether some ranks can use it without the others.
    """

    name: str
    reshards = True
    leaves_out: str | None = None
    subgroups = True

    def save(self, subject: Subject, path: Path) -> None:
        """Saves a state; all ranks of the subject call it."""
        raise NotImplementedError

    def load(self, subject: Subject, path: Path) -> None:
        """Loads into a state in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what is kept between saves."""


class Ours(Way):
    """Our planner with torch's file system storage."""

    def __init__(self, threads: int = 1) -> None:
        self.name = "ours" if threads == 1 else f"ours-t{threads}"
        self._threads = threads
        self._planners: dict[int, LayoutAwareSavePlanner] = {}

    def planner(self, subject: Subject) -> LayoutAwareSavePlanner:
        """Returns the subject's planner, the same one at each save."""
        if id(subject.model) not in self._planners:
            self._planners[id(subject.model)] = LayoutAwareSavePlanner(subject.model)
        return self._planners[id(subject.model)]

    def save(self, subject: Subject, path: Path) -> None:
        dcp.save(
            subject.state,
            storage_writer=dcp.FileSystemWriter(path, thread_count=self._threads),
            planner=self.planner(subject),
            process_group=subject.group,
        )

    def load(self, subject: Subject, path: Path) -> None:
        dcp.load(
            subject.state,
            storage_reader=dcp.FileSystemReader(path),
            planner=LayoutAwareLoadPlanner(subject.model),
            process_group=subject.group,
        )

    def close(self) -> None:
        self._planners.clear()


class Own(Ours):
    """Our planner with our storage."""

    def __init__(self, collectives: bool = False, threads: int = 2) -> None:
        super().__init__()
        self.name = "own-collectives" if collectives else "own"
        self._collectives = collectives
        self._threads = threads

    def save(self, subject: Subject, path: Path) -> None:
        dcp.save(
            subject.state,
            storage_writer=SafetensorsWriter(path, threads=self._threads),
            planner=self.planner(subject),
            process_group=subject.group,
            use_collectives=self._collectives,
        )

    def load(self, subject: Subject, path: Path) -> None:
        dcp.load(
            subject.state,
            storage_reader=SafetensorsReader(path),
            planner=LayoutAwareLoadPlanner(subject.model),
            process_group=subject.group,
        )


class Stock(Way):
    """torch's planners and file system storage."""

    def __init__(self, threads: int = 1) -> None:
        self.name = "stock" if threads == 1 else f"stock-t{threads}"
        self._threads = threads

    def save(self, subject: Subject, path: Path) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=self._threads)
        dcp.save(subject.state, storage_writer=writer, process_group=subject.group)

    def load(self, subject: Subject, path: Path) -> None:
        reader = dcp.FileSystemReader(path)
        dcp.load(subject.state, storage_reader=reader, process_group=subject.group)


class MegatronFSDP(Stock):
    """Megatron-FSDP's path: each rank asks its peers for every DTensor's shards, then torch's."""

    name = "megatron-fsdp"

    def __init__(self) -> None:
        module = importlib.import_module("megatron_fsdp.uneven_dtensor")
        self._threads = 1
        self._preprocess = module.preprocess_state_dict_for_uneven_dtensor

    def save(self, subject: Subject, path: Path) -> None:
        with self._looked_up(subject):
            super().save(subject, path)

    def load(self, subject: Subject, path: Path) -> None:
        with self._looked_up(subject):
            super().load(subject, path)

    @contextlib.contextmanager
    def _looked_up(self, subject: Subject) -> Iterator[None]:
        self._preprocess(subject.state)
        try:
            yield
        finally:  # what it found is kept on the tensors, where other ways would see it
            for _, tensor in subject.tensors():
                local_tensor(tensor).__dict__.clear()


class StockHuggingFace(Way):
    """torch's planners and safetensors storage, one file a rank, not consolidated."""

    def __init__(self, threads: int = 1) -> None:
        self.name = "stock-hf" if threads == 1 else f"stock-hf-t{threads}"
        self._threads = threads

    def save(self, subject: Subject, path: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(path), save_distributed=True, thread_count=self._threads
        )
        dcp.save(_flat(subject), storage_writer=writer, process_group=subject.group)

    def load(self, subject: Subject, path: Path) -> None:
        reader = HuggingFaceStorageReader(str(path))
        dcp.load(_flat(subject), storage_reader=reader, process_group=subject.group)


def _flat(subject: Subject) -> dict[str, Any]:
    """Returns all tensors in one dict: safetensors files know no nesting."""
    return dict(subject.tensors())


class TorchSave(Way):
    """`torch.save` of what each rank holds: no planning, no resharding, the floor people use."""

    name = "torch.save"
    reshards = False

    def save(self, subject: Subject, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{dist.get_rank(subject.group)}.pt"
        with file.open("wb") as stream:
            torch.save(dict(subject.locals()), stream)
            stream.flush()
            os.fsync(stream.fileno())
        dist.barrier(group=subject.group)

    def load(self, subject: Subject, path: Path) -> None:
        file = path / f"{dist.get_rank(subject.group)}.pt"
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        for key, local in subject.locals():
            local.copy_(loaded[key])
        dist.barrier(group=subject.group)


class TorchCheckpointing(Way):
    """The library `torch_checkpointing`, synchronous.

    It exchanges metadata on GPUs only, so without one it can't reshard. Its default, O_DIRECT,
    fails on file systems that take no unaligned writes (ext4); there it writes through the cache.

    Args:
        folder: Where checkpoints will lie.
    """

    name = "torch_checkpointing"
    subgroups = False

    def __init__(self, folder: Path) -> None:
        self._direct = _takes_direct_writes(folder)
        self._library = importlib.import_module("torch_checkpointing")
        self.reshards = torch.cuda.is_available()
        self._manager: Any = None

    def config(self) -> Any:
        """Returns how its manager saves."""
        return self._library.SyncCheckpointSaverConfig()

    def manager(self) -> Any:
        """Returns its manager, the same one at each save."""
        if self._manager is None:
            spec = self._library.ItemSpec()
            if self.reshards:
                module = importlib.import_module("torch_checkpointing.default_resharder")
                spec = self._library.ItemSpec(resharder=module.DefaultResharder())
            files = importlib.import_module("torch_checkpointing.storage.filesystem")
            config = self._library.CheckpointManager.Config(
                items={"model": spec, "optimizer": spec},
                save=self.config(),
                storage_config=files.LocalFileSystemStorageConfig(use_direct_io=self._direct),
            )
            self._manager = self._library.CheckpointManager(config)
        return self._manager

    def save(self, subject: Subject, path: Path) -> None:
        self.manager().save(str(path), subject.state)
        dist.barrier(group=subject.group)

    def load(self, subject: Subject, path: Path) -> None:
        self.manager().load(str(path), into=subject.state)
        dist.barrier(group=subject.group)

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


def _takes_direct_writes(folder: Path) -> bool:
    """Returns whether the file system takes writes past its cache at any length and place."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        try:
            number = os.open(Path(inside) / "trial", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                os.write(number, b"unaligned")
            finally:
                os.close(number)
        except OSError:
            return False
    return True


class ByteCheckpoint(Way):
    """The library `bytecheckpoint`; it asserts a torch below 2.6, which is told to it here."""

    name = "bytecheckpoint"
    leaves_out = ".step"
    subgroups = False

    def __init__(self) -> None:
        logging.disable(logging.WARNING)
        self._library = importlib.import_module("bytecheckpoint")

    def save(self, subject: Subject, path: Path) -> None:
        with _as_torch("2.5.0"):
            self._library.save(str(path), {"model": _Holder(subject)}, framework="fsdp2")

    def load(self, subject: Subject, path: Path) -> None:
        with _as_torch("2.5.0"):
            self._library.load(str(path), {"model": _Holder(subject)}, framework="fsdp2")


class _Holder:
    """Everything in the state as if it were a model's: its optimizer path wants a live optimizer."""

    def __init__(self, subject: Subject) -> None:
        self._tensors = {k: t for k, t in subject.tensors() if not k.endswith(".step")}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Its loader fills tensors in place."""


@contextlib.contextmanager
def _as_torch(version: str) -> Iterator[None]:
    real = torch.__version__
    torch.__version__ = version  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.__version__ = real


def ways(threads: int, wanted: list[str], folder: Path) -> tuple[list[Way], dict[str, str]]:
    """Returns the ways that work here, and for the others why not.

    Args:
        threads: Threads of the ways that are measured with more than one, too.
        wanted: Names to keep; all if empty.
        folder: Where checkpoints will lie.
    """
    made: dict[str, Callable[[], Way]] = {
        "ours": Ours,
        f"ours-t{threads}": lambda: Ours(threads),
        "own": lambda: Own(threads=threads),
        "own-collectives": lambda: Own(collectives=True, threads=threads),
        "stock": Stock,
        f"stock-t{threads}": lambda: Stock(threads),
        "megatron-fsdp": MegatronFSDP,
        "stock-hf": StockHuggingFace,
        f"stock-hf-t{threads}": lambda: StockHuggingFace(threads),
        "torch.save": TorchSave,
        "torch_checkpointing": lambda: TorchCheckpointing(folder),
        "bytecheckpoint": ByteCheckpoint,
    }
    found: list[Way] = []
    missing: dict[str, str] = {}
    for name, make in made.items():
        if wanted and name not in wanted:
            continue
        try:
            found.append(make())
        except (ImportError, RuntimeError, AssertionError, TypeError) as error:
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    unknown = set(wanted) - made.keys()
    if unknown:
        raise SystemExit(f"no such way: {sorted(unknown)}; there are {sorted(made)}")
    return found, missing
