"""The way in: open any MODEL, capture it, convert a module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from .backends.torch.capture import Capture, capture_module, from_program
from .data.infer import infer_inputs, vocabulary_of
from .data.inputs import Inputs, parse_inputs
from .errors import Code, LnrewriteError, told
from .loading.identify import Format, damaged, identify
from .loading.open import open_module
from .models.program import Program, capture, check_finite, need_onnx
from .pipeline.driver import Pipeline
from .pipeline.protocols import Batch
from .pipeline.spec import placing

if TYPE_CHECKING:
    from .models.onnx_program import OnnxProgram


def load(
    model: str,
    *,
    factory: str | Callable[[], nn.Module] | None = None,
    trust_pickle: bool = False,
    trust_remote_code: bool = False,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Program | OnnxProgram:
    """Open and capture any MODEL of the command line: a file, a folder, `pkg.module:callable` or `demo:NAME`.

    inputs: example inputs by name or position, or `--input` specifications (strings); inferred where that is possible.
    An ONNX file gives an `OnnxProgram`: the same, except training.
    Raises LnrewriteError with a code that says what the model is and why it was not opened.
    """
    if (form := identify(model)).format is Format.ONNX:
        need_onnx(f"model {model!r}")
        from .models.onnx_program import OnnxProgram

        assert form.path is not None
        return OnnxProgram.open(form.path, model, inputs, seed)

    opened = open_module(model, factory=factory, trust_pickle=trust_pickle, trust_remote_code=trust_remote_code)
    if opened.program is not None:
        taken = _taken_over(model, opened.program)
        check_finite(taken.module)
        return Program(taken, format=opened.kind)
    module = opened.module
    assert module is not None
    check_finite(module)
    module.to(device)
    specified = isinstance(inputs, (list, tuple)) and bool(inputs) and all(isinstance(i, str) for i in inputs)
    if specified:
        given: Any = parse_inputs(list(inputs or ()), seed=seed, vocabulary=vocabulary_of(module))
    else:
        given = inputs or opened.inputs or infer_inputs(module, seed)
    if not isinstance(given, Inputs):
        given = Inputs((), dict(given)) if isinstance(given, Mapping) else Inputs(tuple(given))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (given.args, dict(given.kwargs)))
    dynamic = {n: dict.fromkeys(given.dynamic.get(n, {}), Dim.AUTO) or None for n in kwargs} if specified else None
    taken = capture_module(module, args, kwargs, dynamic)
    program = Program(
        replace(taken, notes=(*opened.notes, *taken.notes)), format=opened.kind, tokenizer=opened.tokenizer
    )
    free = program.dynamic_axes()
    for name, axes in given.dynamic.items():
        for axis, dimension in axes.items():
            if name in kwargs and axis not in free.get(name, {}):
                why = f"the model fixes dimension {dimension} of {name} at {kwargs[name].shape[axis]}"
                raise LnrewriteError(Code.LN023, model, why, "give that dimension as a number")
    return program


def _taken_over(model: str, program: torch.export.ExportedProgram) -> Capture:
    """Take over the program of a file. Raises LnrewriteError LN015 where it does not hold together."""
    try:
        return from_program(program)
    except LnrewriteError:
        raise
    except Exception as error:  # torch traces it again, and raises whatever a stranger's graph leads to
        why = f"its program does not hold together: {told(error).partition(chr(10))[0]}"
        raise damaged(model, why) from error


def convert(
    module: nn.Module,
    to: str,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    calibrate: Iterable[Batch] | None = None,
    norm: str = "auto",
    blocks: str | None = None,
    partial: bool = False,
    seed: int = 0,
    live: bool = False,
) -> nn.Module:
    """Convert a live module to another placement: nn.Module in, nn.Module out, the original untouched.

    to: pre, post, peri, output or none. norm: auto, layer or rms for inserted norms. calibrate: batches (dicts of
    keyword inputs or tuples); None uses synthetic inputs. live: return a rewritten copy of the module itself instead of
    its captured graph, as `rewrite` makes it in place. Warns where the graph follows one path of a module that chooses
    by its data. Raises Refused where a block cannot be converted.
    """
    if live:
        from .live.rewriting import rewrite

        module = copy.deepcopy(module)
        text = placing(to, norm, blocks)
        rewrite(module, text, args=args, kwargs=kwargs, calibrate=calibrate, partial=partial, seed=seed, undo=False)
        return module
    program = capture(module, args, kwargs)
    for path in program.fixed_paths:
        warnings.warn(f"captured on one path, that of the example inputs: {path}", stacklevel=2)
    return Pipeline.parse(placing(to, norm, blocks)).run(program, calibrate, partial, seed).program.module()
