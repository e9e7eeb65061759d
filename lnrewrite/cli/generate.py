"""`lnrewrite generate`: run a folder that `export` wrote."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial

import click

from ..files.output import named_path
from .console import show
from .options import Screen, options


@click.command()
@click.argument("folder")
@click.argument("prompt")
@click.option("--max-new-tokens", "most", type=click.IntRange(1), default=64, show_default=True, help="At most these.")
@click.option("--engine", default="auto", show_default=True, help="genai, session, or auto: genai where it is there.")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads of an operator.")
@options()
def generate(folder: str, prompt: str, most: int, engine: str, threads: int | None, screen: Screen) -> None:
    """Continue PROMPT, greedily, with the model of FOLDER, which `export CHECKPOINT -o FOLDER` writes."""
    from ..models.checks import need_onnx
    from ..runtime.generating import generate as run

    need_onnx("generate")
    streams = None if screen.as_json else partial(show, end="")
    found = run(named_path(folder), prompt, most=most, engine=engine, threads=threads, told=streams)
    if screen.as_json:
        show(json.dumps(asdict(found)))
        return
    show("")
    if not screen.quiet:
        speed = f"{found.tokens_per_second:.1f} per second" if found.tokens_per_second else "alone"
        click.echo(f"{len(found.tokens)} tokens, {speed} ({found.engine})", err=True)
