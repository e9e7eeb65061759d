"""Find what to call a model with: from `--input`, a transformers config, or by trying what its first layer reads."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..backends.torch.capture import dry
from ..errors import LnrewriteError, did_you_mean, told
from ..files.output import named_path
from ..loading.pickles import Damaged, check_built, unsafe_names

BATCH, LENGTH = 2, 16  # sizes of an example: sequences of 16, or shorter where a model takes no longer ones
_SPEC = re.compile(r"([A-Za-z_]\w*)=(\w+)\[([^\[\]]*)\]")
_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: "float32 float f32 fp32",
        torch.float64: "float64 double f64 fp64",
        torch.float16: "float16 half f16 fp16",
        torch.bfloat16: "bfloat16 bf16",
        torch.int64: "int64 long i64",
        torch.int32: "int32 int i32",
        torch.int16: "int16 i16",
        torch.int8: "int8 i8",
        torch.uint8: "uint8 u8",
        torch.bool: "bool",
    }.items()
    for name in names.split()
}
_MAIN = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds")
_IMAGE_SIZES = (32, 28, 64, 224)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Hold one example call: positional `args`, keyword tensors, and for each keyword its named (dynamic) axes."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Tensor] = field(default_factory=dict)
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)


def parse_inputs(specs: Sequence[str], *, seed: int = 0, vocabulary: int = 2) -> Inputs:
    """Make the inputs that `--input` options describe, random and the same for the same seed.

    Each of `specs` is `name=dtype[d0,d1,...]`, with sizes or names of dynamic dimensions, or the path of an .npz or .pt
    file of named tensors. A name has one size everywhere and no two names share one. Integers are drawn below
    `vocabulary`. Raises LnrewriteError LN021.
    """
    generator = torch.Generator().manual_seed(seed)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Tensor] = {}
    dynamic: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    for spec in specs:
        found: dict[str, Tensor] = {}
        if match := _SPEC.fullmatch(spec.strip()):
            name, dtype, dims = match[1], _dtype(spec, match[2]), _dims(spec, match[3])
            shape = [d if isinstance(d, int) else _size(d, sizes) for d in dims]
            found[name] = random_tensor(name, dtype, shape, generator, vocabulary)
            dynamic |= {name: axes} if (axes := {i: d for i, d in enumerate(dims) if isinstance(d, str)}) else {}
        else:
            positional, found = _read(spec)
            args += positional
        if twice := sorted(set(found) & set(kwargs)):
            raise _bad(spec, f"{twice[0]} is given twice")
        kwargs |= found
    return Inputs(args, kwargs, dynamic)


def random_tensor(
    name: str, dtype: torch.dtype, shape: Sequence[int], generator: torch.Generator, vocabulary: int
) -> Tensor:
    """Draw a tensor for the input `name`: floats normal, integers uniform in [0, vocabulary).

    What a name says about integers is heeded: masks are ones, token types zeros, positions count up.
    """
    if "mask" in name or dtype is torch.bool:
        return torch.ones(tuple(shape), dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    if "type" in name or "segment" in name:
        return torch.zeros(tuple(shape), dtype=dtype)
    if "position" in name and shape:
        return torch.arange(shape[-1]).expand(tuple(shape)).to(dtype).contiguous()
    limit = min(vocabulary, torch.iinfo(dtype).max)
    return torch.randint(0, max(limit, 1), tuple(shape), generator=generator).to(dtype)


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
    why = f"the inputs {', '.join(names)} are missing" if names else "no call was found that its forward takes"
    example = " ".join(f"--input {_example(name)}" for name in names or ["x"])
    raise LnrewriteError("LN020", type(module).__name__, why + tried[:160], f"give {example} (or an .npz or .pt file)")


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


# --- the grammar


def _bad(
    spec: str, why: str, remedy: str = "write name=dtype[d0,d1,...], or the path of an .npz or .pt file"
) -> LnrewriteError:
    return LnrewriteError("LN021", f"--input {spec!r}", why, remedy)


def _dtype(spec: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise _bad(spec, f"there is no dtype {name!r}", did_you_mean(name, {str(d)[6:] for d in _DTYPES.values()}))
    return _DTYPES[name]


ELEMENTS, AXES = 2**31, 32
"""A made-up input has fewer elements, and no more axes, as numpy's and torch's own kernels do not."""


def _dims(spec: str, text: str) -> list[int | str]:
    """Read `d0,d1,...`: positive numbers and names."""
    dims: list[int | str] = []
    for word in text.split(",") if text.strip() else []:
        word = word.strip()
        if not (word.isidentifier() or word.isascii() and word.isdigit() and len(word) < 20 and int(word) > 0):
            raise _bad(spec, f"the dimension {word!r} is neither a positive number nor a name")
        dims.append(int(word) if word.isdigit() else word)
    if len(dims) > AXES:
        raise _bad(spec, f"it has {len(dims)} dimensions, and {AXES} are taken", "give fewer")
    if math.prod(d for d in dims if isinstance(d, int)) >= ELEMENTS:
        raise _bad(spec, "it is larger than any input that could be made up", "give smaller dimensions")
    return dims


def _size(name: str, sizes: dict[str, int]) -> int:
    """Give a dynamic dimension a size that no other name has: batches 2, others multiples of 4 from 16 on."""
    if name not in sizes:
        start = BATCH if name.lower() in ("b", "n", "bs", "batch", "batch_size") else LENGTH
        sizes[name] = next(s for s in chain([start], range(LENGTH + 4, 10_000, 4)) if s not in sizes.values())
    return sizes[name]


def _read(spec: str) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Read a file of tensors: named ones as keywords, a single tensor or a tuple as positional arguments."""
    path = named_path(spec)
    if not os.path.isfile(path):
        raise _bad(spec, "it is neither a specification nor a file")
    held = read_tensors(path, "LN021")
    if isinstance(held, Tensor):
        return (held,), {}
    if isinstance(held, Mapping):
        return (), dict(held)
    return tuple(held), {}


