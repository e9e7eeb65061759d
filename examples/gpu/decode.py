"""Time a decoder of Llama 1B's shape on a GPU, its norms before or on both sides, beside onnxruntime-genai's builder.

    python examples/gpu/decode.py prepare graphs/   # where transformers is, 16 GB of memory: graphs without weights
    python examples/gpu/decode.py run graphs/       # on the CUDA machine: one file of random weights serves them all

Forms: `builder` onnxruntime-genai's own graph, `pre` lnrewrite's export, `peri` the same model converted, `peri custom`
with a NormAddNorm at every boundary. Decoding replays a CUDA graph of one token behind 512 others, in a cache of 1,024
that is read and written in place, as genai does it; `prefill` is a prompt of 512, launched node by node. In float16 at
batch 1, timed by events, forms in turn in an order shuffled anew every round; `bytes` is how long reading the weights
alone takes at the speed of copying.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
import torch
from boundary import in_turn, timed
from onnx import TensorProto
from weights import draw, hollow, left_out

from lnrewrite.kernels.library import register
from lnrewrite.runtime.sessions import holds_operators

FORMS = {"builder": None, "pre": ("pre", "ops"), "peri": ("peri", "ops"), "peri custom": ("peri", "custom")}
PAST, HELD = 512, 1024
"""Tokens before the one that is decoded, and how many the cache has room for."""
TYPES = {
    TensorProto.INT64: torch.int64, TensorProto.INT32: torch.int32, TensorProto.FLOAT16: torch.float16,
    TensorProto.FLOAT: torch.float32,
}  # fmt: skip


def network(family: str, small: bool) -> Any:
    """Build the model with random weights; `small` shrinks it, to try the script out."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 64}
    if small:
        sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()  # 16 GB of memory are enough so


def ours(folder: Path, placement: str, fuse: str, family: str, small: bool) -> Path:
    """Write lnrewrite's export of the model, converted or not."""
    import lnrewrite as lnr

    model = network(family, small)
    if placement != "pre":
        model = lnr.convert(model, placement, kwargs={"input_ids": torch.arange(12).reshape(2, 6)}, live=True)
    lnr.export_model(model, made := folder / "model.onnx", target="cuda", dtype="fp16", fuse=fuse, verify=False)
    return made


