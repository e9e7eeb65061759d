"""Measure what a checkpoint folder of 10^9 parameters takes: memory against its size, CPU time against a forward pass.

    python examples/real_scale.py                                  # float32, about 4 GB; needs three times that on disk
    python examples/real_scale.py --dtype bfloat16                 # 2 GB
    python examples/real_scale.py --width 1024 --layers 12 --steps peri
    python examples/real_scale.py --steps peri --processes 2       # by torchrun
    python examples/real_scale.py --plan                           # what 8B and 70B would take, from their shapes

Writes a Llama with random weights and planted outliers as a folder of sharded safetensors, and 9 x 512 tokens, of which
8 x 512 are fitted to. Every command runs as a process of its own, on one thread; a forward pass over the tokens is
timed in float32, which is what folders are computed in. Of several processes, the largest peak and all CPU time count.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROWS, LENGTH, VOCABULARY = 9, 512, 32000
SHAPES = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64)}
"""Layers, width, width inside the MLP, and heads; Llama 3's, with 8 heads of keys and 128,256 tokens."""
COMMANDS = {
    "peri": ["convert", "IN", "--to", "peri", "--calibrate", "DATA", "-o", "OUT", "-q"],
    "post": ["convert", "IN", "--to", "post", "--calibrate", "DATA", "-o", "OUT", "-q"],
    "fold": ["opt", "IN", "--passes", "fold-affine", "-o", "OUT", "-q"],
    "verify": ["verify", "IN", "OUT", "-q"],
    "inspect": ["inspect", "IN", "-q"],
    "export": ["export", "IN", "-o", "FILE", "--target", "cpu", "--force", "-q"],
}
"""`verify` compares with what the command before it wrote."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@click.command(context_settings={"show_default": True})
@click.option("--width", default=2048, help="Channels of the stream.")
@click.option("--layers", default=16, help="Layers of two blocks.")
@click.option("--dtype", default="float32", help="float32 or bfloat16: how the folder holds its weights.")
@click.option("--steps", default="peri,post,fold,verify,inspect", help=f"Which of {', '.join(COMMANDS)}.")
@click.option("--processes", default=1, help="How many share the data of a conversion.")
@click.option("--folder", help="Where to work, and to keep what was made; else a temporary folder.")
@click.option("--plan", is_flag=True, help="Run nothing: print what each step on 8B and 70B would hold.")
def main(width: int, layers: int, dtype: str, steps: str, processes: int, folder: str | None, plan: bool) -> None:
    """Print the peak memory of each command over the checkpoint's size, and its CPU time over a forward pass."""
    if plan:
        for name, shape in SHAPES.items():
            planned(name, *shape)
        return
    with tempfile.TemporaryDirectory() as place:
        room = Path(folder or place)
        source, data, out = room / f"llama-{width}-{layers}-{dtype}", room / "tokens.npz", room / "out"
        if not source.exists():
            apart("--make", source, data, width, layers, dtype)
        size = sum(p.stat().st_size for p in source.glob("*.safetensors"))
        program = [str(Path(sys.executable).with_name("lnrewrite"))]
        if processes > 1:
            program = [*TORCHRUN, str(processes), "-m", "lnrewrite.cli"]
        forward = float(apart("--forward", source, data).split()[-1])
        copied = measured([sys.executable, __file__, "--copy", str(source), str(room / "copy")])[1]
        click.echo(f"checkpoint {size / 1e9:.2f} GB of {dtype}; a forward pass takes {forward:.0f} s of CPU, a copy "
                   f"{copied:.1f} s")  # fmt: skip
        click.echo("step       peak GB   of checkpoint   CPU s   of a forward")
        for step in steps.split(","):
            if step != "verify":
                shutil.rmtree(out, ignore_errors=True)
            names = {"IN": str(source), "OUT": str(out), "DATA": str(data), "FILE": str(room / "model.onnx")}
            words = [names.get(w, w) for w in COMMANDS[step]]
            peak, spent, code = measured([*program, *words])
            told = "" if not code else f"   exit {code}"
            click.echo(
                f"{step:<9} {peak / 1e9:>8.2f} {peak / size:>15.2f} {spent:>7.0f} {spent / forward:>14.2f}{told}"
            )


