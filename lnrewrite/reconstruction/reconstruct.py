"""Go through a conversion block by block and fit each branch's own parameters, so that the trunk follows the original.

For each sum of a converted block, in order: its inputs are what the converted model's blocks before it, already fitted,
hand on; its target is the original's state on the same data. Block by block as in AdaRound (2004.10568), BRECQ
(2102.05426) and GPTQ (2210.17323), which fit quantised weights so. Parameters that another part reads too stay.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, fx

from ..backends.hiding import Shown
from ..backends.torch.contexts import evaluating
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.fixed import other_path
from ..backends.torch.module import CapturedModule
from ..backends.torch.walk import Walk
from ..ir import Block, Kind, Network, Where, sums
from ..layout import clock
from ..pipeline.protocols import Bases, Batch
from ..pipeline.report import Fitted
from ..pipeline.shares import alone, anywhere, processes, total
from ..quiet import LOGGER
from .fitting import Fitting
from .followed import Followed
from .goals import Goal, Measure, goals_of
from .together import LARGEST, Together, states_of

RIDGE = 2000.0
"""The pull to the start, times the number of tokens: what |W - W0|^2 / |W0|^2 = 1 costs for each matrix."""
ALONE = 8192
"""Tokens that branches are fitted to one by one, where all are trained together then, on all of the data."""
DONE = 1e-8
"""A relative squared error from which nothing is left to fit."""


@dataclass(frozen=True)
class Side:
    """Hold one of the two models: its module, and the sums of each stream in order.

    tables: how many rows the table of an input has that looks rows up, by its placeholder. scores: the node of the
    logits, or empty.
    """

    module: CapturedModule
    network: Network
    tables: Mapping[str, int]
    scores: str = ""

    @cached_property
    def sums(self) -> dict[tuple[int, int], list[Block]]:
        """Return the blocks of each sum by the numbers of stream and sum."""
        return {(i, k): g for i, s in enumerate(self.network.streams) for k, g in enumerate(sums(s))}

    @cached_property
    def ends(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of each sum by its node."""
        return {blocks[-1].anchor.total: place for place, blocks in self.sums.items()}


def fitted(
    original: Side, made: Side, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
) -> tuple[tuple[Fitted, ...], tuple[str, ...]]:
    """Fit the branches of some blocks of `made`, in place; return what was done, or why nothing could be."""
    theirs, ours = ({at: [b.name for b in g] for at, g in side.sums.items()} for side in (original, made))
    if theirs != ours:
        return (), ("its branches were not fitted to the data: the converted model's blocks are not the original's",)
    rows: list[Fitted] = []
    many = sum(p.numel() for p in made.module.parameters())
    with evaluating(original.module), evaluating(made.module):
        try:
            first = fit if many > LARGEST else few(original, fit)
            rows += (one := Reconstruction(original, made, first, held, blocks)).run()
        except RuntimeError as error:
            if not (path := other_path(error)):
                raise
            return (), (f"its branches were fitted up to where the result leaves the captured path: {path}",)
        if many <= LARGEST:
            return one.together(rows, fit)
    why = f"of {many:,} parameters, more than {LARGEST:,}, not all are trained together"
    return tuple(rows), (f"its branches were fitted one by one: {why}",)


def few(side: Side, fit: Sequence[Batch]) -> Sequence[Batch]:
    """Return the first batches, of about `ALONE` tokens in all processes."""
    if not fit or not side.sums:
        return fit
    anchor = next(iter(side.sums.values()))[0].anchor
    with torch.no_grad():
        (state,) = states_of(side.module, [anchor.total])({}, flat_inputs(side.module, fit[0]))
    tokens = state.numel() // state.shape[anchor.axis]
    return fit[: max(1, round(ALONE / processes() / max(1, tokens)))]


