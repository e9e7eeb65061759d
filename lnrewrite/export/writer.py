"""Write a model as ONNX with the norm forms that a target runs best, prove the file, and explain every norm."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .._version import __version__
from ..backends.onnx.double import is_in, widened
from ..backends.onnx.file import data_names, read, stamp, write
from ..backends.onnx.head_norms import take_in
from ..backends.onnx.lift import lift
from ..backends.onnx.norms import EXPERTS, GROUPED, HEADED, NORMED, PACKED
from ..backends.onnx.raising import STANDARD, raise_norms
from ..backends.onnx.session import runnable
from ..backends.running import Runnable
from ..comparison.verifying import HALF, proof
from ..detect.detection import detect
from ..detect.naming import norm_names
from ..errors import Code, Different, LnrewriteError, UsageError, unknown
from ..files.landing import failing, land, room
from ..files.output import check_output
from ..ir import Exactness, Kind, Network
from ..kernels.library import DOMAIN, find
from ..pipeline.report import Form, Report
from ..pipeline.results import Proof
from ..quiet import LOGGER
from .boundaries import fuse_norm_add_norm
from .exportable import Exportable
from .fusions import FOR, fuse_groups
from .lowering import lower, split
from .precision import lower_precision
from .quantizing import Quantized, check_quantizing, quantized
from .targets import DECOMPOSED, NO_CUDA_KERNEL, TARGETS, first, kernels

FILE = 2e-5
"""The largest error, relative to the largest output, that a file may show against the model in memory."""

TOLERANCE = {"fp32": FILE, "fp16": HALF, "bf16": 1e-1}
"""The largest error, relative to the source's largest output, that a written model may show."""

PLAIN = "it takes no statistics of the input, and plain arithmetic is left of it"

INSIDE = "attention computes it too, on CUDA: it was proved standing before it, not run (read from its kernel's schema)"

SEE = "see `lnrewrite explain LN403`"

NEEDED = "sessions need `lnrewrite kernels build` first, which was not done here: the proof is of its definitions"


