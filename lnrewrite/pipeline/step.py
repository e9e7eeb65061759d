"""Run one pass on a program: ask it what it wants, carry out what is not refused, and count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..errors import LnrewriteError, Refusal, Refused
from ..ir import Exactness, Network
from .base import Pass, proposed
from .feed import Feed
from .protocols import Batch, Context, M, Proposer
from .report import Expected, Fitted, Skipped, Step
from .sounding import Unproved, Witness, sound
from .spec import spell

T = TypeVar("T")


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


def run_step(
    item: Proposer,
    current: M,
    network: Network,
    feed: Feed,
    partial: bool,
    seed: int,
    consume: bool,
    witness: Witness | None,
) -> tuple[M, Done]:
    """Run one pass over every stream of the current program's network; `consume` lets it edit that program itself.

    witness: knows what the program is to compute; one of each edit leaves out and refuses what does not keep it.
    """
    plainer = item.plainer if isinstance(item, Pass) and item.plainer and feed.fits_weights else None
    made, done = _carry_out(item, current, network, feed, partial, seed, consume and not plainer, witness)
    if plainer is None or not done.step.edits:
        return made, done
    started = time.perf_counter()
    made, rows, notes = made.fitted(current, {e.site for e in done.expected}, feed.fit, feed.held)
    plain, before = _carry_out(plainer, current, network, feed, partial, seed, False, witness)
    errors = [feed.drift(current, program).relative_error for program in (made, plain)]
    if errors[0] is None or errors[1] is None or errors[0] < errors[1]:
        step = replace(done.step, seconds=done.step.seconds + time.perf_counter() - started)
        return made, replace(done, step=step, fitted=rows, notes=notes)
    why = f"fitted weights were no better on held-out data ({errors[0]:.2g}, with constants alone {errors[1]:.2g})"
    return plain, replace(before, step=replace(before.step, text=done.step.text), notes=(*notes, f"{why}: left out"))


def _carry_out(
    item: Proposer,
    current: M,
    network: Network,
    feed: Feed,
    partial: bool,
    seed: int,
    consume: bool,
    witness: Witness | None,
) -> tuple[M, Done]:
    """Run one pass as it is."""
    started = time.perf_counter()
    text = spell(item)
    samples, peaks = _once(current.samples, feed), _once(current.peaks, feed)
    ask = (current.is_ones, current.is_zeros, current.values)
    fits = isinstance(item, Pass) and item.plainer is not None and feed.fits_weights
    context = Context(network, samples, *ask, seed, current.shape, current.affine, peaks, fits)
    proposals = []
    everywhere = isinstance(item, Pass) and item.everywhere and bool(network.elsewhere or network.computed)
    for stream in (*network.streams, network.rest) if everywhere else network.streams:
        proposals.append((stream, proposed(item, stream, context)))
    refusals = tuple(r for _, p in proposals for r in p.refusals) or _unseen(item, network)
    if refusals and not partial:
        raise Refused(refusals)
    wanted = [(s, p) for s, p in proposals if p.edits and all(r.site != s.name for r in p.refusals)]
    if witness and wanted:
        witness.call(current)
        if witness.each and witness.evidence is not None:
            wanted, wrong = sound(current, wanted, text, witness.evidence)
            refusals += wrong
            if refusals and not partial:
                raise Refused(refusals)
    count = 0
    if wanted:
        try:
            current, count = current.apply(wanted, text, consume=consume)
        except LnrewriteError:
            raise
        except Exception as fault:  # of ours: an edit that has no place
            raise Unproved(text, f"carrying it out fails with {type(fault).__name__}: {fault}") from fault
    skipped = tuple(Skipped(item.name, site, why) for _, p in proposals for site, why in p.not_applicable)
    expected = tuple(
        Expected(e.target, e.expected, e.note) for _, p in wanted for e in p.edits if e.expected is not None or e.note
    )
    step = Step(text, count, len(refusals), time.perf_counter() - started)
    unproved = count > 0 and witness is not None and witness.evidence is None
    return current, Done(step, item.exactness, refusals, skipped, expected, unproved, network)


def _once(run: Callable[[Sequence[Batch]], T], feed: Feed) -> Callable[[], T]:
    """Return what runs the model on the data, at most once."""
    memory: list[T] = []

    def ask() -> T:
        if not memory:
            memory.append(run(feed.fit))
        return memory[0]

    return ask


def _unseen(item: Proposer, network: Network) -> tuple[Refusal, ...]:
    """Return detection's own refusals where it found no block and the pass cannot do without one."""
    if network.blocks or not (isinstance(item, Pass) and item.needs_blocks):
        return ()
    return network.refusals
