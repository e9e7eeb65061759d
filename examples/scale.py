"""Time what lnrewrite needs to see and to plan on programs of Llama's shapes, without their weights.

    python examples/scale.py                       # the shapes of 8B, 70B and 405B
    python examples/scale.py --fit                 # 2 to 200 layers of the 70B shape, with a line through the times
    python examples/scale.py --only 70B --profile  # also where detection and planning spend their time

The network lives on the meta device, so that shapes are all there is: 126 layers of width 16384 cost a graph, not
810 GB. Each shape is measured in a process of its own. `capture` is torch.export's work; `detect` (the program's
`network`, from the operator graph on) and `plan` (fold-affine proposes its edits; nothing is applied) are lnrewrite's.
"""

import cProfile
import multiprocessing
import pstats
import resource
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lnrewrite import Pipeline, Program, capture
from lnrewrite.pipeline import Context

SHAPES = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64), "405B": (126, 16384, 53248, 128)}
"""Layers, width, width inside the MLP, and heads."""


def build(name: str, layers: int) -> LlamaForCausalLM:
    """Build one of Llama's shapes with so many layers on the meta device."""
    _, width, inside, heads = SHAPES[name]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inside, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


def plan(program: Program) -> int:
    """Make fold-affine propose; return how many edits it would make."""
    (item,) = Pipeline.parse("fold-affine").passes
    context = Context(program.network, dict, program.is_ones, program.is_zeros, program.values)
    return sum(len(item.propose(stream, context).edits) for stream in program.network.streams)


def timed(name: str, work: Callable[[], Any], profile: bool) -> tuple[Any, float]:
    """Run `work`; return its result and the seconds it took, and print its profile where that is asked for."""
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(work)
        click.echo(f"-- {name}, by cumulative time")
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("cumulative").print_stats(18)
    return result, seconds


def measure(name: str, layers: int, profile: bool = False) -> tuple[float, float, float]:
    """Print a row for one shape and depth; return the seconds of capture, detection and planning."""
    warnings.simplefilter("ignore")
    model = build(name, layers)
    ids = torch.zeros((2, 16), dtype=torch.int64, device="meta")
    program, captured = timed("capture", lambda: capture(model, kwargs={"input_ids": ids}), False)

    def look() -> Any:
        for known in ("graph", "network"):  # forget both, so that a second call works again
            vars(program).pop(known, None)
        return program.network

    network, detected = timed("detect", look, profile)
    edits, planned = timed("plan", lambda: plan(program), profile)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform != "darwin" else 2**30)
    click.echo(
        f"{name:<5}{layers:>6}{len(program.graph.ops):>8}{len(network.blocks):>8}  {network.placement:<6}{edits:>6}"
        f"{captured:>10.2f}{detected:>10.3f}{planned:>10.4f}{peak:>9.2f}"
    )
    return captured, detected, planned


@click.command(context_settings={"show_default": True})
@click.option("--only", type=click.Choice(list(SHAPES)), help="One shape instead of all.")
@click.option("--fit", is_flag=True, help="Measure 2 to 200 layers and fit seconds = a + b * layers.")
@click.option("--profile", is_flag=True, help="Print cProfile's view of detection and planning.")
def main(only: str | None, fit: bool, profile: bool) -> None:
    """Print capture, detection and planning time in seconds, and the peak memory of the process in GiB."""
    torch.set_num_threads(1)
    name = only or "70B"
    runs = (
        [(name, depth) for depth in (2, 10, 25, 50, 100, 200)]
        if fit
        else [(shape, SHAPES[shape][0]) for shape in ([only] if only else SHAPES)]
    )
    click.echo("shape layers     ops  blocks  found  edits   capture    detect      plan peak GiB")
    rows = []
    for shape, layers in runs:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            rows.append(apart.submit(measure, shape, layers, profile).result())
    if fit:
        depths = [layers for _, layers in runs]
        for what, seconds in zip(("capture", "detect", "plan"), zip(*rows, strict=True), strict=True):
            slope, offset = np.polyfit(depths, seconds, 1)
            worst = np.abs(np.polyval((slope, offset), depths) - seconds).max()
            click.echo(f"{what:<8} {offset:+.4f} s {slope:+.5f} s per layer, off by at most {worst:.4f} s")


if __name__ == "__main__":
    main()
