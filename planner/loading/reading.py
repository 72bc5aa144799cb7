"""What a checkpoint holds, as a load asks for it: keys, chunks that meet a box, coverage."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardplan.layouts import CheckpointError, DamagedCheckpointError, ShapeMismatchError
from shardplan.layouts.coverage import tiling_faults
from shardplan.layouts.model import clean_name
from shardplan.layouts.slab import Shape

from ..planning.manifest import Stored
from ..planning.metadata import UNPADDED, StoredInParts


class Meeting(NamedTuple):
    """The part of a saved chunk that lies in a requested box.

    Attributes:
        chunk: Position of the chunk in the tensor's chunk list.
        chunk_offsets: Offsets of the chunk in the global tensor.
        storage_offsets: First element of the part, relative to the chunk.
        dest_offsets: First element of the part, relative to the box.
        sizes: Extent of the part.
    """

    chunk: int
    chunk_offsets: torch.Size
    storage_offsets: torch.Size
    dest_offsets: torch.Size
    sizes: torch.Size


class Saved:
    """A checkpoint's metadata with the look-ups that a load needs.

    Attributes:
        stored: What is stored under each key.

    Args:
        metadata: The metadata that the storage reader read.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.stored: Mapping[str, Stored] = metadata.state_dict_metadata
        paths = metadata.planner_data
        listed = paths.get(UNPADDED, ()) if isinstance(paths, dict) else ()
        self._unpadded: frozenset[str] = frozenset(listed)
        places = metadata.storage_data
        self._places: Mapping[Any, Any] = places if isinstance(places, Mapping) else {}
        self._clean: dict[str, list[str]] | None = None
        self._rivals: dict[str, set[str]] = {}
        self._indexes: dict[int, _ChunkIndex] = {}

    def same_places(self, keys: Sequence[str], others: Sequence[str]) -> bool:
        """Returns whether two lists of keys lie at the same places: one stored copy, two names."""
        return len(keys) == len(others) and all(map(self._same_place, keys, others))

    def _same_place(self, key: str, other: str) -> bool:
        a, b = self.stored[key], self.stored[other]
        if not isinstance(a, TensorStorageMetadata) or a != b:
            return False
        for chunk in a.chunks:
            place = self._places.get(MetadataIndex(key, chunk.offsets))
            if place is None or place != self._places.get(MetadataIndex(other, chunk.offsets)):
                return False
        return True

    def files(self, key: str) -> list[str]:
        """Returns the names of the files that hold a tensor's chunks, as far as the reader says."""
        stored = self.stored[key]
        chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else ()
        places = (self._places.get(MetadataIndex(key, chunk.offsets)) for chunk in chunks)
        names = (getattr(place, "relative_path", None) for place in places)
        return sorted({name for name in names if isinstance(name, str)})

    def tell_apart(self, keys: Iterable[str]) -> None:
        """Takes keys that a load asks for, of which some are equal but for wrappers' tokens.

        Those come back from `key` under their exact names only.
        """
        asked = list(keys)
        tokens = {clean_name(key) for key in asked if "module" in key or "_orig_mod" in key}
        alike: dict[str, set[str]] = {}
        for key in asked if tokens else ():
            clean = clean_name(key)
            if clean in tokens:
                alike.setdefault(clean, set()).add(key)
        self._rivals = {clean: found for clean, found in alike.items() if len(found) > 1}

    def rivals(self, key: str) -> bool:
        """Returns whether a load asks for another key that is this one but for wrappers' tokens."""
        return bool(self._rivals) and clean_name(key) in self._rivals

    def key(self, key: str) -> str | None:
        """Returns the name that the checkpoint has for a key, wrappers' tokens aside.

        Raises:
            CheckpointError: If it has two such names, neither of which is the key, or one that
                may be of this key or of another that is asked for.
        """
        if key in self.stored:
            return key
        clean = clean_name(key)
        names = self._named_like(clean)
        rivals = self._rivals.get(clean, ())
        if rivals:
            names = [name for name in names if name not in rivals]
            if names:
                raise CheckpointError(
                    f"{key}: the checkpoint has {names[0]}, which may be this key or "
                    f"{min(rivals - {key})}: all are one name but for wrappers' tokens. Wrap the "
                    "model as it was when it was saved, and load its state_dict() without model=."
                )
            return None
        for name in names[1:]:
            if not self.same_places(names[:1], [name]):
                raise CheckpointError(
                    f"{key}: the checkpoint has {names[0]} and {name}, which are both this name but "
                    "for wrappers' tokens. Save it under one name only."
                )
        return names[0] if names else None

    def _named_like(self, clean: str) -> list[str]:
        if isinstance(self.stored, StoredInParts):
            return self.stored.named_like(clean)
        if self._clean is None:
            self._clean = {}
            for name in self.stored:
                self._clean.setdefault(clean_name(name), []).append(name)
        return self._clean.get(clean, [])

    def unpadded(self, key: str) -> bool:
        """Returns whether a key of the checkpoint is a tensor that was saved without its padding."""
        if isinstance(self.stored, StoredInParts):
            return self.stored.unpadded(key)
        return key in self._unpadded

    def below(self, prefix: str, known: Iterable[Iterable[str]] = ()) -> list[str]:
        """Returns the keys with a prefix.

        Args:
            prefix: The prefix.
            known: For each value below it that is of interest, keys that it may have. If each has
                one of them, no other part of the checkpoint is looked into; by default all are.
        """
        if not isinstance(self.stored, StoredInParts):
            return [key for key in self.stored if key.startswith(prefix)]
        asked = [any(key in self.stored for key in keys) for keys in known]
        return list(self.stored.below(prefix, read=bool(asked) and all(asked)))

    def meetings(self, key: str, offsets: Shape, sizes: Shape) -> tuple[list[Meeting], list[str]]:
        """Returns the saved parts that fill a box, and what of it the checkpoint does not have.

        Args:
            key: A key of the checkpoint that holds a tensor.
            offsets: First element of the box in the global tensor.
            sizes: Extent of the box.
        """
        stored = self.stored[key]
        assert isinstance(stored, TensorStorageMetadata)  # callers ask for tensors only
        ndim = len(stored.size)
        for chunk in stored.chunks if id(stored.chunks) not in self._indexes else ():
            if len(chunk.offsets) != ndim or len(chunk.sizes) != ndim:
                raise DamagedCheckpointError(
                    f"{key}: a chunk at {tuple(chunk.offsets)} of sizes {tuple(chunk.sizes)} in a "
                    f"tensor of shape {tuple(stored.size)}: its metadata is damaged, or was written "
                    "by a faulty planner. Save it again, or load another checkpoint."
                )
        if ndim != len(offsets):
            raise ShapeMismatchError(
                f"{key}: size mismatch: the checkpoint has {ndim} dims (shape {tuple(stored.size)}), "
                f"and {len(offsets)} are asked for. Is it another model?"
            )
        index = self._indexes.get(id(stored.chunks))
        if index is None:
            index = self._indexes[id(stored.chunks)] = _ChunkIndex(stored.chunks)
        return index.fill(offsets, sizes)


