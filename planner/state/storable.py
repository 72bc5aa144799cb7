"""Which tensors can be stored element by element, and which are refused by name.

What is stored is a dense, strided run of elements of one dtype. A tensor whose elements are not
its own (a wrapper around packed integers and scales), are not all there (sparse) or are of unequal
shapes (nested) would come back as something else, so it is refused with what to store instead.
"""

import torch
from torch.nn import Buffer, Parameter

from shardplan.layouts import UnstorableValueError

from ..compat import is_traceable_wrapper_subclass, local_tensor
from .entries import Path, key_of

# Tensors that are nothing but their elements.
PLAIN = frozenset((torch.Tensor, Parameter, Buffer))
# torch has names for these widths, but neither arithmetic nor, in DCP, a stored form.
_UNSTORABLE = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)
)


def check_storable(path: Path, tensor: torch.Tensor) -> None:
    """Checks that a tensor's elements can be stored and filled.

    Raises:
        UnstorableValueError: If they can't; the message names the key, the kind of tensor and what to
            store instead.
    """
    local = local_tensor(tensor)
    # One look at what almost every tensor is: planning reads thousands of them.
    if (
        type(local) in PLAIN
        and local.layout is torch.strided
        and local.dtype not in _UNSTORABLE
        and not (local.is_meta or local.is_quantized or local.is_nested)
    ):
        return
    fault = storage_fault(local)
    if fault is not None:
        raise UnstorableValueError(f"{key_of(path)}: {fault}.")


def storage_fault(local: torch.Tensor) -> str | None:
    """Returns why the elements of a local tensor can't be stored or filled, None if they can."""
    if type(local) not in PLAIN and is_traceable_wrapper_subclass(local):
        inner, _ = local.__tensor_flatten__()
        return (
            f"a {type(local).__name__} wraps other tensors ({', '.join(map(str, inner))}) and has "
            "no elements of its own. Put those into the state dict, each under a key of its own"
        )
    if local.is_nested:
        return "a nested tensor has no one shape. Store its values() and offsets()"
    if local.layout is not torch.strided:
        return (
            f"a tensor of layout {local.layout} does not hold all of its elements. Store its "
            "indices and values, or to_dense()"
        )
    if local.is_quantized:
        return (
            f"a quantized tensor ({local.dtype}) needs its scale and zero point. Store int_repr() "
            "with them"
        )
    if local.dtype in _UNSTORABLE:
        return f"torch can't store {local.dtype}. Store view(torch.uint8)"
    if local.is_meta:
        return (
            f"a meta tensor of shape {tuple(local.shape)} has no data. Give it memory with "
            "to_empty(device=...), or pass policies=LoadPolicies(meta='cpu') to the load planner"
        )
    return None


def overlaps(tensor: torch.Tensor) -> bool:
    """Returns whether several elements of a tensor share memory, as after `expand`."""
    local = local_tensor(tensor)
    return 0 in local.stride() and any(
        step == 0 and size > 1 for size, step in zip(local.shape, local.stride(), strict=True)
    )
