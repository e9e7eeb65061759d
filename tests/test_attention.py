"""Attention of nets without a cache, exported for CUDA: one operator with its products, however it is spelled.

Made up: how queries, keys and values are made and taken apart, biases, and masks, some of which hide all from a row.
"""

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lnrewrite as lnr

WIDTH, HEADS, TOKENS = 64, 4, 7
SPELLINGS = ("chunk", "split", "three first", "unbind", "heads first", "apart", "no key bias", "crossed")
MASKS = ("none", "bool", "float", "causal", "relative", "of heads")


class Attention(nn.Module):
    def __init__(self, spelling: str, bias: bool, mask: str) -> None:
        super().__init__()
        self.spelling, self.mask = spelling, mask
        if spelling in ("apart", "no key bias", "crossed"):
            self.q, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
            self.k = nn.Linear(WIDTH, WIDTH, bias=bias and spelling != "no key bias")
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(HEADS, 9, 9))

    def heads(self, x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        rows, tokens, size = *x.shape[:2], WIDTH // HEADS
        if self.spelling == "three first":
            return tuple(self.qkv(x).view(rows, tokens, 3, HEADS, size).permute(2, 0, 3, 1, 4))
        if self.spelling == "unbind":
            return self.qkv(x).view(rows, tokens, 3, HEADS, size).transpose(1, 3).unbind(2)
        if self.spelling == "heads first":
            return tuple(self.qkv(x).view(rows, tokens, HEADS, 3, size).permute(3, 0, 2, 1, 4))
        if self.spelling == "chunk":
            parts = self.qkv(x).chunk(3, -1)
        elif self.spelling == "split":
            parts = self.qkv(x).split(WIDTH, -1)
        else:
            source = memory if self.spelling == "crossed" else x
            parts = self.q(x), self.k(source), self.v(source)
        return tuple(part.view(rows, -1, HEADS, size).transpose(1, 2) for part in parts)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.heads(x, memory)
        tokens, keys = q.shape[2], k.shape[2]
        seen = seen[:, None, :, :keys]
        mask = {
            "none": lambda: None, "bool": lambda: seen, "float": lambda: torch.where(seen, 0.3, -torch.inf),
            "causal": lambda: torch.ones(tokens, keys, dtype=torch.bool).tril()[None, None],
            "relative": lambda: self.table[None, :, :tokens, :keys],
            "of heads": lambda: seen & (torch.arange(HEADS)[None, :, None, None] < 3),
        }[self.mask]()  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self, *how: object) -> None:
        super().__init__()
        self.enter, self.norms = nn.Linear(8, WIDTH), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(*how)  # type: ignore[arg-type]
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.attention(self.norms[0](x), self.enter(memory), seen)
        return x + self.mlp(self.norms[1](x))


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


CASES = [*product(SPELLINGS, (True, False), MASKS)]


def case(index: int) -> object:
    marks = () if index % 12 == (index // 12) % 12 or index == 43 else (pytest.mark.exhaustive,)
    return pytest.param(*CASES[index], id=" ".join(map(str, CASES[index])).replace(" ", "-"), marks=marks)


@pytest.mark.parametrize(("spelling", "bias", "mask"), [case(index) for index in range(len(CASES))])
def test_attention_is_one_operator_and_rows_that_see_nothing_are_zero(
    spelling: str, bias: bool, mask: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = Net(spelling, bias, mask).eval()
    x, memory, seen = torch.randn(2, TOKENS, 8), torch.randn(2, TOKENS, 8), torch.rand(2, TOKENS, TOKENS) > 0.5
    seen[0, 3], seen[1, :2] = False, False
    lnr.capture(net, args=(x, memory, seen)).export(path := tmp_path / "net.onnx", target="cuda")
    counts = operators(path)
    crossed = spelling == "crossed"
    assert (counts["Attention"], counts["MultiHeadAttention"]) == (not crossed, crossed)
    assert mask == "of heads" or counts["Transpose"] <= (mask in ("bool", "float"))  # of which rows see anything
    folded = lnr.Pipeline.parse("fold-affine").run(lnr.load(path))
    assert folded.report.edits == 2
    folded.program.save(again := tmp_path / "folded.onnx")
    assert [operators(again)[name] for name in counts if name != "Add"] == [n for o, n in counts.items() if o != "Add"]
    with torch.no_grad():
        wanted = net(x, memory, seen).numpy()
    for file in (path, again):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        held = {"x": x, "memory": memory, "seen": seen}
        found = session.run(None, {value.name: held[value.name].numpy() for value in session.get_inputs()})[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_quantized_attention_keeps_its_products(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = torch.randn(2, TOKENS, 8), torch.randn(2, TOKENS, 8), torch.ones(2, TOKENS, TOKENS, dtype=torch.bool)
    net = lnr.capture(Net("chunk", True, "none").eval(), args=given)
    net.export(path := tmp_path / "net.onnx", target="cuda", dtype="fp16", quantize="int4")
    counts = operators(path)
    assert counts["MatMulNBits"] >= 4 and not counts["Attention"]
