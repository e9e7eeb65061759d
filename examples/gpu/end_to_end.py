"""Time whole models on a GPU: torch.onnx as it is, its peers, lnrewrite's exports, and no norms at all (the limit).

    python examples/gpu/end_to_end.py prepare graphs/     # where transformers is: graphs without weights, a few MB
    python examples/gpu/end_to_end.py run graphs/         # on the CUDA machine: weights drawn there, then timed

Models have the shapes of BERT-base, GPT-2 small, Gemma-2-2B and Llama-3-8B, the last two with fewer layers and a
smaller vocabulary, so that all forms fit a GPU; weights are random, in float16. Forms: `plain` torch.onnx, `optimizer`
onnxruntime's own, `onnxscript` its rules for ONNX Runtime, `ops` and `custom` lnrewrite's export for cuda, `none`
lnrewrite's plainest export with every norm left out. Times are of CUDA graphs on bound memory at batch 1, forms in turn
in an order shuffled anew every round; `memory` is what a session and its graph take on the device.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
import torch
from boundary import in_turn, timed
from weights import draw, hollow

from lnrewrite.kernels.library import register
from lnrewrite.runtime.sessions import PROVIDERS, holds_operators

MODELS = {
    "bert-base": {"model_type": "bert"},
    "gpt2-small": {"model_type": "gpt2"},
    "gemma2-2b-4-layers": {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 4096,
    },
    "llama3-8b-3-layers": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 3,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 4096,
    },
}  # fmt: skip
FORMS = ("plain", "optimizer", "onnxscript", "ops", "custom", "none")
NORMS = {"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"}


# ---- graphs, on a machine with transformers ----


def network(name: str, small: bool) -> Any:
    """Build a model with random weights in float16; `small` keeps its graph and shrinks it, to try the script out."""
    import transformers

    sizes = dict(MODELS[name])
    if small:
        sizes |= {"num_hidden_layers": 2, "n_layer": 2, "hidden_size": 64, "n_embd": 64, "intermediate_size": 128}
        sizes |= {"num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"))
    for key, value in sizes.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config.use_cache, config.pad_token_id = False, 0
    kind = transformers.AutoModel if config.model_type == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    return kind.from_config(config).half().eval()


def write_forms(name: str, folder: Path, small: bool) -> None:
    """Write every form of a model, weights left out; a peer that fails is left out and named."""
    import lnrewrite as lnr

    model, inputs = network(name, small), {"input_ids": torch.ones(2, 8, dtype=torch.int64)}
    with tempfile.TemporaryDirectory() as temporary:
        plain, made = Path(temporary) / "plain.onnx", Path(temporary) / "made.onnx"
        dims = {"input_ids": dict.fromkeys(range(2), torch.export.Dim.AUTO)}
        exported = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=dims, opset_version=18, verbose=False)
        exported.save(plain, external_data=True)
        program = lnr.capture(model, kwargs=inputs)
        writers: dict[str, Callable[[], None]] = {
            "plain": lambda: None,
            "optimizer": lambda: optimizer(plain, made, model.config),
            "onnxscript": lambda: onnxscript(plain, made),
            "ops": lambda: _ours(program, made, "ops"),
            "custom": lambda: _ours(program, made, "custom"),
            "none": lambda: without_norms(program, made),
        }
        for form, write in writers.items():
            try:
                write()
                hollow(plain if form == "plain" else made, folder / f"{name}.{form}.onnx")
            except Exception as why:  # a peer may raise anything
                click.echo(f"{name} {form}: {type(why).__name__}: {str(why)[:150]}", err=True)
            for file in made.parent.glob("made*"):
                file.unlink()


def optimizer(source: Path, target: Path, config: Any) -> None:
    """Run onnxruntime.transformers' optimizer, for the kind of model that comes nearest."""
    from onnxruntime.transformers.optimizer import optimize_model

    kind = {"bert": "bert", "gpt2": "gpt2"}.get(config.model_type, "gpt2")
    sizes = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
    found = optimize_model(str(source), model_type=kind, **sizes, use_gpu=True)
    found.save_model_to_file(str(target), use_external_data_format=True)


def onnxscript(source: Path, target: Path) -> None:
    """Run onnxscript's fusions for ONNX Runtime."""
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    found = optimize_for_ort(ir.load(source))
    ir.save(found[0] if isinstance(found, tuple) else found, target, external_data="made.data")


def _ours(program: Any, target: Path, fuse: str) -> None:
    program.export(target, target="cuda", dtype="fp16", fuse=fuse, verify=False)


