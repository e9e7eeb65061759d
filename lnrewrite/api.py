"""The way in: open any MODEL, capture it, convert a module."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim

from .backends.torch.cached import generates
from .backends.torch.capture import Capture, capture_module, from_program
from .backends.torch.module import copied
from .backends.torch.served import no_cache
from .compat.torch import pytree
from .data.calibration import reader_of
from .data.infer import given_inputs, infer_inputs
from .data.inputs import Inputs
from .errors import Code, LnrewriteError, UsageError, told
from .files.output import SUFFIXES, check_output, output_named
from .loading.identify import damaged, identify
from .loading.open import Opened, open_module, tokenizer_of
from .loading.source import Factory, Format, OpenOptions, Source
from .models.checks import check_finite, need_onnx
from .models.program import Program, capture
from .pipeline.driver import Pipeline
from .pipeline.job import Job, check_paths
from .pipeline.protocols import Batch
from .pipeline.report import Report
from .pipeline.sounding import Unproved
from .pipeline.spec import placing
from .quiet import LOGGER

if TYPE_CHECKING:
    from .models.decoder import InParts
    from .models.onnx_program import OnnxProgram


def load(
    model: str | os.PathLike[str],
    *,
    factory: str | Callable[[], nn.Module] | None = None,
    trust_pickle: bool = False,
    trust_remote_code: bool = False,
    inputs: Mapping[str, object] | Sequence[object] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Program | OnnxProgram:
    """Open and capture any MODEL of the command line: a file, a folder, `pkg.module:callable` or `demo:NAME`.

    inputs: example inputs by name or position, or `--input` specifications (strings); inferred where that is possible.
    An ONNX file gives an `OnnxProgram`: the same, except training.
    Raises LnrewriteError with a code that says what the model is and why it was not opened.
    """
    how = OpenOptions(factory, trust_pickle, trust_remote_code, inputs, device, seed)
    return load_source(identify(model, how))


def load_source(source: Source) -> Program | OnnxProgram:
    """Open and capture what `identify` found. Raises as `load`; UsageError LN003 for a device that is not here."""
    check_device(source.how.device)
    if source.format is Format.ONNX:
        need_onnx(f"model {source.name!r}")
        from .models.onnx_program import OnnxProgram

        return OnnxProgram.open(source.graph, source.name, source.how.inputs, source.how.seed, tokenizer_of(source))
    return capture_opened(source, open_module(source))


def load_to_export(
    source: Source, kv_cache: bool | None = None, folder: bool = False
) -> Program | OnnxProgram | InParts:
    """Open and capture what `identify` found as it is exported: a model that generates with its cache.

    kv_cache: None takes a cache where that can be, and says where not, True insists, False captures the model without.
    folder: whether OUT is one, which may hold several parts. Inputs that a user gives describe a call without a cache.
    Raises as `load`, LnrewriteError LN504.
    """
    check_device(source.how.device)
    described = source.how.inputs is not None or source.how.device != "cpu"
    if kv_cache and source.format is Format.ONNX:
        raise no_cache(source.name, "it is an ONNX file, whose inputs and outputs stay as they are", "omit kv_cache")
    if source.format is Format.ONNX or kv_cache is False or (described and not kv_cache):
        return load_source(source)
    opened = open_module(source)
    if opened.module is None or not (kv_cache or generates(opened.module)):
        return capture_opened(source, opened)
    need_onnx(f"model {source.name!r}")
    more: dict[str, Any] = {"tokenizer": opened.tokenizer, "format": opened.kind, "consume": True}
    made = _served(opened.module, bool(kv_cache), opened.notes, folder=folder, **more)
    return capture_opened(source, replace(opened, notes=(*opened.notes, made))) if isinstance(made, str) else made


def _served(module: nn.Module, insist: bool, notes: Sequence[str] = (), **how: Any) -> Program | InParts | str:
    """Return a living model as it is served, or a note why it is without a cache. Raises LN504 for who insists."""
    from .models.decoder import served

    try:
        return served(module, notes, **how)
    except LnrewriteError as error:
        if insist or error.code != Code.LN504:
            raise
        return f"exported without a cache: {error.why}"


def capture_opened(source: Source, opened: Opened) -> Program:
    """Capture what `open_module` gave. Raises as `load`."""
    if opened.program is not None:
        taken = _taken_over(source.name, opened.program)
        check_finite(taken.module)
        return Program(taken, format=opened.kind)
    assert opened.module is not None
    check_finite(opened.module)
    return _captured(source, opened, opened.module.to(source.how.device))


def export_model(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    kv_cache: bool | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    **how: Any,
) -> Report:
    """Write a model as ONNX for a target and return the report: any MODEL, or a living module of transformers.

    A model that generates is written as it generates: input_ids [b, s], attention_mask [b, p + s], position_ids [b, s]
    where used, past_key_values.N.key/value [b, heads, p, size] -> logits, present.N.key/value. kv_cache: None does so
    where it can be done and says in the notes why not, True insists, False never. path: an .onnx file or, of such a
    model, a name without suffix: a folder with configs, tokenizer and what onnxruntime-genai needs; of an encoder and
    decoder a folder with encoder_model.onnx, decoder_model.onnx and decoder_with_past_model.onnx, as optimum-onnx loads
    them; of a decoder that reads pictures one with vision.onnx, embedding.onnx and model.onnx. how: target, dtype,
    opset, optimize, fuse, quantize, verify as `Program.export` takes them. Raises as that,
    and LnrewriteError LN504 for a cache that cannot be.
    """
    if isinstance(model, nn.Module):
        need_onnx(type(model).__name__)
        return export_program(_living(model, kv_cache, not Path(path).suffix), path, None, force=force, **how)
    source = identify(model, OpenOptions(None, False, trust_remote_code, None, "cpu", 0))
    return export_source(source, path, kv_cache, force=force, **how)


def _living(module: nn.Module, kv_cache: bool | None, folder: bool) -> Program | InParts:
    """Capture a living module for export, as `export_model` takes it."""
    notes, module = tuple[str, ...](), copied(module, torch.device("cpu"))
    if kv_cache is not False:
        if not isinstance(made := _served(module, bool(kv_cache), folder=folder), str):
            return made
        notes = (made,)
    given = infer_inputs(module)
    taken = capture_module(module, given.args, given.kwargs)
    return Program(replace(taken, notes=(*notes, *taken.notes)))


def export_source(
    source: Source, path: str | os.PathLike[str], kv_cache: bool | None = None, accept: bool = True, **how: Any
) -> Report:
    """Export what `identify` found: see `export_model`. accept: a model that chooses its path by its data too."""
    folder = not Path(path).suffix
    if folder and source.graphs and not kv_cache:
        from .checkpoints.graphs import export_graphs

        return export_graphs(source, path, **how)
    program = load_to_export(source, kv_cache, folder)
    check_paths(source.name, program.fixed_paths, accept)
    return export_program(program, path, source.path, **how)


def export_program(
    program: Program | OnnxProgram | InParts,
    path: str | os.PathLike[str],
    source: Path | None,
    *,
    force: bool,
    **how: Any,
) -> Report:
    """Export a program to an .onnx file (OUT without a suffix gets it) or, one that generates, into a folder OUT."""
    from .models.decoder import Decoder, InParts

    if isinstance(program, InParts) or isinstance(program, Decoder) and not Path(path).suffix:
        from .checkpoints.serving import export_folder

        return export_folder(program, path, source if source and source.is_dir() else None, force=force, **how)
    return program.export(path if Path(path).suffix else f"{os.fspath(path)}.onnx", force=force, **how)


def _captured(source: Source, opened: Opened, module: nn.Module) -> Program:
    """Capture an opened module. Raises LnrewriteError LN023 where a dimension that the user named is fixed."""
    device, dynamic = source.how.device, None
    given = given_inputs(module, source.how)
    if given is None:
        given = Inputs((), dict(opened.inputs)) if opened.inputs else infer_inputs(module, source.how.seed)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (given.args, dict(given.kwargs)))
    if given.described:
        dynamic = {n: dict.fromkeys(given.dynamic.get(n, {}), Dim.AUTO) or None for n in kwargs}
    taken = capture_module(module, args, kwargs, dynamic)
    taken = replace(taken, notes=(*opened.notes, *taken.notes))
    program = Program(taken, format=opened.kind, tokenizer=opened.tokenizer)
    free = program.dynamic_axes()
    for name, axes in given.dynamic.items():
        for axis, dimension in axes.items():
            if name in kwargs and axis not in free.get(name, {}):
                why = f"the model fixes dimension {dimension} of {name} at {kwargs[name].shape[axis]}"
                raise LnrewriteError(Code.LN023, source.name, why, "give that dimension as a number")
    return program


def check_device(device: str) -> None:
    """Raise UsageError LN003 where torch cannot put a tensor on the device."""
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as why:
        raise UsageError(
            Code.LN003, f"device {device!r}", str(why), "give cpu, or a device that torch finds here"
        ) from why


def _taken_over(model: str, program: torch.export.ExportedProgram) -> Capture:
    """Take over the program of a file. Raises LnrewriteError LN015 where it does not hold together."""
    try:
        return from_program(program)
    except LnrewriteError:
        raise
    except Exception as error:  # torch traces it again, and raises whatever a stranger's graph leads to
        why = f"its program contradicts itself: {told(error).partition(chr(10))[0]}"
        raise damaged(model, why) from error


def rewrite_file(
    model: str | os.PathLike[str],
    pipeline: Pipeline | str,
    output: str | os.PathLike[str] | None,
    *,
    calibrate: str | Iterable[Batch] | None = None,
    partial: bool = False,
    verify: bool = True,
    accept_fixed_paths: bool = False,
    force: bool = False,
    factory: Factory | None = None,
    trust_pickle: bool = False,
    trust_remote_code: bool = False,
    inputs: Mapping[str, object] | Sequence[object] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Report:
    """Run a pipeline on any MODEL and write the result: a file in, a file out; a checkpoint folder in, a folder out.

    pipeline: a Pipeline, its text, or the name of a preset. output: an .onnx file where MODEL is one, a folder where
    MODEL is one and `output` has no suffix, else a .pt2 or .onnx file; None writes nothing (a dry run). It is written
    whole or not at all; `force` replaces what stands there. calibrate: DATA of the command line, or batches.
    partial, verify: as `Pipeline.run` takes them. accept_fixed_paths: write a model that chooses its path by its data.
    All else is as `load` takes it. Raises Refused, and LnrewriteError with a code that says what the matter is.
    """
    lenient = isinstance(pipeline, str) and pipeline in Pipeline.PRESETS
    if isinstance(pipeline, str):
        pipeline = Pipeline.preset(pipeline) if lenient else Pipeline.parse(pipeline)
    source = identify(model, OpenOptions(factory, trust_pickle, trust_remote_code, inputs, device, seed))
    job = Job(pipeline, partial, lenient, verify, accept_fixed_paths, seed)
    return rewrite_source(source, job, output, calibrate=calibrate, force=force)


def rewrite_source(
    source: Source,
    job: Job,
    output: str | os.PathLike[str] | None,
    *,
    calibrate: str | Iterable[Batch] | None,
    force: bool,
) -> Report:
    """Do a job on what `identify` found, on the data `calibrate`, and write the result; see `rewrite_file`."""
    named = output is not None and Path(output).suffix not in SUFFIXES
    folder = named and (source.format is Format.TRANSFORMERS or bool(source.graphs))
    target = None if output is None or folder else _target(source, os.fspath(output), force)
    if folder and (source.how.factory or source.how.device != "cpu"):
        why = "a folder is read on the CPU, by the class that its config names"
        raise UsageError(Code.LN003, "--factory, --device", why, "omit them, or name a .pt2 file as OUT")
    read, data = reader_of(calibrate, job.seed)
    job = replace(job, read=read, data=data, accept_fixed_paths=job.accept_fixed_paths or output is None)
    if output is None or not folder:
        return _rewritten(source, job, target, force)
    if source.graphs:
        from .checkpoints.graphs import rewrite_graphs

        return rewrite_graphs(source, job, output, force=force)
    from .checkpoints.folders import rewrite_folder

    LOGGER.info(f"reading {source.name}")
    return rewrite_folder(source, job, output, force=force)


def _target(source: Source, output: str, force: bool) -> Path:
    """Return the file to write. Raises LnrewriteError LN025, and LN032 for ONNX that would have to become torch."""
    onnx = source.format is Format.ONNX
    target = check_output(output_named(output, ".onnx" if onnx else ".pt2"), force)
    if onnx and target.suffix == ".pt2":
        raise LnrewriteError(Code.LN032, str(target), f"{source.name} is an ONNX file", "name an .onnx file")
    return target


def _rewritten(source: Source, job: Job, target: Path | None, force: bool) -> Report:
    """Run a job on one file's model and write it, with its weights in memory once where that can be."""
    LOGGER.info(f"capturing {source.name}")
    program = load_source(source)
    if target:
        check_paths(source.name, program.fixed_paths, job.accept_fixed_paths)
        program.check_save(target)
    batches = job.batches(program)
    try:
        result = job.run(program, batches, consume=True)
    except Unproved:  # the program was used up
        result = job.run(load_source(source), batches)
    job.check(source.name, result.report)
    if target and job.shares.first:
        LOGGER.info(f"writing {target}")
        result.program.save(target, force=force)
    return replace(result.report, output=None if target is None else str(target))


