"""Small hand-written residual nets of every placement, and what only looks like them.

Each net stands with its truth in `NETS` (placements in execution order, `parallel` once for a shared sum), norms off
the stream in `DECOYS`, and what must be refused in `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .beyond import Bottleneck, Hyper, Nested, Plain, ResiDual, Resnet, Reversible, SecondSkip, Span, Unet
from .blocks import (
    ChannelsFirst,
    Conditioned,
    ConvNext,
    EncoderDecoder,
    Hybrid,
    Image,
    Net,
    Parallel,
    Residual,
    Shared,
    Towers,
    post,
    pre,
    stack,
)
from .branches import Attention, Constant, MixTokens, Mlp, Route, Scan
from .norms import SPELLINGS, TOKENS, VOCAB, Factory, layer, randomise, rms


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1)),)


def _two_ids() -> tuple[Tensor, ...]:
    return (_ids()[0], _ids()[0].flip(1)[:, :5])


def _floats() -> tuple[Tensor, ...]:
    return (torch.randn(2, TOKENS, 5, generator=torch.Generator().manual_seed(1)),)


def _both() -> tuple[Tensor, ...]:
    return (*_ids(), *_floats())


def _conditioned() -> tuple[Tensor, ...]:
    return (*_floats(), torch.randn(2, 5, generator=torch.Generator().manual_seed(2)))


def _pixels() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


@dataclass(frozen=True)
class Case:
    """Hold a net's maker, its inputs and its truth; `codes` are what it may be refused with."""

    make: Callable[[], nn.Module]
    blocks: str
    inputs: Callable[[], tuple[Tensor, ...]] = _ids
    streams: int = 1
    final: bool | None = None
    embedding: bool = False
    kinds: str = ""
    codes: tuple[str, ...] = ()

    @property
    def truth(self) -> list[str]:
        """Return the placements in execution order."""
        return spell_out(self.blocks)

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the net in eval mode with random weights, gains and biases, and its inputs."""
        torch.manual_seed(seed)
        return randomise(self.make(), seed).eval(), self.inputs()


def spell_out(text: str) -> list[str]:
    """Spell out `none pre*3` as a list."""
    parts = [p.partition("*") for p in text.split()]
    return [name for name, _, times in parts for _ in range(int(times or 1))]


def net(*layers: Callable[[], nn.Module], **ends: Any) -> Callable[[], nn.Module]:
    """Delay the making of a Net, so that its weights follow the seed."""
    return lambda: Net(*(f() for f in layers), **ends)


def _mixed() -> nn.Module:
    return Net(*stack(1, post=layer), *stack(2, inn=layer), final=layer)


def _keel() -> nn.Module:
    return Net(*stack(1, inn=layer), *stack(2, inn=layer, post=layer, skip=6.0))


def _constant(how: str = "angles", norm: Factory = rms, written: bool = True) -> Callable[[], nn.Module]:
    return lambda: Net(*(Residual(Constant(how, written, 0.3 + 0.2 * i), inn=norm) for i in range(4)), final=norm)


def _sublayers(**more: Any) -> Callable[[], nn.Module]:
    return lambda: Net(
        *chain(*((Residual(Attention(inner=layer), **more), Residual(Mlp(inner=layer), **more)) for _ in range(2))),
        final=layer,
    )


AM = "attention mlp attention mlp"
NETS: dict[str, Case] = {
    "pre": Case(pre, "pre*4", final=True, kinds=AM),
    "pre rms": Case(lambda: pre(norm=rms), "pre*4", final=True, kinds=AM),
    "post": Case(post, "post*4", final=False, embedding=True, kinds=AM),
    "post rms, no embedding norm": Case(lambda: Net(*stack(post=rms)), "post*4", final=False, kinds=AM),
    "post, one layer": Case(lambda: post(1), "post*2", final=False, embedding=True),
    "peri": Case(lambda: Net(*stack(inn=rms, out=rms), embed=rms, final=rms), "peri*4", final=True, embedding=True, kinds=AM),
    "output": Case(lambda: Net(*stack(out=rms), final=rms), "output*4", final=True, kinds=AM),
    "none": Case(lambda: Net(*stack()), "none*4", final=False, kinds=AM),
    "none with a final norm": Case(lambda: Net(*stack(), final=layer), "none*4", final=True),
    "parallel, shared norm": Case(net(Parallel, Parallel, final=layer), "parallel*2", final=True, kinds=AM),
    "parallel, two norms": Case(net(lambda: Parallel(shared=False), Parallel, final=layer), "parallel*2", final=True),
    "parallel, branches summed first": Case(
        net(lambda: Parallel(grouped=True), lambda: Parallel(grouped=True), final=layer), "parallel*2", final=True),
    "parallel, peri": Case(net(lambda: Parallel(rms, out=rms), Parallel, final=layer), "parallel*2", final=True),
    "parallel, one norm on the sum": Case(
        net(*[lambda: Parallel(whole=rms)] * 2, final=layer), "peri*2", final=True, kinds="attention attention"),
    "mixed (Mix-LN)": Case(_mixed, "post*2 pre*4", final=True),
    "hybrid": Case(net(Hybrid, Hybrid, final=layer), "post none post none", final=True, kinds=AM),
    "keel": Case(_keel, "pre*2 post*4", final=False),
    "deepnorm": Case(lambda: post(skip=1.7), "post*4", final=False, embedding=True),
    "layer scale": Case(lambda: pre(layer_scale=True), "pre*4", final=True),
    "layer scale, output norm": Case(lambda: Net(*stack(out=rms, layer_scale=True), final=rms), "output*4", final=True),
    "residual multiplier": Case(lambda: pre(times=0.22), "pre*4", final=True),
    "residual multiplier, post": Case(lambda: post(times=0.5), "post*4", final=False, embedding=True),
    "norm in the branch (Sub-LN)": Case(_sublayers(inn=layer), "pre*4", final=True),
    "norm in the branch alone": Case(_sublayers(), "inner*4", final=True),
    "norm in the branch, post": Case(
        lambda: Net(*chain(*((Residual(Attention(inner=layer), post=layer), Residual(Mlp(), post=layer)) for _ in range(2)))),
        "post*4", final=False),
    "encoder-decoder, pre": Case(
        lambda: EncoderDecoder(inn=layer, final=layer), "pre*10", _two_ids, 2, True,
        kinds=AM + " attention attention mlp attention attention mlp"),
    "encoder-decoder, post": Case(lambda: EncoderDecoder(post=layer), "post*10", _two_ids, 2, False),
    "encoder-decoder, one layer, post": Case(lambda: EncoderDecoder(1, post=layer), "post*5", _two_ids, 2, False),
    "shared over layers, post": Case(lambda: Shared(post=layer), "post*6", _floats, final=False),
    "shared over layers, pre": Case(lambda: Shared(inn=layer), "pre*6", _floats, final=False),
    "two towers": Case(Towers, "pre*4", _both, 2, True),
    "mixer": Case(
        lambda: Net(*chain(*((Residual(MixTokens(), inn=layer), Residual(Mlp(), inn=layer)) for _ in range(2))), final=layer),
        "pre*4", final=True),
    "experts": Case(
        lambda: Net(*chain(*((Residual(Attention(), inn=rms), Residual(Route(), inn=rms)) for _ in range(2))), final=rms),
        "pre*4", final=True, kinds="attention moe attention moe"),
    "scan": Case(lambda: Net(*(Residual(Scan(), inn=rms) for _ in range(3)), final=rms), "pre*3", final=True, kinds="ssm ssm ssm"),
    "convnext block": Case(lambda: Image(ConvNext(), ConvNext(), ConvNext()), "inner*3", _pixels, kinds="conv conv conv"),
    "norm over axis 1": Case(lambda: Image(*(ChannelsFirst() for _ in range(3))), "pre*3", _pixels),
    "adaLN": Case(Conditioned, "pre*3", _conditioned, final=True, kinds="mlp mlp mlp"),
    "constant angles": Case(_constant(), "pre*4", final=True),
    "constant angles, layer norm": Case(_constant(norm=layer), "pre*4", final=True),
    "constant angles, no writer": Case(_constant(written=False), "pre*4", final=True),
    "constant signs": Case(_constant("sign"), "pre*4", final=True),
    "constant signs, no writer": Case(_constant("sign", written=False), "pre*4", final=True),
}  # fmt: skip


def _decoy(**more: Any) -> Callable[[], nn.Module]:
    return lambda: Net(*chain(*((Residual(Attention(**more), inn=layer), Residual(Mlp(), inn=layer)) for _ in range(2))), final=layer)  # fmt: skip


l2 = SPELLINGS["rms, F.normalize times sqrt(width)"].make

# Norms, or what looks like them, that are not on the stream: the placements must not see them.
DECOYS: dict[str, Case] = {
    "q and k norms": Case(_decoy(qk=rms), "pre*4", final=True),
    "q and k norms as wide as the stream": Case(
        lambda: Net(*(Residual(Attention(heads=1, qk=rms)) for _ in range(3)), final=rms), "none*3", final=True),
    "l2 q and k norms": Case(_decoy(qk=l2), "pre*4", final=True),
    "score bias and temperature": Case(_decoy(score=True), "pre*4", final=True),
    "gating": Case(lambda: Net(*(Residual(Mlp(gate=True), inn=rms) for _ in range(3)), final=rms), "pre*3", final=True),
    "gelu written out": Case(lambda: Net(*(Residual(Mlp(written=True)) for _ in range(3))), "none*3", final=False),
    "scan's own skip": Case(lambda: Net(*(Residual(Scan()) for _ in range(3))), "none*3", final=False),
    "l2 of the pooled embeddings": Case(Towers, "pre*4", _both, 2, True),
}  # fmt: skip

# Beyond the picture: said in words, nothing converted.
REFUSED: dict[str, Case] = {
    "u-net": Case(Unet, "", codes=("LN202",)),
    "nested": Case(net(Nested, Nested), "", codes=("LN202",)),
    "hyper-connections": Case(Hyper, "", codes=("LN203",)),
    "reversible": Case(Reversible, "", codes=("LN202", "LN207")),
    "second skip (B2T)": Case(net(SecondSkip, SecondSkip), "", codes=("LN202",)),
    "span": Case(net(Span, Span), "", codes=("LN202",)),
    "residual and normed stream (ResiDual)": Case(ResiDual, "", codes=("LN207", "LN202")),
    "projected skips": Case(
        lambda: Resnet(Bottleneck(16, 24, 2), Bottleneck(24, 32, 2)), "", _pixels, codes=("LN204",)),
    "no residuals": Case(Plain, "", _floats, codes=("LN201",)),
}  # fmt: skip
