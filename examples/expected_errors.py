"""Compare what `lnrewrite probe` expects of conversions with what they do: rank correlations over models and blocks.

    python examples/expected_errors.py [MODEL DATA]...

Each model, and what it becomes in the other placements, is converted whole, with constants, to every other placement.
The measured error is how far the state behind each sum has turned (radians, root mean square over tokens); the expected
one is the root of the sum of squares of the expected errors of the blocks up to there. The last sum is left out: where
the final norm becomes its trunk norm, the two states behind it are not the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

import lnrewrite as lnr
from lnrewrite.probing.measuring import state_nodes, tokens_of
from lnrewrite.probing.probe import batches_of

PLACEMENTS = ("pre", "post", "peri", "output", "none")
BATCHES = 3


def states(program: lnr.Program, batches: Sequence[object], centered: bool) -> list[torch.Tensor]:
    """Return the direction of each token's state behind every sum: [tokens, channels] of length one."""
    nodes, held = state_nodes(program.network.streams[0])[1:], dict[str, list[torch.Tensor]]()
    with torch.no_grad():
        for batch in batches:
            program.observe(batch, {n for n, _ in nodes}, lambda name, value: held.setdefault(name, []).append(value))
    found = [torch.cat([tokens_of(v, axis) for v in held[name]]) for name, axis in nodes]
    found = [x - x.mean(-1, keepdim=True) if centered else x for x in found]
    return [x / x.norm(dim=-1, keepdim=True) for x in found]


def pairs(program: lnr.Program, batches: Sequence[object], to: str) -> Iterator[tuple[float, float]]:
    """Yield (expected, measured) for each sum of a conversion."""
    (stream, *_) = lnr.probe(program, batches, gradients=False).streams
    made = lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(program, batches, partial=True).program
    centered = any(site.norm.kind == "layer" for _, site in program.network.streams[0].sites())
    turned = zip(states(program, batches, centered), states(made, batches, centered), strict=True)
    errors = iter([(one - two).square().sum(-1).mean().sqrt().item() for one, two in turned])
    square, ends = 0.0, {s.after for s in stream.states[:-1]}
    for block in stream.blocks:
        square += block.expected_error.get(to, 0.0) ** 2
        if block.name in ends:
            yield square**0.5, next(errors)


def rank_correlation(rows: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation of pairs."""
    ranks = [np.argsort(np.argsort(column)) for column in zip(*rows, strict=True)]
    return float(np.corrcoef(*ranks)[0, 1])


def main(given: Sequence[str]) -> None:
    """Print the rank correlation of each placement, over all models and sums."""
    models = list(zip(given[::2], given[1::2], strict=True)) or [("demo:tinygpt", "lnrewrite.demo:calibration")]
    rows: dict[str, list[tuple[float, float]]] = {to: [] for to in PLACEMENTS}
    for name, data in models:
        first = lnr.load(name)
        batches = batches_of(first, data, 0)[:BATCHES]
        for start in PLACEMENTS:
            if start != first.network.placement:
                pipeline = lnr.Pipeline.parse(f"place{{to={start} fit=constants}}")
                program = pipeline.run(first, batches, partial=True).program
            else:
                program = first
            for to in PLACEMENTS:
                if to != start:
                    rows[to] += pairs(program, batches, to)
            print(f"{name} as {start}", file=sys.stderr)
    for to, found in rows.items():
        print(f"to {to:6}  rank correlation {rank_correlation(found):.2f} over {len(found)} sums")


if __name__ == "__main__":
    main(sys.argv[1:])
