"""Name blocks and streams after the parameters that they hold: the common prefix of their dotted names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ..ir import Network, Stream


def common(names: Iterable[str]) -> str:
    """Return the longest dotted prefix that all names share."""
    parts = [n.split(".")[:-1] for n in names]
    if not parts:
        return ""
    shared = parts[0]
    for part in parts[1:]:
        shared = shared[
            : next(
                (i for i, (a, b) in enumerate(zip(shared, part, strict=False)) if a != b), min(len(shared), len(part))
            )
        ]
    return ".".join(shared)


def name_blocks(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    """Give every block of a model its own name: a shared path gets the block's kind, a repeated one a number.

    Blocks come in named by the path that their parameters share.
    """
    paths = [b.name for s in streams for b in s.blocks]
    counts = Counter(paths)
    holders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "."}
    taken: Counter[str] = Counter()
    named: list[Stream] = []
    for stream in streams:
        blocks = []
        for block in stream.blocks:
            path = block.name
            crowded = counts[path] > 1 or path in holders
            name = ".".join(p for p in (path, block.kind if crowded or not path else "") if p)
            taken[name] += 1
            blocks.append(replace(block, name=f"{name}@{taken[name]}" if taken[name] > 1 else name))
        named.append(replace(stream, name=stream_name([b.name for b in blocks], len(named)), blocks=tuple(blocks)))
    names = Counter(s.name for s in named)
    seen: Counter[str] = Counter()
    for i, stream in enumerate(named):
        seen[stream.name] += 1
        if names[stream.name] > 1:
            named[i] = replace(stream, name=f"{stream.name}.{seen[stream.name]}")
    return tuple(named)


def stream_name(blocks: list[str], index: int) -> str:
    """Name a stream after the path that its blocks share."""
    shared = common(f"{b}." for b in blocks)
    return shared or f"stream{index}"


def norm_names(network: Network) -> dict[str, str]:
    """Name every norm of a network by the node of its output: its site, or the node where it is on no stream."""
    named = {site.origin[-1]: name for stream in network.streams for name, site in stream.sites()}
    return {site.origin[-1]: site.origin[-1] for site in network.elsewhere} | named
