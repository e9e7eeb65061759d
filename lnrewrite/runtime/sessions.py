"""Open an ONNX file in ONNX Runtime, with lnrewrite's kernels where the file holds operators of it."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime

from ..backends.onnx.file import ONE_FILE, read, whole
from ..backends.onnx.head_norms import GAINS
from ..backends.onnx.norms import GROUPED
from ..backends.onnx.sizes import bytes_of
from ..errors import Code, LnrewriteError, unknown
from ..kernels.library import DOMAIN, register
from ..loading.identify import identify
from ..loading.source import Format

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def session(
    path: str | os.PathLike[str],
    *,
    target: str = "cpu",
    threads: int | None = None,
    options: onnxruntime.SessionOptions | None = None,
) -> onnxruntime.InferenceSession:
    """Return an onnxruntime.InferenceSession of an ONNX file, lnrewrite's operators registered.

    target: cpu or cuda (which nothing falls back from). threads: of one operator on the CPU; None leaves it to ONNX
    Runtime. options: an onnxruntime.SessionOptions to start from, of its own for each session (the operators are added
    to it). Raises LnrewriteError LN530 where the file needs kernels that are not built here, LN520 where it is no ONNX
    file or ONNX Runtime refuses it, UsageError LN003 for an unknown target.
    """
    check_target(target)
    name, form = str(path), identify(str(path))
    if form.format is not Format.ONNX:
        why, remedy = f"it is {form.format}, and sessions run ONNX files", "write it with `lnrewrite export` first"
        raise LnrewriteError(Code.LN520, f"model {name!r}", why, remedy)
    options = options or onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    if holds_operators(form.graph):
        register(options, name, target == "cuda")
    more = {} if target == "cpu" else {"enable_fallback": 0}
    held = for_cpu(form.graph, name) if target == "cpu" else form.graph
    try:
        return onnxruntime.InferenceSession(held, options, providers=[PROVIDERS[target]], **more)
    except Exception as why:  # ONNX Runtime has no common base class of its errors
        raise does_not_run(name, why) from why


def for_cpu(path: Path, name: str) -> Path | bytes:
    """Return a file, or where its attention norms heads, which CUDA alone does, a model with these norms before it."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    if not any(node.op_type == GROUPED and len(node.input) > max(GAINS) for node in nodes):
        return path
    model = read(path, name, inline=False)
    content: bytes = ir.to_proto(whole(model)).SerializeToString() if bytes_of(model) <= ONE_FILE else b""
    return content or path


def holds_operators(path: str | os.PathLike[str]) -> bool:
    """Return whether a file holds operators of lnrewrite."""
    return any(opset.domain == DOMAIN for opset in onnx.load(path, load_external_data=False).opset_import)


def does_not_run(name: str, why: Exception) -> LnrewriteError:
    """Make the error for a model that ONNX Runtime refuses."""
    text = f"it does not run: {str(why) or type(why).__name__}"
    return LnrewriteError(Code.LN520, f"model {name!r}", text, "see `lnrewrite explain LN520`")


def check_target(target: str) -> None:
    """Raise for a target that no session runs on, or not here."""
    if target not in PROVIDERS:
        unknown(Code.LN003, "target", target, PROVIDERS)
    if PROVIDERS[target] not in onnxruntime.get_available_providers():
        why = f"the installed onnxruntime has no {PROVIDERS[target]}"
        raise LnrewriteError(Code.LN520, f"target {target}", why, "pip install lnrewrite[gpu] on a machine with a GPU")
