"""One process or many: who am I, what do the others say, and parts of a network sharded over all (torchrun, FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..backends.torch.processes import join, place_of
from ..compat.memory import give_back_at_once
from ..errors import Code, UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Describe which of how many processes this is, and on which device it works."""

    rank: int
    size: int
    device: torch.device
    ours: bool = False

    @classmethod
    def join(cls, device: str, rows: int) -> World:
        """Join the processes that torchrun started (WORLD_SIZE, RANK, LOCAL_RANK), or be the only one.

        Raises UsageError LN003 where `rows` rows of a micro-batch are not the same number for each.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, torch.device(device))
        if rows % size:
            why = f"{rows} rows of a micro-batch cannot be shared by {size} processes"
            raise UsageError(Code.LN003, "batch_size", why, f"give a multiple of {size} times accumulate")
        place = place_of(device)
        if place.type != "cuda":
            give_back_at_once()  # each part is gathered and freed in every step
        ours = join(place)
        return cls(dist.get_rank(), size, place, ours)

    def leave(self) -> None:
        """Part from the others, where it was here that they were joined."""
        if self.ours:
            dist.destroy_process_group()

    def agreed(self, word: str) -> str:
        """Return what the first process says."""
        words = [word]
        if self.size > 1:
            dist.broadcast_object_list(words)
        return words[0]

    @property
    def first(self) -> bool:
        """Return whether this process speaks and writes for all."""
        return self.rank == 0

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.size > 1:
            dist.barrier()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Return the processes as a mesh of one axis."""
        return init_device_mesh(self.device.type, (self.size,))

    @property
    def rows(self) -> slice:
        """Return which rows of a batch are this process's."""
        return slice(self.rank, None, self.size)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of numbers over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of numbers over all processes."""
        return self.sum(value) / self.size if self.size > 1 else value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is up in any process."""
        return self.total(int(flag)) > 0

    def total(self, count: int) -> int:
        """Return the sum of a count over all processes; nothing waits for a device."""
        return count if self.size == 1 else int(self.sum(torch.tensor(count)))

    def gathered(self, held: T) -> list[T]:
        """Return what every process holds, in their order."""
        found: list[T] = [held] * self.size
        if self.size > 1:
            dist.all_gather_object(found, held)
        return found

    def here(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on this process's device."""
        return {n: t.to(self.device) for n, t in batch.items()}

    def spread(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """Return this process's rows of a batch that is only measured, on its device, and whether they count.

        All processes run together, so that one for which no row is left runs the first, which does not count there.
        """
        counts = self.rank < min(map(len, batch.values()))
        return self.here({n: t[self.rows] if counts else t[:1] for n, t in batch.items()}), counts

    def shard(self, whole: nn.Module, parts: Iterable[nn.Module], bf16: bool) -> None:
        """Shard parameters part by part, and what is left with the whole; computed and reduced in bfloat16 if so asked.

        No part stays whole when it has run: one without a backward neither.
        """
        if self.size > 1:
            low = torch.bfloat16 if bf16 else None
            policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low, cast_forward_inputs=False)
            for module in (*parts, whole):
                fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)

    def piece(self, rows: int) -> slice:
        """Return which rows of a parameter are this process's where it is sharded."""
        step = -(-rows // self.size)
        return slice(min(rows, self.rank * step), min(rows, (self.rank + 1) * step))


def local(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter: all of it, or its part where it is sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this process would hold if it were sharded as a parameter of its shape is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
