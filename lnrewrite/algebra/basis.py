"""Change the basis of a residual stream: every state x becomes M x, and what leaves the stream stays as it is.

Three passes are this one idea, each with its own M and its own rule for the norms that read the stream:

    rescale   M = c            N_eps(x)      =  N_{c^2 eps}(c x)
    rotate    M = Q            RMS(x)        =  Q^T RMS(Q x), and the readers take Q^T over
    centre    M = I - 11^T/n   LayerNorm(x)  =  RMSNorm(M x)

What starts the stream and what is added to it gets M in its weights. It is one edit of the whole stream: one thing in
the way closes all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..errors import Code, Refusal
from ..ir import (
    RECALL,
    Affine,
    Block,
    Edit,
    FoldReader,
    Linear,
    Operation,
    Rotation,
    ScaleWriter,
    Side,
    Site,
    Stream,
    Value,
    Where,
)

Weights = FoldReader | ScaleWriter


class Closed(Exception):
    """Signal that a stream cannot be taken to another basis: what is in the way, and what to do."""

    def __init__(self, code: Code, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.found = Refusal(code, "", why, remedy)

    def refusal(self, site: str) -> Refusal:
        """Return it as a refusal of a site."""
        return self.found.at(site)


@dataclass
class Choice:
    """Hold operations on a target's weights, and what to do instead where those weights have other uses too."""

    target: str
    operations: tuple[Operation, ...]
    instead: tuple[Operation, ...] | Closed
    taken: bool = True

    @property
    def weights(self) -> list[Weights]:
        """Return the changes of weights, if they are made."""
        return [o for o in self.operations if isinstance(o, Weights)] if self.taken else []

    def decline(self) -> None:
        """Do the other thing; raise Closed where there is none."""
        if isinstance(self.instead, Closed):
            raise self.instead
        self.taken = False


