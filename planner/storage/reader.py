"""The storage reader: exact byte ranges of the files that a rank needs, and of no other.

| name | is |
|---|---|
| `SafetensorsReader` | a `StorageReader` for `dcp.load` |
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardplan.layouts import CheckpointError, IncompleteCheckpointError, MissingKeyError

from ..planning.manifest import Extra
from ..state.values import classes_in, to_bytes
from ..without_gc import without_gc
from .buffers import DEFAULT_NBYTES, Buffers
from .folder import check_alone
from .format.commit import CHECKPOINT, Commit, read_commit
from .format.plain import from_plain
from .places.files import Files, files_at
from .reading.catalogue import Catalogue, metadata_of
from .reading.datafile import DataFile
from .reading.fetch import Fetch
from .reading.owners import Owners
from .reading.segments import Allowance, Verify, segments_of
from .reading.shared import SharedRead
from .reading.stats import Stats
from .reading.wanted import Part, Want
from .unfinished import unfinished


class _Refused(Mapping[str, Any]):
    """What is stored where nothing can be read: any use of it raises why."""

    def __init__(self, error: CheckpointError) -> None:
        self._error = error

    def __getitem__(self, key: str) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        raise self._error


class _Asked(NamedTuple):
    """A read item, and what it asks for: the stored form of its key, and a chunk if a tensor's."""

    item: ReadItem
    stored: Any
    chunk: ChunkStorageMetadata | None


class _File(NamedTuple):
    """A data file: the place of the rank that wrote it, and whether it is its second one."""

    place: int
    late: bool


