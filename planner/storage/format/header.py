"""The header of a data file: a safetensors header that also says where each chunk belongs.

The one invariant of a data file: the entries' bytes follow one another without hole or overlap,
from the end of the header to the end of the file. It is proved in one sweep of a header.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardplan.layouts import CheckpointError, DamagedCheckpointError

from .dtypes import BITS
from .sums import ALGORITHM, BLOCK, block_count

FORMAT_VERSION = 2
SUMS = "__shardplan_sums__"
VALUES = "__shardplan_values__"
HEAD = "__shardplan_torch__"  # before the name of a chunk: what torch.load needs in front of it
# safetensors refuses longer headers.
MAX_HEADER = 100_000_000
ALIGNMENT = 64
SAVE_DIGITS = 16
_MIDDLE = b'","sums":"'
_MARK = re.compile(r"@[0-9,]*$")
_PLAIN = re.compile(r"[ !#-\[\]-~]*\Z")


class Entry(NamedTuple):
    """One tensor of a data file.

    Attributes:
        code: safetensors' name of its dtype.
        shape: Its shape.
        start: First byte, counted from the end of the header.
        stop: One past its last byte.
    """

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


def chunk_name(key: str, offsets: Sequence[int]) -> str:
    """Returns the name of a chunk in its file.

    A chunk at the tensor's first element has the key itself, another has its offsets behind it.

    >>> chunk_name("model.w", (0, 0)), chunk_name("model.w", (128, 0))
    ('model.w', 'model.w@128,0')
    """
    if any(offsets) or ("@" in key and _MARK.search(key)):
        return f"{key}@{','.join(map(str, offsets))}"
    return key


def split_name(name: str, ndim: int) -> tuple[str, tuple[int, ...]]:
    """Returns key and offsets of a chunk from its name in the file.

    >>> split_name("model.w@128,0", 2)
    ('model.w', (128, 0))
    """
    if "@" in name and _MARK.search(name):
        key, _, text = name.rpartition("@")
        return key, tuple(int(number) for number in text.split(",") if number)
    return name, (0,) * ndim


class HeaderText:
    """A header being written: everything but the checksums, whose length is known.

    Args:
        entries: Name, code, shape and size in bytes of each tensor, in file order.
        facts: What the file says of itself.
        sums: How many checksums it will hold.

    Raises:
        CheckpointError: If two entries have one name, or the header becomes too long.
    """

    def __init__(
        self,
        entries: Iterable[tuple[str, str, Sequence[int], int]],
        facts: dict[str, Any],
        sums: int,
    ) -> None:
        texts, names, start = [], set(), 0
        for name, code, shape, nbytes in entries:
            stop = start + nbytes
            quoted = f'"{name}"' if _PLAIN.match(name) else json.dumps(name)
            dims = ",".join(map(str, shape))
            texts.append(
                f'{quoted}:{{"dtype":"{code}","shape":[{dims}],"data_offsets":[{start},{stop}]}}'
            )
            if name in names:
                raise CheckpointError(f"{name}: two chunks of one rank have this name and place")
            names.add(name)
            start = stop
        told = json.dumps(json.dumps(facts, separators=(",", ":")))
        self.data_nbytes = start
        self._head = f'{{"__metadata__":{{"format":"pt","shardplan":{told},"save":"'.encode()
        self._tail = ('"}' + "".join(f",{text}" for text in texts) + "}").encode()
        self._sums = sums * 16
        length = len(self._head) + SAVE_DIGITS + len(_MIDDLE) + self._sums + len(self._tail)
        self.length = -(-(length + 8) // ALIGNMENT) * ALIGNMENT - 8
        if self.length > MAX_HEADER:
            raise CheckpointError(
                f"the header of a file with {len(texts)} chunks is {self.length} bytes long, and "
                f"safetensors allows {MAX_HEADER}. Save from more ranks, or from larger tensors."
            )

    @property
    def data_start(self) -> int:
        """Position of the first data byte in the file."""
        return 8 + self.length

    @property
    def save_start(self) -> int:
        """Position of the save's id in the file."""
        return 8 + len(self._head)

    def encode(self, sums: Iterable[bytes], save: str) -> bytes:
        """Returns the first bytes of the file, up to the data."""
        told = save.encode().ljust(SAVE_DIGITS) + _MIDDLE + b"".join(sums).hex().encode()
        text = self._head + told + self._tail
        return self.length.to_bytes(8, "little") + text.ljust(self.length)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a data file, checked.

    Attributes:
        where: The file's name, for errors.
        entries: The tensors by name.
        facts: What the file says of itself, empty for another tool's file.
        sums: Checksum of each entry but the table of block checksums, by name.
        table: First block of each chunk in that table; chunks of one block are not in it.
        data_start: Position of the first data byte in the file.
        metadata: The header's own texts, as any tool may write them.
    """

    where: str
    entries: dict[str, Entry]
    facts: dict[str, Any]
    sums: dict[str, bytes]
    table: dict[str, int]
    data_start: int
    metadata: dict[str, str]


def check_version(where: str, version: Any) -> None:
    """Refuses what a newer library wrote.

    Raises:
        CheckpointError: If the version is not this library's.
    """
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: written in version {version} of the format, and this library reads "
            f"version {FORMAT_VERSION}. Update shardplan."
        )


def header_length(where: str, first: bytes, file_nbytes: int) -> int:
    """Returns the length of a header from the first 8 bytes of a file.

    Raises:
        DamagedCheckpointError: If the file is too short for it, or it is longer than safetensors allows.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > file_nbytes - 8:
        raise DamagedCheckpointError(
            f"{where}: the header should be {length} bytes long, but the file has {file_nbytes} "
            "bytes. The file is truncated, or not a safetensors file."
        )
    if length > MAX_HEADER:
        raise DamagedCheckpointError(
            f"{where}: the header should be {length} bytes long, and safetensors allows "
            f"{MAX_HEADER}. The file is damaged, or hostile."
        )
    return length


