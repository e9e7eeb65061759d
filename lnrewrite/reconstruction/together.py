"""Train the branches of a converted model together, so that it follows the original from end to end.

Fitted one after the other, a branch makes good what those before it left over as far as its own weights can, and they
move by half of their size. Together, changes of a few per cent do more (docs/results/conversion.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx
from torch.func import functional_call

from ..backends.torch.feeding import flat_inputs
from ..backends.torch.module import CapturedModule
from ..backends.torch.widened import in_float32, is_narrow, raised
from ..layout import clock
from ..pipeline.protocols import Batch
from ..pipeline.shares import anywhere, everyone, processes, total
from ..quiet import LOGGER
from .followed import Followed, tamed
from .schedule import share

STEPS, TOKENS, EPOCHS = 1024, 7, 4
"""A step is made for so many tokens; but the data are gone through so often, at least. From `STEPS` steps on, eight
times the tokens make twice the steps."""
MATRICES, VECTORS, LEAST = 0.012, 0.012, 0.1
"""A step of a matrix over its root mean square; of a vector likewise, but as if its own were `LEAST` at least."""
SWAPPED, DRAWN = 0.1, 0.005
"""The shares of tokens in whose place another stands while training: one of the batch, or any that the model knows."""
ENOUGH = 100
"""In fewer steps than these, tokens of the whole table are not learned, and only in the way."""
WARMUP = 20
"""The steps in which the rate rises."""
SAY = 32
"""Steps between two lines of progress."""
LARGEST = 2**28
"""Models of more parameters are fitted branch by branch alone: here all are in memory, three times over."""

States = Callable[[Mapping[str, Tensor], Sequence[object]], list[Tensor]]
"""Gives the values of a model's nodes, for some parameters and a batch."""
Pair = tuple[list[object], list[object], Batch]
"""A batch as both models take it, and as it was given."""


@dataclass(frozen=True)
class Trained:
    """Hold new values of parameters, and the error on held-out data before and after."""

    values: Mapping[str, Tensor]
    before: float
    after: float


@dataclass
class Together:
    """Train parameters of `made` on the batches of `fit`; what comes of it is kept where it helps on those of `held`.

    A step learns from one batch of each process, so that many make fewer steps where the data are gone through in them.
    tokens: how many there are to fit on. tables: how many rows the table of an input of the original has.
    """

    original: CapturedModule
    made: CapturedModule
    followed: Followed
    names: Collection[str]
    fit: Sequence[Batch]
    held: Sequence[Batch]
    tokens: int
    tables: Mapping[str, int]

    def run(self) -> Trained:
        """Return what the training gave, or no values where it did not help. The models stay as they are."""
        known = dict(self.made.named_parameters())
        start = {n: known[n].detach() for n in self.names}
        start = {n: p.to(torch.promote_types(p.dtype, torch.float32)) for n, p in start.items()}
        measured = self.held if anywhere(self.held) else self.fit
        fit, held = ([self._pair(b) for b in batches] for batches in (self.fit, measured))
        before, leaves = self._mean(start, held), {n: v.clone().requires_grad_() for n, v in start.items()}
        optimizer = torch.optim.AdamW([group(v) for v in leaves.values()], betas=(0.9, 0.95), weight_decay=0.0)
        many = self.tokens // TOKENS
        steps = max(min(many, round(STEPS * (many / STEPS) ** (1 / 3))), EPOCHS * max(everyone(len(fit))))
        started, tables = time.perf_counter(), self._rows(steps)
        for step in range(steps):
            loss = self._taught(leaves, fit[order(step, len(fit))], step, tables)
            if not math.isfinite(total(loss.item())):
                continue
            slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            for leaf, slope in zip(leaves.values(), slopes, strict=True):
                leaf.grad = None if slope is None else total(slope) / processes()
            for row in optimizer.param_groups:
                row["lr"] = row["initial_lr"] * share(step, steps, WARMUP)
            optimizer.step()
            if step % SAY == SAY - 1:
                left = clock((time.perf_counter() - started) * (steps / (step + 1) - 1))
                LOGGER.info(f"together {step + 1}/{steps}: error {loss.item():.2g}, some {left} left")
        found = {n: v.detach() for n, v in leaves.items()}
        after = self._mean(found, held)
        return Trained(found, before, after) if after < before else Trained({}, before, before)

    def _taught(self, parameters: Mapping[str, Tensor], batch: Pair, step: int, tables: Sequence[int]) -> Tensor:
        """Return the error on a batch, varied unless that is no input: each place may have its own table."""
        if (other := varied(batch, step, tables)) is not batch:
            try:
                return self._error(parameters, other, tamed)
            except (RuntimeError, IndexError):
                pass
        return self._error(parameters, batch, tamed)

    def _error(self, parameters: Mapping[str, Tensor], batch: Pair, over: Callable[[Tensor], Tensor]) -> Tensor:
        """Return how far a model with some parameters is from the original on one batch, `over` tokens."""
        with torch.no_grad():
            theirs = self._runs[0]({}, batch[0])
        return self.followed.error(theirs, self._runs[1](parameters, batch[1]), batch[2], over)

    @torch.no_grad()
    def _mean(self, parameters: Mapping[str, Tensor], batches: Sequence[Pair]) -> float:
        errors = [float(self._error(parameters, b, torch.mean)) for b in batches]
        return total(float(sum(errors))) / total(len(errors))

    @cached_property
    def _runs(self) -> tuple[States, States]:
        theirs, mine = self.followed.nodes
        return states_of(self.original, theirs), states_of(self.made, mine)

    def _rows(self, steps: int) -> list[int]:
        inputs = self.original.graph.find_nodes(op="placeholder")
        return [self.tables.get(node.name, 0) if steps >= ENOUGH else 0 for node in inputs]

    def _pair(self, batch: Batch) -> Pair:
        return flat_inputs(self.original, batch), flat_inputs(self.made, batch), batch


