"""Packed projections that say how they are packed: Mamba's, and any with `partition_sizes`."""

from collections.abc import Mapping
from typing import Literal

from .join import fused
from .provider import Level, ParamInfo, attribute, matcher
from .stages import Concat, Part, Stage

# Megatron's names for the parts, by how many there are.
_NAMES = {5: ("z", "x", "B", "C", "dt"), 3: ("x", "B", "C")}


class Mamba:
    """Splits packed column-parallel tensors into their parts.

    | parameter | parts |
    |---|---|
    | `in_proj.weight` | z, x, B, C, dt |
    | `conv1d_weight`, `conv1d_bias` | x, B, C |
    | `A_log`, `dt_bias`, `D`, `norm.weight` | none: they are plain shards, see `TensorParallel` |

    | form | reads |
    |---|---|
    | `Mamba()` | the parameter's `partition_sizes`: rows of each part on this tensor-parallel rank |
    | `Mamba({"*.in_proj.weight": {"z": 8, ...}})` | global rows of each part |

    A Gated DeltaNet is left to `GDN`, whatever marks it has.

    Args:
        parts_of: For each pattern of names, the global rows of each part in order.
        components: `'split'` writes `….z` and so on; `'fused'` keeps one tensor.
        fused_over: With `'fused'`, the tensor-parallel size whose order the one tensor has.

    Source: megatron/core/ssm/mamba_mixer.py; the parts' names are those of its sharded_state_dict.
    """

    name = "mamba"
    level = Level.COMPONENT

    def __init__(
        self,
        parts_of: Mapping[str, Mapping[str, int]] | None = None,
        *,
        components: Literal["split", "fused"] = "split",
        fused_over: int = 1,
    ) -> None:
        self._rules = [
            (matcher([pattern]), tuple(sizes.items()))
            for pattern, sizes in (parts_of or {}).items()
        ]
        self._fused = components == "fused"
        self._fused_over = fused_over

    def claims(self, param: ParamInfo) -> bool:
        if any(matches(param.fqn) for matches, _ in self._rules):
            return True
        if not param.attribute("partition_sizes"):
            return False
        return not any(
            attribute(module, "in_proj_split_sections") is not None
            or attribute(module, "qk_dim") is not None
            for _, module in param.owners
        )

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        dim = int(param.attribute("partition_dim", 0))
        parts = self._parts(param)
        split = Concat(dim, tuple(("." + name, size) for name, size in parts), "packed parts")
        return fused(split, self._fused_over) if self._fused else (split,)

    def _parts(self, param: ParamInfo) -> tuple[Part, ...]:
        """Returns the name and the local rows of each part."""
        for matches, sizes in self._rules:
            if matches(param.fqn):
                return tuple((name, _share(param, name, size)) for name, size in sizes)
        local = tuple(int(size) for size in param.attribute("partition_sizes"))
        names = _NAMES.get(len(local), tuple(map(str, range(len(local)))))
        return tuple(zip(names, local, strict=True))


def _share(param: ParamInfo, name: str, size: int) -> int:
    count = param.grid.size("tp")
    if size % count:
        raise param.fail(
            f"the {size} rows of its part {name!r} can't be divided by {count} tensor-parallel "
            "ranks",
            "Choose a tensor-parallel size that divides every part.",
        )
    return size // count
