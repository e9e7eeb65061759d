"""Every error and refusal says in one line what, where, why and what to do, with a code."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NoReturn, Self


class Code(StrEnum):
    """Name what happened; `lnrewrite explain` has a page for each. A code is never given to another cause.

    A member is the string that users see: `error.code == "LN101"` holds, and JSON shows it as such.
    `lnrewrite.codes.GROUPS` says what the first digit stands for. LN206, LN302 and LN401 are retired.
    """

    LN001 = "LN001"
    LN002 = "LN002"
    LN003 = "LN003"
    LN004 = "LN004"
    LN005 = "LN005"
    LN006 = "LN006"
    LN010 = "LN010"
    LN011 = "LN011"
    LN012 = "LN012"
    LN013 = "LN013"
    LN014 = "LN014"
    LN015 = "LN015"
    LN016 = "LN016"
    LN017 = "LN017"
    LN018 = "LN018"
    LN019 = "LN019"
    LN020 = "LN020"
    LN021 = "LN021"
    LN022 = "LN022"
    LN023 = "LN023"
    LN024 = "LN024"
    LN025 = "LN025"
    LN026 = "LN026"
    LN027 = "LN027"
    LN028 = "LN028"
    LN029 = "LN029"
    LN030 = "LN030"
    LN031 = "LN031"
    LN032 = "LN032"
    LN033 = "LN033"
    LN034 = "LN034"
    LN039 = "LN039"
    LN040 = "LN040"
    LN101 = "LN101"
    LN102 = "LN102"
    LN103 = "LN103"
    LN104 = "LN104"
    LN105 = "LN105"
    LN110 = "LN110"
    LN111 = "LN111"
    LN112 = "LN112"
    LN113 = "LN113"
    LN114 = "LN114"
    LN120 = "LN120"
    LN121 = "LN121"
    LN122 = "LN122"
    LN123 = "LN123"
    LN124 = "LN124"
    LN125 = "LN125"
    LN126 = "LN126"
    LN127 = "LN127"
    LN128 = "LN128"
    LN129 = "LN129"
    LN130 = "LN130"
    LN131 = "LN131"
    LN201 = "LN201"
    LN202 = "LN202"
    LN203 = "LN203"
    LN204 = "LN204"
    LN205 = "LN205"
    LN207 = "LN207"
    LN208 = "LN208"
    LN301 = "LN301"
    LN310 = "LN310"
    LN312 = "LN312"
    LN313 = "LN313"
    LN314 = "LN314"
    LN315 = "LN315"
    LN316 = "LN316"
    LN402 = "LN402"
    LN403 = "LN403"
    LN404 = "LN404"
    LN405 = "LN405"
    LN501 = "LN501"
    LN502 = "LN502"
    LN503 = "LN503"
    LN504 = "LN504"
    LN520 = "LN520"
    LN530 = "LN530"
    LN531 = "LN531"
    LN601 = "LN601"
    LN602 = "LN602"
    LN604 = "LN604"
    LN605 = "LN605"
    INTERRUPTED = "interrupted"


class Exit(IntEnum):
    """Name the exit codes of the command line."""

    DONE = 0
    FAILED = 1  # a model, file or data problem, or a refusal: nothing is written
    USAGE = 2  # the command line itself: an unknown command, option, pass or placement
    PARTIAL = 3  # done with refusals, which --partial allows
    DIFFERENT = 4  # verification failed
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Describe what happened: a code, where (a site of a model, a file, an option), why, and what to do.

    Errors carry one and refusals are one. `remedy` is empty where nothing can be done.
    """

    code: Code
    site: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.site}: {self.why}" + (f"; {self.remedy}" if self.remedy else "")

    def at(self, site: str) -> Self:
        """Return the same of another site."""
        return replace(self, site=site)

    def to_dict(self) -> dict[str, str]:
        """Return the row as JSON reports show it."""
        return {"code": str(self.code), "site": self.site, "why": self.why, "remedy": self.remedy}


class Refusal(Diagnostic):
    """Record that a pass addresses a site, and what blocks it."""

    __slots__ = ()


