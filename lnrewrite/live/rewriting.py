"""Rewrite a living module in place: the plan made on its graph, carried out on its Python."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..backends.torch.capture import Capture, capture_module
from ..backends.torch.contexts import evaluating, unchanged
from ..backends.torch.module import Signature, signature_of, stored
from ..comparison.verifying import proof
from ..compat.torch import COMPILED
from ..errors import Code, LnrewriteError, told
from ..models.checks import check_finite
from ..models.program import Program
from ..pipeline.driver import Pipeline
from ..pipeline.protocols import Batch
from ..pipeline.report import Report
from ..pipeline.spec import placing
from ..recipe import runtime as rewritten
from .difference import Difference
from .ports import children
from .recipes import Recipe
from .saving import save_as_before, save_as_rewritten
from .undoing import RECORD, UndoLog, all_or_nothing, configs_of

EXACT, ROUNDED = 1e-5, 2e-2
"""How far a rewritten module's outputs may be from the rewritten graph's, relative to the largest: float32 and half."""


def rewrite(
    module: nn.Module,
    pipeline: Pipeline | str | None = None,
    *,
    to: str | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    calibrate: Iterable[Batch] | None = None,
    norm: str = "auto",
    blocks: str | None = None,
    fit: str = "auto",
    partial: bool = False,
    seed: int = 0,
    undo: bool = True,
    data: str | None = None,
    verify: bool = True,
) -> Report:
    """Rewrite a living nn.Module in place: it stays its own Python, with `generate()`, caches, hooks and training.

    pipeline: a Pipeline or its text; or give `to` (a target of `convert`) with `norm`, `blocks` and `fit` as
    `convert` takes them. args, kwargs: example inputs. calibrate: batches, as `Pipeline.run` takes them. Parameters
    keep their names and stay the same objects; removed norms become `nn.Identity`, inserted ones live in the block that
    they serve (`....norm_in`, `norm_out`, `norm_post`). undo: keep the old values of what changes, for `unrewrite`.
    verify: as `Pipeline.run` takes it.

    All or nothing: Refused and LnrewriteError leave the module as it was. LN310: an edit has no place in the module's
    Python; LN312: the module is wrapped, sharded or compiled already; LN313: the rewritten module does not compute
    what was planned.
    """
    _check(module)
    if (pipeline is None) == (to is None):
        raise LnrewriteError(Code.LN003, "rewrite", "give either a pipeline or to=", "e.g. to='peri'")
    if to is not None:
        pipeline = placing(to, norm, blocks, fit)
    plan = Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline
    assert plan is not None
    with evaluating(module):
        taken = capture_module(module, args, kwargs, children=lambda a, k: children(module, a, k))
    program = Program(taken)
    with unchanged(module):
        result = plan.run(program, calibrate, partial, seed, data=data, verify=verify)
    if result.program is program:
        if RECORD in vars(module):  # it is what the next `unrewrite` undoes
            with all_or_nothing(module, keep=undo) as log:
                log.pipeline = str(plan)
        return result.report
    recipe = difference(module, program, result.program)
    with all_or_nothing(module, keep=undo) as log:
        log.recipe, log.pipeline = recipe.changes, str(plan)
        carry_out(module, recipe, result.program.module())
        _prove(module, result.program, taken, seed)
    save_as_rewritten(module)
    return result.report


def unrewrite(module: nn.Module) -> None:
    """Undo the last `rewrite` of a module: its structure, and the values of what was changed.

    Raises LnrewriteError LN314 where nothing is recorded, or where parameters or structure were changed since.
    """
    logs: list[UndoLog] = vars(module).get(RECORD, [])
    if not logs:
        remedy = "give the module that was rewritten"
        raise LnrewriteError(Code.LN314, type(module).__name__, "no rewrite of this module is recorded", remedy)
    logs[-1].check()
    logs.pop().undo()
    if not logs:
        delattr(module, RECORD)
        save_as_before(module)


def difference(module: nn.Module, before: Program, after: Program) -> Recipe:
    """Return what makes a module compute what `after` does; `before` was captured from it with its children's calls."""
    norms = before.detection.norms
    return Difference(module, before.module(), before.graph, before.calls, norms, after.module()).find()


