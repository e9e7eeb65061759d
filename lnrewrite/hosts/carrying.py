"""Carry weights over from a source to a host, which calls them otherwise and stores them otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.torch.module import stored
from ..ir import Linear, Site
from .cores import Match
from .host import Misfit
from .numbers import head_of
from .tables import Tables
from .views import Core, View

TINY = 1e-12
"""What a number is off that is another but for rounding."""


class Carrier:
    """Carry a source's weights over to a host's names: into `host.carried`.

    whole: carry all; else only what is needed to run cores, and check that the rest could be. `used` are the source's
    parameters that have been carried, or hold nothing.
    """

    def __init__(self, source: View, host: View, whole: bool) -> None:
        self.source, self.host, self.whole = source, host, whole
        self.used: set[str] = set()
        self._layer: dict[str, Tensor] = {}

    def new_layer(self) -> None:
        """Begin another layer: in a host with fewer it takes the place of the one before."""
        self._layer = {}

    def put(self, name: str, value: Tensor) -> None:
        """Carry a parameter. Raises Misfit where the host's has another shape, or stands for two of the source's."""
        held = stored(self.host.program.module(), name)
        assert held is not None, name
        if held.shape != value.shape:
            raise Misfit(f"{name} is {list(held.shape)}, and the source would fill {list(value.shape)}")
        value = value.to(held.dtype).contiguous()
        before = self._layer.setdefault(name, value)
        if before is not value and not torch.equal(before, value):
            raise Misfit(f"{name} would have to stand for two of the source's parameters, which differ")
        self.host.carried[name] = value

    def norm(self, ours: Site, theirs: Site, by: float = 1.0) -> None:
        """Carry a norm's gain, times a number, and its bias."""
        width = ours.width or self.source.stream.width
        self._gain(theirs, self.source.gain(ours.norm, width) * by)
        shift = self.source.shift(ours.norm, width)
        if theirs.norm.beta:
            self.put(theirs.norm.beta, shift)
        elif shift.any():
            raise Misfit("its norms have biases, and the host's have none")
        self.used |= {n for n in (ours.norm.gamma, ours.norm.beta) if n}

    def unit(self, theirs: Site) -> None:
        """Make a norm of the host's one without gain and bias."""
        self._gain(theirs, torch.ones(self.source.stream.width, dtype=torch.float64))
        if theirs.norm.beta:
            self.put(theirs.norm.beta, torch.zeros(self.source.stream.width))

    def _gain(self, theirs: Site, gain: Tensor) -> None:
        norm = theirs.norm
        if norm.gamma and not norm.computed:
            self.put(norm.gamma, gain / norm.factor - (1 if norm.plus_one else 0))
        elif (gain - norm.factor).abs().max() > TINY:
            raise Misfit("its norms have gains, and the host's have none (fold-affine folds them into what reads them)")

    def inner(self, pairs: Sequence[tuple[Site, Site]], turned: Tensor | None, by: float = 1.0) -> None:
        """Carry the norms of queries and keys, heads' channels turned; those of queries, the first, times `by`."""
        for index, (ours, theirs) in enumerate(pairs):
            gain = self.source.gain(ours.norm, ours.width)
            if turned is not None:
                gain = gain.view(-1, len(turned))[:, turned].flatten()
            for name in (theirs.norm.gamma, theirs.norm.beta):
                self._layer.pop(name or "", None)
            self._gain(theirs, gain if index else gain * by)
            if ours.norm.beta or theirs.norm.beta:
                raise Misfit("its norms of queries and keys have biases")
            self.used |= {n for n in (ours.norm.gamma,) if n}

    def readers(self, source: Core, host: Core, match: Match) -> None:
        """Carry the rows and biases of what reads for a block, as a match says."""
        scale = torch.ones(len(match.rows), dtype=torch.float64)
        if match.queries is not None:
            scale[match.queries] = match.scale
        parts = [self._bias_rows(self.source, r, size) for r, size in zip(source.readers, source.sizes, strict=True)]
        biases = (torch.cat(parts)[match.rows] * scale).split(host.sizes)
        for linear, bias in zip(host.readers, biases, strict=True):
            self._bias(linear, bias, "queries, keys or values" if match.queries is not None else "a feed-forward block")
        self._weights(source.readers, host.readers, host.sizes, match.rows, scale)

    def _weights(
        self, ours: Sequence[Linear], theirs: Sequence[Linear], sizes: list[int], rows: Tensor, scale: Tensor
    ) -> None:
        self.used |= {n for r in ours for n in (r.param, r.bias) if n}
        if not self.whole:
            return
        held = torch.cat([self.source.rows(r) for r in ours])[rows]
        if (scale != 1).any():
            held = held.double() * scale[:, None]
        for linear, part in zip(theirs, held.split(sizes), strict=True):
            self.put(linear.param, part if linear.axis == 1 else part.T)

    def _bias_rows(self, view: View, linear: Linear, size: int) -> Tensor:
        found = view.bias(linear)
        return torch.zeros(size, dtype=torch.float64) if found is None else found

    def _bias(self, linear: Linear, bias: Tensor, where: str) -> None:
        if linear.bias:
            self.put(linear.bias, bias)
        elif bias.any():
            raise Misfit(f"it has biases of {where}, and the host has none there")

    def writer(self, source: Core, host: Core, times: float) -> None:
        """Carry the weight and bias of what writes a block's branch, times a number."""
        ours, theirs = source.writer, host.writer
        bias = self._bias_rows(self.source, ours, self.source.stream.width)
        self._bias(theirs, bias * times, "what its branches end in")
        if source.out != host.out:
            raise Misfit(f"{ours.param} takes {source.out} numbers, and the host's {host.out}")
        rows = torch.arange(source.out)
        self._weights([ours], [theirs], [host.out], rows, torch.full((len(rows),), times, dtype=torch.float64))

    def tables(self, ours: Tables, theirs: Tables, times: float) -> None:
        """Carry the tables that the stream starts from, times a number; what the host multiplies them by goes out."""
        by = times * ours.factor / theirs.factor
        extra = self._types(ours, theirs, by)
        self.used |= {linear.param for linear in (ours.tokens, ours.positions, ours.types) if linear}
        if not self.whole:
            return
        for mine, its, offset in (
            (ours.tokens, theirs.tokens, (0, 0)),
            (ours.positions, theirs.positions, (ours.first, theirs.first)),
        ):
            if mine is None or its is None:
                continue
            rows = self.source.rows(mine)[offset[0] :]
            rows = rows if by == 1 else rows.double() * by
            if mine is (ours.positions or ours.tokens) and extra is not None:
                rows = rows.double() + extra
            size = self.host.program.shape(its.param)[0]
            if size < len(rows) + offset[1]:
                raise Misfit(f"{its.param} has {size} rows, and {len(rows) + offset[1]} are needed")
            whole = torch.zeros(size, rows.shape[1], dtype=rows.dtype)
            whole[offset[1] : offset[1] + len(rows)] = rows
            self.put(its.param, whole)

    def _types(self, ours: Tables, theirs: Tables, by: float) -> Tensor | None:
        """Carry the table of token types; return what of it the host has to add elsewhere: the row of the only type."""
        if ours.types is None:
            if theirs.types is not None and self.whole:
                self.put(theirs.types.param, torch.zeros(self.host.program.shape(theirs.types.param)))
            return None
        rows = self.source.rows(ours.types).double() * by
        if theirs.types is None:
            return rows[0]
        if self.whole:
            self.put(theirs.types.param, rows)
        return None

    def head(self) -> None:
        """Carry what reads the last state; logits that are multiplied by a number are so in the rows."""
        ours, theirs = head_of(self.source.stream), head_of(self.host.stream)
        made = [sum(view.run.size(h.node) for h in held) for view, held in ((self.source, ours), (self.host, theirs))]
        if len(ours) != len(theirs) or made[0] != made[1]:
            raise Misfit(f"{made[0]} numbers are made of its last state, and {made[1]} of the host's")
        for mine, its in zip(ours, theirs, strict=True):
            by = tail(self.source, mine) / tail(self.host, its)
            bias = self._bias_rows(self.source, mine, self.source.program.shape(mine.param)[1 - mine.axis])
            self._bias(its, bias * by, "its head")
            if its.param not in self._layer or by != 1:
                size = self.host.program.shape(its.param)[1 - its.axis]
                rows = torch.arange(len(bias))
                self._weights([mine], [its], [size], rows, torch.full((len(rows),), by, dtype=torch.float64))
            self.used |= {n for n in (mine.param, mine.bias) if n}


def tail(view: View, head: Linear) -> float:
    """Return what logits are multiplied by behind the head; 1 for what gives no logits. Raises Misfit for a cap."""
    graph = view.program.graph
    shape = graph[graph.outputs[0]].shape or ()
    if len(shape) != 3 or view.run.rank(head.node) != 3 or shape[-1] != view.run.size(head.node):
        return 1.0
    draw = torch.Generator().manual_seed(0)
    given = 30 * torch.randn(view.run.shape(head.node), generator=draw, dtype=torch.float64)
    made = view.run(graph.outputs[0], {head.node: given})
    by = float((made * given).sum() / (given * given).sum())
    if not torch.allclose(made, by * given, rtol=1e-6):
        raise Misfit("its logits are capped, and the host's are as they are")
    return by
