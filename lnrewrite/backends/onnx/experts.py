"""A mixture of experts that ONNX Runtime has one operator for, found by running it: in whatever words it is written.

    s = softmax(l), S the k largest of it, w = s, or s / sum_S s
    y = sum over e in S of w_e (D_e (g sigmoid(alpha g) (u + beta)) + d_e),   g, u = G_e x + a_e, U_e x + b_e
      -> y = MoE(x, l, [G U], [a b], D, d)

where g may be cut off above, and u on both sides. The piece of graph from x and l to y, which begins at the choice of
experts, is run on random tokens and holds if that is what comes out. Rows of G and U lie in turns for the operator: its
kernels for CPUs and for CUDA have that form in common, from ONNX Runtime 1.28 on (microsoft/onnxruntime#28467).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product

import torch
from torch import Tensor, fx

from ...compat.torch import operator_name
from ..torch.evaluating import Evaluator, on_data, unwound
from ..torch.module import CapturedModule, register, stored
from .kernel_calls import mixed
from .norms import EXPERTS

aten = torch.ops.aten
SOFT = {"softmax", "_softmax"}
COPIES = {"to", "_to_copy", "clone", "contiguous", "alias", "detach"}
CUTS = {"clamp", "clamp_max", "clamp_min"}
SWISH, GELU_LIKE = (1.0, 0.0), (1.702, 1.0)
"""alpha and beta: of swish, and as in gpt-oss."""
SIZES = (1, 3, 2, 4)
"""What the sizes of a part's inputs are in a trial, in their order; few, as each token takes matrices of its own."""
CLOSE = 1e-9
LOUD = 1e3
"""How large numbers are in the second trial at least, for a model may cut them off; four times where it does."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Hold one mixture: its output, what it reads [tokens, width], what chooses [tokens, experts], and how.

    tensors: G and U with their rows in turns [experts, 2 inner, width], D [experts, width, inner], and the biases a, b
    [experts, 2 inner] and d [experts, width], None where there are none. limit: where g and u are cut off.
    """

    node: fx.Node
    x: fx.Node
    logits: fx.Node
    k: int
    tensors: tuple[Tensor | None, ...] = ()
    normalized: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = float("inf")

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return what the operator gives for tokens [n, width]."""
        weights, chosen = logits.softmax(-1).topk(self.k)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for token, expert in product(range(len(x)), range(self.k)):
            up, down, a, b = (torch.zeros(()) if t is None else t[chosen[token, expert]].to(x) for t in self.tensors)
            inner = up @ x[token] + a
            g, u = inner[0::2].clamp(max=self.limit), inner[1::2].clamp(-self.limit, self.limit)
            y[token] += weights[token, expert] * (down @ (g * torch.sigmoid(self.alpha * g) * (u + self.beta)) + b)
        return y


def mix_with(module: CapturedModule, kernels: Collection[str]) -> None:
    """Write the mixtures of experts of a part as the operator computes them, in place, if it is among the kernels."""
    for number, found in enumerate(list(find(module)) if EXPERTS in kernels else []):
        held: list[fx.Node | None] = []
        with module.graph.inserting_before(found.node):
            for name, tensor in zip(("up", "down", "up_bias", "down_bias"), found.tensors, strict=True):
                if tensor is not None:
                    name = f"experts_{number}_{name}"
                    register(module, name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
                held.append(None if tensor is None else module.graph.get_attr(name))
            how = (found.k, found.normalized, found.alpha, found.beta, found.limit)
            made = module.graph.call_function(mixed, (found.x, found.logits, *held, *how))
        made.meta["val"] = found.node.meta["val"]
        found.node.replace_all_uses_with(made)


def find(module: CapturedModule) -> Iterator[Experts]:
    """Yield the mixtures that the operator computes."""
    data = on_data(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.topk.default):
        try:
            found = _mixture(module, node, data)
        except (LookupError, RuntimeError, TypeError, ValueError):  # a piece that does not run alone
            continue
        if found is not None:
            yield found


def _mixture(module: CapturedModule, choice: fx.Node, data: set[fx.Node]) -> Experts | None:
    """Return the mixture that begins with a choice of experts."""
    logits = choice.args[0]
    while isinstance(logits, fx.Node) and operator_name(logits.target) in SOFT | COPIES:
        logits = logits.args[0]
    if not isinstance(logits, fx.Node) or len(_shape(logits)) != 2 or not isinstance(choice.args[1], int):
        return None
    for region, end in _ends(module, choice, _shape(logits)[0]):
        x = _read(region, choice, end, data - {logits})
        if x is not None:
            return _held(module, Experts(end, x, logits, choice.args[1]))
    return None


def _held(module: CapturedModule, found: Experts) -> Experts | None:
    """Return a mixture with the stored tensors that make it what the module computes, None where there are none."""
    run = _evaluator(module)
    between = {found.node, *run.before(found.node.name, (found.x.name, found.logits.name))}
    for node in between:
        if node.op == "placeholder" and any(isinstance(u.meta.get("val"), Tensor) for u in between & {*node.users}):
            return None
    names = [str(n.target) for n in module.graph.nodes if n.op == "get_attr" and n in between]
    tensors = [t.detach() for name in names if (t := stored(module, name)) is not None]
    experts = _shape(found.logits)[1]
    matrices, biases = ([t for t in tensors if t.dim() == rank and str(len(t)) == experts] for rank in (3, 2))
    if len(matrices) != 2 or len(biases) not in (0, 2):
        return None
    cuts = {
        abs(float(a))
        for n in between if operator_name(n.target) in CUTS
        for a in (*n.args[1:], *n.kwargs.values()) if isinstance(a, int | float)
    }  # fmt: skip
    loud = max([LOUD, *(4 * cut for cut in cuts)]) / max(float(matrices[0].std()), torch.finfo(torch.float32).tiny)
    trials = [_trial(run, found, size) for size in (1.0, loud)]
    for made in _forms(replace(found, tensors=(*matrices, *(biases or (None, None)))), cuts):
        if all(_close(got, made(*given)) for *given, got in trials):
            return made
    return None


def _evaluator(module: CapturedModule) -> Evaluator:
    """Return what runs pieces of a part on a few tokens; its own inputs are nothing."""
    placed = module.graph.find_nodes(op="placeholder")
    free = dict.fromkeys(d for n in placed for d in _shape(n) if not d.isdigit())
    sizes = dict(zip(free, cycle(SIZES), strict=False))
    inputs = {n.name: torch.zeros([int(d) if d.isdigit() else sizes[d] for d in _shape(n)]) for n in placed}
    return Evaluator(module, inputs, module.state_dict().__getitem__)


def _trial(run: Evaluator, found: Experts, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return random tokens of a size, scores, and what a part makes of them."""
    draw = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(run.shape(n.name), generator=draw, dtype=torch.float64) for n in (found.x, found.logits))
    return size * x, logits, run(found.node.name, {found.x.name: size * x, found.logits.name: logits})


