"""Measure the memory that exact passes take on a model of 10^9 parameters, against the size of its checkpoint.

    python examples/exact_1b.py [--width 2048] [--layers 18]

Writes a GPT-NeoX with random weights as a transformers folder of sharded safetensors into a temporary folder (4 GB,
and 4 GB more for the result), runs `lnrewrite opt FOLDER --passes fold-affine,layernorm-to-rmsnorm` on it as a process
of its own, and prints that process's peak memory. No proof is run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click


@click.command(context_settings={"show_default": True})
@click.option("--width", default=2048, help="Channels of the stream.")
@click.option("--layers", default=18, help="Layers of two blocks.")
def main(width: int, layers: int) -> None:
    """Print parameters, the checkpoint's size, the peak memory and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, output = Path(folder, "checkpoint"), Path(folder, "out.pt2")
        subprocess.run([sys.executable, __file__, "--make", checkpoint, str(width), str(layers)], check=True)
        size = sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
        started = time.perf_counter()
        passes = ["--passes", "fold-affine,layernorm-to-rmsnorm"]
        command = Path(sys.executable).with_name("lnrewrite")
        subprocess.run([command, "opt", checkpoint, *passes, "-o", output], check=True)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"\ncheckpoint {size / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB, {peak / size:.2f} times; {seconds:.0f} s")


def make(folder: str, width: int, layers: int) -> None:
    """Write the checkpoint; in a process of its own, whose memory is not counted."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.GPTNeoXConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        vocab_size=32000,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    names = sorted(n for n, _ in model.named_parameters())
    Path(folder).mkdir()
    shards: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    count = 0
    for name in names:
        held[name] = torch.randn(model.get_parameter(name).shape) * 0.02 + (name.endswith("norm.weight"))
        if sum(t.numel() for t in held.values()) > 1 << 26 or name == names[-1]:
            count += 1
            save_file(held, Path(folder, f"model-{count:05}.safetensors"), {"format": "pt"})
            shards |= dict.fromkeys(held, f"model-{count:05}.safetensors")
            held = {}
    index = {"metadata": {}, "weight_map": shards}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
