"""Run one pass on a program: ask it what it wants, carry out what is not refused, and count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic

from ..errors import LnrewriteError, Refusal, Refused
from ..ir import Exactness, Network, Proposal, Stream
from .base import Pass, proposed
from .feed import Feed
from .protocols import Bases, Context, M, Proposer, Samples
from .report import Expected, Fitted, Skipped, Step
from .results import Drift
from .shares import agreed, everyone
from .sounding import Unproved, Witness, failing, sound, stated
from .spec import spell

ROUNDING = 1e-6
"""Nats by which a divergence may be off."""


def no_better(made: Drift, plain: Drift) -> str:
    """Return by which figure weights that were fitted are no better than constants, with both; empty where they are.

    Where few data were fitted to, outputs may come nearer and tell less: the divergence of logits counts too.
    """
    one, other = made.relative_error, plain.relative_error
    if one is not None and other is not None and not one < other:
        return f"error {one:.2g}, {other:.2g}"
    if made.kl is not None and plain.kl is not None and made.kl > plain.kl + ROUNDING:
        return f"KL {made.kl:.2g}, {plain.kl:.2g}"
    return ""


@dataclass(frozen=True)
class Done:
    """Collect what one pass did."""

    step: Step
    exactness: Exactness
    refusals: tuple[Refusal, ...]
    skipped: tuple[Skipped, ...]
    expected: tuple[Expected, ...]
    unproved: bool
    network: Network
    fitted: tuple[Fitted, ...] = ()
    notes: tuple[str, ...] = ()
    bases: Bases = field(default_factory=dict)


@dataclass(eq=False)
class Turn(Generic[M]):
    """Stand before a pass with the program it is to edit and with what it may ask; data are run at most once.

    witness: knows what the program is to compute; one of each edit leaves out and refuses what does not keep it.
    """

    current: M
    network: Network
    feed: Feed
    partial: bool
    seed: int
    witness: Witness | None

    def run(self, item: Proposer, consume: bool) -> tuple[M, Done]:
        """Run a pass over every stream of the network; `consume` lets it edit the program itself.

        A pass that has weights fitted to data is run with constants alone besides, and the better of both is kept.
        """
        plainer = item.plainer if isinstance(item, Pass) and self.feed.fits_weights else None
        made, done = self.carry_out(item, consume and plainer is None)
        if plainer is None or not done.step.edits:
            return made, done
        started = time.perf_counter()
        made, rows, notes = made.fitted(self.current, done.bases, self.feed.fit, self.feed.held)
        plain, before = self.carry_out(plainer, False)
        worse = no_better(*(self.feed.drift(self.current, program) for program in (made, plain)))
        if not worse:
            step = replace(done.step, seconds=done.step.seconds + time.perf_counter() - started)
            return made, replace(done, step=step, fitted=rows, notes=notes)
        step = replace(before.step, text=done.step.text)
        why = f"fitted weights were no better on held-out data ({worse} with constants alone): left out"
        return plain, replace(before, step=step, notes=(*notes, why))

    def carry_out(self, item: Proposer, consume: bool) -> tuple[M, Done]:
        """Run a pass as it is."""
        started, text, current = time.perf_counter(), spell(item), self.current
        proposals = agreed(self.proposals(item))
        refusals = tuple(r for _, p in proposals for r in p.refusals) or _unseen(item, self.network)
        if refusals and not self.partial:
            raise Refused(refusals)
        wanted = [(s, p) for s, p in proposals if p.edits and all(r.site != s.name for r in p.refusals)]
        if self.witness and wanted:
            self.witness.call(current)
            if self.witness.each and self.witness.evidence is not None:
                wanted, wrong = sound(current, wanted, text, self.witness.evidence, self.witness.allowed)
                refusals += wrong
                if refusals and not self.partial:
                    raise Refused(refusals)
        if self.witness:
            self.witness.allowed += stated(e for _, p in wanted for e in p.edits)
        count = 0
        if wanted:
            try:
                current, count = current.apply(wanted, text, consume=consume)
            except LnrewriteError:
                raise
            except Exception as fault:  # of ours: an edit that has no place
                raise Unproved(text, f"carrying it out {failing(fault)}") from fault
        skipped = tuple(Skipped(item.name, site, why) for _, p in proposals for site, why in p.not_applicable)
        edits = [(e, p.vectors) for _, p in wanted for e in p.edits if e.expected is not None or e.note]
        expected = tuple(Expected(e.target, e.expected, e.note) for e, _ in edits)
        bases = {e.target: vectors[e.basis.digest] if e.basis else None for e, vectors in edits}
        step = Step(text, count, len(refusals), time.perf_counter() - started)
        unproved = count > 0 and self.witness is not None and self.witness.evidence is None
        return current, Done(step, item.exactness, refusals, skipped, expected, unproved, self.network, bases=bases)

    def proposals(self, item: Proposer) -> list[tuple[Stream, Proposal]]:
        """Ask a pass what it wants of each stream, and of what belongs to none where it edits that too."""
        network = self.network
        beside = bool(network.elsewhere or network.computed or network.gates)
        everywhere = isinstance(item, Pass) and item.everywhere and beside
        streams = (*self.network.streams, self.network.rest) if everywhere else self.network.streams
        return [(stream, proposed(item, stream, self.context)) for stream in streams]

    @cached_property
    def context(self) -> Context:
        program = self.current
        return Context(
            network=self.network,
            samples=lambda: self.samples,
            is_ones=program.is_ones,
            is_zeros=program.is_zeros,
            values=program.values,
            seed=self.seed,
            shape=program.shape,
            affine=program.affine,
            peaks=lambda: self.peaks,
            recorded=lambda axes: program.recorded(self.feed.fit, axes),
            fits=self.feed.fits_weights,
        )

    @cached_property
    def samples(self) -> Mapping[str, Samples]:
        return self.current.samples(self.feed.fit)

    @cached_property
    def peaks(self) -> Mapping[str, float]:
        told = everyone(self.current.peaks(self.feed.fit))
        return {name: max(each[name] for each in told) for name in told[0]}


def _unseen(item: Proposer, network: Network) -> tuple[Refusal, ...]:
    """Return detection's own refusals where it found no block and the pass cannot do without one."""
    if network.blocks or not (isinstance(item, Pass) and item.needs_blocks):
        return ()
    return network.refusals