def _close(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and bool((got - wanted).abs().max() <= CLOSE * wanted.abs().max())


def _ends(module: CapturedModule, choice: fx.Node, tokens: str) -> Iterator[tuple[set[fx.Node], fx.Node]]:
    """Yield values [tokens, width] that all goes through which is computed with a choice, and what is, up to there."""
    region, pending = {choice}, dict.fromkeys(choice.users)
    for node in module.graph.nodes:
        if node is choice or region.isdisjoint(node.all_input_nodes):
            continue
        if node.op == "output":
            return
        region.add(node)
        pending.pop(node, None)
        shape, value = _shape(node), node.meta.get("val")
        wide = len(shape) == 2 and shape[0] == tokens and value.is_floating_point()
        if wide and not pending:
            yield set(region), node
        pending.update(dict.fromkeys(node.users))


def _read(region: set[fx.Node], choice: fx.Node, end: fx.Node, data: set[fx.Node]) -> fx.Node | None:
    """Return the one value, of the shape of what a region ends in, that it reads beside the choice of experts."""
    given = ({n for inner in region - {choice} for n in inner.all_input_nodes} & data) - region
    steps = unwound(end.graph, given, data)
    return next((last for last, alone in steps if alone and _shape(last) == _shape(end)), None)


def _forms(found: Experts, cuts: set[float]) -> Iterator[Experts]:
    """Yield the ways in which stored matrices and numbers may be meant."""
    width = found.x.meta["val"].shape[1]
    one, two, first, second = found.tensors
    assert one is not None and two is not None
    for up, down in product((one, one.transpose(1, 2)), (two, two.transpose(1, 2))):
        if up.shape[2] != width or down.shape[1] != width or up.shape[1] != 2 * down.shape[2]:
            continue
        for turn in (lambda t: t, _in_turns, lambda t: _in_turns(t.roll(t.shape[1] // 2, 1))):
            turned = replace(found, tensors=(turn(up), down, None if first is None else turn(first), second))
            limits = (float("inf"), *sorted(cuts))
            for normalized, (alpha, beta), limit in product((True, False), (SWISH, GELU_LIKE), limits):
                yield replace(turned, normalized=normalized, alpha=alpha, beta=beta, limit=limit)


def _in_turns(t: Tensor) -> Tensor:
    """Return rows [experts, 2 inner, ...] of two halves in turns."""
    return t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _shape(node: fx.Node) -> list[str]:
    return [str(d) for d in getattr(node.meta.get("val"), "shape", ())]
