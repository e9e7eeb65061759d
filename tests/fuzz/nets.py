"""Nets put together from choices: sources, blocks in one or more streams, taps and heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .branches import branch
from .choices import Choices, Lean, Piece, gain, matrix, shift
from .gates import FORMS, GATES, gated
from .linears import linear
from .norms import norm
from .sums import LENGTHS, TRUNK, extras, held, joins

WIDTH, VOCABULARY, FLOATS, CONDITION = 8, 11, 5, 3
PLACES = ("pre", "pre", "pre", "post", "peri", "output", "inner", "none")
SITES = {"pre": "in", "post": "post", "peri": "in out", "output": "out", "inner": "", "none": ""}


class Block(nn.Module):
    """Join a branch, or two side by side, to a stream, with norms where the placement says."""

    def __init__(self, c: Choices, shared: Choices, axis: int) -> None:
        super().__init__()
        own = c.pick("placement", ("as the others", *SITES), 2)
        place = shared.any("placement", PLACES) if own == "as the others" else own
        self.sites = SITES[place].split()
        source = c if c.pick("norm", ("as the others", "its own")) == "its own" else shared
        for site in ("in", "out", "post"):
            if site in self.sites:
                self.add_module(f"norm_{site}", norm(source.at("norm"), WIDTH, axis))
        self.branches = nn.ModuleList(branch(c.at("branch"), WIDTH, axis) for _ in range(1))
        self.parallel = c.pick("parallel", ("no", "one norm", "two norms"), 2)
        if self.parallel != "no":
            self.branches.append(branch(c.at("second"), WIDTH, axis))
            self.second_norm = norm(source.at("norm"), WIDTH, axis)
        join, extra = joins(axis)[shared_pick(c, shared, "join", joins(axis), 4)], c.pick("extra", extras(axis), 2)
        gate = shared_pick(c, shared, "gate", ("none", *GATES), 1) if axis == -1 else "none"
        if gate != "none":
            join = gated(gate, shared.any("gated as", FORMS))
        self.where = (
            c.any("extra where", ("behind", "before", "in the branch", "before the norm")) if extra != "none" else ""
        )
        trunk = TRUNK[c.pick("trunk", TRUNK)]
        self.join = Piece(join, **held(WIDTH, VOCABULARY))
        self.extra = Piece(extras(axis)[extra], **held(WIDTH, VOCABULARY))
        self.behind = Piece(lambda s, x: trunk(s, x, axis), **held(WIDTH, VOCABULARY))

    def forward(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        extra = self.extra(x, x, more) if self.where else None
        if self.where == "before":
            x = x + extra
        read = x + extra if self.where == "before the norm" else x
        h = self.norm_in(read) if "in" in self.sites else read
        f = self.branches[0](h, read, more)
        if self.parallel != "no":
            f = f + self.branches[1](self.second_norm(x) if self.parallel == "two norms" else h, x, more)
        f = self.norm_out(f) if "out" in self.sites else f
        if self.where == "in the branch":
            f = f + extra
        more["taps"] += [f, h]
        x = self.join(x, f, more)
        if self.where == "behind":
            x = x + extra
        x = self.norm_post(x) if "post" in self.sites else x
        return self.behind(x)


def shared_pick(c: Choices, shared: Choices, name: str, options: Any, likely: float) -> str:
    """Return what all blocks have, or now and then a choice of this block's own."""
    if c.pick(f"own {name}", ("no", "yes")) == "yes":
        return c.pick(name, options, likely * 4)
    return shared.pick(name, options, likely)


SOURCES = ("ids", "ids", "floats")
TAPS = ("none", "a branch", "a norm's value", "the state", "a loss", "the source", "every state")
ENDS = ("linear", "linear", "tied", "pooled", "first token", "state", "two heads", "soft", "similarities")
SHAPES = ("one stream", "two towers", "one reads the other", "crossed", "reversible", "recurrent",
          "long skip", "sum of states", "projected")  # fmt: skip
AXES = {"last": -1, "maps": 1, "tokens first": -1, "channels first": 1}