class SafetensorsReader(StorageReader):
    """Reads checkpoints of `SafetensorsWriter`, at any number of ranks.

    Each rank reads the manifest, computes which ranks' files have what it needs, and reads exactly
    that; no rank sends anything. A process without a process group reads any checkpoint.

    Args:
        path: A folder, or a URL that fsspec knows.
        verify: Whether checksums are compared. True compares every block that is read whole, and
            reads the rest of others while that stays cheap (chunks of at most 4 KiB; else 1/256 of
            what the load needs); `"all"` reads the rest of every block; False compares nothing.
        gap_bytes: Bytes between two wanted runs of a chunk that are read along with them, by default
            1 MiB behind a URL and else none. 0 reads what is needed and nothing else; a box of
            columns then takes one call for each of its rows, and where files come from a page cache
            or a fast disk, more (64 KiB, say) is quicker.
        threads: How many reads are made at once.
        buffer_bytes: Host memory for what can't be read where it belongs, in bytes.
        broadcast: A process group whose ranks load the same, such as the replicas of HSDP: each
            reads a share and broadcasts it. All of them must call `dcp.load`.

    Attributes:
        stats: What the last load read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = True,
        gap_bytes: int | None = None,
        threads: int = 4,
        buffer_bytes: int = DEFAULT_NBYTES,
        broadcast: Any = None,
    ) -> None:
        self.path = path
        self._group = broadcast
        self.stats = Stats()
        self._verify: Verify = verify
        self._gap_bytes = gap_bytes
        self._threads = threads
        self._buffer_bytes = buffer_bytes
        self._files: Files | None = None
        self._commit: Commit | None = None
        self._catalogue: Catalogue | None = None
        self._owners: Owners | None = None
        self._refused: CheckpointError | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's path or URL."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether a path or URL holds a checkpoint of this format."""
        try:
            files = files_at(checkpoint_id)
            return any(files.read(name) is not None for name in files.published())
        except (CheckpointError, OSError, ValueError, TypeError):
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from another path if one is given."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self.stats = Stats()
        self._commit = self._catalogue = self._owners = self._refused = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Returns the metadata of the checkpoint, made from its layouts as keys are asked for.

        It raises as soon as it is used, an `IncompleteCheckpointError` if there is no complete
        checkpoint, another `CheckpointError` if `checkpoint.json` is damaged or of a newer version,
        or another format's checkpoint lies beside it.
        """
        # DCP looks for a parameter named kwargs and would ask again for this rank's own metadata.
        try:
            return self._read_metadata()
        except CheckpointError as error:
            # DCP would catch the error and raise an AssertionError in its place.
            self._refused = error
            return Metadata(_Refused(error))  # type: ignore[arg-type]

    def _read_metadata(self) -> Metadata:
        files = self._files = files_at(self.path)
        commit = read_commit(files)
        check_alone(files, commit)
        if commit is None:
            left = "".join(f" {text}." for text in unfinished(files))
            raise IncompleteCheckpointError(
                f"{files.root}: no complete checkpoint: there is no {CHECKPOINT}.{left} A save that "
                "did not end well leaves none; a stock DCP checkpoint (with a .metadata) is loaded "
                "with checkpoint_id= and without storage_reader=."
            )
        self.stats = Stats(manifest=commit.nbytes)
        catalogue = Catalogue(commit)
        self._commit, self._catalogue, self._owners = commit, catalogue, Owners(commit)
        return metadata_of(catalogue, self.path)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raises what `read_metadata` found wrong.

        Raises:
            CheckpointError: See `read_metadata`.
        """
        if self._refused is not None:
            raise self._refused

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what a plan asks for into the planner's tensors.

        Raises:
            CheckpointError: If a file is missing, damaged or of another save, or does not have
                what the manifest says.
        """
        if self._commit is None:
            self._read_metadata()
        with without_gc():
            if self._group is None:
                self._read(self._by_file(plan.items), planner)
            else:
                self._read_shared(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_shared(self, items: Sequence[ReadItem], planner: Any) -> None:
        """Reads a share of what the ranks of a group need, and exchanges it with them."""
        shared = SharedRead(planner, self._group, items)
        failure: Exception | None = None
        try:
            self._read(self._by_file(shared.own), shared)
        except Exception as error:
            failure = error
        shared.finish(failure)

    def _by_file(self, items: Iterable[ReadItem]) -> dict[_File, list[_Asked]]:
        """Returns the items, and what they ask for, by the file that they are in."""
        owners, catalogue = self._owners, self._catalogue
        found: dict[_File, list[_Asked]] = {}
        assert owners is not None and catalogue is not None  # read_metadata came before
        for item in items:
            key = item.storage_index.fqn
            try:
                stage, origin = catalogue.origin(key)
            except KeyError:
                raise MissingKeyError(f"{key}: not in the checkpoint {self.path}") from None
            stored, chunk, offsets = catalogue[key], None, None
            if item.type is not LoadItemType.BYTE_IO:
                assert isinstance(
                    stored, TensorStorageMetadata
                )  # the planner asks for tensors only
                chunk = _chunk(stored, item.storage_index)
                offsets = chunk.offsets
            place = owners.place(stage, origin, key, offsets)
            late = isinstance(origin, Extra) and origin.late
            found.setdefault(_File(place, late), []).append(_Asked(item, stored, chunk))
        return dict(sorted(found.items()))

    def _read(self, by_file: dict[_File, list[_Asked]], planner: Any) -> None:
        commit, files = self._commit, self._files
        assert commit is not None and files is not None  # read_metadata came before
        buffers = Buffers(self._buffer_bytes, torch.cuda.is_available())
        allowance = Allowance(self._verify)
        opened: list[DataFile] = []
        expected = 0
        try:
            with Fetch(planner, buffers, self._threads, self.stats) as fetch:
                for (place, late), asked in by_file.items():
                    file = DataFile(files, commit, place, self.stats, expected, late)
                    opened.append(file)
                    expected = file.header.data_start
                    self._check(file)
                    values = [a.item for a in asked if a.chunk is None]
                    if values:
                        self._read_values(file, values, planner)
                    parts = _parts(file, asked)
                    segments = segments_of(
                        parts,
                        buffers.size,
                        file.file.gap if self._gap_bytes is None else self._gap_bytes,
                        self._verify,
                        allowance,
                        file.table_of,
                        self.stats,
                    )
                    fetch.read(file.file, file.where, segments)
                fetch.wait()
        finally:
            for file in opened:
                file.file.close()

    def _check(self, file: DataFile) -> None:
        """Checks that the rank which wrote a file planned the checkpoint of its stage."""
        facts = file.header.facts
        stage = facts.get("stage")
        commit = self._commit
        assert commit is not None  # read_metadata came before
        if type(stage) is not int or not 0 <= stage < len(commit.stages):
            raise CheckpointError(f"{file.where}: names pipeline stage {stage!r}")
        digest = commit.digests[stage]
        if facts.get("digest") != digest:
            raise CheckpointError(
                f"{file.where}: rank {file.rank} planned another checkpoint than the first rank of "
                f"its pipeline stage {stage}, whose manifest this is "
                f"({facts.get('digest')}, {digest})"
            )

    def _read_values(self, file: DataFile, items: Iterable[ReadItem], planner: Any) -> None:
        """Hands Python values to the planner."""
        values = file.values(bool(self._verify))
        for item in items:
            key = item.storage_index.fqn
            if key not in values:
                raise CheckpointError(
                    f"{file.where}: rank {file.rank} did not write {key}, though the manifest says "
                    "so. The ranks of this save did not hold the same values."
                )
            data = values[key]

            def read(like: Any, key: str = key, data: Any = data) -> Any:
                return from_plain(key, data, classes_in(like))

            if hasattr(planner, "load_value"):
                planner.load_value(item, read)
            else:
                planner.load_bytes(item, to_bytes(key, read(None)))


def _chunk(stored: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """Returns the saved chunk that an index names."""
    number = index.index
    if number is not None and number < len(stored.chunks):
        chunk = stored.chunks[number]
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    return next(c for c in stored.chunks if c.offsets == index.offset)


def _parts(file: DataFile, asked: Iterable[_Asked]) -> list[Part]:
    """Returns what is wanted of a file's chunks."""
    parts: dict[str, Part] = {}
    wants: dict[tuple[str, Any, Any], Want] = {}
    for item, stored, chunk in asked:
        if chunk is None:
            continue
        name, part = file.part(item.storage_index.fqn, chunk, stored.properties.dtype)
        part = parts.setdefault(name, part)
        box = (name, item.storage_offsets, item.lengths)
        want = wants.get(box)
        if want is None:
            want = wants[box] = Want(item.storage_offsets, item.lengths)
            part.wants.append(want)
        want.items.append(item)
    return list(parts.values())
