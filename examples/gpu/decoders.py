"""Run exported decoders on a GPU, and compare their logits with what a CPU gave.

    python examples/gpu/decoders.py prepare calls/   # where transformers is: small decoders, their calls and logits
    python examples/gpu/decoders.py run calls/       # on the CUDA machine

Each decoder is exported for CUDA and generates on the CPU from a prompt, from a batch with padding, and after a
continuation; its inputs and logits are kept. On the GPU each call is given the cache that the call before gave, and its
outputs hold no numbers before it. The table has the largest error of a logit, relative to the largest, over all calls,
and the operators that ran on the CPU: arithmetic on shapes should be all.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime
import torch

from lnrewrite.kernels.library import register
from lnrewrite.runtime.sessions import holds_operators

FAMILIES = (
    "llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "glm4", "phi3", "mixtral", "qwen3_moe", "gpt2", "opt",
    "gpt_neox", "falcon",
)  # fmt: skip
FORMS = [(family, "pre", "ops", dtype) for family in FAMILIES for dtype in ("fp16", "bf16")]
FORMS += [("llama", to, fuse, "fp16") for to in ("peri", "post", "output") for fuse in ("ops", "custom")]
FORMS += [("gpt2", "peri", "custom", "fp16"), ("llama", "peri", "custom", "bf16"), ("gemma2", "pre", "custom", "bf16")]
TYPES = {
    "tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16, "tensor(float)": torch.float32,
    "tensor(int64)": torch.int64,
}  # fmt: skip
NUMBERS = {torch.float16: 10, torch.bfloat16: 16, torch.float32: 1, torch.int64: 7}
TOKENS = 3


class Recorder:
    """Run a model, and keep what it was given, its cache left out, and the logits that it gave."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.inputs, self.calls = inner, inner.inputs, dict[str, np.ndarray]()

    def call(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run it once."""
        out, number = self.inner.call(given), len({key.split("|")[0] for key in self.calls})
        held = {name: tensor for name, tensor in given.items() if not name.startswith("past_")}
        for name, tensor in {**held, "logits": out["logits"].float()}.items():
            self.calls[f"{number}|{name}"] = tensor.numpy()
        return out


def record(folder: Path, family: str, placement: str, fuse: str, dtype: str) -> None:
    """Export a small decoder with random gains, and keep how it generates."""
    import transformers

    import lnrewrite as lnr
    from lnrewrite.backends.onnx.file import read
    from lnrewrite.backends.onnx.session import runnable
    from lnrewrite.comparison.generating import Alone, generated
    from lnrewrite.models.decoder import decoder

    config = transformers.AutoConfig.for_model(family)
    sizes = {
        "hidden_size": 64, "n_embd": 64, "intermediate_size": 96, "ffn_dim": 96, "vocab_size": 128, "head_dim": 16,
        "word_embed_proj_dim": 64, "num_key_value_heads": 2, "moe_intermediate_size": 32, "pad_token_id": 0,
        "sliding_window": 5,
        **dict.fromkeys(("num_attention_heads", "n_head"), 4), **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if k in config.to_dict()})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    if placement != "pre":
        model = lnr.convert(model, placement, kwargs={"input_ids": torch.arange(12).reshape(2, 6)}, live=True)
    held, path = decoder(model), folder / f"{family} {placement} {fuse} {dtype}.onnx"
    held.export(path, target="cuda", dtype=dtype, fuse=fuse)
    recorder: Any = Recorder(runnable(read(path, path.stem)))
    generated(Alone(held.part, recorder), {"fp16": 0.05, "bf16": 0.3}[dtype], TOKENS)
    np.savez_compressed(path.with_suffix(".npz"), **recorder.calls)


def replay(path: Path, device: str) -> tuple[float, int, Counter[str]]:
    """Return the largest error of a logit, the number of calls, and the operators that ran on the CPU."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.log_severity_level = True, 3
    options.profile_file_prefix = str(Path(tempfile.gettempdir()) / path.stem.replace(" ", "-"))
    if holds_operators(path):
        register(options, str(path), device == "cuda")
    provider = ("CUDAExecutionProvider", {"use_tf32": "0"}) if device == "cuda" else ("CPUExecutionProvider", {})
    session = onnxruntime.InferenceSession(path, options, providers=[provider])
    calls, worst, cache = dict[str, dict[str, np.ndarray]](), 0.0, dict[str, torch.Tensor]()
    for key, array in np.load(path.with_suffix(".npz")).items():
        number, name = key.split("|")
        calls.setdefault(number, {})[name] = array
    for call in calls.values():
        new, total = call["input_ids"].shape[1], call["attention_mask"].shape[1]
        out = once(session, {**call, **(cache if total > new else {})}, total - new, device)
        cache = {name.replace("present", "past_key_values"): t for name, t in out.items() if name != "logits"}
        wanted = torch.from_numpy(call["logits"])
        error = (out["logits"].cpu().float() - wanted).abs()
        error[~call["attention_mask"][:, total - new :].astype(bool)] = 0  # nothing reads what padding gives
        worst = max(worst, float(error.max() / wanted.abs().max())) if error.isfinite().all() else float("nan")
    nodes = [e for e in json.loads(Path(session.end_profiling()).read_text()) if e["name"].endswith("_kernel_time")]
    on_cpu = (e["args"]["op_name"] for e in nodes if e["args"]["provider"] == "CPUExecutionProvider")
    return worst, len(calls), Counter(on_cpu)


def once(session: Any, given: dict[str, Any], past: int, device: str) -> dict[str, torch.Tensor]:
    """Run a call whose tensors lie on the device, a cache of no tokens where none is given."""
    binding, kept, out = session.io_binding(), list[torch.Tensor](), dict[str, torch.Tensor]()
    batch, new = given["input_ids"].shape

    def bind(way: Any, name: str, tensor: torch.Tensor) -> None:
        kept.append(memory := tensor if tensor.numel() else tensor.new_zeros(64))  # of nothing there is no address
        way(name, device, 0, NUMBERS[tensor.dtype], list(tensor.shape), memory.data_ptr())

    for value in session.get_inputs():
        empty = torch.zeros(batch, *value.shape[1:2], 0, *value.shape[3:]) if len(value.shape) == 4 else None
        tensor = torch.as_tensor(given.get(value.name, empty)).to(device, TYPES[value.type]).contiguous()
        bind(binding.bind_input, value.name, tensor)
    for value in session.get_outputs():
        heads = len(value.shape) == 4
        shape = [batch, value.shape[1], past + new, value.shape[3]] if heads else [batch, new, value.shape[2]]
        out[value.name] = torch.full(shape, float("nan"), device=device, dtype=TYPES[value.type])
        bind(binding.bind_output, value.name, out[value.name])
    session.run_with_iobinding(binding)
    if device == "cuda":
        torch.cuda.synchronize()
    return out


@click.group()
def main() -> None:
    """Record calls on the CPU, or replay them."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--only", default="", help="Forms whose names hold this.")
def prepare(folder: Path, only: str) -> None:
    """Write graphs and calls into FOLDER; what lies there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for form in FORMS:
        if only in (name := " ".join(form)) and not (folder / f"{name}.npz").exists():
            click.echo(name, err=True)
            record(folder, *form)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--target", default="cuda", type=click.Choice(["cuda", "cpu"]), show_default=True)
def run(folder: Path, target: str) -> None:
    """Replay what FOLDER holds."""
    click.echo(f"{onnxruntime.__version__}, {torch.cuda.get_device_name() if target == 'cuda' else 'CPU'}")
    click.echo("| decoder | calls | largest error | on the CPU |\n|---|---|---|---|")
    for recorded in sorted(folder.glob("*.npz")):
        try:
            worst, count, on_cpu = replay(recorded.with_suffix(".onnx"), target)
            told = ", ".join(f"{n} {op}" for op, n in sorted(on_cpu.items())) if target == "cuda" else ""
            click.echo(f"| {recorded.stem} | {count} | {worst:.1e} | {told} |")
        except Exception as why:  # ONNX Runtime has no common base class of its errors
            click.echo(f"| {recorded.stem} | fails | {' '.join(str(why).split())[:200]} | |")


if __name__ == "__main__":
    main()
