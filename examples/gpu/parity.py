"""Compare the kernels with float64 on this machine: every type, both norms, odd widths and wide ones.

    lnrewrite kernels build
    python examples/gpu/parity.py [--target cpu]

Prints, for lnrewrite::NormAddNorm and NormAdd in ONNX Runtime and, on CUDA, for lnrewrite.norm_add_norm in torch
(Triton), the largest error relative to the largest output, and the share of numbers whose last bit differs from
float64 rounded where the unfused operators round. Exits with 1 where an error is beyond 4 units in the last place.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import click
import onnxruntime
import torch
from onnx import TensorProto, helper

import lnrewrite as lnr
from lnrewrite.kernels.library import register
from lnrewrite.runtime.sessions import PROVIDERS

WIDTHS = (1, 7, 64, 768, 1000, 2048, 4096, 8192, 8193, 16384, 40000)
TYPES = {
    "float32": (TensorProto.FLOAT, torch.float32), "float16": (TensorProto.FLOAT16, torch.float16),
    "bfloat16": (TensorProto.BFLOAT16, torch.bfloat16),
}  # fmt: skip
EPS = 1e-6
Tensors = dict[str, torch.Tensor]


def exact(given: Tensors, layer: bool) -> list[torch.Tensor]:
    """Compute h, and z where there is a second gain, in float64, rounded where the unfused operators round."""
    dtype = given["f"].dtype

    def normed(v: torch.Tensor, end: str) -> torch.Tensor:
        v = v - v.mean(-1, keepdim=True) if layer else v
        v = v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() * given[f"g_{end}"].double()
        v = v + given[f"b_{end}"].double() if f"b_{end}" in given else v
        return v.to(dtype).double()

    h = (normed(given["f"].double(), "out") + given["x"].double()).to(dtype).double()
    return [h, normed(h, "in")] if "g_in" in given else [h]


def in_onnxruntime(given: Tensors, layer: bool, device: str) -> list[torch.Tensor]:
    """Run the operator in ONNX Runtime on this device."""
    kind = next(k for k, t in TYPES.values() if t == given["f"].dtype)
    both = "g_in" in given
    outputs = ["h", "z"] if both else ["h"]
    attributes: dict[str, Any] = {"eps_out": EPS, "layernorm": int(layer)} | ({"eps_in": EPS} if both else {})
    name = "NormAddNorm" if both else "NormAdd"
    node = helper.make_node(name, list(given), outputs, domain="lnrewrite", **attributes)
    ends = [helper.make_tensor_value_info(n, kind, list(v.shape)) for n, v in given.items()]
    made = [helper.make_tensor_value_info(n, kind, list(given["f"].shape)) for n in outputs]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("lnrewrite", 1)]
    model = helper.make_model(helper.make_graph([node], "g", ends, made), opset_imports=imports, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    register(options, name, device == "cuda")
    if device == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[PROVIDERS[device]])
    results = {n: torch.empty_like(given["f"]) for n in outputs}
    binding = session.io_binding()
    for n, value in {**given, **results}.items():
        bind = binding.bind_input if n in given else binding.bind_output
        bind(n, device, 0, kind, list(value.shape), value.data_ptr())
    session.run_with_iobinding(binding)
    return list(results.values())


def in_torch(given: Tensors, layer: bool, device: str) -> list[torch.Tensor]:
    """Run the operator of torch: Triton on a GPU."""
    names = ("f", "x", "g_out", "g_in", "b_out", "b_in")
    with torch.no_grad():
        values = [given.get(n) for n in names]
        return list(lnr.norm_add_norm(*values, eps_out=EPS, eps_in=EPS, layernorm=layer))


@click.command()
@click.option("--target", default="cuda", type=click.Choice(["cuda", "cpu"]), show_default=True)
def main(target: str) -> None:
    """Print the table of errors."""
    click.echo("| runs in | type | norm | largest error | units in the last place | bits that differ |")
    click.echo("|---|---|---|---|---|---|")
    wrong = False
    for (name, (_, dtype)), layer, run in itertools.product(TYPES.items(), (False, True), (in_onnxruntime, in_torch)):
        worst, differ = 0.0, 0.0
        for width, biases, both in itertools.product(WIDTHS, (False, True), (True, False)):
            if run is in_torch and not both:
                continue
            torch.manual_seed(width)
            ends = ("out", "in") if both else ("out",)
            given = {n: torch.randn(3, 5, width) for n in "fx"}
            given |= {f"g_{end}": 1 + 0.3 * torch.randn(width) for end in ends}
            given |= {f"b_{end}": torch.randn(width) for end in ends if biases}
            given = {n: v.to(dtype).to(target) for n, v in given.items()}
            for got, right in zip(run(given, layer, target), exact(given, layer), strict=True):
                error = (got.double() - right).abs().max() / (right.abs().max() + EPS)
                worst = max(worst, float(error))
                differ = max(differ, float((got.double() != right).double().mean())) if width >= 64 else differ
        units = worst / torch.finfo(dtype).eps
        wrong = wrong or not units <= 4
        where = run.__name__.removeprefix("in_")
        share = f"{differ:.2%}" if dtype != torch.float32 else ""
        click.echo(f"| {where} | {name} | {'layer' if layer else 'rms'} | {worst:.1e} | {units:.1f} | {share} |")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