class LnrewriteError(Exception):
    """Report a foreseeable failure in one line: its diagnostic, whose site is what was asked for.

    `exit_code` is what the command line returns.
    """

    exit_code = Exit.FAILED

    def __init__(self, code: Code, what: str, why: str, remedy: str) -> None:
        self.diagnostic = Diagnostic(code, one_line(what), one_line(why), one_line(remedy))
        super().__init__(str(self.diagnostic))

    @staticmethod
    def of(found: Diagnostic) -> LnrewriteError:
        """Return the error that reports a diagnostic, such as a refusal which stops the whole command."""
        return LnrewriteError(found.code, found.site, found.why, found.remedy)

    @property
    def code(self) -> Code:
        """Return the code, a page of `lnrewrite explain`."""
        return self.diagnostic.code

    @property
    def what(self) -> str:
        """Return what was asked for, or where it fails."""
        return self.diagnostic.site

    @property
    def why(self) -> str:
        """Return the cause."""
        return self.diagnostic.why

    @property
    def remedy(self) -> str:
        """Return what to do; empty where nothing can be done."""
        return self.diagnostic.remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Come back whole from a worker process, whatever the class is made of."""
        return Exception.__new__, (type(self), *self.args), self.__dict__

    def to_dict(self) -> dict[str, object]:
        """Return the `error` object of `--json`."""
        row = self.diagnostic.to_dict()
        return {"code": row["code"], "what": row["site"], "why": row["why"], "remedy": row["remedy"]}


class UsageError(LnrewriteError):
    """Report a wrong pass, option, placement or selection."""

    exit_code = Exit.USAGE


class Different(LnrewriteError):
    """Report that what was made computes other numbers than what it was made of: nothing is written."""

    exit_code = Exit.DIFFERENT


class Untrusted(LnrewriteError):
    """Report that loading a file would run code; `runs` names all of it, what is not torch's own first."""

    def __init__(self, what: str, runs: Iterable[str]) -> None:
        self.runs = sorted(map(printable, runs), key=lambda name: (_familiarity(name), name))
        foreign = [name for name in self.runs if not _familiarity(name)]
        first = (foreign or self.runs)[:4]
        more = f" and {len(self.runs) - len(first)} more (-v lists them)" if len(first) < len(self.runs) else ""
        remedy = "save only the weights and give --factory, or trust the file with --trust-pickle"
        super().__init__(Code.LN012, what, f"loading it would run {', '.join(n[:60] for n in first)}{more}", remedy)

    def to_dict(self) -> dict[str, object]:
        """Return the `error` object of `--json`, with `runs`."""
        return {**super().to_dict(), "runs": self.runs}


def _familiarity(name: str) -> int:
    """Return 0 for what is neither torch's nor Python's plain containers, which come last."""
    return 1 if re.match(r"collections\.|torch\.(?!nn\.)", name) else 2 if name.startswith("torch.nn.") else 0


def printable(text: str) -> str:
    """Write what a file says so that a terminal only shows it: without control characters, 200 letters at most."""
    return visible(text[:200])


def visible(text: str) -> str:
    """Write characters that a terminal would act on as Python escapes them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Refused(LnrewriteError):
    """Report that a pipeline would leave sites undone; nothing was changed. `refusals` holds a row for each."""

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        first, *more = refusals
        self.refusals = [row.to_dict() for row in (first, *more)]
        why = first.why + (f" (and {len(more)} more)" if more else "")
        remedies = filter(None, (first.remedy, "allow partial results (partial=True, --partial)"))
        super().__init__(first.code, first.site, why, ", or ".join(remedies))

    def to_dict(self) -> dict[str, object]:
        """Return the `error` object of `--json`, with `refusals`."""
        return {**super().to_dict(), "refusals": self.refusals}


def one_line(text: str) -> str:
    """Fold a message, which may come from another library or a file, into one printable line of 300 characters."""
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= 300 else flat[:297] + "..."


def told(error: BaseException) -> str:
    """Return what code of others raised: its type, and its words where it has any."""
    name, text = type(error).__name__, words(error)
    return f"{name}: {text}" if text else name


def words(error: BaseException) -> str:
    """Return `str(error)`; empty where the error's own code fails at that."""
    try:
        return str(error)
    except Exception:
        return ""


@contextlib.contextmanager
def code_of_others(made: Callable[[str], LnrewriteError]) -> Iterator[None]:
    """Raise what `made` makes of the words where code of others raises anything; a Ctrl-C stays one.

    SystemExit would leave with its own code and without a word, and what is no Exception with a traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise made(told(error)) from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean X?`, or the list of what is known."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"


def unknown(code: Code, noun: str, word: str, known: Iterable[str]) -> NoReturn:
    """Raise UsageError for a word that names nothing, with the nearest that does."""
    raise UsageError(code, f"{noun} {word!r}", f"unknown {noun}", did_you_mean(word, known))
