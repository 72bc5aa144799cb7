"""What a rank planned, as the contents of a file: the same that ranks exchange where they meet."""

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

from shardplan.layouts import CheckpointError, DamagedCheckpointError, Grid, Grids

from ...planning.manifest import Kind, Members
from ...saving.messages import PlanMessage, Told
from ...state.described import Description
from .dtypes import dtype_name, dtype_of
from .manifest import (
    MAX_RANKS,
    bits_from_text,
    bits_to_text,
    extra_from_json,
    extra_to_json,
    kind_from_json,
    kind_to_json,
    manifest_from_json,
    manifest_to_json,
    path_from_json,
    path_to_json,
)


def encode_message(message: PlanMessage, rank: int) -> bytes:
    """Returns a rank's message as bytes; most of it is alike, so it is compressed.

    Ties are left out: this format stores each of several tied tensors.
    """
    told, manifest = message.told, message.manifest
    data = {
        "rank": rank,
        "grids": [[_grid(g.dense), _grid(g.expert)] for g in message.grids],
        "digest": message.digest,
        "groups": [[kind_to_json(k), bits_to_text(m)] for k, m in message.groups.items()],
        "manifest": manifest and manifest_to_json(manifest, message.digest),
        "own": manifest and [extra_to_json(extra) for extra in manifest.extras],
        "extras": _text(told.extras),
        "values": [[kind_to_json(kind), _text(packed)] for kind, packed in told.values],
        "per_rank": [list(row) for row in told.per_rank],
        "described": [
            [path_to_json(path), said.shape, dtype_name(said.dtype), said.parts, said.mark]
            for path, said in told.described
        ],
        "ranks": message.ranks,
    }
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)


def decode_message(where: str, raw: bytes) -> tuple[PlanMessage, int]:
    """Returns the message and the rank that `encode_message` wrote.

    Raises:
        DamagedCheckpointError: If the bytes are none.
    """
    try:
        data = json.loads(zlib.decompress(raw))
        grids = tuple(Grids(_grid_of(d), _grid_of(e)) for d, e in data["grids"])
        kinds: dict[str, Kind] = {}

        def kind_of(row: Any) -> Kind:
            return kinds.setdefault(repr(row), kind_from_json(row, MAX_RANKS))

        groups: dict[Kind, Members] = {
            kind_of(kind): bits_from_text(bits, MAX_RANKS * 8) for kind, bits in data["groups"]
        }
        manifest = data["manifest"]
        if manifest is not None:
            manifest, _ = manifest_from_json(manifest, grids[0].world_size)
            manifest = replace(manifest, extras=tuple(map(extra_from_json, data["own"])))
        told = Told(
            extras=_bytes(data["extras"]),
            values=tuple((kind_of(kind), _bytes(text)) for kind, text in data["values"]),
            per_rank=tuple((str(a), str(b), str(c)) for a, b, c in data["per_rank"]),
            described=tuple(
                (
                    path_from_json(path),
                    Description(
                        None if shape is None else tuple(shape),
                        dtype_of(dtype),
                        tuple((tuple(o), tuple(n)) for o, n in parts),
                        str(mark),
                    ),
                )
                for path, shape, dtype, parts, mark in data["described"]
            ),
        )
        ranks = data["ranks"]
        return (
            PlanMessage(
                grids,
                str(data["digest"]),
                groups,
                manifest,
                told,
                None if ranks is None else tuple(ranks),
            ),
            int(data["rank"]),
        )
    except (KeyError, TypeError, ValueError, zlib.error, CheckpointError) as error:
        raise DamagedCheckpointError(f"{where}: not what a rank planned: {error!r}") from None


def _grid(grid: Grid) -> list[Any]:
    return [grid.axes, grid.sizes, grid.coordinate]


def _grid_of(data: Any) -> Grid:
    axes, sizes, coordinate = data
    return Grid(tuple(axes), tuple(sizes), tuple(coordinate))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
