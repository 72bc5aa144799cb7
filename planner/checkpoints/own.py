"""A checkpoint in the library's own format: layouts in its manifest, checksums in its files."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError, Grid, IncompleteCheckpointError, Layout
from shardplan.layouts.slab import Shape

from ..planning.manifest import Extra
from ..planning.metadata import Origins, checkpoint_metadata
from ..state.entries import Index
from ..state.values import to_bytes
from ..storage.folder import check_alone, values_fault
from ..storage.format.commit import CHECKPOINT, data_name, read_commit
from ..storage.format.header import HEAD, Header
from ..storage.format.plain import from_plain
from ..storage.format.sums import BLOCK, block_sum, chunk_sum
from ..storage.places.files import files_at
from ..storage.reading.datafile import DataFile
from ..storage.reading.owners import Owners
from ..storage.reading.stats import Stats
from ..storage.reading.wanted import Part
from ..without_gc import without_gc
from .arrays import Array
from .files import Files
from .opened import Checkpoint, Fault

_PIECE = 8 * BLOCK
_Place = tuple[int, bool]  # of a rank, and whether its second file is meant


class OwnCheckpoint(Checkpoint):
    """A folder with `checkpoint.json`, read through the manifest's layouts.

    Args:
        path: The folder.

    Raises:
        CheckpointError: If it is not complete, damaged, or of a newer version.
    """

    format = "shardplan"

    def __init__(self, path: str) -> None:
        where = files_at(path)
        commit = read_commit(where)
        check_alone(where, commit)
        if commit is None:
            raise IncompleteCheckpointError(
                f"{path}: no complete checkpoint: there is no {CHECKPOINT}."
            )
        self._where, self._commit = where, commit
        self._origins: Origins = {}
        self.stages = commit.stages
        with without_gc():
            metadata = checkpoint_metadata(
                self.stages, origins=self._origins, rules=commit.ownership
            )
        super().__init__(path, Files(path), metadata)
        self._owners = Owners(commit)
        self._data: dict[_Place, DataFile] = {}
        self._lock = threading.RLock()

    def state_path(self, key: str) -> tuple[Any, ...]:
        path = super().state_path(key)
        return tuple(Index(e) if isinstance(e, int) else e for e in path)

    def place(self, key: str, offsets: Shape | None) -> int:
        """Returns the place of the rank that wrote a chunk, or a value that is no tensor."""
        stage, origin = self._origins[key]
        return self._owners.place(stage, origin, key, offsets)

    def layout(self, key: str, place: int) -> tuple[Layout, Grid] | None:
        """Returns the layout that a key's chunks follow, and the grid of the rank at a place.

        None for a value that belongs to no parameter, and for a place that the grid lacks.
        """
        stage, origin = self._origins[key]
        if isinstance(origin, Extra):
            return None
        number = origin.kind.chunk
        grid = self.stages[stage].chunks[number].grids.of(origin.layout.family)
        for position in range(grid.world_size):
            if self._commit.place(number, origin.layout.family, position) == place:
                sizes = dict(zip(grid.axes, grid.sizes, strict=True))
                return origin.layout, Grid.from_rank(sizes, position)
        return None

    def _place(self, key: str, offsets: Shape | None) -> _Place:
        origin = self._origins[key][1]
        return self.place(key, offsets), isinstance(origin, Extra) and origin.late

    def _file(self, place: _Place) -> DataFile:
        with self._lock:
            found = self._data.get(place)
            if found is None:
                number, late = place
                found = DataFile(self._where, self._commit, number, Stats(), late=late)
                self._data[place] = found
            return found

    def _part(self, key: str, chunk: ChunkStorageMetadata) -> tuple[_Place, Part]:
        place = self._place(key, tuple(chunk.offsets))
        return place, self._file(place).part(key, chunk, self.dtype(key))[1]

    def _places(self) -> list[_Place]:
        """Returns the data files that belong to the checkpoint."""
        late = {
            place
            for extra in self._commit.extras
            if extra.late and (place := extra.writer) is not None
        }
        first = [(place, False) for place in range(self._commit.ranks)]
        return first + [(place, True) for place in sorted(late)]

    def _name(self, place: _Place) -> str:
        return data_name(self._commit.save, place[0], self._commit.ranks, place[1])

    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        place, part = self._part(key, chunk)
        return self._name(place), part.position, part.nbytes

    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        place, part = self._part(key, chunk)
        return Array(self._name(place), part.position, part.dtype.itemsize, tuple(chunk.sizes))

    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        raise NotImplementedError  # `array` knows them all

    def load_object(self, key: str, trust_pickle: bool = False) -> Any:
        return from_plain(key, self._value(key))

    def object_bytes(self, key: str) -> bytes:
        return to_bytes(key, self.load_object(key)).getvalue()

    def _value(self, key: str) -> Any:
        values = self._file(self._place(key, None)).values(True)
        if key not in values:
            raise CheckpointError(f"{key}: not in the file of the rank that should have it.")
        return values[key]

    def file_bytes(self) -> dict[str, int]:
        names = [self._name(place) for place in self._places()]
        return {name: self.files.size(name) or 0 for name in names}

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"ranks that wrote": self._commit.ranks}
        for chunk in self.stages[0].chunks[:1]:
            for family in ("dense", "expert"):
                grid = chunk.grids.of(family)
                sizes = zip(grid.axes, grid.sizes, strict=True)
                text = ", ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
                found[f"{family} grid"] = text or "one rank"
        counts = [len(c.layouts) for stage in self.stages for c in stage.chunks]
        found["layouts"] = sum(counts)
        found["pipeline stages"] = len(self.stages)
        return found

    def structure_faults(self) -> Iterator[Fault]:
        for place in self._places():
            name = self._name(place)
            try:
                facts = self._file(place).header.facts
            except CheckpointError as error:
                yield Fault(name, str(error))
                continue
            stage = facts.get("stage")
            digests = self._commit.digests
            known = isinstance(stage, int) and 0 <= stage < len(digests)
            if not known or facts.get("digest") != digests[stage]:  # type: ignore[index]
                rank = self._commit.rank(place[0])
                yield Fault(name, f"rank {rank} planned another checkpoint than its stage's first")
            yield from self._head_faults(name, self._file(place).header)
        text = values_fault(files_at(self.path), self._commit)
        if text is not None:
            yield Fault(f"{self._commit.save}/values.distcp", text)

    def _head_faults(self, name: str, header: Header) -> Iterator[Fault]:
        """Yields what stands before a chunk for `torch.load` and is not what was written."""
        for title, entry in header.entries.items():
            if title.startswith(HEAD):
                start = header.data_start + entry.start
                raw = self.files.take(name, start, entry.stop - entry.start)
                if block_sum(raw) != header.sums[title]:
                    chunk = title.removeprefix(HEAD)
                    yield Fault(chunk, f"{name}: the checksum of its head for torch.load differs")

    def checksum_faults(self, key: str) -> Iterator[Fault]:
        stored = self.metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            try:
                self._value(key)
            except CheckpointError as error:
                yield Fault(key, str(error))
            return
        for chunk in stored.chunks:
            if not math.prod(chunk.sizes):
                continue  # nobody needs to write what has no elements
            try:
                place, part = self._part(key, chunk)
                if self._sum(self._name(place), part) != part.total:
                    text = f"{self._name(place)}: the checksum of its chunk at"
                    yield Fault(key, f"{text} {tuple(chunk.offsets)} differs")
            except CheckpointError as error:
                yield Fault(key, str(error))

    def _sum(self, name: str, part: Part) -> bytes:
        """Returns the checksum of a chunk's bytes as they are now."""
        sums = []
        for start in range(0, max(part.nbytes, 1), _PIECE):
            piece = np.empty(min(_PIECE, part.nbytes - start), dtype=np.uint8)
            if piece.nbytes:
                self.files.read(name, part.position + start, piece)
            view = piece.data
            sums += [
                block_sum(view[at : at + BLOCK]) for at in range(0, max(piece.nbytes, 1), BLOCK)
            ]
        return chunk_sum(sums)

    def close(self) -> None:
        """Closes the files."""
        super().close()
        for file in self._data.values():
            file.file.close()
        self._data = {}
