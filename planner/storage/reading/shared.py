"""Replicated reads: ranks that need the same bytes read them once, and send them to each other.

| name | is |
|---|---|
| `SharedRead` | a load planner's calls, with each item read by one rank of a group and broadcast |

This is the one part of a load that sends anything, and it is asked for: by a group whose ranks load
the same. They compare their plans first, and errors before anything is broadcast, so a group whose
plans differ or in which one rank fails ends with an error on all of its ranks and with no hang.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardplan.layouts import CheckpointError


class SharedRead:
    """Stands between reader and planner, and gives out the items that this rank reads.

    Args:
        planner: The load planner.
        group: Process group of ranks that load the same.
        items: All items of this rank's plan.

    Attributes:
        own: The items that this rank reads.

    Raises:
        CheckpointError: If the ranks of the group do not load the same.
    """

    def __init__(self, planner: Any, group: Any, items: Sequence[ReadItem]) -> None:
        self._planner = planner
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._tensors = [i for i in items if i.type is not LoadItemType.BYTE_IO]
        self._held: dict[int, torch.Tensor] = {}
        self._compare()
        loads = [0] * self._ranks
        self._readers: list[int] = []
        for item in self._tensors:
            reader = min(range(self._ranks), key=lambda r: (loads[r], r))
            loads[reader] += 1 + item.lengths.numel()
            self._readers.append(reader)
        mine = [i for i, r in zip(self._tensors, self._readers, strict=True) if r == self._rank]
        # Python values are small and read by every rank.
        self.own = mine + [i for i in items if i.type is LoadItemType.BYTE_IO]

    def _compare(self) -> None:
        hashed = hashlib.blake2b(digest_size=16)
        for item in self._tensors:
            index = item.storage_index
            told = (index.fqn, tuple(index.offset or ()), item.storage_offsets, item.lengths)
            hashed.update(repr(told).encode())
        digests: list[Any] = [None] * self._ranks
        dist.all_gather_object(digests, hashed.hexdigest(), group=self._group)
        other = next((r for r, d in enumerate(digests) if d != digests[0]), None)
        if other is not None:
            raise CheckpointError(
                f"ranks 0 and {other} of the group that reads together do not load the same. Pass "
                "a group of replicas as broadcast=, or none."
            )

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """Returns the tensor that an item fills."""
        tensor: torch.Tensor = self._planner.resolve_tensor(item)
        self._held[id(item)] = tensor
        return tensor

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Has nothing to do yet: the tensor is broadcast first."""

    def __getattr__(self, name: str) -> Any:
        # Python values go to the planner as they are: load_bytes, or load_value where it has that.
        return getattr(self._planner, name)

    def finish(self, failure: BaseException | None) -> None:
        """Broadcasts what was read, once it is known that all ranks could read their share.

        Args:
            failure: What this rank's reads failed with, None if they did not.

        Raises:
            CheckpointError: If another rank of the group could not read its share.
        """
        told: list[Any] = [None] * self._ranks
        own = None if failure is None else f"{type(failure).__name__}: {failure}"
        dist.all_gather_object(told, own, group=self._group)
        if failure is not None:
            raise failure
        failed = [(rank, text) for rank, text in enumerate(told) if text is not None]
        if failed:
            raise CheckpointError(
                f"rank {failed[0][0]} of the group that reads together failed with {failed[0][1]}"
            )
        for item, reader in zip(self._tensors, self._readers, strict=True):
            tensor = self._held.pop(id(item), None)
            if tensor is None:
                tensor = self._planner.resolve_tensor(item)
            # A collective needs contiguous memory, and knows fewer dtypes than there are.
            sent = tensor.detach().contiguous()
            source = dist.get_global_rank(self._group, reader)
            dist.broadcast(sent.reshape(-1).view(torch.uint8), source, group=self._group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
            self._planner.commit_tensor(item, tensor)
