"""Say what memory a healing takes in each of many processes: measured here, or counted without the weights.

    python examples/heal_memory.py plan                       # 1B, 7B and 70B on 8 GPUs of 80 GB, by torch's tracker
    python examples/heal_memory.py plan --only 70B --processes 32
    python examples/heal_memory.py measure --processes 1,2,4  # a folder of 0.3 G parameters, three steps, over gloo

`plan` takes one step on fake tensors, as the first of so many processes whose others are not there, and counts every
tensor (torch.distributed._tools.fsdp2_mem_tracker, a private name of torch 2.11 to 2.15). `measure` starts processes of
its own, and compares their peaks with what the design implies, and their result with that of one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lnrewrite.backends.torch import fused
from lnrewrite.backends.torch.capture import capture_module
from lnrewrite.checkpoints.healing import heal_folder
from lnrewrite.checkpoints.shards import Stored, stored_in
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.distributed import World
from lnrewrite.healing.losses import Mix, Objective
from lnrewrite.healing.participant import Participant
from lnrewrite.healing.training import Phase
from lnrewrite.loading.identify import identify
from lnrewrite.models.program import Program

Shape = tuple[int, int, int, int, int, int]
SHAPES: dict[str, Shape] = {
    "1B": (16, 2048, 8192, 32, 8, 128_256),
    "7B": (32, 4096, 11_008, 32, 32, 32_000),
    "70B": (80, 8192, 28_672, 64, 8, 32_000),
}
"""Layers, width, width inside the MLP, heads, heads of keys and values, vocabulary: Llama 3.2 1B, Llama 2 7B, 70B."""

STATES = {"teacher": 4, "student": 4, "gradients": 4, "moments": 8}
"""Bytes for each parameter, which all processes share."""

GATHERED = 5
"""Copies of the largest part that a process holds whole: two that are gathered, gradients, and what is reduced."""

WINDOW, ROWS, STEPS = 16, 4, 3
"""Of the measured run: tokens of a row, rows of a step, and steps."""


def llama(layers: int, width: int, inside: int, heads: int, keys: int, vocab: int, length: int) -> LlamaForCausalLM:
    """Build a Llama on the device that is the default."""
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inside, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=vocab, max_position_embeddings=length, use_cache=False,
        tie_word_embeddings=vocab > 100_000,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


# ---- counted on fake tensors ----


class Both(nn.Module):
    """Hold both networks of a step under one root, as the tracker asks for, and compute its loss."""

    def __init__(self, phase: Phase) -> None:
        super().__init__()
        assert phase.teacher is not None
        self.student, self.teacher = phase.student.view, phase.teacher.view
        self.phase = [phase]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        (phase,) = self.phase
        return phase.total(phase.terms(batch, batch["input_ids"].numel()))


def light() -> type[Any]:
    """Return torch's tracker without the peak of each module, which it looks through at every operator."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    class Light(FSDPMemTracker):
        def _update_peak_stats(self, peak_state: Any) -> None:
            for device, now in self._curr_mem_snap.items():
                if now["Total"] > self._peak_mem.get(device, 0):
                    self._peak_mem[device], self._peak_mem_snap[device] = now["Total"], dict(now)

    return Light


