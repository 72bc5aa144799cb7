"""What a checkpoint holds; what DCP calls `state_dict_metadata`, made as keys are asked for."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ...planning.manifest import Extra, Laid, Stored
from ...planning.metadata import StoredInParts
from ..format.commit import Commit
from .keys import StageKeys


class Catalogue(StoredInParts):
    """What a checkpoint holds: the stored form of each key, made when it is asked for.

    Args:
        commit: What `checkpoint.json` says.
    """

    def __init__(self, commit: Commit) -> None:
        self._keys = [StageKeys(manifest, commit.ownership) for manifest in commit.stages]
        self._origins: dict[str, tuple[int, Laid | Extra]] = {}
        self._stored: dict[str, Stored] = {}

    def origin(self, key: str) -> tuple[int, Laid | Extra]:
        """Returns the stage that has a key, and what it stands for there.

        Raises:
            KeyError: If no stage has it.
        """
        found = self._origins.get(key)
        if found is None:
            for stage, keys in enumerate(self._keys):
                origin = keys.find(key)
                if origin is not None:
                    found = self._origins[key] = (stage, origin)
                    break
            else:
                raise KeyError(key)
        return found

    def path(self, key: str) -> Any:
        """Returns the path of a value in the state dict, as stock DCP stores it."""
        stage, origin = self.origin(key)
        return self._keys[stage].path(origin)

    def __getitem__(self, key: str) -> Stored:
        stored = self._stored.get(key)
        if stored is None:
            stage, origin = self.origin(key)
            stored = self._stored[key] = self._keys[stage].stored(origin)
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
        for stage, keys in enumerate(self._keys):
            for key, origin in keys.items(prefix):
                self._origins.setdefault(key, (stage, origin))
                yield key

    def named_like(self, clean: str) -> list[str]:
        return list(dict.fromkeys(key for keys in self._keys for key in keys.named_like(clean)))

    def unpadded(self, key: str) -> bool:
        origin = self.origin(key)[1]
        return isinstance(origin, Laid) and origin.unpadded


class _Paths(Mapping[str, Any]):
    """The path of each value in the state dict; what DCP calls planner data."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def __getitem__(self, key: str) -> Any:
        return self._catalogue.path(key)

    def __contains__(self, key: object) -> bool:
        return key in self._catalogue

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalogue)

    def __len__(self) -> int:
        return len(self._catalogue)


def metadata_of(catalogue: Catalogue, path: Any) -> Metadata:
    """Returns DCP's metadata of a checkpoint."""
    return Metadata(
        catalogue,  # type: ignore[arg-type]  # DCP only looks keys up
        planner_data=_Paths(catalogue),
        storage_meta=StorageMeta(checkpoint_id=path),
    )
