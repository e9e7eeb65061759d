"""The models that tests see, behind one door: nets written here, and tiny ones of every transformers architecture.

`build` makes one, `program` captures it once a session, `graph` reads what `lift` made of it once and for all
(tests/graphs), `truth` is what its code says, never what is found. Names are those of `nets.NETS`, `nets.DECOYS`,
`nets.REFUSED` and `written.WRITTEN`, or a transformers model type such as `llama` or `opt.do_layer_norm_before=False`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lnrewrite as lnr
import lnrewrite.demo
from lnrewrite.backends.torch.widened import Float64
from lnrewrite.ir import Network
from lnrewrite.models.program import Program

from .nets import DECOYS, NETS, REFUSED, Case, spell_out
from .written import WRITTEN

HERE = Path(__file__).parent
CASES: dict[str, Case] = {**NETS, **DECOYS, **REFUSED, **WRITTEN}
FAMILIES: dict[str, dict[str, Any]] = json.loads((HERE / "truth.json").read_text())
"""Each transformers family's truth: `blocks`, where it was read (`read`, `why`), `streams` and `final` where known."""

Inputs = dict[str, Tensor]


def build(name: str, depth: int = 2, head: bool = False, seed: int = 0) -> tuple[Any, Inputs]:
    """Return a model in eval mode with random gains and biases, and keyword inputs that it runs on.

    depth: layers of a transformers model; head: its class that generates text, see `families.build`.
    """
    if name not in CASES:
        from . import families  # imports transformers

        return families.build(name, depth, head, seed)
    module, args = CASES[name].build(seed)
    return module, named(module, args)


@cache
def captured(name: str, depth: int = 2, double: bool = False) -> tuple[Program, Inputs]:
    """Return a model's program, shared by the session, and its inputs; `double`: all of it in float64."""
    module, inputs = build(name, depth)
    if not double:
        return capture(module, inputs), inputs
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with float64():
        return capture(module.double(), inputs), inputs


def capture(module: nn.Module, inputs: dict[str, Any]) -> Program:
    """Capture a model; one that is lost without a mask, or the kinds of its tokens, gets them, in `inputs` too."""
    for name, made in (("attention_mask", torch.ones_like), ("token_type_ids", torch.zeros_like)):
        try:
            return lnr.capture(module, kwargs=inputs)
        except lnr.LnrewriteError:
            ids = inputs.get("input_ids")
            if ids is None or name in inputs or name not in inspect.signature(module.forward).parameters:
                raise
            inputs[name] = made(ids)
    return lnr.capture(module, kwargs=inputs)


def program(name: str, depth: int = 2) -> Program:
    """Return a model's program, shared by the session: look, and let passes make others of it."""
    return captured(name, depth)[0]


def bart() -> nn.Module:
    """Return a small BART, which has a buffer among its weights: final_logits_bias."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"d_model": 16, "vocab_size": 40, "max_position_embeddings": 32}
    sizes |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads)).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
    return model


def short_gpt() -> nn.Module:
    """Return the first two layers of demo:tinygpt, whose head still reads what they write."""
    model = lnr.demo.load("tinygpt")
    del model.blocks[2:]
    return model


@contextmanager
def float64() -> Iterator[None]:
    """Compute in float64 throughout: libraries cast to float32 inside norms and softmax."""
    torch.set_default_dtype(torch.float64)
    try:
        with Float64(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def floats(outputs: Any) -> list[Tensor]:
    """Return the floating point tensors of a model's outputs."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def named(module: nn.Module, args: Any) -> Inputs:
    """Return positional inputs by the names that the forward has for them."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False))


def truth(name: str) -> list[str]:
    """Return the placements of a model's blocks in execution order, as its code says."""
    return CASES[name].truth if name in CASES else spell_out(FAMILIES[name]["blocks"])


def spelled(names: list[str]) -> str:
    """Spell `pre pre post` as `pre*2 post`."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return " ".join(name if times == 1 else f"{name}*{times}" for name, times in runs)


def placements(network: Network) -> list[str]:
    """Return what is found, in execution order, the branches of one sum as one `parallel`."""
    found: dict[tuple[str, object], str] = {}
    for stream in network.streams:
        for block in stream.blocks:
            group = block.parallel_group
            alone = group is None
            found[stream.name, block.name if alone else group] = block.placement if alone else "parallel"
    return list(found.values())
