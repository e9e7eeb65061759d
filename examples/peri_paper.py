"""Ask the claims of the Peri-LN paper (Kim et al. 2025, arXiv 2502.02732) of a small byte model, also after converting.

    python examples/peri_paper.py --out peri_paper            # stopped and started again, it goes on
    python examples/peri_paper.py --out quick --quick         # seconds: whether it runs, no more

A model of eight layers is trained on the Python standard library in four placements, at five learning rates, by
several seeds. Then what the paper has not: a Pre-LN model, trained half-way at one rate, is converted by `lnr.convert`
and goes on at each rate, beside itself left as it is and a Peri-LN model that did the same from the start. OUT gets
`runs.jsonl`, a line per finished run, `table.md` and figures (see `peri_figures.py`). Nothing is tuned: rates are one
grid for all, a placement's best one is chosen on other text than is reported, and claims have their bounds beforehand.
"""

import json
import math
import os
import sysconfig
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path

import click
import torch
from peri_figures import write_report
from torch import Tensor, nn
from torch.nn import functional as F
from train_tinygpt import optimizer_of, schedule, sources

import lnrewrite as lnr
from lnrewrite import demo
from lnrewrite.demo.tinygpt import MLP, Attention

PLACEMENTS = ("post", "pre", "peri", "output")
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
HALF_RATE = 3e-3
"""The rate of the first half of those that are converted, or not, at half-time."""
LAYERS, WIDTH, HEADS, CONTEXT, ROWS = 8, 64, 4, 64, 8
WINDOW = 25
"""Steps that a point of a training curve is the mean of."""
CHOOSING = 32_768
"""First bytes of the held-out text: rates are chosen on them, and figures taken; losses are reported on the rest."""

Job = dict[str, str | int | float]


# ---- the model ----


class Layer(nn.Module):
    """Add attention, then the MLP: x -> trunk(x + after(branch(before(x)))), with norms where a placement has them."""

    def __init__(self, width: int, heads: int, placement: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(width, heads), MLP(width)])
        self.before = nn.ModuleList(norm(width, placement in ("pre", "peri")) for _ in self.parts)
        self.after = nn.ModuleList(norm(width, placement in ("peri", "output")) for _ in self.parts)
        self.trunk = nn.ModuleList(norm(width, placement == "post") for _ in self.parts)

    def forward(self, x: Tensor) -> Tensor:
        for part, before, after, trunk in zip(self.parts, self.before, self.after, self.trunk, strict=True):
            x = trunk(x + after(part(before(x))))
        return x


