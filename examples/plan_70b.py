"""Time what lnrewrite needs to see and to plan on a program of Llama-70B's shape, without its weights.

    python examples/plan_70b.py
    python examples/plan_70b.py --fit              # also at smaller depths, with a straight line through the times
    python examples/plan_70b.py --profile          # also where detection and planning spend their time

The network lives on the meta device, so that shapes are all there is: 80 layers of width 8192 cost a graph, not
140 GB. `capture` is torch.export's work; `detect` (the program's `network`, from the operator graph on) and `plan`
(fold-affine proposes its edits; nothing is applied) are lnrewrite's.
"""

import cProfile
import pstats
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lnrewrite import Pipeline, Program, capture
from lnrewrite.pipeline import Context


def build(layers: int) -> LlamaForCausalLM:
    """Build Llama-70B's shape with so many layers on the meta device."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


def plan(program: Program) -> int:
    """Let fold-affine propose; return how many edits it would make."""
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


def measure(layers: int, profile: bool) -> tuple[float, float, float]:
    """Print a row for one depth; return the seconds of capture, detection and planning."""
    model = build(layers)
    ids = torch.zeros((2, 16), dtype=torch.int64, device="meta")
    program, captured = timed("capture", lambda: capture(model, kwargs={"input_ids": ids}), False)

    def look() -> Any:
        for name in ("graph", "network"):  # forget both, so that a second call works again
            vars(program).pop(name, None)
        return program.network

    network, detected = timed("detect", look, profile)
    edits, planned = timed("plan", lambda: plan(program), profile)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform != "darwin" else 2**30)
    click.echo(
        f"{layers:>6}{len(program.graph.ops):>8}{len(network.blocks):>8}  {network.placement:<6}{edits:>6}"
        f"{captured:>10.2f}{detected:>10.3f}{planned:>10.4f}{peak:>9.2f}"
    )
    return captured, detected, planned


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=80, help="Layers of the program.")
@click.option("--fit", is_flag=True, help="Measure at several depths and fit seconds = a + b * layers.")
@click.option("--profile", is_flag=True, help="Print cProfile's view of detection and planning.")
def main(layers: int, fit: bool, profile: bool) -> None:
    """Print capture, detection and planning time in seconds, and the peak memory of the process in GiB."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    depths = (
        sorted({max(2, round(layers * share)) for share in (0.025, 0.25, 0.5, 0.75)} | {layers}) if fit else [layers]
    )
    click.echo("layers     ops  blocks  found  edits   capture    detect      plan peak GiB")
    rows = [measure(depth, profile and depth == layers) for depth in depths]
    if len(depths) > 1:
        for name, seconds in zip(("capture", "detect", "plan"), zip(*rows, strict=True), strict=True):
            slope, offset = np.polyfit(depths, seconds, 1)
            worst = np.abs(np.polyval((slope, offset), depths) - seconds).max()
            click.echo(f"{name:<8} {offset:+.4f} s {slope:+.5f} s per layer, off by at most {worst:.4f} s")


if __name__ == "__main__":
    main()
