"""Run a folder that `export` wrote: tokens from a prompt, one after the other, by genai or by ONNX Runtime alone."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.torch.crossed import ENCODER, FIRST, HIDDEN, LATER, MASK, STATES
from ..backends.torch.pictured import EMBEDDING
from ..backends.torch.served import going_round, is_past
from ..errors import Code, LnrewriteError, UsageError, unknown, words
from ..files.output import CONFIG
from ..kernels.library import find
from ..loading.foreign import Foreign, Json, read_file
from ..loading.identify import damaged
from ..loading.transformers import tokenizer_in
from ..quiet import LOGGER
from .sessions import session

GENAI, GENERATION, MODEL = "genai_config.json", "generation_config.json", "model.onnx"
ENGINES = ("auto", "genai", "session")
LOADED = re.compile(r"librar|path|backend")
"""Keys of genai's config under which files with code are named."""
EMBEDDED = f"{EMBEDDING}.onnx"
Arrays = dict[str, Any]
Step = Callable[[Arrays], Arrays]
NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


@dataclass(frozen=True, slots=True)
class Generated:
    """Hold what was generated: its text, its tokens, how many the prompt had, tokens per second after the first."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    tokens_per_second: float
    engine: str


def generate(
    folder: Path,
    prompt: str,
    *,
    most: int = 64,
    engine: str = "auto",
    threads: int | None = None,
    told: Callable[[str], object] | None = None,
) -> Generated:
    """Generate greedily from a prompt with the model of a folder, until it ends its text or made `most` tokens.

    engine: genai, session, or auto: genai where it is installed and the folder has its config, unless that asks for
    CUDA and there is none, for only a session takes those of CUDA's operators apart that a CPU lacks. threads: of one
    operator; None leaves it to the engine. told: is given each piece of text when it is there. Raises LnrewriteError
    LN013 for a folder without a model of that kind, LN017 where genai would load code for it, LN015 for a config that
    cannot be read, LN018 for a package that lacks, LN520 where genai refuses the folder, UsageError LN003 for an
    unknown engine.
    """
    if engine not in ENGINES:
        unknown(Code.LN003, "engine", engine, ENGINES)
    there, names = any((folder / name).is_file() for name in (MODEL, f"{FIRST}.onnx")), tokenizer_in(folder, False)
    if not there or names is None:
        lacks = "no tokenizer" if there else f"no {MODEL}"
        remedy = "write the folder with `lnrewrite export CHECKPOINT -o FOLDER`"
        raise LnrewriteError(Code.LN013, f"folder {str(folder)!r}", f"it holds {lacks}", remedy)
    here = importlib.util.find_spec("onnxruntime_genai") is not None
    if engine == "genai" and not here:
        raise LnrewriteError(Code.LN018, "engine genai", "the package is missing", "pip install onnxruntime-genai")
    if engine == "auto":
        engine = "genai" if here and (folder / GENAI).is_file() and not _lacks_cuda(folder) else "session"
    tokenizer = names.load()
    ids = [int(i) for i in tokenizer(prompt)["input_ids"]]
    if not ids:
        raise UsageError(Code.LN003, "prompt", "the tokenizer makes no tokens of it", "give some text")
    ends, found, text = _ends(folder), list[int](), ""
    steps = (_by_genai if engine == "genai" else _by_session)(folder, ids, most, threads)
    first = last = time.perf_counter()
    for token in steps:
        last = time.perf_counter()
        first = first if found else last
        found.append(token)
        now = str(tokenizer.decode(found, skip_special_tokens=True))
        if not now.endswith("\ufffd"):  # the bytes of a character may be several tokens
            if told is not None:
                told(now[len(text) :])
            text = now
        if token in ends:
            break
    speed = (len(found) - 1) / (last - first) if len(found) > 1 and last > first else 0.0
    return Generated(text, tuple(found), len(ids), speed, engine)


def read_json(path: Path) -> Json:
    """Return what a JSON file of the folder holds. Raises LnrewriteError LN015 where that is no object."""
    try:
        return read_file(path)
    except Foreign as error:
        raise damaged(str(path), str(error)) from error


def _ends(folder: Path) -> set[int]:
    """Return the tokens that end a text."""
    for name in (GENERATION, CONFIG):
        held = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if held is not None:
            return {end for end in (held if isinstance(held, list) else [held]) if isinstance(end, int)}
    return set()


def _check(folder: Path) -> None:
    """Raise LnrewriteError LN017 where genai would load code for a folder, LN015 where it would read elsewhere.

    genai takes the names of libraries, for operators and providers, from its config. lnrewrite's own kernels are known,
    byte for byte; a folder that names others has to be run by genai itself.
    """
    left, own = list[object]([read_json(folder / GENAI)]), find()
    while left:
        each = left.pop()
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
        for key, value in each.items() if isinstance(each, dict) else ():
            if not isinstance(value, str):
                continue
            here = folder / Path(value).name
            plain = value == here.name and here.is_file() and not here.is_symlink()
            if key == "custom_ops_library" and plain and own and own.read_bytes() == here.read_bytes():
                continue
            if LOADED.search(key) or re.search(r"\.(so|dll|dylib)\b", value):
                remedy = "run it with --engine session, or, if you trust that file, with onnxruntime-genai itself"
                raise LnrewriteError(
                    Code.LN017, f"folder {str(folder)!r}", f"running it would load {value[:60]}", remedy
                )
            if key == "filename" and not plain:
                raise damaged(str(folder), f"{GENAI} names {value[:60]!r}, which is not a file of the folder")


def session_options(config: Json) -> Json:
    """Return the options of a decoder's sessions in genai's config, to be changed in place where it has any sense."""
    held: object = config
    for key in ("model", "decoder", "session_options"):
        held = held.setdefault(key, {}) if isinstance(held, dict) else None
    return held if isinstance(held, dict) else {}


def names_cuda(options: Json) -> bool:
    """Return whether options of sessions name CUDA, and no other provider."""
    named = options.get("provider_options")
    return isinstance(named, list) and [n for each in named if isinstance(each, dict) for n in each] == ["cuda"]


def _by_genai(folder: Path, ids: list[int], most: int, threads: int | None) -> Iterator[int]:
    """Yield tokens that onnxruntime-genai chooses. Raises LnrewriteError LN017 and LN015 as `_check`."""
    _check(folder)
    import onnxruntime_genai as genai

    try:
        config = genai.Config(str(folder))
        if _lacks_cuda(folder):  # most graphs run here all the same
            LOGGER.warning("note: the folder is for CUDA, which is not here: it runs on the CPU")
            config.clear_providers()
        if threads is not None:
            config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        model = genai.Model(config)
        options = genai.GeneratorParams(model)
        options.set_search_options(do_sample=False, repetition_penalty=1.0, max_length=len(ids) + most)
        run = genai.Generator(model, options)
        run.append_tokens(np.array([ids], np.int32))
        for _ in range(most):
            run.generate_next_token()
            yield int(run.get_next_tokens()[0])
            if run.is_done():
                return
    except Exception as why:  # a config or graph that it does not take, or a provider that is not here
        remedy = "run it with --engine session, or where genai has what its config asks for"
        raise LnrewriteError(Code.LN520, f"folder {str(folder)!r}", f"genai refuses it: {words(why)}", remedy) from why


def _lacks_cuda(folder: Path) -> bool:
    """Return whether a folder's config asks genai for CUDA, and that is not here."""
    import onnxruntime_genai as genai

    return names_cuda(session_options(read_json(folder / GENAI))) and not genai.is_cuda_available()


