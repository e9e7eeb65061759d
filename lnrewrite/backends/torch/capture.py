"""Capture a module with torch.export: functional, with the dimensions dynamic that really are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ...compat.torch import (
    GRAPH_ATTRIBUTES,
    BatchNorm,
    TreeSpec,
    closing_maps,
    input_tree,
    pytree,
    sizes_of,
    tensors_in,
)
from ...errors import Code, LnrewriteError, told
from ...quiet import untraced
from ...recipe.runtime import holder_of
from .checked import check, same
from .constants import check_constants
from .contexts import evaluating, quiet, unchanged
from .dynamic import Axes, Shapes, Trace, dynamic, placeholders, symbols, untangled
from .fixed import drop_settled, fixed_paths, mark, read_by
from .guarded import guard
from .module import Args, CapturedModule, Kwargs, brought, signature_of, unlift, written_by

CHOSEN = "what torch.export found at the example inputs"


@dataclass(frozen=True)
class Capture:
    """Hold a captured module with the inputs it was captured with, and what a user should know about it."""

    module: CapturedModule
    args: Args
    kwargs: Kwargs
    notes: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = field(default=())


def capture_module(
    module: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: Shapes = None,
    children: Callable[[Args, Kwargs], Sequence[str]] | None = None,
) -> Capture:
    """Capture a module in eval mode, on its own device and dtype; the inputs may lie elsewhere.

    dynamic_shapes as torch.export takes it; None lets batch and sequence be dynamic where a run at a second size
    agrees with the module. `children` chooses, by args and kwargs, the submodules of whose calls it is kept what
    entered and left them. Raises LnrewriteError LN020 where its forward does not take these inputs, LN023 where
    torch.export and draft_export both fail, or what they make is not what the module computes on these inputs.
    """
    notes: list[str] = []
    positional, keywords = brought((tuple(args), dict(kwargs or {})), module)
    _check_names(module)
    takes = _parameters(module)
    if "use_cache" in takes and "use_cache" not in keywords:
        keywords["use_cache"] = False
        if dynamic_shapes and isinstance(dynamic_shapes, Mapping):  # it has to name every input, or none
            dynamic_shapes = {**dynamic_shapes, "use_cache": None}
        notes.append("use_cache=False was set: a cache in the outputs cannot be captured")
    keywords = {n: keywords[n] for n in (*takes, *keywords) if n in keywords}  # in the order that torch.export takes
    _check_call(module, positional, keywords)
    if dynamic_shapes is None:
        positional, keywords = _two_rows(positional, keywords)
    positional, keywords = pytree.tree_map_only(torch.Tensor, _apart(), (positional, keywords))
    kept_calls = tuple(children(positional, keywords)) if children else ()
    with evaluating(module), unchanged(module), quiet(), _named(module, positional, keywords):

        def made(trace: Trace) -> CapturedModule:
            given = dynamic_shapes is not None
            return trace(dynamic_shapes) if given else dynamic(module, positional, keywords, notes, trace)

        captured = _any_way(module, positional, keywords, kept_calls, made)
        guard(module, captured, positional, keywords)
        if fixed_paths(captured.graph) or not symbols(captured) or dynamic_shapes is not None:
            notes += check(module, captured, positional, keywords)  # `holds` has compared the others
    s = signature_of(captured)
    given = {**dict(zip(s.names, positional, strict=False)), **keywords}
    kept = tuple(given[n] for n in s.positional), {n: given[n] for n in s.keywords}
    if module.training:
        captured.train()
        if any(m.training and getattr(m, "running_mean", None) is not None for m in module.modules()):
            notes.append("it is in train mode: what is seen and proved is eval mode, with batch norms' stored moments")
    return Capture(_own(captured), *kept, tuple(notes), tuple(sorted(symbols(captured))))


def from_program(program: ExportedProgram) -> Capture:
    """Take over a program that torch.export made (and torch.save'd or not).

    Raises LnrewriteError LN020 where its example inputs do not fit it, LN023 where what was made of it differs, and
    LN039 where it makes too much of constants.
    """
    args, kwargs = program.example_inputs or ((), {})
    signature = program.module_call_graph[0].signature
    names = tuple(signature.forward_arg_names or ()) if signature else ()
    with quiet():
        plain = program.module(check_guards=False)
        captured = unlift(program, names)
        if captured.graph.find_nodes(op="call_function", target=torch.sym_ite):  # a truth value of a tensor was read
            mark(captured, CHOSEN)
    s = signature_of(captured)
    given = {**dict(zip(s.names, args, strict=False)), **kwargs}
    if missing := [n for n in (*s.positional, *s.keywords) if n not in given]:
        why, remedy = f"it holds no example of its input {missing[0]}", "export it again, and save it with its inputs"
        raise LnrewriteError(Code.LN020, "the program", why, remedy)
    kept = tuple(given[n] for n in s.positional), {n: given[n] for n in s.keywords}
    if not _are_of(captured, kept):
        why, remedy = "its example inputs do not have the form that it takes", "export it again"
        raise LnrewriteError(Code.LN020, "the program", why, remedy)
    check_constants(captured)
    with evaluating(captured), quiet():
        same(plain, captured, args, kwargs)
    return Capture(_own(captured), *kept, dynamic=tuple(sorted(symbols(captured))))


def _are_of(module: CapturedModule, inputs: tuple[Args, Kwargs]) -> bool:
    """Return whether inputs nest as a graph's do, with tensors of its dtypes and numbers of axes."""

    def alike(a: TreeSpec, b: TreeSpec) -> bool:
        if a.type != b.type or a.num_leaves != b.num_leaves:
            return False
        plain = a.type in (dict, list, tuple)  # what others keep as their context may differ
        return not plain or a.context == b.context and all(map(alike, a.children(), b.children()))

    leaves, found = pytree.tree_flatten(inputs)
    if not alike(input_tree(module), found):
        return False
    tensors = [(t.dtype, t.dim()) for t in leaves if isinstance(t, torch.Tensor)]
    return tensors == [(t.dtype, t.dim()) for t in placeholders(module)]


def export_again(module: CapturedModule, args: Args, kwargs: Kwargs) -> ExportedProgram:
    """Export a captured (and edited) module with the dimensions dynamic that its placeholders have dynamic."""
    leaves = iter(placeholders(module))

    def axes(value: object) -> Axes:
        if not isinstance(value, torch.Tensor):
            return None
        return {i: Dim.AUTO for i, d in enumerate(sizes_of(next(leaves))) if isinstance(d, str)}

    shapes = pytree.tree_map(axes, (args, kwargs))
    with quiet():
        return torch.export.export(module, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()), strict=False)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _check_call(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Raise LnrewriteError LN020 where a forward requires other inputs than it is given."""
    if isinstance(module, CapturedModule):  # says so itself
        return
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as why:
        remedy = f"its forward is ({', '.join(map(str, _parameters(module).values()))}): give what it requires, by name"
        raise LnrewriteError(Code.LN020, type(module).__name__, str(why), remedy) from why


def _check_names(module: nn.Module) -> None:
    """Raise LnrewriteError LN023 where a module's state has a name that a graph of torch's needs for itself."""
    held = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, _ in held:
        if (first := name.partition(".")[0]) in GRAPH_ATTRIBUTES:
            why = f"it holds {name}, and torch.export makes a graph module of it, which has a {first} of its own"
            remedy = f"rename {first} in the module, or capture a module that holds this one"
            raise LnrewriteError(Code.LN023, type(module).__name__, why, remedy)


@contextmanager
def _named(module: nn.Module, args: Args, keywords: Kwargs) -> Iterator[None]:
    """Name for a while what a forward takes as `*args` and `**kwargs`, which torch.export nests here and not there."""
    takes = _parameters(module)
    kept = [p for p in takes.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in keywords if n not in takes]
    spread = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in kept)
    if not spread and (not more or len(kept) == len(takes)):
        yield
        return
    forward = module.forward

    @functools.wraps(forward)
    def named(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    kept = _spread(kept, len(args), {*takes, *keywords})
    was = vars(module).get("forward")
    named.__signature__ = inspect.Signature((*kept, *more))  # type: ignore[attr-defined]
    vars(module)["forward"] = named
    try:
        yield
    finally:
        vars(module).pop("forward")
        if was is not None:
            vars(module)["forward"] = was


def _spread(parameters: list[inspect.Parameter], count: int, taken: set[str]) -> list[inspect.Parameter]:
    """Return parameters with a name for each of `count` positional inputs that `*args` takes, none of them taken."""
    place = next((i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if place is None:
        return parameters
    star = parameters[place].name
    kind, found = inspect.Parameter.POSITIONAL_OR_KEYWORD, list[inspect.Parameter]()
    for number in range(count - place):
        name = f"{star}_{number}"
        while name in taken:
            name += "_"
        found.append(inspect.Parameter(name, kind))
    before = [p.replace(default=inspect.Parameter.empty) if found else p for p in parameters[:place]]
    return [*before, *found, *parameters[place + 1 :]]


def _names(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, CapturedModule):
        return signature_of(module).names
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(n for n, p in _parameters(module).items() if p.kind in kinds)


def _own(module: CapturedModule) -> CapturedModule:
    """Give a graph copies of the buffers that it writes, which it had in common with what it was captured from."""
    copies: dict[int, torch.Tensor] = {}
    for owner, name in (holder_of(module, name) for name in written_by(module)):
        held = getattr(owner, name)
        copy = held.detach().clone()
        made = nn.Parameter(copy, held.requires_grad) if isinstance(held, nn.Parameter) else copy
        setattr(owner, name, copies.setdefault(id(held), made))
    return module


def _frozen(module: nn.Module) -> str:
    """Return what train() cannot switch in a graph captured in eval mode."""
    if any(isinstance(m, BatchNorm) for m in module.modules()):
        return "batch norm"
    rates = [v for m in module.modules() if not isinstance(m, nn.Dropout) for k, v in vars(m).items() if "dropout" in k]
    return "the dropout inside attention" if any(isinstance(v, float) and v > 0 for v in rates) else ""


def _apart() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes inputs contiguous, and apart: torch.export takes one that is given twice for one input."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        twice = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.clone() if twice else tensor.contiguous()

    return own


def _two_rows(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Repeat a batch of one: torch.export takes a size of 1 for a constant."""
    tensors = [t for t in tensors_in((args, kwargs)) if t.dim()]
    if not tensors or any(t.shape[0] != 1 for t in tensors):
        return args, kwargs
    twice: tuple[Args, Kwargs] = pytree.tree_map_only(
        torch.Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, (args, kwargs)
    )
    return twice


def _any_way(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    children: tuple[str, ...],
    made: Callable[[Trace], CapturedModule],
) -> CapturedModule:
    """Capture a module as it is, else on the path that its data take, else by draft_export at fixed sizes."""
    names, frozen = _names(module), _frozen(module)

    def trace(
        shapes: Shapes, most: int | None = None, export: Callable[..., ExportedProgram] = torch.export.export
    ) -> CapturedModule:
        kept: dict[str, object] = {"strict": False, "preserve_module_call_signature": children}
        with closing_maps():
            program = export(module, args, kwargs, dynamic_shapes=shapes, **kept)
            return unlift(untangled(program, most), names, frozen)

    def on_path(shapes: Shapes, most: int | None = None) -> CapturedModule:
        def replayed(module: nn.Module, *given: Any, **how: Any) -> ExportedProgram:
            with reads.replay():
                return torch.export.export(module, *given, **how)

        captured = trace(shapes, most, replayed)
        drop_settled(captured)
        return captured

    try:
        return made(trace)
    except Exception as first:
        if (reads := read_by(module, args, kwargs)).values:
            with suppress(Exception):
                return made(on_path)
        try:
            with untraced():
                captured = trace(None, None, torch.export.draft_export)
        except Exception:
            why = told(first)
            remedy = "see `lnrewrite explain LN023`; give inputs that take the path you mean"
            raise LnrewriteError(Code.LN023, type(module).__name__, why, remedy) from first
        mark(captured, CHOSEN)
        return captured
