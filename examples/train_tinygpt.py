"""Train the demo model `demo:tinygpt` on the Python standard library, and write the files the package ships.

    python examples/train_tinygpt.py --steps 13000

About half an hour on two CPU threads. The two texts are written at the start; `tinygpt.safetensors` is
replaced at each evaluation that improves the held-out loss, which is measured with the weights rounded to
float16, as they are shipped. The same seed, torch, Python version and thread count give the same weights.
"""

import math
import random
import sysconfig
import time
from pathlib import Path

import click
import torch
from safetensors.torch import save
from torch.nn import functional as F

from lnrewrite import demo
from lnrewrite.demo.tinygpt import TinyGPT

# Whole files that the model never sees: everyday code without a near copy elsewhere in the library.
HELD_OUT = ("textwrap.py", "fileinput.py", "shlex.py", "json/decoder.py", "queue.py", "copy.py", "sched.py")

# Tests, foreign packages, a folder per platform, and modules that are tables rather than code.
EXCLUDED = {
    *("test", "tests", "site-packages", "lib-dynload", "__pycache__", "__phello__"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "msilib", "pydoc_data"),
    *("entities.py", "_compat_pickle.py", "stringprep.py", "keyword.py", "token.py", "this.py"),
}
CALIBRATION_BYTES = 128 * 1024
CONTEXT = 128  # bytes


def sources(root: Path, seed: int) -> tuple[bytes, bytes, bytes]:
    """Read the library's sources: (training text, held-out text, calibration excerpt).

    The training files are sorted, then shuffled by `seed`; the excerpt is the first ones of ordinary size.
    """
    paths = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    kept = [
        path
        for path in paths
        if not EXCLUDED.intersection(path.parts) and not path.parts[0].startswith(("config-", "_sysconfigdata"))
    ]
    training = [path for path in kept if path.as_posix() not in HELD_OUT]
    random.Random(seed).shuffle(training)
    texts = [(root / path).read_bytes() for path in training]
    excerpt = b"".join(text for text in texts if 4_000 <= len(text) <= 20_000)[:CALIBRATION_BYTES]
    excerpt = excerpt[: excerpt.rindex(b"\n") + 1]
    return b"".join(texts), b"".join((root / name).read_bytes() for name in HELD_OUT), excerpt


def write(path: Path, content: bytes) -> None:
    """Replace `path` whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def rounded(model: TinyGPT) -> dict[str, torch.Tensor]:
    """Copy the parameters in float16, the tied head once (under the embedding's name)."""
    return {name: parameter.detach().half() for name, parameter in model.named_parameters()}


def optimizer_of(model: TinyGPT, lr: float) -> torch.optim.AdamW:
    """Build AdamW that decays matrices only: gains, biases and nothing else of one dimension stay free."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def schedule(step: int, steps: int, warmup: int) -> float:
    """Scale the learning rate: linear to 1 over `warmup` steps, then a cosine down to 0.1 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=Path(demo.__file__).parent, show_default="the package")
@click.option("--steps", default=13000, help="Optimizer steps.")
@click.option("--batch-size", default=16, help=f"Windows of {CONTEXT} bytes per step.")
@click.option("--lr", default=2e-3, help="Peak learning rate.")
@click.option("--warmup", default=150, help="Steps of linear warm-up.")
@click.option("--every", default=500, help="Steps between evaluations.")
@click.option("--threads", default=2, help="CPU threads.")
@click.option("--seed", default=0, help="Seed of weights, file order and batches.")
def main(out: Path, steps: int, batch_size: int, lr: float, warmup: int, every: int, threads: int, seed: int) -> None:
    """Train tinygpt and write tinygpt.safetensors, heldout.txt and calibration.txt to OUT."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    training, heldout, excerpt = sources(Path(sysconfig.get_paths()["stdlib"]), seed)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "heldout.txt", heldout)
    write(out / "calibration.txt", excerpt)
    model, shipped = TinyGPT(context=CONTEXT), TinyGPT(context=CONTEXT).eval()
    click.echo(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(training):,} bytes to train on, "
        f"{len(heldout):,} held out"
    )
    text = torch.frombuffer(bytearray(training), dtype=torch.uint8)
    offsets = torch.arange(CONTEXT + 1)  # a window and its last target
    optimizer = optimizer_of(model, lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps, warmup))
    best, running, start = math.inf, 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        batch = text[torch.randint(len(text) - CONTEXT, (batch_size, 1)) + offsets].long()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        running += loss.item()
        if step % every == 0 or step == steps:
            weights = rounded(model)
            shipped.load_state_dict(weights | {"head.weight": weights["tok.weight"]})
            score = demo.loss(shipped, heldout)
            click.echo(
                f"step {step}/{steps}  {(time.perf_counter() - start) / 60:.1f} min  "
                f"training {running / (step % every or every):.4f}  held-out {score:.4f} nats per byte"
            )
            running = 0.0
            if score < best:
                best = score
                write(out / "tinygpt.safetensors", save(weights))


if __name__ == "__main__":
    main()
