"""The one door to transformers: its code for networks and tokenizers, none of a folder's unless that is trusted.

Behind it nothing is asked on the terminal, nothing fetched, and progress and advice stay off it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Code, LnrewriteError
from ..recipe.modeling import written_by_us
from .configs import code_named, read_config
from .foreign import Json, read_file
from .identify import listed
from .source import Source
from .weighing import check_counts

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


@contextlib.contextmanager
def closed() -> Iterator[Any]:
    """Give transformers: it asks no question, fetches nothing and says nothing for a while.

    Where it would ask whether to run code, it raises; `trust_remote_code` is passed all the same. Raises ImportError.
    """
    import transformers
    from huggingface_hub import constants
    from transformers import dynamic_module_utils
    from transformers.utils import logging as library

    logging: Any = library
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    asked, online = dynamic_module_utils.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dynamic_module_utils.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE = 0, True
    try:
        yield transformers
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE = asked, online
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


@contextlib.contextmanager
def library(source: Source) -> Iterator[tuple[object, dict[str, object], bool]]:
    """Give transformers, a folder's checked config.json, and whether code of the folder is run.

    Raises LnrewriteError LN016 for a config that asks for too much, LN017 for code that is not trusted, LN018 without
    transformers, LN028 for code of another repository.
    """
    content = read_config(source.file)
    code = code_named(content)
    if code and not source.how.trust_remote_code and not _ours(source.file, content, code):
        why = f"its config names code to run: {listed(code)}"
        raise LnrewriteError(Code.LN017, f"model {source.name!r}", why, "read that code, then give --trust-remote-code")
    if elsewhere := [name for name in code if "--" in name]:
        why = f"its code is in another repository: {listed(elsewhere)}"
        raise LnrewriteError(Code.LN028, f"model {source.name!r}", why, "copy the code into the folder")
    check_counts(source.name, content)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        remedy = "pip install transformers (or lnrewrite[hf])"
        raise LnrewriteError(Code.LN018, f"model {source.name!r}", "it is a transformers checkpoint", remedy) from error
    with closed() as found:
        yield found, content, bool(code)


def _ours(folder: Path, content: Json, code: list[str]) -> bool:
    """Return whether all code that a config names is of the modeling file that lnrewrite writes for it."""
    return written_by_us(folder, content) and set(code) <= set((content.get("auto_map") or {}).values())


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Hold where a tokenizer is, and whether code that its folder brings may be run."""

    folder: str
    trusted: bool = False

    def load(self) -> Any:
        """Return transformers' tokenizer. Raises LnrewriteError LN017 for code, ImportError, and what a tokenizer does.

        Code of ours, of a folder that lnrewrite wrote, needs no trust.
        """
        folder = Path(self.folder)
        settings, config = folder / "tokenizer_config.json", folder / "config.json"
        code = code_named(read_file(settings)) if settings.is_file() else []
        held = read_config(folder) if config.is_file() else {}
        ours = not code and _ours(folder, held, code_named(held))
        with closed() as transformers:
            try:
                made = transformers.AutoTokenizer
                trust = self.trusted or ours
                return made.from_pretrained(self.folder, local_files_only=True, trust_remote_code=trust)
            except Exception as error:
                if not code or self.trusted:
                    raise
                why = f"its tokenizer names code to run: {listed(code)}"
                remedy = "read that code, then give --trust-remote-code, or give token ids as .npz"
                raise LnrewriteError(Code.LN017, f"model {self.folder!r}", why, remedy) from error


def tokenizer_in(folder: Path, trusted: bool) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint folder, None where it has none."""
    return Tokenizer(str(folder), trusted) if any((folder / name).is_file() for name in _TOKENIZERS) else None
