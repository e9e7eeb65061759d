"""Teacher and student: that they belong together, what they hold alike, and what of a student is trained."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Code, LnrewriteError
from ..models.program import Program
from .participant import Participant, alike, sizes_of


@dataclass(frozen=True)
class Pair:
    """Hold a teacher and the student that a conversion made of it."""

    teacher: Program
    student: Program

    def check(self) -> None:
        """Raise LnrewriteError LN601 where the student cannot be a conversion of the teacher."""
        both = (self.teacher, self.student)
        inputs, tables = [sorted(p.example_inputs()) for p in both], [p.id_limits() for p in both]
        blocks = [{b.name for b in p.network.blocks} for p in both]
        if inputs[0] != inputs[1]:
            raise unlike(f"it takes {', '.join(inputs[1])} and the teacher {', '.join(inputs[0])}")
        if tables[0] != tables[1]:
            raise unlike(f"its vocabulary is {tables[1]} and the teacher's {tables[0]}")
        if not blocks[0]:
            raise unlike("no residual block was found in the teacher")
        if other := sorted(blocks[0] ^ blocks[1]):
            raise unlike(f"the blocks differ: {', '.join(other[:3])}")

    @property
    def notes(self) -> list[str]:
        """Return what a user should know about how the two were opened and captured."""
        return list(dict.fromkeys((*self.teacher.notes, *self.student.notes)))


def trained(one: Participant, teacher: Participant, train: str) -> frozenset[str]:
    """Return the names of a network's parameters that are trained: all, norms, or what the conversion touched."""
    every = {n: p for n, p in one.named.items() if p.is_floating_point()}
    if train == "all":
        return frozenset(every)
    network = one.program.network
    sites = [site.norm for s in network.streams for _, site in s.sites()]
    sites += [site.norm for site in network.elsewhere]
    names = {one.view.first(n) for norm in sites for n in (norm.gamma, norm.beta) if n} & every.keys()
    if train == "touched":
        theirs = {n: found for n in every if (found := teacher.find(n)) is not None}
        same = dict(zip(theirs, alike([(every[n], p) for n, p in theirs.items()], one.world), strict=True))
        names |= {n for n in every if not same.get(n)}
    return frozenset(filter(None, names))


def grown(one: Participant, teacher: Participant) -> dict[str, float]:
    """Return how many times larger than the teacher's each matrix of a network is that a conversion scaled."""
    both = {n: (p, found) for n, p in one.named.items() if p.dim() >= 2 and (found := teacher.find(n)) is not None}
    both = {n: (p, found) for n, (p, found) in both.items() if p.shape == found.shape}
    mine, its = (sizes_of({n: pair[i] for n, pair in both.items()}, one.world) for i in (0, 1))
    return {n: mine[n] / its[n] for n in both if mine[n] and its[n] and mine[n] != its[n]}


def unlike(why: str) -> LnrewriteError:
    """Return the error for two models that are no pair."""
    remedy = "give a model and what `lnrewrite convert` made of it"
    return LnrewriteError(Code.LN601, "the student is not a conversion of the teacher", why, remedy)