def without_norms(program: Any, target: Path) -> None:
    """Write lnrewrite's export with every norm left out: what no fusion can beat."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    program.export(target, target="generic", dtype="fp16", opset=23, verify=False)
    model = ir.load(target)
    for node in list(model.graph):
        if node.op_type in NORMS:
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0], replace_graph_outputs=True)
    RemoveUnusedNodesPass()(model)
    ir.save(model, target, external_data="made.data")


# ---- times, on a machine with a GPU ----


class Timed:
    """Hold a model in a session, its inputs bound, and what it took on the device."""

    def __init__(self, path: Path, tokens: int, target: str) -> None:
        self.stream = torch.cuda.Stream() if target == "cuda" else None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if holds_operators(path):
            register(options, str(path), target == "cuda")
        before = free(target)
        more: dict[str, str] = {}
        if self.stream:
            more = {"enable_cuda_graph": "1", "user_compute_stream": str(self.stream.cuda_stream)}
        sizes = {"batch": 1, "sequence": tokens}
        for item in onnx.load(path, load_external_data=False).graph.input:
            for axis, dim in zip(sizes.values(), item.type.tensor_type.shape.dim, strict=False):
                if dim.dim_param:  # one shape a graph; free ones are computed on the CPU
                    options.add_free_dimension_override_by_name(dim.dim_param, axis)
        self.session = onnxruntime.InferenceSession(path, options, providers=[(PROVIDERS[target], more)])
        self.binding = self.session.io_binding()
        for item in self.session.get_inputs():
            values = np.ones((1, tokens), np.int64)
            self.binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(values, target, 0))
        for item in self.session.get_outputs():
            self.binding.bind_output(item.name, target)
        self.session.run_with_iobinding(self.binding)
        for item, value in zip(self.session.get_outputs(), self.binding.get_outputs(), strict=True):
            self.binding.bind_ortvalue_output(item.name, value)
        for _ in range(3):
            self.once(1)
        self.memory = before - free(target)

    def once(self, inner: int) -> float:
        """Return the microseconds of a run, the mean of `inner`."""
        run = onnxruntime.RunOptions()
        if self.stream:
            run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return timed(lambda: self.session.run_with_iobinding(self.binding, run), inner, self.stream)


def free(target: str) -> int:
    """Return the free bytes of the device."""
    return torch.cuda.mem_get_info()[0] if target == "cuda" else 0


def measure(name: str, folder: Path, tokens: int, target: str, rounds: int) -> dict[str, Any]:
    """Time the forms of a model at one length, in turn."""
    paths = {form: path for form in FORMS if (path := folder / f"{name}.{form}.onnx").exists()}
    forms = {form: partial(Timed, path, tokens, target) for form, path in paths.items()}
    models, taken = in_turn(forms, rounds, 20 if target == "cuda" else 1)
    return {
        "model": name, "tokens": tokens, "us": {form: statistics.median(t) for form, t in taken.items()},
        "memory": {form: model.memory for form, model in models.items()},
        "over_plain": {
            form: statistics.median(a / b for a, b in zip(taken["plain"], times, strict=True))
            for form, times in taken.items()
        },
    }  # fmt: skip


@click.group()
def main() -> None:
    """Write the graphs, or time them."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--small", is_flag=True, help="Tiny models, to try the script out.")
def prepare(folder: Path, small: bool) -> None:
    """Write all forms of all models into FOLDER, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        click.echo(name, err=True)
        write_forms(name, folder, small)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--target", default="cuda", type=click.Choice(["cuda", "cpu"]), show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file for all figures.")
def run(folder: Path, target: str, rounds: int, out: Path | None) -> None:
    """Time what FOLDER holds, one token and 512."""
    random.seed(0)
    draw(folder.glob("*.onnx"), folder)
    rows = []
    click.echo(f"| model | tokens | plain us | {' | '.join(f'{f}, times plain' for f in FORMS[1:])} | memory MiB |")
    click.echo("|" + "---|" * (len(FORMS) + 3))
    for name in MODELS:
        for tokens in (1, 512):
            row = measure(name, folder, tokens, target, rounds)
            rows.append(row)
            cells = [f"{row['over_plain'][f]:.2f}" if f in row["us"] else "-" for f in FORMS[1:]]
            memory = " ".join(f"{form} {size >> 20}" for form, size in row["memory"].items())
            click.echo("| " + " | ".join([name, str(tokens), f"{row['us']['plain']:.0f}", *cells, memory]) + " |")
    if out:
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
