"""Walk a stream's trunk through a conversion, token by token, and fit what compensates each norm switched on or off.

This is the method of `place`; the identities it rests on stand in that pass's docstring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from ..errors import Code, Refusal
from ..ir import (
    Affine,
    Block,
    Edit,
    Gain,
    Kind,
    Norm,
    Operation,
    ScaleWriter,
    SetNorm,
    Side,
    Site,
    Stream,
    Value,
    Vector,
    Vectors,
    Where,
)
from ..pipeline.protocols import Context, Samples
from ..pipeline.shares import anywhere
from .ends import Ends
from .fitting import Floats, careful_eps, fit, metric, mix, of_all, offset, size, spread, unit, usual

WRITABLE = {Kind.LAYER, Kind.RMS}
"""The kinds of norm that can be put in or taken out."""


def usual_norm(norms: Iterable[Norm], wanted: str = "auto") -> tuple[Kind, float, bool]:
    """Return kind (or the `wanted` one), eps and whether there is a bias, as most of the norms have them."""
    writable = [n for n in norms if n.kind in WRITABLE]
    found = Counter(n.kind for n in writable)
    kind = Kind(wanted) if wanted != "auto" else found.most_common(1)[0][0] if found else Kind.RMS
    alike = [n for n in writable if n.kind is kind]
    eps = Counter(n.eps for n in alike).most_common(1)[0][0] if alike else 1e-5 if kind is Kind.LAYER else 1e-6
    return kind, eps or 1e-6, kind is Kind.LAYER and (not alike or any(n.beta for n in alike))


def switches(block: Block) -> set[Where]:
    """Return at which of its three switchable sites (in, out, post) a block holds a norm."""
    return {s.where for s in block.sites} & {Where.IN, Where.OUT, Where.POST}


@dataclass
class Conversion:
    """Walk a stream's trunk in the converted model, token by token, and collect the edits.

    `trunk` [tokens, width] is what the next sum's skip carries, `ratio` [tokens] its size in units of the original
    trunk, `carried` the trunk norm that was taken off the trunk just before (post off), `unit` whether a trunk norm
    of unit gain was put on (post on). `offset` is how large a constant goes before an out norm that is put in, in sizes
    of the branch. `plain` keeps what a trunk norm taken off multiplied and added out of the skips: the trunk times
    `basis` is then what it would be with them.
    """

    stream: Stream
    context: Context
    wanted: dict[str, set[Where]]
    kind: Kind
    eps: float
    beta: bool
    offset: float = 0.0
    plain: bool = False
    vectors: Vectors = field(default_factory=Vectors)
    refusals: list[Refusal] = field(default_factory=list)
    folded: set[str] = field(default_factory=set)

    def edits(self) -> list[Edit]:
        samples = self.context.samples()
        sums = [list(g) for _, g in groupby(self.stream.blocks, key=lambda b: b.anchor.total)]
        first = sums[0][0]
        self.trunk: Floats = samples[first.name].state
        self.ratio: Floats = np.ones(len(self.trunk))
        self.carried: Norm | None = None
        self.unit = False
        self.basis: Floats = np.ones(self.stream.width)
        self.shift: Floats = np.zeros(self.stream.width)
        found: list[Edit] = []
        if self.turns(first, Where.POST, on=True) and not self.stream.embedding:
            ones = self.vectors.add(np.ones(self.stream.width))
            found.append(
                Edit(f"{self.stream.name}.embedding", (SetNorm(Where.EMBEDDING, self.norm(first, self.eps), ones),))
            )
            self.normalize()
        for index, group in enumerate(sums):
            for block in group:
                if samples[block.name].branch.shape != self.trunk.shape:
                    self.refuse(block, Code.LN114, "the stream changes its number of tokens or channels on the way")
                    return found
            found += self.sum(group, samples, last=index == len(sums) - 1)
            if index + 1 < len(sums):
                total, onward = samples[group[-1].name].total, sums[index + 1][0]
                self.follow(group[-1], total, onward, samples[onward.name].state)
        return found

    @property
    def resized(self) -> bool:
        """Return whether the trunk is another than the original's: its size, or what a norm that is gone multiplied."""
        return bool(self.carried) or anywhere((self.ratio != 1).any())

    def turns(self, block: Block, where: Where, on: bool) -> bool:
        """Return whether the block's norm at `where` is switched on (or off)."""
        held, wanted = switches(block), self.wanted.get(block.name, switches(block))
        return (where in wanted - held) if on else (where in held - wanted)

    def refuse(self, block: Block, code: Code, why: str) -> None:
        self.refusals.append(Refusal(code, block.name, why, "exclude it with blocks=, or choose another placement"))

    def sum(self, group: list[Block], samples: Mapping[str, Samples], last: bool) -> list[Edit]:
        """Return the edits of the branches of one sum, and take the trunk through it."""
        done: dict[str, tuple[list[Operation], list[float]]] = {}
        factor, more = _kept(group, samples)
        skip = factor * self.trunk
        weight = 1 / np.maximum((size(samples[group[0].name].total) * self.ratio) ** 2, 1e-300)
        for block in group:
            operations: list[Operation] = []
            fits: list[float] = []
            self.read(block, samples[block.name], operations, fits)
            if block is group[0] and self.carried and (self.carried.gamma or self.carried.beta):
                after = fit(
                    self.trunk,
                    samples[block.name].state * self.ratio[:, None],
                    1 / self.ratio**2,
                    shift=bool(self.carried.beta),
                )
                fits.append(after.error)
                if self.plain:
                    self.basis, self.shift = after.scale, self.shift if after.shift is None else after.shift
                else:
                    operations.append(Affine(Where.POST, self.vector(after.scale), self.vector(after.shift)))
                    skip = factor * after.value
            if block is group[0]:
                skip = skip + self.add(block, more, weight, operations, fits)
            skip = skip + self.write(block, samples[block.name], weight, operations, fits)
            done[block.name] = operations, fits
        self.trunk = skip
        basis = self.vector(self.basis if anywhere((self.basis != 1).any()) else None)
        self.after(group[-1], samples[group[-1].name], last, *done[group[-1].name])
        edits = [self.edit(b, *done[b.name], samples[b.name]) for b in group if done[b.name][0]]
        return [replace(edit, basis=basis) for edit in edits]

    def edit(self, block: Block, operations: list[Operation], fits: list[float], seen: Samples) -> Edit:
        r = of_all(size(seen.branch))
        cv = float(r.var() / max((r * r).mean(), 1e-300))
        note = f"spread of the branch's size CV^2/(1+CV^2) {cv:.3g}"
        return Edit(block.name, tuple(operations), max(fits, default=0.0), note)

    def norm(self, block: Block, eps: float) -> Norm:
        """Return a norm without gain over the block's channels."""
        return Norm(self.kind, eps, axis=block.anchor.axis)

    @property
    def ends(self) -> Ends:
        return Ends(self.vectors, self.context.values)

    def vector(self, values: Floats | None) -> Vector | None:
        return self.ends.vector(values)

    def read(self, block: Block, seen: Samples, operations: list[Operation], fits: list[float]) -> None:
        """Keep what the branch reads as it was: keep, insert, take over or remove its in norm."""
        site = block.at(Where.IN)
        if self.turns(block, Where.IN, on=True):
            if self.carried and not self.plain:
                operations.append(SetNorm(Where.IN, replace(self.carried, axis=block.anchor.axis)))
                return
            base = unit(self.kind, self.trunk, self.eps)
            found = fit(base, seen.read, usual(seen.read), self.beta)
            operations.append(
                SetNorm(Where.IN, self.norm(block, self.eps), self.vector(found.scale), self.vector(found.shift))
            )
            fits.append(found.error)
        elif self.turns(block, Where.IN, on=False) and site:
            shared = site.origin[-1] in self.folded
            operations += [] if shared else [SetNorm(Where.IN, None)]
            self.compensate(block, site, seen, operations, fits, shared)
            self.folded.add(site.origin[-1])
        elif site is None and self.resized:
            self.compensate(block, site, seen, operations, fits, False)

    def compensate(
        self,
        block: Block,
        site: Site | None,
        seen: Samples,
        operations: list[Operation],
        fits: list[float],
        shared: bool,
    ) -> None:
        """Make the readers see scale * trunk + shift: folded into them where that is whole, else as an operation."""
        readers = site.readers if site else block.readers
        whole = self.ends.reads(block, site, self.beta)
        if self.unit and site and site.norm.kind is self.kind and not site.norm.computed:
            n = site.norm
            scale: Value | None = Gain(n.gamma, n.plus_one) if n.gamma else None
            shift = self.context.values(n.beta).reshape(-1) if n.beta else None
        else:
            weight = usual(self.trunk) * usual(seen.read)
            found = fit(self.trunk, seen.read, weight, self.beta)
            alike = not any(s.vector for s in block.scaled("read"))
            mixing = whole and alike and not any(r.apart for r in readers)
            if mixing and (dense := mix(self.trunk, seen.read, weight, self.beta)):
                found = dense
            fits.append(found.error)
            scale, shift = self.vector(found.scale), found.shift
        if not (whole and shared):
            operations += self.ends.reading(block, site, scale, shift)

    def write(
        self, block: Block, seen: Samples, weight: Floats, operations: list[Operation], fits: list[float]
    ) -> Floats:
        """Keep what the branch adds as it was, in the trunk's new size; return what it adds."""
        goal = (seen.branch * self.ratio[:, None] + self.shift) / self.basis
        self.shift = np.zeros(self.stream.width)  # the first branch of a sum has taken it
        weight = weight * usual(goal)
        if not anywhere(seen.branch.any()):
            self.refuse(block, Code.LN112, "its branch is zero on the calibration data")
            return goal
        if self.turns(block, Where.OUT, on=True):
            even = metric(seen.branch, weight)
            normed = seen.branch * even
            plus = offset(normed, weight, self.offset) if self.offset and self.shifts(block) else None
            self.rescale(block, even, plus, operations)
            eps = careful_eps(self.eps, normed)
            found = fit(unit(self.kind, normed if plus is None else normed + plus, eps), goal, weight, self.beta)
            operations.append(
                SetNorm(Where.OUT, self.norm(block, eps), self.vector(found.scale), self.vector(found.shift))
            )
        elif self.turns(block, Where.OUT, on=False):
            operations.append(SetNorm(Where.OUT, None))
            site = block.at(Where.OUT)
            found = fit(self.without(site, seen), goal, weight, bool(site and site.norm.beta))
            self.rescale(block, found.scale, found.shift, operations)
        elif self.resized:
            found = fit(seen.branch, goal, weight, self.plain and self.carried is not None)
            self.rescale(block, found.scale, found.shift, operations)
        else:
            return goal
        fits.append(found.error)
        return found.value

    def add(
        self, block: Block, more: Floats | float, weight: Floats, operations: list[Operation], fits: list[float]
    ) -> Floats | float:
        """Keep what a sum adds beside its branches as it was, in the trunk's new size; return what it adds."""
        barrier = block.barrier(Side.ADDED)
        if not (self.resized and (block.added or barrier)):
            return more
        if barrier or any(w.shared for w in block.added):
            self.refuse(block, Code.LN114, "its sum adds more than branches, in weights that are not its own")
            return more
        added = np.broadcast_to(more, self.trunk.shape)
        found = fit(added, added * self.ratio[:, None] / self.basis, weight * usual(added), False)
        operations += [ScaleWriter(w, self.vectors.add(found.scale)) for w in block.added]
        fits.append(found.error)
        return found.value

    def shifts(self, block: Block) -> bool:
        """Return whether a constant before the block's new out norm costs nothing: a writer adds it, beta takes it."""
        return self.kind is Kind.LAYER and self.beta and self.ends.writes(block, shift=True)

    def without(self, site: Site | None, seen: Samples) -> Floats:
        """Return the branch's end without its out norm: constant scales between the norm and the sum stay."""
        assert site is not None
        normed = self.value(site.norm, unit(site.norm.kind, seen.written, site.norm.eps))
        return seen.written * fit(normed, seen.branch, np.ones(len(normed))).scale

    def value(self, norm: Norm, u: Floats) -> Floats:
        gain = 1.0 if norm.computed else self.context.gain(norm)
        return gain * u + (self.context.values(norm.beta).reshape(-1) if norm.beta else 0.0)

    def rescale(self, block: Block, by: Floats, plus: Floats | None, operations: list[Operation]) -> None:
        """Make the branch end in by * f + plus: in its writers where that is whole, else as an operation."""
        operations += self.ends.writing(block, self.vector(by), plus)

    def after(self, block: Block, seen: Samples, last: bool, operations: list[Operation], fits: list[float]) -> None:
        """Take the trunk through the norm after a sum: kept, put on, or taken off."""
        site = block.at(Where.POST)
        self.carried, self.unit = None, False
        if self.turns(block, Where.POST, on=True):
            if last and self.stream.final:
                return
            if last:
                found = fit(unit(self.kind, self.trunk, self.eps), seen.total, usual(seen.total), self.beta)
                fits.append(found.error)
                operations.append(
                    SetNorm(Where.POST, self.norm(block, self.eps), self.vector(found.scale), self.vector(found.shift))
                )
                return
            operations.append(SetNorm(Where.POST, self.norm(block, self.eps), self.vector(np.ones(self.stream.width))))
            self.normalize()
        elif self.turns(block, Where.POST, on=False) and site and not last:
            operations.append(SetNorm(Where.POST, None))
            whole = self.trunk * self.basis
            self.ratio = np.sqrt(spread(site.norm.kind, whole) ** 2 + max(site.norm.eps, 1e-12))
            self.carried = site.norm
        elif site and self.plain and self.resized:
            wanted = self.value(site.norm, unit(site.norm.kind, seen.total, site.norm.eps))
            found = fit(unit(self.kind, self.trunk, self.eps), wanted, usual(wanted), self.beta)
            fits.append(found.error)
            scale, shift = self.vector(found.scale), self.vector(found.shift)
            operations.append(SetNorm(Where.POST, self.norm(block, self.eps), scale, shift))
            self.trunk, self.ratio, self.basis = found.value, np.ones(len(wanted)), np.ones(self.stream.width)
        elif site:
            self.trunk = self.value(site.norm, unit(site.norm.kind, self.trunk, site.norm.eps))
            self.ratio = np.ones(len(self.trunk))

    def normalize(self) -> None:
        self.ratio = self.ratio / np.sqrt(spread(self.kind, self.trunk) ** 2 + self.eps)
        self.trunk = unit(self.kind, self.trunk, self.eps)
        self.unit = True

    def follow(self, block: Block, total: Floats, onward: Block, state: Floats) -> None:
        """Take the trunk along to the next sum, through a constant scale where the model has one."""
        other = total is not state and (
            total.shape != state.shape or not np.allclose(total, state, rtol=1e-4, atol=1e-6)
        )
        if block.at(Where.POST) or not anywhere(other):
            return
        if self.resized:
            self.refuse(onward, Code.LN114, "the trunk is scaled or transformed between blocks")
        self.trunk = state * 1.0
        if len(state) != len(self.ratio):  # tokens come or go
            self.ratio = np.ones(len(state))


def _kept(group: list[Block], samples: Mapping[str, Samples]) -> tuple[Floats | float, Floats | float]:
    """Return what a sum makes of its state, besides branches: the skip's factor, and what else the sum adds."""
    first, seen = group[0], samples[group[0].name]
    if not (first.scaled("skip") or first.added or first.barrier(Side.ADDED)):
        return first.scale, 0.0
    rest = seen.total - sum(samples[b.name].branch for b in group)
    by = fit(seen.state, rest, np.ones(len(rest))).scale if first.scaled("skip") else first.scale
    return by, rest - by * seen.state
