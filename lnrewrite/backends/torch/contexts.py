"""What a module runs under: in eval mode, with its buffers as they were, on sizes alone, in silence."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout

import torch
from torch import nn

from ...compat.torch import FakeTensorMode
from ...recipe.runtime import holder_of
from .module import CapturedModule, written_by


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode for a while, every submodule back as it was, and a graph's buffers."""
    was = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with unchanged(module) if isinstance(module, CapturedModule) else nullcontext():
            yield
    finally:
        for m, mode in was.items():
            m.training = mode
        if isinstance(module, CapturedModule):
            module.train(was[module])


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Give a module the buffers back that it had, where running it counts or keeps something in them."""
    graph = module if isinstance(module, CapturedModule) else None
    names = written_by(graph) if graph else [n for n, _ in module.named_buffers(remove_duplicate=False)]
    places = [holder_of(module, name) for name in names]
    held = [(m, n, b, b.clone()) for m, n in places if not (b := getattr(m, n)).is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, copy in held:
                if graph:  # which writes in place, and may have been moved
                    buffer = getattr(owner, name)
                else:
                    setattr(owner, name, buffer)
                if not torch.equal(buffer, copy.to(buffer.device)):
                    buffer.copy_(copy)


def dry(module: nn.Module) -> AbstractContextManager[object]:
    """Return what a module without weights (on the meta device) runs under: sizes alone, and it is told so."""
    empty = any(p.is_meta for p in module.parameters())
    return FakeTensorMode(allow_non_fake_inputs=True) if empty else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch.export prints and logs to itself; what matters comes back as notes and errors."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    nowhere = io.StringIO()
    try:
        with torch.no_grad(), redirect_stdout(nowhere), redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
