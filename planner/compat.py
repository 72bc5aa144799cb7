"""The one place that touches private names of torch, so that a release breaks one file.

| name | reaches for |
|---|---|
| `local_tensor` | a DTensor's local tensor without the autograd wrapper of `to_local()` |
| `dtensor_spec` | its mesh and placements as one comparable value |
| `with_local` | a DTensor like another one, with another local tensor, on any device |
| `is_flattened` | whether FSDP1 wraps any part of a module |
| `root_mesh` | the mesh that a submesh was sliced from |
| `calling_save` | what `dcp.save` knows and does not tell its planner: the writer, the mode |
| `ShardedTensor` | what FSDP1 shards into where it was given no mesh |
| `stores_aliases` | whether a writer can give one stored tensor two keys |
| `keeps_one_chunk_per_key` | what torch's own writers can hold |
| `storage_info`, `memory_format_of` | types inside stock `.metadata` |
| `rebuild_tensor` | the function that a pickled tensor names |
| `is_traceable_wrapper_subclass` | whether a tensor is made of inner tensors |

Tested on torch 2.13.0 and 2.14.1.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    SerializationFormat,
    _StorageInfo,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

__all__ = ["ShardedTensor"]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank stores of a tensor: a DTensor's local part, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(tensor: Any, local: torch.Tensor) -> Any:
    """Returns a DTensor of the same mesh and placements with another local tensor.

    `DTensor.from_local` would move the local tensor to the mesh's device.
    """
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_spec(tensor: Any) -> Any:
    """Returns a DTensor's mesh, placements and shape as one value that can be compared."""
    return tensor._spec


def is_flattened(module: Any) -> bool:
    """Returns whether FSDP1 has flattened a module's parameters, so that their shapes say nothing."""
    modules = getattr(module, "modules", None)
    return modules is not None and any(isinstance(m, FullyShardedDataParallel) for m in modules())


def root_mesh(mesh: Any) -> Any:
    """Returns the mesh that `mesh` was sliced from, itself if it was not."""
    find = getattr(mesh, "_get_root_mesh", None)
    return find() if find is not None else mesh


@dataclass(frozen=True, slots=True)
class SaveCall:
    """What a running `dcp.save` was asked for.

    Attributes:
        writer: The storage writer.
        use_collectives: Whether ranks exchange plans and results.
        no_dist: Whether one process saves by itself.
        process_group: The group that saves, None for the default one.
    """

    writer: Any
    use_collectives: bool
    no_dist: bool
    process_group: Any = None


def calling_save() -> SaveCall | None:
    """Returns the `dcp.save` that is calling, None if something else calls the planner.

    DCP tells a planner neither which of torch's writers will hold its plan nor which group saves,
    so this looks at the caller's variables. No value depends on the answer: without one a tied
    weight is stored twice, a writer that would lose chunks is refused later, and `process_group=`
    must be passed to the planner too.
    """
    frame = sys._getframe(1)
    for _ in range(16):
        if frame.f_code.co_name == "_save_state_dict":
            found = frame.f_locals
            writer = found.get("storage_writer")
            if writer is None:
                return None
            return SaveCall(
                writer,
                bool(found.get("use_collectives", True)),
                bool(found.get("no_dist", False)),
                found.get("process_group"),
            )
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def keeps_one_chunk_per_key(writer: Any) -> bool:
    """Returns whether a stock writer keeps only the last chunk of a key in each file.

    True of torch's safetensors writers: their files are dictionaries by fqn.
    """
    if isinstance(writer, HuggingFaceStorageWriter):
        return True
    return getattr(writer, "serialization_format", None) is SerializationFormat.SAFETENSORS


def stores_aliases(writer: Any) -> bool:
    """Returns whether a writer notes where each key lies, so that two keys may lie at one place.

    True of torch's file system writers: `storage_data` of their metadata does.
    """
    return isinstance(writer, FileSystemWriter) and not keeps_one_chunk_per_key(writer)


def storage_info() -> type:
    """Returns the type in which torch's file system writer notes where a chunk's bytes lie."""
    return _StorageInfo


def memory_format_of(number: int) -> Any:
    """Returns DCP's encoding of a memory format by its number."""
    return _MEM_FORMAT_ENCODING(number)


def untyped_tensor() -> tuple[Any, Any]:
    """Returns what torch pickles a tensor of any dtype as: its rebuild function and storage type."""
    return torch._utils._rebuild_tensor_v3, torch.storage.UntypedStorage


def rebuild_tensor() -> Any:
    """Returns the function that a pickled tensor of any dtype names; `torch.load` allows it."""
    return torch._utils._rebuild_tensor_v3


def default_store() -> Any:
    """Returns the key-value store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def storage_ident(tensor: torch.Tensor) -> int:
    """Returns a number that tensors of one storage share; a meta storage has no address."""
    return int(tensor.untyped_storage()._cdata)
