"""Pipeline layer numbers: a stage counts its layers from 0, the checkpoint does not."""

import re
from collections.abc import Mapping
from typing import Any

from .model import WRAPPERS
from .provider import Level, ParamInfo, attribute
from .stages import Stage

MTP_LAYER = "mtp_model_layer"
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)$")


class PipelineLayers:
    """Puts the global layer number in the place of a pipeline stage's local one.

    | form | reads |
    |---|---|
    | `PipelineLayers()` | the layer's own `layer_number` (counted from 1, as Megatron does) |
    | `PipelineLayers(offset=2)` | the number of layers of the stages before |
    | `PipelineLayers({0: 2, 1: 6})` | the global number of each local layer |

    Only the token after the first `layers` is a layer number; a nested `layers.0` deeper in the
    name stays. The inner layer of a multi-token prediction layer, `mtp.layers.0.mtp_model_layer`,
    is `transformer_layer` on disk, as in checkpoints from before it was renamed; a hybrid stack
    there keeps its name, as Megatron's do.

    Args:
        numbers: Global number for each local one.
        offset: What to add to the local number.
        mtp: Name of that inner layer on disk.

    Source: megatron/core/transformer/transformer_layer.py, layer_number.
    """

    name = "pipeline-layers"
    level = Level.NAME

    def __init__(
        self,
        numbers: Mapping[int, int] | None = None,
        *,
        offset: int | None = None,
        mtp: str = "transformer_layer",
    ) -> None:
        self._numbers = numbers
        self._offset = offset
        self._mtp = mtp

    def _place(self, param: ParamInfo) -> tuple[int, int, int] | None:
        """Returns the span of the local layer number in the name, and the global number."""
        if self._numbers is not None or self._offset is not None:
            found = re.search(r"(?:^|\.)layers\.(\d+)(?=\.)", param.fqn)
            if found is None:
                return None
            local = int(found[1])
            if self._numbers is not None and local not in self._numbers:
                raise param.fail(
                    f"layer {local} is not among the {len(self._numbers)} layers of "
                    f"PipelineLayers({dict(self._numbers)})",
                    "Give every local layer its global number.",
                )
            start, stop = found.span(1)
            return start, stop, (self._numbers or {}).get(local, local + (self._offset or 0))
        for path, module in param.owners:
            while path.rpartition(".")[2] in WRAPPERS:  # of a wrapper that nobody knows
                path = path.rpartition(".")[0]
            found = _LAYER.match(path) if path.rpartition(".")[2].isdigit() else None
            number = None if found is None else _layer_number(module)
            if found is not None and number is not None:
                start, stop = found.span(1)
                return start, stop, number - 1
        return None

    def claims(self, param: ParamInfo) -> bool:
        place = self._place(param)
        if place is not None and param.fqn[place[0] : place[1]] != str(place[2]):
            return True
        return self._renames_mtp(param)

    def _renames_mtp(self, param: ParamInfo) -> bool:
        """Whether a parameter is of an MTP layer's inner layer, and that is no hybrid stack."""
        if MTP_LAYER not in param.fqn or self._mtp == MTP_LAYER:
            return False
        tokens = param.fqn.split(".")
        return MTP_LAYER in tokens and param.nearest("mtp_layer_pattern")[1] is None

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        return ()

    def rename(self, param: ParamInfo, name: str) -> str:
        """Returns the name with the global layer number."""
        if self._renames_mtp(param):
            tokens = [self._mtp if token == MTP_LAYER else token for token in name.split(".")]
            renamed = ".".join(tokens)
            return self._numbered(param, renamed, name)
        return self._numbered(param, name, name)

    def _numbered(self, param: ParamInfo, name: str, before: str) -> str:
        """Returns a name with the global layer number; `before` is what it was with the old one."""
        place = self._place(param)
        if place is None:
            return name
        start, stop, number = place
        if not before.startswith(param.fqn[:stop]):
            # An expert's index before the layers was renamed: what follows it has moved.
            start, stop = start - len(param.fqn) + len(before), stop - len(param.fqn) + len(before)
        return name[:start] + str(number) + name[stop:]


def _layer_number(module: Any) -> int | None:
    number = attribute(module, "layer_number")
    return number if isinstance(number, int) else None