def builder(folder: Path, family: str, small: bool) -> Path:
    """Write what onnxruntime-genai's builder makes of the same checkpoint."""
    import tokenizers
    import transformers

    network(family, small).half().save_pretrained(source := folder / "checkpoint")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0, "w1": 1}, "w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(source)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", source, "-o", folder / "built"]
    command += ["-p", "fp16", "-e", "cuda", "-c", folder / "cache"]
    subprocess.run([*map(str, command)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder / "built" / "model.onnx"


def closed(source: Path, target: Path, size: int) -> None:
    """Write a model without its weights, and with the size of a head, which the builder leaves open."""
    hollow(source, target)
    model = onnx.load(target, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if len(dims := value.type.tensor_type.shape.dim) == 4:
            dims[3].dim_value = size
    target.write_bytes(model.SerializeToString())


class Timed:
    """Hold a decoder in a session on bound memory, its cache read and written in place."""

    def __init__(self, path: Path, new: int, past: int, held: int, replay: bool, device: str) -> None:
        self.replay, cuda = replay, device == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if holds_operators(path):
            register(options, str(path), cuda)
        for value in onnx.load(path, load_external_data=False).graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                if dim.dim_param:  # one shape a graph; free ones are computed on the CPU
                    size = 1 if axis == 0 else new if "ids" in value.name else held
                    options.add_free_dimension_override_by_name(dim.dim_param, size)
        more = {"user_compute_stream": str(self.stream.cuda_stream)} if self.stream else {}
        more |= {"enable_cuda_graph": "1"} if replay else {}
        name = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
        self.session = onnxruntime.InferenceSession(path, options, providers=[(name, more)])
        self.binding, self.kept = self.session.io_binding(), dict[str, torch.Tensor]()
        for value in self.session.get_inputs():
            kind = value.type.removeprefix("tensor(").removesuffix(")")
            dtype = {"int64": torch.int64, "int32": torch.int32, "float16": torch.float16}.get(kind, torch.float32)
            if len(value.shape) == 4:
                tensor = torch.randn(1, value.shape[1], held, value.shape[3], device=device).to(dtype)
            elif "mask" in value.name:
                tensor = (torch.arange(held, device=device) < past + new).to(dtype)[None]
            else:
                places = torch.arange(past, past + new, device=device)
                tensor = (places if "position" in value.name else places % 256).to(dtype)[None]
            self.bind(self.binding.bind_input, value.name, tensor)
        for value in self.session.get_outputs():
            if len(value.shape) == 4:
                number, side = re.findall(r"\d+|key|value", value.name)
                tensor = self.kept[f"past_key_values.{number}.{side}"]
            else:
                dtype = torch.float16 if value.type == "tensor(float16)" else torch.float32
                tensor = torch.zeros(1, new, value.shape[-1], device=device, dtype=dtype)
            self.bind(self.binding.bind_output, value.name, tensor)
        self.options = onnxruntime.RunOptions()
        if self.stream:
            self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for _ in range(3):
            self.once(1)

    def bind(self, way: Any, name: str, tensor: torch.Tensor) -> None:
        """Bind a tensor's memory to a name."""
        self.kept[name] = tensor
        kind = next(number for number, dtype in TYPES.items() if dtype == tensor.dtype)
        way(name, tensor.device.type, 0, kind, list(tensor.shape), tensor.data_ptr())

    def once(self, inner: int) -> float:
        """Return the microseconds of a run, the mean of `inner`."""
        return timed(lambda: self.session.run_with_iobinding(self.binding, self.options), inner, self.stream)


def measure(paths: dict[str, Path], new: int, past: int, held: int, replay: bool, device: str, rounds: int) -> dict:
    """Time forms in turn; return microseconds and, against the first, the ratios round by round with quartiles."""
    forms = {form: partial(Timed, path, new, past, held, replay, device) for form, path in paths.items()}
    models, taken = in_turn(forms, rounds, 20 if device == "cuda" else 1)
    first = next(iter(taken))
    ratios = {f: [a / b for a, b in zip(t, taken[first], strict=True)] for f, t in taken.items()}
    nodes = {form: len(onnx.load(paths[form], load_external_data=False).graph.node) for form in models}
    return {
        "us": {form: statistics.median(times) for form, times in taken.items()}, "first": first, "nodes": nodes,
        "ratio": {form: [float(q) for q in np.percentile(values, (25, 50, 75))] for form, values in ratios.items()},
    }  # fmt: skip


def bytes_of(path: Path) -> int:
    """Return how many bytes of weights a model reads for a token: an embedding is not read whole, unless it is tied."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    looked_up = {node.input[0] for node in nodes if node.op_type == "Gather"}
    looked_up -= {name for node in nodes if node.op_type != "Gather" for name in node.input}
    return sum(size for name, (_, size) in left_out(path).items() if name not in looked_up)


def copying(device: str) -> float:
    """Return the bytes per microsecond that a large copy reads and writes."""
    a = torch.randn(1 << 28 if device == "cuda" else 1 << 22, device=device)
    b, stream = torch.empty_like(a), torch.cuda.Stream() if device == "cuda" else None
    return 2 * a.nbytes / min(timed(lambda: b.copy_(a), 5, stream) for _ in range(3))


@click.group()
def main() -> None:
    """Write the graphs, or time them."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--family", default="llama", show_default=True, help="A model_type of transformers, in the same shape.")
@click.option("--small", is_flag=True, help="A tiny model, to try the script out.")
def prepare(folder: Path, family: str, small: bool) -> None:
    """Write all forms into FOLDER, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for form, how in FORMS.items():
        if (target := folder / f"{form}.onnx").exists():
            continue
        click.echo(form, err=True)
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            made = ours(place, *how, family, small) if how else builder(place, family, small)
            closed(made, target, 32 if small else 64)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--target", default="cuda", type=click.Choice(["cuda", "cpu"]), show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file for all figures.")
def run(folder: Path, target: str, rounds: int, out: Path | None) -> None:
    """Time what FOLDER holds."""
    random.seed(0)
    paths = {path.stem: path for path in sorted(folder.glob("*.onnx"))}
    draw(list(paths.values()), folder)
    speed, rows = copying(target), {}
    click.echo(f"{onnxruntime.__version__}, {torch.cuda.get_device_name() if target == 'cuda' else 'CPU'}")
    click.echo(f"copying: {speed / 1e6:.2f} TB/s")
    click.echo("| what | graph | nodes | us | to the first | weights at copying's speed |\n|---|---|---|---|---|---|")
    cases = {"decode, replayed": (1, PAST, HELD, target == "cuda"), "decode": (1, PAST, HELD, False)}
    cases["prefill 512"] = (PAST, 0, PAST, False)
    for what, case in cases.items():
        rows[what] = row = measure(paths, *case, target, rounds)
        for form, time in row["us"].items():
            low, middle, high = row["ratio"][form]
            limit = f"{bytes_of(paths[form]) / speed:.0f} us"
            cells = [what, form, row["nodes"][form], f"{time:.0f}", f"{middle:.3f} ({low:.3f} to {high:.3f})", limit]
            click.echo("| " + " | ".join(map(str, cells)) + " |")
        if out:
            out.write_text(json.dumps({"copying": speed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
