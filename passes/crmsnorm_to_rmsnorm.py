"""Turn compressed RMSNorms into RMSNorms by a change of basis, or back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np

from lnrewrite.algebra.basis import Closed
from lnrewrite.algebra.mixing import Mixing
from lnrewrite.ir import (
    Block,
    Center,
    Exactness,
    Kind,
    Operation,
    Proposal,
    SetNorm,
    Site,
    Stream,
    Value,
    Vectors,
)
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class CrmsnormToRmsnorm(Pass):
    """Turn every CRMSNorm on a stream into an RMSNorm of the same width: what is learned for one serves the other.

    A CRMSNorm reads n numbers of n + 1 whose mean is zero, the last one left out: its size counts their sum, squared,
    once more. That is the length of A x, with A = I + (sqrt(n + 1) - 1) 11^T/n, and the stream can be carried as A x:

        CRMS_e(x)  =  sqrt((n + 1) / n)  A^-1  RMS_e'(A x),    e' = e (n + 1) / n

    A goes into what starts the stream and into every writer, A^-1 into the linears behind the norms, the number into
    the norms' gains. `back` goes from RMSNorms to CRMSNorms: A^-1 and A change places, and so do n and n + 1. After
    layernorm-to-rmsnorm, a Pre-LN network becomes a Pre-CRMSNorm one; its width stays.

    Before (crmsnorm-to-rmsnorm)::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     crms(eps=1e-05) -> @q:1
            writes @o:0+@c
          final  crms(eps=1e-05) -> @head:1

    After::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     rms(eps=1.125e-05 gamma=@h.0.in.gamma) -> @q:1
            writes @o:0+@c
          final  rms(eps=1.125e-05 gamma=@toy.final.final.gamma) -> @head:1

    Refuses a stream with norms of other kinds on it (LN111), gains and biases that are not folded (LN122), readers or
    writers out of sight (LN101, LN104), other readers of its states (LN120), factors per channel (LN123), and tables
    tied to the head, which would need A and its inverse (LN102).

    Source: Jiang et al., Pre-RMSNorm and Pre-CRMSNorm Transformers (arXiv 2305.14858); at one width it is derived.
    """

    name: ClassVar[str] = "crmsnorm-to-rmsnorm"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC

    back: bool = False

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one change of the whole stream, where it has such a norm."""
        kind, n = Kind.RMS if self.back else Kind.CRMS, stream.width
        if not n or not any(site.norm.kind is kind for _, site in stream.sites()):
            return Proposal(otherwise=f"no {kind} norm reads the stream")
        left = sqrt(n + 1) if kind is Kind.CRMS else 1 / sqrt(n + 1)
        changed = (_Compressed if self.back else _Widened)(stream, Center(n, left))
        try:
            edits = changed.edits()
        except Closed as closed:
            return Proposal(refusals=(closed.refusal(stream.name),))
        return Proposal(edits, vectors=changed.vectors, otherwise=f"not a {kind} norm on the stream")


@dataclass
class _Widened(Mixing):
    """Carry a stream as A x."""

    kind: ClassVar[Kind] = Kind.CRMS
    becomes: ClassVar[Kind] = Kind.RMS

    def __post_init__(self) -> None:
        self.vectors = Vectors()

    @property
    def inverse(self) -> Value:
        assert isinstance(self.value, Center)
        return replace(self.value, left=1 / self.value.left)

    def renormed(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        n = self.stream.width
        ratio = (n + 1) / n if self.becomes is Kind.RMS else n / (n + 1)
        norm = replace(site.norm, kind=self.becomes, eps=site.norm.eps * ratio)
        gain = self.vectors.add(np.full(n, sqrt(ratio)))
        return (SetNorm(site.where, norm, gain, index=block.index(site) if block else 0),)


class _Compressed(_Widened):
    """Carry a stream as A^-1 x."""

    kind = Kind.RMS
    becomes = Kind.CRMS
