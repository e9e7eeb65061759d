"""Describe what tells two captured graphs apart in terms of the module they came from: a recipe for `rewritten.apply`.

Passes edit the graph. A value that the edits left alone is known by its name in both graphs, so each of its readers
either reads it still, or reads it through new pieces (norms, factors), or reads what an erased norm or factor read.
What the readers of a value have in common is put where the value arises, the rest where they take it. Every piece
ends up at a child's border, or at an operation that a forward spells out; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NoReturn

from torch import fx, nn

from ..backends.torch.module import Called, CapturedModule
from ..backends.torch.pieces import Piece
from ..compat.torch import slots
from ..detect.graph import OpGraph
from ..detect.match import NormMatch
from ..errors import Code, LnrewriteError
from .ports import Child, Ports
from .recipes import Recipe


@dataclass(frozen=True)
class Term:
    """Describe a value: an original one that went through pieces."""

    base: str
    pieces: tuple[Piece, ...] = ()

    def after(self, start: Term) -> tuple[Piece, ...] | None:
        """Return what is left to do where `start` is there already, or None where that is no start."""
        same = self.base == start.base and self.pieces[: len(start.pieces)] == start.pieces
        return self.pieces[len(start.pieces) :] if same else None


class Difference:
    """Find the recipe that makes a module compute what the graph `after` computes; `before` was captured from it."""

    def __init__(
        self,
        module: nn.Module,
        before: CapturedModule,
        view: OpGraph,
        calls: Sequence[Called],
        norms: Mapping[str, NormMatch],
        after: CapturedModule,
    ) -> None:
        self.module, self.view, self.norms = module, view, norms
        self.ports = Ports(module, before.graph, view, calls)
        self.old = {n.name: n for n in before.graph.nodes}
        self.new = {n.name: n for n in after.graph.nodes}
        self.parameters = dict(before.named_parameters(remove_duplicate=False))
        self.recipe = Recipe(module)
        self.delivered: dict[str, Term] = {}
        self.wanted: dict[str, dict[tuple[str, int], Term]] = {}
        self.after = after

    def find(self) -> Recipe:
        """Return the recipe. Raises LnrewriteError LN310 where an edit has no place in the module's Python."""
        for name, node in self.new.items():
            if name in self.old and name not in self.view.alias:
                self.compare(self.old[name], node)
        for name in self.old:
            if name in self.wanted:
                self.deliver(name)
            elif name in self.new:
                self.delivered[name] = Term(name)
        self.recipe.finish()
        self.untie()
        return self.recipe

    def fail(self, name: str, why: str) -> NoReturn:
        where = self.ports.owner(name) if name in self.old else name
        remedy = "use the exported route (lnr.convert, or -o OUT.pt2), or give the module a child of its own there"
        if (times := self.ports.times(where)) > 1:
            why = f"{where} is called {times} times, so one edit would act at each call"
        if ".slice(" in where:
            why = "modules are shared, and torch does not say which a slice of a ModuleList holds"
            remedy = "let the forward take the slice of list(modules), or use the exported route (lnr.convert)"
        raise LnrewriteError(Code.LN310, where or "the module's forward", why, remedy)

    # ---- what readers want ----

    def compare(self, old: fx.Node, new: fx.Node) -> None:
        """Note what a node reads now, operand by operand."""
        for index, (p, q) in enumerate(zip_longest(_operands(old), _operands(new))):
            if not isinstance(q, fx.Node):
                continue
            if not isinstance(p, fx.Node):
                self.bias(old, q)
            elif self.ports.root(p.name) in self.view.constant:
                if p.name != q.name and not self.known(q):
                    self.fail(old.name, "the edit would store a weight that the module computes")
            else:
                self.wanted.setdefault(self.ports.root(p.name), {})[old.name, index] = self.term(q)

    def bias(self, reader: fx.Node, got: fx.Node) -> None:
        """Make a linear map have a bias, as a parameter of its module."""
        name = str(got.target)
        path, _, leaf = name.rpartition(".")
        holder = self.module.get_submodule(path) if self.ports.owner(reader.name) == path else None
        if leaf != "bias" or holder is None or "bias" not in slots(holder) or holder.bias is not None:
            self.fail(reader.name, f"the linear map there has no place for the bias {name}")
        self.recipe.bias(name, int(got.meta["val"].numel()))

    def known(self, node: fx.Node) -> bool:
        """Return whether a value is made from one parameter that the module has."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node.op == "get_attr" and str(node.target) in self.parameters

    def term(self, node: fx.Node) -> Term:
        """Describe a value by the original one that it is made from."""
        pieces: list[Piece] = []
        while node.name not in self.old or node.name in self.view.alias:
            if node.name in self.old:
                node = node.all_input_nodes[0]
                continue
            piece, node = self.piece(node)
            both = piece.then(pieces[0]) if pieces else None
            pieces[:1] = [both] if both else [piece, *pieces[:1]]
        return Term(node.name, tuple(pieces))

    def piece(self, end: fx.Node) -> tuple[Piece, fx.Node]:
        """Return what the editor recorded that ends at a new node, with the graph's parameters, and what it takes."""
        made = Piece.of(end)
        entry = self.new.get(made.entry) if made else None
        if made is None or entry is None:
            self.fail(end.name, f"the new operation {end.target} has no form as a module")
        params = tuple((leaf, self.parameter(self.new[name])) for leaf, name in made.params)
        return replace(made, params=params), entry.all_input_nodes[0]

    def parameter(self, node: fx.Node) -> str:
        """Return the name of the parameter that a node gets."""
        if node.op != "get_attr":
            self.fail(node.name, "the edit would use elsewhere a gain that the module computes")
        return str(node.target)

    # ---- where it goes ----

    def deliver(self, name: str) -> None:
        """Put what all readers of a value want where it arises, and the rest where they take it."""
        wants = self.wanted[name]
        if name not in self.new:
            self.delivered[name] = self.instead(name, list(wants.values()))
        else:
            start, common = Term(name), _common(list(wants.values()))
            tail = common.after(start) if common else None
            placed = tail and self.place_after(name, tail)
            self.delivered[name] = Term(name, tail) if placed and tail else start
        groups: dict[tuple[Piece, ...], set[tuple[str, int]]] = {}
        for edge, term in wants.items():
            tail = term.after(self.delivered[name])
            if tail is None:
                self.fail(edge[0], f"its new input in place of {name} does not reach it")
            if tail:
                groups.setdefault(tail, set()).add(edge)
        for tail, edges in groups.items():
            self.place_before(name, tail, edges)

    def instead(self, name: str, wants: Sequence[Term]) -> Term:
        """Make another value stand for an erased one: by another piece in place of a child, or without an operation."""
        common = _common(wants)
        if common is None:
            self.fail(name, "its readers need different values")
        for call in reversed(self.ports.giving(name, self.view.users[name])):
            if any(self.ports.inside(call.path, o.name) and o.name in self.new for o in self.view if o.data):
                continue
            for _, source in call.takes:
                tail = common.after(self.delivered[source]) if source in self.delivered else None
                if tail is not None:
                    self.replace(call, name, tail)
                    return common
        if spot := self.ports.spot(name):
            for source in self.view[name].data:
                tail = common.after(self.delivered[source]) if source in self.delivered else None
                side = self.ports.side(spot, name, source)
                if tail is not None and side:
                    self.recipe.edit(spot, {"result": tail}, keep=side)
                    return common
        self.fail(
            name, "the norm or factor is not a module of its own, and the source does not show it as one operation"
        )

    def replace(self, call: Child, name: str, tail: tuple[Piece, ...]) -> None:
        """Put pieces in place of a child, which keeps its place where its own parameters can say the same."""
        found, path = self.norms.get(name), call.path
        if found and len(tail) == 1 and self.same(found, tail[0]):
            has, more = dict(tail[0].params), dict(tail[0].spec)["plus_one"]
            if (gain := has.get("weight")) is not None and bool(more) != found.norm.plus_one:
                self.recipe.shifted[gain] = 1.0 if more else -1.0
            for leaf, own in (("weight", found.norm.gamma), ("bias", found.norm.beta)):
                if own and leaf not in has:
                    self.recipe.neutral[own] = float(leaf == "weight" and not found.norm.plus_one)
            return
        self.recipe.replace(path, tail)

    def same(self, found: NormMatch, piece: Piece) -> bool:
        """Return whether a new norm is the old one but for the values of its gain and bias."""
        spec, norm, has = dict(piece.spec), found.norm, dict(piece.params)
        alike = (spec["is"], spec.get("kind"), spec.get("eps")) == ("norm", norm.kind.value, norm.eps)
        own = {"weight": norm.gamma, "bias": norm.beta}
        return alike and found.axis == -1 and not norm.computed and all(own[leaf] == n for leaf, n in has.items())

    def place_after(self, name: str, tail: tuple[Piece, ...]) -> bool:
        """Put pieces where a value arises: behind the child that gives it, or around the operation that makes it."""
        if calls := self.ports.giving(name, self.view.users[name]):
            call = max(calls, key=lambda c: len(_shared(c.path, tail[0].name)))
            self.recipe.after(call.path, [key for key, n in call.gives if n == name], tail)
            return True
        if spot := self.ports.spot(name):
            self.recipe.edit(spot, {"result": tail})
            return True
        return False

    def place_before(self, name: str, tail: tuple[Piece, ...], edges: set[tuple[str, int]]) -> None:
        """Put pieces where readers take a value: before the children that hold them, or around an operand."""
        left = {reader for reader, _ in edges}
        others = {*self.view.users[name]} - left
        for call in self.ports.taking(name):
            inner = {n for n in left if self.ports.inside(call.path, n)}
            if inner and not any(self.ports.inside(call.path, n) for n in others):
                self.recipe.before(call.path, [place for place, n in call.takes if n == name], tail)
                left -= inner
        for reader in sorted(left):
            spot = self.ports.spot(reader)
            side = self.ports.side(spot, reader, name) if spot else None
            if spot is None or side is None:
                where = "at the border of a child, and its source shows no separate operation"
                self.fail(reader, f"{reader} does not read {name} {where}")
            self.recipe.edit(spot, {side: tail})

    def untie(self) -> None:
        """Give storage of its own to what the new graph no longer shares."""
        now = dict(self.after.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            other = first.setdefault(id(parameter), name)
            if other != name and name in now and other in now and now[name] is not now[other]:
                self.recipe.changes.append({"untie": name})


def _operands(node: fx.Node) -> list[object]:
    """Return what a node is called with, lists opened."""
    given = (*node.args, *node.kwargs.values())
    return [one for value in given for one in (value if isinstance(value, (list, tuple)) else [value])]


def _common(terms: Sequence[Term]) -> Term | None:
    """Return the longest start that all terms share, or None where they start from different values."""
    first = terms[0]
    if any(t.base != first.base for t in terms):
        return None
    length = 0
    while all(len(t.pieces) > length and t.pieces[length] == first.pieces[length] for t in terms):
        length += 1
    return Term(first.base, first.pieces[:length])


def _shared(path: str, name: str) -> list[str]:
    """Return the parts that two dotted names begin with alike."""
    pairs = zip(path.split("."), name.split("."), strict=False)
    parts: list[str] = []
    for a, b in pairs:
        if a != b:
            break
        parts.append(a)
    return parts
