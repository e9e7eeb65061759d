"""Run one pass on a program: ask it what it wants, hold it to have spoken of every site, carry out what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import LnrewriteError, Refusal, Refused
from ..ir import Exactness, Network, Proposal, Stream, site_name
from .feed import Feed
from .protocols import Batch, Context, M, Pass
from .report import Expected, Skipped, Step
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


def run_step(
    item: Pass,
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
    started = time.perf_counter()
    text = spell(item)
    samples, peaks = _once(item, current.samples, feed), _once(item, current.peaks, feed)
    ask = (current.is_ones, current.is_zeros, current.values)
    context = Context(network, samples, *ask, seed, current.shape, current.affine, peaks)
    proposals = []
    rest = (network.rest,) if getattr(item, "everywhere", False) and (network.elsewhere or network.computed) else ()
    for stream in (*network.streams, *rest):
        proposal = item.propose(stream, context)
        _check(text, stream, proposal)
        proposals.append((stream, proposal))
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


def _once(item: Pass, run: Callable[[Sequence[Batch]], T], feed: Feed) -> Callable[[], T]:
    """Return what runs the model on the data for one pass, at most once."""
    memory: list[T] = []

    def ask() -> T:
        if not item.needs_data:
            raise RuntimeError(f"{item.name} asks for samples but says that it needs no data")
        if not memory:
            memory.append(run(feed.fit))
        return memory[0]

    return ask


def _unseen(item: Pass, network: Network) -> tuple[Refusal, ...]:
    """Return detection's own refusals where it found no block and the pass cannot do without one."""
    if network.blocks or not getattr(item, "needs_blocks", False):
        return ()
    return network.refusals


def _check(text: str, stream: Stream, proposal: Proposal) -> None:
    """Raise RuntimeError where a proposal skips a site silently, or edits what is not there: a fault of the pass."""
    ends = {f"{stream.name}.embedding": stream.embedding, f"{stream.name}.final": stream.final}
    sites = {block.name: {site_name(block, site) for site in block.sites} for block in stream.blocks}
    targets = {edit.target for edit in proposal.edits}
    if strange := sorted(targets - ends.keys() - sites.keys()):
        raise RuntimeError(f"{text} edits {strange[0]!r}, which is no block and no end of stream {stream.name!r}")
    named = targets | {r.site for r in proposal.refusals} | {site for site, _ in proposal.not_applicable}
    if stream.name in named:
        return
    for name, held in sites.items():
        if name not in named and not (held and held <= named):
            silent = min(held - named, default=name)
            raise RuntimeError(f"{text} says nothing of {silent!r}: a site is edited, refused or not applicable")
    for end, site in ends.items():
        if site and end not in named:
            raise RuntimeError(f"{text} says nothing of {end!r}: a site is edited, refused or not applicable")
