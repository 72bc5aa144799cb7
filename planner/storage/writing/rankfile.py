"""One rank's data file: header, chunks, Python values, checksums."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from shardplan.layouts import CheckpointError, UnstorableValueError

from ..buffers import Buffers
from ..format.commit import data_name
from ..format.dtypes import stored_form
from ..format.header import FORMAT_VERSION, HEAD, SUMS, VALUES, HeaderText, chunk_name
from ..format.plain import to_plain
from ..format.sums import ALGORITHM, BLOCK, block_count
from ..format.torch_head import torch_head
from ..places.files import Files
from .stream import Nowhere, Piece, sums_of, write_pieces

# What entries of a data file are called that are not chunks; safetensors' own first.
_RESERVED = ("__metadata__", "__shardplan_")


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes a data file.

    Attributes:
        save: Id of the save.
        place: The rank's place.
        rank: Its rank.
        ranks: How many ranks save.
        stage: Its pipeline stage.
        digest: Digest of its stage's layouts.
    """

    save: str
    place: int
    rank: int
    ranks: int
    stage: int
    digest: str


def check_key(key: str, is_tensor: bool) -> None:
    """Refuses a key that a data file can't hold.

    Raises:
        UnstorableValueError: If the format itself uses it, or it is not valid text.
    """
    if is_tensor and key.startswith(_RESERVED):
        raise UnstorableValueError(
            f"{key}: a tensor can't have this key: names that begin with {_RESERVED[0]} or "
            f"{_RESERVED[1]} are the file format's own. Rename it."
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise UnstorableValueError(
            f"{key!a}: this key is not valid text ({error.reason}), and no other tool could read "
            "the file. Rename it."
        ) from None


def write_rank_file(
    files: Files,
    writer: Writer,
    items: Sequence[WriteItem],
    planner: Any,
    buffers: Buffers,
    threads: int,
    *,
    stock: bool,
    sync: bool,
    late: bool = False,
) -> int:
    """Writes a data file and returns its size in bytes.

    Args:
        files: Where the checkpoint lies.
        writer: Who writes it.
        items: The write items.
        planner: Resolves their data.
        buffers: The memory that may be used.
        threads: How many workers compute checksums and write.
        stock: Whether stock DCP shall be able to read the chunks.
        sync: Whether the file is on the disk afterwards.
        late: Whether it is the rank's second file.

    Raises:
        CheckpointError: If a value can't be stored, or the plan does not fit its tensors.
        OSError: If the file can't be written.
    """
    tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    tensors.sort(key=lambda item: -item.tensor_data.properties.dtype.itemsize)  # type: ignore[union-attr]
    pieces = [_piece(item) for item in tensors]
    heads = [torch_head(piece.dtype, piece.sizes) for piece in pieces] if stock else []
    if stock:
        pieces = [p for pair in zip(map(_head, pieces), pieces, strict=True) for p in pair]
    values = {
        item.index.fqn: to_plain(item.index.fqn, planner.resolve_value(item))
        for item in items
        if item.type is WriteItemType.BYTE_IO
    }
    blob = torch.empty(0, dtype=torch.uint8)
    if values:
        text = json.dumps(values, separators=(",", ":")).encode()
        blob = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        pieces.append(Piece(VALUES, torch.uint8, (len(text),), len(text)))
    header = HeaderText(_entries(pieces), _facts(writer, tensors), len(pieces))
    start = header.data_start

    def data_of(number: int) -> torch.Tensor:
        if number == len(pieces) - bool(values):
            return blob
        number, is_chunk = divmod(number, 2) if stock else (number, True)
        if not is_chunk:
            return torch.frombuffer(bytearray(heads[number]), dtype=torch.uint8)
        data: torch.Tensor = planner.resolve_data(tensors[number])
        return data

    out = files.create(data_name(writer.save, writer.place, writer.ranks, late))
    try:
        if out.in_order:
            # The header comes first and has the checksums, so the data is gone through twice.
            held = [data_of(number) for number in range(len(pieces))]
            nowhere = Nowhere()
            blocks = write_pieces(pieces, held.__getitem__, nowhere, start, buffers, threads)
            sums, table = sums_of(blocks)
            out.write(header.encode(sums, writer.save), 0)
            again = write_pieces(pieces, held.__getitem__, out, start, buffers, threads)
            if again != blocks:
                raise CheckpointError(
                    "tensors changed while they were saved. Stage the state dict first, as "
                    "async_save does."
                )
        else:
            blocks = write_pieces(pieces, data_of, out, start, buffers, threads)
            sums, table = sums_of(blocks)
        if table:
            out.write(table, start + header.data_nbytes - len(table))
        if not out.in_order:
            out.write(header.encode(sums, writer.save), 0)
        out.finish(sync)
    finally:
        out.discard()
    return start + header.data_nbytes


def _facts(writer: Writer, tensors: Sequence[WriteItem]) -> dict[str, Any]:
    """Returns what the file says of itself; global shapes in file order, repeats counted."""
    shapes: dict[torch.Size, int] = {}
    runs: list[list[int]] = []
    for item in tensors:
        number = shapes.setdefault(item.tensor_data.size, len(shapes))  # type: ignore[union-attr]
        if runs and runs[-1][1] == number:
            runs[-1][0] += 1
        else:
            runs.append([1, number])
    return {
        "version": FORMAT_VERSION,
        "place": writer.place,
        "rank": writer.rank,
        "ranks": writer.ranks,
        "stage": writer.stage,
        "digest": writer.digest,
        "algorithm": ALGORITHM,
        "block": BLOCK,
        "shapes": [list(shape) for shape in shapes],
        "global_shapes": runs,
    }


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    assert data is not None  # only BYTE_IO items have none
    sizes = tuple(data.chunk.sizes)
    dtype = data.properties.dtype
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    return Piece(chunk_name(item.index.fqn, item.index.offset or ()), dtype, sizes, nbytes)


def _head(piece: Piece) -> Piece:
    """Returns the piece that stands before a chunk for torch.load."""
    length = len(torch_head(piece.dtype, piece.sizes))
    return Piece(HEAD + piece.name, torch.uint8, (length,), length)


def _entries(pieces: Sequence[Piece]) -> list[tuple[str, str, Sequence[int], int]]:
    """Returns the entries of a file, with the table of block checksums as the last one."""
    entries: list[tuple[str, str, Sequence[int], int]] = []
    blocks = 0
    for name, dtype, sizes, nbytes in pieces:
        code, shape = stored_form(dtype, sizes)
        entries.append((name, code, shape, nbytes))
        count = block_count(nbytes)
        if count > 1:
            blocks += count
    if blocks:
        entries.append((SUMS, "U8", (blocks, 8), 8 * blocks))
    return entries
