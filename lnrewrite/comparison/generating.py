"""Prove a decoder that was written by what it is for: it generates the tokens that the model generates.

The model generates greedily, with its own cache, as transformers does it. What was written is given the same tokens,
one call after the other with the cache that it gives itself, so that an error of one step is not taken for one of the
next; as long as both choose alike, that is how it generates alone. Three rounds: a short prompt, a batch of which a row
is padded on the left, and several tokens more after what was generated, for one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backends.running import Runnable
from ..backends.torch.cached import PAST, PRESENT, CachedDecoder, Flat
from ..backends.torch.capture import evaluating, quiet
from ..errors import Code, LnrewriteError

SAMPLE = 8
"""How many tokens are generated where a file is proved."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Hold where two decoders first choose differently: the token's number, and what the choice cost in logits.

    gap: how far the other's token lies below the model's own choice, relative to the largest logit.
    """

    round: str
    token: int
    gap: float


@dataclass(slots=True)
class Generation:
    """Hold what came of generating side by side: tokens compared, the worst logit, relative, first divergences."""

    tokens: int = 0
    worst: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return what a user should know: what was generated, and where the two part."""
        told = f"generates the same {self.tokens} tokens as the model, greedily"
        if not self.divergences:
            return [told]
        return [
            f"{d.round}: token {d.token} is the first that differs from the model's; its logit lies {d.gap:.1g} of the"
            " largest below the model's choice"
            for d in self.divergences
        ]


def generated(decoder: CachedDecoder, candidate: Runnable, bound: float, count: int, seed: int = 0) -> Generation:
    """Generate with a decoder and with what was written of it, and compare logits and choices.

    count: the tokens of each round. Raises LnrewriteError LN403 where a logit is further off than `bound`, relative to
    the largest; two tokens whose logits are nearer than that may be chosen differently, and are reported.
    """
    found = Generation()
    draw = torch.Generator().manual_seed(seed)
    for name, batch, length, padding, more in (("a short prompt", 1, 3, 0, 4), ("a padded batch", 2, 7, 3, 0)):
        ids = torch.randint(0, decoder.vocabulary, (batch, length), generator=draw)
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, :padding] = 0
        tokens, steps = greedy(decoder, ids, mask, count)
        _round(found, name, steps, list(_steps(candidate, decoder, tokens, mask, [length, *[1] * (count - 1)])), bound)
        if more:  # the cache of what was generated, then a piece of text, then the tokens after it
            ids = torch.cat([tokens, torch.randint(0, decoder.vocabulary, (batch, more), generator=draw)], 1)
            mask = torch.ones_like(ids)
            few = max(count // 2, 2)
            tokens, steps = greedy(decoder, ids, mask, few)
            calls = [length + count - 1, 1 + more, *[1] * (few - 1)]
            _round(found, "a continuation", steps, list(_steps(candidate, decoder, tokens, mask, calls))[1:], bound)
    return found


def greedy(decoder: CachedDecoder, ids: Tensor, mask: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
    """Return prompts with `count` tokens more, by transformers' own generate, and the logits of each step."""
    model: Any = decoder.model
    with torch.no_grad(), evaluating(model), quiet():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
            num_beams=1, repetition_penalty=1.0, pad_token_id=0, use_cache=True, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
    return out.sequences, [logits.double() for logits in out.logits]


def _steps(
    candidate: Runnable, decoder: CachedDecoder, tokens: Tensor, mask: Tensor, calls: list[int]
) -> Iterator[Tensor]:
    """Yield the last logits [batch, vocabulary] of each call, a number of tokens each, with the cache of the last."""
    batch = len(tokens)
    mask = torch.cat([mask, mask.new_ones(batch, tokens.shape[1] - mask.shape[1])], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    held: Flat = {
        f"{PAST}.{n}": torch.zeros(batch, h, 0, d, dtype=decoder.dtype)
        for n, (h, d) in zip(decoder.cache, decoder.heads, strict=True)
    }
    start = 0
    for new in calls:
        end = start + new
        call = {
            "input_ids": tokens[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": places[:, start:end],
        }
        out = candidate.call({n: t for n, t in {**call, **held}.items() if takes(candidate, n)})
        assert isinstance(out, dict)
        held = {f"{PAST}.{n}": out[f"{PRESENT}.{n}"] for n in decoder.cache}
        yield out["logits"][:, -1].double()
        start = end


def takes(candidate: Runnable, name: str) -> bool:
    """Return whether a model takes an input of this name."""
    return name in getattr(candidate, "inputs", (name,))


def _round(found: Generation, name: str, wanted: list[Tensor], given: list[Tensor], bound: float) -> None:
    """Compare the logits of one round, step by step. Raises LnrewriteError LN403."""
    parted = False
    for step, (x, y) in enumerate(zip(wanted, given, strict=True)):
        scale = float(x.abs().max())
        error = float((x - y).abs().max()) / scale
        if not error <= bound:
            why = f"generating from {name}, its logits are {error:.2g} of the largest off at token {step}"
            raise LnrewriteError(
                Code.LN403, "the model", f"{why}, and {bound:g} is allowed", "see `lnrewrite explain LN403`"
            )
        found.worst = max(found.worst, error)
        chosen = y.argmax(-1, keepdim=True)
        gap = float((x.amax(-1, keepdim=True) - x.gather(-1, chosen)).max()) / scale
        if gap > 0 and not parted:
            parted = True
            found.divergences.append(Divergence(name, step, gap))
        found.tokens += len(x)
