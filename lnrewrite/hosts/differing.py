"""Say in plain words what differs between two cores that are not the same, found by trying them."""

from __future__ import annotations

import torch
from torch import Tensor

from .cores import attention_orders, drawn, feed
from .host import Numbers
from .views import Core


def why_feed(source: Core, host: Core) -> str:
    """Return what keeps a feed-forward core from being the host's."""
    gated = [sum(core.sizes) == 2 * core.out for core in (source, host)]
    if gated[0] != gated[1]:
        having = "its feed-forward blocks have gates, and the host's have none"
        return having if gated[0] else "the host's feed-forward blocks have gates, and the source's have none"
    if source.out != host.out:
        return f"its feed-forward blocks are {source.out} wide inside, and the host's {host.out}"
    return f"its feed-forward blocks apply {feed(source)[0]}, and the host has no such activation"


def why_attention(source: Core, host: Core, n: Numbers) -> str:
    """Return what keeps an attention core from being the host's."""
    if sum(source.sizes) != sum(host.sizes):
        grouped = "it has fewer heads of keys and values than of queries, and the host as many"
        return grouped if n.kv_heads != n.heads else "its heads are not of the host's size"
    for asked, having, lacking in (
        (
            _sees_later,
            "its tokens see later ones, and the host's do not",
            "its tokens do not see later ones, the host's do",
        ),
        (
            _placed,
            "its attention tells places apart (rotary or relative), and the host's does not",
            "the host's attention tells places apart (rotary), and the source's does not",
        ),
        (
            _capped,
            "its attention scores are capped or shaped, and the host's are not",
            "the host caps its attention scores",
        ),
    ):
        ours, theirs = asked(source, n), asked(host, n)
        if ours != theirs:
            return having if ours else lacking
    if _placed(source, n):
        return "its positions turn queries and keys by other angles, or other channels, than the host's"
    return "its attention computes something else than the host's"


def _canonical(core: Core, n: Numbers) -> Tensor:
    return next(attention_orders(core.sizes, n), torch.arange(sum(core.sizes)))


def _sees_later(core: Core, n: Numbers) -> bool:
    """Return whether a change of the last token is seen by the first."""
    given = drawn(core)
    other = given.clone().view(2, -1, given.shape[1])
    other[:, -1] += 1
    first = [core(g.reshape_as(given)).view(2, core.tokens // 2, -1)[:, 0] for g in (given, other)]
    return not torch.equal(*first)


def _placed(core: Core, n: Numbers) -> bool:
    """Return whether the same queries and keys everywhere give other weights to other places."""
    order = _canonical(core, n)
    both = (n.heads + n.kv_heads) * n.head_size
    given = drawn(core)
    given[:, order[:both]] = given[:1, order[:both]]
    values = given[:, order[both:]].view(2, -1, n.kv_heads, 1, n.head_size)
    last = core(given).view(2, -1, n.kv_heads, n.heads // n.kv_heads, n.head_size)[:, -1]
    return not torch.allclose(last, values.mean(1).expand_as(last), rtol=1e-5, atol=1e-6)


def _capped(core: Core, n: Numbers) -> bool:
    """Return whether the scores of queries ten times as large are not ten times as large."""
    order = _canonical(core, n)
    queries, both = order[: n.heads * n.head_size], (n.heads + n.kv_heads) * n.head_size
    given = drawn(core)
    tokens = torch.arange(core.tokens) % (core.tokens // 2)
    given[:, order[both:]] = (tokens[:, None] == (torch.arange(n.kv_heads * n.head_size) % n.head_size)[None]).double()
    odds = []
    for size in (0.1, 1.0):
        rows = given.clone()
        rows[:, queries] *= size
        out = core(rows).view(2, -1, n.heads, n.head_size)[:, 2]
        odds.append((out[..., 0] / out[..., 1]).log() / size)
    return not torch.allclose(odds[0], odds[1], rtol=1e-4, atol=1e-6)