def planned(shape: Shape, processes: int, rows: int, length: int) -> tuple[int, int, dict[str, int]]:
    """Return the parameters of a shape, the bytes at the peak of a step, and what they are of."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with torch.device("meta"):
        model = llama(*shape, length)
        ids = torch.zeros((2, 16), dtype=torch.int64)
    program = Program(capture_module(model, (), {"input_ids": ids}))
    for path, buffer in model.named_buffers():
        holder = program.module().get_submodule(path.rpartition(".")[0])
        setattr(holder, path.rpartition(".")[2], torch.zeros(buffer.shape, dtype=buffer.dtype))
    fused.CACHED = fused.LARGE  # as on a GPU
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        world = World(0, processes, torch.device("cpu"))
        assert world.mesh  # it is made of numbers that are there
        with FakeTensorMode(allow_non_fake_inputs=True):
            student, teacher = (Participant.bare(program, world, bf16=True) for _ in range(2))
            student.view.recompute = True
            objective, mix = Objective("input_ids", (), False), Mix(task=0.5, kl=0.5, hidden=1.0)
            names = frozenset(student.named)
            config = HealingConfig(bf16=True, gradient_checkpointing=True)
            phase = Phase("global", 1, student, teacher, objective, mix, config, names, {}, 1e-4)
            both = Both(phase)
            world.shard(both, (), bf16=True)
            optimizer = phase.optimizer()
            batch = {"input_ids": torch.zeros((rows, length), dtype=torch.int64)}

            def step() -> None:
                both(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            step()  # it makes the moments; and shapes that DTensor tries whole are remembered, and not counted below
            tracker = light()(both, optimizer)
            tracker.track_inputs((batch["input_ids"],))
            with tracker:
                step()
        found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        torch.distributed.destroy_process_group()
    parts = {str(getattr(kind, "value", kind)): size for kind, size in found.items() if size}
    return sum(p.numel() for p in model.parameters()), parts.pop("Total"), parts


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Say what memory a healing takes in each process."""


@main.command(context_settings={"show_default": True})
@click.option("--only", type=click.Choice(list(SHAPES)), multiple=True, help="These shapes instead of all.")
@click.option("--processes", default=8, help="GPUs.")
@click.option("--rows", default=1, help="Rows of a micro-batch in each process.")
@click.option("--length", default=2048, help="Tokens of a row.")
@click.option("--memory", default=80, help="GB of a GPU.")
def plan(only: tuple[str, ...], processes: int, rows: int, length: int, memory: int) -> None:
    """Count the bytes of a step with --bf16 and --gradient-checkpointing, without the weights."""
    torch.set_num_threads(1)
    click.echo(f"{processes} processes, {rows} x {length} tokens in each; GB of 10^9 bytes")
    click.echo(f"{'':4} {'parameters':>12} {'states':>8} {'peak':>8}  of {memory} GB")
    for name in only or SHAPES:
        began = time.perf_counter()
        count, peak, parts = planned(SHAPES[name], processes, rows, length)
        states = sum(STATES.values()) * count / processes
        verdict = "does not fit" if peak > memory * 1e9 else "fits"
        click.echo(f"{name:4} {count:12,} {states / 1e9:8.2f} {peak / 1e9:8.2f}  {verdict}")
        told = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in sorted(parts.items(), key=lambda x: -x[1]))
        click.echo(f"     {told} ({time.perf_counter() - began:.0f} s)")


# ---- measured ----


