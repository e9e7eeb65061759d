"""Say how far outliers stand out of what linear maps read of a stream, and what rounding it to 8 bits loses by them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..ir import Stream, Where, site_name
from .figures import Outlier
from .measuring import Mean, Sizes, finite, kurtosis, pieces, tokens_of

LEVELS = 127
"""How many steps of 8 bits a largest number takes."""


class Reads:
    """Measure what the linear maps behind a stream's norms read, or the bare states that others read."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.places = stream, read_nodes(stream)
        self.held = {node: _Read() for node in self.places}

    def see(self, name: str, value: Tensor) -> None:
        """Take a node's value."""
        if name in self.places:
            at, axis = self.places[name]
            self.held[name].add(finite(tokens_of(value, axis), self.stream.name, f"what {at} reads"))

    def figures(self) -> Iterator[Outlier]:
        """Yield the figures of each place."""
        for node, (at, _) in self.places.items():
            yield self.held[node].figures(at)


class _Read:
    """Measure one value: sizes of channels, and squares of what is lost in rounding by token and by tensor."""

    def __init__(self) -> None:
        self.sizes, self.kurtosis, self.tokenwise, self.tensorwise = Sizes(), Mean(), Mean(), Mean()
        self.channels: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add a batch's tokens [tokens, channels]."""
        channels = rows.abs().amax(0).double()
        self.channels = channels if self.channels is None else torch.maximum(self.channels, channels)
        self.sizes.add(rows)
        for piece in pieces(rows):
            self.kurtosis.add(kurtosis(piece))
            self.tokenwise.add((rounded(piece, piece.abs().amax(-1, keepdim=True)) - piece).square())
            self.tensorwise.add((rounded(piece, channels.max()) - piece).square())

    def figures(self, at: str) -> Outlier:
        assert self.channels is not None
        rms, top = self.sizes.whole, float(self.channels.max())
        errors = (math.sqrt(lost.value or 0.0) / rms if rms else 0.0 for lost in (self.tokenwise, self.tensorwise))
        ratio = top / rms if rms else 0.0
        return Outlier(at, top, int(self.channels.argmax()), ratio, self.kurtosis.value, *errors)


def rounded(x: Tensor, largest: Tensor) -> Tensor:
    """Return what 8 bits hold of numbers up to a size, as a quantizer by absolute maximum does: 127 steps to it."""
    step = (largest / LEVELS).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / step).round() * step


def read_nodes(stream: Stream) -> Mapping[str, tuple[str, int]]:
    """Map each node that linear maps read of a stream to the first place that reads it, and its channels' axis.

    That is a norm's output, under its site's name; where no norm stands before a block, a state, under the block's.
    """
    found: dict[str, tuple[str, int]] = {}
    for block in stream.blocks:
        site = block.at(Where.IN)
        if block.readers and site:
            found.setdefault(site.origin[-1], (site_name(block, site), site.norm.axis))
        elif block.readers:
            found.setdefault(block.anchor.state, (block.name, block.anchor.axis))
    if stream.final and stream.final.readers:
        found.setdefault(stream.final.origin[-1], (f"{stream.name}.final", stream.final.norm.axis))
    elif stream.readers and stream.blocks:
        found.setdefault(stream.last, (f"{stream.name}.last", stream.blocks[-1].anchor.axis))
    return found
