"""Ship one small trained network, so that every example and check has real weights and real text.

`tinygpt` is a byte-level Pre-LN GPT (1.2 M parameters, context 128), trained on the sources of the Python
standard library by `examples/train_tinygpt.py`. Importing this package imports no torch; using it does.

    >>> from lnrewrite import demo
    >>> model = demo.load("tinygpt")
    >>> demo.loss(model, demo.heldout_text())       # nats per byte
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["NAMES", "calibration", "heldout_text", "load", "loss", "training_text"]

NAMES = ("tinygpt",)

_BATCH = 32  # windows per forward pass of `loss`


def load(name: str) -> torch.nn.Module:
    """Build the demo model `name` with its trained weights: float32, on the CPU, in eval mode.

    It takes `input_ids` int64[batch, seq], seq at most 128, and returns logits float32[batch, seq, 256].

    Raises:
        KeyError: `name` is not one of `NAMES`.
    """
    if name not in NAMES:
        raise KeyError(f"no demo model {name!r}; there is {', '.join(NAMES)}")
    from safetensors.torch import load as parse

    from .tinygpt import TinyGPT

    state = parse(_read("tinygpt.safetensors"))  # float16; copying into the model widens to float32
    model = TinyGPT()
    model.load_state_dict(state | {"head.weight": state["tok.weight"]})
    return model.eval()


def heldout_text() -> bytes:
    """Return the shipped text that the demo model never saw: whole Python source files, joined."""
    return _read("heldout.txt")


def training_text(limit: int | None = None) -> bytes:
    """Return the shipped excerpt of the demo model's training text, or its first `limit` bytes.

    It is a file of this package, the same on every Python version: about 1.5 % of all it was trained on.
    """
    return _read("calibration.txt")[:limit]


def calibration(
    batches: int = 8, batch_size: int = 8, length: int = 128, seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Sample calibration inputs from `training_text`, the same ones for the same arguments.

    Returns `batches` dicts `{"input_ids": int64[batch_size, length]}`; a list, so it can be walked twice.
    """
    import numpy as np
    import torch

    text = np.frombuffer(training_text(), dtype=np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(text) - length + 1, size=(batches, batch_size))
    windows = text[starts[..., None] + np.arange(length)].astype(np.int64)  # [batches, batch_size, length]
    return [{"input_ids": torch.from_numpy(window)} for window in windows]


def loss(module: Callable[..., Any], text: bytes, length: int = 128, limit: int | None = None) -> float:
    """Measure how well `module` predicts `text`: mean cross-entropy in nats per byte, lower is better.

    The text is cut into consecutive windows of `length` bytes, each read without what came before it; every
    byte of a window is asked for its successor. The tail that fills no window is left out; `limit` keeps only
    so many first bytes of the text. `module` is called as `module(input_ids=int64[batch, length])`, returning
    logits [batch, length, 256]. Its mode (train or eval) and device are left as they are.

    Raises:
        ValueError: the text is shorter than one window and its last target, length + 1 bytes.
    """
    import torch
    from torch.nn import functional as F

    ids = torch.tensor(list(text[:limit]), dtype=torch.int64)
    count = (len(ids) - 1) // length
    if count < 1:
        raise ValueError(f"{len(ids)} bytes of text; a window of {length} needs at least {length + 1}")
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else iter(())
    device = next((p.device for p in parameters), torch.device("cpu"))
    inputs = ids[: count * length].reshape(count, length).to(device)
    targets = ids[1 : count * length + 1].reshape(count, length).to(device)
    chunks = -(-count // _BATCH)  # near-equal batches: no stray batch of one at the end
    total = 0.0
    with torch.no_grad():
        for x, y in zip(inputs.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
            logits = module(input_ids=x)
            total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").item()
    return total / targets.numel()


def _read(name: str) -> bytes:
    return files(__package__).joinpath(name).read_bytes()