REMEDY = "save named tensors, without pickled objects"


def read_tensors(path: Path, code: str) -> Tensor | dict[str, Tensor] | list[Tensor]:
    """Read an .npz, .npy, .pt or .safetensors file of tensors; nothing in it is unpickled.

    Returns what the file holds: one tensor, named ones, or a list. Raises LnrewriteError `code` where it holds anything
    else or cannot be read.
    """
    import numpy as np

    what = f"file {str(path)!r}"
    try:
        with path.open("rb") as stream:
            start = stream.read(16)
        if path.suffix in (".npz", ".npy"):
            _check_packed(path, what, code)
            held: Any = np.load(path, mmap_mode="c", allow_pickle=False)  # a long .npy stays on the disk
            held = (
                torch.from_numpy(held) if isinstance(held, np.ndarray) else {k: torch.from_numpy(held[k]) for k in held}
            )
        elif path.suffix == ".safetensors" or start[8:9] == b"{":
            from safetensors.torch import load_file

            held = load_file(path)
        else:
            with path.open("rb") as stream:
                named = unsafe_names(stream)
            if named:
                why = f"to read it would run {', '.join(name[:60] for name in named[:4])}"
                raise LnrewriteError(code, what, why, REMEDY)
            held = torch.load(path, map_location="cpu", weights_only=True)
            check_built(held)
    except LnrewriteError:
        raise
    except Damaged as error:
        raise LnrewriteError(code, what, str(error), REMEDY) from error
    except OSError as error:
        raise LnrewriteError(code, what, f"it cannot be read: {error}", "check the file") from error
    except Exception as error:  # numpy, torch and safetensors raise various errors for content they do not take
        why = f"it does not hold plain tensors ({type(error).__name__})"
        raise LnrewriteError(code, what, why, REMEDY) from error
    tensors = held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else [held]
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise LnrewriteError(
            code, what, f"it holds a {type(held).__name__} of other things than tensors", "save tensors"
        )
    return (
        {str(k): v for k, v in held.items()}
        if isinstance(held, Mapping)
        else held
        if isinstance(held, Tensor)
        else list(held)
    )


PACKED, RATIO = 1 << 28, 200
"""An .npz may unpack to more bytes than this only where that is up to so many times its size."""


def _check_packed(path: Path, what: str, code: str) -> None:
    """Raise LnrewriteError `code` for an .npz that is small and unpacks to very much."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > max(PACKED, RATIO * path.stat().st_size):
        why = f"it has {path.stat().st_size} bytes and unpacks to {total}"
        raise LnrewriteError(code, what, why, "save it with numpy.savez, which does not pack")


# --- guesses


@contextlib.contextmanager
def _trial(module: nn.Module) -> Iterator[None]:
    """Let the module run in eval mode without gradients, and put its modes and the random state back."""
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
    config = cast(Any, module).config
    main = cast(Any, module).main_input_name
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


def _drawn(name: str, shape: Sequence[int], config: Any, generator: torch.Generator) -> Tensor:
    """Draw one input; ids lie below the vocabulary and avoid the padding id, which models treat apart."""
    if not name.endswith("ids"):
        return torch.randn(tuple(shape), generator=generator)
    text = config.get_text_config(decoder=True) if name.startswith("decoder") else config.get_text_config()
    size = int(getattr(text, "vocab_size", None) or 256)
    ids = torch.randint(0, size, tuple(shape), generator=generator)
    pad = getattr(text, "pad_token_id", None)
    return ids if pad is None else torch.where(ids == pad, (ids + 1) % size, ids)


def _shapes(name: str, config: Any, length: int) -> Iterator[tuple[int, ...]]:
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
    layers = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.modules.conv._ConvNd)]
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
    elif isinstance(layer, nn.modules.conv._ConvNd):
        axes = len(layer.kernel_size)
        for size in _IMAGE_SIZES if axes == 2 else (64, 16):
            yield (BATCH, layer.in_channels, *[size] * axes), 0


def _vocabulary_read(module: nn.Module, probe: Tensor) -> int:
    """Run the module on the ids `probe` and return the fewest rows of the embeddings that read them, else 0.

    A position table may be registered before the token table: what counts is which one the ids reach.
    """
    probe = _placed(module, probe)
    rows: list[int] = []

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
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
