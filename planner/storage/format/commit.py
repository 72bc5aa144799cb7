"""`checkpoint.json`: the one file that makes a checkpoint complete, and what it says.

| name | is |
|---|---|
| `Commit` | the contents of `checkpoint.json` |
| `read_commit` | reads it, None where there is no complete checkpoint |
| `data_name`, `part_name` | names of a save's files |

Complete is defined once: `checkpoint.json` names a save, and all of that save's files, one for each
rank and one part for each pipeline stage, stand in the folder of its name. The file is written last
and appears whole, so a save that ends before has not touched the checkpoint that was there.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from shardplan.layouts import CheckpointError

from ...planning.manifest import Kind, Members
from ..places.files import Files
from .header import FORMAT_VERSION, SAVE_DIGITS, check_version
from .index import KeyIndex
from .part import MAX_RANKS, bits_from_text, bits_to_text, kind_from_json, kind_to_json
from .sums import block_sum

CHECKPOINT = "checkpoint.json"
FORMAT = "shardplan.checkpoint"
_SAVE = re.compile(r"[0-9a-f]{16}\Z")

Groups = dict[Kind, Members]


def is_save(name: str) -> bool:
    """Returns whether a name can be a save's id; no other text becomes part of a path."""
    return len(name) == SAVE_DIGITS and _SAVE.match(name) is not None


def data_name(save: str, place: int, ranks: int) -> str:
    """Returns the name of the data file of the rank at a place."""
    return f"{save}/{place:05d}-of-{ranks:05d}.safetensors"


def part_name(save: str, stage: int) -> str:
    """Returns the name of the manifest's part of a pipeline stage."""
    return f"{save}/stage-{stage:05d}.json"


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a checkpoint complete.

    Attributes:
        save: Id of the save, and name of its folder.
        ranks: How many ranks wrote a file.
        parts: Checksum of each pipeline stage's part, 16 hexadecimal digits.
        groups: For each stage the values that the ranks other than its first vouch for.
        places: For each chunk of the model the place of the rank at each position of its dense
            and its expert grid; None where place and position are equal.
        numbers: Rank of each place, None where they are equal.
        index: Which stage may have a key; None of a single stage.
        nbytes: Size of `checkpoint.json` where it was read.
    """

    save: str
    ranks: int
    parts: tuple[str, ...]
    groups: tuple[Groups, ...] = ()
    places: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()
    numbers: tuple[int, ...] | None = None
    index: KeyIndex | None = None
    nbytes: int = field(default=0, compare=False)

    def rank(self, place: int) -> int:
        """Returns the rank that was at a place when the checkpoint was saved."""
        return place if self.numbers is None else self.numbers[place]

    def place(self, chunk: int, family: str, position: int) -> int:
        """Returns the place of the rank at a position of one of its grids."""
        tables = self.places[chunk] if chunk < len(self.places) else (None, None)
        table = tables[1 if family == "expert" else 0]
        return position if table is None else table[position]

    def encode(self) -> bytes:
        """Returns the contents of `checkpoint.json`."""
        body = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "save": self.save,
            "ranks": self.ranks,
            "parts": list(self.parts),
            "groups": [groups_to_json(groups) for groups in self.groups],
            "places": [list(map(_listed, tables)) for tables in self.places],
            "numbers": _listed(self.numbers),
            "index": None if self.index is None else self.index.to_json(),
        }
        return json.dumps({**body, "sum": _sum(body)}, separators=(",", ":")).encode()


def groups_to_json(groups: Groups) -> list[Any]:
    """Returns groups as plain data."""
    return [[*kind_to_json(kind), bits_to_text(members)] for kind, members in groups.items()]


def groups_from_json(data: Any) -> Groups:
    """Returns the groups that `groups_to_json` wrote.

    Raises:
        ValueError: If the data is none.
    """
    return {
        kind_from_json(row[:5], MAX_RANKS): bits_from_text(row[5], MAX_RANKS * 8) for row in data
    }


def _listed(table: tuple[int, ...] | None) -> list[int] | None:
    return None if table is None else list(table)


def _sum(body: dict[str, Any]) -> str:
    return block_sum(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hex()


def parse(where: str, raw: bytes) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
        CheckpointError: If the bytes are none.
    """
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: no JSON, so damaged or no file of this format: {error}"
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: no JSON object, so no file of this format")
    return data


def read_commit(files: Files) -> Commit | None:
    """Returns what makes a checkpoint complete, None where there is no complete checkpoint.

    Raises:
        CheckpointError: If the file is damaged, of a newer version, or impossible.
    """
    raw = files.read(CHECKPOINT)
    if raw is None:
        return None
    where = f"{files.root}/{CHECKPOINT}"
    data = parse(where, raw)
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{where}: its format is {data.get('format')!r}, not {FORMAT!r}")
    check_version(where, data.get("version"))
    try:
        told = data.pop("sum")
        if told != _sum(data):
            raise CheckpointError(f"{where}: its checksum is {told}, its contents say {_sum(data)}")
        return _commit(data, len(raw))
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{where}: impossible contents: {error!r}") from None


def _commit(data: dict[str, Any], nbytes: int) -> Commit:
    save, ranks, parts = data["save"], data["ranks"], tuple(data["parts"])
    if not isinstance(save, str) or not is_save(save):
        raise ValueError(f"save {save!r}")
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS or not 1 <= len(parts) <= ranks:
        raise ValueError(f"{ranks!r} ranks, {len(parts)} stages")
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("a part without a checksum")
    groups = tuple(groups_from_json(rows) for rows in data["groups"])
    places = tuple(
        (_table(dense, ranks), _table(expert, ranks)) for dense, expert in data["places"]
    )
    numbers = _table(data["numbers"], None)
    if numbers is not None and len(numbers) != ranks:
        raise ValueError(f"{len(numbers)} rank numbers for {ranks} ranks")
    told = data["index"]
    index = None if told is None else KeyIndex.from_json(told, len(parts))
    return Commit(save, ranks, parts, groups, places, numbers, index, nbytes)


def _table(data: Any, ranks: int | None) -> tuple[int, ...] | None:
    """Checks a table of places: each of them once."""
    if data is None:
        return None
    if any(type(n) is not int or n < 0 for n in data):
        raise ValueError("a place that is no number")
    if ranks is not None and sorted(data) != list(range(ranks)):
        raise ValueError(f"a table of {len(data)} places for {ranks} ranks")
    return tuple(data)
