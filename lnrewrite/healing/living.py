"""Make a module in Python compute what was trained in its graph; whether it can is tried before the training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn

from ..backends.inputs import Tensors
from ..backends.outputs import apart
from ..backends.running import as_runnable
from ..backends.torch.capture import capture_module
from ..backends.torch.contexts import evaluating
from ..backends.torch.module import CapturedModule, signature_of, stored
from ..compat.torch import pytree, slots
from ..errors import Code, LnrewriteError
from ..live.ports import children
from ..live.rewriting import EXACT, ROUNDED, AsCaptured, carry_out, difference
from ..live.saving import save_as_rewritten
from ..live.undoing import all_or_nothing
from ..models.checks import check_finite
from ..models.program import Program, capture
from .config import HealingConfig
from .pairing import Pair

PIPELINE = "heal"
"""What the record of a rewritten module calls a healing that changed its structure."""


def is_living(model: Program | nn.Module) -> TypeGuard[nn.Module]:
    """Return whether a model is a module in Python, and not a graph."""
    return not isinstance(model, Program | CapturedModule)


def program_of(model: Program | nn.Module, kwargs: Mapping[str, object] | None, device: torch.device | None) -> Program:
    """Return a model as a program on a device; a module's so that its structure can be changed as its graph's is.

    Without a device it stays where it is, and so does a program without numbers.
    """
    if isinstance(model, Program):
        return model if device is None else model.on(device)
    if device is not None:
        model.to(device)
    if not is_living(model):
        return capture(model, kwargs=kwargs)
    check_finite(model)
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    given = pytree.tree_map_only(torch.Tensor, lambda t: t.to(place), dict(kwargs or {}))
    return Program(capture_module(model, (), given, children=lambda a, k: children(model, a, k)))


def frozen_in(model: Program | nn.Module) -> Sequence[str]:
    """Return the names of parameters of a module that take no gradient, and stay: where others of it take one."""
    if isinstance(model, Program) or not any(p.requires_grad for p in model.parameters()):
        return ()
    return [n for n, p in model.named_parameters() if p.is_floating_point() and not p.requires_grad]


def check_frozen(frozen: Sequence[str], plan: HealingConfig) -> None:
    """Raise LnrewriteError LN602 where parameters that stay would be those of the teacher, or take in a norm."""
    if frozen and (plan.progressive or plan.drop_final):
        why = "it takes no gradient and is to stay; norms that move by degrees start at the teacher, and end in weights"
        remedy = "omit progressive and drop_final, or let it learn (requires_grad_())"
        raise LnrewriteError(Code.LN602, frozen[0], why, remedy)


@dataclass(frozen=True)
class LivingStudent:
    """Hold a student that is a module in Python, and what the healed network is made from.

    `base` is the module whose graph `before` the training starts from: the student, or the teacher where norms move by
    degrees; None where the teacher is no module. `moved` says that the healed network has another structure than its.
    """

    student: nn.Module
    base: nn.Module | None
    before: Program
    moved: bool

    @classmethod
    def of(
        cls, models: tuple[Program | nn.Module, Program | nn.Module], pair: Pair, config: HealingConfig
    ) -> LivingStudent | None:
        """Return the second of two models as a student that lives, None where it is a program."""
        teacher, student = models
        if not is_living(student):
            return None
        moved = config.progressive or config.drop_final
        if not config.progressive:
            return cls(student, student, pair.student, moved)
        return cls(student, teacher if is_living(teacher) else None, pair.teacher, moved)

    def check(self, planned: Program, batches: Sequence[Tensors]) -> None:
        """Raise LnrewriteError LN602 where the student cannot become a network of that structure and those values."""
        remedy = "heal the program (lnr.capture), or without progressive and drop_final"
        if self.moved and self.base is None:
            why = "norms move by degrees from the teacher on, which is a program"
            raise LnrewriteError(Code.LN602, type(self.student).__name__, why, f"give it as a module too, or {remedy}")
        try:
            made = self.rewritten(planned) if self.moved else self.student
            compare(made, planned, batches)
        except LnrewriteError as error:
            why = f"it cannot compute in Python what would be trained: {error.what}: {error.why}"
            raise LnrewriteError(Code.LN602, type(self.student).__name__, why, remedy) from error

    def take(self, healed: Program, batches: Sequence[Tensors]) -> nn.Module:
        """Make the student compute what `healed` does, in place, and return it; its parameters stay the same objects.

        Raises LnrewriteError LN313 where the two differ on the batches.
        """
        if not self.moved:
            with torch.no_grad():
                for name, parameter in self.student.named_parameters(remove_duplicate=False):
                    if (found := stored(healed.module(), name)) is not None:
                        parameter.copy_(found)
        else:
            become(self.student, self.rewritten(healed))
            save_as_rewritten(self.student)
        compare(self.student, healed, batches)
        return self.student

    def rewritten(self, healed: Program) -> nn.Module:
        """Return a copy of the base that has the structure and the values of `healed`."""
        assert self.base is not None
        recipe = difference(self.base, self.before, healed)
        made = copy.deepcopy(self.base)
        with all_or_nothing(made, keep=False) as log:
            log.recipe, log.pipeline = recipe.changes, PIPELINE
            carry_out(made, recipe, healed.module())
        return made.train(self.student.training)


def device_of(program: Program) -> torch.device:
    """Return where a program's parameters are."""
    return next((p.device for p in program.module().parameters()), torch.device("cpu"))


def compare(module: nn.Module, program: Program, batches: Sequence[Tensors]) -> None:
    """Raise LnrewriteError LN313 where a module and a program give other outputs for the batches."""
    called, place = as_runnable(AsCaptured(module, signature_of(program.module()))), device_of(program)
    batches = [{n: t.to(place) for n, t in batch.items()} for batch in batches]
    with evaluating(module), evaluating(program.module()), torch.no_grad():
        runs = [(as_runnable(program.module()).run(batch), called.run(batch)) for batch in batches]
    error = apart([one for one, _ in runs], [two for _, two in runs])
    if not error <= (ROUNDED if program.narrow else EXACT):
        why = f"its outputs are {error:.1e} (relative) from those of its graph"
        remedy = "save the program that was healed, and report this model"
        raise LnrewriteError(Code.LN313, type(module).__name__, why, remedy)


def become(module: nn.Module, other: nn.Module) -> None:
    """Make a module what another one is: class, children, hooks and values; parameters that both have stay its own."""
    own = dict(module.named_parameters())  # of tied ones one stays what it is: the other may have them apart
    kept: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            mine = own.get(name)
            if mine is not None and (mine.shape, mine.dtype) == (parameter.shape, parameter.dtype):
                mine.copy_(parameter)
                kept[id(parameter)] = mine
    for part in other.modules():
        for leaf, held in list(slots(part).items()):
            if id(held) in kept:
                part.register_parameter(leaf, kept[id(held)])
    module.__class__ = type(other)
    vars(module).clear()
    vars(module).update(vars(other))
