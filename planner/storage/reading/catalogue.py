"""What a checkpoint holds, read part by part as keys are asked for.

| name | is |
|---|---|
| `Catalogue` | keys and their stored forms; what DCP calls `state_dict_metadata` |
| `metadata_of` | DCP's metadata around it |

A pipeline stage's part of the manifest is read when a key is asked for that the index says it may have.
Who asks for all keys, or for one that no index rules out, reads all parts.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from shardplan.layouts import CheckpointError

from ...loading.reading import StoredInParts
from ...planning.manifest import Extra, Laid, StageManifest, Stored
from ...without_gc import without_gc
from ..format.claims import join_stages
from ..format.commit import Commit
from ..places.files import Files
from .keys import StageKeys
from .owners import Stages
from .parts import read_part
from .stats import Stats


class _Stage(NamedTuple):
    """A pipeline stage whose part of the manifest was read."""

    manifest: StageManifest
    digest: str
    keys: StageKeys


class _Manifests:
    """The manifests of the stages, each read when it is asked for."""

    def __init__(self, catalogue: "Catalogue") -> None:
        self._catalogue = catalogue

    def __getitem__(self, stage: int) -> StageManifest:
        return self._catalogue.stage(stage).manifest


class Catalogue(StoredInParts):
    """What a checkpoint holds: the stored form of each key, each part read when it is needed.

    Args:
        files: Where the checkpoint lies.
        commit: What makes it complete.
        stats: Counts what is read.
    """

    def __init__(self, files: Files, commit: Commit, stats: Stats) -> None:
        self._files = files
        self._commit = commit
        self._stats = stats
        self._read: dict[int, _Stage] = {}
        self._origins: dict[str, tuple[int, Laid | Extra]] = {}
        self._stored: dict[str, Stored] = {}

    def stage(self, stage: int) -> _Stage:
        """Returns what a stage's part of the manifest says.

        Raises:
            CheckpointError: If it is missing, damaged, of another save or of a newer version.
        """
        found = self._read.get(stage)
        if found is None:
            if not 0 <= stage < len(self._commit.parts):
                raise CheckpointError(f"{self._files.root}: there is no pipeline stage {stage}")
            with without_gc():
                part = read_part(self._files, self._commit, stage)
                groups = self._commit.groups[stage : stage + 1]
                (manifest,) = join_stages([part.manifest], groups)
                found = self._read[stage] = _Stage(manifest, part.digest, StageKeys(manifest))
            self._stats.parts += 1
            self._stats.manifest += part.nbytes
        return found

    @property
    def manifests(self) -> Stages:
        """The stages' manifests, complete with what all of their ranks vouch for."""
        return _Manifests(self)

    def origin(self, key: str) -> tuple[int, Laid | Extra]:
        """Returns the stage that has a key, and what it stands for there.

        Raises:
            KeyError: If no stage has it.
        """
        found = self._origins.get(key)
        if found is None:
            found = self._find(key)
            if found is None:
                raise KeyError(key)
            self._origins[key] = found
        return found

    def _find(self, key: str) -> tuple[int, Laid | Extra] | None:
        for stage, known in self._read.items():
            origin = known.keys.find(key)
            if isinstance(origin, Laid):  # no other stage has it
                return stage, origin
        for stage in self._stages(key):  # of a value that several have, the first one's counts
            origin = self.stage(stage).keys.find(key)
            if origin is not None:
                return stage, origin
        return None

    def _stages(self, key: str) -> list[int]:
        index = self._commit.index
        return list(range(len(self._commit.parts))) if index is None else index.stages(key)

    def __getitem__(self, key: str) -> Stored:
        stored = self._stored.get(key)
        if stored is None:
            stage, origin = self.origin(key)
            stored = self._stored[key] = self.stage(stage).keys.stored(origin)
        return stored

    def __contains__(self, key: object) -> bool:
        try:
            return isinstance(key, str) and self.origin(key) is not None
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        return self.below("")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def below(self, prefix: str, read: bool = False) -> Iterator[str]:
        several: set[str] = set()
        for stage in sorted(self._read) if read else range(len(self._commit.parts)):
            for key, origin in self.stage(stage).keys.items(prefix):
                if isinstance(origin, Extra):
                    if key in several:
                        continue
                    several.add(key)
                if not read:
                    self._origins.setdefault(key, (stage, origin))
                yield key

    def named_like(self, clean: str) -> list[str]:
        stages = self._stages(clean)
        return list(dict.fromkeys(k for s in stages for k in self.stage(s).keys.named_like(clean)))

    def unpadded(self, key: str) -> bool:
        origin = self.origin(key)[1]
        return isinstance(origin, Laid) and origin.unpadded


class _Paths(Mapping[str, Any]):
    """The path of each value in the state dict; what DCP calls planner data."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def __getitem__(self, key: str) -> Any:
        stage, origin = self._catalogue.origin(key)
        return self._catalogue.stage(stage).keys.path(origin)

    def __contains__(self, key: object) -> bool:
        return key in self._catalogue

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalogue)

    def __len__(self) -> int:
        return len(self._catalogue)


def metadata_of(catalogue: Catalogue, path: Any) -> Metadata:
    """Returns DCP's metadata of a checkpoint, which reads parts of the manifest as it is used."""
    return Metadata(
        catalogue,  # type: ignore[arg-type]  # DCP only looks keys up
        planner_data=_Paths(catalogue),
        storage_meta=StorageMeta(checkpoint_id=path),
    )
