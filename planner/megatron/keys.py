"""The keys of Megatron-LM's `fsdp_dtensor` checkpoints: with wrappers' prefixes, scalars by component.

| value | key |
|---|---|
| weight | `model.module.decoder.layers.0.mlp.linear_fc1.weight_w` |
| moment | `optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg` |
| step | `optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.step` |
| group | `optimizer.param_to_group_meta.module.module.module.decoder.layers.0.mlp.linear_fc1.weight.lr` |

Loading needs none of this: `LayoutAwareLoadPlanner` finds these keys and the plain ones.

Source: megatron/training/checkpointing.py, preprocess_fsdp_dtensor_state_dict, and
megatron/core/transformer/fsdp_dtensor_checkpoint.py.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    GDN,
    Fuse,
    Join,
    Layout,
    LayoutProvider,
    Mamba,
    MLADownProjection,
    PipelineLayers,
)
from shardplan.layouts.model import WRAPPERS

from ..planning.manifest import separate_parts
from ..planning.optimizer import components
from ..planning.table import Chunk
from ..save import LayoutAwareSavePlanner
from ..state.entries import Found, Known, Names, Path


class FsdpDtensorNames(Names):
    """Finds parameters by the paths of a state dict, and keeps what wrappers put before a name.

    Args:
        chunks: The model's chunks.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        kept = tuple(chunks)
        super().__init__((chunk.section, chunk.layouts) for chunk in kept)
        self._components = [
            {fqn: found for fqn, layout in chunk.layouts.items() if (found := split_parts(layout))}
            for chunk in kept
        ]
        self._known = [Known(found) for found in self._components]

    def find(self, path: Path) -> Found | None:
        """Returns the parameter that a path speaks of, None if it speaks of none.

        Raises:
            LayoutError: If it may speak of a parameter of two chunks of the model.
        """
        found = super().find(path)
        if found is None:
            return self._component(path)
        place = found.place
        element = path[len(place.before)]
        if place.head or element == found.fqn or not isinstance(element, str):
            return found
        return found._replace(place=place._replace(head=_prefix(element, found.fqn)))

    def _component(self, path: Path) -> Found | None:
        """Finds a name that ends in a component's suffix, `….linear_fc1.weight_w`."""
        for chunk in self.chunks_of(path):
            for at in range(len(path) - 1, max(len(path) - 3, -1), -1):
                element = path[at]
                if not isinstance(element, str):
                    continue
                for cut in (element.rfind("_"), element.rfind(".")):
                    suffix = element[cut:]
                    fqn = self._known[chunk].find(element[:cut]) if cut > 0 else None
                    if fqn is not None and suffix in self._components[chunk][fqn]:
                        found = super().find((*path[:at], fqn, *path[at + 1 :]))
                        if found is None:
                            continue
                        head = _prefix(element, found.fqn + suffix)
                        place = found.place._replace(head=head, tail=suffix)
                        return found._replace(place=place)
        return None


def split_parts(layout: Layout) -> tuple[str, ...]:
    """Returns the suffixes of the components that stand one by one on disk, scalars left whole."""
    if any(isinstance(stage, Fuse | Join) for stage in layout.stages) or separate_parts(layout):
        return ()
    return components(layout)


def _prefix(element: str, name: str) -> str:
    """Returns the wrappers' tokens before a name, each with its dot."""
    if element.endswith("." + name):
        return element[: -len(name)]  # a user's own submodule may have a wrapper's token
    head = ""
    for token in element.split("."):
        if token not in WRAPPERS:
            break
        head += token + "."
    return head


def by_component(names: FsdpDtensorNames, chunks: Iterable[Chunk], state: Any) -> Any:
    """Returns a state dict in which a fused parameter's scalars stand with each component.

    Tensors that are laid out as their parameter stay under its name; the planner splits those.
    """
    kept = tuple(chunks)

    def descend(path: Path, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if path and path[-1] == "state":
            return _split(path, value, names, kept)
        return {key: descend((*path, key), inner) for key, inner in value.items()}

    return {
        key: value if str(key).startswith("model") else descend((key,), value)
        for key, value in state.items()
    }


def _split(
    path: Path, state: Mapping[Any, Any], names: FsdpDtensorNames, chunks: tuple[Chunk, ...]
) -> dict[Any, Any]:
    split: dict[Any, Any] = {}
    for name, slots in state.items():
        split[name] = slots
        if not isinstance(name, str) or not isinstance(slots, Mapping):
            continue
        found = names.find((*path, name, ""))
        if found is None:
            continue
        layout = chunks[found.chunk].layouts[found.fqn]
        parts = split_parts(layout)
        grid = chunks[found.chunk].grids.of(layout.family)
        scalars = {
            slot: value
            for slot, value in slots.items()
            if _is_scalar(slot, value, layout.storage.numel(grid))
        }
        if parts and scalars:
            split[name] = {slot: value for slot, value in slots.items() if slot not in scalars}
            for part in parts:
                split[name + part] = dict(scalars)
    return split


def _is_scalar(slot: str, value: Any, numel: int) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    return value.numel() == 1 and (slot == "step" or numel != 1)


def whole_projections(tensor_parallel_size: int = 1) -> list[LayoutProvider]:
    """Returns the providers for checkpoints of Megatron-LM 0.19's own loop.

    It splits SwiGLU and nothing else: the projections of a Gated DeltaNet, of Mamba and of fused
    latent attention are one tensor each, rank after rank, which only the same tensor-parallel
    size reads rightly there; MTP's inner layer is `mtp_model_layer`. Pass them as `layouts=`, to
    save for that loop, and to load what it wrote at a size of more than 1. What it wrote at 1 is
    found without them.

    Args:
        tensor_parallel_size: That of the Megatron-LM run that reads or wrote the checkpoint.
    """
    own: list[LayoutProvider] = [
        GDN(components="fused", fused_over=tensor_parallel_size),
        Mamba(components="fused", fused_over=tensor_parallel_size),
        MLADownProjection(components="fused", fused_over=tensor_parallel_size),
        PipelineLayers(mtp="mtp_model_layer"),
    ]
    names = {provider.name for provider in own}
    return [*(provider for provider in DEFAULT_LAYOUTS if provider.name not in names), *own]


class FsdpDtensorSavePlanner(LayoutAwareSavePlanner):
    """Saves under the keys of Megatron-LM's own `fsdp_dtensor` checkpoints.

    Takes what `LayoutAwareSavePlanner` takes. Projections of several components are split, as
    Megatron-Bridge (Gated DeltaNet) and newer releases (latent attention) have them; what
    Megatron-LM's own loop reads of them is `layouts=whole_projections(its tensor-parallel size)`.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._table = copy.copy(self._table)  # another planner may have it too
        self._table.names = self._names = FsdpDtensorNames(self._table.chunks)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state dict of this save; see `torch.distributed.checkpoint.SavePlanner`."""
        split = by_component(self._names, self._table.chunks, state_dict)
        super().set_up_planner(split, storage_meta, is_coordinator)
