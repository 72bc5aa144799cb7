"""Files that `torch.save` wrote: one state dict, or one of each rank; plain data only."""

import io
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from shardplan.layouts import CheckpointError, DamagedCheckpointError, RanksDisagreeError
from shardplan.layouts.fsdp import dtensor_cuts
from shardplan.layouts.grid import Grid, mesh_axes
from shardplan.layouts.layout import Layout
from shardplan.layouts.provider import ParamInfo
from shardplan.layouts.slab import Shape

from ..compat import local_tensor
from ..state.entries import key_of
from ..state.snapshot import Snapshot
from .arrays import Array
from .files import Files
from .opened import Checkpoint, Fault, as_bytes
from .records import Section, damaged

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_REFUSED = re.compile(r"GLOBAL|Can only|Trying to|[Uu]nsupported (class|type)")
_RANK = re.compile(r"rank[_-]?(\d+)|(\d+)(?=\D*$)")


class TorchFiles(Checkpoint):
    """A state dict in one file, or the state dicts of several ranks in a file each.

    A DTensor counts for the rows that its rank holds. A value that is the same in all files stands
    under its key once; one that differs stands under `key.rank_0`, `key.rank_1`, …, as `PerRank`
    values do.

    Args:
        files: The folder's files.
        names: Those of the checkpoint.
        trust_pickle: Whether objects that are not plain data may be unpickled.
        folder: Whether the folder is the checkpoint, not its one file.

    Raises:
        CheckpointError: If a file is damaged, holds objects that are not plain data, or does not
            fit the others.
    """

    format = "torch"

    def __init__(
        self, files: Files, names: list[str], *, trust_pickle: bool = False, folder: bool = True
    ) -> None:
        self._names = sorted(names, key=lambda name: (_rank(name), name))
        self._objects: dict[str, Any] = {}
        self._chunks: dict[tuple[str, Shape], tuple[str, torch.Tensor]] = {}
        self._copies: dict[str, list[tuple[Shape, str, torch.Tensor]]] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        values: dict[str, dict[str, Any]] = {}
        for name in self._names:
            for where, value in _read(files, name, trust_pickle):
                key = key_of(where)
                if name in values.setdefault(key, {}):
                    raise CheckpointError(f"{files.path(name)}: two values have the key {key}.")
                values[key][name] = value
                self._paths[key] = where
        for key, found in values.items():
            self._add(key, found)
        path = files.root if folder else files.path(names[0])
        super().__init__(path, files, Metadata(self._stored, planner_data=self._paths))

    def _add(self, key: str, found: dict[str, Any]) -> None:
        """Adds a key's values from the files that have it."""
        sharded = {name for name, value in found.items() if isinstance(value, DTensor)}
        first, value = next(iter(found.items()))
        if sharded and len(sharded) != len(found):
            whole = next(name for name in found if name not in sharded)
            raise RanksDisagreeError(
                f"{key}: a part of a sharded tensor in {min(sharded)}, but a whole value in {whole}. "
                "Files of two saves were mixed: remove those of the older one."
            )
        if not sharded and any(not _equal(value, other) for other in found.values()):
            where = self._paths.pop(key)
            for name, other in found.items():
                label = f"rank_{_rank(name)}"
                each = f"{key}.{label}"
                if each in self._stored:
                    raise RanksDisagreeError(
                        f"{key}: {first} and {name} hold different values, and both are of {label}. "
                        "Open the files one by one."
                    )
                self._paths[each] = (*where, label)
                self._put(each, name, other)
            return
        for name, other in found.items():
            self._put(key, name, other)
            if not sharded:
                return

    def _put(self, key: str, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            self._objects[key] = value
            self._stored[key] = BytesStorageMetadata()
            return
        known = self._stored.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [])
        )
        assert isinstance(known, TensorStorageMetadata)  # `_add` keeps the kinds apart
        if known.size != value.shape or known.properties.dtype != value.dtype:
            raise RanksDisagreeError(
                f"{key}: {value.dtype} of shape {tuple(value.shape)} in {name}, but "
                f"{known.properties.dtype} of shape {tuple(known.size)} in another file. Files of "
                "two saves were mixed: remove those of the older one."
            )
        for offsets, part in _parts(key, name, value):
            if (key, offsets) in self._chunks:
                self._copies.setdefault(key, []).append((offsets, name, part))
                continue
            self._chunks[key, offsets] = name, part
            known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))

    def array(self, key: str, chunk: ChunkStorageMetadata) -> Array | None:
        return None

    def load_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        return self._chunks[key, tuple(chunk.offsets)][1]

    def object_bytes(self, key: str) -> bytes:
        stream = io.BytesIO()
        torch.save(self._objects[key], stream)
        return stream.getvalue()

    def file_bytes(self) -> dict[str, int]:
        return {name: self.files.size(name) or 0 for name in self._names}

    def chunk_bytes(self, key: str, chunk: ChunkStorageMetadata) -> tuple[str, int, int]:
        name, part = self._chunks[key, tuple(chunk.offsets)]
        return name, 0, part.numel() * part.element_size()

    def structure_faults(self) -> Iterator[Fault]:
        for name in self._names:
            size = self.files.size(name) or 0
            if self.files.take(name, 0, 4) != b"PK\x03\x04":
                continue  # the old form of torch.save has no checksums
            for text in damaged(self.files, name, 0, size):
                yield Fault(name, text)

    def checksum_faults(self, key: str) -> Iterator[Fault]:
        for offsets, name, part in self._copies.get(key, ()):
            other, kept = self._chunks[key, offsets]
            if not _equal(kept, part):
                yield Fault(key, f"the chunk at {offsets} differs between {other} and {name}")


