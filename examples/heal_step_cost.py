"""Measure what a step of `heal` costs, in plain training steps of the same converted model, on one thread of a CPU.

    python examples/heal_step_cost.py                     # about two minutes
    python examples/heal_step_cost.py --rounds 60 --only tinygpt

A plain step is forward, cross-entropy, backward, clipping and AdamW, as anyone writes them. A step of `heal` with its
defaults runs the teacher too, and learns from its outputs and states. Both are trained side by side, each round in
another order; figures are medians over the rounds, and the ratio that of the ratios of each round, with its quartiles.
"""

import random
import time
from collections.abc import Callable

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lnrewrite as lnr
from lnrewrite import demo
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.distributed import World
from lnrewrite.healing.losses import Mix, Objective
from lnrewrite.healing.opening import Reading, open_source
from lnrewrite.healing.pairing import Pair
from lnrewrite.healing.participant import Participant
from lnrewrite.healing.rehearsal import Rehearsed
from lnrewrite.healing.sources import BatchSource
from lnrewrite.healing.training import Phase
from lnrewrite.models.program import Program

LENGTH, BATCHES, WARM = 128, 64, 3
STEPS = 500
"""Steps of the run that the measured ones are taken from."""


def llama(vocab: int, width: int) -> nn.Module:
    """Return a Llama with four layers and random weights."""
    torch.manual_seed(0)
    size = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, tie_word_embeddings=False, use_cache=False)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tinygpt": lambda: demo.load("tinygpt"),
    "llama, 256 classes": lambda: llama(256, 112),
    "llama, 32,000 classes": lambda: llama(32_000, 256),
}

Step = Callable[[int], object]


def plain(program: Program, source: BatchSource) -> Step:
    """Return a training step as anyone writes it."""
    module, world = program.module(), World(0, 1, torch.device("cpu"))
    parameters = [p.requires_grad_() for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(index: int) -> None:
        batch = world.here(source.batch(index))
        out = module(**batch)
        scores = out if isinstance(out, torch.Tensor) else out["logits"]
        F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_of(model: nn.Module, to: str, rows: int) -> dict[str, Step]:
    """Return what is timed: a plain step of the converted model, and the steps of a healing and of its control."""
    vocab = min(256, next(p for p in model.parameters() if p.dim() == 2).shape[0])
    draw = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(vocab, (rows, LENGTH), generator=draw)} for _ in range(BATCHES + 8)]
    teacher = lnr.capture(model, kwargs=batches[0])
    student = lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(teacher, batches[:4]).program
    source = open_source(batches, teacher, Reading(rows, LENGTH, 0))
    objective, config, world = Objective.of(teacher, batches[0]), HealingConfig(), World(0, 1, torch.device("cpu"))
    rehearsed = Rehearsed(source, config.rehearse, teacher.id_limits(), objective, config.seed)

    def phase(program: Program, beside: Program | None, mix: Mix, data: BatchSource) -> Step:
        one, other = Participant.of(program, world), Participant.of(beside, world) if beside else None
        names = frozenset(one.named)
        found = Phase("global", STEPS, one, other, objective, mix, config, names, {}, 1e-4)
        optimizer = found.optimizer()
        return lambda index: found.step(index, optimizer, data, world)

    Pair(teacher, student).check()
    return {
        "plain": plain(student, source),
        "heal": phase(student, teacher, Mix.usual(gap=1.0, steps=STEPS), rehearsed),
        "control": phase(teacher, None, Mix(task=1.0), source),
    }


def measured(steps: dict[str, Step], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds that each step took, float64[rounds], all of them in turn and in shuffled order."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    order, draw = list(steps), random.Random(0)
    for index in range(rounds + WARM):
        draw.shuffle(order)
        for name in order:
            began = time.perf_counter()
            steps[name](index % BATCHES)
            found[name].append(time.perf_counter() - began)
    return {name: np.array(seconds[WARM:]) for name, seconds in found.items()}


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(list(MODELS)), multiple=True, help="Measure these models.")
@click.option("--to", default="peri", show_default=True, help="The placement that the student was converted to.")
@click.option("--rows", default=4, show_default=True, help="Rows of a batch; 4 is what heal takes.")
@click.option("--rounds", default=30, show_default=True, help="Steps of each kind.")
def main(only: tuple[str, ...], to: str, rows: int, rounds: int) -> None:
    torch.set_num_threads(1)
    print(f"{rows} rows of {LENGTH} tokens, to {to}, {rounds} rounds\n")
    print("| model | plain step | step of heal | ratio | quartiles | step of the control |\n|---|---|---|---|---|---|")
    for name in only or MODELS:
        seconds = measured(steps_of(MODELS[name](), to, rows), rounds)
        low, ratio, high = np.quantile(seconds["heal"] / seconds["plain"], (0.25, 0.5, 0.75))
        told = {kind: f"{1e3 * np.median(each):.0f} ms" for kind, each in seconds.items()}
        row = (name, told["plain"], told["heal"], f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", told["control"])
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
