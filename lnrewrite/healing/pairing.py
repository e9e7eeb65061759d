"""Teacher and student: that they belong together, what they hold alike, and what of a student is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..backends.torch.module import stored
from ..errors import Code, LnrewriteError
from ..models.program import Program


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

    def trained(self, program: Program, train: str) -> frozenset[str]:
        """Return the names of a program's parameters that are trained: all, norms, or what the conversion touched."""
        every = {n: p for n, p in program.module().named_parameters() if p.is_floating_point()}
        if train == "all":
            return frozenset(every)
        sites = [site.norm for s in program.network.streams for _, site in s.sites()]
        sites += [site.norm for site in program.network.elsewhere]
        norms = {n for norm in sites for n in (norm.gamma, norm.beta) if n in every}
        if train == "touched":
            norms |= {n for n, p in every.items() if not _equal(p, self.teachers(n))}
        return frozenset(norms)

    def grown(self, program: Program) -> dict[str, float]:
        """Return how many times larger than the teacher's each matrix of a program is that a conversion scaled."""
        sizes = {}
        for name, parameter in program.module().named_parameters():
            theirs = self.teachers(name)
            if parameter.dim() >= 2 and theirs is not None and theirs.shape == parameter.shape:
                own, other = (float(p.detach().float().norm()) for p in (parameter, theirs))
                if own and other and own != other:
                    sizes[name] = own / other
        return sizes

    def share_untrained(self, program: Program, trained: frozenset[str]) -> list[nn.Parameter]:
        """Make a program use the teacher's tensors, while it trains, where both are equal; return those parameters."""
        shared = []
        for name, parameter in program.module().named_parameters():
            theirs = self.teachers(name)
            if name not in trained and theirs is not None and _equal(parameter, theirs):
                parameter.data = theirs.data
                shared.append(parameter)
        return shared

    def teachers(self, name: str) -> torch.Tensor | None:
        """Return the teacher's tensor of that name, or None."""
        return stored(self.teacher.module(), name)


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.detach(), other.detach())


def unlike(why: str) -> LnrewriteError:
    """Return the error for two models that are no pair."""
    remedy = "give a model and what `lnrewrite convert` made of it"
    return LnrewriteError(Code.LN601, "the student is not a conversion of the teacher", why, remedy)
