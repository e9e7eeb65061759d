"""The processes that torchrun started: one joins the others, and asks for sums over what all of them hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Code, LnrewriteError, words
from ...pipeline.shares import Shares

T = TypeVar("T")


def place_of(device: str) -> torch.device:
    """Return the device that this one of many processes works on: of several GPUs its own."""
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    return place


def join(place: torch.device) -> bool:
    """Join the other processes (WORLD_SIZE, RANK); return whether it was here that they were joined."""
    if dist.is_initialized():
        return False
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    return True


@contextmanager
def _waiting(rank: int) -> Iterator[None]:
    """Raise LnrewriteError LN040 where another process is gone."""
    try:
        yield
    except RuntimeError as error:
        why = f"another process ended: {words(error).partition(chr(10))[0]}"
        raise LnrewriteError(Code.LN040, f"process {rank}", why, "see what that one says") from error


class Processes(Shares):
    """Ask all processes that were joined."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    @contextmanager
    def joined(cls, device: str) -> Iterator[Self]:
        """Yield the processes while the block runs; one that fails leaves without a word, and ends the others so."""
        ours = join(place_of(device))
        yield cls()
        if ours:
            dist.destroy_process_group()

    def total(self, part: T) -> T:
        """Return the sum of a number, an array or a tensor over all processes."""
        if isinstance(part, Tensor):
            found = part.detach().clone().contiguous()
        else:
            found = torch.tensor(part, dtype=torch.float64)
        with _waiting(self.rank):
            dist.all_reduce(found)
        if isinstance(part, Tensor):
            return cast(T, found)
        return cast(T, found.numpy() if isinstance(part, np.ndarray) else type(part)(found.item()))  # type: ignore[call-arg]

    def everyone(self, held: T) -> list[T]:
        """Return what each process holds, in their order."""
        found: list[T] = [held] * self.size
        with _waiting(self.rank):
            dist.all_gather_object(found, held)
        return found

    def agreed(self, value: T) -> T:
        """Return what the first process says."""
        held = [value]
        with _waiting(self.rank):
            dist.broadcast_object_list(held)
        return held[0]