def apart(*words: object) -> str:
    """Run a part of this script as a process of its own, whose memory is not counted; return what it prints."""
    found = subprocess.run([sys.executable, __file__, *map(str, words)], check=True, capture_output=True, text=True)
    return found.stdout


def measured(command: list[str]) -> tuple[int, float, int]:
    """Run a command on one thread; return its peak memory in bytes, its CPU seconds, and its exit code."""
    started = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), used.ru_utime + used.ru_stime, started.returncode


def make(folder: Path, data: Path, width: int, layers: int, dtype: str) -> None:
    """Write the checkpoint, shard by shard, and the tokens."""
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        intermediate_size=width * 11 // 4, vocab_size=VOCABULARY, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"], dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    folder.mkdir(parents=True)
    held: dict[str, torch.Tensor] = {}
    shards: dict[str, str] = {}
    names = [n for n, _ in model.named_parameters()]
    for name in names:
        value = torch.randn(model.get_parameter(name).shape) * 0.02
        if name.endswith("norm.weight"):
            value = 1 + 10 * value
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            outlier = value.T if "embed" in name else value
            outlier[7::401] *= 20  # the stream's outlier channels
        held[name] = value.to(getattr(torch, dtype))
        if sum(t.numel() for t in held.values()) > 1 << 27 or name == names[-1]:
            file = f"model-{len(set(shards.values())) + 1:05}.safetensors"
            save_file(held, folder / file, {"format": "pt"})
            shards |= dict.fromkeys(held, file)
            held = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    config.save_pretrained(folder)
    np.savez(data, input_ids=np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)))


def forward(folder: Path, data: Path) -> None:
    """Print the CPU seconds of one forward pass over the tokens in float32, from every third row."""
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = torch.from_numpy(np.load(data)["input_ids"])
    with torch.no_grad():
        model(rows[:1], use_cache=False)
        started = time.process_time()
        for row in rows[::3]:
            model(row[None], use_cache=False)
    print(3 * (time.process_time() - started))


def planned(name: str, layers: int, width: int, inside: int, heads: int) -> None:
    """Print what the largest step of each kind would hold of one of Llama's shapes, from its graph and no weights."""
    import torch
    import transformers

    from lnrewrite import capture
    from lnrewrite.backends.torch.parts import Parts
    from lnrewrite.models.sampling import KINDS

    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        intermediate_size=inside, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.zeros((2, LENGTH), dtype=torch.int64, device="meta")
    program = capture(
        model, kwargs={"input_ids": ids, "use_cache": False}, dynamic_shapes={"input_ids": None, "use_cache": None}
    )
    module, rows = program.module(), (ROWS - 1) * LENGTH
    ends = {b.anchor.total for b in program.network.blocks}
    parts = Parts(module, module.graph, {n for n in module.graph.nodes if n.name in ends})
    numbers = [sum(p.numel() for p in part.parameters()) for part in parts.parts]
    shared = sum(p.numel() for n, p in parts.named_parameters() if not n.startswith("parts."))
    live, most = set(parts.inputs), 0
    for step in parts.steps:
        live |= set(step.makes)
        most = max(most, sum(n.meta["val"].numel() for n in live if isinstance(n.meta.get("val"), torch.Tensor)))
        live -= set(step.drops)
    largest, states = max(numbers) + shared, most * (ROWS - 1) // 2
    samples = KINDS * rows * width * 8
    tensor = max(p.numel() for p in model.parameters())
    held = {
        "samples and fit": largest * 4 + states * 4 + 3 * samples,
        "drift": largest * 4 + states * 4 // (ROWS - 1) + 3 * LENGTH * config.vocab_size * 8,
        "verify": largest * 8 + 3 * 45 * config.vocab_size * 8,
        "edit and write": tensor * 2,
    }
    size = 2 * sum(p.numel() for p in model.parameters())
    what = f"{size / 1e9:.0f} GB of bfloat16 in {len(numbers)} parts"
    click.echo(f"{name}: {what}, the largest of {max(numbers) / 1e6:.0f} million parameters")
    for step, many in held.items():
        click.echo(f"  {step:<16} {many / 1e9:>7.2f} GB {many / size:>7.3f} of the checkpoint")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    elif sys.argv[1:2] == ["--forward"]:
        forward(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--copy"]:
        shutil.copytree(sys.argv[2], sys.argv[3])
        shutil.rmtree(sys.argv[3])
    else:
        main()
