"""Good files, made once: what hostile ones are made of."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 16
FACTORY = '''
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.first, self.blocks = nn.Linear(d, d), nn.ModuleList([Block(d), Block(d)])
        self.final, self.head = nn.LayerNorm(d), nn.Linear(d, 8)
        self.register_buffer("scale", torch.ones(d))
    def forward(self, x):
        x = self.first(x) * self.scale + torch.tensor([1.0])
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))
def net():
    torch.manual_seed(0)
    return Net().eval()
'''


class Goods:
    """Make good files when they are asked for; each is bytes, or a dict of names to bytes for a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def net(self) -> nn.Module:
        """A residual net of two blocks with layer norms."""
        held: dict[str, Any] = {"__name__": "nets"}
        exec(compile(FACTORY, "nets.py", "exec"), held)
        made: nn.Module = held["net"]()
        return made

    @functools.cached_property
    def pt2(self) -> bytes:
        """Its torch.export archive, with a free batch and sequence."""
        free = {0: torch.export.Dim("b", min=1, max=1024), 1: torch.export.Dim("s", min=1, max=512)}
        program = torch.export.export(self.net, (torch.randn(2, 4, WIDTH),), dynamic_shapes=(free,))
        stream = io.BytesIO()
        torch.export.save(program, stream)
        return stream.getvalue()

    @functools.cached_property
    def pt(self) -> bytes:
        """Its state dict as a zip."""
        return self._saved(True)

    @functools.cached_property
    def legacy(self) -> bytes:
        """Its state dict as torch wrote it before there were zips."""
        return self._saved(False)

    def _saved(self, zipped: bool) -> bytes:
        stream = io.BytesIO()
        torch.save(self.net.state_dict(), stream, _use_new_zipfile_serialization=zipped)
        return stream.getvalue()

    @functools.cached_property
    def safetensors(self) -> bytes:
        """Its state dict as safetensors."""
        from safetensors.torch import save

        return bytes(save(self.net.state_dict()))

    @functools.cached_property
    def onnx(self) -> Any:
        """The same net as an ONNX ModelProto."""
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        state = {k: v.numpy() for k, v in self.net.state_dict().items()}
        held = [numpy_helper.from_array(np.ascontiguousarray(v.T), k) for k, v in state.items()]
        nodes = []

        def linear(name: str, value: str, out: str) -> None:
            nodes.append(helper.make_node("MatMul", [value, f"{name}.weight"], [f"{out}.m"]))
            nodes.append(helper.make_node("Add", [f"{out}.m", f"{name}.bias"], [out]))

        def norm(name: str, value: str, out: str) -> None:
            given = [value, f"{name}.weight", f"{name}.bias"]
            nodes.append(helper.make_node("LayerNormalization", given, [out], axis=-1, epsilon=1e-5, name=f"n.{out}"))

        linear("first", "x", "h0")
        for i in range(2):
            norm(f"blocks.{i}.norm", f"h{i}", f"n{i}")
            linear(f"blocks.{i}.up", f"n{i}", f"u{i}")
            nodes.append(helper.make_node("Relu", [f"u{i}"], [f"r{i}"], name=f"relu.{i}"))
            linear(f"blocks.{i}.down", f"r{i}", f"d{i}")
            nodes.append(helper.make_node("Add", [f"h{i}", f"d{i}"], [f"h{i + 1}"]))
        norm("final", "h2", "last")
        linear("head", "last", "y")
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", width])
            for name, width in (("x", WIDTH), ("y", 8))
        ]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [t for t in held if t.name != "scale"])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    @functools.cached_property
    def llama(self) -> dict[str, bytes]:
        """A transformers folder: config, weights, a tokenizer."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
        with contextlib.redirect_stderr(io.StringIO()):
            LlamaForCausalLM(config).save_pretrained(self.folder / "llama")
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"[UNK]": 60}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(self.folder / "llama")
        return {p.name: p.read_bytes() for p in (self.folder / "llama").iterdir() if p.is_file()}

    @functools.cached_property
    def run(self) -> dict[str, bytes]:
        """What a run of heal leaves when it is stopped: OUT.run, relative to the current folder."""
        from click.testing import CliRunner

        from lnrewrite.cli import main
        from lnrewrite.healing.snapshots import Snapshots

        place = self.folder / "healing"
        place.mkdir(parents=True)
        before, end = os.getcwd(), Snapshots.end
        try:
            os.chdir(place)
            Path("m.pt2").write_bytes(self.pt2)
            Path("data.npy").write_bytes(array())
            Snapshots.end = lambda self: None  # type: ignore[method-assign]
            result = CliRunner().invoke(main, list(HEAL))
            assert result.exit_code == 0, result.output
        finally:
            os.chdir(before)
            Snapshots.end = end  # type: ignore[method-assign]
        folder = place / "o.pt2.run"
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


HEAL = (
    "heal", "m.pt2", "m.pt2", "--data", "data.npy", "-o", "o.pt2", "--steps", "2", "--save-steps", "1", "--no-control",
    "--losses", "hidden=1", "--batch-size", "2", "--rehearse", "0",
)  # fmt: skip


def array() -> bytes:
    """Return calibration data for the net: an .npy of 16 samples."""
    import numpy as np

    stream = io.BytesIO()
    np.save(stream, np.random.default_rng(0).standard_normal((16, 4, WIDTH)).astype("float32"))
    return stream.getvalue()


def edited(content: bytes, change: Any) -> bytes:
    """Return JSON after `change`, which edits it in place or returns another."""
    node = json.loads(content)
    made = change(node)
    return json.dumps(node if made is None else made).encode()


def saved(held: Any) -> bytes:
    """Return what torch.save writes of a value."""
    stream = io.BytesIO()
    torch.save(held, stream)
    return stream.getvalue()


def spread(*size: int) -> Any:
    """Return a tensor of one stored number, repeated."""
    return torch.zeros(1).expand(size)
