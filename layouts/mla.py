"""Multi-latent attention: one fused down-projection is two on disk, as without the fusion."""

import re
from collections.abc import Mapping
from typing import Literal

from .join import fused
from .provider import Level, ParamInfo, attribute, matcher
from .stages import Concat, Stage

MLA_FUSED = "linear_qkv_down_proj"
ABSORBED_NORM = "input_layernorm"
_OWN = MLA_FUSED + "."
_FUSED = re.compile(rf"^(.*\.)?{MLA_FUSED}\.(weight|layer_norm_weight|layer_norm_bias)$")


class MLADownProjection:
    """Splits `linear_qkv_down_proj`, so that a checkpoint opens with the fusion and without.

    | parameter | on disk |
    |---|---|
    | `….linear_qkv_down_proj.weight` | `….linear_q_down_proj.weight` and `….linear_kv_down_proj.weight` |
    | `X.self_attention.linear_qkv_down_proj.layer_norm_weight` (absorbed) | `X.input_layernorm.weight` |

    | form | reads |
    |---|---|
    | `MLADownProjection()` | `q_lora_rank`, `kv_lora_rank` and `qk_pos_emb_head_dim` of the owner's config |
    | `MLADownProjection({"*": (24, 12)})` | global rows of both projections, for patterns of names |

    Whether the projection is tensor-parallel or whole on every rank is told by its rows. Each of
    the two has its own optimizer scalars and options on disk, as without the fusion. A fused model
    also loads a fused tensor, as Megatron-LM 0.19 writes it.

    Args:
        rows: Global rows of the query and of the latent projection, for each pattern of names.
        components: `'split'`, or `'fused'` to keep tensors and names as the module has them.
        fused_over: With `'fused'`, the tensor-parallel size whose order the one tensor has.

    Source: megatron/core/transformer/multi_latent_attention.py, sharded_state_dict.
    """

    name = "mla-down-projection"
    level = Level.COMPONENT

    def __init__(
        self,
        rows: Mapping[str, tuple[int, int]] | None = None,
        *,
        components: Literal["split", "fused"] = "split",
        fused_over: int = 1,
    ) -> None:
        self._rules = [(matcher([pattern]), sizes) for pattern, sizes in (rows or {}).items()]
        self._fused = components == "fused"
        self._fused_over = fused_over

    def claims(self, param: ParamInfo) -> bool:
        if _OWN not in param.fqn or _FUSED.match(param.fqn) is None:
            return False
        return bool(param.owners) or any(matches(param.fqn) for matches, _ in self._rules)

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        if not param.fqn.endswith(".weight"):
            return ()
        query, latent = self._sizes(param)
        rows, count = param.local_shape[0], param.grid.size("tp")
        if rows != query + latent:
            if query % count or latent % count or rows * count != query + latent:
                raise param.fail(
                    f"it has {rows} rows, neither the {query} + {latent} of both projections nor "
                    f"a share of {count} tensor-parallel ranks in each",
                    "Choose a tensor-parallel size that divides both.",
                )
            query, latent = query // count, latent // count
        dot = "" if param.fqn.startswith(_OWN) else "."
        names = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
        parts = ((dot + names[0], query), (dot + names[1], latent))
        split = Concat(0, parts, "down-projections", f"{dot}{_OWN}weight")
        return fused(split, self._fused_over) if self._fused else (split,)

    def rename(self, param: ParamInfo, name: str) -> str:
        """Returns the name before the parts' own, or the layer's norm for an absorbed one."""
        if self._fused:
            return name
        head, _, tail = name.rpartition(_OWN)
        if tail == "weight":
            return head.rstrip(".")
        owner = head.rstrip(".").rpartition(".")[0]
        return f"{owner}.{ABSORBED_NORM}.{tail[len('layer_norm_') :]}".lstrip(".")

    def _sizes(self, param: ParamInfo) -> tuple[int, int]:
        for matches, sizes in self._rules:
            if matches(param.fqn):
                return sizes
        for _, module in reversed(param.owners):
            config = attribute(module, "config")
            if getattr(config, "q_lora_rank", None) is not None:
                latent = int(config.kv_lora_rank) + int(config.qk_pos_emb_head_dim)
                return int(config.q_lora_rank), latent
        raise param.fail(
            "no owner has a config with q_lora_rank and kv_lora_rank",
            "Pass MLADownProjection({name: (query rows, latent rows)}).",
        )
