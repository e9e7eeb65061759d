"""Train three small models of different kinds on the text that demo:tinygpt learned; each becomes a checkpoint folder.

    python examples/train_zoo.py --out zoo        # some minutes a model, one thread; started again, it goes on

`gpt2` has layer norms, learned positions and biases; `llama` RMSNorm, rotary positions, SwiGLU and grouped queries;
`qwen3` norms of queries and keys besides, and a tied head. They read bytes. The defaults of `heal` are tuned on the
first two, and only reported on `qwen3`.
"""

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import nn
from torch.nn import functional as F
from train_tinygpt import CONTEXT, optimizer_of, schedule, sources
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lnrewrite import demo

BYTES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
ROPE = {"intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
ROPE |= {"max_position_embeddings": CONTEXT, "initializer_range": 0.05}
GPT = {"n_layer": 4, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.05}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], float]] = {
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(n_embd=128, **GPT, **BYTES)), 2e-3),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(hidden_size=112, tie_word_embeddings=False, **ROPE, **BYTES)), 3e-3),
    "qwen3": (
        lambda: Qwen3ForCausalLM(Qwen3Config(hidden_size=96, head_dim=24, tie_word_embeddings=True, **ROPE, **BYTES)),
        3e-3,
    ),
}
"""What makes each model, and its peak learning rate."""


def text() -> torch.Tensor:
    """Return the training text, uint8[bytes]."""
    return torch.frombuffer(bytearray(sources(Path(sysconfig.get_paths()["stdlib"]), 0)[0]), dtype=torch.uint8)


def batch(training: torch.Tensor, rows: int, seed: int, step: int) -> torch.Tensor:
    """Return the windows of a step and their last targets, int64[rows, CONTEXT + 1]: the same ones in every run."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(training) - CONTEXT, (rows, 1), generator=draw)
    return training[starts + torch.arange(CONTEXT + 1)].long()


def held_out(model: nn.Module) -> float:
    """Return the loss on the shipped text that no model here learns, in nats per byte."""
    return demo.loss(lambda input_ids: model(input_ids=input_ids).logits, demo.heldout_text())


def save(state: object, path: Path) -> None:
    """Replace the state of a run, whole or not at all."""
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)


def train(name: str, folder: Path, steps: int, rows: int, every: int, seed: int) -> None:
    """Train one model from where its state beside the folder stands, and write the checkpoint folder at the end."""
    torch.manual_seed(seed)
    build, lr = MODELS[name]
    model, training, state = build(), text(), folder.with_name(f"{name}.pt")
    optimizer = optimizer_of(model, lr)
    start, began = 0, time.perf_counter()
    if state.exists():
        start, weights, moments = torch.load(state, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    click.echo(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, from step {start}")
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps, 150)
        ids = batch(training, rows, seed, step)
        loss = F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            minutes = (time.perf_counter() - began) / 60
            click.echo(f"{name} {step + 1}/{steps}  {minutes:.1f} min  held-out {held_out(model):.4f} nats per byte")
            save((step + 1, model.state_dict(), optimizer.state_dict()), state)
    part = folder.with_name(f"{name}.part")
    model.eval().save_pretrained(part)
    part.rename(folder)


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=Path("zoo"), help="The folder for all of them.")
@click.option("--only", type=click.Choice(sorted(MODELS)), multiple=True, help="Train these.")
@click.option("--steps", default=2000, help="Optimizer steps.")
@click.option("--batch-size", default=16, help=f"Windows of {CONTEXT} bytes per step.")
@click.option("--every", default=250, help="Steps between evaluations, after each of which a run can go on.")
@click.option("--threads", default=1, help="CPU threads.")
@click.option("--seed", default=0, help="Seed of weights and batches.")
def main(out: Path, only: tuple[str, ...], steps: int, batch_size: int, every: int, threads: int, seed: int) -> None:
    """Train the models that are not in OUT yet."""
    torch.set_num_threads(threads)
    for name in only or MODELS:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / name).exists():
            train(name, out / name, steps, batch_size, every, seed)


if __name__ == "__main__":
    main()
