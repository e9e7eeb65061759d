"""Move norms: convert every block of a stream to one placement, with gains fitted on data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lnrewrite.algebra.obstacles import converted, obstacle
from lnrewrite.algebra.placement import Conversion, usual_norm
from lnrewrite.algebra.sizes import keep_sizes
from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import Edit, Exactness, Placement, Proposal, Stream, Vectors, Where, sums
from lnrewrite.pipeline import Context, Pass

WANTED = {
    Placement.PRE: {Where.IN},
    Placement.POST: {Where.POST},
    Placement.PERI: {Where.IN, Where.OUT},
    Placement.OUTPUT: {Where.OUT},
    Placement.NONE: set[Where](),
}

FIRST = "first:25%"
"""Which blocks of Mix-LN are post."""

OFFSET = 8.0
"""How large a constant goes before a norm at the end of a branch, in sizes of the branch."""


@dataclass(frozen=True)
class Place(Pass):
    """Convert blocks to one placement: insert, remove and move norms, and fit what compensates them on data.

    A placement is three switches per block: is there a norm where the branch reads (in), where it ends (out), on the
    trunk after the sum (post)? With N(x) = x / s(x), s the RMS (layer norms: the standard deviation)::

        pre     x' = x + F(N x)              peri    x' = x + N F(N x)          none  x' = x + F(x)
        post    x' = N(x + F(x))             output  x' = x + N F(x)          mix   post, then pre (Mix-LN)

    Switching one is exact but for one scalar per token, which a constant (or a gain) replaces::

        out on       f ~ g N(a f)            g = E[w f u] / E[w u^2], u = N(a f), w = 1 / s(x')^2: readers divide by s;
                     a > 0, per channel, goes into the writers and makes the size of a f vary least over tokens
        in, out off  N(f) ~ c f              c = E[s] / E[s^2] per channel, folded into the readers or the writers
        post on      x' = x + F(N x)  is  p' = N(p + F(p) / s(x)): the trunk norms take over from the in norms, whose
                     gain stays with the readers; the writers are divided by a constant for s(x)
        post off     p' = g N(p + F(p)) + b  is  y' = g y + s(y) (b + F(g N y + b)): the trunk norm becomes the next
                     block's in norm, its gain acts on the skip too, a constant for s(y) scales bias and branch

    The trunk is simulated token by token through the converted model, so that every fit sees what the blocks before it
    really hand on. Embedding norm and final norm stay; post adds an embedding norm where there is none, and the final
    norm is the last block's post norm. Tokens of outlying size (attention sinks) take no part in the fits.

    `mix` is post in the blocks that `post` selects, by default the first quarter, and pre in the rest.

    With `plain-skips`, post to pre leaves the skips alone, as stock architectures have them: y = g z with a g of each
    block's own, what the branches write is divided by it, and the norms read z, with gains fitted anew::

        z' = z + (s(y) F(N z) + b) / g

    With `keep-sizes`, post to pre is exact and needs no data: the scalar stays in the graph. S is the product of all s
    up to a sum, one number per token, and y = S (p + F(p)) is the trunk, which is in no norm's way any more::

        p = g N(y / S) + b        y' = g / c (y - mean y) + S' (b + F(p))        S' = S s(y / S) / c

    eps is exact, as N reads what it read; rms norms leave the mean. It takes all blocks of a stream. The embedding norm
    becomes the first block's in norm; where there is none, that block stays without. y has the size of S; powers of two
    c, near what the gains let expect of s, keep it from growing with the depth. A token that goes on growing can still
    leave the range of float16 (65504): run the result in bfloat16 or float32 then.

    Before (place{to=peri})::

        stream net width=4
          block 0 mlp pre
            in     rms(eps=1e-05 gamma=@g) -> @a:1
            writes @b:0

    After::

        stream net width=4
          block 0 mlp peri
            in     rms(eps=1e-05 gamma=@g) -> @a:1
            out    rms(eps=1e-05 gamma=@0.norm_out.weight) -> taps add
            writes @b:0

    Refuses: LN110 (no place for the norm), LN111 (kind of norm), LN112 (dead branch), LN113 (parallel branches apart),
    LN114 (scaled trunk). Source: Kim et al. 2502.02732, Xiong et al. 2002.04745, Li et al. 2412.13795 (Mix-LN),
    and the identities above.
    """

    name: ClassVar[str] = "place"
    needs_blocks: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    to: Literal["pre", "post", "peri", "output", "none", "mix"]
    norm: Literal["auto", "layer", "rms"] = "auto"
    blocks: str | None = None
    fit: Literal["auto", "reconstruct", "constants"] = "auto"
    keep_sizes: bool = False
    plain_skips: bool = False
    post: str = FIRST

    def __post_init__(self) -> None:
        if self.post != FIRST and self.to != "mix":
            raise ValueError("post is for to=mix alone; blocks= selects what is converted")
        if self.keep_sizes and (self.to, self.norm, self.fit) != ("pre", "auto", "auto"):
            raise ValueError("keep-sizes is for to=pre alone; it puts in the norms that there are, and fits nothing")
        if self.plain_skips and (self.keep_sizes or self.to != "pre"):
            raise ValueError("plain-skips is for to=pre alone, and without keep-sizes")

    @property
    def exactness(self) -> Exactness:
        """Return algebraic where sizes are kept, else calibrated."""
        return Exactness.ALGEBRAIC if self.keep_sizes else Exactness.CALIBRATED

    @property
    def needs_data(self) -> bool:
        """Return whether constants are fitted."""
        return not self.keep_sizes

    @property
    def plainer(self) -> Pass | None:
        """Return the conversion with constants alone, where this one has the branches' weights fitted."""
        return replace(self, fit="constants") if self.fit != "constants" and not self.keep_sizes else None

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Return the edits that take the selected blocks of a stream to `to`."""
        selected = context.selected(self.blocks)
        if self.keep_sizes:
            return keep_sizes(stream, context, selected)
        targets = self.targets(stream, context)
        moving = [b for b in stream.blocks if b.name in selected and b.placement is not targets[b.name]]
        wanted = {b.name: WANTED[targets[b.name]] for b in moving}
        refusals = [r for b in moving if (r := obstacle(stream, b, wanted[b.name], moving))]
        free = [b for b in moving if b.name not in {r.site for r in refusals}]
        edits, vectors = list[Edit](), Vectors()
        if free:
            conversion = self.conversion(stream, context, {b.name: wanted[b.name] for b in free})
            edits, refused = converted(conversion, free)
            refusals, vectors = refusals + refused, conversion.vectors
        edited = {e.target for e in edits} | {r.site for r in refusals}
        skipped = [
            (b.name, f"it is {targets[b.name]} already" if b.name in selected else "not selected")
            for b in stream.blocks
            if b not in moving
        ]
        ends = [w for w, s in (("embedding", stream.embedding), ("final", stream.final)) if s]
        skipped += [(f"{stream.name}.{w}", "embedding and final norms belong to no block") for w in ends]
        skipped = [row for row in skipped if row[0] not in edited]  # it goes along with the trunk's size
        done = {b.anchor.total for b in free if b.name in edited}
        for block in (b for b in free if b.name not in edited):
            if block.at(Where.POST) and block.anchor.total not in done:
                why = "the norm after it is the last of its stream, which stays"
                refusals.append(Refusal(Code.LN110, block.name, why, "choose post"))
            else:
                why = "its norm is the final one, or shared with a branch of the same sum and edited there"
                skipped.append((block.name, why))
        return Proposal(tuple(edits), tuple(refusals), tuple(skipped), vectors)

    def conversion(self, stream: Stream, context: Context, wanted: dict[str, set[Where]]) -> Conversion:
        """Return the conversion of some blocks, each to have norms where `wanted` says."""
        norms = (site.norm for _, site in stream.sites() if site.where is not Where.INNER)
        offset = OFFSET if self.fit != "constants" and context.fits else 0.0
        found = Conversion(stream, context, wanted, *usual_norm(norms, self.norm), offset)
        found.plain = self.plain_skips
        return found

    def targets(self, stream: Stream, context: Context) -> dict[str, Placement]:
        """Return the placement that each block is to have: one, or with `mix` one for the blocks of each sum."""
        if self.to != "mix":
            return {b.name: Placement(self.to) for b in stream.blocks}
        post = context.selected(self.post)
        found = ((group, any(b.name in post for b in group)) for group in sums(stream))
        return {b.name: Placement.POST if early else Placement.PRE for group, early in found for b in group}
