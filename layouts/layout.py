"""A layout: the rank-free chain that says where a parameter lies in the checkpoint.

| name | is |
|---|---|
| `Layout` | a parameter's chain of stages and its name on disk |
| `Layout.slabs` | what one rank holds, at a grid's coordinate |
| `EXPERT` | the hole in a name that the global expert index fills |
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from .errors import LayoutError
from .grid import Grid
from .serial import stage_from_json, stage_to_json
from .slab import Frame, Shape, Slab
from .stages import Stage
from .storage import StorageStage, Whole

EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a parameter lies in the checkpoint, for every rank at once.

    The first stage says what a rank stores, the others lead from the local tensor to the global
    ones. Nothing in it depends on the rank that made it, so any rank can evaluate it at any
    other rank's coordinate.

    Attributes:
        fqn: The parameter's name in its module.
        name: Its name on disk, where `{expert}` stands for the global expert index.
        stages: The chain, a storage stage first.
        family: The grid it is evaluated on, `'dense'` or `'expert'`.
        single: Of stacked experts: the name on disk that one of them has alone, with `{expert}`;
            empty if the provider knows none.

    >>> from shardplan.layouts import Concat, FlatBuffer, Grid, Shard
    >>> layout = Layout(
    ...     "mlp.linear_fc1.weight",
    ...     "mlp.linear_fc1.weight",
    ...     (
    ...         FlatBuffer((4, 2), ("dp_shard",), offset=0, shard_size=4),
    ...         Concat(0, (("_w", 2), ("_v", 2))),
    ...         Shard(0, "tp"),
    ...     ),
    ... )
    >>> layout.slabs(Grid(("dp_shard", "tp"), (2, 2), (1, 0)))[0].key
    'mlp.linear_fc1.weight_v'
    """

    fqn: str
    name: str
    stages: tuple[Stage, ...]
    family: str = "dense"
    single: str = ""

    def __post_init__(self) -> None:
        if not self.stages or not hasattr(self.stages[0], "holders"):
            raise LayoutError(f"{self.fqn}: a layout starts with a storage stage such as Whole")

    @property
    def storage(self) -> StorageStage:
        """The first stage: what each rank stores of the local tensor."""
        return cast(StorageStage, self.stages[0])

    @property
    def local_shape(self) -> Shape:
        """Shape of the parameter before any FSDP cut."""
        return self.storage.shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layout uses; ranks that differ only elsewhere are replicas."""
        return tuple(dict.fromkeys(axis for stage in self.stages for axis in stage.axes))

    def frames(self, grid: Grid) -> tuple[Frame, ...]:
        """Returns the global tensors and the rank's boxes of them, empty ones included.

        Raises:
            LayoutError: If a stage does not fit the local tensor; the fqn is in the message.
        """
        return evaluate(self.stages, grid, self.fqn)

    def key(self, frame: Frame) -> str:
        """Returns the name on disk of one of the layout's frames."""
        return self.key_of(frame.suffix, frame.expert)

    def key_of(self, suffix: str, expert: int | None) -> str:
        """Returns the name on disk of a component, of an expert if the layout is of experts."""
        if expert is None:
            return self.name + suffix
        if EXPERT not in self.name:
            raise LayoutError(
                f"{self.fqn}: expert {expert} has no place in the name {self.name!r}. "
                f"The name of an expert's tensor needs {EXPERT}."
            )
        return self.name.replace(EXPERT, str(expert)) + suffix

    def slabs(self, grid: Grid) -> tuple[Slab, ...]:
        """Returns the boxes of global tensors that the rank at the grid's coordinate holds.

        Raises:
            LayoutError: If a stage does not fit the local tensor; the fqn is in the message.
        """
        return tuple(
            Slab(self.key(frame), frame.shape, *box)
            for frame in self.frames(grid)
            for box in frame.boxes
        )

    def replica_axes(self, grid: Grid) -> tuple[str, ...]:
        """Returns the grid's axes that the layout does not use, the pipeline's aside."""
        used = self.axes
        return tuple(axis for axis in grid.axes if axis not in used and axis != "pp")

    def to_json(self) -> list[Any]:
        """Returns the layout as plain data that `from_json` reads."""
        return [self.fqn, self.name, self.family, [stage_to_json(s) for s in self.stages]]

    @classmethod
    def from_json(cls, data: Any) -> "Layout":
        """Returns the layout that `to_json` wrote.

        Raises:
            LayoutError: If the data is no layout of this version.
        """
        try:
            fqn, name, family, stages = data
            stages = tuple(stages)
        except (TypeError, ValueError) as error:
            raise LayoutError(f"{data!r} is no layout: {error}") from error
        return cls(fqn, name, tuple(stage_from_json(s) for s in stages), family)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal for equal layouts, on every machine."""
        return digest((self.to_json(),))


def evaluate(stages: tuple[Stage, ...], grid: Grid, fqn: str = "") -> tuple[Frame, ...]:
    """Returns the frames that a chain of stages leads to, at the grid's coordinate.

    Raises:
        LayoutError: If a stage does not fit what the stages before it give.
    """
    frames: tuple[Frame, ...] = ()
    for stage in stages:
        try:
            frames = stage.apply(frames, grid)
        except LayoutError as error:
            raise LayoutError(f"{fqn}: {error}" if fqn else str(error)) from None
    return frames


def replicated(fqn: str, shape: Shape, family: str = "dense") -> Layout:
    """Returns the layout of a tensor that every rank of the family's grid holds whole."""
    return Layout(fqn, fqn, (Whole(shape),), family)


def digest(parts: Iterable[Any]) -> str:
    """Returns 16 hexadecimal digits over JSON-able parts."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(json.dumps(part, separators=(",", ":")).encode())
        hashed.update(b"\n")
    return hashed.hexdigest()
