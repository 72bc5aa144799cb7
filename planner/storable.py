"""Which tensors can be stored element by element, and which are refused by name.

| name | does |
|---|---|
| `storage_fault` | why a tensor can't be stored or filled, None if it can |
| `is_meta` | whether a tensor has a shape and no data |

What is stored is a dense, strided run of elements of one dtype. A tensor whose elements are not
its own (a wrapper around packed integers and scales), are not all there (sparse) or are of unequal
shapes (nested) would come back as something else, so it is refused with what to store instead.
"""

from typing import Any

import torch
from torch.nn import Buffer, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .compat import local_tensor

_PLAIN = frozenset((torch.Tensor, Parameter, Buffer))
# torch has names for these widths, but neither arithmetic nor a stored form.
_UNSTORABLE = frozenset(
    getattr(torch, f"{sign}{bits}")
    for sign in ("int", "uint")
    for bits in range(1, 8)
    if hasattr(torch, f"{sign}{bits}")
)


def is_meta(tensor: torch.Tensor) -> bool:
    """Returns whether what this rank holds of a tensor has a shape and no data."""
    return local_tensor(tensor).is_meta


def storage_fault(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor's elements can't be stored or filled, None if they can.

    The sentence names the kind of tensor and what to store instead; the caller names the key.
    """
    local = local_tensor(tensor)
    if type(local) not in _PLAIN and is_traceable_wrapper_subclass(local):
        inner, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
        return (
            f"a {type(local).__name__} wraps other tensors ({', '.join(map(str, inner))}) and has "
            "no elements of its own. Put those into the state dict, each under a key of its own, "
            "or give it the hooks __create_chunk_list__ and __create_write_items__"
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
    return None


def overlaps(tensor: Any) -> bool:
    """Returns whether several elements of a tensor share memory, as after `expand`."""
    local = local_tensor(tensor)
    return any(
        step == 0 and size > 1 for size, step in zip(local.shape, local.stride(), strict=True)
    )
