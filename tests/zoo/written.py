"""Nets in the styles that people write by hand, with the placements that their code has.

More of them, each for one idea of detection, stand in nets.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .beyond import Bottleneck, Resnet
from .blocks import Net, Residual
from .branches import Attention, Mlp, Scan
from .nets import DECOYS, NETS, Case, _conditioned, _floats, _pixels, _two_ids
from .norms import HIDDEN, TOKENS, VOCAB, WIDTH


class NanoBlock(nn.Module):
    """One block of a GPT in a single file: fused q, k, v, a causal mask in a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64))[None, None])

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.drop(self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class StdNorm(nn.Module):
    """Divide by the unbiased standard deviation plus eps (the annotated transformer)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class Normalised(nn.Module):
    """RMSNorm by F.normalize."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.g = width**0.5, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.g


class ByVectorNorm(nn.Module):
    """RMSNorm by the length of the vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return x / (size + self.eps) * self.weight


class Seq2Seq(nn.Module):
    """Run torch.nn.Transformer on two sequences."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, HIDDEN, 0.1, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.head(self.transformer(self.embedding(source), self.embedding(target)))
        return found


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm of the channels, two linears, LayerScale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class MixerBlock(nn.Module):
    """Mix tokens, then channels, each behind a norm (MLP-Mixer)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.tokens, self.channels = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Mlp(TOKENS, 12),
            Mlp(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.two(x))


class DitBlock(nn.Module):
    """Attention and MLP, both shifted, scaled and gated by a condition (adaLN-Zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attention, self.mlp, self.condition = Attention(), Mlp(), nn.Linear(5, 6 * WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(F.silu(c)).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attention(self.norm1(x) * (1 + scale1[:, None]) + shift1[:, None])
        return x + gate2[:, None] * self.mlp(self.norm2(x) * (1 + scale2[:, None]) + shift2[:, None])


class Dit(nn.Module):
    """Run two conditioned blocks on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks, self.norm = (
            nn.Linear(5, WIDTH),
            nn.ModuleList([DitBlock(), DitBlock()]),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = self.patch(x)
        for block in self.blocks:
            x = block(x, c)
        return self.norm(x)


class DiffusionBlock(nn.Module):
    """Group norm, SiLU, convolution, twice, with the embedded time added between (a diffusion U-Net's block)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(5, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class MapAttention(nn.Module):
    """Attend between the places of a feature map behind a group norm (a diffusion U-Net's middle)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        y = torch.softmax(q.transpose(1, 2) @ k / c**0.5, -1) @ v.transpose(1, 2)
        return x + self.out(y.transpose(1, 2).reshape(b, c, h, w))


class Diffusion(nn.Module):
    """Run the middle of a diffusion U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList([DiffusionBlock(16), MapAttention(16), DiffusionBlock(16)])
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, t)
        return self.out(F.silu(self.norm(x)))


class Maps(nn.Module):
    """Run blocks on feature maps and pool."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(*blocks), nn.Linear(16, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        return found


class Mixer(nn.Module):
    """Run two mixer blocks on patches and pool."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Linear(5, WIDTH), nn.Sequential(MixerBlock(), MixerBlock())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.blocks(self.patch(x))).mean(1))
        return found


def _map_and_time() -> tuple[Tensor, ...]:
    return (*_pixels(), torch.randn(2, 5, generator=torch.Generator().manual_seed(2)))


def _layers(norm: type[nn.Module]) -> Net:
    blocks = (Residual(branch, inn=norm) for branch in (Attention(), Mlp(), Attention(), Mlp()))
    return Net(*blocks, final=norm)


WRITTEN: dict[str, Case] = {
    "nanoGPT": Case(lambda: Net(NanoBlock(), NanoBlock(), final=nn.LayerNorm), "pre*4"),
    "annotated transformer": Case(lambda: _layers(StdNorm), "pre*4"),
    "RMSNorm by F.normalize": Case(lambda: _layers(Normalised), "pre*4"),
    "RMSNorm by vector_norm": Case(lambda: _layers(ByVectorNorm), "pre*4"),
    "nn.Transformer": Case(lambda: Seq2Seq(False), "post*10", _two_ids, 2),
    "nn.Transformer, norm_first": Case(lambda: Seq2Seq(True), "pre*10", _two_ids, 2),
    "ResNet": Case(lambda: Resnet(Bottleneck(16, 16), Bottleneck(16, 16)), "output*2", _pixels),
    "ConvNeXt": Case(lambda: Maps(ConvNeXtBlock(16), ConvNeXtBlock(16)), "inner*2", _pixels),
    "MLP-Mixer": Case(Mixer, "pre*4", _floats),
    "DiT": Case(Dit, "pre*4", _conditioned),
    "diffusion U-Net": Case(Diffusion, "pre*3", _map_and_time),
    "state space": Case(lambda: Net(*(Residual(Scan(), inn=nn.LayerNorm) for _ in range(3))), "pre*3"),
    **{name: NETS[name] for name in ("mixed (Mix-LN)", "hybrid", "keel", "deepnorm", "two towers", "experts")},
    **DECOYS,
}
