"""Give a shared parameter its own copy where it is read a second time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from lnrewrite import ir
from lnrewrite.ir import Edit, Exactness, Linear, Proposal, Stream
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class Untie(Pass):
    """Make every use of a shared parameter but the first read a copy, so that other passes can change one alone.

        y = W x,  z = W[i]     becomes     y = W' x,  z = W[i],     W' = W

    what=head (the default) gives a head that is tied to an embedding table its own copy, what=all every second use in
    a stream. It costs the size of the parameter, which the report states, and ends weight sharing in training.

    Before::

        stream toy width=8
          source @wte:1(uses=2,table)
          block h.0 attention pre
            in     rms(eps=1e-05) -> @q:1
            writes @o:0
          final  rms(eps=1e-05 gamma=@g) -> @wte:1(uses=2)

    After::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     rms(eps=1e-05) -> @q:1
            writes @o:0
          final  rms(eps=1e-05 gamma=@g) -> @wte_untied:1

    Refuses nothing. Source: `untie_word_embeddings` of SpinQuant (arXiv 2405.16406).
    """

    name: ClassVar[str] = "untie"
    exactness: ClassVar[Exactness] = Exactness.STRUCTURAL

    what: Literal["head", "all"] = "head"

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose a copy for each use that is not the first."""
        tables = {s.param for other in context.network.streams for s in other.sources if s.table}
        seen: set[str] = set()
        edits = []
        for target, linear in _uses(stream):
            second = linear.param in seen or (target.endswith(".final") and linear.param in tables)
            seen.add(linear.param)
            if linear.shared and second and (self.what == "all" or linear.param in tables):
                shape = "x".join(map(str, context.shape(linear.param)))
                note = f"a copy of {linear.param}: {shape} numbers more"
                edits.append(Edit(target, (ir.Untie(linear),), note=note))
        return Proposal(tuple(edits), otherwise="it shares no parameter that is to be copied")


def _uses(stream: Stream) -> Iterator[tuple[str, Linear]]:
    """Yield (edit target, linear) for every use of a parameter by the stream, in dataflow order, each node once."""
    found = [(f"{stream.name}.embedding", s) for s in stream.sources]
    for block in stream.blocks:
        found += [(block.name, linear) for linear in (*block.readers, *block.writers)]
    ends = (*(stream.final.readers if stream.final else ()), *stream.readers)
    found += [(f"{stream.name}.final", linear) for linear in ends]
    once = {linear.node or (index, linear): (target, linear) for index, (target, linear) in enumerate(found)}
    yield from once.values()