def carry_out(module: nn.Module, recipe: Recipe, source: nn.Module) -> None:
    """Change a module as a recipe says, with the values of the rewritten graph's parameters."""
    had = dict(module.named_parameters(remove_duplicate=False))
    restructure(module, recipe)
    with torch.no_grad():
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            origin = recipe.values.get(name, name)
            values = stored(source, origin)
            if values is not None and name in recipe.shifted:
                values = values + recipe.shifted[name]
            if name in recipe.neutral:
                parameter.fill_(recipe.neutral[name])
            elif values is None:
                continue
            elif name not in recipe.values:
                grown = parameter.shape != values.shape  # by the module itself, since it was captured
                if not grown and not torch.equal(parameter, values):
                    parameter.copy_(values)
            else:
                path, _, leaf = name.rpartition(".")
                fresh = had.get(origin) if origin in had else None
                if fresh is None:
                    fresh = nn.Parameter(values.detach().clone())
                elif not torch.equal(fresh, values):
                    fresh.copy_(values)
                module.get_submodule(path).register_parameter(leaf, fresh)
    if any("untie" in change for change in recipe.changes):
        for config in configs_of(module):
            config.tie_word_embeddings = False


def restructure(module: nn.Module, recipe: Recipe) -> None:
    """Change a module's structure. Raises LnrewriteError LN310 where a forward cannot be edited."""
    try:
        rewritten.apply(module, recipe.changes)
    except RuntimeError as error:
        remedy = "use the exported route (lnr.convert, or -o OUT.pt2)"
        raise LnrewriteError(Code.LN310, type(module).__name__, str(error), remedy) from error


def _check(module: nn.Module) -> None:
    """Raise LnrewriteError where a module cannot be rewritten in place."""
    if not isinstance(module, nn.Module):
        why = f"a {type(module).__name__} was given"
        raise LnrewriteError(Code.LN011, "rewrite", why, "give a torch.nn.Module; use lnrewrite.load for files")
    for name, child in module.named_modules():
        if hasattr(child, COMPILED):
            raise LnrewriteError(Code.LN312, name or "module", "it is compiled", "rewrite it first, then compile")
    for name, parameter in module.named_parameters():
        if type(parameter.data) is not torch.Tensor:
            why = f"its parameter is a {type(parameter.data).__name__}"
            raise LnrewriteError(Code.LN312, name, why, "rewrite the module first, then shard or quantize it")
    check_finite(module)


# ---- proof ----


class AsCaptured(nn.Module):
    """Call a module as it was captured: with the inputs that were no tensors."""

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.module, self.signature = module, signature

    def forward(self, **given: object) -> object:
        s = self.signature
        takes = inspect.signature(self.module.forward).parameters.values()
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in takes):  # what it takes has no names of its own
            given = {**s.constants, **given}
            positional = [given.pop(n) for n in s.names if n in given]
            return self.module(*positional, **given)
        plain = {k: v for k, v in s.constants.items() if v is not None}
        return self.module(**plain, **given)


def _prove(module: nn.Module, program: Program, taken: Capture, seed: int) -> None:
    """Raise LnrewriteError LN313 where a rewritten module and the rewritten graph give different outputs."""
    if any(p.is_meta for p in module.parameters()):
        return
    bound = ROUNDED if program.narrow else EXACT
    remedy = "use the exported route (lnr.convert, or -o OUT.pt2), and report this model"
    try:
        with evaluating(module), unchanged(module):
            found = proof(program, AsCaptured(module, signature_of(taken.module)), bound, seed)
    except Exception as error:  # the module's own code, which may look at a norm that is gone
        why = f"rewritten, it fails with {told(error)}"
        raise LnrewriteError(Code.LN313, type(module).__name__, why, remedy) from error
    if found.differs:
        why = f"its outputs are {found.max_rel:.1e} (relative) from what was planned"
        raise LnrewriteError(Code.LN313, type(module).__name__, why, remedy)