def convert(
    module: nn.Module,
    to: str,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    calibrate: Iterable[Batch] | None = None,
    norm: str = "auto",
    blocks: str | None = None,
    fit: str = "auto",
    keep_sizes: bool = False,
    partial: bool = False,
    seed: int = 0,
    live: bool = False,
    post: str | None = None,
) -> nn.Module:
    """Convert a live module to another placement: nn.Module in, nn.Module out, the original untouched.

    to: pre, post, peri, output, none, mix (post in the blocks that `post` selects, by default first:25%, else pre), sub
    (pre, and a norm before each branch's last map) or lns (pre, what layer l reads divided by sqrt(l)). norm: auto,
    layer or rms for inserted norms. calibrate: batches (dicts of keyword inputs or tuples); None uses synthetic inputs.
    fit: reconstruct fits the converted branches' own weights to `calibrate` block by block, constants only what stands
    in place of a norm. keep_sizes: convert a Post-LN module to pre exactly, without data: its graph then computes for
    each token what the norms divided by (not with `live`). live: return a rewritten copy of the module itself instead
    of its captured graph, as `rewrite` makes it in place.
    Warns where the graph follows one path of a module that chooses by its data. Raises Refused where a block cannot be
    converted.
    """
    if live:
        from .live.rewriting import rewrite

        module = copy.deepcopy(module)
        text = placing(to, norm, blocks, fit, keep_sizes, post=post)
        rewrite(module, text, args=args, kwargs=kwargs, calibrate=calibrate, partial=partial, seed=seed, undo=False)
        return module
    program = capture(module, args, kwargs)
    for path in program.fixed_paths:
        warnings.warn(f"captured on one path, that of the example inputs: {path}", stacklevel=2)
    pipeline = Pipeline.parse(placing(to, norm, blocks, fit, keep_sizes, post=post))
    return pipeline.run(program, calibrate, partial, seed).program.module()
