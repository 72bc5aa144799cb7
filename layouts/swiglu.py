"""SwiGLU halves: a fused first projection is a gate and an up projection on disk."""

import re
from collections.abc import Iterable
from typing import Literal

from .provider import Level, ParamInfo, attribute, matcher
from .stages import Concat, Fuse, Stage

_FC1 = re.compile(r"(?:.*\.)?linear_fc1\.(?:weight|bias)\d*$")


class SwiGLU:
    """Splits fused SwiGLU projections into `…_w` (gate) and `…_v` (up).

    Each tensor-parallel rank holds its share of the gate, then its share of the up projection:
    local rows `[gate_t; up_t]`. Whether a projection is fused is read from `gated_linear_unit`
    of the nearest owner (or of its config), never from `partition_stride`, which Transformer
    Engine's grouped experts leave at 1.

    | form | claims |
    |---|---|
    | `SwiGLU()` | weight and bias of a `linear_fc1` whose owner says `gated_linear_unit`: dense, shared, grouped and sequential experts |
    | `SwiGLU(["*.gate_up.weight"])` | names that match, live or not |

    Args:
        patterns: Names of fused projections.
        sizes: Rows of gate and up that a tensor-parallel rank holds; halves if not given.
        dim: Dim of the rows; if not given dim 0, or dim 1 of stacked experts `[E, 2F, H]`.
        components: `'split'` writes `_w` and `_v`; `'fused'` keeps one tensor in the order of
            a model without tensor parallelism, `[gate; up]`.

    Source: megatron/core/transformer/mlp.py; the names are those of its fsdp_dtensor path.
    """

    name = "swiglu"
    level = Level.COMPONENT

    def __init__(
        self,
        patterns: Iterable[str] = (),
        *,
        sizes: tuple[int, int] | None = None,
        dim: int | None = None,
        components: Literal["split", "fused"] = "split",
    ) -> None:
        self._matches = matcher(patterns)
        self._sizes = sizes
        self._dim = dim
        self._fused = components == "fused"

    def claims(self, param: ParamInfo) -> bool:
        if self._matches(param.fqn):
            return True
        if not param.owners or not _FC1.match(param.fqn):
            return False
        for _, module in reversed(param.owners):
            for source in (module, attribute(module, "config")):
                gated = attribute(source, "gated_linear_unit")
                if gated is not None:
                    return bool(gated)
        return False

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        shape = param.local_shape
        dim = self._dim if self._dim is not None else int(param.is_expert and len(shape) == 3)
        if dim >= len(shape):
            raise param.fail(
                f"SwiGLU halves lie along dim {dim} but the tensor has {len(shape)} dims",
                "Pass SwiGLU(dim=...).",
            )
        rows = shape[dim]
        if self._sizes is None and rows % 2:
            raise param.fail(
                f"two SwiGLU halves can't share {rows} rows of dim {dim} evenly",
                "Pass the two sizes that this rank holds to SwiGLU(sizes=...).",
            )
        gate, up = self._sizes or (rows // 2, rows // 2)
        split = Concat(dim, (("_w", gate), ("_v", up)), "SwiGLU halves")
        return (split, Fuse(dim)) if self._fused else (split,)
