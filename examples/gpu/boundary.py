"""Time the boundary of Peri-LN (norm, add, norm) in every form that ONNX Runtime can run, beside what copying costs.

    lnrewrite kernels build
    python examples/gpu/boundary.py                                    # on a CUDA machine, some five minutes
    python examples/gpu/boundary.py --target cpu --dtypes fp32,fp16    # the same on a CPU

A graph chains boundaries, h and z of one being x and f of the next, so that launches and not sessions are timed.
Forms: `fused` one kernel (lnrewrite::NormAddNorm), `two` a norm and a Skip* with its sum, `three` norm, Add, norm,
`plain` norms in the primitives that torch.onnx writes; of a Pre-LN boundary, `pre` Skip*, `apart` Add and norm. On CUDA
they replay CUDA graphs on bound memory, timed by events; forms take turns in an order shuffled anew every round.
`limit` is how long copying as many bytes as `fused` moves (4 tensors) takes on that device.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from lnrewrite import LnrewriteError
from lnrewrite.kernels.library import register
from lnrewrite.runtime.sessions import PROVIDERS

FORMS = ("fused", "two", "three", "plain", "pre", "apart")
TYPES = {
    "fp32": (TensorProto.FLOAT, torch.float32), "fp16": (TensorProto.FLOAT16, torch.float16),
    "bf16": (TensorProto.BFLOAT16, torch.bfloat16),
}  # fmt: skip
EPS = 1e-6
RMS = "SimplifiedLayerNormalization"
Timer = Callable[[], float]
Times = dict[str, list[float]]


def chain(form: str, norm: str, hidden: int, dtype: int, boundaries: int) -> bytes:
    """Build f, x -> `boundaries` times (h, z = boundary(f, x); f, x = z, h)."""
    layer = norm == "layer"
    name, skip = ("LayerNormalization", "SkipLayerNormalization") if layer else (RMS, f"Skip{RMS}")
    bias = ["b"] if layer else []
    nodes: list[onnx.NodeProto] = []

    def op(kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def normed(value: str, made: str) -> str:
        if form != "plain" or layer:  # torch.onnx has an operator for LayerNorm
            return op(name, [value, "g", *bias], [made], axis=-1, epsilon=EPS)
        wide = value if dtype == TensorProto.FLOAT else op("Cast", [value], [f"{made}_c"], to=TensorProto.FLOAT)
        square = op("Mul", [wide, wide], [f"{made}_s"])
        mean = op("ReduceMean", [square, "last"], [f"{made}_m"], keepdims=1)
        root = op("Sqrt", [op("Add", [mean, "eps"], [f"{made}_e"])], [f"{made}_q"])
        scaled = op("Mul", [wide, op("Reciprocal", [root], [f"{made}_r"])], [f"{made}_w"])
        scaled = scaled if dtype == TensorProto.FLOAT else op("Cast", [scaled], [f"{made}_n"], to=dtype)
        return op("Mul", ["g", scaled], [made])

    f, x = "f", "x"
    for i in range(boundaries):
        h, z = ("h", "z") if i == boundaries - 1 else (f"h{i}", f"z{i}")
        if form == "fused":
            given = {"eps_out": EPS, "eps_in": EPS, "layernorm": int(layer)}
            op("NormAddNorm", [f, x, "g", "g", *bias, *bias], [h, z], "lnrewrite", **given)
        elif form in ("two", "pre"):
            branch = normed(f, f"p{i}") if form == "two" else f
            op(skip, [branch, x, "g", *bias], [z, "", "", h], "com.microsoft", epsilon=EPS)
        else:
            op("Add", [f if form == "apart" else normed(f, f"p{i}"), x], [h])
            normed(h, z)
        f, x = z, h
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    held = [onnx.numpy_helper.from_array(np.full(hidden, v).astype(kind), n) for n, v in (("g", 1.1), ("b", 0.1))]
    held += [onnx.numpy_helper.from_array(np.array([-1]), "last"), onnx.numpy_helper.from_array(np.float32(EPS), "eps")]
    ends = {n: helper.make_tensor_value_info(n, dtype, ["tokens", 1, hidden]) for n in "fxhz"}
    graph = helper.make_graph(nodes, "chain", [ends["f"], ends["x"]], [ends["h"], ends["z"]], held)
    imports = [helper.make_opsetid(d, v) for d, v in (("", 18), ("com.microsoft", 1), ("lnrewrite", 1))]
    made: bytes = helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
    return made


def timed(work: Callable[[], object], inner: int, stream: torch.cuda.Stream | None) -> float:
    """Return the microseconds that `work` takes, the mean of `inner` runs one after the other, queued on a stream."""
    if stream is None:
        start = time.perf_counter()
        for _ in range(inner):
            work()
        return (time.perf_counter() - start) / inner * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        work()
        begin.record(stream)
        for _ in range(inner):
            work()
        end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / inner


def in_turn(forms: Mapping[str, Callable[[], Any]], rounds: int, inner: int) -> tuple[dict[str, Any], Times]:
    """Open forms, which have `once`, and time them in turn, in an order shuffled anew every round; say which fail."""
    models: dict[str, Any] = {}
    for form, opened in forms.items():
        try:
            models[form] = opened()
        except Exception as why:  # ONNX Runtime has no common base class of its errors
            click.echo(f"{form}: {' '.join(str(why).split())[:300]}", err=True)
    taken: Times = {form: [] for form in models}
    for _ in range(rounds):
        for form in random.sample(list(models), len(models)):
            taken[form].append(models[form].once(inner))
    return models, taken


class Machine:
    """Open sessions on one device and time them."""

    def __init__(self, target: str, threads: int) -> None:
        self.cuda, self.threads = target == "cuda", threads
        self.device = "cuda" if self.cuda else "cpu"
        self.stream = torch.cuda.Stream() if self.cuda else None

    def name(self) -> str:
        """Return the device and the versions of what runs on it."""
        device = torch.cuda.get_device_name() if self.cuda else f"CPU, {self.threads} threads"
        return f"{device}; onnxruntime {onnxruntime.__version__}, torch {torch.__version__}"

    def memory(self, tokens: int, hidden: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the inputs and outputs of a chain, which all forms use."""
        return {n: torch.randn(tokens, 1, hidden, device=self.device).to(dtype) for n in "fxhz"}

    def timer(self, content: bytes, held: dict[str, torch.Tensor], kind: int, inner: int) -> Timer:
        """Return what runs a chain `inner` times on this memory and gives the microseconds of one run."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        options.add_session_config_entry("session.force_spinning_stop", "1")  # the other sessions need the cores
        register(options, "the chain", self.cuda)
        more: dict[str, str] = {}
        if self.cuda:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            more = {"enable_cuda_graph": "1", "user_compute_stream": str(self.stream.cuda_stream)}
        session = onnxruntime.InferenceSession(content, options, providers=[(PROVIDERS[self.device], more)])
        binding, run = session.io_binding(), onnxruntime.RunOptions()
        for n, value in held.items():
            bind = binding.bind_input if n in "fx" else binding.bind_output
            bind(n, self.device, 0, kind, list(value.shape), value.data_ptr())
        if self.cuda:
            run.add_run_config_entry("disable_synchronize_execution_providers", "1")

        def once() -> float:
            return timed(lambda: session.run_with_iobinding(binding, run), inner, self.stream)

        for _ in range(3):
            once()
        return once

    def limit(self, held: dict[str, torch.Tensor], inner: int) -> Timer:
        """Return what copies f and x to h and z: two read and two written, as the fused boundary does."""
        torch.set_num_threads(self.threads)
        return lambda: timed(lambda: (held["h"].copy_(held["f"]), held["z"].copy_(held["x"])), inner, self.stream)


def measure(machine: Machine, norm: str, hidden: int, tokens: int, dtype: str, rounds: int, count: int) -> dict:
    """Time every form at one size; return medians in microseconds of one boundary, and quartiles of the ratios."""
    kind = TYPES[dtype]
    inner = max(1, min(50, 20_000_000 // (tokens * hidden * count)))
    timers, held = {}, machine.memory(tokens, hidden, kind[1])
    for form in FORMS:
        try:
            timers[form] = machine.timer(chain(form, norm, hidden, kind[0], count), held, kind[0], inner)
        except LnrewriteError:
            raise
        except Exception as why:  # ONNX Runtime has no common base class of its errors; a CPU has few bfloat16 kernels
            click.echo(f"{form} {dtype}: {str(why).splitlines()[0][:100]}", err=True)
    timers["limit"] = machine.limit(held, inner)
    taken: dict[str, list[float]] = {form: [] for form in timers}
    for _ in range(rounds):
        for form in random.sample(list(timers), len(timers)):
            taken[form].append(timers[form]() / (1 if form == "limit" else count))
    row: dict[str, Any] = {"norm": norm, "hidden": hidden, "tokens": tokens, "dtype": dtype}
    row["us"] = {form: statistics.median(times) for form, times in taken.items()}
    pairs = {form: [a / b for a, b in zip(times, taken["fused"], strict=True)] for form, times in taken.items()}
    row["ratio"] = {form: [float(q) for q in np.percentile(values, (25, 50, 75))] for form, values in pairs.items()}
    return row


def table(rows: list[dict]) -> None:
    """Print one line for each size: microseconds fused, the others relative to it, the share of copying's speed."""
    others = [form for form in FORMS if form != "fused"]
    click.echo(f"| norm | dtype | hidden | tokens | fused us | {' | '.join(others)} | of copying |")
    click.echo("|" + "---|" * (len(others) + 6))
    for row in rows:
        cells = [row["norm"], row["dtype"], row["hidden"], row["tokens"], f"{row['us']['fused']:.2f}"]
        cells += [f"{row['ratio'][form][1]:.2f}" if form in row["ratio"] else "-" for form in others]
        click.echo("| " + " | ".join(map(str, [*cells, f"{row['ratio']['limit'][1]:.0%}"])) + " |")