@dataclass
class Basis:
    """Walk a stream and collect what a change of basis does to it; a subclass gives the rules.

    `value` is M. The rules return operations, or raise Closed.
    """

    stream: Stream
    value: Value
    choices: list[Choice] = field(default_factory=list)

    mixes = True
    """Whether M mixes channels, so that one factor per channel does not pass it."""

    # ---- rules; `block` is None at the ends of the stream ----

    def read(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        """Make a norm that reads the stream give what it gave: an in norm or the final norm."""
        raise NotImplementedError

    def bare(self, block: Block | None, readers: tuple[Linear, ...], closed: bool) -> tuple[Operation, ...]:
        """Make linears that read the stream without a norm give what they gave; `closed`: others read it too."""
        raise NotImplementedError

    def made(self, block: Block | None, site: Site, writers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        """Make a norm whose output enters the stream give M times that: an out norm or the embedding norm."""
        raise NotImplementedError

    def through(self, block: Block, site: Site, last: bool) -> tuple[Operation, ...]:
        """Make a trunk norm take the stream on; the `last` one gives what it gave."""
        raise NotImplementedError

    def explicit(self, where: Where) -> tuple[Operation, ...] | Closed:
        """Return how M is applied where no weights can take it: where the stream starts, or at a branch's end."""
        raise NotImplementedError

    # ---- the walk ----

    def edits(self) -> tuple[Edit, ...]:
        """Return the edits of the whole change. Raises Closed with the block that is in the way."""
        self.open_ended()
        self.start()
        for block in self.stream.blocks:
            self.passable(block)
            self.enter(block)
            self.leave(block)
            for site in block.sites:
                if site.where is Where.POST:
                    last = self.ends(block) and not (self.stream.final or self.stream.readers)
                    self.always(block.name, self.through(block, site, last))
        self.finish()
        return self.settled()

    def always(self, target: str, operations: tuple[Operation, ...]) -> None:
        """Make a target have these operations; weights with other uses close the stream."""
        shared = Closed(
            Code.LN102, f"a weight of {target} is used elsewhere, where it would need another change", "run untie first"
        )
        if operations:
            self.choices.append(Choice(target, operations, shared))

    def ends(self, block: Block) -> bool:
        """Return whether a block is of the last sum."""
        last = self.stream.blocks[-1]
        return block is last or (block.parallel_group is not None and block.parallel_group == last.parallel_group)

    def open_ended(self) -> None:
        """Raise Closed where the stream's states are seen by what is no block of it."""
        if self.stream.taps:
            raise Closed(Code.LN120, f"a state of the stream is also read by {self.stream.taps[0]}")
        if self.stream.exits:
            raise Closed(Code.LN120, f"the last state is read without a norm by {self.stream.exits[0]}")

    def start(self) -> None:
        """Apply M where the stream starts."""
        stream, target = self.stream, f"{self.stream.name}.embedding"
        if stream.embedding:
            self.always(target, self.made(None, stream.embedding, stream.producers(None, stream.embedding)))
            return
        instead = self.explicit(Where.EMBEDDING)
        if stream.opaque or not stream.sources:
            self.choices.append(Choice(target, (), instead))
            self.choices[-1].decline()
            return
        self.choices.append(Choice(target, self.multiplied(stream.sources), instead))

    def multiplied(self, writers: Iterable[Linear]) -> tuple[Operation, ...]:
        """Return the edits that put M into the weights of writers."""
        return tuple(ScaleWriter(w, self.value) for w in writers)

    def passable(self, block: Block) -> None:
        """Raise Closed where something stands between blocks, or in a branch, that M does not pass."""
        carried = block.barrier(Side.CARRIED)
        if carried and carried.op != RECALL:
            raise Closed(Code.LN114, f"after {block.name} the stream is {carried}")
        if added := block.barrier(Side.ADDED):
            why = f"the sum of {block.name} {added}, which no linear map writes"
            raise Closed(Code.LN120, why)
        if block.barrier(Side.RAW):
            raise Closed(Code.LN120, f"{block.name} reads the stream with and without its norm")
        if ends := block.barrier(Side.ENDS):
            why = f"the output norm of {block.name} does not write the stream directly: it {ends}"
            raise Closed(Code.LN120, why)
        if self.mixes and any(s.vector for s in block.scaled("written", "branch", "skip", "trunk")):
            why = f"{block.name} has one factor per channel beside the stream"
            raise Closed(Code.LN123, why, "run absorb-scales first")

    def enter(self, block: Block) -> None:
        """Keep what a branch reads as it was."""
        norms = [s for s in block.sites if s.where is Where.IN]
        for site in norms:
            self.always(block.name, self.read(block, site))
        if not norms:
            self.always(block.name, self.bare(block, block.readers, block.barrier(Side.READ) is not None))

    def leave(self, block: Block) -> None:
        """Make a branch, and what else its sum adds, write M times what it wrote."""
        self.always(block.name, self.multiplied(block.added))
        if site := block.at(Where.OUT):
            self.always(block.name, self.made(block, site, self.stream.producers(block, site)))
            return
        behind = block.barrier(Side.WRITTEN)
        writers = () if behind else block.writers
        instead = self.explicit(Where.OUT)
        if isinstance(instead, Closed):
            said = f"{block.name} is {behind or 'written by something unknown'}"
            said = f"a writer of {block.name} is shared" if writers else said
            remedy = "run untie first" if writers else instead.found.remedy
            instead = Closed(instead.found.code, f"{said}, {instead.found.why}", remedy)
        self.choices.append(Choice(block.name, self.multiplied(writers), instead))
        if not writers:
            self.choices[-1].decline()

    def finish(self) -> None:
        """Keep what the readers of the last state give as it was."""
        if final := self.stream.final:
            self.always(f"{self.stream.name}.final", self.read(None, final))
        if self.stream.readers:
            self.always(f"{self.stream.name}.final", self.bare(None, self.stream.readers, False))

    def settled(self) -> tuple[Edit, ...]:
        """Return the edits, a shared parameter changed once: that is right where all of its uses want the same."""
        while blocked := list(self.blocked()):
            for choice in blocked:
                choice.decline()
        done: set[Hashable] = set()
        found: dict[str, list[Operation]] = {}
        recalled = any(b.op == RECALL for block in self.stream.blocks for b in block.barriers)
        for choice in self.choices:
            operations = choice.operations if choice.taken else choice.instead
            assert not isinstance(operations, Closed)
            for operation in operations:
                if recalled and isinstance(operation, Affine) and operation.where is Where.EMBEDDING:
                    why = "the first state, which is added again later, cannot be changed in what writes it"
                    raise Closed(Code.LN114, why)
                key = (linear_of(operation).param, effect(operation)) if isinstance(operation, Weights) else None
                bias = operation.writer.bias if isinstance(operation, ScaleWriter) else None
                own = bias, effect(operation) if isinstance(operation, Weights) else None
                if key is None or key not in done:
                    found.setdefault(choice.target, []).append(operation)
                elif isinstance(operation, ScaleWriter) and bias and own not in done:  # one weight, several biases
                    alone = replace(operation, writer=Linear(bias, -1, table=True))
                    found.setdefault(choice.target, []).append(alone)
                done |= {key, own}
        return tuple(Edit(target, tuple(operations)) for target, operations in found.items())

    def blocked(self) -> Iterator[Choice]:
        """Yield the choices that change a parameter with uses that this change does not reach, or changes otherwise."""
        wanted = Counter((linear_of(w).param, effect(w)) for c in self.choices for w in c.weights)
        for choice in self.choices:
            if any(wanted[linear_of(w).param, effect(w)] != linear_of(w).uses for w in choice.weights):
                yield choice


def linear_of(change: Weights) -> Linear:
    """Return the linear map that a change edits."""
    return change.reader if isinstance(change, FoldReader) else change.writer


def effect(change: Weights) -> Hashable:
    """Return what a change does to its parameter: a reader's matrix stands on the other side of a writer's."""
    scale = change.scale
    if isinstance(change, FoldReader) and isinstance(scale, Rotation):
        scale = scale.transposed
    return linear_of(change).axis, scale, change.shift
