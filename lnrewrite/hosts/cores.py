"""Compare the cores of two blocks by running them: how rows of one's readers stand among the other's.

Rows have a canonical order: all heads' queries, then keys, then values, rotary partners half a head apart; gates, then
what they multiply. Each side's own order is found by trying, the rotary partners too (side by side in some).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from .host import Misfit, Numbers
from .views import Core

CLOSE = 1e-6
"""How far two cores may be apart, relative to the largest number: angles and masks are float32 in most."""
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "relu",
    "relu2",
    "quick_gelu",
    "tanh",
    "sigmoid",
    "mish",
)
"""What a feed-forward block may apply, as transformers calls it; of two names for one function the first."""


@dataclass(frozen=True)
class Match:
    """Say how a host's core is the source's: its row i is the source's row `rows[i]`, times `scale` for queries.

    turned: where in a head each channel of queries and keys comes from. queries, keys: which rows of the host's these
    are, in the order of their heads.
    """

    rows: Tensor
    turned: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    scale: float = 1.0

    def scaled(self, by: float) -> Match:
        """Return the same with another scale."""
        return replace(self, scale=by)


def drawn(core: Core, seed: int = 0) -> Tensor:
    """Make up what readers give: [tokens, rows] in float64."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(core.tokens, sum(core.sizes), generator=draw, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same but for rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * b.abs().max())


# ---- attention ----


def attention_orders(sizes: Sequence[int], n: Numbers) -> Iterator[Tensor]:
    """Yield where each canonical row of queries, keys and values may stand among the readers' rows."""
    q, kv = n.heads * n.head_size, n.kv_heads * n.head_size
    every = torch.arange(q + 2 * kv)
    if sum(sizes) != len(every):
        return
    if len(sizes) == 3:
        parts = every.split(list(sizes))
        for order in permutations(range(3)):
            if [sizes[i] for i in order] == [q, kv, kv]:
                yield torch.cat([parts[i] for i in order])
    elif len(sizes) == 1:
        yield every
        groups = every.view(n.kv_heads, -1, n.head_size)
        yield torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])


def turns(n: Numbers) -> Iterator[Tensor]:
    """Yield where a channel of a head may come from: as it is, partners side by side from half a head apart, back."""
    every = torch.arange(n.head_size)
    yield every
    part = int(n.head_size * n.rope.get("partial_rotary_factor", 1.0))
    for size in dict.fromkeys(
        s for s in (part, n.head_size, n.head_size // 2, n.head_size // 4) if s > 1 and s % 2 == 0
    ):
        for shape in ((2, size // 2), (size // 2, 2)):
            yield torch.cat([every[:size].view(shape).T.flatten(), every[size:]])


def match_attention(source: Core, host: Core, n: Numbers) -> Iterator[Match]:
    """Yield the ways to see the source's rows as the host's.

    The host's norms of queries and keys have to be carried for each before `same` tells whether it holds.
    """
    q, kv = n.heads * n.head_size, n.kv_heads * n.head_size
    for theirs in attention_orders(host.sizes, n):
        for ours in attention_orders(source.sizes, n):
            for turned in turns(n):
                heads = torch.arange(q + kv).view(-1, n.head_size)[:, turned].flatten()
                rows = torch.empty(len(ours), dtype=torch.int64)
                rows[theirs] = ours[torch.cat([heads, torch.arange(q + kv, q + 2 * kv)])]
                yield Match(rows, turned, theirs[:q], theirs[q : q + kv])


def ratio(source: Core, host: Core, match: Match, n: Numbers) -> float:
    """Return what the source multiplies scores by, in units of the host's: read off from what each gives two tokens.

    Values that say where they come from make the cores hand out their probabilities.
    """
    given = 0.5 * drawn(host, 1)
    q, kv = n.heads * n.head_size, n.kv_heads * n.head_size
    canonical = torch.cat([match.queries, match.keys]) if match.queries is not None and match.keys is not None else None
    assert canonical is not None
    values = torch.ones(q + 2 * kv, dtype=torch.bool)
    values[canonical] = False
    tokens = torch.arange(host.tokens) % (host.tokens // 2)
    channel = torch.arange(kv) % n.head_size
    given[:, values] = (tokens[:, None] == channel[None]).double()
    odds = []
    for core, rows in ((source, _back(given, match)), (host, given)):
        out = core(rows).view(2, -1, n.heads, n.head_size)[:, 2]
        odds.append((out[..., 0] / out[..., 1]).log())
    return float((odds[0] / odds[1]).median())


def _back(given: Tensor, match: Match) -> Tensor:
    """Return the source's rows for the host's."""
    rows = torch.empty_like(given)
    rows[:, match.rows] = given
    return rows


def same(source: Core, host: Core, match: Match) -> bool:
    """Return whether the two cores give the same for the same random numbers."""
    given = drawn(host)
    theirs = given.clone()
    if match.queries is not None:
        theirs[:, match.queries] *= match.scale
    return close(host(theirs), source(_back(given, match)))


# ---- feed-forward ----


def feed_orders(sizes: Sequence[int], out: int) -> Iterator[Tensor]:
    """Yield where each canonical row of gates and what they multiply may stand; of one map without gates, the same."""
    every = torch.arange(sum(sizes))
    if len(every) == out:
        yield every
    elif len(every) == 2 * out:
        halves = every.view(2, out)
        yield halves.flatten()
        yield halves.flip(0).flatten()
        if len(sizes) == 1:
            yield every.view(out, 2).T.flatten()
            yield every.view(out, 2).flip(1).T.flatten()


def feed(source: Core) -> tuple[str, Tensor]:
    """Return the activation of a feed-forward core and its rows' order. Raises Misfit where it is none of those."""
    from transformers.activations import ACT2FN

    given = drawn(source)
    made = source(given)
    for order in feed_orders(source.sizes, source.out):
        rows = given[:, order].split(source.out, -1)
        for name in ACTIVATIONS:
            value = ACT2FN[name](rows[0])
            if close(value * rows[1] if len(rows) == 2 else value, made):
                return name, order
    raise Misfit(f"{source.block.name} computes something else than an activation, or one times a second map")


def match_feed(source: Core, host: Core) -> Match | None:
    """Return how the source's rows are the host's, None where the two compute different things."""
    ours = feed(source)[1]
    for theirs in feed_orders(host.sizes, host.out):
        if len(theirs) == len(ours):
            rows = torch.empty(len(ours), dtype=torch.int64)
            rows[theirs] = ours
            if same(source, host, match := Match(rows)):
                return match
    return None
