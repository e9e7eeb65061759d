"""Prove what was written of a model by what it is for: it generates the tokens that the model generates.

The model generates greedily, with its own cache, as transformers does it. What was written is given the same tokens,
one call after the other with the cache that it gives itself, so that an error of one step is not taken for one of the
next; as long as both choose alike, that is how it generates alone. Three rounds: a short prompt, a batch of which a row
is padded (a decoder's prompt on the left, an encoder's source on the right), and several tokens more after what was
generated, for one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backends.running import Runnable
from ..backends.torch.contexts import evaluating, quiet
from ..backends.torch.crossed import ENCODER, FIRST, HIDDEN, LATER, MASK, STATES
from ..backends.torch.pictured import EMBEDDING, FEATURES, IMAGES, PIXELS, TEXT, VISION, Embedding
from ..backends.torch.served import Flat, Part, going_round, is_past, sized, sizes_of
from ..errors import Code, Different

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


@dataclass(frozen=True, eq=False)
class Speaker(ABC):
    """Generate with a model, and with what was written of it. part: what gives logits."""

    part: Part

    @abstractmethod
    def prompt(self, batch: int, length: int, padding: int, draw: torch.Generator) -> tuple[Tensor, Flat]:
        """Make up tokens to begin with, and what else `generate` is called with; the last row is padded."""

    def words(self, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        """Make up tokens of text."""
        return torch.randint(0, self.part.vocabulary, shape, generator=draw)

    @abstractmethod
    def greedy(self, ids: Tensor, given: Flat, count: int) -> tuple[Tensor, list[Tensor]]:
        """Return prompts with `count` tokens more, as the model generates them, and the logits of each step."""

    @abstractmethod
    def steps(self, tokens: Tensor, given: Flat, calls: list[int]) -> Iterator[Tensor]:
        """Yield the last logits [batch, vocabulary] of each call of what was written, a number of tokens each."""


class _Embedded:
    """Call a decoder's file with what is embedded of tokens; pictures belong to the first call."""

    def __init__(self, files: Mapping[str, Runnable], features: Tensor) -> None:
        self.files, self.features = files, features

    def call(self, batch: Flat) -> Flat:
        """Return what the decoder's file gives for input_ids and its other inputs."""
        text = {"input_ids": batch["input_ids"], FEATURES: self.features}
        self.features = self.features[:0]
        return _called(self.files[TEXT], {**batch, **_called(self.files[EMBEDDING], text)})


@dataclass(frozen=True, eq=False)
class Alone(Speaker):
    """Generate with a decoder, and with one file."""

    candidate: Runnable | _Embedded

    def prompt(self, batch: int, length: int, padding: int, draw: torch.Generator) -> tuple[Tensor, Flat]:
        """Make up tokens, the last row padded on the left."""
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, :padding] = 0
        return torch.randint(0, self.part.vocabulary, (batch, length), generator=draw), {"attention_mask": mask}

    def greedy(self, ids: Tensor, given: Flat, count: int) -> tuple[Tensor, list[Tensor]]:
        """Generate from prompts, which may be longer than their mask."""
        return _greedy(self.part.model, count, input_ids=ids, attention_mask=_longer(given["attention_mask"], ids))

    def steps(self, tokens: Tensor, given: Flat, calls: list[int]) -> Iterator[Tensor]:
        """Call the file with the tokens, its cache empty at first."""
        mask = _longer(given["attention_mask"], tokens)
        places, empty = (mask.cumsum(1) - 1).clamp(min=0), sizes_of(len(tokens), 0)
        held = {
            n: torch.zeros(sized(a, empty), dtype=self.part.dtype) for n, a in self.part.takes.items() if is_past(n)
        }
        for start, end in _pieces(calls):
            beside = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
            out = _called(self.candidate, {"input_ids": tokens[:, start:end], **beside, **held})
            held = going_round(out)
            yield out["logits"][:, -1].double()


@dataclass(frozen=True, eq=False)
class Across(Speaker):
    """Generate with an encoder and its decoder, and with a file of each part, by name."""

    encoder: Part
    files: Mapping[str, Runnable]

    def prompt(self, batch: int, length: int, padding: int, draw: torch.Generator) -> tuple[Tensor, Flat]:
        """Make up a source, the last row padded on the right, and tokens for the decoder that begin alike."""
        seed = int(torch.randint(0, 1 << 30, (), generator=draw))
        source = self.encoder.inputs(sizes_of(batch, 1, 0, 2 * length), seed)
        if padding and "attention_mask" in source:
            source["attention_mask"][-1, -padding:] = 0
        ids = torch.randint(0, self.part.vocabulary, (batch, length), generator=draw)
        ids[:, 0] = 1
        return ids, source

    def greedy(self, ids: Tensor, given: Flat, count: int) -> tuple[Tensor, list[Tensor]]:
        """Generate from a source and what the decoder begins with."""
        return _greedy(self.part.model, count, **given, decoder_input_ids=ids, decoder_start_token_id=int(ids[0, 0]))

    def steps(self, tokens: Tensor, given: Flat, calls: list[int]) -> Iterator[Tensor]:
        """Call the encoder once, the decoder with its states, and then with its cache."""
        beside = {STATES: _called(self.files[ENCODER], given)[HIDDEN]}
        if "attention_mask" in given:
            beside[MASK] = given["attention_mask"]
        held: Flat = {}
        for start, end in _pieces(calls):
            file = self.files[LATER if held else FIRST]
            out = _called(file, {"input_ids": tokens[:, start:end], **beside, **held})
            held |= going_round(out)
            yield out["logits"][:, -1].double()


