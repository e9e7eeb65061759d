"""Train a second small model, of another shape than demo:tinygpt: RMSNorm, rotary positions, SwiGLU, an untied head.

    python examples/train_tinyrope.py --out tinyrope.safetensors

Some ten minutes on two CPU threads. `heal_placements.py` heals it; like tinygpt it reads bytes of Python source.
"""

import sysconfig
import time
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F
from train_tinygpt import CONTEXT, optimizer_of, schedule, sources, write

from lnrewrite import demo


class Attention(nn.Module):
    """Mix positions causally; queries and keys are rotated by their position (RoFormer, arXiv 2104.09864)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """Transform each position alone, gated: down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), SwiGlu(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class TinyRope(nn.Module):
    """Predict the next byte: input_ids int64[batch, seq] -> logits [batch, seq, 256]."""

    def __init__(self, layers: int = 4, width: int = 96, heads: int = 4, inner: int = 256) -> None:
        super().__init__()
        self.tok = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 256, bias=False)
        half = width // heads // 2
        self.register_buffer("rates", 10_000 ** (-torch.arange(half) / half), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writer = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.05 / (2 * layers) ** 0.5 if writer else 0.05)

    def forward(self, input_ids: Tensor) -> Tensor:
        angles = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] * self.rates
        angles = torch.cat((angles, angles), -1)
        x = self.tok(input_ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def load(path: Path) -> TinyRope:
    """Return the trained model from its weights."""
    model = TinyRope()
    model.load_state_dict(load_file(path))
    return model.eval()


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=Path("tinyrope.safetensors"))
@click.option("--steps", default=6000, help="Optimizer steps.")
@click.option("--batch-size", default=16, help=f"Windows of {CONTEXT} bytes per step.")
@click.option("--lr", default=3e-3, help="Peak learning rate.")
@click.option("--threads", default=2, help="CPU threads.")
@click.option("--seed", default=0, help="Seed of weights, file order and batches.")
def main(out: Path, steps: int, batch_size: int, lr: float, threads: int, seed: int) -> None:
    """Train tinyrope and write its weights to OUT."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    training, heldout, _ = sources(Path(sysconfig.get_paths()["stdlib"]), seed)
    text = torch.frombuffer(bytearray(training), dtype=torch.uint8)
    model = TinyRope()
    optimizer = optimizer_of(model, lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps, 150))
    start = time.perf_counter()
    for step in range(1, steps + 1):
        batch = text[torch.randint(len(text) - CONTEXT, (batch_size, 1)) + torch.arange(CONTEXT + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 500 == 0 or step == steps:
            score = demo.loss(model, heldout)
            minutes = (time.perf_counter() - start) / 60
            click.echo(f"step {step}/{steps}  {minutes:.1f} min  held-out {score:.4f} nats per byte")
    write(out, save(model.state_dict()))


if __name__ == "__main__":
    main()
