"""One rank's data file, from the first byte to its name, and what the rank tells with it.

| name | is |
|---|---|
| `RankFile` | the data file that a rank writes in one save |
| `CacheOfTold` | what a writer tells of its stage, kept for the next save |
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from shardplan.layouts import CheckpointError

from ...planning.manifest import StageManifest
from ...saving.agreement import first_difference
from ...saving.messages import PlanMessage
from ..buffers import Buffers
from ..format.claims import Groups, vouched
from ..format.commit import data_name, groups_to_json, parse, part_name
from ..format.dtypes import stored_form
from ..format.header import FORMAT_VERSION, HEAD, SUMS, VALUES, HeaderText, chunk_name
from ..format.part import part_from_json, part_to_json
from ..format.plain import to_plain
from ..format.sums import ALGORITHM, BLOCK, block_count
from ..places.files import Files
from ..stock import torch_head
from .session import Marker, Session
from .stream import Nowhere, Piece, sums_of, write_pieces


class Vouched:
    """What a rank's word counts for, found anew only when its values have changed."""

    def __init__(self) -> None:
        self._last: tuple[str, Groups, Groups] | None = None

    def of(self, digest: str, manifest: StageManifest) -> Groups:
        """Returns the values that the rank's word counts for."""
        last = self._last
        if last is None or last[0] != digest or last[1] != manifest.groups:
            last = self._last = (digest, manifest.groups, vouched(manifest))
        return last[2]


class RankFile:
    """The data file that a rank writes in one save.

    Args:
        files: Where the checkpoint lies.
        message: What the rank's planner tells of its plan.
        manifest: What the rank plans.
        groups: What its word counts for.
        rank: Its rank.
    """

    def __init__(
        self,
        files: Files,
        message: PlanMessage,
        manifest: StageManifest,
        groups: Groups,
        rank: int,
    ) -> None:
        grids = message.grids[0]
        self._files = files
        self._manifest = manifest
        self._groups = groups
        self._leads_stage = grids.leads_stage
        self.marker = Marker(
            grids.dense.linear(grids.dense.axes),
            rank,
            grids.world_size,
            grids.stage,
            message.digest,
            tuple(
                (g.dense.linear(g.dense.axes), g.expert.linear(g.expert.axes))
                for g in message.grids
            ),
            () if grids.leads_stage else tuple(groups_to_json(groups)),
        )
        self._header: HeaderText | None = None
        self._stamped = ""
        self.out = files.create(self.marker.place, "")

    def write(
        self,
        items: Sequence[WriteItem],
        planner: Any,
        buffers: Buffers,
        threads: int,
        save: str,
        stock: bool,
    ) -> None:
        """Writes header and chunks.

        Args:
            items: The rank's write items.
            planner: Resolves their data.
            buffers: The memory that may be used.
            threads: How many workers compute checksums and write.
            save: Id of the save, empty if it is not known yet.
            stock: Whether stock DCP shall be able to read the chunks.

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
        header = self._header = HeaderText(_entries(pieces), self._facts(tensors), len(pieces))

        def data_of(number: int) -> torch.Tensor:
            if number == len(pieces) - bool(values):
                return blob
            number, is_chunk = divmod(number, 2) if stock else (number, True)
            if not is_chunk:
                return torch.frombuffer(bytearray(heads[number]), dtype=torch.uint8)
            data: torch.Tensor = planner.resolve_data(tensors[number])
            return data

        start = header.data_start
        if self.out.in_order:
            # The header comes first and has the checksums, so the data is gone through twice.
            held = [data_of(number) for number in range(len(pieces))]
            nowhere = Nowhere()
            blocks = write_pieces(pieces, held.__getitem__, nowhere, start, buffers, threads)
            sums, table = sums_of(blocks)
            self.out.write(header.encode(sums, save), 0)
            again = write_pieces(pieces, held.__getitem__, self.out, start, buffers, threads)
            if again != blocks:
                raise CheckpointError(
                    "tensors changed while they were saved. Stage the state dict first, as "
                    "async_save does."
                )
        else:
            blocks = write_pieces(pieces, data_of, self.out, start, buffers, threads)
            sums, table = sums_of(blocks)
        if table:
            self.out.write(table, start + header.data_nbytes - len(table))
        if not self.out.in_order:
            self.out.write(header.encode(sums, save), 0)
        self._stamped = save
        self.marker = replace(self.marker, nbytes=start + header.data_nbytes)

    def _facts(self, tensors: Sequence[WriteItem]) -> dict[str, Any]:
        """Returns what the file says of itself; global shapes in file order, repeats counted."""
        shapes: dict[torch.Size, int] = {}
        runs: list[list[int]] = []
        for item in tensors:
            number = shapes.setdefault(item.tensor_data.size, len(shapes))  # type: ignore[union-attr]
            if runs and runs[-1][1] == number:
                runs[-1][0] += 1
            else:
                runs.append([1, number])
        marker = self.marker
        return {
            "version": FORMAT_VERSION,
            "place": marker.place,
            "rank": marker.rank,
            "ranks": marker.ranks,
            "stage": marker.stage,
            "digest": marker.digest,
            "algorithm": ALGORITHM,
            "block": BLOCK,
            "shapes": [list(shape) for shape in shapes],
            "global_shapes": runs,
        }

    def announce(self, save: str, sync: bool) -> None:
        """Gives the file its name in the folder of a save, and a stage's first rank its part.

        Raises:
            FileNotFoundError: If that folder is gone.
        """
        assert self._header is not None  # write came before
        if self._stamped != save and self.out.in_order:
            raise CheckpointError(
                f"{self._files.root}: an earlier save that was cut off looked like this one until "
                "its leader began. It is cleared away now; save again."
            )
        if self._stamped != save:
            self.out.write(save.encode(), self._header.save_start)
            self._stamped = save
        if sync:
            self.out.sync()
        marker = self.marker
        if self._leads_stage:
            told = replace(self._manifest, groups=self._groups)
            part = part_to_json(told, marker.stage, save, marker.digest)
            name = part_name(save, marker.stage)
            self._files.put(name, json.dumps(part, separators=(",", ":")).encode(), sync)
        self.out.publish(data_name(save, marker.place, marker.ranks))

    def difference(self, session: Session) -> str:
        """Returns how this rank's plan differs from that of its stage's first, empty if equal."""
        marker = self.marker
        name = part_name(self._stamped, marker.stage)
        raw = self._files.read(name) if self._stamped else None
        if raw is None:
            return ""
        other, digest = part_from_json(name, parse(name, raw), self._stamped, marker.ranks)
        if digest == marker.digest:
            return ""
        return f" This rank differs: {first_difference(self._manifest, other)}"


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