def _by_session(folder: Path, ids: list[int], most: int, threads: int | None) -> Iterator[int]:
    """Yield tokens that plain sessions of ONNX Runtime choose, the cache going round."""
    if (folder / MODEL).is_file():
        only = _Session(folder / MODEL, threads)
        step = _Embedding(folder / EMBEDDED, only, threads) if (folder / EMBEDDED).is_file() else only
        yield from _tokens(step, step, ids, only.empty(_head_size(folder)), {}, most)
        return
    if not (folder / f"{LATER}.onnx").is_file():
        why, remedy = f"it holds a {FIRST}.onnx and no {LATER}.onnx", "export it with its cache"
        raise LnrewriteError(Code.LN013, f"folder {str(folder)!r}", why, remedy)
    first, later = (_Session(folder / f"{name}.onnx", threads) for name in (FIRST, LATER))
    if not (folder / f"{ENCODER}.onnx").is_file():  # a decoder alone in two files, as optimum wrote it
        yield from _tokens(first, later, ids, {}, {}, most)
        return
    encoder = _Session(folder / f"{ENCODER}.onnx", threads)
    if "input_ids" not in encoder.takes:
        taken = ", ".join(encoder.takes)
        remedy = f"give its parts to optimum, or to ONNX Runtime, with {taken}"
        raise LnrewriteError(Code.LN013, f"folder {str(folder)!r}", f"its encoder takes {taken}, not text", remedy)
    source = np.array([ids], np.int64)
    beside = {MASK: np.ones_like(source)}
    beside[STATES] = encoder({"input_ids": source, "attention_mask": beside[MASK]})[HIDDEN]
    yield from _tokens(first, later, [_start(folder)], {}, beside, most)


