"""What commands share: options, opening a MODEL, and looking at DATA and OUT before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Code, LnrewriteError, UsageError
from ..files.output import named_path
from .console import remark

if TYPE_CHECKING:
    from ..models.onnx_program import OnnxProgram
    from ..models.program import Program
    from ..pipeline.protocols import Batch
    from ..pipeline.report import Report

SEED = click.IntRange(0, 2**63 - 1)
"""What torch's and numpy's generators take."""

OUT = "What to write: .pt2, .onnx, or of a checkpoint folder a folder."


def options(*, model: bool = False, writes: bool = False) -> Callable[[Any], Any]:
    """Add the options that commands share."""

    def add(function: Any) -> Any:
        options = [
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."),
            click.option("-q", "--quiet", is_flag=True, help="No report, no progress; inspect, verify: one word."),
            click.option("-v", "--verbose", is_flag=True, help="Print more, and the traceback of a fault."),
        ]
        if model:
            options += [
                click.option(
                    "--input", "inputs", multiple=True, metavar="SPEC", help="name=dtype[d0,d1], or .npz/.pt."
                ),
                click.option(
                    "--factory", metavar="PKG.MODULE:CALLABLE", help="Builds the network that a weight file needs."
                ),
                click.option("--trust-pickle", is_flag=True, help="Allow a file to run code while it is loaded."),
                click.option("--trust-remote-code", is_flag=True, help="Allow a checkpoint folder's own Python code."),
                click.option("--device", default="cpu", show_default=True, help="Where to run the model."),
                click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything random."),
            ]
        if writes:
            options += [
                ACCEPT,
                click.option(
                    "--calibrate", metavar="DATA", help=".npz .npy .pt .safetensors .txt or pkg.module:iterable."
                ),
                click.option("--no-verify", is_flag=True, help="Do not run what exact passes made against the model."),
                click.option("--partial", is_flag=True, help="Write what could be done; exit with 3 if not all."),
                click.option("--force", is_flag=True, help="Overwrite OUT: a file, or a folder of a checkpoint alone."),
            ]
        for option in reversed(options):
            function = option(function)
        return function

    return add


ACCEPT = click.option(
    "--accept-fixed-paths", "accept", is_flag=True, help="Write a model that chooses by its data on one path."
)


def check_paths(model: str, program: Program | OnnxProgram | Report, accept: bool) -> None:
    """Raise LN033 where a capture fixed what the model chooses by its data, and nobody said that this will do."""
    if program.fixed_paths and not accept:
        why = f"it chooses its path by its data, and the capture follows one: {program.fixed_paths[0]}"
        remedy = "give --accept-fixed-paths if inputs that take another path never come, or use torch.where"
        raise LnrewriteError(Code.LN033, f"model {model!r}", why, remedy)


def opened(model: str, inputs: tuple[str, ...], device: str, **how: Any) -> Program | OnnxProgram:
    """Open and capture MODEL; what it is and whether the device exists is looked at first."""
    from ..loading.identify import identify

    identify(model)
    check_device(device)
    from ..api import load

    return load(model, inputs=list(inputs) or None, device=device, **how)


def check_device(device: str) -> None:
    """Raise UsageError LN003 where torch cannot put a tensor on the device."""
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as why:
        raise UsageError(
            Code.LN003, f"device {device!r}", str(why), "give cpu, or a device that torch sees here"
        ) from why


def target_of(output: str, force: bool, default: str = ".pt2") -> Path:
    """Return the file to write, `default` where it has no suffix. Raises LN025 where it cannot be written."""
    from ..files.output import check_output, output_named

    return check_output(output_named(output, default), force)


def tell_name(output: str | None, target: Path | None) -> None:
    """Print under which name OUT was written where that is not the name that was given."""
    if target is not None and output is not None and Path(output) != target:
        remark(f"note: {output} has no suffix: it is written as {target}")


def check_data(calibrate: str | None) -> None:
    """Raise LN022 where DATA is plainly missing: told before the model is captured."""
    if calibrate is not None and ":" not in calibrate and not os.path.isfile(named_path(calibrate)):
        remedy = "check the path, or name pkg.module:iterable"
        raise LnrewriteError(Code.LN022, f"data {calibrate!r}", "there is no such file", remedy)


def feed_of(calibrate: str | None, seed: int) -> Callable[[Any], list[Batch] | None]:
    """Return what reads --calibrate for a program."""
    if calibrate is None:
        return lambda program: None
    from ..data.batches import calibration_for

    return lambda program: [*calibration_for(program, calibrate, seed)]
