"""End a progressive conversion: put plain norms and constants where the tapers stood, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..algebra.ends import Ends
from ..algebra.fitting import Floats
from ..ir import Affine, Block, Edit, FoldReader, Norm, Operation, Proposal, SetNorm, Site, Stream, Vectors, Where, sums
from ..ir.edits import Value
from ..models.program import Program
from ..pipeline.protocols import gain_of
from .tapers import Taper, Tapering


def fold(tapering: Tapering, trained: Program, sizes: Sequence[float] = ()) -> Program:
    """Return `trained`, which is `tapering.program` with other weights, as its view computes it at the end.

    sizes: what the constants of the tapers have become in training (`View.sizes`), where they did.

    going, t = 0     gamma / rho x + beta          folded into readers or writers, else left as a scale and a shift
    onto the trunk   x' = rho N(x) + F(g N(x) + b)   the norm moves before the sum, W / rho, eps / rho^2 after it
    off the trunk    x' = g / rho x + b + F(g N(x) + b)      the norm moves behind the skip
    """
    found = []
    for stream in trained.network.streams:
        ending = _Ending(tapering, trained, stream, sizes or [t.rho for t in tapering.tapers])
        edits = ending.edits()
        found += [(stream, Proposal(tuple(edits), vectors=ending.vectors))] if edits else []
    return trained.apply(found, "heal")[0] if found else trained


class _Ending:
    """Collect the edits that end the tapers of one stream."""

    def __init__(self, tapering: Tapering, program: Program, stream: Stream, sizes: Sequence[float]) -> None:
        self.program, self.stream = program, stream
        self.onto, self.off = tapering.onto(stream), tapering.off(stream)
        self.tapers = {t.site: replace(t, rho=rho) for t, rho in zip(tapering.tapers, sizes, strict=True)}
        self.vectors = Vectors()
        self.ends = Ends(self.vectors, program.values)
        self.gone: set[str] = set()

    def edits(self) -> list[Edit]:
        found: dict[str, list[Operation]] = {}
        start, rho = f"{self.stream.name}.embedding", 1.0
        before: Block | None = None
        for group in sums(self.stream):
            name = before.name if before else start
            taper = self.tapers.get(f"{before.name}.post" if before else start)
            for block in group:
                found.setdefault(block.name, [])
            if taper and self.onto:
                site = _held(group[0], Where.IN)
                found.setdefault(name, []).append(self.trunk_norm(site, before, rho))
                rho = taper.rho
                for block in group:
                    found[block.name] += self.keep_gain(block, rho)
            elif taper and self.off and before:
                found[before.name].append(SetNorm(Where.POST, None))
                found[group[0].name] += self.take_over(_held(before, Where.POST).norm, taper)
                for block in group[1:]:
                    found[block.name].append(SetNorm(Where.IN, _held(before, Where.POST).norm))
            for block in group:
                found[block.name] += self.inside(block)
            before = group[-1]
        found[f"{self.stream.name}.final"] = list(self.end(rho))
        return [Edit(target, tuple(operations)) for target, operations in found.items() if operations]

    def trunk_norm(self, site: Site, before: Block | None, rho: float) -> SetNorm:
        """Return the unit norm that goes on the trunk; the trunk there is 1 / rho of what it was."""
        ones = self.vectors.add(np.ones(self.stream.width))
        where = Where.POST if before else Where.EMBEDDING
        return SetNorm(where, Norm(site.norm.kind, site.norm.eps / rho**2), ones)

    def keep_gain(self, block: Block, rho: float) -> Iterator[Operation]:
        """Yield what lets a branch read the trunk's norm: its own goes but for gain and bias, it writes 1 / rho."""
        site = _held(block, Where.IN)
        yield from self.remove(block, site, *self.constant(site.norm, 1.0))
        yield from self.ends.writing(block, self.vectors.add(np.full(self.stream.width, 1 / rho)), None)

    def take_over(self, norm: Norm, taper: Taper) -> list[Operation]:
        """Return what lets a block read through the norm that was on the trunk before it, and its skip a constant."""
        scale, shift = self.constant(norm, taper.rho)
        return [SetNorm(Where.IN, norm), Affine(Where.POST, scale, self.ends.vector(shift))]

    def inside(self, block: Block) -> Iterator[Operation]:
        """Yield what takes the gone norms of a branch out."""
        into, out = block.at(Where.IN), block.at(Where.OUT)
        if into and (taper := self.ended(into)):
            yield from self.remove(block, into, *self.constant(into.norm, taper.rho))
        if out and (taper := self.ended(out)):
            yield SetNorm(Where.OUT, None)
            yield from self.ends.writing(block, *self.constant(out.norm, taper.rho), at_norm=True)

    def ended(self, site: Site) -> Taper | None:
        """Return the taper that a norm went by, if it went."""
        return next((t for t in self.tapers.values() if t.going and not t.skip and t.value == site.origin[-1]), None)

    def remove(self, block: Block, site: Site, scale: Value, shift: Floats | None) -> Iterator[Operation]:
        """Yield what takes an in norm out, once where parallel branches share it."""
        if site.origin[-1] not in self.gone:
            yield SetNorm(Where.IN, None)
            yield from self.ends.reading(block, site, scale, shift)
        self.gone.add(site.origin[-1])

    def end(self, rho: float) -> Iterator[Operation]:
        """Yield what becomes of the final norm."""
        site = self.stream.final
        if site and (taper := self.ended(site)):
            yield SetNorm(Where.FINAL, None)
            scale, shift = self.constant(site.norm, taper.rho)
            yield from (FoldReader(reader, scale, self.ends.vector(shift)) for reader in site.readers)
        elif site and rho != 1.0:
            yield SetNorm(Where.FINAL, replace(site.norm, eps=site.norm.eps / rho**2))

    def constant(self, norm: Norm, rho: float) -> tuple[Value, Floats | None]:
        """Return scale and shift of a norm with the constant size rho: gamma / rho, beta."""
        gain = gain_of(norm, self.program.values)
        scale = np.array(np.broadcast_to(gain / rho, (self.stream.width,)))
        shift = None if norm.beta is None else np.array(self.program.values(norm.beta).reshape(-1))
        return self.vectors.add(scale), shift


def _held(block: Block, where: Where) -> Site:
    site = block.at(where)
    assert site is not None
    return site


def unfoldable(stream: Stream) -> Sequence[str]:
    """Name what keeps the final norm of a stream from being folded away; empty for nothing."""
    site = stream.final
    if site is None:
        return ()
    return (*site.taps, *(r.param for r in site.readers if r.shared or not r.exact))
