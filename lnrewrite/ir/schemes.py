"""Name the published placements whose whole pattern a stream shows; a name is given only where every block fits."""

from __future__ import annotations

import math
from collections.abc import Callable

from .network import Block, Stream, layers
from .parts import Kind, Placement, Where

PRE, POST, PERI, OUTPUT = Placement.PRE, Placement.POST, Placement.PERI, Placement.OUTPUT


def scheme(stream: Stream) -> str | None:
    """Return the most special name that fits all blocks of a stream, or None."""
    return next((name for name, fits in SCHEMES.items() if stream.blocks and fits(stream)), None)


def _all(stream: Stream, placement: Placement) -> bool:
    return all(block.placement is placement for block in stream.blocks)


def _ends_in_norm(block: Block) -> bool:
    """Return whether a norm inside the branch is all that its writers read."""
    writers = {w.param for w in block.writers}
    inner = (s for s in block.sites if s.where is Where.INNER and not s.taps)
    return bool(writers) and any({r.param for r in s.readers} == writers for s in inner)


def _sub_ln(stream: Stream) -> bool:
    """x + W LN(f(LN(x))) in every block (Magneto, arXiv 2210.06423)."""
    return _all(stream, PRE) and all(map(_ends_in_norm, stream.blocks))


def _normformer(stream: Stream) -> bool:
    """A norm on what attention writes, and one before the MLP's last map (arXiv 2110.09456)."""
    attention = [b for b in stream.blocks if b.kind == "attention"]
    rest = [b for b in stream.blocks if b.kind != "attention"]
    peri = all(b.placement is PERI for b in attention)
    return bool(attention and rest) and peri and all(b.placement is PRE and _ends_in_norm(b) for b in rest)


def _deepnorm(stream: Stream) -> bool:
    """LN(a x + f(x)) with one a in every block (arXiv 2203.00555)."""
    plain = not any(s.where is Where.IN for b in stream.blocks for s in b.sites)
    return _all(stream, POST) and plain and len({b.scale for b in stream.blocks}) == 1 and _scaled(stream.blocks[0])


def _keel(stream: Stream) -> bool:
    """LN(a x + f(LN(x))), behind a first layer of plain pre blocks (arXiv 2601.19895); a may have been absorbed."""
    plain = next((i for i, b in enumerate(stream.blocks) if b.placement is not PRE or _scaled(b)), len(stream.blocks))
    rest = stream.blocks[plain:]
    both = all(b.at(Where.IN) and b.at(Where.POST) and not b.at(Where.OUT) for b in rest)
    both = both and not any(b.scaled("skip") for b in rest)
    return plain <= 2 and bool(rest) and both and len({b.scale for b in rest}) == 1


def _scaled(block: Block) -> bool:
    return block.scale != 1 and not block.scaled("skip")


def _hybrid(stream: Stream) -> bool:
    """Attention norms q, k and v instead of its input, the MLP's skip starts at its norm (arXiv 2503.04598)."""
    pairs = list(zip(stream.blocks[::2], stream.blocks[1::2], strict=False))
    first = bool(pairs) and all(b.placement is PRE for b in pairs[0])  # HybridNorm*: the first layer is plain
    rest = pairs[first:]
    return (
        len(stream.blocks) == 2 * len(pairs)
        and bool(rest)
        and all(a.kind == "attention" and a.placement is POST and m.placement is Placement.NONE for a, m in rest)
        and all(not a.at(Where.IN) and sum(s.where is Where.INNER for s in a.sites) >= 3 for a, _ in rest)
    )


def _mix_ln(stream: Stream) -> bool:
    """The first blocks post, the rest pre (arXiv 2412.13795)."""
    found = [b.placement for b in stream.blocks]
    posts = found.count(POST)
    return 0 < posts < len(found) and found == [POST] * posts + [PRE] * (len(found) - posts)


def _layernorm_scaling(stream: Stream) -> bool:
    """Pre, what layer l reads divided by sqrt(l) (arXiv 2502.05795)."""
    count = range(len(stream.blocks))
    found = [math.prod(_number(s.by, s.inverse) for s in b.scaled("read")) for b in stream.blocks]
    for numbers in (layers(stream), [i + 1 for i in count], [i // 2 + 1 for i in count]):
        wanted = [1 / math.sqrt(n) for n in numbers]
        if numbers[-1] > 1 and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
            return _all(stream, PRE)
    return False


def _number(by: float | str, inverse: bool) -> float:
    value = by if isinstance(by, float) else math.nan
    return 1 / value if inverse and value else value


def _sandwich(stream: Stream) -> bool:
    """Norms on both sides of every branch, none on the embedding (CogView, arXiv 2105.13290)."""
    return _all(stream, PERI) and stream.embedding is None


def _res_post_norm(stream: Stream) -> bool:
    """A norm on what every branch writes, none on what it reads (Swin V2, arXiv 2111.09883)."""
    kinds = {s.norm.kind for b in stream.blocks for s in b.sites if s.where is Where.OUT}
    return _all(stream, OUTPUT) and kinds <= {Kind.LAYER, Kind.RMS}


SCHEMES: dict[str, Callable[[Stream], bool]] = {
    "Sub-LN": _sub_ln,
    "NormFormer": _normformer,
    "DeepNorm": _deepnorm,
    "KEEL": _keel,
    "HybridNorm": _hybrid,
    "Mix-LN": _mix_ln,
    "LayerNorm Scaling": _layernorm_scaling,
    "sandwich": _sandwich,
    "Peri-LN": lambda stream: _all(stream, PERI),
    "res-post-norm": _res_post_norm,
}
