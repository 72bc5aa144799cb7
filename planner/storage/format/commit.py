"""`checkpoint.json`: the one file that makes a checkpoint complete, and all that it says.

Complete is defined once: the file names a save, and that save's data files stand in the folder of
its name. It is written last and appears whole, so a save that ends before has not touched the
checkpoint that was there. FORMAT.md describes the fields.
"""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardplan.layouts import CheckpointError, DamagedCheckpointError

from ...planning.manifest import Extra, StageManifest
from ...planning.ownership import OWNERSHIP_VERSION, Ownership
from ..places.files import Files
from ..places.place import CHECKPOINT, WITHDRAWN
from .header import FORMAT_VERSION, SAVE_DIGITS, check_version
from .manifest import (
    MAX_RANKS,
    extra_from_json,
    extra_to_json,
    manifest_from_json,
    manifest_to_json,
)
from .sums import block_sum

FORMAT = "shardplan.checkpoint"
_SAVE = re.compile(r"[0-9a-f]{16}\Z")


def is_save(name: str) -> bool:
    """Returns whether a name can be a save's id; no other text becomes part of a path."""
    return len(name) == SAVE_DIGITS and _SAVE.match(name) is not None


def data_name(save: str, place: int, ranks: int, late: bool = False) -> str:
    """Returns the name of a data file of the rank at a place: its first, or its second."""
    return f"{save}/{place:05d}-of-{ranks:05d}{'-late' if late else ''}.safetensors"


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a checkpoint complete.

    Attributes:
        save: Id of the save, and name of its folder.
        ranks: How many ranks wrote a file.
        stages: The manifest of each pipeline stage; `extras` of the first has those of all.
        digests: Digest of each stage's layouts.
        places: For each chunk of the model the place of the rank at each position of its dense
            and its expert grid; None where place and position are equal.
        numbers: Rank of each place, None where they are equal.
        ownership: The numbers by which the ranks divided the chunks among them.
        nbytes: Size of `checkpoint.json` where it was read.
    """

    save: str
    ranks: int
    stages: tuple[StageManifest, ...]
    digests: tuple[str, ...]
    places: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()
    numbers: tuple[int, ...] | None = None
    ownership: Ownership = field(default_factory=Ownership.current)
    nbytes: int = field(default=0, compare=False)

    def rank(self, place: int) -> int:
        """Returns the rank that was at a place when the checkpoint was saved."""
        return place if self.numbers is None else self.numbers[place]

    def place(self, chunk: int, family: str, position: int) -> int:
        """Returns the place of the rank at a position of one of its grids."""
        tables = self.places[chunk] if chunk < len(self.places) else (None, None)
        table = tables[1 if family == "expert" else 0]
        return position if table is None else table[position]

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The values that belong to no parameter."""
        return self.stages[0].extras

    def encode(self) -> bytes:
        """Returns the contents of `checkpoint.json`."""
        body = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "save": self.save,
            "ranks": self.ranks,
            "ownership": {"version": OWNERSHIP_VERSION, **asdict(self.ownership)},
            "stages": [
                manifest_to_json(manifest, digest)
                for manifest, digest in zip(self.stages, self.digests, strict=True)
            ],
            "extras": [extra_to_json(extra) for extra in self.extras],
            "places": [list(map(_listed, tables)) for tables in self.places],
            "numbers": _listed(self.numbers),
        }
        # The sum is of the text before it, so that nobody has to write the JSON alike.
        text = json.dumps(body, separators=(",", ":")).encode()[:-1]
        return text + b',"sum":"' + block_sum(text).hex().encode() + b'"}'


def _listed(table: tuple[int, ...] | None) -> list[int] | None:
    return None if table is None else list(table)


def parse(where: str, raw: bytes) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
        DamagedCheckpointError: If the bytes are none.
    """
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{where}: not JSON, so damaged or not a file of this format: {error}"
        ) from None
    if not isinstance(data, dict):
        raise DamagedCheckpointError(f"{where}: not a JSON object, so not a file of this format")
    return data


def read_commit(files: Files) -> Commit | None:
    """Returns what makes a checkpoint complete, None where there is no complete checkpoint.

    Raises:
        CheckpointError: If the file is damaged, of a newer version, or impossible.
    """
    for name in files.published():
        raw = files.read(name)
        if raw is not None and not raw.startswith(WITHDRAWN):
            return _commit(f"{files.root}/{name}", raw)
    return None


def _commit(where: str, raw: bytes) -> Commit:
    data = parse(where, raw)
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{where}: its format is {data.get('format')!r}, not {FORMAT!r}")
    check_version(where, data.get("version"))
    text, _, told = raw.rpartition(b',"sum":"')
    if told != block_sum(text).hex().encode() + b'"}':
        raise DamagedCheckpointError(
            f"{where}: its checksum is not that of its contents. The file is damaged; load another "
            "checkpoint."
        )
    try:
        return _checked(where, data, len(raw))
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where}: impossible contents: {error!r}") from None


def _checked(where: str, data: dict[str, Any], nbytes: int) -> Commit:
    save, ranks = data["save"], data["ranks"]
    if not isinstance(save, str) or not is_save(save):
        raise ValueError(f"save {save!r}")
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"{ranks!r} ranks")
    rules = dict(data["ownership"])
    version = rules.pop("version")
    if version != OWNERSHIP_VERSION:
        raise CheckpointError(
            f"{where}: its ranks divided the chunks by version {version} of the rules, and this "
            f"library knows version {OWNERSHIP_VERSION}. Update shardplan."
        )
    ownership = Ownership(
        *(_positive(rules[name]) for name in Ownership.__slots__)  # type: ignore[arg-type]
    )
    stages, digests = zip(
        *(manifest_from_json(stage, ranks) for stage in data["stages"]), strict=True
    )
    extras = tuple(map(extra_from_json, data["extras"]))
    writers = [e.writer for e in extras if e.boxes is None]
    writers += [place for e in extras for _, _, place in e.boxes or ()]
    if any(place is None or place >= ranks for place in writers):
        raise ValueError("an extra that no rank wrote")
    stages = (replace(stages[0], extras=extras), *stages[1:])
    places = tuple(
        (_table(dense, ranks), _table(expert, ranks)) for dense, expert in data["places"]
    )
    numbers = _table(data["numbers"], None)
    if numbers is not None and len(numbers) != ranks:
        raise ValueError(f"{len(numbers)} rank numbers for {ranks} ranks")
    return Commit(save, ranks, stages, digests, places, numbers, ownership, nbytes)


def _positive(number: Any) -> int | float:
    if type(number) not in (int, float) or not number > 0:
        raise ValueError(f"{number!r} is not a rule of ownership")
    return number  # type: ignore[no-any-return]


def _table(data: Any, ranks: int | None) -> tuple[int, ...] | None:
    """Checks a table of places: each of them once."""
    if data is None:
        return None
    if any(type(n) is not int or n < 0 for n in data):
        raise ValueError("a place that is not a number")
    if ranks is not None and sorted(data) != list(range(ranks)):
        raise ValueError(f"a table of {len(data)} places for {ranks} ranks")
    return tuple(data)


__all__ = ["CHECKPOINT", "Commit", "data_name", "is_save", "parse", "read_commit"]
