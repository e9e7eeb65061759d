"""Nets made by hand that are beyond the picture, or on its edge: streams that are not one sum after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import stack
from .branches import Attention, Mlp
from .norms import VOCAB, WIDTH, layer


class Unet(nn.Module):
    """Add the state before the middle blocks to the state after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(stack(3, inn=layer))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(ids))
        kept = x
        for inner in self.layers[1:5]:
            x = inner(x)
        return self.layers[5](x + kept)


class Hyper(nn.Module):
    """Keep n copies of the stream; read a mixture of them, write back to all (hyper-connections)."""

    def __init__(self, copies: int = 3, layers: int = 3, learned: bool = True) -> None:
        super().__init__()
        self.copies, self.embedding, self.learned = copies, nn.Embedding(VOCAB, WIDTH), learned
        self.branches = nn.ModuleList(Mlp() for _ in range(layers))
        self.norms = nn.ModuleList(layer(WIDTH) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(WIDTH, copies * (copies + 2)) for _ in range(layers))
        self.final = layer(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        n = self.copies
        h = self.embedding(ids).unsqueeze(2).expand(-1, -1, n, -1)
        for branch, norm, mix in zip(self.branches, self.norms, self.mix, strict=True):
            w = torch.tanh(mix(norm(h.mean(2))))
            read, write, turn = w[..., :n], w[..., n : 2 * n], w[..., 2 * n :].unflatten(-1, (n, n))
            y = branch(norm((read.unsqueeze(-1) * h).sum(2)))
            h = turn @ h + write.unsqueeze(-1) * y.unsqueeze(2)
        return self.final(h.sum(2))


class Reversible(nn.Module):
    """Make two halves of the stream write each other in turn (RevNet)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList((layer(WIDTH), Attention(), layer(WIDTH), Mlp())) for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        one = two = self.embedding(ids)
        for n, attention, m, mlp in self.layers:
            one = one + attention(n(two))
            two = two + mlp(m(one))
        return torch.cat([one, two], -1)


class SecondSkip(nn.Module):
    """Add the layer's input once more before its last norm (B2T)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.one, self.two = Attention(), Mlp(), layer(WIDTH), layer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x + self.attention(x))
        return self.two(x + h + self.mlp(h))


class Span(SecondSkip):
    """Start the MLP's skip at the layer's input (SpanNorm)."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x + self.attention(x))
        return self.two(x + self.mlp(y))


class ResiDual(nn.Module):
    """Add each branch to a normed and to a raw stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.final = nn.Embedding(VOCAB, WIDTH), layer(WIDTH)
        self.branches = nn.ModuleList((Attention(), Mlp(), Attention(), Mlp()))
        self.norms = nn.ModuleList(layer(WIDTH) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        p = q = self.embedding(ids)
        for branch, norm in zip(self.branches, self.norms, strict=True):
            f = branch(p)
            p, q = norm(p + f), q + f
        return p + self.final(q)


class Bottleneck(nn.Module):
    """Convolve; where the width changes the skip is projected (ResNet)."""

    def __init__(self, old: int, new: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(old, new, 3, stride, 1), nn.Conv2d(new, new, 3, 1, 1)
        self.n1, self.n2 = nn.BatchNorm2d(new), nn.BatchNorm2d(new)
        self.down = nn.Conv2d(old, new, 1, stride) if old != new or stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.down(x) + self.n2(self.two(F.relu(self.n1(self.one(x))))))


class Resnet(nn.Module):
    """Run bottlenecks, projected or not."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(*blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.blocks(self.stem(pixels)).mean((2, 3))


class Plain(nn.Module):
    """Stack linears and norms without any skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, WIDTH), layer(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), layer(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Nested(nn.Module):
    """Put a chain of residual blocks into a branch (MobileBERT, nested U-Nets)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = layer(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(*stack(1, inn=layer))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(self.into(self.norm(x))))
