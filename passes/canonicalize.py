"""Give every norm its plainest description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lnrewrite.ir import Edit, Exactness, Gain, Kind, Norm, Proposal, SetNorm, Stream
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Drop gains of all ones and biases of all zeros, and store 1 + w gains as plain ones.

    Other passes then meet one convention, and a norm that was folded before shows it. With u the normalized value

        1 * u + 0  =  u            (1 + w) * u  =  g * u,  g = 1 + w

    Before::

        # ONES: ln_1.weight
        # ZEROS: ln_1.bias
        stream toy width=8
          block h.0 attention peri
            in     layer(eps=1e-05 gamma=@ln_1.weight beta=@ln_1.bias) -> @q.weight:1
            out    rms(eps=1e-06 gamma=1+@ln_2.weight)
            writes @o.weight:0

    After::

        stream toy width=8
          block h.0 attention peri
            in     layer(eps=1e-05) -> @q.weight:1
            out    rms(eps=1e-06 gamma=@ln_2.weight)
            writes @o.weight:0

    Refuses nothing: what it cannot simplify it leaves. A 1 + w gain stays where w serves a norm that is not rewritten
    with it (of another stream, or beside the streams). Source: the gain conventions of Llama (g) and Gemma (1 + w).
    """

    name: ClassVar[str] = "canonicalize"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose an edit for each norm that has a plainer description."""
        edits: list[Edit] = []
        skipped = [(b.name, "the block holds no norm") for b in stream.blocks if not b.sites]
        kept = _read_elsewhere(stream, context)
        for place in stream.located():
            name, _, site = place
            plain = _plain(site.norm, kept, context)
            if site.norm.kind not in (Kind.LAYER, Kind.RMS):
                skipped.append((name, f"the pass is defined for layer and rms norms, not for {site.norm.kind}"))
            elif plain == site.norm:
                skipped.append((name, "nothing to simplify"))
            else:
                gamma = None if plain.gamma is None else Gain(plain.gamma, site.norm.plus_one)
                beta = None if plain.beta is None else Gain(plain.beta)
                edits.append(Edit(place.target, (SetNorm(site.where, plain, gamma, beta, place.number),)))
        return Proposal(tuple(edits), not_applicable=tuple(skipped))


def _plain(norm: Norm, kept: frozenset[str | None], context: Context) -> Norm:
    """Return the norm without what does nothing; a computed gain has no values to look at."""
    if norm.beta is not None and context.is_zeros(norm.beta):
        norm = replace(norm, beta=None)
    if norm.gamma is None or norm.computed:
        return norm
    if context.is_zeros(norm.gamma) if norm.plus_one else context.is_ones(norm.gamma):
        return replace(norm, gamma=None, plus_one=False)
    return norm if norm.gamma in kept else replace(norm, plus_one=False)


def _read_elsewhere(stream: Stream, context: Context) -> frozenset[str | None]:
    """Return the gains that must keep their values: norms that this proposal does not reach name them too."""
    network = context.network
    others = [s for other in network.streams if other.name != stream.name for _, s in other.sites()]
    plain = [s for _, s in stream.sites() if not s.norm.plus_one]
    return frozenset(s.norm.gamma for s in (*others, *network.elsewhere, *plain))
