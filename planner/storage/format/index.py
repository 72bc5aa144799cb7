"""Which pipeline stage may have a key: a small index, so that a rank reads the parts it needs.

| name | is |
|---|---|
| `KeyIndex` | the index of a checkpoint of several stages, part of `checkpoint.json` |

The index holds 4 bytes for each name of a parameter, whatever it has in optimizer slots and however
many ranks there are. It may name a stage that lacks the key, about once in 2^32 / names questions, and
then a part is read in vain. It never leaves out one that has it.
"""

import base64
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from shardplan.layouts.model import WRAPPERS, clean_name

Around = tuple[str, str]


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Which pipeline stage may have a key.

    Attributes:
        arounds: What stands before and behind a name in keys.
        names: For each stage the hashes of its names, ascending, as little-endian numbers of 4
            bytes. A key that belongs to no parameter is a name too.
    """

    arounds: tuple[Around, ...]
    names: tuple[bytes, ...]
    _sorted: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, arounds: Iterable[Around], names: Iterable[Iterable[str]]) -> "KeyIndex":
        """Returns the index of stages.

        Args:
            arounds: What stands around names in the keys of all stages.
            names: The names of each stage.
        """
        told = dict.fromkeys([("", ""), *arounds])
        told.update(dict.fromkeys(map(_clean, list(told))))
        hashes = []
        for stage in names:
            distinct = dict.fromkeys(stage)
            distinct.update(dict.fromkeys(map(clean_name, list(distinct))))
            found = np.fromiter(map(_hash, distinct), dtype="<u4", count=len(distinct))
            hashes.append(np.unique(found).tobytes())
        return cls(tuple(told), tuple(hashes))

    def stages(self, key: str) -> list[int]:
        """Returns the stages that may have a key, or one that is this key but for wrappers' tokens."""
        if not self._sorted:
            self._sorted.extend(np.frombuffer(raw, dtype="<u4") for raw in self.names)
        hashes = [
            _hash(key[len(before) : len(key) - len(after)])
            for before, after in self.arounds
            if len(before) + len(after) <= len(key)
            and key.startswith(before)
            and key.endswith(after)
        ]
        return [
            number
            for number, own in enumerate(self._sorted)
            if any((at := bisect_left(own, h)) < len(own) and own[at] == h for h in hashes)
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns the index as plain data."""
        return {
            "around": [list(pair) for pair in self.arounds],
            "names": [base64.b64encode(raw).decode() for raw in self.names],
        }

    @classmethod
    def from_json(cls, data: Any, stages: int) -> "KeyIndex":
        """Returns the index that `to_json` wrote.

        Args:
            data: The plain data.
            stages: How many stages there are.

        Raises:
            ValueError: If the data is no index of that many stages.
        """
        arounds: Sequence[Any] = [tuple(pair) for pair in data["around"]]
        if not all(len(a) == 2 and all(type(text) is str for text in a) for a in arounds):
            raise ValueError("around a name stands no text")
        names = [base64.b64decode(str(text), validate=True) for text in data["names"]]
        if len(names) != stages:
            raise ValueError(f"an index of {len(names)} stages for {stages}")
        for raw in names:
            hashes = np.frombuffer(raw, dtype="<u4")  # ValueError if it ends within a number
            if not bool(np.all(hashes[1:] > hashes[:-1])):
                raise ValueError("an index that does not ascend")
        return cls(tuple(arounds), tuple(names))


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) & 0xFFFFFFFF


def _clean(around: Around) -> Around:
    """Returns what stands around a name without wrappers' tokens."""
    before = [token for token in around[0].split(".") if token not in WRAPPERS]
    after = [token for token in around[1].split(".") if token not in WRAPPERS]
    return ".".join(before), ".".join(after)