class Targets:
    """Walk the original through data, and keep the states at its sums for as long as they are wanted."""

    def __init__(self, original: Side, batches: Sequence[Batch]) -> None:
        self.sums = original.sums
        anchors = [blocks[0].anchor for blocks in self.sums.values()]
        self.wanted = Counter(n for a in anchors for n in (a.state, a.total))
        self.walk = Walk(original.module, list(self.wanted), batches)
        self.seen = self.walk.known(self.wanted)

    def of(self, place: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the state behind a sum and before it, for every batch; each sum is asked for once."""
        anchor = self.sums[place][0].anchor
        while anchor.total not in self.seen:
            end = self.walk.end
            states = self.walk.go()
            if end:
                self.seen[end] = states
        found = self.seen[anchor.total], self.seen[anchor.state]
        for name in (anchor.total, anchor.state):
            self.wanted[name] -= 1
            if not self.wanted[name]:
                del self.seen[name]
        return found


@dataclass
class Reconstruction:
    """Fit `made`, in place, to `original` on the batches of `fit`; a step is kept where it helps on those of `held`.

    `chosen` names the blocks whose branches are fitted, each with the basis of its sum.
    """

    original: Side
    made: Side
    fit: Sequence[Batch]
    held: Sequence[Batch]
    chosen: Bases

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.original, self.made

    @cached_property
    def shown(self) -> Shown:
        """Return which tokens of the original's states count."""
        module = self.original.module
        axes = {b.anchor.total: b.anchor.axis for s in self.original.network.streams for b in s.blocks}
        groups = [[b.anchor.total for b in s.blocks] for s in self.original.network.streams]
        states = cache(lambda: states_of(module, list(axes)))  # which copies a model in half precision

        def run(batch: Batch) -> dict[str, Tensor]:
            found = states()({}, flat_inputs(module, batch))
            return {n: state.movedim(axes[n], -1) for n, state in zip(axes, found, strict=True)}

        return Shown.tried([*self.fit, *self.held], run, groups)

    def run(self) -> list[Fitted]:
        """Return what was done at each sum that a chosen block ends in."""
        ends = self.made.ends
        todo = {at for at, blocks in self.made.sums.items() if any(b.name in self.chosen for b in blocks)}
        batches = [*self.fit, *self.held]
        targets = Targets(self.original, batches)
        self.student = Walk(self.made.module, list(ends), batches)
        self.before: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.start: dict[tuple[str, ...], dict[str, Tensor]] = {}
        self.tokens = 0
        found: list[Fitted] = []
        started = time.perf_counter()
        while len(found) < len(todo) and not self.student.over:
            at = ends.get(self.student.end or "")
            if at is None:
                self.student.go()
                continue
            totals, starts = targets.of(at)
            if at in todo:
                found.append(row := self.sum(at, totals, starts))
                left = clock((time.perf_counter() - started) * (len(todo) / len(found) - 1))
                told = f"error {row.before:.2g} -> {row.after:.2g}, some {left} left"
                LOGGER.info(f"{len(found)}/{len(todo)} {row.blocks[0]}: {told}")
            ours = map(self.measure(at).based, self.student.go())
            self.before[at[0]] = list(zip(totals, ours, strict=True))
        return found

    def sum(self, place: tuple[int, int], totals: Sequence[Tensor], starts: Sequence[Tensor]) -> Fitted:
        """Fit what one sum adds to the original's states behind and before it."""
        blocks, walk, many = self.made.sums[place], self.student, len(self.fit)
        goals, given = self.goals(place, totals, starts), [walk.given(k) for k in range(len(totals))]
        self.tokens = total(sum(g.target[..., 0].numel() for g in goals[:many]))
        start = own(walk.body, blocks[0].anchor.state)
        self.start[tuple(b.name for b in blocks)] = {walk.origin(n): p for n, p in start.items()}
        made, holds_out = walk.function(list(start)), anywhere(self.held)

        def residual(batch: int, parameters: Mapping[str, Tensor]) -> Tensor:
            return goals[batch].residual(made(*given[batch], *parameters.values()))

        @torch.no_grad()
        def error(parameters: Mapping[str, Tensor]) -> float:
            held = range(many, len(goals)) if holds_out else range(many)
            return total(float(sum(float(residual(k, parameters).square().sum()) for k in held)))

        names, before, why = tuple(b.name for b in blocks), error(start), ""
        best, after = start, before
        if not math.isfinite(before):
            why = "its states are not finite on the calibration data"
        elif not start:
            why = "no weights of its own stand between this sum and the one before it"
        elif before > DONE:
            try:
                best, after = Fitting(residual, many, start, RIDGE / self.tokens).fit(error)
            except (RuntimeError, NotImplementedError) as fault:
                alone(fault)
                why = f"the fit failed: {str(fault).partition(chr(10))[0]}"
        return Fitted(names, before, after, self.keep(start, best) if after < before else {}, why)

    def together(self, rows: Sequence[Fitted], fit: Sequence[Batch]) -> tuple[tuple[Fitted, ...], tuple[str, ...]]:
        """Train all that was fitted together, on more data than that maybe; return the rows, one more, and notes.

        The rows say how far each parameter went.
        """
        both = zip(self.original.sums.items(), self.made.sums.values(), strict=True)
        states = [(a[-1].anchor.total, b[-1].anchor.total, self.measure(at)) for (at, a), b in both]
        names = [n for start in self.start.values() for n in start]
        if not names:
            return tuple(rows), ()
        modules = self.original.module, self.made.module
        scores = self.original.scores, self.made.scores
        followed = Followed(states, scores if all(scores) else None, self.shown)
        try:
            tokens = self.tokens * total(len(fit)) // total(len(self.fit))
            found = Together(*modules, followed, names, fit, self.held, tokens, self.original.tables).run()
        except (RuntimeError, NotImplementedError) as fault:
            alone(fault)
            why = f"training them together failed: {str(fault).partition(chr(10))[0]}"
            return tuple(rows), (f"its branches were fitted one by one: {why}",)
        stored = dict(self.made.module.named_parameters())
        with torch.no_grad():
            for name, value in found.values.items():
                stored[name].copy_(value)
        every = []
        for row in rows:
            far = {n: _moved(p, stored[n].detach()) for n, p in self.start[row.blocks].items()}
            every.append(replace(row, weights={n: way for n, way in far.items() if way}))
        return (*every, Fitted((), found.before, found.after, {})), ()

    def measure(self, place: tuple[int, int]) -> Measure:
        """Return how the states behind a sum are compared."""
        centered = any(s.norm.kind is Kind.LAYER for _, s in self.made.network.streams[place[0]].sites())
        blocks = self.made.sums[place]
        basis = next((torch.as_tensor(by) for b in blocks if (by := self.chosen.get(b.name)) is not None), None)
        return Measure(blocks[0].anchor.axis, self.moves_trunk_norms(place[0]), centered, basis)

    def goals(self, place: tuple[int, int], totals: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Goal]:
        """Return what the state behind a sum shall be on each batch, in units of its own for held-out data."""
        measure, name = self.measure(place), self.original.sums[place][-1].anchor.total
        pairs = zip(totals, (*self.fit, *self.held), strict=True)
        measures = [measure.on(self.shown, name, state, batch) for state, batch in pairs]
        before, many, like = self.before.get(place[0], []), len(self.fit), (measure, totals[0])
        halves = slice(0, many), slice(many, None)
        return [g for h in halves for g in goals_of(measures[h], totals[h], starts[h], before[h], like)]

    def moves_trunk_norms(self, stream: int) -> bool:
        """Return whether norms came onto a stream's trunk, or left it, so that its states differ in size by design."""
        on = [[b.at(Where.POST) is None for b in side.network.streams[stream].blocks] for side in self.sides]
        return on[0] != on[1]

    @torch.no_grad()
    def keep(self, start: Mapping[str, Tensor], best: Mapping[str, Tensor]) -> dict[str, float]:
        """Store new values, rounded to what the model stores; return how far each parameter moved."""
        stored, moved = dict(self.student.stored.named_parameters()), {}
        running = dict(self.student.body.named_parameters())
        for name, value in best.items():
            stored[name].copy_(value)
            running[name].copy_(stored[name])
            moved[self.student.origin(name)] = _moved(start[name], stored[name])
        return moved


def _moved(start: Tensor, now: Tensor) -> float:
    """Return how far a parameter went, over the larger of its sizes before and after."""
    return float((now - start).norm()) / max(float(start.norm()), float(now.norm()), 1e-30)


def own(body: fx.GraphModule, state: str) -> dict[str, Tensor]:
    """Return the parameters of a part that act on what comes from a state, by name, as they are now."""
    live: set[fx.Node] = set()
    constant: dict[fx.Node, set[str]] = {}
    found: dict[str, None] = {}
    for node in body.graph.nodes:
        inputs = node.all_input_nodes
        if node.name == state:
            live.add(node)
        elif any(n in live for n in inputs):
            live.add(node)
            found.update(dict.fromkeys(sorted(name for n in inputs for name in constant.get(n, ()))))
        elif node.op == "get_attr":
            constant[node] = {str(node.target)}
        elif inputs and all(n in constant for n in inputs):
            constant[node] = {name for n in inputs for name in constant[n]}
    known = dict(body.named_parameters())
    return {n: known[n].detach().clone() for n in found if n in known and known[n].is_floating_point()}
