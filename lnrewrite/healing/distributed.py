"""One process or many: who am I, what do the others say, and a view sharded over all of them (torchrun, FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..backends.torch.module import CapturedModule, stored
from ..errors import Code, UsageError
from .view import View


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
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
        if ours := not dist.is_initialized():
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
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

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is up in any process."""
        if self.size == 1:  # nothing waits for a device
            return flag
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def here(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on this process's device."""
        return {n: t.to(self.device) for n, t in batch.items()}

    def share(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's rows of a batch, on its device."""
        return self.here({n: t[self.rank :: self.size] for n, t in batch.items()})

    def shard(self, view: View, module: CapturedModule) -> None:
        """Shard a view part by part, and free the whole tensors that it came from."""
        view.to(self.device)
        if self.size == 1:
            return
        for part in view.parts:
            fully_shard(part)
        fully_shard(view)
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)

    def reshard(self, view: View) -> None:
        """Take a view's parameters apart again: a run without a backward leaves the outermost ones whole."""
        for module in view.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gather(self, view: View, module: CapturedModule) -> None:
        """Give a captured module the values that its view was trained to, whole in every process."""
        if self.size == 1:
            return
        with torch.no_grad():
            for name, parameter in view.named_parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                held = stored(module, view.origin(name))
                assert isinstance(held, nn.Parameter)
                held.data = whole.detach().clone()


def local(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter: all of it, or its part where it is sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this process would hold if it were sharded as a parameter of its shape is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
