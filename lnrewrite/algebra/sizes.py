"""Take the norms off a Post-LN trunk exactly: what each would have divided a token by is kept as a value of the graph.

With p' = g N(p + F(p)) + b on the trunk, s what N divides by, and y = S (p + F(p)), S the product of all s so far::

    p = g N(y / S) + b        y' = g / c (y - mean y) + S' (b + F(p))        S' = S s(y / S) / c

so that the branch reads y through the same norm, behind a division; rms norms leave the mean. eps is exact, as the norm
reads what it read. c may be anything: a power of two near s, as far as the gain before lets it be known, rounds nothing
and keeps S from growing with the depth. Source: derived.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import Code, LnrewriteError, Refusal
from ..ir import (
    Affine,
    Block,
    Center,
    Edit,
    Kind,
    Norm,
    Operation,
    Placement,
    Proposal,
    SetNorm,
    Side,
    Site,
    Size,
    Stream,
    Vectors,
    Where,
    sums,
)
from ..pipeline.protocols import Context, kept_of
from .placement import WRITABLE, switches

INSTEAD = "convert it without keeping sizes"


def keep_sizes(stream: Stream, context: Context, selected: Collection[str]) -> Proposal:
    """Propose to take the trunk norms of a stream of post blocks off, or refusals: it is done to all of it, or not."""
    chosen = [b for b in stream.blocks if b.name in selected]
    skipped = [(b.name, "not selected") for b in stream.blocks if b not in chosen]
    skipped += [(b.name, "it is pre already") for b in chosen if b.placement is Placement.PRE]
    moving = [b for b in chosen if b.placement is not Placement.PRE]
    if not moving:
        return Proposal(not_applicable=tuple(skipped), otherwise="it belongs to no block that is converted")
    found: dict[str, Refusal] = {}
    for refusal in _refused(stream, moving):
        found.setdefault(refusal.site, refusal)
    walk = Sizes(stream, context)
    edits: list[Edit] = []
    if not found:
        try:
            edits = walk.edits()
        except LnrewriteError as error:
            found = {b.name: Refusal(Code.LN105, b.name, error.why, error.remedy) for b in moving}
    why = "another block of its stream cannot be converted, and sizes are kept along all of it"
    rest = [Refusal(Code.LN113, b.name, why, INSTEAD) for b in moving if found and b.name not in found]
    otherwise = "what it reads stays as it is"
    return Proposal(tuple(edits), (*found.values(), *rest), tuple(skipped), walk.vectors, otherwise)


@dataclass
class Sizes:
    """Walk a stream; `size` is S of the present sum, `carried` the norm taken off before it, of what `of` names.

    `usual` is c: what that norm is likely to divide by.
    """

    stream: Stream
    context: Context
    vectors: Vectors = field(default_factory=Vectors)
    size: Size | None = None
    carried: Norm | None = None
    of: str = ""
    usual: float = 1.0

    def edits(self) -> list[Edit]:
        """Return the edits of all blocks. Raises LnrewriteError where a gain or a bias is not stored."""
        found, groups = list[Edit](), sums(self.stream)
        if (site := self.stream.embedding) and removable(site.norm):
            self.carried, self.of = site.norm, f"{self.stream.name}.embedding"
            found.append(Edit(self.of, (SetNorm(Where.EMBEDDING, None),)))
        for group in groups:
            operations = {b.name: list[Operation]() for b in group}
            note = "" if self.carried else "no norm was before it, so it reads the stream without one"
            if self.carried:
                self.enter(group, self.carried, operations)
            self.leave(group[-1], group is groups[-1], operations[group[-1].name])
            found += [Edit(name, tuple(made), note=note) for name, made in operations.items() if made]
        return found

    def enter(self, group: list[Block], norm: Norm, operations: dict[str, list[Operation]]) -> None:
        """Let the branches of a sum read through the norm that is gone, and what they add be of the trunk's size."""
        size, first = Size(self.of, norm, self.size, self.usual), group[0]
        gain = self.context.gain(norm) * np.ones(self.stream.width)
        shift = self.context.values(norm.beta).reshape(-1) if norm.beta else 0 * gain
        kept = float(np.asarray(kept_of(first, self.context.values)).item())
        for block in group:
            made = operations[block.name]
            if self.size:
                made.append(Affine(Where.IN, replace(self.size, inverse=True), before=True))
            made.append(SetNorm(Where.IN, replace(norm, axis=block.anchor.axis)))
            if block is first and norm.beta:  # added to a writer's own bias, it would be rounded
                made.append(Affine(Where.OUT, shift=self.vectors.add(shift * kept)))
            made.append(Affine(Where.OUT, size))
        operations[first.name] += [Affine(Where.POST, Center(self.stream.width))] * (norm.kind is Kind.LAYER)
        if norm.gamma or self.usual != 1:
            operations[first.name].append(Affine(Where.POST, self.vectors.add(gain / self.usual)))
        self.size = size
        expected = abs(kept) * np.sqrt(np.mean(gain**2 + shift**2))
        self.usual = 2.0 ** round(np.log2(expected)) if 0 < expected < np.inf else 1.0

    def leave(self, block: Block, last: bool, operations: list[Operation]) -> None:
        """Take the norm off behind a sum; behind the last it stays, and reads what it read."""
        site = block.at(Where.POST)
        if last:
            operations += [Affine(Where.POST, replace(self.size, inverse=True), before=True)] if self.size else []
        elif site:
            operations.append(SetNorm(Where.POST, None))
            self.carried, self.of = site.norm, block.name


