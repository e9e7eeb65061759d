"""Store the weights of products in few bits, by ONNX Runtime's own quantizers, and say what that costs.

int4: MatMulNBits, blocks of 32 numbers of a column with a scale each, which are computed with as floats. int8: a scale
for each column, and what they multiply is rounded to 8 bits too, at each run. All else stays as it was chosen.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir

from ..backends.onnx.file import write
from ..backends.onnx.packing import turn_weights
from ..backends.onnx.session import runnable
from ..backends.onnx.sizes import bytes_of
from ..comparison.verifying import measured
from ..errors import Code, LnrewriteError, UsageError, told, unknown
from ..pipeline.protocols import Batch
from ..pipeline.results import Drift
from ..quiet import mute
from .exportable import Exportable
from .targets import TARGETS

KINDS = ("int4", "int8")
BLOCK = 32
"""How many numbers of a column share a scale at int4."""
DRAWS = 4
"""How many draws of each kind of made-up call the loss is measured on."""
COUNTED = {"int4": "MatMulNBits", "int8": "MatMulInteger"}


@dataclass(frozen=True, slots=True)
class Quantized:
    """Hold a model with its weights in few bits, what it lost against its program, and what a user should know."""

    model: ir.Model
    loss: Drift | None
    notes: tuple[str, ...]


def check_quantizing(kind: str | None, target: str, dtype: str) -> None:
    """Raise UsageError LN003 for a kind that there is not, or a target or dtype that it is not for."""
    if kind is None:
        return
    if kind not in KINDS:
        unknown(Code.LN003, "kind of quantization", kind, KINDS)
    if not TARGETS[target].contrib:
        why = "its operators are ONNX Runtime's"
        raise UsageError(Code.LN003, f"{kind}, target {target}", why, "give the target cpu or cuda")
    if kind == "int8" and (target, dtype) != ("cpu", "fp32"):
        why = "ONNX Runtime rounds float32 to 8 bits, on the CPU"
        raise UsageError(Code.LN003, f"int8, target {target}, dtype {dtype}", why, "give cpu and fp32, or int4")


def quantized(model: ir.Model, kind: str, program: Exportable | None) -> Quantized:
    """Return a model with the weights of its products quantized; program: what it computes, None to measure nothing.

    The loss is measured on made-up calls, and by generating where the program generates. Raises LnrewriteError LN502
    where there are no such products, or the quantizer fails.
    """
    before = bytes_of(model)
    turn_weights(model)
    try:
        made = _made(model, kind)
    except Exception as error:  # code of others, on any graph
        why = f"ONNX Runtime's quantizer fails: {told(error)}"
        raise LnrewriteError(Code.LN502, kind, why, f"export it without --{kind}") from error
    counts = Counter(node.op_type for node in made.graph)
    if not counts[COUNTED[kind]]:
        why = "no product of it has stored weights"
        raise LnrewriteError(Code.LN502, kind, why, f"export it without --{kind}")
    left = sum(node.op_type in ("MatMul", "Gemm") and _weighed(node) for node in made.graph)
    share = f"the file's weights take {bytes_of(made) / before:.0%} of the bytes they took"
    notes = [f"{kind}: {counts[COUNTED[kind]]} products by {COUNTED[kind]}, {left} more have weights; {share}"]
    if program is None:
        return Quantized(made, None, tuple(notes))
    candidate = runnable(made)
    batches = [batch for seed in range(DRAWS) for batch in program.trials(seed) if _takes(program, batch)]
    loss = replace(measured(program, candidate, batches, held_out=True), data="synthetic")
    notes += [f"{kind}: {note}" for note in program.tried(candidate, math.inf)]
    return Quantized(made, loss, tuple(notes))


def _takes(program: Exportable, batch: Batch) -> bool:
    """Return whether a program takes a call: relations between free sizes are not known."""
    try:
        program.call(batch)
    except LnrewriteError:
        return False
    return True


def _weighed(node: ir.Node) -> bool:
    """Return whether a product's second factor is stored."""
    return len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1].const_value is not None


def _made(model: ir.Model, kind: str) -> ir.Model:
    """Return what ONNX Runtime's quantizer makes of a model, which it reads from a file."""
    with tempfile.TemporaryDirectory(prefix="lnrewrite-") as place:
        path = Path(place) / "model.onnx"
        write(model, path)
        with mute():
            return ir.from_proto(_int4(path) if kind == "int4" else _int8(path))


def _int4(path: Path) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(str(path), bits=4, block_size=BLOCK, is_symmetric=True)
    quantizer.process()
    return quantizer.model.model


def _int8(path: Path) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = path.with_name("quantized.onnx")
    quantize_dynamic(
        path, made, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
        use_external_data_format=True,
    )  # fmt: skip
    return onnx.load(made)
