"""Views of a rank's tensors: the elements that a box names, where they lie, without a copy."""

import torch

from shardplan.layouts.slab import Box, contiguous_strides

from ..compat import local_tensor


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor | None:
    """Returns the elements of a box as a view of a tensor's local storage.

    Args:
        tensor: What the rank holds: any shape whose row-major elements are the storage.
        box: A box with its view of that storage, in elements.

    Returns:
        A tensor of `box.sizes` that shares memory with `tensor`; None if the tensor's memory is
        laid out so that no view can show the box, or holds conjugates or negatives of its
        values (then a contiguous copy must serve).
    """
    local = _plain(tensor)
    if local.is_conj() or local.is_neg():
        return None
    if local.is_contiguous():
        return local.as_strided(box.sizes, box.strides, local.storage_offset() + box.start)
    shape = tuple(local.shape)
    strides = contiguous_strides(shape)
    first, rest = [], box.start
    for step in strides:
        index, rest = divmod(rest, step)
        first.append(index)
    dims = []
    for size, stride in zip(box.sizes, box.strides, strict=True):
        if size == 1:
            dims.append((1, 0))
        elif stride in strides:
            dim = max(d for d, step in enumerate(strides) if step == stride and shape[d] > 1)
            if first[dim] + size > shape[dim]:
                return None
            dims.append((size, local.stride(dim)))
        else:
            return None
    start = local.storage_offset() + sum(
        index * local.stride(dim) for dim, index in enumerate(first)
    )
    return local.as_strided([s for s, _ in dims], [s for _, s in dims], start)


def is_all(tensor: torch.Tensor, box: Box) -> bool:
    """Returns whether a box is all of a plain tensor, which can be filled as it is.

    Most tensors are, and each view costs as much as all else that reading a small one does.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.shape == box.sizes
        and not box.start
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def copy_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns the elements of a box as a new tensor of its sizes."""
    flat = _plain(tensor).resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(box.sizes, box.strides, flat.storage_offset() + box.start).clone()


def write_back(tensor: torch.Tensor, box: Box, data: torch.Tensor) -> None:
    """Writes the elements of a box, and no others, into a tensor that no view can reach into."""
    local = _plain(tensor)
    order = torch.arange(local.numel(), device=local.device)
    places = order.as_strided(box.sizes, box.strides, box.start).reshape(-1)
    local[torch.unravel_index(places, local.shape)] = data.reshape(-1).to(local.dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a plain tensor's elements, row-major: uint8, of 1 dim.

    They share the tensor's memory where that is contiguous.
    """
    whole = tensor.detach().contiguous()
    # A tensor of one element is contiguous at any stride, and view(dtype) wants a stride of 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's local part as torch's own class: a subclass would be pickled by name."""
    local = local_tensor(tensor).detach()
    return local if type(local) is torch.Tensor else local.as_subclass(torch.Tensor)
