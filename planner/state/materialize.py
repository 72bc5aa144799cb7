"""Memory for tensors that have none: meta tensors that a load is to fill."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat import local_tensor
from .entries import Path, put


def materialize(root: Any, paths: Sequence[Path], values: list[Any], device: str) -> list[Path]:
    """Replaces meta tensors by empty ones, in a state dict and in the list of its values.

    Args:
        root: The state dict.
        paths: Path of each value.
        values: The values; changed in place.
        device: Where the memory is made.

    Returns:
        The paths of the tensors that were replaced. Who held the old ones still does: a module
        takes the new ones with `load_state_dict(..., assign=True)`.
    """
    made: list[Path] = []
    fresh: dict[int, torch.Tensor] = {}
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not local_tensor(value).is_meta:
            continue
        if id(value) not in fresh:
            fresh[id(value)] = _empty(value, device)
        values[number] = fresh[id(value)]
        put(root, paths[number], values[number])
        made.append(paths[number])
    return made


def _empty(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns an empty tensor of the same form, a DTensor's with the same placements."""
    local = local_tensor(tensor)
    empty = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=device)
    if not isinstance(tensor, DTensor):
        return empty
    return DTensor.from_local(
        empty,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
