"""What each block saw and did on data, sum by sum: a walk through the model goes as far as somebody asks.

The states that later sums read are held for all batches, one part's weights, and the samples of as many sums as fit
into `BYTES`; of a small model that is all of them. What is asked for again when it is gone, is walked to again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from ..backends.hiding import Shown
from ..backends.torch.contexts import evaluating, quiet
from ..backends.torch.fixed import elsewhere, other_path
from ..backends.torch.module import CapturedModule
from ..backends.torch.walk import Walk
from ..backends.torch.widened import Read
from ..detect.arithmetic import Floats
from ..errors import Code, LnrewriteError, words
from ..ir import Network
from ..pipeline.protocols import Batch, Samples
from ..quiet import LOGGER
from .calibration import finite, nodes_of, rows_of

BYTES = 1 << 28
"""How much memory the samples of several sums may take; those of one take what they need."""
TOKENS = 4096
"""So many tokens are kept whatever a model's width, if the data have them."""
KINDS = 6
"""Arrays of one block's samples, at most."""


class Sampled(Mapping[str, Samples]):
    """Give each block's samples on the batches: float64 arrays [tokens, width], the same tokens for all.

    read: gives a parameter's values by its name where the module holds none. Raises LnrewriteError LN022 where a batch
    does not fit the model, LN026 where it gives NaN or infinite values, LN033 where it takes another path.
    """

    def __init__(
        self, network: Network, module: CapturedModule, batches: Sequence[Batch], read: Read | None = None
    ) -> None:
        self.module, self.batches, self.read = module, batches, read
        self.nodes = {b.name: nodes_of(s, b, i) for s in network.streams for i, b in enumerate(s.blocks)}
        self.ends = {b.name: b.anchor.total for s in network.streams for b in s.blocks}
        self.streams = [{n for b in s.blocks for n, _ in self.nodes[b.name].values()} for s in network.streams]
        self.axes = {n: axis for nodes in self.nodes.values() for n, axis in nodes.values() if n}
        width = max((s.width for s in network.streams), default=0) or 1
        whole = max(TOKENS, BYTES // (8 * width * KINDS))
        self.limit = max(64, -(-whole // max(1, len(batches))))
        self.held: dict[str, Samples] = {}
        self.walk: Walk | None = None

    @cached_property
    def shown(self) -> Shown:
        """Return which tokens count: those that no mask hides."""
        ends = frozenset(self.ends.values())

        def run(batch: Batch) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            with evaluating(self.module), quiet():
                walk = Walk(self.module, list(ends), [batch], self.read)
                while not walk.over:
                    walk.go(lambda name, _, value: found.update({name: value} if name in ends else {}))
            return {n: value.detach().movedim(self.axes[n], -1) for n, value in found.items()}

        return Shown.tried(self.batches, run, self.streams)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, block: str) -> Samples:
        if block not in self.held:
            end = self.ends[block]
            if self.walk is None or end in self.passed:
                self._start()
            while end not in self.passed:
                self._go()
        return self.held[block]

    def _start(self) -> None:
        """Stand before the first part again."""
        with evaluating(self.module):  # the parts are as the graph is now
            self.walk = Walk(self.module, list(dict.fromkeys(self.ends.values())), self.batches, self.read)
        self.passed: list[str] = []
        self.left = {name: {n for n, _ in nodes.values() if n} for name, nodes in self.nodes.items()}
        self.kept: dict[str, dict[int, Tensor]] = {}
        for name, values in self.walk.known(self.axes).items():
            for batch, value in enumerate(values):
                self._see(name, batch, value)

    def _go(self) -> None:
        """Go through the next part, and hold the samples of the blocks that are complete."""
        assert self.walk is not None
        try:
            with evaluating(self.module), quiet():
                self.walk.go(self._see)
        except (RuntimeError, IndexError, ValueError) as error:
            if path := other_path(error):
                raise elsewhere("calibration data", path) from error
            why = f"the model fails on it: {words(error).partition(chr(10))[0]}"
            raise LnrewriteError(Code.LN022, "calibration data", why, "give data that fit the model") from error
        over = self.walk.over
        full = {n for n, seen in self.kept.items() if len(seen) == len(self.batches)}
        done = [b for b, wanted in self.left.items() if wanted <= full or over]
        for block in done:
            del self.left[block]
            self.passed.append(self.ends[block])
            self._hold(block)
        wanted = set().union(*self.left.values()) if self.left else set()
        self.kept = {n: seen for n, seen in self.kept.items() if n in wanted}
        if self.read is not None and done:
            LOGGER.info(f"{len(self.nodes) - len(self.left)}/{len(self.nodes)} {done[-1]}")

    def _see(self, name: str, batch: int, value: Tensor) -> None:
        """Keep some rows of a value, [tokens, channels]."""
        if name in self.axes and isinstance(value, Tensor):
            rows = value.detach().movedim(self.axes[name], -1)
            counts = self.shown.rows(name, rows, self.batches[batch])
            rows = rows.reshape(-1, rows.shape[-1])
            rows = rows if counts is None else rows[counts]
            chosen = rows_of(len(rows), self.limit, batch)
            self.kept.setdefault(name, {})[batch] = rows[chosen] if len(chosen) < len(rows) else rows

    def _hold(self, block: str) -> None:
        """Make a block's samples; those of earlier sums go where there is no room for both."""
        names = [n for n in dict.fromkeys(n for n, _ in self.nodes[block].values()) if n in self.kept]
        needed = sum(8 * value.numel() for n in names for value in self.kept[n].values())
        beside = [b for b in self.held if self.ends[b] != self.ends[block]]
        while beside and needed + sum(map(_size, self.held.values())) > BYTES:
            del self.held[beside.pop(0)]
        arrays = {n: self._array(n) for n in names}
        finite(arrays)
        self.held[block] = Samples(**{k: arrays.get(n) for k, (n, _) in self.nodes[block].items()})  # type: ignore[arg-type]

    def _array(self, name: str) -> Floats:
        """Return all rows of a value; what another block of the same sum holds already is not made again."""
        for block, nodes in self.nodes.items():
            if block in self.held:
                for kind, (node, _) in nodes.items():
                    if node == name:
                        found: Floats = getattr(self.held[block], kind)
                        return found
        seen = self.kept[name]
        return np.concatenate([seen[k].double().cpu().numpy() for k in sorted(seen)])


def _size(samples: Samples) -> int:
    """Return the bytes of a block's different arrays."""
    arrays = (getattr(samples, kind) for kind in Samples.__slots__)
    return sum({id(a): a.nbytes for a in arrays if a is not None}.values())
