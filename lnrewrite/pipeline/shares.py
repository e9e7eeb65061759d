"""What is asked of calibration data where several processes hold a share each: sums over all, and one answer for all.

Each process fits to its own batches, and nothing of it tells how many there are: what adds up over tokens goes through
`total`, and all processes come to the same numbers. Alone, a process gets back what it gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Shares:
    """Be the only process, which holds all of the data; a subclass asks the others."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Return whether this process speaks and writes for all."""
        return self.rank == 0

    def total(self, part: T) -> T:
        """Return the sum of a number, an array or a tensor over all processes."""
        return part

    def everyone(self, held: T) -> list[T]:
        """Return what each process holds, in their order: for what is small beside the samples."""
        return [held]

    def agreed(self, value: T) -> T:
        """Return what the first process says."""
        return value


_held = Shares()


@contextmanager
def shared(shares: Shares) -> Iterator[None]:
    """Ask these processes while the block runs."""
    global _held
    before, _held = _held, shares
    try:
        yield
    finally:
        _held = before


def total(part: T) -> T:
    """Return the sum of a number, an array or a tensor over all processes."""
    return _held.total(part)


def everyone(held: T) -> list[T]:
    """Return what each process holds: for one number of each token, or one thing of each process."""
    return _held.everyone(held)


def agreed(value: T) -> T:
    """Return what the first process says."""
    return _held.agreed(value)


def anywhere(flag: object) -> bool:
    """Return whether the flag is up in any process."""
    return any(_held.everyone(bool(flag)))


def mine(batches: Sequence[T]) -> list[T]:
    """Return which batches are this process's."""
    return list(batches[_held.rank :: _held.size])


def processes() -> int:
    """Return how many processes share the data."""
    return _held.size


def number() -> int:
    """Return which of them this is: for what each draws at random."""
    return _held.rank


def alone(fault: Exception) -> None:
    """Go on from a fault that the other processes need not have met: raise it where there are such."""
    if _held.size > 1:
        raise fault
