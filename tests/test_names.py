"""State of a module may have any name: none is taken for what lnrewrite keeps beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.torch.module import CapturedModule
from lnrewrite.backends.torch.parts import Part, Parts
from lnrewrite.compat.torch import GRAPH_ATTRIBUTES
from lnrewrite.errors import Code, LnrewriteError

KINDS = ("parameter", "buffer", "counter", "child")
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Holding(nn.Module):
    """A residual block that also reads something of a name: a parameter, a buffer, one that it counts in, a child."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.called, self.kind = name, kind
        if kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.full((8,), 0.5)))
        elif kind == "child":
            self.add_module(name, nn.Linear(8, 8))
        else:
            self.register_buffer(name, torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        held = getattr(self, self.called)
        if self.kind == "counter":
            held.add_(1)
        x = x + self.up(self.norm(x))
        x = x + (held(x) if self.kind == "child" else held * 0.1)
        return self.last(x) + (0 if self.kind == "child" else held)  # several parts read it


def names() -> list[str]:
    """Return what lnrewrite's own graph modules hold, or once held, beside the state of the model."""
    ours = {n for kind in (CapturedModule, Parts, Part) for n in (*vars(kind), *kind.__annotations__)}
    instances = {"inputs", "steps", "parts", "body", "common", "leaves", "kept", "fits", "signature"}
    free = {n for n in (*ours, *instances) if not n.startswith("__")}
    return sorted(free - GRAPH_ATTRIBUTES - set(dir(nn.Module())))


def cases() -> Iterator[tuple[str, str]]:
    """Pair the names with the kinds in turns, and those that once failed with every kind."""
    yield from ((name, KINDS[i % len(KINDS)]) for i, name in enumerate(names()))
    yield from (("signature", kind) for kind in KINDS)
    yield from ((name, "counter") for name in ("steps", "kept"))


def test_state_of_any_name_is_captured_and_edited() -> None:
    """A buffer `steps` made `inspect` fail, and one named `signature` or `kept` everything."""
    for name, kind in dict.fromkeys(cases()):
        net = Holding(name, kind).eval()
        program = lnr.capture(net, args=(X,), dynamic_shapes={"x": None})
        result = lnr.Pipeline.parse("fold-affine").run(program, partial=True)
        assert result.report.edits == 1, (name, kind)
        want = net(X)
        torch.testing.assert_close(result.program.module()(X), want, rtol=1e-4, atol=1e-4, msg=f"{name} {kind}")
        assert {n for n, _ in result.program.module().named_parameters()} >= {
            n for n, _ in net.named_parameters() if n.startswith(name)
        }
        assert program.samples([{"x": X}])  # by parts


def test_dots_and_underlines_are_not_mixed_up() -> None:
    """What several parts read was held under its name with `__` for dots: `a.b` and `a__b` were one."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Module()
            self.a.b, self.a__b = nn.Parameter(torch.full((8,), 2.0)), nn.Parameter(torch.full((8,), 3.0))
            self.norms, self.ups = nn.ModuleList([nn.LayerNorm(8)] * 2), nn.ModuleList([nn.Linear(8, 8)] * 2)

        def forward(self, x: Tensor) -> Tensor:
            for norm, up in zip(self.norms, self.ups, strict=True):
                x = x + up(norm(x)) * self.a.b + self.a__b
            return x

    program = lnr.capture(Two().eval(), args=(X,))
    graph = program.module().graph
    ends = [n for n in graph.nodes if n.name == program.network.streams[0].blocks[0].anchor.total]
    parts = Parts(program.module(), graph, ends)
    shared = {str(n.target): n for step in parts.steps for n in step.reads if n.op == "get_attr"}
    assert float(parts.shared(shared["a.b"])[0].detach()) == 2.0
    assert float(parts.shared(shared["a__b"])[0].detach()) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_graph_module_has_itself_is_refused_by_name(kind: str) -> None:
    """torch.export fails on them with KeyErrors that name neither the state nor the way out."""
    for name in sorted(GRAPH_ATTRIBUTES):
        if name.startswith("__"):
            continue
        net = Holding(name, kind).eval()
        with pytest.raises(LnrewriteError, match=name) as caught:
            lnr.capture(net, args=(X,))
        assert caught.value.code == Code.LN023 and "rename" in str(caught.value)


def test_the_way_out_that_is_named_is_one() -> None:
    held = nn.Sequential(Holding("graph", "counter")).eval()
    program = lnr.capture(held, args=(X,), dynamic_shapes={"input": None})
    torch.testing.assert_close(program.module()(X), held(X))
