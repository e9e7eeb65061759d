"""The base class of passes, and what is checked of every proposal, whoever wrote the pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, NoReturn

from ..ir import Exactness, Proposal, Stream, site_name
from .protocols import Context, Proposer
from .spec import spell


class Pass(ABC):
    """Propose edits to one stream: a frozen dataclass whose fields are its options; it never mutates anything.

    `name` is the kebab-case word in pipelines, `exactness` what the edits claim; `exactness` and `needs_data` may be
    properties where they depend on the options. With `needs_blocks` a model in which no block was found is refused,
    with detection's reasons; without it such a model stays as it is. With `everywhere` the pass sees the norms on no
    stream too, as the inner norms of a stream of width 0 (`Network.rest`). With `shares` it may be
    run by processes that hold a part of the data each: what it asks of them adds up, by `pipeline.shares`.

    An author writes `plan`; `propose` holds it to what the pass says of itself.
    """

    name: ClassVar[str]
    needs_blocks: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    @property
    @abstractmethod
    def exactness(self) -> Exactness:
        """Return what the edits claim."""

    @property
    def needs_data(self) -> bool:
        """Return whether the pass looks at samples of the model's values."""
        return False

    @property
    def plainer(self) -> Pass | None:
        """Return the pass that edits the same and leaves all other weights alone, where this one has them fitted.

        The run then fits the parameters of the branches that it edited to data that the user gave, and takes the plain
        result where that is nearer to the model on the rest of the data.
        """
        return None

    @abstractmethod
    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Return whole edits, refusals and sites not spoken of, which together name every site and block.

        `Proposal.otherwise` speaks for all sites that are not named.
        """

    def propose(self, stream: Stream, context: Context) -> Proposal:
        """Return the plan for a stream, checked and complete. Raises RuntimeError for a fault of the pass."""
        return proposed(self, stream, context)


def proposed(item: Proposer, stream: Stream, context: Context) -> Proposal:
    """Return what a pass, written with the base class or without, proposes for a stream: checked and complete.

    Raises RuntimeError where it looks at samples and does not say so, edits what is not there, expects an error of an
    edit that it calls exact, or passes a site over in silence.
    """
    ask = item.plan if isinstance(item, Pass) else item.propose
    proposal = ask(stream, _allowed(item, context)).completed(stream)
    inexact = [edit.target for edit in proposal.edits if edit.expected]
    if inexact and item.exactness < Exactness.CALIBRATED:
        raise RuntimeError(f"{spell(item)} claims {item.exactness} edits and expects an error at {inexact[0]!r}")
    _check(spell(item), stream, proposal)
    return proposal


def _allowed(item: Proposer, context: Context) -> Context:
    """Return the context without samples where a pass says that it needs no data."""
    if item.needs_data:
        return context

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(f"{item.name} asks for samples but declares that it needs no data")

    return replace(context, samples=refuse, peaks=refuse, recorded=refuse)


def _check(text: str, stream: Stream, proposal: Proposal) -> None:
    """Raise RuntimeError where a proposal skips a site silently, or edits what is not there."""
    ends = {f"{stream.name}.embedding": stream.embedding, f"{stream.name}.final": stream.final}
    sites = {block.name: {site_name(block, site) for site in block.sites} for block in stream.blocks}
    targets = {edit.target for edit in proposal.edits}
    if strange := sorted(targets - ends.keys() - sites.keys()):
        raise RuntimeError(
            f"{text} edits {strange[0]!r}, which is neither a block nor an end of stream {stream.name!r}"
        )
    named = targets | {r.site for r in proposal.refusals} | {site for site, _ in proposal.not_applicable}
    if stream.name in named:
        return
    for name, held in sites.items():
        if name not in named and not (held <= named if held else not stream.width):
            silent = min(held - named, default=name)
            raise RuntimeError(f"{text} does not mention {silent!r}: a site is edited, refused or not applicable")
    for end, site in ends.items():
        if site and end not in named:
            raise RuntimeError(f"{text} does not mention {end!r}: a site is edited, refused or not applicable")