@dataclass(frozen=True, eq=False)
class Seeing(Speaker):
    """Generate with a decoder that reads pictures, and with a file of each part, by name."""

    parts: Mapping[str, Part]
    files: Mapping[str, Runnable]

    def prompt(self, batch: int, length: int, padding: int, draw: torch.Generator) -> tuple[Tensor, Flat]:
        """Make up tokens with a picture behind the first one of each row, the last row padded on the left."""
        ids, seed = self.words((batch, length + self.embedding.each), draw), int(draw.initial_seed())
        ids[:, 1 + padding : 1 + padding + self.embedding.each] = self.embedding.token
        mask = torch.ones_like(ids)
        mask[-1, :padding] = 0
        return ids, {**self.parts[VISION].inputs({IMAGES: batch}, seed), "attention_mask": mask}

    @property
    def embedding(self) -> Embedding:
        """Return what puts text and pictures together."""
        found = self.parts[EMBEDDING]
        assert isinstance(found, Embedding)
        return found

    def words(self, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        """Make up tokens of text, of which none is a picture's."""
        token = self.embedding.token
        found = super().words(shape, draw)
        return torch.where(found == token, (found + 1) % self.part.vocabulary, found)

    def greedy(self, ids: Tensor, given: Flat, count: int) -> tuple[Tensor, list[Tensor]]:
        """Generate from prompts and their pictures, and draw none."""
        call = {**given, "attention_mask": _longer(given["attention_mask"], ids)}
        return _greedy(self.part.model, count, input_ids=ids, suppress_tokens=[self.embedding.token], **call)

    def steps(self, tokens: Tensor, given: Flat, calls: list[int]) -> Iterator[Tensor]:
        """Call what sees once, what embeds for each piece of text, and the decoder with its cache."""
        features = _called(self.files[VISION], {PIXELS: given[PIXELS]})[FEATURES]
        alone = Alone(self.part, _Embedded(self.files, features))
        yield from alone.steps(tokens, given, calls)


def generated(speaker: Speaker, bound: float, count: int, seed: int = 0) -> Generation:
    """Generate with a model and with what was written of it, and compare logits and choices.

    count: the tokens of each round. Raises LnrewriteError LN403 where a logit is further off than `bound`, relative to
    the largest; two tokens whose logits are nearer than that may be chosen differently, and are reported.
    """
    found = Generation()
    draw = torch.Generator().manual_seed(seed)
    for name, batch, length, padding, more in (("a short prompt", 1, 3, 0, 4), ("a padded batch", 2, 7, 3, 0)):
        ids, given = speaker.prompt(batch, length, padding, draw)
        length = ids.shape[1]
        tokens, steps = speaker.greedy(ids, given, count)
        _round(found, name, steps, list(speaker.steps(tokens, given, [length, *[1] * (count - 1)])), bound)
        if more:  # the cache of what was generated, then a piece of text, then the tokens after it
            ids = torch.cat([tokens, speaker.words((batch, more), draw)], 1)
            few = max(count // 2, 2)
            tokens, steps = speaker.greedy(ids, given, few)
            calls = [length + count - 1, 1 + more, *[1] * (few - 1)]
            _round(found, "a continuation", steps, list(speaker.steps(tokens, given, calls))[1:], bound)
    return found


def _greedy(model: Any, count: int, **call: Any) -> tuple[Tensor, list[Tensor]]:
    """Return prompts with `count` tokens more, by transformers' own loop, and the logits of each step."""
    from transformers import GenerationMixin

    with torch.no_grad(), evaluating(model), quiet():
        out: Any = GenerationMixin.generate(
            model, **call, max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1,
            repetition_penalty=1.0, pad_token_id=0, use_cache=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.sequences, [logits.double() for logits in out.logits]


def _longer(mask: Tensor, ids: Tensor) -> Tensor:
    """Return a mask [batch, some] that shows all the further tokens of `ids` [batch, all]."""
    return torch.cat([mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])], 1)


def _pieces(calls: list[int]) -> Iterator[tuple[int, int]]:
    """Yield where each call's tokens start and end."""
    start = 0
    for new in calls:
        yield start, start + new
        start += new


def _called(candidate: Runnable | _Embedded, call: Flat) -> Flat:
    """Call what was written with as much as it takes."""
    taken = getattr(candidate, "inputs", call)
    out = candidate.call({name: tensor for name, tensor in call.items() if name in taken})
    assert isinstance(out, dict)
    return out


def _round(found: Generation, name: str, wanted: list[Tensor], given: list[Tensor], bound: float) -> None:
    """Compare the logits of one round, step by step. Raises LnrewriteError LN403."""
    parted = False
    for step, (x, y) in enumerate(zip(wanted, given, strict=True)):
        scale = float(x.abs().max())
        error = float((x - y).abs().max()) / scale
        if not error <= bound:
            why = f"generating from {name}, its logits are {error:.2g} of the largest off at token {step}"
            raise Different(
                Code.LN403, "the model", f"{why}, and {bound:g} is allowed", "see `lnrewrite explain LN403`"
            )
        found.worst = max(found.worst, error)
        chosen = y.argmax(-1, keepdim=True)
        gap = float((x.amax(-1, keepdim=True) - x.gather(-1, chosen)).max()) / scale
        if gap > 0 and not parted:
            parted = True
            found.divergences.append(Divergence(name, step, gap))
        found.tokens += len(x)
