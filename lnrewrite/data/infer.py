"""Find what to call a model with: from its transformers config, or by trying what its first layer reads."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..backends.inputs import draw_one
from ..backends.torch.contexts import dry
from ..compat.torch import Convolution
from ..errors import Code, LnrewriteError, told
from ..ir.inputs import Content, Input
from ..loading.source import OpenOptions
from .inputs import BATCH, LENGTH, Inputs, parse_inputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MAIN = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds")
_IMAGE_SIZES = (32, 28, 64, 224)


def infer_inputs(module: nn.Module, seed: int = 0) -> Inputs:
    """Find inputs that `module` runs on: from its transformers config, else from the first layer that reads a tensor.

    Guesses are tried by running the forward in eval mode without gradients; the module's modes, buffers and the global
    random state are left as they were. Batch axes (and sequence axes of ids) are named in `dynamic`: a wish, for a
    model may demand a fixed size. Raises LnrewriteError LN020 naming the inputs that are missing.
    """
    tried = ""
    guesses = chain(_from_config(module, seed) if _is_transformers(module) else (), _from_layers(module, seed))
    with _trial(module):
        for guess in guesses:
            try:
                module(*guess.args, **guess.kwargs)
            except Exception as error:  # a wrong guess raises anything
                tried = tried or f"; a guess from its layers failed with {told(error)}"
                continue
            return guess
    names = _required(module)
    why = f"the inputs {', '.join(names)} are missing" if names else "lnrewrite found no call that its forward accepts"
    example = " ".join(f"--input {_example(name)}" for name in names or ["x"])
    raise LnrewriteError(
        Code.LN020, type(module).__name__, why + tried[:160], f"give {example} (or an .npz or .pt file)"
    )


def given_inputs(module: nn.Module, how: OpenOptions) -> Inputs | None:
    """Return the example inputs that a user gave: specifications (drawn), by name, or by position; None without."""
    if not how.inputs:
        return None
    if isinstance(how.inputs, Mapping):
        return Inputs((), dict(how.inputs))
    if specs := how.specifications:
        return parse_inputs(specs, seed=how.seed, vocabulary=vocabulary_of(module))
    return Inputs(tuple(how.inputs))


def vocabulary_of(module: nn.Module) -> int:
    """Return how many ids every id input of `module` may use: its config's vocabulary, else its first embedding's rows.

    2 where there is neither.
    """
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        size = getattr(config.get_text_config(), "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    rows = (m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding))
    return next(rows, 2)


@contextlib.contextmanager
def _trial(module: nn.Module) -> Iterator[None]:
    """Make the module run in eval mode without gradients, and put its modes and the random state back."""
    modes = [(m, m.training) for m in module.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), dry(module):
        module.eval()
        try:
            yield
        finally:
            for m, mode in modes:
                m.training = mode


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the forward's parameters, those that collect any others left out."""
    signature = inspect.signature(module.forward)
    collect = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in signature.parameters.items() if p.kind not in collect}


def _required(module: nn.Module) -> list[str]:
    return [name for name, p in _parameters(module).items() if p.default is inspect.Parameter.empty]


def _example(name: str) -> str:
    ids = any(word in name for word in ("ids", "mask", "token", "label", "idx"))
    return f"{name}=int64[batch,seq]" if ids else f"{name}=float32[batch,seq,64]"


def _is_transformers(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "model_type") and hasattr(module, "main_input_name")


def _placed(module: nn.Module, tensor: Tensor) -> Tensor:
    """Put a tensor on the module's device and floats in its dtype."""
    first = next(module.parameters(), None)
    if first is None:
        return tensor
    floats = tensor.is_floating_point() and first.is_floating_point()
    return tensor.to(first.device, first.dtype if floats else tensor.dtype)


def _call(module: nn.Module, tensors: Mapping[str, Tensor]) -> Inputs:
    """Make the call: batch and, for ids, sequence axes are named."""
    axes = {
        name: {0: "batch"} | ({1: "sequence"} if not t.is_floating_point() and t.dim() > 1 else {})
        for name, t in tensors.items()
    }
    return Inputs((), {name: _placed(module, t) for name, t in tensors.items()}, axes)


def _from_config(module: nn.Module, seed: int) -> Iterator[Inputs]:
    """Guess from a transformers config: the main input alone, with decoder ids, or with the model's other inputs."""
    known = _parameters(module)
    config = cast("PreTrainedModel", module).config
    main: str | None = cast("PreTrainedModel", module).main_input_name
    main = main if main in known else next((name for name in _MAIN if name in known), None)
    if main is None:
        return
    for length in (LENGTH, 8, 4):
        for shape in _shapes(main, config, length):
            generator = torch.Generator().manual_seed(seed)
            call = {main: _drawn(main, shape, config, generator)}
            decoder = {}
            if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known:
                decoder = {"decoder_input_ids": _drawn("decoder_input_ids", (BATCH, length), config, generator)}
            yield _call(module, call | decoder)
            for other in _MAIN[:4]:
                if other in known and other != main:
                    other_shape = next(iter(_shapes(other, config, length)))
                    yield _call(module, call | {other: _drawn(other, other_shape, config, generator)} | decoder)
            if decoder:
                yield _call(module, call)


