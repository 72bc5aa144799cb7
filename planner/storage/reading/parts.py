"""Reads the manifest of a complete checkpoint, one pipeline stage's part at a time or all of it.

| name | does |
|---|---|
| `read_part` | the manifest's part of one stage |
| `read_stages` | the manifests of all stages |
"""

from typing import NamedTuple

from shardplan.layouts import CheckpointError

from ...planning.manifest import StageManifest
from ..format.claims import join_stages
from ..format.commit import Commit, parse, part_name
from ..format.part import part_from_json
from ..format.sums import block_sum
from ..places.files import Files


def read_stages(files: Files, commit: Commit) -> tuple[list[StageManifest], list[str]]:
    """Returns the manifests of a save's pipeline stages, and the digests of their ranks' plans.

    Raises:
        CheckpointError: If a part is missing, damaged, of another save or of a newer version.
    """
    parts = [read_part(files, commit, stage) for stage in range(len(commit.parts))]
    return join_stages([p.manifest for p in parts], commit.groups), [p.digest for p in parts]


class Part(NamedTuple):
    """The manifest's part of one pipeline stage, as it was read.

    Attributes:
        manifest: What the stage's first rank vouches for.
        digest: Digest of the plans of the stage's ranks.
        nbytes: Size of the file.
    """

    manifest: StageManifest
    digest: str
    nbytes: int


def read_part(files: Files, commit: Commit, stage: int) -> Part:
    """Returns the manifest's part of one of a save's pipeline stages.

    Raises:
        CheckpointError: If it is missing, damaged, of another save or of a newer version.
    """
    name = part_name(commit.save, stage)
    where = f"{files.root}/{name}"
    raw = files.read(name)
    if raw is None:
        raise CheckpointError(
            f"{where}: missing, though the checkpoint was complete. Put the file back, or load "
            "another checkpoint."
        )
    manifest, digest = part_from_json(where, parse(where, raw), commit.save, commit.ranks)
    if block_sum(raw).hex() != commit.parts[stage]:
        raise CheckpointError(f"{where}: its checksum is not that of checkpoint.json; damaged")
    return Part(manifest, digest, len(raw))
