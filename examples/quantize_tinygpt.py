"""Measure what 8-bit activations cost demo:tinygpt, with and without `--preset quantize`, in nats per byte.

    python examples/quantize_tinygpt.py [--limit 16000] [--outliers 40] [--threads 1]

Every linear map's input is rounded to 8 bits with one scale for the whole tensor (the largest absolute value / 127),
as a per-tensor quantiser does. Large trained models have channels far larger than the others; the demo has none, so a
copy is given some, exactly: in two channels of each norm the gain is multiplied and the columns of the linears that
read it are divided by the same number. The preset is exact too: the loss without rounding stays.
"""

from __future__ import annotations

from typing import Any

import click
import torch
from torch import nn

import lnrewrite as lnr
from lnrewrite import demo
from lnrewrite.probing.outliers import rounded

CHANNELS = (17, 90)


class Rounded(torch.overrides.TorchFunctionMode):
    """Round the input of every linear map to 8 bits, one scale per tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linear.default:
            args = (rounded(args[0], args[0].abs().max()), *args[1:])
        return func(*args, **(kwargs or {}))


def with_outliers(model: nn.Module, size: float) -> nn.Module:
    """Return the model with two channels behind each norm `size` times as large, and the same outputs."""
    with torch.no_grad():
        for block in model.blocks:
            for norm, reader in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.up)):
                for channel in CHANNELS:
                    norm.weight[channel] *= size
                    norm.bias[channel] *= size
                    reader.weight[:, channel] /= size
    return model


@click.command(context_settings={"show_default": True})
@click.option("--limit", default=16000, help="Bytes of held-out text to measure on.")
@click.option("--outliers", default=40.0, help="How much larger the outlying channels of the copy are.")
@click.option("--threads", default=1, help="CPU threads.")
def main(limit: int, outliers: float, threads: int) -> None:
    """Print the loss in float32 and what 8-bit activations add to it."""
    torch.set_num_threads(threads)
    text, data = demo.heldout_text(), demo.calibration(batches=2, seed=0)
    click.echo(f"{'model':<24}{'float32':>10}{'8 bits':>10}")
    for name, size in (("demo:tinygpt", 1.0), (f"with outliers x{outliers:g}", outliers)):
        program = lnr.capture(with_outliers(demo.load("tinygpt"), size), kwargs=data[0])
        turned = lnr.Pipeline.preset("quantize").run(program, partial=True).program
        for label, module in ((name, program.module()), ("  preset quantize", turned.module())):
            plain = demo.loss(module, text, limit=limit)
            with Rounded():
                rounded = demo.loss(module, text, limit=limit)
            click.echo(f"{label:<24}{plain:>10.4f}{rounded - plain:>+10.4f}")


if __name__ == "__main__":
    main()
