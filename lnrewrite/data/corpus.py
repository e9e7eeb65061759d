"""Turn a corpus into one long run of tokens that stays on the disk, or into rows of an encoder: a document each.

Tokens of a file (.bin, .npy, a text of a model that reads bytes) are mapped into memory as they are. Documents are
tokenized once, no more of them than a training asks for, into a file without a name that is mapped the same way: each
with the special tokens of its tokenizer, and behind it the token that ends a text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends.inputs import Tensors, check_ids
from ..errors import Code, LnrewriteError, told
from ..loading.transformers import Tokenizer, closed
from .batches import Data
from .documents import SUFFIXES, Piece, pieces_of
from .files import read_tensors

FORMS = (".txt", ".jsonl", ".parquet", ".npy", ".bin", ".npz", ".pt", ".safetensors")
"""How the names of files end that are read."""

TOGETHER, CHARACTERS = 256, 1 << 22
"""Pieces of text, and characters, that a tokenizer is given at once, at the most."""

BLANK = b"\n\n"
"""What stands behind a document where a model reads bytes: there is no token that ends a text."""


@dataclass(frozen=True)
class Ready:
    """Hold a tokenizer of transformers as it is."""

    made: Any

    def load(self) -> Any:
        """Return the tokenizer."""
        return self.made


@dataclass(frozen=True)
class Run:
    """Hold tokens int[count] in the order of their text.

    end: the id behind every document, None without one. before: the ids that a tokenizer puts before a text.
    """

    tokens: Tensor
    end: int | None = None
    before: Sequence[int] = ()


@dataclass(frozen=True)
class Corpus:
    """Read DATA as a model's tokens. `need`: how many a training asks for; no more is tokenized.

    Raises LnrewriteError LN022 where the data cannot be read, or do not fit the model.
    """

    data: Data
    need: int

    @property
    def rows(self) -> int:
        """Return how many rows the model's table of tokens has."""
        limits = set(self.data.spec.vocabularies.values())
        if len(limits) != 1:
            why = f"the model looks up {len(limits)} kinds of ids, and tokens are one"
            raise self.data.bad(why, "give all inputs, as .npz or .pt")
        return limits.pop()

    def read(self, field: str) -> Run | Tensor | Tensors | list[Tensor]:
        """Return what a file holds: one run of tokens, or arrays of rows. field: what holds the text of a document."""
        path = self.data.file(FORMS)
        if path.suffix == ".bin" or (path.suffix == ".txt" and self.data.byte_level):
            return self.mapped(path)
        if path.suffix in SUFFIXES:
            return self.documents(pieces_of(path, field, self.data.bad))
        held = read_tensors(path, Code.LN022)
        if isinstance(held, dict) and len(held) == 1:
            held = next(iter(held.values()))
        alone = len(self.data.spec.vocabularies) == 1
        if alone and isinstance(held, Tensor) and held.dim() == 1 and not held.is_floating_point():
            return self.taken(held)
        return held

    def mapped(self, path: Path) -> Run:
        """Return a .bin of tokens, uint16 or for a larger vocabulary uint32 (as nanoGPT writes it), or a byte text."""
        width = np.uint8 if path.suffix == ".txt" else np.uint16 if self.rows <= 1 << 16 else np.uint32
        size = path.stat().st_size
        if not size:
            raise self.data.bad("it is empty", "check the file")
        if size % np.dtype(width).itemsize:
            why = f"it has {size} bytes, and tokens below {self.rows} are {np.dtype(width).name}"
            raise self.data.bad(why, "check the file, or save the tokens as .npy")
        return self.taken(torch.from_numpy(np.memmap(path, dtype=width, mode="c")))

    def taken(self, tokens: Tensor) -> Run:
        """Return tokens int[count] that are there already."""
        self.check(tokens)
        return self._run(tokens)

    def check(self, tokens: Tensor) -> None:
        """Raise LnrewriteError LN022 where the model has no row for a token."""
        for name, limit in self.data.spec.vocabularies.items():
            check_ids(name, limit, tokens, self.data.name)

    def documents(self, pieces: Iterable[Piece]) -> Run | Tensors:
        """Return documents as the model reads them: rows of an encoder, or one run of tokens."""
        return self.rows_of(pieces) if self.encoder else self.encoded(pieces)

    def encoded(self, pieces: Iterable[Piece]) -> Run:
        """Return the tokens of documents, as many as are needed."""
        width = np.dtype(np.uint8 if self.data.byte_level else np.uint32)
        count = 0
        with tempfile.TemporaryFile() as file:
            for ids in self._documents(pieces):
                self.check(torch.from_numpy(ids))
                count += len(ids)
                file.write(ids.astype(width).tobytes())
                if count >= self.need:
                    break
            if not count:
                raise self.data.bad("it holds no text", "check the file")
            file.flush()
            held = np.memmap(file, dtype=width, mode="c", shape=(count,))
        return self._run(torch.from_numpy(held))

    def _run(self, tokens: Tensor) -> Run:
        return Run(tokens, self._end, self._special[0]) if self.data.tokenizer else Run(tokens)

    def _documents(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Yield runs of ids int64[count], documents one behind the other."""
        before, behind = ((), ()) if self.data.byte_level else self._special
        starts = True
        for held in _batches(pieces):
            encoded = self._ids([text for text, _ in held])
            found: list[int] = []
            for ids, (_, ends) in zip(encoded, held, strict=True):
                if starts and (ids or not ends):
                    found += before
                found += ids
                if ends and not (starts and not ids):
                    found += BLANK if self.data.byte_level else behind
                starts = ends
            if found:
                yield np.array(found, dtype=np.int64)

    def _ids(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        if self.data.byte_level:
            return [list(text.encode(errors="replace")) for text in texts]
        found: Sequence[Sequence[int]] = self._called(list(texts), add_special_tokens=False)["input_ids"]
        return found

    def rows_of(self, pieces: Iterable[Piece]) -> Tensors:
        """Return documents as rows of an encoder: each cut into windows of its own with their special tokens.

        Where the model takes a mask, short windows are padded and masked; else only full ones are kept.
        """
        length, names = self.data.window, self.data.spec.names
        mask = next((n for n in names if n == "attention_mask"), None)
        padded = mask is not None and self._tokenizer.pad_token_id is not None
        how: dict[str, object] = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
        how |= {"padding": "max_length"} if padded else {}
        found: dict[str, list[list[int]]] = {}
        count = 0
        for held in _batches(pieces):
            rows = self._called([text for text, _ in held if text.strip()], **how)
            full = [i for i, ids in enumerate(rows["input_ids"]) if len(ids) == length]
            for name in ("input_ids", "attention_mask", "token_type_ids"):
                if name in rows:
                    found.setdefault(name, []).extend(rows[name][i] for i in full)
            count += len(full) * length
            if count >= self.need:
                break
        if not count:
            raise self.data.bad(f"no document fills a window of {length} tokens", "give shorter windows (--length)")
        tensors = {name: torch.tensor(rows, dtype=torch.int64) for name, rows in found.items()}
        self.check(tensors["input_ids"])
        return {**self.data.of_ids(tensors["input_ids"]), **{n: t for n, t in tensors.items() if n in names}}

    # ---- the tokenizer ----

    @property
    def encoder(self) -> bool:
        """Return whether the tokenizer is one of an encoder, whose every row starts with a token of its own."""
        return not self.data.byte_level and self._tokenizer.cls_token_id is not None

    @cached_property
    def _tokenizer(self) -> Any:
        if self.data.tokenizer is None:
            remedy = "give token ids, or name a folder that holds one (heal's --tokenizer, tokenizer=)"
            raise self.data.bad("the model brings no tokenizer", remedy)
        try:
            given = self.data.tokenizer
            return (Tokenizer(given) if isinstance(given, str) else given).load()
        except ImportError as error:
            remedy = "pip install transformers (or lnrewrite[hf])"
            raise self.data.bad("reading text needs transformers", remedy) from error
        except LnrewriteError:
            raise
        except Exception as error:  # tokenizers raise anything
            raise self._failed(error) from error

    def _called(self, texts: Sequence[str], **how: object) -> Any:
        whole = [text.encode(errors="replace").decode() for text in texts]  # half a pair of surrogates is no text
        try:
            with closed():
                return self._tokenizer(whole, **how)
        except Exception as error:  # tokenizers raise anything
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> LnrewriteError:
        return self.data.bad(f"the tokenizer failed: {told(error)}", "give token ids, as .npy or .bin")

    @property
    def _end(self) -> int | None:
        """Return the id that ends a text."""
        found: int | None = self._tokenizer.eos_token_id
        return self._tokenizer.sep_token_id if found is None else found

    @cached_property
    def _special(self) -> tuple[list[int], list[int]]:
        """Return the ids that stand before and behind every document."""
        bare, whole = self._called(["a"], add_special_tokens=False), self._called(["a"])
        inner, ids = bare["input_ids"][0], whole["input_ids"][0]
        at = next((i for i in range(len(ids)) if inner and ids[i : i + len(inner)] == inner), 0)
        before, behind = list(ids[:at]), list(ids[at + len(inner) :])
        if self._end is not None and behind[-1:] != [self._end]:
            behind.append(self._end)
        return before, behind


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    held: list[Piece] = []
    for piece in pieces:
        held.append(piece)
        if len(held) == TOGETHER or sum(len(text) for text, _ in held) > CHARACTERS:
            yield held
            held = []
    if held:
        yield held
