"""Walk a trunk and take the factors on it, and beside it, into what reads and writes it.

The trunk is carried in another basis, one factor per channel: x = D x^, where D starts at 1 (or where the next norm
asks for it), takes each factor of the trunk and each stored norm behind a sum along, and ends in the head:

    readers take D      writers and what is added take 1 / D      N_eps reads s x^ as N_{eps / s^2} reads x^

A norm must see one number for all channels. What cannot be had raises `Closed`, with what is in the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import Code, LnrewriteError, Refusal
from ..ir import (
    RECALL,
    Block,
    DropScale,
    Edit,
    FoldReader,
    Linear,
    Number,
    Operation,
    Scale,
    ScaleWriter,
    SetNorm,
    Side,
    Site,
    Stream,
    Value,
    Vectors,
    Where,
    site_name,
    sums,
)
from ..pipeline import Context
from ..pipeline.protocols import factor_of
from .basis import Closed
from .renorming import Factor, is_one, renormed
from .stored import affine, is_affine

RANGE, APART = 1e2, 1e6
"""How far the stream may change its size, up and down: as one number, beyond which gains and eps leave the range where
they are exact, and channel by channel, where no eps goes along.
"""


@dataclass
class Absorber:
    """Walk a stream with `size`: the stream is `size` times what it becomes, one number or one for each channel.

    Where a basis is free to choose, at the start and behind a norm of the trunk, it is chosen so that the next norm
    sees one number. `heads` read what is behind a stored norm at the end.
    """

    stream: Stream
    context: Context
    size: Factor = 1.0
    heads: tuple[Linear, ...] = ()
    vectors: Vectors = field(default_factory=Vectors)
    refusals: list[Refusal] = field(default_factory=list)
    found: dict[str, list[Operation]] = field(default_factory=dict)

    def edits(self) -> list[Edit]:
        """Return the edits; with the trunk's factors where all of them can go, else with each block's own."""
        scaled = [b for b in self.stream.blocks if b.scale != 1 or b.scaled("skip", "trunk")]
        stored = any(s.where is Where.POST and is_affine(s) for b in self.stream.blocks for s in b.sites)
        if (scaled or stored) and self.stream.width:
            try:
                self.walk(trunk=True)
                return self.collected()
            except Closed as closed:  # a stored norm that stays is told of by fold-batchnorm
                self.refusals, self.found, self.size = [closed.refusal(b.name) for b in scaled], {}, 1.0
        self.walk(trunk=False)
        return self.collected()

    def collected(self) -> list[Edit]:
        """Return what was collected as edits, one for each target."""
        return [Edit(target, tuple(operations)) for target, operations in self.found.items() if operations]

    def walk(self, trunk: bool) -> None:
        """Collect operations. With `trunk`, raise Closed where one of them cannot be had."""
        refused = {r.site for r in self.refusals}
        if trunk and (seen := (*self.stream.taps, *self.stream.exits)):
            raise Closed(Code.LN126, f"{seen[0]} sees the size of the stream")
        groups = sums(self.stream)
        if trunk:
            self.start(self.chosen(groups))
        for at, group in enumerate(groups):
            after = _plain(self.size * self.kept(group[0])) if trunk else 1.0
            for block in group:
                self.found.setdefault(block.name, [])
                try:
                    self.found[block.name] += [*self.entered(block), *self.left(block, after)]
                except Closed as closed:
                    if trunk and not (is_one(self.size) and is_one(after)):
                        raise
                    if block.scales and block.name not in refused:
                        self.refusals.append(closed.refusal(block.name))
            if trunk:
                self.summed(group, after, self.chosen(groups[at + 1 :]))
        if not is_one(self.size):
            self.finish()

    def kept(self, block: Block) -> Factor:
        """Return the factor on a sum's skip."""
        return _nonzero(block.scale * self.product(block.scaled("skip")), block)

    def chosen(self, groups: list[list[Block]]) -> Factor:
        """Return the size to start these sums with: 1, or where the next norm would see several, what makes it one."""
        total: Factor = 1.0
        for group in groups:
            if any(s.where is Where.IN for b in group for s in b.sites):
                break
            total = total * self.kept(group[0])
            if any(s.where is Where.POST and not is_affine(s) for b in group for s in b.sites):
                break
            total = total * self.stored(group)[0] * _nonzero(self.product(group[-1].scaled("trunk")), group[-1])
        else:
            total = total if self.stream.final else 1.0
        return 1.0 if not np.ndim(_plain(total)) else 1 / total

    def start(self, size: Factor) -> None:
        """Take the start of the stream to a size."""
        self.size, target = size, f"{self.stream.name}.embedding"
        if is_one(size):
            return
        if self.stream.embedding:
            self.found[target] = self.renormed(None, self.stream.embedding, 1.0, 1 / size)
        elif self.stream.opaque:
            raise Closed(Code.LN126, f"the stream starts from {self.stream.opaque}")
        else:
            writers = self.free(self.stream.sources, None, Side.WRITTEN)
            self.found[target] = [ScaleWriter(w, self.value(1 / size)) for w in writers]

    def stored(self, group: list[Block]) -> tuple[Factor, Factor, Site | None]:
        """Return (a, s) of the stored norm behind a sum, a x + s, and its site; 1, 0 and None where there is none."""
        sites = [s for s in group[-1].sites if s.where is Where.POST and is_affine(s)]
        if not sites:
            return 1.0, 0.0, None
        try:
            a, shift = affine(sites[0], self.context)
        except LnrewriteError as error:
            raise Closed(Code.LN105, f"the norm behind {group[-1].name} is computed: {error.why}") from error
        if a.size != self.stream.width or len(sites) > 1:
            raise Closed(Code.LN126, f"the norm behind {group[-1].name} is not one of the stream's channels")
        return _nonzero(a, group[-1]), shift, sites[0]

    def entered(self, block: Block) -> list[Operation]:
        """Keep what a branch reads as it was: the size goes into eps, factors behind the norm into its gain."""
        norms = [s for s in block.sites if s.where is Where.IN]
        scales = block.scaled("read")
        operations: list[Operation] = [DropScale(s) for s in scales]
        by = self.product(scales)
        bare = block.barrier(Side.RAW) or (not norms and not scales and block.barrier(Side.READ))
        if not is_one(self.size) and bare:
            raise Closed(Code.LN126, f"{block.name} reads the stream without a norm")
        behind = norms[0] if scales and norms and (norms[0].norm.gamma or norms[0].norm.beta) else None
        for site in norms:
            operations += self.renormed(block, site, self.size, by if site is behind else 1.0)
        if scales and norms and set(norms[0].readers) - set(block.readers):
            why = f"{site_name(block, norms[0])} has readers outside of {block.name}"
            raise Closed(Code.LN101, why)
        if behind is None and (scales or (not norms and not is_one(self.size))):
            value = self.value(_plain(by * (1.0 if norms else self.size)))
            held = block if norms or not scales else None  # ahead of a bare reader nothing stands but the factors
            operations += [FoldReader(r, value) for r in self.free(block.readers, held, Side.READ)]
        return operations

    def left(self, block: Block, size: Factor) -> list[Operation]:
        """Make a branch write 1 / size times what it wrote, without factors of its own."""
        inner, outer = block.scaled("written"), block.scaled("branch")
        operations: list[Operation] = [DropScale(s) for s in (*inner, *outer)]
        if not is_one(size) and (block.added or block.barrier(Side.ADDED)):
            operations += [ScaleWriter(w, self.value(1 / size)) for w in self.free(block.added, block, Side.ADDED)]
        before, after = self.product(inner), self.product(outer) / size
        if site := block.at(Where.OUT):
            if isinstance(before, np.ndarray) or before == 0:
                raise Closed(Code.LN125, f"one factor per channel stands before {site_name(block, site)}")
            if block.barrier(Side.ENDS) and (outer or not is_one(size)):
                raise Closed(Code.LN104, f"{block.name} does not end in its output norm")
            return operations + self.renormed(block, site, before, after)
        by = before * after
        if inner or not is_one(size):
            operations += [ScaleWriter(w, self.value(by)) for w in self.free(block.writers, block, Side.WRITTEN)]
        return operations

    def summed(self, group: list[Block], size: Factor, onward: Factor) -> None:
        """Take the trunk's own factors along, through the norm after the sum where there is one."""
        first, last = group[0], group[-1]
        if first.scale != 1 or first.scaled("skip"):
            self.found[first.name].append(DropScale(None))
        a, shift, stored = self.stored(group)
        for block in group:
            for site in (s for s in block.sites if s.where is Where.POST):
                self.found[block.name] += (
                    [SetNorm(Where.POST, None)] if stored else self.renormed(block, site, size, 1 / onward)
                )
        self.size = _plain(size * a) if stored or not first.at(Where.POST) else onward
        if np.any(shift):
            self.shifted(group, shift / self.size)
        if stored and last is self.stream.blocks[-1] and not self.stream.final:
            if stored.taps or not stored.readers:
                raise Closed(Code.LN126, f"what reads the norm behind {last.name} sees its size")
            self.heads = stored.readers
        for scale in last.scaled("trunk"):
            self.size = _plain(self.size * _nonzero(self.product((scale,)), last))
            self.found[last.name].append(DropScale(scale))
        carried = next((c for b in group if (c := b.barrier(Side.CARRIED))), None)
        if carried and (carried.op == RECALL or not is_one(self.size)):
            raise Closed(Code.LN126, f"after {last.name} the stream is {carried}")
        most = APART if np.ndim(self.size) else RANGE
        if beyond := [x for x in np.abs(np.ravel(self.size)) if not 1 / most < x < most]:
            raise Closed(Code.LN126, f"after {last.name} the stream would be {beyond[0]:.1e} times as large")

    def shifted(self, group: list[Block], shift: Factor) -> None:
        """Add a shift to what a sum's branches write."""
        for block in (b for b in group if not (b.at(Where.OUT) or b.barrier(Side.WRITTEN))):
            for writer in (w for w in block.writers if w.exact and not (w.shared or w.table)):
                self.found[block.name].append(ScaleWriter(writer, Number(1.0), self.value(shift)))
                return
        raise Closed(Code.LN103, f"no writer of {group[0].name} has a place for the shift of the norm behind it")

    def finish(self) -> None:
        """Keep what the end of the stream gives as it was."""
        target = f"{self.stream.name}.final"
        heads = self.heads or self.stream.readers
        if not (self.stream.final or heads):
            raise Closed(Code.LN126, "the reader of the last state sees its size")
        if self.stream.final:
            self.found[target] = self.renormed(None, self.stream.final, self.size, 1.0)
        heads = self.free(heads, None, Side.READ) if heads else ()
        self.found.setdefault(target, []).extend(FoldReader(r, self.value(self.size)) for r in heads)

    def renormed(self, block: Block | None, site: Site, size: Factor, by: Factor) -> list[Operation]:
        return renormed(self.stream, self.context, self.vectors, block, site, size, by)

    def free(self, linears: tuple[Linear, ...], block: Block | None, side: Side) -> tuple[Linear, ...]:
        """Return the linears. Raises Closed where they are not all that reads, or writes, or have other uses."""
        who = block.name if block else "the head"
        if not linears or (block and block.barrier(side)):
            raise Closed(Code.LN104, f"{who} is {side} by something other than a plain linear map")
        if shared := [w.param for w in linears if w.shared]:
            raise Closed(Code.LN102, f"{shared[0]} is also used elsewhere", "run untie first")
        return linears

    def product(self, scales: tuple[Scale, ...]) -> Factor:
        """Return the product of factors: a number, or a vector [width]."""
        total: Factor = 1.0
        for scale in scales:
            try:
                total = total * factor_of((scale,), self.context.values)
            except LnrewriteError as error:
                raise Closed(Code.LN105, f"the factor {scale.by} is computed: {error.why}", error.remedy) from error
        return total

    def value(self, by: Factor) -> Value:
        return self.vectors.add(np.asarray(by, dtype=np.float64)) if np.ndim(by) else Number(float(by))


def _plain(factor: Factor) -> Factor:
    """Return a factor as a number where it is one for all channels, up to the rounding of float64."""
    first = float(np.ravel(factor)[0])
    return first if np.all(np.abs(factor - first) <= 1e-14 * abs(first)) else factor


def _nonzero(factor: Factor, block: Block) -> Factor:
    if not np.all(np.isfinite(factor)) or not np.all(factor):
        raise Closed(Code.LN126, f"after {block.name} the stream has factors of zero")
    return factor
