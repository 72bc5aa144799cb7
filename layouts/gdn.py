"""Gated DeltaNet components: the fused input projection and convolution, one tensor a part."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .join import fused
from .provider import Level, ParamInfo, attribute, matcher
from .stages import Concat, Part, Stage

_NAMES = ("query", "key", "value", "z", "beta", "alpha")
_FUSED = re.compile(r"(?:^|\.)(?:in_proj|conv1d)\.(?:weight|bias)$")
_CONVOLVED = ("query", "key", "value")


class GDN:
    """Splits a Gated DeltaNet's `in_proj` and `conv1d` into their components.

    | parameter | components |
    |---|---|
    | `in_proj.weight`, `.bias` | `in_proj_split_names` with the rows `in_proj_split_sections` (GDN2's seven too), else query, key, value, z, beta, alpha from `qk_dim`, `v_dim`, `num_value_heads` |
    | `conv1d.weight`, `.bias` | query, key, value |
    | `A_log`, `dt_bias`, `out_norm`, `out_proj` | none: they are plain shards, see `TensorParallel` |

    | form | reads |
    |---|---|
    | `GDN()` | the nearest owner with these attributes |
    | `GDN({"*.in_proj.weight": {"query": 4, ...}})` | global rows of each component |

    Args:
        components_of: For each pattern of names, the global rows of each component in order.
        components: `'split'` writes `….query` and so on; `'fused'` keeps one tensor in
            canonical order, as a model without tensor parallelism holds it.
        fused_over: With `'fused'`, the tensor-parallel size whose order the one tensor has:
            Megatron-LM's own loop never splits it, and writes rank after rank.

    Source: megatron/core/ssm/gated_delta_net; the names are those of its fsdp_dtensor path.
    """

    name = "gdn"
    level = Level.COMPONENT

    def __init__(
        self,
        components_of: Mapping[str, Mapping[str, int]] | None = None,
        *,
        components: Literal["split", "fused"] = "split",
        fused_over: int = 1,
    ) -> None:
        self._rules = [
            (matcher([pattern]), tuple(sizes.items()))
            for pattern, sizes in (components_of or {}).items()
        ]
        self._fused = components == "fused"
        self._fused_over = fused_over

    def claims(self, param: ParamInfo) -> bool:
        if any(matches(param.fqn) for matches, _ in self._rules):
            return True
        if not param.owners or not _FUSED.search(param.fqn):
            return False
        owner, module = _owner(param)
        return module is not None and _role(param.fqn, owner) is not None

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        parts = next(
            (_local(param, sizes) for matches, sizes in self._rules if matches(param.fqn)),
            None,
        )
        if parts is None:
            owner, module = _owner(param)
            parts = _sections(param, module)
            if _role(param.fqn, owner) == "conv1d":
                parts = tuple(part for part in parts if part[0] in _CONVOLVED)
        split = Concat(0, tuple(("." + name, size) for name, size in parts), "GDN components")
        return fused(split, self._fused_over) if self._fused else (split,)


def _owner(param: ParamInfo) -> tuple[str, Any]:
    """Returns the nearest owner that describes itself as a Gated DeltaNet."""
    for path, module in reversed(param.owners):
        if attribute(module, "in_proj_split_sections") is not None or (
            attribute(module, "qk_dim") is not None and attribute(module, "v_dim") is not None
        ):
            return path, module
    return "", None


def _role(fqn: str, owner: str) -> str | None:
    tail = fqn[len(owner) + 1 :] if owner else fqn
    role, _, kind = tail.partition(".")
    return role if role in ("in_proj", "conv1d") and kind in ("weight", "bias") else None


def _sections(param: ParamInfo, module: Any) -> tuple[Part, ...]:
    """Returns the name and local rows of each component of a live module's `in_proj`."""
    sections: Sequence[int] | None = getattr(module, "in_proj_split_sections", None)
    if sections is not None:
        names = tuple(getattr(module, "in_proj_split_names", None) or _NAMES)
        if len(names) != len(sections):
            raise param.fail(
                f"{len(names)} names {names} for {len(sections)} sections {tuple(sections)}",
                "in_proj_split_names and in_proj_split_sections of the module must match.",
            )
        return tuple(zip(names, (int(size) for size in sections), strict=True))
    heads = int(module.num_value_heads)
    rows = (module.qk_dim, module.qk_dim, module.v_dim, module.v_dim, heads, heads)
    return _local(param, tuple(zip(_NAMES, (int(size) for size in rows), strict=True)))


def _local(param: ParamInfo, sizes: tuple[Part, ...]) -> tuple[Part, ...]:
    """Divides global rows by the tensor-parallel size."""
    count = param.grid.size("tp")
    for name, size in sizes:
        if size % count:
            raise param.fail(
                f"the {size} rows of its GDN component {name!r} can't be divided by {count} "
                "tensor-parallel ranks",
                "Choose a tensor-parallel size that divides every component.",
            )
    return tuple((name, size // count) for name, size in sizes)