def parse_header(where: str, text: bytes, file_nbytes: int) -> Header:
    """Returns a checked header.

    Args:
        where: The file's name, for errors.
        text: The header, without its length.
        file_nbytes: Size of the file.

    Raises:
        DamagedCheckpointError: If it is not a safetensors header, an entry is impossible, or the entries
            leave a hole, overlap, or end elsewhere than the file.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{where}: the header is not JSON: {error}. Restore the file."
        ) from None
    if not isinstance(parsed, dict):
        raise DamagedCheckpointError(f"{where}: the header is not a JSON object. Restore the file.")
    metadata = parsed.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedCheckpointError(
            f"{where}: the header's __metadata__ does not map names to texts. Restore the file."
        )
    entries = {name: _entry(where, name, raw) for name, raw in parsed.items()}
    reached, before = 0, "the header"
    for name, entry in sorted(entries.items(), key=_bounds):
        if entry.start != reached:
            kind = "overlaps" if entry.start < reached else "leaves a hole after"
            raise DamagedCheckpointError(
                f"{where}: {name} begins at byte {entry.start} of the data and {kind} {before}, "
                f"which ends at {reached}. Restore the file."
            )
        reached, before = entry.stop, name
    data_start = 8 + len(text)
    if reached != file_nbytes - data_start:
        raise DamagedCheckpointError(
            f"{where}: the entries end at byte {data_start + reached} but the file has "
            f"{file_nbytes}. The file is truncated, or was appended to."
        )
    facts, sums, table = _own(where, metadata, entries)
    return Header(where, entries, facts, sums, table, data_start, metadata)


def _bounds(item: tuple[str, Entry]) -> tuple[int, int]:
    return item[1][2:]


def _entry(where: str, name: str, raw: Any) -> Entry:
    try:
        code, shape, (start, stop) = raw["dtype"], raw["shape"], raw["data_offsets"]
        bits = BITS.get(code)
        if bits is None:
            raise ValueError(f"torch has no dtype {code!r}")
        for size in shape:
            if type(size) is not int or size < 0:
                raise ValueError(f"shape {shape}")
            bits *= size
        if not (type(start) is int and type(stop) is int and 0 <= start <= stop):
            raise ValueError(f"data_offsets [{start}, {stop}]")
    except (TypeError, KeyError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{where}: {name} has no possible entry ({error}). Restore the file, or update shardplan."
        ) from None
    if bits != 8 * (stop - start):
        raise DamagedCheckpointError(
            f"{where}: {name} of shape {shape} and dtype {code} needs {-(-bits // 8)} bytes but has "
            f"{stop - start}. Restore the file."
        )
    return Entry(code, tuple(shape), start, stop)


def _own(
    where: str, metadata: Any, entries: dict[str, Entry]
) -> tuple[dict[str, Any], dict[str, bytes], dict[str, int]]:
    """Reads what the library itself put into a header."""
    try:
        told = metadata.get("shardplan")
        if told is None:
            return {}, {}, {}
        facts = json.loads(told)
        check_version(where, facts["version"])
        facts["save"] = str(metadata["save"])
        raw = bytes.fromhex(metadata["sums"])
        kind = (facts["algorithm"], facts["block"])
    except (AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{where}: the header's own part can't be read: {error!r}"
        ) from None
    if kind != (ALGORITHM, BLOCK):
        raise CheckpointError(
            f"{where}: its checksums are {kind[0]} of blocks of {kind[1]} bytes, and this version of "
            f"the library knows {ALGORITHM} of {BLOCK} only. Load it with the version that wrote it."
        )
    names = [name for name in entries if name != SUMS]
    if len(raw) != 8 * len(names):
        raise DamagedCheckpointError(
            f"{where}: {len(raw) // 8} checksums for {len(names)} entries. The file is damaged."
        )
    sums = {name: raw[8 * i : 8 * i + 8] for i, name in enumerate(names)}
    table, blocks = {}, 0
    for name in names:
        count = block_count(entries[name].stop - entries[name].start)
        if count > 1:
            table[name] = blocks
            blocks += count
    held = entries[SUMS].stop - entries[SUMS].start if SUMS in entries else 0
    if held != 8 * blocks:
        raise DamagedCheckpointError(f"{where}: {held // 8} block checksums for {blocks} blocks")
    return facts, sums, table