def _rank(name: str) -> int:
    """Returns the rank that a file's name tells, 0 if none."""
    found = _RANK.search(name.rpartition(".")[0])
    return int(found[1] or found[2]) if found else 0


def _read(files: Files, name: str, trust_pickle: bool) -> list[tuple[Any, Any]]:
    """Returns path and value of everything in the state dict of one file."""
    where = files.path(name)
    size = files.size(name)
    if not size:
        raise DamagedCheckpointError(f"{where}: the file is empty. Restore it.")
    archive = files.take(name, 0, min(4, size)) == b"PK\x03\x04"
    # torch.load maps local files only, and takes this suffix for the format.
    local = "://" not in where and not where.endswith(".safetensors")
    try:
        loaded = torch.load(
            where if local else Section(files, name, 0, size).stream(),
            map_location="cpu",
            weights_only=not trust_pickle,
            mmap=archive and local,
        )
    except Exception as error:  # torch raises many kinds on damaged or foreign files
        lines = str(error).splitlines() or [""]
        refused = next((line for line in lines if _REFUSED.search(line)), None)
        if refused is not None and not trust_pickle:
            raise CheckpointError(
                f"{where}: holds more than tensors and plain data ({refused.strip()[:160]}). Pass "
                "trust_pickle=True (--trust-pickle) if you trust where it comes from; that runs "
                "whatever code it holds."
            ) from error
        raise DamagedCheckpointError(
            f"{where}: neither a safetensors file nor one that torch.save wrote, or damaged "
            f"({type(error).__name__}: {lines[0][:160]}). Restore the file."
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{where}: holds a {type(loaded).__name__}, not a state dict. Give a file of one."
        )
    try:
        snapshot = Snapshot(loaded)
    except RecursionError:
        raise DamagedCheckpointError(
            f"{where}: its state dict contains itself, or is nested too deep. Restore the file."
        ) from None
    return list(zip(snapshot.paths, snapshot.take_values(), strict=True))


def _parts(key: str, name: str, value: torch.Tensor) -> list[tuple[Shape, torch.Tensor]]:
    """Returns offset and elements of each box of a tensor that a file holds."""
    local = local_tensor(value).detach()
    if not isinstance(value, DTensor):
        return [((0,) * value.dim(), local)]
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(
            f"{key}: {name} does not say which rank of the mesh {tuple(mesh.shape)} wrote it. Save it "
            "from a rank that is on the mesh."
        )
    grid = Grid(mesh_axes(mesh), tuple(mesh.shape), tuple(coordinate))
    shape = tuple(value.shape)
    cuts = dtensor_cuts(ParamInfo(key, shape, grid, param=value))
    slabs = [slab for slab in Layout(key, "w", (cuts,)).slabs(grid) if slab.numel]
    if sum(slab.numel for slab in slabs) != local.numel() or (
        len(slabs) == 1 and slabs[0].sizes != tuple(local.shape)
    ):
        raise DamagedCheckpointError(
            f"{key}: {name} holds a local part of shape {tuple(local.shape)}, but by its placements "
            f"{value.placements} of shape {shape} the boxes {[slab.sizes for slab in slabs]} lie "
            f"there ({grid.facts()}). Save it again with a local part of that shape."
        )
    flat = local.contiguous().view(-1)
    return [(slab.offsets, flat.as_strided(slab.sizes, slab.strides, slab.start)) for slab in slabs]


def _equal(left: Any, right: Any) -> bool:
    """Returns whether two values are the same, bit by bit."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        if left.layout is not torch.strided or left.is_quantized:
            return _bytes(left) == _bytes(right)
        return bool((as_bytes(left.contiguous()) == as_bytes(right.contiguous())).all())
    return _bytes(left) == _bytes(right)


def _bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
