"""Find what stands in the way of another placement of a block's norms."""

from __future__ import annotations

from ..errors import Code, Refusal
from ..ir import Block, Edit, Kind, Side, Stream, Where
from .placement import WRITABLE, Conversion, switches
from .stored import STORED

FOLDED = {Kind.L2: "run settle-norms first"} | dict.fromkeys(STORED, "run absorb-scales,fold-batchnorm first")
"""What makes another norm, or none, of those that cannot be moved."""


def converted(conversion: Conversion, moving: list[Block]) -> tuple[list[Edit], list[Refusal]]:
    """Return the edits that can be made, and what keeps others out: where trunk norms move, all move or none."""
    edits, refusals = conversion.edits(), list(conversion.refusals)
    if refusals:
        out = {r.site for r in refusals}
        together = any(Where.POST in switches(b) ^ conversion.wanted[b.name] for b in moving)
        edits = [] if together else [e for e in edits if e.target not in out]
        why, remedy = "another block of its stream cannot be converted", "exclude that block with blocks="
        refusals += [Refusal(Code.LN113, b.name, why, remedy) for b in moving if not edits and b.name not in out]
    return edits, refusals


def obstacle(stream: Stream, block: Block, wanted: set[Where], moving: list[Block]) -> Refusal | None:
    """Return what stands in the way of a block's conversion, if anything."""
    held = switches(block)
    switched = held ^ wanted
    lost = [s for s in block.sites if s.where in held - wanted]
    if not wanted and any(s.where is Where.INNER and s.readers and not s.taps for s in block.sites):
        return Refusal(
            Code.LN110, block.name, "the norm inside its branch would stay", "choose pre, post, peri or output"
        )
    inner = {s.origin[0] for s in block.sites if s.where is Where.INNER and s.origin}
    if any(s.where is Where.IN and s.origin and s.origin[-1] in inner for s in lost):
        why = "a norm inside its branch reads its in norm, and would read the stream"
        return Refusal(Code.LN110, block.name, why, "choose pre or peri, which keep its input norms")
    if any(s.norm.fixed for s in block.sites):
        return Refusal(Code.LN111, block.name, "its norm divides by one number", "run settle-norms first")
    if any(s.norm.kind not in WRITABLE for s in lost):
        kind = next(s.norm.kind for s in lost if s.norm.kind not in WRITABLE)
        remedy = FOLDED.get(kind, "choose a placement that keeps it")
        return Refusal(Code.LN111, block.name, f"a {kind} norm cannot be moved", remedy)
    if Where.IN in switched and (sum(s.where is Where.IN for s in block.sites) > 1 or block.barrier(Side.RAW)):
        return Refusal(
            Code.LN110,
            block.name,
            "its branch reads the stream in several ways",
            "choose pre or peri, which keep its input norms",
        )
    if Where.POST in switched:
        group = [b for b in stream.blocks if b.anchor.total == block.anchor.total]
        if any(b not in moving for b in group):
            return Refusal(
                Code.LN113, block.name, "branches of one sum share one trunk norm", "select all branches of the sum"
            )
        if stream.taps:
            why = f"the trunk is also read by {stream.taps[0]}"
            return Refusal(
                Code.LN110, block.name, why, "choose post" if Where.POST in held else "choose pre, peri, output or none"
            )
        if block.scale == 0 or any(s.vector for b in group for s in b.scaled("skip")):
            why = "its skip is scaled by zero, or by one number per channel"
            return Refusal(Code.LN114, block.name, why, "choose pre, peri or output")
        if added := next((b for b in group if b.barrier(Side.ADDED) or any(w.shared for w in b.added)), None):
            why = f"the sum of {added.name} adds more than branches, which a trunk norm would scale"
            return Refusal(Code.LN114, block.name, why, "choose pre, peri, output or none")
    return None