def removable(norm: Norm) -> bool:
    """Return whether what a norm divides by can be kept: that of a layer or rms norm, not of a norm of a norm."""
    return norm.kind in WRITABLE and not norm.over


def _refused(stream: Stream, moving: Collection[Block]) -> Iterator[Refusal]:
    """Yield what stands in the way, block by block."""
    groups, start = sums(stream), stream.embedding
    before = start if start and removable(start.norm) else None
    for group in groups:
        for block in group:
            if block not in moving:
                which = "pre already" if block.placement is Placement.PRE else "not selected"
                why = f"{block.name} is {which}, and sizes are kept along a whole stream of post blocks"
                yield from (Refusal(Code.LN113, b.name, why, INSTEAD) for b in moving)
            elif found := _in_the_way(stream, block, before, group is groups[-1]):
                yield Refusal(found[0], block.name, found[1], INSTEAD)
        before = group[-1].at(Where.POST)


def _in_the_way(stream: Stream, block: Block, before: Site | None, last: bool) -> tuple[Code, str] | None:
    """Return why the norm behind a block's sum cannot come off, if it cannot; `before` is the one that it starts from.

    Where the trunk is transformed, one number per token may fit no longer: tokens come, go and change places.
    """
    site, anchor = block.at(Where.POST), block.anchor
    if site is None:
        return Code.LN110, "there is no norm on the trunk behind it"
    if last and before is None:
        return Code.LN110, "it is the only block, and there is no norm before it that could become its own"
    if switches(block) != {Where.POST}:
        return Code.LN110, "its branch has a norm of its own at an edge, which would stay"
    if stream.taps:
        return Code.LN110, f"the trunk is also read by {stream.taps[0]}"
    if not (last or removable(site.norm)):
        return Code.LN111, f"a {site.norm.kind} norm of this form cannot be moved"
    if any(s.vector for s in block.scaled("skip")):
        return Code.LN114, "its skip is scaled by one number per channel"
    if block.added or block.barrier(Side.ADDED):
        return Code.LN114, "its sum adds more than branches, which has the size of no branch"
    moved = block.barrier(Side.CARRIED) or (block.scaled("trunk") and not last)
    plain = block.scale == 1 and not block.scaled("skip")
    strange = (before and before.origin and before.origin[-1] != anchor.state) or (
        plain and anchor.skip != anchor.state
    )
    if moved or strange or (site.origin and site.origin[0] != anchor.total):
        return Code.LN114, "the trunk is scaled or transformed between blocks"
    return None