def pictures_for(module: nn.Module, seed: int = 0) -> Tensor:
    """Return made-up pictures [2, channels, height, width] of the size that a transformers config names."""
    config = cast("PreTrainedModel", module).config
    shape = next(iter(_shapes("pixel_values", config, LENGTH)))
    return _placed(module, _drawn("pixel_values", shape, config, torch.Generator().manual_seed(seed)))


def _drawn(name: str, shape: Sequence[int], config: PretrainedConfig, generator: torch.Generator) -> Tensor:
    """Draw one input; ids lie below the vocabulary and avoid the padding id, which models treat apart."""
    if not name.endswith("ids"):
        return draw_one(Input(name, "float32", tuple(shape), tuple(shape), Content.VALUES), generator)
    text = config.get_text_config(decoder=True) if name.startswith("decoder") else config.get_text_config()
    size = int(getattr(text, "vocab_size", None) or 256)
    ids = draw_one(Input(name, "int64", tuple(shape), tuple(shape), Content.IDS, size), generator)
    pad = getattr(text, "pad_token_id", None)
    return ids if pad is None else torch.where(ids == pad, (ids + 1) % size, ids)


def _shapes(name: str, config: PretrainedConfig, length: int) -> Iterator[tuple[int, ...]]:
    """Yield shapes for an input of a transformers model, likeliest first; `length` is that of a sequence of ids."""
    if name == "pixel_values":
        part = getattr(config, "vision_config", None) or config
        channels = getattr(part, "num_channels", None) or 3
        size = getattr(part, "image_size", None) or getattr(part, "img_size", None)
        sizes = [tuple(size.values()) if isinstance(size, dict) else size] if size else [64, 224]
        for one in sizes:
            height, width = (one, one) if isinstance(one, int) else tuple(one)[-2:]
            yield BATCH, channels, height, width
    elif name in ("input_values", "input_features"):
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
        frames = 2 * (getattr(config, "max_source_positions", None) or 0)
        if bins:
            yield BATCH, bins, frames or 64  # Whisper
            yield BATCH, min(frames or 64, 128), bins  # Speech2Text
            yield BATCH, getattr(config, "max_length", None) or 64, bins  # AST
        yield BATCH, 4000  # a quarter of a second of sound
        yield BATCH, 64, getattr(config, "feature_projection_input_dim", None) or 80
    elif name == "inputs_embeds":
        yield BATCH, length, getattr(config.get_text_config(), "hidden_size", 64)
    else:
        yield BATCH, length


def _from_layers(module: nn.Module, seed: int) -> Iterator[Inputs]:
    """Guess for a forward of one argument: what its embeddings, linears and convolutions would read, in their order."""
    names = _required(module) or list(_parameters(module))
    if len(names) != 1:
        return
    kind = _parameters(module)[names[0]].kind
    generator = torch.Generator().manual_seed(seed)
    layers = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear | Convolution)]
    for shape, rows in dict.fromkeys(chain.from_iterable(_readable(m) for m in layers[:16])):
        if rows:
            rows = _vocabulary_read(module, torch.randint(0, 2, shape, generator=generator)) or rows
            guess = _call(module, {names[0]: torch.randint(0, rows, shape, generator=generator)})
        else:
            guess = _call(module, {names[0]: torch.randn(shape, generator=generator)})
        if kind is inspect.Parameter.POSITIONAL_ONLY:
            guess = Inputs(tuple(guess.kwargs.values()))
        yield guess


def _readable(layer: nn.Module) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (shape, rows) of tensors that a layer could read; rows is 0 for floats, else ids lie below it."""
    if isinstance(layer, nn.Embedding):
        for length in (LENGTH, 8, 4):
            yield (BATCH, length), layer.num_embeddings
    elif isinstance(layer, nn.Linear):
        yield (BATCH, LENGTH, layer.in_features), 0
        yield (BATCH, layer.in_features), 0
    elif isinstance(layer, Convolution):
        axes = len(layer.kernel_size)
        for size in _IMAGE_SIZES if axes == 2 else (64, 16):
            yield (BATCH, layer.in_channels, *[size] * axes), 0


def _vocabulary_read(module: nn.Module, probe: Tensor) -> int:
    """Run the module on the ids `probe` and return the fewest rows of the embeddings that read them, else 0.

    A position table may be registered before the token table: what counts is which one the ids reach.
    """
    probe = _placed(module, probe)
    rows: list[int] = []

    def note(layer: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and torch.equal(args[0], probe):
            rows.append(cast(nn.Embedding, layer).num_embeddings)

    hooks = [m.register_forward_pre_hook(note) for m in module.modules() if isinstance(m, nn.Embedding)]
    try:
        with contextlib.suppress(Exception):  # the guess itself is tried afterwards
            module(probe)
    finally:
        for hook in hooks:
            hook.remove()
    return min(rows, default=0)
