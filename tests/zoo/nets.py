"""Small hand-written residual nets of every placement, and what only looks like them.

Each net stands with its truth in `NETS` (placements in execution order, `parallel` once for a shared sum), norms off
the stream in `DECOYS`, and what must be refused in `REFUSED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norms import HIDDEN, SPELLINGS, TOKENS, VOCAB, WIDTH, Factory, layer, randomise, rms, spelled

# ---- branches ----


class Attention(nn.Module):
    """Attend, optionally to another sequence, with norms of q and k, a norm before the output, a score bias."""

    def __init__(self, width: int = WIDTH, heads: int = 2, qk: Factory | None = None, inner: Factory | None = None, bias: bool = True, score: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.q_norm, self.k_norm = (qk(width // heads), qk(width // heads)) if qk else (None, None)
        self.inner = inner(width) if inner else None
        self.score = nn.Parameter(torch.randn(1, heads, TOKENS, TOKENS)) if score else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other

        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(other)), split(self.v(other))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.score is not None:
            scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5 * 0.7) + self.score
            y = torch.softmax(scores, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).flatten(2)
        return self.o(self.inner(y) if self.inner is not None else y)


class Mlp(nn.Module):
    """Compute down(act(up(x))), optionally gated, with a norm before `down`, or GELU written out."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, inner: Factory | None = None, gate: bool = False, bias: bool = True, written: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if gate else None
        self.inner = inner(hidden) if inner else None
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.written:
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))
        else:
            h = F.gelu(h)
        if self.gate is not None:
            h = h * F.silu(self.gate(x))
        return self.down(self.inner(h) if self.inner is not None else h)


class Constant(nn.Module):
    """Write vectors of mean zero and one RMS for every token, so that an output norm changes nothing but the gain.

    how: `angles` (cosines and sines, so that gradients flow) or `sign`. written: an orthogonal map that keeps the
    mean ends the branch, so that it has a writer; else the branch ends in the function itself.
    """

    def __init__(self, how: str = "angles", written: bool = True, scale: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        self.how, self.scale = how, scale
        self.inp = nn.Linear(width, width // (4 if how == "angles" else 2))
        self.out = nn.Parameter(keeping_the_mean(width)) if written else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        half = torch.cat([h.cos(), h.sin()], -1) * 2**0.5 if self.how == "angles" else torch.sign(h + 1e-9)
        y = torch.cat([half, -half], -1) * self.scale
        return y if self.out is None else F.linear(y, self.out)


def keeping_the_mean(width: int) -> Tensor:
    """Return a random orthogonal matrix that maps vectors of mean zero to vectors of mean zero."""
    g = torch.Generator().manual_seed(width)
    start = torch.randn(width, width, generator=g, dtype=torch.float64)
    start[:, 0] = 1
    basis = torch.linalg.qr(start)[0]
    turn = torch.eye(width, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1, generator=g, dtype=torch.float64))[0]
    return (basis @ turn @ basis.T).float()


class Scan(nn.Module):
    """Mix tokens by a decaying sum with a skip D inside the branch, as Mamba does."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.D = nn.Parameter(torch.ones(width) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.inp(x))
        y = torch.cumsum(u * torch.exp(-F.softplus(u)), 1) + u * self.D
        return self.out(y * F.silu(self.gate(x)))


class Route(nn.Module):
    """Send tokens to two of four experts, with a shared expert beside them."""

    def __init__(self, width: int = WIDTH, hidden: int = 16, experts: int = 4, shared: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.shared = Mlp(width, hidden, gate=True) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        weight, pick = torch.topk(torch.softmax(self.router(x), -1), 2, -1)
        h = torch.einsum("btd,btkdh->btkh", x, self.up[pick])
        y = (torch.einsum("btkh,btkhd->btkd", F.silu(h), self.down[pick]) * weight[..., None]).sum(2)
        return y if self.shared is None else y + self.shared(x)


class MixTokens(nn.Module):
    """Mix tokens with one matrix for all channels (MLP-Mixer)."""

    def __init__(self, tokens: int = TOKENS, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)


# ---- blocks and nets ----


class Residual(nn.Module):
    """Compute post(skip * x + gamma * out(branch(inn(x)))), with any of the norms left out."""

    def __init__(self, branch: nn.Module, inn: Factory | None = None, out: Factory | None = None, post: Factory | None = None, skip: float = 1.0, times: float = 1.0, layer_scale: bool = False) -> None:  # fmt: skip
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

    def __init__(self, norm: Factory = layer, shared: bool = True, out: Factory | None = None, whole: Factory | None = None, grouped: bool = False) -> None:  # fmt: skip
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

    def __init__(self, *layers: nn.Module, embed: Factory | None = None, final: Factory | None = None, head: bool = True) -> None:  # fmt: skip
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
            lambda n, x: (x - x.mean(1, keepdim=True))
            / torch.sqrt((x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True) + n.eps)
            * n.weight[:, None, None]
            + n.bias[:, None, None],
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


# ---- what is beyond the picture ----


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
        self.layers = nn.ModuleList(nn.ModuleList((layer(WIDTH), Attention(), layer(WIDTH), Mlp())) for _ in range(layers))

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


class Span(nn.Module):
    """Start the MLP's skip at the layer's input (SpanNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.one, self.two = Attention(), Mlp(), layer(WIDTH), layer(WIDTH)

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


# ---- the nets and what they are ----


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
