"""`lnrewrite kernels`: build the library of lnrewrite's own operators."""

from __future__ import annotations

import click

from .console import show
from .options import Screen, options


@click.group(invoke_without_command=True)
@click.pass_context
def kernels(context: click.Context) -> None:
    """Build lnrewrite's own operators for ONNX Runtime (export --fuse custom)."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@kernels.command()
@click.option("-o", "--output", metavar="FILE", help="The library; default: where sessions look for it.")
@click.option("--cuda/--no-cuda", default=None, help="With or without CUDA; default: with it where nvcc is found.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@options()
def build(output: str | None, cuda: bool | None, force: bool, screen: Screen) -> None:
    """Compile the library of operators with the C++ compiler, and nvcc, that are here."""
    if output is not None:
        from ..files.output import check_output

        check_output(output, force)
    with screen.working("compiling"):
        from ..kernels.building import build as compiled

        found = compiled(output, cuda=cuda)
    row = {"library": str(found.library), "compiler": found.compiler, "nvcc": found.nvcc}
    built = f"{found.library}\nfor the CPU, " + (f"and for CUDA by {found.nvcc}" if found.nvcc else "not for CUDA")
    screen.answer(row, lambda: built, "")