class Net(Lean):
    """Run blocks over a stream, or streams, behind a source and before a head, as choices say."""

    def __init__(self, c: Choices) -> None:
        super().__init__()
        self.layout = c.any("layout", ("last",) * 9 + ("maps", "tokens first", "channels first"))
        self.axis = axis = AXES[self.layout]
        self.source = "pixels" if self.layout == "maps" else c.any("source", SOURCES)
        self.shape = c.pick("shape", SHAPES, 3)
        self.ways = {name: c.pick(name, options, 2) for name, options in {
            "embedding": ("module", "function", "indexed", "one hot"), "positions": ("none", "learned", "sinusoids", "from input"),
            "factor": ("none", "number", "learned"), "embedding norm": ("no", "yes"), "tap": TAPS, "final": ("yes", "no"),
            "tied": ("no", "blocks", "branches", "norms", "writers"), "length": LENGTHS,
        }.items()}  # fmt: skip
        self.end = c.any("end", ENDS)
        self.embed, self.pixels, self.floats = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Conv2d(3, WIDTH, 1),
            linear(c.at("stem"), FLOATS, WIDTH),
        )
        self.pos, self.factor, self.fixed = shift(32, WIDTH), gain(1), shift(WIDTH)
        shared = c.at("all")
        self.blocks = nn.ModuleList(
            Block(c.at(f"block{i}"), shared, axis) for i in range(int(c.any("depth", ("2", "3"))))
        )
        self._tie()
        self.norms = nn.ModuleDict({name: norm(shared.at("norm"), WIDTH, axis) for name in ("source", "final")})
        self.middle, self.memory = linear(c.at("middle"), WIDTH, WIDTH, axis), matrix(WIDTH, WIDTH)
        self.head, self.second = linear(c.at("head"), WIDTH, 5), matrix(3, WIDTH)

    def _tie(self) -> None:
        first, tied = self.blocks[0], self.ways["tied"]
        for block in list(self.blocks)[1:]:
            if tied == "branches":
                block.branches[0] = first.branches[0]
            if tied == "norms" and hasattr(block, "norm_in") and hasattr(first, "norm_in"):
                block.norm_in = first.norm_in
            down, model = (getattr(b.branches[0], "down", None) for b in (block, first))
            if tied == "writers" and isinstance(down, Piece) and isinstance(model, Piece):
                down.w = model.w
        if tied == "blocks":
            self.blocks[1] = first

    def forward(self, main: Tensor, condition: Tensor, other: Tensor) -> Any:
        more: dict[str, Any] = {self.source: main, "condition": condition, "other": other, "taps": []}
        x = more["source"] = self._embedded(more)
        states = self._streams(x, more)
        x = states[-1]
        x = self.norms["final"](x) if self.ways["final"] == "yes" else x
        x = x.transpose(0, 1) if self.layout == "tokens first" else x if self.axis == -1 else x.movedim(1, -1)
        found = self._headed(x)
        return (*found, *self._tapped(more, states)) if self.ways["tap"] != "none" else found

    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return (self.source, "condition", "other")

    def _embedded(self, more: dict[str, Any]) -> Tensor:
        how, place, factor = self.ways["embedding"], self.ways["positions"], self.ways["factor"]
        if self.source == "pixels":
            return (
                self.norms["source"](self.pixels(more["pixels"]))
                if self.ways["embedding norm"] == "yes"
                else self.pixels(more["pixels"])
            )
        if self.source == "floats":
            x = self.floats(more["floats"])
        elif how == "one hot":
            x = F.one_hot(more["ids"], VOCABULARY).to(self.embed.weight.dtype) @ self.embed.weight
        else:
            ids, table = more["ids"], self.embed.weight
            x = self.embed(ids) if how == "module" else table[ids] if how == "indexed" else F.embedding(ids, table)
        x = x * WIDTH**0.5 if factor == "number" else self.factor * x if factor == "learned" else x
        if place == "learned":
            x = x + self.pos[: x.shape[1]]
        elif place == "sinusoids":
            x = x + torch.sin(torch.arange(x.shape[1]).to(x)[:, None] * torch.arange(1, WIDTH + 1).to(x))
        elif place == "from input":
            x = x + more["other"]
        if self.layout == "tokens first":
            x = x.transpose(0, 1)
            more |= {k: more[k].transpose(0, 1) for k in ("ids", "other") if k in more} | {
                "condition": more["condition"].mean(0, True)
            }
        x = x if self.axis == -1 else x.movedim(-1, 1)
        return self.norms["source"](x) if self.ways["embedding norm"] == "yes" else x

    def _streams(self, x: Tensor, more: dict[str, Any]) -> list[Tensor]:
        """Return the states of the stream that the head reads."""
        blocks, states, shape, y = list(self.blocks), [x], self.shape, self._turned(x)
        half = len(blocks) // 2
        for i, block in enumerate(blocks):
            x = states[-1]
            if shape in ("two towers", "one reads the other") and i < half:
                y = block(y, more)
                continue
            if shape == "one reads the other" and i == half:
                more["source"] = y
            if shape == "crossed":
                x, y = block(x + 0.1 * y, more), y + x
            elif shape == "reversible":
                x, y = y, x + (block(y, more) - y)
            elif shape == "projected" and i == half:
                x = block(self._turned(x), more)
            else:
                x = block(x, more)
                x = block(x, more) if shape == "recurrent" and i == half else x
            if self.axis == -1 and self.layout == "last" and i == len(blocks) - 2 and shape != "crossed":
                x = LENGTHS[self.ways["length"]](Piece(lambda s: s, fixed=self.fixed), x)
                more |= (
                    {"source": x, "other": x, "ids": torch.zeros_like(x[..., 0], dtype=torch.long)}
                    if self.ways["length"] != "as is"
                    else {}
                )
                y = x if self.ways["length"] != "as is" else y
            states.append(x)
        if shape in ("two towers", "crossed", "reversible") and states[-1].shape == y.shape:
            states.append(states[-1] + y)
        if shape == "long skip" and states[0].shape == states[-1].shape:
            states.append(states[-1] + states[0])
        if shape == "sum of states" and states[0].shape == states[-1].shape:
            states.append(sum(states[1:], states[0]))
        return states

    def _turned(self, x: Tensor) -> Tensor:
        return self.middle(x)

    def _headed(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.end == "tied":
            return (F.linear(x, self.embed.weight),)
        if self.end == "pooled":
            return (self.head(x.flatten(1, -2).mean(1, keepdim=True)),)
        if self.end == "first token":
            return (self.head(x.flatten(1, -2)[:, :1]),)
        if self.end == "state":
            return (x,)
        if self.end == "two heads":
            return (self.head(x), F.linear(x, self.second))
        if self.end == "soft":
            return (torch.log_softmax(self.head(x), -1),)
        if self.end == "similarities":
            x = x.flatten(1, -2)
            return (x @ x.mT,)
        return (self.head(x),)

    def _tapped(self, more: dict[str, Any], states: list[Tensor]) -> tuple[Tensor, ...]:
        tap, taps = self.ways["tap"], more["taps"]
        if tap == "every state":
            return tuple(states)
        single = {
            "a branch": taps[0], "a norm's value": taps[1], "the state": states[1], "the source": more["source"],
            "a loss": (taps[0].square().mean() + taps[-2].abs().mean())[None],
        }  # fmt: skip
        return (single[tap],)


def inputs(net: Net, batch: int, length: int) -> tuple[Tensor, ...]:
    """Return random inputs of a size."""
    draw = torch.Generator().manual_seed(batch * 100 + length)
    shapes = {"floats": (batch, length, FLOATS), "pixels": (batch, 3, length, length), "condition": (batch, CONDITION),
              "other": (batch, length, WIDTH)}  # fmt: skip
    return tuple(
        torch.randint(VOCABULARY, (batch, length), generator=draw)
        if name == "ids"
        else torch.randn(shapes[name], generator=draw, dtype=torch.float64)
        for name in net.names()
    )


def plain_but(seed: int, strange: dict[str, str]) -> dict[str, str]:
    """Return the choices of a net in which these are as told and all others are plain."""
    fixed: dict[str, str] = {}
    while True:  # a choice may bring others
        _, choices = build(seed, fixed)
        more = choices.plain | {n: v for n, v in strange.items() if n in choices.made}
        if more.items() <= fixed.items():
            return fixed
        fixed |= more


def build(seed: int, fixed: dict[str, str] | None = None) -> tuple[Net, Choices]:
    """Return the net of a seed, in float64 and eval mode, and the choices that it is made of."""
    torch.manual_seed(seed)
    choices = Choices(seed, fixed)
    net = Net(choices)
    stored = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    kind = choices.pick("stored as", stored)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.BatchNorm1d) and module.weight is not None:
                module.weight.normal_(1, 0.3)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(0, 0.3)
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_(), module.running_var.uniform_(0.5, 2)
    net = net.eval().to(stored[kind]).double()
    with torch.no_grad():
        net(*inputs(net, 2, 6))
    for module in list(net.modules()):
        if isinstance(module, Lean):
            module.lean()
    return net, choices
