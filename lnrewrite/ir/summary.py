"""Describe what was seen in a model as the JSON object of `lnrewrite inspect --json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from .network import Block, Network, Stream
from .parts import Norm, Site
from .schemes import scheme


class Picture(str):
    """Show the text form of a network; a notebook gets it preformatted."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


Test = Callable[[str], bool]


def describe(network: Network, format: str, is_ones: Test, is_zeros: Test, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return the contract's object: streams in execution order, each with its blocks, norms and end norms.

    is_ones, is_zeros: look at a parameter's values; a gain of ones or a bias of zeros counts as absent.
    """

    rows = _Rows(is_ones, is_zeros)
    held = [site for s in network.streams for _, site in s.sites()]
    on_stream = _distinct(site for site in held if site.where != "inner")
    every = _distinct([*held, *network.elsewhere])
    modulated = dict(sorted(Counter(s.modulated for s in every if s.modulated).items()))
    return {
        "format": format,
        "placement": network.placement,
        "streams": [rows.stream(s) for s in network.streams],
        "norms": {
            "total": len(list(_norms(every))),
            "on_stream": len(list(_norms(on_stream))),
            "kinds": dict(sorted(Counter(str(n.kind) for n in _norms(every)).items())),
            **({"modulated": modulated} if modulated else {}),
        },
        "refusals": [r.to_dict() for r in network.refusals],
        "notes": list(notes),
    }


@dataclass(frozen=True)
class _Rows:
    """Write norms, blocks and streams as JSON rows."""

    is_ones: Test
    is_zeros: Test

    def norm(self, site: Site, where: bool = True) -> dict[str, object]:
        """Return the row of a norm."""
        n = site.norm
        neutral = self.is_zeros if n.plus_one else self.is_ones
        row: dict[str, object] = {"where": str(site.where)} if where else {}
        return (
            row
            | {
                "kind": str(n.kind),
                "eps": n.eps,
                "gamma": n.gamma is not None and (n.computed or not neutral(n.gamma)),
                "beta": n.beta is not None and not self.is_zeros(n.beta),
                "origin": list(site.origin[1:]),
            }
            | ({"modulated": site.modulated} if site.modulated else {})
        )

    def block(self, b: Block) -> dict[str, object]:
        """Return the row of a block."""
        return {
            "name": b.name,
            "kind": b.kind,
            "placement": str(b.placement),
            "parallel_group": b.parallel_group,
            "norms": [self.norm(s) for s in b.sites],
            "readers": [r.param for r in b.readers],
            "writers": [w.param for w in b.writers],
            "scale": b.scale,
            **({"skip": [str(s.by) for s in skip]} if (skip := b.scaled("skip")) else {}),
            "opaque": "; ".join(map(str, b.barriers)),
        }

    def stream(self, s: Stream) -> dict[str, object]:
        """Return the row of a stream."""
        return {
            "name": s.name,
            "width": s.width,
            "scheme": scheme(s),
            "blocks": [self.block(b) for b in s.blocks],
            "embedding_norm": self.norm(s.embedding, False) if s.embedding else None,
            "final_norm": self.norm(s.final, False) if s.final else None,
        }


def _norms(sites: Iterable[Site]) -> Iterator[Norm]:
    """Yield the norms of sites, those under another norm too."""
    for site in sites:
        norm: Norm | None = site.norm
        while norm:
            yield norm
            norm = norm.over


def _distinct(sites: Iterable[Site]) -> list[Site]:
    """Return each norm once per application: parallel blocks may share one."""
    found = {site.origin[-1:]: site for site in sites}
    return list(found.values())
