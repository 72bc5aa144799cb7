"""DCP's metadata of a whole checkpoint, made from the manifests of its pipeline stages."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping

from torch.distributed.checkpoint.metadata import Metadata

from shardplan.layouts import CheckpointError

from ..state.entries import Path, stock_path
from .manifest import Extra, Laid, StageManifest, Stored, stage_metadata
from .ownership import Ownership

# Where a checkpoint's planner data lists the tensors that were saved without their padding: their
# sizes are true ones, while any other tensor of a padded parameter may be padded on disk.
UNPADDED = "shardplan.unpadded"

Entry = tuple[str, Path, Stored, str]
Origins = dict[str, tuple[int, Laid | Extra]]


class StoredInParts(Mapping[str, Stored]):
    """What is stored under each key, read part by part as keys are asked for."""

    @abstractmethod
    def named_like(self, clean: str) -> list[str]:
        """Returns the keys that are a clean name but for wrappers' tokens."""

    @abstractmethod
    def below(self, prefix: str, read: bool = False) -> Iterator[str]:
        """Yields the keys with a prefix, of all parts or only of those that have been read."""

    @abstractmethod
    def unpadded(self, key: str) -> bool:
        """Returns whether a key is a tensor whose padding stays out of the checkpoint."""


def checkpoint_metadata(
    stages: Iterable[StageManifest],
    told: Iterable[Entry] = (),
    origins: Origins | None = None,
    rules: Ownership | None = None,
) -> Metadata:
    """Returns DCP's metadata of a checkpoint from the manifests of its pipeline stages.

    Args:
        stages: The manifests.
        told: What no manifest has: key, path, stored form and origin.
        origins: Takes the pipeline stage of each key, and what it stands for there.
        rules: The numbers of ownership of the save; of this version if not given.

    Raises:
        CheckpointError: If two values have one key, or a tensor is not covered exactly once.
    """
    stored: dict[str, Stored] = {}
    paths: dict[str, Path] = {}
    unpadded: list[str] = []
    origins = {} if origins is None else origins
    for number, stage in enumerate(stages):
        for key, path, entry, origin in stage_metadata(stage, rules):
            if key in stored:
                where, other = origins[key]
                raise CheckpointError(
                    f"{key}: both {_name(other)} of pipeline stage {where} and {_name(origin)} of "
                    f"stage {number} have this key. If stages count their layers from 0, give the "
                    "layers a layer_number or pass PipelineLayers(offset=...)."
                )
            stored[key] = entry
            paths[key] = stock_path(path)
            origins[key] = (number, origin)
            if isinstance(origin, Laid) and origin.unpadded:
                unpadded.append(key)
    if unpadded:
        paths[UNPADDED] = tuple(unpadded)  # no key of a value, so nothing else looks it up
    for key, path, entry, _ in told:
        if key in stored:
            raise CheckpointError(
                f"{key}: {_name(origins[key][1])} of the model has this key, and so has a value that "
                "belongs to no parameter. Rename one of them."
            )
        stored[key] = entry
        paths[key] = stock_path(path)
    return Metadata(stored, planner_data=paths)


def _name(origin: Laid | Extra) -> str:
    return origin.key if isinstance(origin, Extra) else origin.layout.fqn