def export(
    program: Exportable,
    path: str | os.PathLike[str],
    *,
    target: str = "generic",
    dtype: str = "fp32",
    opset: int | None = None,
    optimize: str | None = None,
    fuse: str = "ops",
    quantize: str | None = None,
    verify: bool = True,
    force: bool = True,
) -> Report:
    """Write a program as ONNX for a target and return the report, with a row for every norm.

    target: cpu, cuda, tensorrt or generic. dtype: fp32, fp16 or bf16. opset: None takes 18, or the file's own.
    optimize: auto lets libraries fuse the rest of the graph, none leaves it; None is auto for cpu, cuda. fuse: ops
    takes operators that ONNX Runtime has, custom (cpu and cuda) writes norm, add and norm as lnrewrite's own. quantize:
    int4 or int8 stores the weights of products so, once all else was proved; what that loses is measured. verify: run
    the file against the program at two batch sizes and two lengths. Raises LnrewriteError LN025 (path), LN403 (proof
    failed, nothing is kept), LN501 (no translation), LN502 (precision), UsageError LN003 for an unknown word.
    """
    optimize = optimize or ("auto" if target in FOR else "none")
    _check(target, dtype, optimize, fuse, quantize)
    output = check_output(path, force)
    bound = TOLERANCE["fp16" if program.in_half and dtype == "fp32" else dtype]
    LOGGER.info("translating to ONNX")
    able = kernels(target, dtype, version("onnxruntime")) if optimize == "auto" else ()
    if quantize:  # it finds the weights of products alone
        able = tuple(name for name in able if name != PACKED)
    model = program.to_onnx(opset, kernels=able)
    left, notes = raised(model, program.network), list(program.notes)
    attentions = Counter(node.op_type for node in model.graph if node.op_type in (PACKED, HEADED) and node.domain)
    if PACKED in able and attentions:
        notes.append(f"attention: {', '.join(f'{count} {name}' for name, count in sorted(attentions.items()))}")
    if optimize == "auto":
        LOGGER.info("fusing the rest of the graph")
        model, more = fuse_groups(model, target, lambda made: wrong(program, made, bound))
        notes += more
    if dtype != "fp32":
        notes += lower_precision(model, dtype)
    narrow = ir.DataType.BFLOAT16
    if target == "cpu" and is_in(model, narrow) and all(v.dtype is not narrow for v in model.graph.outputs):
        model = widened(model, ir.DataType.FLOAT, {narrow})
        notes.append(
            "what the model computes in bfloat16 is computed in float32: ONNX Runtime's CPU lacks kernels for it"
        )
    LOGGER.info(f"choosing norm forms for {target}")
    rows, left_out = fuse_norm_add_norm(model) if fuse == "custom" else ([], [])
    notes += left_out
    rows += [Form(name, GROUPED, INSIDE) for name in (take_in(model) if NORMED in able else ())]
    rows += lower(model, TARGETS[target], version("onnxruntime"))
    if operators := ", ".join(sorted(function.name for function in model.functions.values())):
        stamp(model, operators=operators)
        notes.append(NEEDED if find() is None else f"it is proved with the kernels of {operators} that are built here")
    if any(row.why == INSIDE for row in rows):
        notes.append(f"{GROUPED} norms queries and keys: CUDA alone does, with ONNX Runtime {first(NORMED)} or later")
    if any(node.op_type == EXPERTS for node in model.graph):
        notes.append(f"{EXPERTS} needs ONNX Runtime {first(EXPERTS)} or later: older ones compute other gates on CUDA")
    if target == "cuda" and (lacking := off_cuda(model)):
        notes.append(f"ONNX Runtime has no CUDA kernel for {lacking}: they run on the CPU, copies around them")
    stamp(model, version=__version__, target=target, dtype=dtype)
    if program.fixed_paths:
        stamp(model, fixed_paths=json.dumps(program.fixed_paths))
    judge, loss = program if verify else None, None
    if quantize:
        small = _small(model, quantize, judge, bound, output)
        model, loss, notes, judge = small.model, small.loss, [*notes, *small.notes], None
    found = put(model, output, judge, bound, force=force)
    notes += found.notes if found else ()
    placement = program.network.placement
    return Report(
        "", Exactness.CALIBRATED if quantize else Exactness.ALGEBRAIC, (), placement, placement, loss,
        notes=tuple(notes), output=str(output),
        fixed_paths=program.fixed_paths, norms=(*rows, *left), proved=found,
    )  # fmt: skip


def _small(model: ir.Model, kind: str, program: Exportable | None, bound: float, output: Path) -> Quantized:
    """Quantize a model that is right before. Raises LnrewriteError LN403 where it is not, LN502."""
    if program is not None and (why := wrong(program, model, bound)):
        raise Different(Code.LN403, str(output), f"before it is quantized, {why}", SEE)
    return quantized(model, kind, program)


def _check(target: str, dtype: str, optimize: str, fuse: str, quantize: str | None) -> None:
    """Raise UsageError LN003 for an unknown word, and for words that do not go together."""
    for noun, word, known in (
        ("target", target, TARGETS), ("dtype", dtype, TOLERANCE), ("optimize", optimize, ("auto", "none")),
        ("fuse", fuse, ("ops", "custom")),
    ):  # fmt: skip
        if word not in known:
            unknown(Code.LN003, noun, word, known)
    if fuse == "custom" and not TARGETS[target].contrib:
        why = "the operators of lnrewrite are for ONNX Runtime"
        raise UsageError(Code.LN003, f"fuse custom, target {target}", why, "give the target cpu or cuda")
    check_quantizing(quantize, target, dtype)


def off_cuda(model: ir.Model) -> str:
    """Name the operators, and how many of each, that ONNX Runtime's CUDA provider does not run."""
    counts = Counter(node.op_type for node in model.graph if node.domain == "" and node.op_type in NO_CUDA_KERNEL)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def raised(model: ir.Model, source: Network) -> list[Form]:
    """Write every norm of a model as one operator; return a row for each of `source` that stays as it is."""
    split(model)
    graph = lift(model)
    found = detect(graph)
    norms, names, network = found.norms, found.names, found.network
    odd = [row for row in network.refusals if row.code == Code.LN205]
    left = raise_norms(model, graph, norms, names)
    RemoveUnusedNodesPass()(model)
    rows = []
    for output, why in left.items():
        form = DECOMPOSED if why else STANDARD[norms[output].norm.kind]
        rows.append(Form(names.get(output, output), form, why or "a standard operator"))
    rows += [Form(row.site, DECOMPOSED, f"{row.code}: {row.why}") for row in odd]
    return rows + [Form(name, DECOMPOSED, PLAIN) for name in lost(source, network)]


