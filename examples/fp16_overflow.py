"""Bring a T5-like model that overflows in fp16 into its range, exactly.

    python examples/fp16_overflow.py

The feed-forward outputs of T5 pass 65504, the largest fp16 number (huggingface/transformers issue 9295). This makes a
small model of that shape, in which the stream, what ReLUs give and the values of attention pass it too; runs it in
float32 and in fp16; and does so again after `--preset fp16`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lnrewrite as lnr

WIDTH, HEADS, HIDDEN, WORDS, LENGTH = 64, 4, 256, 100, 24


class Norm(nn.Module):
    """Compute T5's norm: RMSNorm with float32 statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """Compute a T5 encoder block: attention and a ReLU feed-forward, each behind a norm; `size` scales what it adds."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.wi, self.wo = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        with torch.no_grad():
            self.wi.weight *= size
            self.wo.weight *= size**0.5
            self.v.weight *= size

    def forward(self, x: Tensor) -> Tensor:
        """Run it on [batch, length, WIDTH]."""
        n = self.norm1(x)
        q, k, v = (f(n).view(*n.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        return x + self.wo(torch.relu(self.wi(self.norm2(x))))


class Encoder(nn.Module):
    """Compute a T5-like encoder with a head tied to its table."""

    def __init__(self, size: float = 3e5, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, WORDS] of ids [batch, length]."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def compare(wanted: Tensor, found: Tensor) -> str:
    """Return how far a result is from what is wanted."""
    if not found.isfinite().all():
        return f"{(~found.isfinite()).float().mean():.0%} of the outputs are inf or NaN"
    return f"relative error {((found - wanted).norm() / wanted.norm()).item():.1e}"


def main() -> None:
    """Print the model's outputs against those in float32, before and after."""
    model = Encoder().eval()
    ids = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = [{"ids": torch.randint(0, WORDS, (4, LENGTH))} for _ in range(8)]
    result = lnr.Pipeline.preset("fp16").run(lnr.capture(model, kwargs={"ids": ids}), batches, partial=True)
    print(result.report)
    fitted = result.program.module()
    with torch.no_grad():
        wanted = model(ids)
        print(f"\nbefore, fp16     {compare(wanted, model.half()(ids).float())}")
        print(f"after,  float32  {compare(wanted, fitted(ids=ids))}")
        print(f"after,  fp16     {compare(wanted, fitted.half()(ids=ids).float())}")


if __name__ == "__main__":
    main()
