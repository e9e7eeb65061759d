"""Define the demo model: a byte-level Pre-LN GPT small enough to ship and to read in one sitting.

Every sublayer reads the residual stream through a LayerNorm and adds its result back, as in GPT-2
(Radford et al. 2019):

    x = tok[ids] + pos[0 .. seq-1]
    x = x + attn(norm1(x)); x = x + mlp(norm2(x))       once per block
    logits = norm(x) @ tok^T
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Mix positions causally with `heads` heads: [batch, seq, width] -> [batch, seq, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, seq, width / heads]
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Transform each position alone, four times wider inside: [batch, seq, width] -> [batch, seq, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Add attention, then the MLP, to the stream, each behind its own LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Predict the next byte: input_ids int64[batch, seq <= context] -> logits [batch, seq, vocab].

    The head shares its matrix with the token embedding. Fresh weights are GPT-2's: normal(0, 0.02), biases
    zero, both writers of each block divided by sqrt(2 * layers), so that depth does not inflate the stream.
    """

    def __init__(self, vocab: int = 256, layers: int = 6, width: int = 128, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writer = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writer else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tok(input_ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