class Peak(threading.Thread):
    """Watch how much memory of its own this process holds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.start_at = 0, held()

    def run(self) -> None:
        """Look every few milliseconds."""
        while True:
            self.most = max(self.most, held())
            time.sleep(0.005)


def held() -> int:
    """Return the bytes that this process holds and no file does."""
    row = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(row.split()[1]) * 1024


@main.command(hidden=True)
@click.argument("folder", type=Path)
@click.argument("out")
@click.option("--bf16", is_flag=True)
@click.option("--resume", is_flag=True)
@click.option("--save-steps", default=100)
@click.option("--control/--no-control", default=False)
def worker(folder: Path, out: str, bf16: bool, resume: bool, save_steps: int, control: bool) -> None:
    """Heal in one of several processes, and write its peak down."""
    torch.set_num_threads(1)
    watch = Peak()
    watch.start()
    config = HealingConfig(
        steps=STEPS, batch_size=ROWS, lr=1e-4, gain_lr=1.0, control_lr=1e-4, control=control, bf16=bf16,
        gradient_checkpointing=True, save_steps=save_steps,
    )  # fmt: skip
    pair = identify(str(folder / "teacher")), identify(str(folder / "student"))
    how: dict[str, Any] = {"length": WINDOW, "run": f"{out}.run", "resume": resume}
    report = heal_folder(*pair, str(folder / "tokens.npy"), config, out, **how).report
    told = {"start": watch.start_at, "peak": watch.most, "losses": report.losses}
    Path(f"{out}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))


@main.command(hidden=True)
@click.argument("folder", type=Path)
@click.argument("layers", type=int)
@click.argument("width", type=int)
@click.argument("vocab", type=int)
def make(folder: Path, layers: int, width: int, vocab: int) -> None:
    """Write a Llama of random weights, what a conversion makes of it, and tokens."""
    import lnrewrite as lnr

    torch.manual_seed(0)
    teacher, tokens = folder / "teacher", folder / "tokens.npy"
    llama(layers, width, 4 * width, width // 64, width // 64, vocab, WINDOW).save_pretrained(teacher)
    np.save(tokens, np.random.default_rng(0).integers(0, vocab, 200 * WINDOW, dtype=np.int32))
    rows = folder / "rows.npy"
    np.save(rows, np.load(tokens)[: 8 * WINDOW].reshape(8, WINDOW).astype(np.int64))
    lnr.rewrite_file(str(teacher), "place{to=peri fit=constants}", str(folder / "student"), calibrate=str(rows))


def launch(folder: Path, out: Path, count: int, *options: str) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a run."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_000 + os.getpid() % 500 + count)}
    place |= {"WORLD_SIZE": str(count), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "worker", str(folder), str(out), *options]
    return [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(count)]


def tensors(folder: Path) -> dict[str, Stored]:
    """Return where what a folder holds lies."""
    return {key: where for path in folder.glob("*.safetensors") for key, where in stored_in(path).items()}


def farthest(one: Path, other: Path) -> float:
    """Return how far the weights of two folders are apart at most."""
    pairs = ((where.read().float(), tensors(other)[key].read().float()) for key, where in tensors(one).items())
    return max(float((a - b).abs().max()) for a, b in pairs)


@main.command(context_settings={"show_default": True})
@click.option("--folder", type=Path, default=Path("heal_memory"), help="Where models and results lie.")
@click.option("--layers", default=17)
@click.option("--width", default=1024)
@click.option("--vocab", default=8192)
@click.option("--processes", default="1,2,4", help="How many in each run.")
@click.option("--bf16", is_flag=True, help="Compute and reduce in bfloat16.")
def measure(folder: Path, layers: int, width: int, vocab: int, processes: str, bf16: bool) -> None:
    """Heal a folder for three steps in so many processes, and compare memory with the formula, weights with one's."""
    folder.mkdir(exist_ok=True)
    if not (folder / "student" / "config.json").is_file():
        sizes = map(str, (layers, width, vocab))
        subprocess.run([sys.executable, __file__, "make", str(folder), *sizes], check=True)
    count = sum(int(np.prod(where.shape)) for where in tensors(folder / "student").values())
    largest = max(3 * 4 * width * width, vocab * width + 4 * width * width)  # an MLP, or the table with an attention
    first: Path | None = None
    click.echo(
        f"{count:,} parameters; GB of 10^9 bytes for each process: {json.dumps(STATES)} bytes a parameter, shared,"
    )
    click.echo(f"and {GATHERED} copies of the largest part ({largest * 4 / 1e9:.2f} GB)")
    for size in map(int, processes.split(",")):
        out = folder / f"healed-{size}"
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(f"{out}.run", ignore_errors=True)
        began = time.perf_counter()
        codes = [p.wait() for p in launch(folder, out, size, *(["--bf16"] if bf16 else []))]
        if any(codes):
            raise click.ClickException(f"{size} processes ended with {codes}")
        seconds = time.perf_counter() - began
        told = [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(size)]
        formula = (sum(STATES.values()) * count / size + GATHERED * 4 * largest * (size > 1)) / 1e9
        peaks = ", ".join(f"{(row['peak'] - row['start']) / 1e9:.2f}" for row in told)
        first = first or out
        apart, moved = (farthest(out, other) for other in (first, folder / "student"))
        loss = told[0]["losses"]["healed"]["mean"]
        click.echo(f"{size} processes: formula {formula:.2f}, peaks {peaks}; healed loss {loss:.6f}; {seconds:.0f} s")
        click.echo(
            f"    weights at most {apart:.1e} from those of the first run, and up to {moved:.1e} from the student's"
        )


if __name__ == "__main__":
    main()
