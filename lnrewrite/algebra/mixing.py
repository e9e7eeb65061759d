"""Take a stream to a basis that mixes its channels: what reads its norms takes the mixture back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import Code
from ..ir import Block, FoldReader, Kind, Linear, Operation, Side, Site, Value, Where, site_name
from .basis import Basis, Closed

FOLD = "run fold-affine{final=true} first (after untie where the head is tied)"


@dataclass
class Mixing(Basis):
    """Change a stream by an invertible matrix; a subclass says which norms see it as another norm, or not at all."""

    kind: ClassVar[Kind] = Kind.RMS
    """The norms that may read the stream, or write to it."""

    @property
    def inverse(self) -> Value:
        """Return the matrix that takes the change back."""
        raise NotImplementedError

    def renormed(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        """Return what makes a norm of x give, of M x, M times what it gave."""
        return ()

    def back(self, readers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        """Make readers take the change back."""
        if apart := [r.param for r in readers if r.apart]:
            raise Closed(Code.LN103, f"{apart[0]} reads each channel separately (depthwise)")
        return tuple(FoldReader(r, self.inverse) for r in readers)

    def read(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        self.plain(block, site)
        who = site_name(block, site) if block else "the final norm"
        if block and block.barrier(Side.READ) or site.taps or not site.readers:
            said = next(iter(site.taps), "something other than a linear map")
            raise Closed(Code.LN101, f"{who} is read by {said}, which cannot undo the change")
        branches = {r for b in self.stream.blocks if site in b.sites for r in b.readers}
        if block and (others := [r.param for r in site.readers if r not in branches]):
            raise Closed(Code.LN101, f"{who} is also read by {others[0]}, which is not in the branch")
        return (*self.back(block.readers if block else site.readers), *self.renormed(block, site))

    def plain(self, block: Block | None, site: Site) -> None:
        """Raise Closed unless a norm is of the kind, without gain and bias."""
        norm, who = site.norm, site_name(block, site) if block else f"the {site.where} norm"
        if norm.kind is not self.kind:
            remedy = "run layernorm-to-rmsnorm first" if norm.kind is Kind.LAYER and self.kind is Kind.RMS else ""
            raise Closed(Code.LN111, f"{who} is a {norm.kind} norm", remedy)
        if norm.over:
            raise Closed(Code.LN111, f"{who} is a norm of a norm", "run merge-norms first")
        if norm.gamma is not None or norm.beta is not None:
            folds = site.where in (Where.IN, Where.FINAL)
            raise Closed(Code.LN122, f"{who} has a gain or a bias", FOLD if folds else "")

    def bare(self, block: Block | None, readers: tuple[Linear, ...], closed: bool) -> tuple[Operation, ...]:
        if closed or not readers:
            raise Closed(
                Code.LN101, f"{block.name if block else 'the end'} reads the stream without a linear map", FOLD
            )
        return self.back(readers)

    def made(self, block: Block | None, site: Site, writers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        self.plain(block, site)
        if not writers:
            raise Closed(Code.LN104, f"the input of the {site.where} norm is not computed by linear maps alone")
        return (*self.multiplied(writers), *self.renormed(block, site))

    def through(self, block: Block, site: Site, last: bool) -> tuple[Operation, ...]:
        self.plain(block, site)
        if last and site.taps:
            raise Closed(Code.LN101, f"the last trunk norm is also read by {site.taps[0]}")
        return (*(self.back(site.readers) if last else ()), *self.renormed(block, site))

    def explicit(self, where: Where) -> tuple[Operation, ...] | Closed:
        if where is Where.EMBEDDING:
            return Closed(Code.LN102, "the source of the stream cannot be changed in its weights", "run untie first")
        return Closed(Code.LN104, "so it cannot be changed in weights")
