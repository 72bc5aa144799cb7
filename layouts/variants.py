"""Other forms of the same parameter on disk, so that a load finds whichever was saved.

| form saved | looked for when the layout is |
|---|---|
| components fused in canonical order | split |
| components split | fused |
| experts stacked in one tensor | single |
| experts single | stacked |
| MTP's inner layer as `mtp_model_layer` | `transformer_layer` |
| the norm in MLA's fused down-projection as its own | the layer's `input_layernorm` |
| the same as the layer's | its own |
"""

import dataclasses
from collections.abc import Iterator

from .grid import Grid
from .join import Join
from .layout import EXPERT, Layout
from .mla import ABSORBED_NORM, MLA_FUSED
from .pipeline import MTP_LAYER
from .stages import Concat, ExpertIndex, Fuse, Interleave, Shard, Stack, Stage, Unstack


def variants(layout: Layout, grid: Grid) -> Iterator[Layout]:
    """Yields a parameter's layouts for every form on disk, its own first.

    Args:
        layout: The layout that the providers gave.
        grid: The grid of its family.
    """
    if any(suffix for s in layout.stages if isinstance(s, Join) for suffix, _, _ in s.tensors):
        yield layout  # another project's tensors have one form
        return
    for own in (layout, _older_name(layout), _absorbed_norm(layout)):
        if own is not None:
            yield from _forms(own, grid)


def _older_name(layout: Layout) -> Layout | None:
    """Returns the layout under the name that some releases give an MTP layer's inner layer."""
    if f".{MTP_LAYER}." not in layout.fqn or f".{MTP_LAYER}." in layout.name:
        return None
    tokens, found = layout.name.split("."), layout.fqn.split(".").index(MTP_LAYER)
    if found >= len(tokens):
        return None
    single = layout.single.split(".")
    if single[: found + 1] == tokens[: found + 1]:
        single[found] = MTP_LAYER
    tokens[found] = MTP_LAYER
    return dataclasses.replace(layout, name=".".join(tokens), single=".".join(single))


def _absorbed_norm(layout: Layout) -> Layout | None:
    """Returns the layout of an absorbed norm under its module's name if it had the layer's."""
    if MLA_FUSED not in layout.fqn:
        return None
    tokens = layout.fqn.split(".")
    if tokens[-2:-1] != [MLA_FUSED] or not tokens[-1].startswith("layer_norm_"):
        return None
    own = ".".join(tokens[-3:])
    norm = f"{ABSORBED_NORM}.{tokens[-1].removeprefix('layer_norm_')}"
    for one, other in ((own, norm), (norm, own)):
        if layout.name.endswith(one):
            return dataclasses.replace(layout, name=layout.name.removesuffix(one) + other)
    return None


def _forms(layout: Layout, grid: Grid) -> Iterator[Layout]:
    for form in (layout, _joined(layout)):
        if form is not None:
            yield form
            other = _stacked(form, grid)
            if other is not None:
                yield other


def _joined(layout: Layout) -> Layout | None:
    """Returns the layout with its components fused if they were split, and the reverse."""
    stages = layout.stages
    if any(isinstance(stage, Fuse | Join) for stage in stages):
        kept = tuple(stage for stage in stages if not isinstance(stage, Fuse | Join))
        whole = next((s.whole for s in kept if isinstance(s, Concat) and s.whole), "")
        return dataclasses.replace(
            layout,
            name=layout.name.removesuffix(whole),
            stages=kept,
            single=layout.single.removesuffix(whole),
        )
    for at, stage in enumerate(stages):
        if isinstance(stage, Concat | Interleave):
            last = at + 1
            after = stages[last] if last < len(stages) else None
            if isinstance(after, Shard) and after.axis != "ep":
                last += 1
            joined: tuple[Stage, ...] = (*stages[:last], Fuse(stage.dim), *stages[last:])
            whole = (stage.whole or "") if isinstance(stage, Concat) else ""
            single = layout.single and layout.single + whole
            return dataclasses.replace(
                layout, name=layout.name + whole, stages=joined, single=single
            )
    return None


def _stacked(layout: Layout, grid: Grid) -> Layout | None:
    """Returns the layout with its experts in one tensor if they were single, and the reverse."""
    stages = layout.stages
    last = stages[-1]
    if isinstance(last, ExpertIndex) and EXPERT in layout.name:
        total = last.num_local_experts * grid.size(last.axis)
        name = layout.name.replace("." + EXPERT, "").replace(EXPERT, "")
        return Layout(layout.fqn, name, (*stages, Stack(total)), layout.family)
    if isinstance(last, Unstack):
        parts = layout.name.split("." + EXPERT)
        return Layout(layout.fqn, "".join(parts), stages[:-1], layout.family)
    if isinstance(last, Shard) and last.axis == "ep" and layout.single:
        return Layout(layout.fqn, layout.single, (*stages, Unstack()), layout.family)
    return None
