"""Memory for tensors that have none: meta tensors that a load is to fill."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat import local_tensor, storage_ident
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
    memory: dict[int, torch.Tensor] = {}
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not local_tensor(value).is_meta:
            continue
        if id(value) not in fresh:
            fresh[id(value)] = _empty(value, device, memory)
        values[number] = fresh[id(value)]
        put(root, paths[number], values[number])
        made.append(paths[number])
    return made


def _empty(tensor: torch.Tensor, device: str, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns an empty tensor of the same form, a DTensor's with the same placements.

    Tensors of one meta storage, such as tied weights, get one memory.
    """
    local = local_tensor(tensor)
    ident = storage_ident(local)
    if ident not in memory:
        nbytes = local.untyped_storage().nbytes()
        memory[ident] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    empty = torch.empty(0, dtype=local.dtype, device=device)
    storage = memory[ident].untyped_storage()
    empty.set_(storage, local.storage_offset(), local.shape, local.stride())
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