class _ChunkIndex:
    """The chunks of a tensor in the order of their start on the dim that tells most apart."""

    def __init__(self, chunks: list[ChunkStorageMetadata]) -> None:
        self._chunks = chunks
        self._known: dict[tuple[Shape, Shape], tuple[list[Meeting], list[str]]] = {}
        ndim = len(chunks[0].offsets) if chunks else 0
        self._dim = max(
            range(ndim), key=lambda d: len({c.offsets[d] for c in chunks}), default=None
        )
        dim = self._dim
        if dim is None:
            self._order = list(range(len(chunks)))
            return
        self._order = sorted(range(len(chunks)), key=lambda i: chunks[i].offsets[dim])
        self._starts = [chunks[i].offsets[dim] for i in self._order]
        stops = (chunks[i].offsets[dim] + chunks[i].sizes[dim] for i in self._order)
        self._reach = list(accumulate(stops, max))

    def _near(self, offsets: Shape, sizes: Shape) -> Iterable[int]:
        """Returns the chunks that may meet a box, by their range on the index's dim."""
        if self._dim is None:
            return self._order
        start = offsets[self._dim]
        first = bisect_right(self._reach, start)
        last = bisect_left(self._starts, start + sizes[self._dim])
        return self._order[first:last]

    def fill(self, offsets: Shape, sizes: Shape) -> tuple[list[Meeting], list[str]]:
        """Returns the parts of chunks that fill a box, and what of it no chunk has."""
        known = self._known.get((offsets, sizes))
        if known is None:
            found, faults = self.meetings(offsets, sizes), []
            if len(found) > 1 or sum(m.sizes.numel() for m in found) != math.prod(sizes):
                parts = ((m.dest_offsets, m.sizes) for m in found)
                faults = tiling_faults(sizes, parts, offsets, "no chunk")
            known = self._known[offsets, sizes] = (found, faults)
        return known

    def meetings(self, offsets: Shape, sizes: Shape) -> list[Meeting]:
        """Returns the parts of chunks that lie in a box."""
        found = []
        for number in self._near(offsets, sizes):
            chunk = self._chunks[number]
            starts = tuple(map(max, chunk.offsets, offsets))
            extent = tuple(
                min(co + cs, o + s) - start
                for co, cs, o, s, start in zip(
                    chunk.offsets, chunk.sizes, offsets, sizes, starts, strict=True
                )
            )
            if all(size > 0 for size in extent):
                found.append(
                    Meeting(
                        number,
                        chunk.offsets,
                        torch.Size(a - b for a, b in zip(starts, chunk.offsets, strict=True)),
                        torch.Size(a - b for a, b in zip(starts, offsets, strict=True)),
                        torch.Size(extent),
                    )
                )
        return found