def states_of(module: CapturedModule, ends: Sequence[str]) -> States:
    """Return what computes the states at some nodes, in float32 where the model is stored in less."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    named = {old.name: new for old, new in copies.items()}
    graph.output(tuple(named[n] for n in ends))
    graph.eliminate_dead_code()
    runs: torch.nn.Module = fx.GraphModule(module, graph)
    here = {id(p): n for n, p in runs.named_parameters()}
    names = {n: here[id(p)] for n, p in module.named_parameters() if id(p) in here}
    narrow, runs = is_narrow(runs), in_float32(runs)

    def states(parameters: Mapping[str, Tensor], batch: Sequence[object]) -> list[Tensor]:
        own = {names[n]: p for n, p in parameters.items() if n in names}
        return list(functional_call(runs, own, tuple(raised(batch) if narrow else batch)))

    return states


def varied(pair: Pair, step: int, tables: Sequence[int]) -> Pair:
    """Return a batch with other tokens in some places and, every other time, its rows cut anew from elsewhere.

    Tokens meet other contexts and places so, and few of them go further; what the data lack is rehearsed, as a healing
    does it (`Rehearsed`). Only where whole numbers [rows, length] are the one input that varies within a row: what else
    told of a place would be wrong. tables: how many rows the table of each of the original's inputs has, or 0.
    """
    told = {id(v): v for values in pair[:2] for v in values if isinstance(v, Tensor) and v.dim() == 2}
    found = [(i, v) for i, v in enumerate(pair[0]) if isinstance(v, Tensor) and bool((v != v.flatten()[:1]).any())]
    if len(found) != 1 or id(found[0][1]) not in told or found[0][1].is_floating_point():
        return pair
    (at, rows), draw = found[0], torch.Generator().manual_seed(step)
    tokens = rows.flatten().cpu()
    if step % 2:
        tokens = tokens.roll(int(torch.randint(len(tokens), (), generator=draw)))
    others = tokens[torch.randint(len(tokens), tokens.shape, generator=draw)]
    choice = torch.rand(len(tokens), generator=draw)
    new = torch.where(choice < SWAPPED, others, tokens)
    if tables[at]:
        many = min(tables[at], torch.iinfo(tokens.dtype).max)
        new = torch.where(choice > 1 - DRAWN, torch.randint(many, tokens.shape, generator=draw).to(new), new)
    new = new.view(rows.shape).to(rows.device)

    def put(value: object) -> object:
        same = isinstance(value, Tensor) and value.shape == rows.shape and torch.equal(value, rows)
        return new if same else value

    return [put(v) for v in pair[0]], [put(v) for v in pair[1]], pair[2]


def group(value: Tensor) -> dict[str, object]:
    """Return how AdamW takes a parameter: its steps are a share of its size."""
    size = float(value.detach().square().mean().sqrt())
    rate = MATRICES * size if value.dim() >= 2 else VECTORS * max(size, LEAST)
    return {"params": [value], "initial_lr": rate, "lr": rate}


def order(step: int, many: int) -> int:
    """Return the batch of a step: each once before any comes again, every time in another order."""
    draw = torch.Generator().manual_seed(step // many)
    return int(torch.randperm(many, generator=draw)[step % many])