def lost(source: Network, network: Network) -> Iterator[str]:
    """Yield the norms by stored numbers alone that are none to be seen where translation has folded constants."""
    names = norm_names(source)
    before, after = ([site for s in (*n.streams, n.rest) for _, site in s.sites()] for n in (source, network))
    for kind in (Kind.POWER, Kind.WEIGHT):
        held = sum(site.norm.kind is kind for site in after)
        yield from [names[site.origin[-1]] for site in before if site.norm.kind is kind][held:]


def wrong(program: Runnable, model: ir.Model, bound: float) -> str:
    """Return why a model is not what its program is: it does not load, or gives other numbers; empty where it is."""
    try:
        found = proof(program, runnable(model), bound)
    except LnrewriteError as error:
        return error.why
    return f"its outputs are {found.max_rel:.2g} off" if found.differs else ""


def put(
    model: ir.Model,
    output: Path,
    program: Exportable | None,
    bound: float,
    *,
    force: bool = True,
) -> Proof | None:
    """Write a model, prove what was written against `program` (None: do not), and move it into place.

    Weights in a file of their own land first, under a name that the old ones do not have; those go last: whatever
    interrupts, what stands at `output` has its own weights beside it.
    Raises LnrewriteError LN403 where the file does not load or gives other numbers: then nothing is kept.
    """
    found = None
    names = [output.with_name(name) for name in data_names(output)]
    held = output.read_bytes() if force and output.is_file() and any(name.exists() for name in names) else b""
    old = [name for name in names if name.name.encode() in held]
    data = names[1] if names[0] in old else names[0]
    with failing(output), room(output.absolute().parent) as folder:
        LOGGER.info(f"writing {output}")
        files = write(model, folder / output.name, data.name)
        if program is not None:
            LOGGER.info("proving the file")
            found = proved(program, files[0], output, bound)
        for file in reversed(files):
            with failing(place := output.with_name(file.name)):
                land(file, place, force=force)
        for name in old:
            if name.name not in [file.name for file in files] and not _named(name, output):
                name.unlink(missing_ok=True)
    return found


def _named(data: Path, output: Path) -> bool:
    """Return whether another model beside `output` may keep its weights in a file."""
    models = (each for each in output.parent.glob("*.onnx") if each.name != output.name and each.is_file())
    return any(data.name.encode() in each.read_bytes() for each in models)


def proved(program: Exportable, file: Path, output: Path, bound: float) -> Proof:
    """Run a written file against its program; raise LnrewriteError LN403 where it gives other numbers.

    A file with operators of lnrewrite is run by its definitions, and where the kernels are built by them too.
    """
    remedy = SEE
    try:
        defined = read(file, str(output))
        modules = [runnable(defined)]
        if DOMAIN in defined.graph.opset_imports and find() is not None:
            modules.append(runnable(read(file, str(output), inline=False)))
        proofs = [replace(proof(program, module, bound), dtype=module.precision) for module in modules]
        found = max(proofs, key=lambda each: each.max_rel)
        more = [] if found.differs else [note for module in modules for note in program.tried(module, bound)]
    except LnrewriteError as error:
        remedy = error.remedy if error.code == Code.LN020 else remedy  # inputs that it names
        raise LnrewriteError(Code.LN403, str(output), error.why, remedy) from error
    if found.differs:
        why = f"its outputs are off by {found.max_rel:.2g} of the largest, and {bound:g} is allowed"
        raise Different(Code.LN403, str(output), why, remedy)
    return Proof(found, tuple(dict.fromkeys([*more, *(note for module in modules for note in module.notes)])))
