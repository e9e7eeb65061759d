"""Choose factors, powers of two, that bring what a network holds on data into the range of a format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, log2

from ..errors import Code, Refusal
from ..ir import Block, Edit, FoldReader, Number, Operation, ScalePair, ScaleWriter, Stream, Where

MASK = 1e30


@dataclass
class Headroom:
    """Choose powers of two that bring the largest numbers, `peaks` by node, below `limit`."""

    stream_: Stream
    peaks: Mapping[str, float]
    limit: float

    def down(self, nodes: Iterable[str]) -> float:
        """Return the largest power of two, 1 at most, that brings these values below the limit."""
        largest = max((self.peaks.get(n, 0.0) for n in nodes), default=0.0)
        return 1.0 if largest <= self.limit else 2.0 ** floor(log2(self.limit / largest))

    def stream(self) -> float:
        """Return the factor of the stream."""
        anchors = [b.anchor for b in self.stream_.blocks]
        return self.down(n for a in anchors for n in (a.state, a.skip, a.branch, a.total))

    def inner(self) -> dict[str, float]:
        """Return, by block, the factor of what its out norm reads."""
        found = {b.name: self.down(s.origin[:1]) for b in self.stream_.blocks if (s := b.at(Where.OUT)) and s.origin}
        return {name: by for name, by in found.items() if by != 1}

    def inside(self) -> Iterator[Edit]:
        """Yield the edits that move a factor from one linear of a branch to the next: W2 f(W1 x) = k W2 f(W1 x / k)."""
        for block in self.stream_.blocks:
            operations: list[Operation] = []
            for pair in self.movable(block):
                if (by := self.down(pair.values)) != 1:
                    operations += [ScaleWriter(m, Number(by)) for m in pair.producers]
                    operations += [FoldReader(t, Number(1 / by)) for t in pair.consumers]
            if operations:
                yield Edit(block.name, tuple(operations))

    def movable(self, block: Block) -> list[ScalePair]:
        return [p for p in block.scale_pairs if not any(w.shared for w in (*p.producers, *p.consumers))]

    def left(self) -> Iterator[Refusal]:
        """Yield the values that stay beyond the limit. Masks are told by their size, near the end of float32."""
        for block in self.stream_.blocks:
            free = {v for pair in self.movable(block) for v in pair.values}
            for node in block.anchor.inside:
                if node not in free and self.limit < self.peaks.get(node, 0.0) < MASK:
                    why = f"it reaches {self.peaks[node]:.2g} inside {block.name}, where no factor can be moved"
                    yield Refusal(Code.LN130, node, why, "keep this branch in float32 or bfloat16")