class _Session:
    """Call a file by names, of which it takes what it knows."""

    def __init__(self, path: Path, threads: int | None) -> None:
        self.path, self.run = path, session(path, threads=threads)
        self.takes = {value.name: value for value in self.run.get_inputs()}
        self.gives = [value.name for value in self.run.get_outputs()]

    def __call__(self, feed: Arrays) -> Arrays:
        taken = {name: array for name, array in feed.items() if name in self.takes}
        return dict(zip(self.gives, self.run.run(self.gives, taken), strict=True))

    def empty(self, size: int) -> Arrays:
        """Return a cache that holds no tokens, its heads of a size where the file does not tell it.

        Raises LnrewriteError LN520 for one of bfloat16.
        """
        held = {}
        for name, value in self.takes.items():
            if is_past(name):
                if value.type not in NUMPY:
                    why = f"its cache is {value.type}, of which arrays cannot be given to ONNX Runtime from here"
                    raise LnrewriteError(Code.LN520, str(self.path), why, "run it with --engine genai")
                sizes = [d if isinstance(d, int) else size for d in value.shape[1::2]]
                held[name] = np.zeros((1, sizes[0], 0, sizes[1]), NUMPY[value.type])
        return held


class _Embedding:
    """Call a decoder that takes embeddings with those of text alone. Raises LnrewriteError LN013."""

    def __init__(self, path: Path, decoder: _Session, threads: int | None) -> None:
        self.decoder, self.run, self.none = decoder, _Session(path, threads), dict[str, Any]()
        for name, value in self.run.takes.items():
            if name != "input_ids":
                sizes, kind = value.shape[1:], NUMPY.get(value.type)
                if kind is None or not all(isinstance(size, int) for size in sizes):
                    why, remedy = f"it takes {name} of {value.type}", "run it with --engine genai"
                    raise LnrewriteError(Code.LN013, str(path), why, remedy)
                self.none[name] = np.zeros((0, *sizes), kind)

    def __call__(self, feed: Arrays) -> Arrays:
        return self.decoder({**feed, **self.run({"input_ids": feed["input_ids"], **self.none})})


def _tokens(first: Step, later: Step, ids: list[int], held: Arrays, beside: Arrays, most: int) -> Iterator[int]:
    """Yield tokens, each of the largest logit. held: the cache; beside: what every call is given."""
    step, new, past = first, np.array([ids], np.int64), 0
    for _ in range(most):
        after = past + new.shape[1]
        places = {"attention_mask": np.ones((1, after), np.int64), "position_ids": np.arange(past, after)[None]}
        out = step({"input_ids": new, **places, **held, **beside})
        held, step, past = {**held, **going_round(out)}, later, after
        token = int(out["logits"][0, -1].argmax())
        yield token
        new = np.array([[token]], np.int64)


def _head_size(folder: Path) -> int:
    """Return the size of a decoder's heads as genai's config has it, 0 where there is none."""
    decoder = read_json(folder / GENAI).get("model", {}).get("decoder", {}) if (folder / GENAI).is_file() else {}
    found = decoder.get("head_size") if isinstance(decoder, dict) else 0
    return found if isinstance(found, int) else 0


def _start(folder: Path) -> int:
    """Return the token that a decoder begins with. Raises LnrewriteError LN013 where no config tells it."""
    for name in (GENERATION, CONFIG):
        for key in ("decoder_start_token_id", "bos_token_id"):
            held = read_json(folder / name).get(key) if (folder / name).is_file() else None
            if isinstance(held, int):
                return held
    remedy = f"write decoder_start_token_id into {GENERATION}"
    raise LnrewriteError(Code.LN013, f"folder {str(folder)!r}", "no config says what its decoder begins with", remedy)
