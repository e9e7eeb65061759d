"""Blocks made by hand, of every placement, and nets of them: decoders, towers, images, conditions."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .branches import Attention, Mlp
from .norms import HIDDEN, TOKENS, VOCAB, WIDTH, Factory, layer, spelled


class Residual(nn.Module):
    """Compute post(skip * x + gamma * out(branch(inn(x)))), with any of the norms left out."""

    def __init__(
        self,
        branch: nn.Module,
        inn: Factory | None = None,
        out: Factory | None = None,
        post: Factory | None = None,
        skip: float = 1.0,
        times: float = 1.0,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        self.inn, self.out, self.post = (f(WIDTH) if f else nn.Identity() for f in (inn, out, post))
        self.branch, self.skip, self.times = branch, skip, times
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1) + 0.05 * torch.randn(WIDTH)) if layer_scale else None

    def forward(self, x: Tensor, *other: Tensor) -> Tensor:
        y = self.out(self.branch(self.inn(x), *other))
        y = y if self.gamma is None else self.gamma * y
        y = y if self.times == 1 else y * self.times
        return self.post((x if self.skip == 1 else self.skip * x) + y)


class Parallel(nn.Module):
    """Add two branches to one trunk; `shared` norm, one norm each, or none, and norms on each output or on the sum."""

    def __init__(
        self,
        norm: Factory = layer,
        shared: bool = True,
        out: Factory | None = None,
        whole: Factory | None = None,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        self.one = norm(WIDTH)
        self.two = None if shared else norm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()
        self.a_out, self.m_out = (out(WIDTH), out(WIDTH)) if out else (nn.Identity(), nn.Identity())
        self.whole = whole(WIDTH) if whole else None
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = a if self.two is None else self.two(x)
        y, z = self.a_out(self.attention(a)), self.m_out(self.mlp(b))
        if self.whole is not None:
            return x + self.whole(y + z)
        return x + (y + z) if self.grouped else y + x + z


class Net(nn.Module):
    """Embed tokens and positions, run the layers, norm and project."""

    def __init__(
        self, *layers: nn.Module, embed: Factory | None = None, final: Factory | None = None, head: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.norm_embedding = embed(WIDTH) if embed else nn.Identity()
        self.layers = nn.ModuleList(layers)
        self.final = final(WIDTH) if final else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB) if head else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm_embedding(self.embedding(ids) + self.position[: ids.shape[1]])
        for inner in self.layers:
            x = inner(x)
        return self.head(self.final(x))


def stack(layers: int = 2, **norms: Any) -> list[nn.Module]:
    """Return attention and MLP in turn, with the norms given."""
    return list(chain(*((Residual(Attention(), **norms), Residual(Mlp(), **norms)) for _ in range(layers))))


def pre(layers: int = 2, norm: Factory = layer, **more: Any) -> Net:
    """Return a Pre-LN net: the plainest case."""
    return Net(*stack(layers, inn=norm, **more), final=norm)


def post(layers: int = 2, norm: Factory = layer, **more: Any) -> Net:
    """Return a Post-LN net with an embedding norm, as BERT has it."""
    return Net(*stack(layers, post=norm, **more), embed=norm)


class Hybrid(nn.Module):
    """Make attention read the raw trunk and the MLP's skip start at the norm (HybridNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(qk=layer), layer(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x + self.attention(x))
        return z + self.mlp(z)


class Decoder(nn.Module):
    """Attend to itself and to the encoder, then an MLP."""

    def __init__(self, **norms: Any) -> None:
        super().__init__()
        self.own, self.cross, self.mlp = (Residual(b, **norms) for b in (Attention(), Attention(), Mlp()))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.mlp(self.cross(self.own(x), memory))


class EncoderDecoder(nn.Module):
    """Run an encoder and a decoder that share the embedding."""

    def __init__(self, layers: int = 2, final: Factory | None = None, **norms: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(stack(layers, **norms))
        self.decoder = nn.ModuleList(Decoder(**norms) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = (final(WIDTH) if final else nn.Identity() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embedding(source), self.embedding(target)
        for inner in self.encoder:
            memory = inner(memory)
        memory = self.encoder_norm(memory)
        for inner in self.decoder:
            x = inner(x, memory)
        return self.head(self.decoder_norm(x))


class Shared(nn.Module):
    """Apply one layer several times (ALBERT)."""

    def __init__(self, times: int = 3, **norms: Any) -> None:
        super().__init__()
        self.embedding, self.times = nn.Linear(5, WIDTH), times
        self.layer = nn.Sequential(Residual(Attention(), **norms), Residual(Mlp(), **norms))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for _ in range(self.times):
            x = self.layer(x)
        return x


class Towers(nn.Module):
    """Embed words and patches in two towers and compare them by the cosine (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Net(*stack(1, inn=layer), final=layer, head=False)
        self.patch = nn.Linear(5, WIDTH)
        self.image = nn.Sequential(*stack(1, inn=layer))
        self.image_norm = layer(WIDTH)
        self.to_text, self.to_image = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
        text = self.to_text(self.text(ids)[:, -1])
        image = self.to_image(self.image_norm(self.image(self.patch(patches)))[:, 0])
        text, image = text / text.norm(dim=-1, keepdim=True), F.normalize(image, dim=-1)
        return text @ image.T * 14.0


class ConvNext(nn.Module):
    """Convolve each channel, norm the channels, mix them, scale, add: the norm is inside the branch."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.up, self.down = layer(width), nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Image(nn.Module):
    """Run layers on feature maps [batch, channels, height, width]."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, WIDTH, 2, stride=2), nn.ModuleList(layers)
        self.final, self.head = layer(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for inner in self.layers:
            x = inner(x)
        return self.head(self.final(x.mean((2, 3))))


class ChannelsFirst(nn.Module):
    """Norm the channels of a feature map, written out over axis 1."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = spelled(
            lambda n, x: (
                (x - x.mean(1, keepdim=True))
                / torch.sqrt((x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True) + n.eps)
                * n.weight[:, None, None]
                + n.bias[:, None, None]
            ),
            bias=True,
        )(width)
        self.up, self.down = nn.Conv2d(width, HIDDEN, 1), nn.Conv2d(HIDDEN, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Modulated(nn.Module):
    """Shift, scale and gate a weightless norm's branch by a condition (DiT's adaLN-Zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(WIDTH, elementwise_affine=False), Mlp()
        self.condition = nn.Linear(5, 3 * WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.condition(F.silu(c))[:, None].chunk(3, -1)
        return x + gate * self.branch(self.norm(x) * (1 + scale) + shift)


class Conditioned(nn.Module):
    """Run modulated layers on patches."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.patch, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(Modulated() for _ in range(layers))
        self.final = layer(WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = self.patch(x)
        for inner in self.layers:
            x = inner(x, c)
        return self.head(self.final(x))
