"""What a layout provider is, and what it is asked about.

A provider answers with data. It is pure and deterministic, and it asks no other rank.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from .errors import LayoutError
from .grid import Grid
from .slab import Shape
from .stages import Stage


class Level(IntEnum):
    """Where a provider's stages stand in the chain; one provider a level for one parameter.

    | level | leads | built-in providers |
    |---|---|---|
    | STORAGE | storage → local | FSDP flat buffer, DTensor |
    | COMPONENT | local → component | SwiGLU, GDN, Mamba, MLA |
    | PARALLEL | component → global | tensor parallelism |
    | PADDING | padded → true sizes | vocabulary |
    | EXPERT | local → global expert | expert-parallel grid |
    | NAME | local → global name | pipeline layer numbers |
    | FORMAT | global → another project's tensors | Hugging Face names and shapes |
    """

    STORAGE = 0
    COMPONENT = 1
    PARALLEL = 2
    PADDING = 3
    EXPERT = 4
    NAME = 5
    FORMAT = 6


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter (or buffer) as a provider sees it.

    Attributes:
        fqn: Its name in the model, wrapper prefixes stripped.
        local_shape: Shape before any FSDP cut: of the tensor-parallel rank's own tensor, or of
            the global tensor where a DTensor's mesh has the tensor-parallel axis.
        grid: Axes and this rank's coordinate: the experts' grid for an expert, else the dense.
        is_expert: Whether the parameter belongs to one of several experts.
        num_local_experts: How many experts of its layer the rank holds, counted by name.
        param: The live parameter, None where there is only a description.
        owners: `(path, module)` from the root to the module that owns it, empty likewise.
    """

    fqn: str
    local_shape: Shape
    grid: Grid
    is_expert: bool = False
    num_local_experts: int | None = None
    param: Any = field(default=None, compare=False)
    owners: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    @property
    def family(self) -> str:
        """The grid's name in a layout."""
        return "expert" if self.is_expert else "dense"

    def axis(self, dense: str, expert: str) -> str:
        """Returns the axis that plays a role in the parameter's own grid.

        An expert on a grid without axes of its own (`Grids.from_mesh` with one mesh) lies on the
        dense ones.
        """
        own = self.is_expert and (expert in self.grid.axes or dense not in self.grid.axes)
        return expert if own else dense

    def attribute(self, name: str, default: Any = None) -> Any:
        """Returns an attribute of the live parameter, or of the one it was before wrapping.

        Megatron-FSDP keeps some marks only on `orig_param`.
        """
        value = getattr(self.param, name, None)
        if value is None:
            value = getattr(getattr(self.param, "orig_param", None), name, None)
        return default if value is None else value

    def nearest(self, name: str) -> tuple[str, Any]:
        """Returns the path and value of a module attribute, nearest owner first.

        Returns:
            The owner's path and the attribute, or `('', None)` if no owner has it.
        """
        for path, module in reversed(self.owners):
            value = attribute(module, name)
            if value is not None:
                return path, value
        return "", None

    def fail(self, rule: str, advice: str) -> LayoutError:
        """Returns an error in the form `<fqn>: <rule> (<rank's facts>). <what to do>`."""
        return LayoutError(f"{self.fqn}: {rule} ({self.grid.facts()}). {advice}")


@runtime_checkable
class LayoutProvider(Protocol):
    """Knows one way in which parameters are laid out."""

    @property
    def name(self) -> str:
        """Unique among the providers of a registry, shown in errors."""

    @property
    def level(self) -> Level:
        """Where its stages stand in the chain."""

    def claims(self, param: ParamInfo) -> bool:
        """Returns whether the provider places this parameter."""

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        """Returns the stages for a parameter that it claims.

        Raises:
            LayoutError: If the parameter contradicts what the provider knows.
        """


def attribute(source: Any, name: str) -> Any:
    """Returns an attribute of a module, a config or a parameter, None if it has none.

    A module without the attribute answers `getattr` by raising, which would take most of the
    time of reading a model; its dictionary and its class are asked first.
    """
    own = getattr(source, "__dict__", None)
    if own is None or "_modules" not in own:  # no module: a config may answer in its own way
        return getattr(source, name, None)
    if name in own:
        return own[name]
    if getattr(type(source), name, None) is not None:
        return getattr(source, name, None)
    return None


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Returns a test for whole names against patterns with `*`, `?` and `[…]`.

    >>> matcher(["*.linear_fc1.weight"])("decoder.layers.0.mlp.linear_fc1.weight")
    True
    >>> matcher(["*.linear_fc1.weight"])("mlp.linear_fc1.weight1")
    False
    """
    rules = [fnmatch.translate(pattern) for pattern in patterns]
    if not rules:
        return lambda name: False
    compiled = re.compile("|".join(rules)).match
    return lambda name: compiled(name) is not None
