"""A complete pass in one file: re-parameterise norm gains as 1 + w."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import Edit, Exactness, Gain, Proposal, SetNorm, Site, Stream, Where, site_name
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class PlusOneGains(Pass):
    """Store every norm's gain g as w = g - 1 and compute with 1 + w, as Gemma does.

    Weight decay pulls w towards 0, so gains go to 1 and not to 0: do this before a network is trained further.

        before:  in layer(eps=1e-05 gamma=@n.weight beta=@n.bias) -> @up:1
        after:   in layer(eps=1e-05 gamma=1+@n.weight beta=@n.bias) -> @up:1

    Exact: u * g = u * (1 + (g - 1)). `blocks` selects blocks; without it the embedding and final norms take part too.
    """

    name: ClassVar[str] = "plus-one-gains"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC

    blocks: str | None = None

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Return one edit, refusal or "not applicable" row for each norm; a block without any needs no more words."""
        uses = Counter(s.norm.gamma for t in context.network.streams for _, s in t.sites())
        chosen = context.selected(self.blocks)
        edits, refusals, skipped = list[Edit](), list[Refusal](), list[tuple[str, str]]()
        for name, target, site in _sites(stream):
            if self.blocks is not None and target not in chosen:
                skipped.append((name, "not selected"))
            elif why := _idle(name, site):
                skipped.append((name, why))
            elif site.norm.computed:
                why, remedy = (
                    "its gain is computed, so there is no parameter to write to",
                    "exclude it with blocks=",
                )
                refusals.append(Refusal(Code.LN105, name, why, remedy))
            elif uses[site.norm.gamma] > 1:
                why = f"{site.norm.gamma} is the gain of {uses[site.norm.gamma]} norms, and one edit would change all"
                refusals.append(Refusal(Code.LN102, name, why, "give each norm a gain of its own"))
            else:
                edits.append(Edit(target, (_rewrite(site),)))
        return Proposal(tuple(edits), tuple(refusals), tuple(skipped), otherwise="the block has no norm")


def _sites(stream: Stream) -> Iterator[tuple[str, str, Site]]:
    """Yield (site name, edit target, site): a block's site is edited through its block, an end through its own name."""
    owners = {site_name(block, site): block.name for block in stream.blocks for site in block.sites}
    for name, site in stream.sites():
        yield name, owners.get(name, name), site


def _idle(name: str, site: Site) -> str:
    """Return why a site is none of this pass's business, or nothing."""
    if site.norm.gamma is None:
        return "the norm has no gain"
    if site.norm.plus_one:
        return "the gain is stored as 1 + w already"
    if not name.endswith(f".{site.where}"):  # numbered: an edit names a block and a place, so it would hit the first
        return "several norms stand there"
    return "the norm is inside its branch" if site.where is Where.INNER else ""


def _rewrite(site: Site) -> SetNorm:
    """Describe the same norm in the other form; gain and bias keep their values, or they would start at 1 and 0."""
    norm = site.norm
    return SetNorm(
        site.where,
        replace(norm, plus_one=True),
        gamma=Gain(norm.gamma) if norm.gamma else None,
        beta=Gain(norm.beta) if norm.beta else None,
    )