class Placed(nn.Module):
    """Predict the next byte, with RMSNorm in a placement: input_ids int64[batch, seq] -> logits [batch, seq, 256].

    Fresh weights are those of the paper's analysis, so that a placement alone makes the difference: matrices after
    Glorot, none scaled by depth; the state that enters the first layer has variance 1. One seed gives all placements
    the same matrices.
    """

    def __init__(self, placement: str, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.entry = norm(width, placement == "post")
        self.layers = nn.ModuleList(Layer(width, heads, placement) for _ in range(layers))
        self.norm = norm(width, placement != "post")
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5**0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.entry(self.tok(input_ids) + self.pos(torch.arange(input_ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def norm(width: int, there: bool) -> nn.Module:
    """Return a norm, or what stands where a placement has none."""
    return nn.RMSNorm(width, eps=1e-6) if there else nn.Identity()


def converted(model: Placed, data: list[dict[str, Tensor]], fit: str) -> Placed:
    """Convert a Pre-LN model to Peri-LN, and put what `lnr.convert` made of it into a model of our own."""
    made = lnr.convert(model, "peri", kwargs=data[0], calibrate=data, fit=fit, live=True)
    layers, width = len(model.layers), model.tok.embedding_dim
    ours = Placed("peri", layers, width, model.layers[0].parts[0].heads)
    names = {name: name.replace("parts", "after").replace("norm_out.", "") for name in made.state_dict()}
    weights = {names[name] if "norm_out" in name else name: t for name, t in made.state_dict().items()}
    ours.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(ours(**data[0]), made(**data[0]))
    return ours


# ---- what is measured ----


@contextmanager
def states(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Collect the state before the first layer and behind each: [depths][batch, seq, width]."""
    found: list[Tensor] = []
    hooks = [layers[0].register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))]
    hooks += [layer.register_forward_hook(lambda _, args, out: found.append(out.detach())) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def variances(found: list[Tensor]) -> list[float]:
    """Return for each state the variance over its channels, mean over its tokens."""
    return [x.double().var(-1, unbiased=False).mean().item() for x in found]


def gradients(layers: nn.ModuleList) -> list[float]:
    """Return for each layer the length of the gradient of its matrices: of the same weights in every placement."""
    every = [[p.grad.norm() for p in layer.parameters() if p.dim() > 1 and p.grad is not None] for layer in layers]
    return [torch.stack(norms).norm().item() for norms in every]


def picture(model: Placed, ids: Tensor) -> dict:
    """Return variances, gradients and largest activations by depth on int64[rows, seq + 1]; gradients are cleared."""
    model.zero_grad()
    with states(model.layers) as found:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    sizes = {"largest": [x.abs().max().item() for x in found], "median": [x.abs().median().item() for x in found]}
    measured = {"variance": variances(found), "gradient": gradients(model.layers)} | sizes
    model.zero_grad()
    return measured


# ---- training ----


@cache
def text() -> Tensor:
    """Return the training text, uint8[bytes]."""
    return torch.frombuffer(bytearray(sources(Path(sysconfig.get_paths()["stdlib"]), 0)[0]), dtype=torch.uint8)


def batch(rows: int, seed: int, step: int) -> Tensor:
    """Return the windows of a step and their last targets, int64[rows, CONTEXT + 1]: the same ones in every run."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return text()[torch.randint(len(text()) - CONTEXT, (rows, 1), generator=draw) + torch.arange(CONTEXT + 1)].long()


@cache
def watched() -> Tensor:
    """Return the windows that figures are taken on, int64[32, CONTEXT + 1], of held-out text."""
    ids = torch.tensor(list(demo.heldout_text()[:CHOOSING]))
    return ids[torch.arange(32)[:, None] * (len(ids) // 32) + torch.arange(CONTEXT + 1)]


def frequencies() -> float:
    """Return the loss of what knows how often each byte comes, and no more, in nats per byte of the reported text."""
    counts = torch.bincount(text().long(), minlength=256) + 1.0
    return -(counts / counts.sum()).log()[torch.tensor(list(demo.heldout_text()[CHOOSING:]))].mean().item()


def train(model: Placed, job: Job, steps: range, ends: bool) -> list[float]:
    """Train with AdamW of its own over these steps: 5% warm-up, then a cosine, or the full rate up to a half-time.

    Returns the training curve, a mean for every `WINDOW` steps; it ends where the loss is not finite.
    """
    optimizer, losses, count = optimizer_of(model, job["lr"]), [], len(steps)
    for index, step in enumerate(steps):
        share = schedule(index, count, max(1, count // 20)) if ends else min(1.0, (index + 1) / max(1, count // 20))
        for group in optimizer.param_groups:
            group["lr"] = job["lr"] * share
        ids = batch(ROWS, job["seed"], step)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    windows = [losses[i : i + WINDOW] for i in range(0, len(losses), WINDOW)]
    return [sum(window) / len(window) for window in windows]


def scores(model: Placed, limit: int | None) -> dict[str, float]:
    """Return the loss on the text that rates are chosen on, and on the text that is reported, in nats per byte."""
    whole = demo.heldout_text()
    parts = {"choosing": whole[:CHOOSING], "loss": whole[CHOOSING:]}
    return {name: demo.loss(model, part, CONTEXT, limit) for name, part in parts.items()}


def one(job: Job, folder: Path) -> dict:
    """Do a job, and return it with what was measured; a half leaves its weights in the folder, converted ones too."""
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    began, (steps, layers, width, limit) = time.process_time(), json.loads(job["size"])
    half, row = steps // 2, dict(job)
    kept = folder / f"{job['arm']}.{job['seed']}.pt"
    arm = job["arm"].removesuffix(" from pre")
    model = Placed(arm, layers, width)
    if job["part"] == "second":
        model.load_state_dict(torch.load(kept, weights_only=True))
    span = {"whole": range(steps), "first": range(half), "second": range(half, steps)}[job["part"]]
    row["start"] = picture(model, watched())
    row["curve"] = train(model, job, span, job["part"] != "first")
    row |= {"end": picture(model, watched())} | scores(model, limit)
    if job["part"] == "first":
        save(model.state_dict(), kept)
        if arm == "pre":
            data = demo.calibration(length=CONTEXT, seed=job["seed"])
            peri = converted(model, data, "constants" if limit else "reconstruct")
            row["converted"] = {"end": picture(peri, watched())} | scores(peri, limit)
            save(peri.state_dict(), folder / f"peri from pre.{job['seed']}.pt")
    return row | {"seconds": time.process_time() - began}


def save(state: object, path: Path) -> None:
    """Replace a file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)


# ---- all runs ----


def follow() -> None:
    """End this process with the one that started it, however that ends."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def read(kept: Path) -> dict[str, dict]:
    """Return the finished runs of a file by name; a line that a kill cut short is dropped from it."""
    lines = kept.read_text().splitlines(keepends=True) if kept.exists() else []
    if lines and not lines[-1].endswith("\n"):
        kept.write_text("".join(lines[:-1]))
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {name_of(row): row for row in rows}


def name_of(job: Job) -> str:
    """Return what tells a run from all others."""
    return f"{job['arm']}, {job['part']}, {job['lr']:g}, seed {job['seed']}, {job['size']}"


def run_all(jobs: list[Job], folder: Path, processes: int) -> list[dict]:
    """Run the jobs that are not done yet, so many at a time, one thread each, and keep each as it is done."""
    os.environ["OMP_NUM_THREADS"] = "1"
    kept = folder / "runs.jsonl"
    done = read(kept)
    left, began = [job for job in jobs if name_of(job) not in done], time.perf_counter()
    for number, row in enumerate(finished(left, folder, processes), 1):
        done[name_of(row)] = row
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        minutes = (time.perf_counter() - began) / 60
        told = f"{row['arm']} {row['part']} {row['lr']:g} seed {row['seed']}: {row['loss']:.4f}"
        click.echo(f"{number}/{len(left)}  {minutes:.1f} min  {told} nats per byte", err=True)
    return [done[name_of(job)] for job in jobs]


def finished(jobs: list[Job], folder: Path, processes: int) -> Iterator[dict]:
    """Do the jobs, and yield each as it is done; with 0 processes in this one."""
    if not processes or not jobs:
        yield from (one(job, folder) for job in jobs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=follow) as pool:
        for future in as_completed([pool.submit(one, job, folder) for job in jobs]):
            yield future.result()


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=Path("peri_paper"), help="The folder for everything.")
@click.option("--seeds", default=3, help="Seeds of weights and batches.")
@click.option("--steps", default=500, help=f"Steps of a whole run, of {ROWS} windows of {CONTEXT} bytes.")
@click.option("--processes", default=2, help="Runs at a time, one thread each; 0: in this process.")
@click.option("--quick", is_flag=True, help="Tiny, one seed, two rates, a few steps: only to see that it runs.")
def main(out: Path, seeds: int, steps: int, processes: int, quick: bool) -> None:
    """Train, convert, and write runs.jsonl, table.md and figures to OUT."""
    out.mkdir(parents=True, exist_ok=True)
    size, rates = [steps, LAYERS, WIDTH, None], RATES
    if quick:
        size, rates, seeds = [4, 3, 16, 4 * CONTEXT + 1], (HALF_RATE, 3e-2), 1
    base = {"size": json.dumps(size)}
    halves = [{"arm": a, "part": "first", "lr": HALF_RATE, "seed": s} for s in range(seeds) for a in ("pre", "peri")]
    arms = [(p, "whole") for p in PLACEMENTS] + [(a, "second") for a in ("pre", "peri from pre", "peri")]
    rest = [{"arm": a, "part": p, "lr": r, "seed": s} for s in range(seeds) for a, p in arms for r in rates]
    rows = run_all([base | job for job in halves], out, processes)
    rows += run_all([base | job for job in rest], out, processes)
    write_report(rows, frequencies(), out)
    click.echo((out / "table.md").read_text())
    seconds = sum(row["seconds"] for row in rows)
    click.echo(f"{len(rows)} runs, {seconds / 60:.1f} minutes of one core", err=True)


if __name__ == "__main__":
    main()
