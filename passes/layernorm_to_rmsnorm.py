"""Turn LayerNorms into RMSNorms by keeping what they read at zero mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lnrewrite.algebra.basis import Basis, Closed
from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import (
    Affine,
    Block,
    Center,
    Edit,
    Exactness,
    Kind,
    Linear,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Site,
    Stream,
    Where,
    site_name,
)
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class LayernormToRmsnorm(Pass):
    """Turn every LayerNorm whose input can be kept at zero mean into an RMSNorm: same eps, same gain and bias.

    A LayerNorm is an RMSNorm of M x, with M = I - 11^T/n the matrix that takes the mean off:

        LayerNorm(x)  =  RMSNorm(M x)

    and M can be moved to where x comes from. A stream is a sum, so M goes into every writer, W <- M W, c <- M c, and
    into every table, position, class token and projection that starts it. A source that no weights can center (a table
    tied to the head, an activation or a norm's gain before the stream) gets one explicit subtraction where the stream
    starts; `sources=weights` refuses that instead. A norm inside a branch, or at its end, reads linears of its own,
    which are centered alone: output norms, q and k norms.

    Before::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     layer(eps=1e-05 gamma=@g beta=@b) -> @q:1
            writes @o:0+@c
          final  layer(eps=1e-05 gamma=@f) -> @head:1

    After::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     rms(eps=1e-05 gamma=@g beta=@b) -> @q:1
            writes @o:0+@c
          final  rms(eps=1e-05 gamma=@f) -> @head:1

    Refuses the norms of a stream whose mean something sees: a norm of another kind (LN111), a linear or an output that
    reads the state bare (LN120), a gain behind an output or trunk norm (LN121), one factor per channel (LN123), a
    writer that is shared or out of sight (LN102, LN104).

    Source: Jiang et al., Pre-RMSNorm and Pre-CRMSNorm Transformers (arXiv 2305.14858); for any network 2605.14521.
    """

    name: ClassVar[str] = "layernorm-to-rmsnorm"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    everywhere: ClassVar[bool] = True

    sources: Literal["any", "weights"] = "any"

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for the norms that read the stream, and one for each norm with linears of its own."""
        center = _Centered(stream, Center(stream.width), weights_only=self.sources == "weights")
        edits, refusals = list[Edit](), list[Refusal]()
        readers = [(n, s) for n, s in stream.sites() if s.where in (Where.IN, Where.POST, Where.FINAL) and _layer(s)]
        if readers:
            try:
                edits += center.edits()
            except Closed as closed:
                refusals += [closed.refusal(name) for name, _ in readers]
        if stream.embedding and _layer(stream.embedding):
            _embedding(stream, edits, refusals)
        for block in stream.blocks:
            for site in block.sites:
                if site.where in (Where.INNER, Where.OUT) and _layer(site):
                    _alone(stream, block, site, edits, refusals)
        return Proposal(tuple(edits), refusals=tuple(refusals), otherwise="not a LayerNorm")


def _layer(site: Site) -> bool:
    return site.norm.kind is Kind.LAYER and site.norm.over is None


def _rms(where: Where, site: Site, index: int = 0) -> SetNorm:
    return SetNorm(where, replace(site.norm, kind=Kind.RMS), index=index)


def _alone(stream: Stream, block: Block, site: Site, edits: list[Edit], refusals: list[Refusal]) -> None:
    """Center the linears that a norm inside a branch, or at its end, reads."""
    mixed = site.where is Where.OUT and any(s.vector for s in block.scaled("written"))
    writers, name = () if mixed else stream.producers(block, site), site_name(block, site)
    if not writers:
        refusals.append(Refusal(Code.LN104, name, "its input is not computed by linear maps alone"))
    elif shared := [w.param for w in writers if w.shared]:
        refusals.append(Refusal(Code.LN102, name, f"{shared[0]} is also used elsewhere", "run untie first"))
    else:
        centered = [ScaleWriter(w, Center(site.width or stream.width)) for w in writers]
        edits.append(Edit(block.name, (*centered, _rms(site.where, site, block.index(site)))))


def _embedding(stream: Stream, edits: list[Edit], refusals: list[Refusal]) -> None:
    """Center in weights what the embedding norm reads: an RMSNorm behind an explicit subtraction is a LayerNorm."""
    assert stream.embedding
    closed = stream.opaque or next((f"{s.param} is also used elsewhere" for s in stream.sources if s.shared), "")
    name, center = f"{stream.name}.embedding", Center(stream.width)
    if closed or not stream.sources:
        refusals.append(Refusal(Code.LN102, name, closed or "its sources are unknown", "run untie first"))
        return
    ways = tuple(ScaleWriter(s, center) for s in stream.sources)
    edits.insert(0, Edit(name, (*ways, _rms(Where.EMBEDDING, stream.embedding))))


@dataclass
class _Centered(Basis):
    """Keep a stream at zero mean."""

    weights_only: bool = False

    def read(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        if not _layer(site):
            who = site_name(block, site) if block else "the final norm"
            raise Closed(Code.LN111, f"{who} is a {site.norm.kind} norm, which sees the mean")
        return (_rms(site.where, site, block.index(site) if block else 0),)

    def bare(self, block: Block | None, readers: tuple[Linear, ...], closed: bool) -> tuple[Operation, ...]:
        who = block.name if block else "the head"
        raise Closed(Code.LN120, f"{who} reads the stream without a norm and sees its mean")

    def made(self, block: Block | None, site: Site, writers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        if _layer(site) and site.norm.gamma is None and site.norm.beta is None:
            return ()
        if block is None and not isinstance(ways := self.explicit(Where.EMBEDDING), Closed):
            return ways
        who = site_name(block, site) if block else "the embedding norm"
        raise Closed(Code.LN121, f"the gain or bias of {who} brings a mean into the stream")

    def through(self, block: Block, site: Site, last: bool) -> tuple[Operation, ...]:
        if not last and (site.norm.gamma is not None or site.norm.beta is not None):
            why = f"the gain or bias of {site_name(block, site)} brings a mean into the stream"
            raise Closed(Code.LN121, why, "convert the placement first")
        return self.read(block, site)

    def explicit(self, where: Where) -> tuple[Operation, ...] | Closed:
        if where is Where.EMBEDDING and not self.weights_only:
            return (Affine(Where.EMBEDDING, self.value),)
        if where is Where.EMBEDDING:
            return Closed(Code.LN102, "the source of the stream cannot be centered in its weights", "set sources=any")
        return Closed(Code.LN104, "so its mean cannot be subtracted in weights")