def numbers(text: str) -> list[int]:
    """Read numbers with commas between them."""
    return [int(n) for n in text.split(",")]


@click.command(context_settings={"show_default": True})
@click.option("--target", default="cuda", type=click.Choice(["cuda", "cpu"]), help="Where to run.")
@click.option("--threads", default=1, help="Of the CPU.")
@click.option("--norms", default="rms,layer", help="Kinds of norms.")
@click.option("--dtypes", default="bf16,fp16", help="fp32, fp16, bf16.")
@click.option("--hidden", default="768,2048,4096,8192", help="Widths.")
@click.option("--tokens", default="1,16,256,4096,16384", help="Rows.")
@click.option("--rounds", default=15, help="Times that every form has its turn.")
@click.option("--chain", "count", default=16, help="Boundaries of a graph.")
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file for all figures.")
def main(
    target: str,
    threads: int,
    norms: str,
    dtypes: str,
    hidden: str,
    tokens: str,
    rounds: int,
    count: int,
    out: Path | None,
) -> None:
    """Print the table."""
    random.seed(0)
    torch.manual_seed(0)
    machine, rows, started = Machine(target, threads), [], time.perf_counter()
    for norm in norms.split(","):
        for dtype in dtypes.split(","):
            for width in numbers(hidden):
                for n in numbers(tokens):
                    rows.append(measure(machine, norm, width, n, dtype, rounds, count))
                    click.echo(f"{len(rows)} {norm} {dtype} {width} {n}", err=True)
                    if out:
                        out.write_text(json.dumps({"machine": machine.name(), "rows": rows}, indent=1))
    click.echo(machine.name())
    table(rows)
    click.echo(f"\n{rounds} rounds, chains of {count}, {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
