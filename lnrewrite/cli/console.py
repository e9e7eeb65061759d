"""Talk to the terminal: one result on stdout, one line for a failure, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import (
    Code,
    Exit,
    LnrewriteError,
    Refused,
    Untrusted,
    UsageError,
    did_you_mean,
    one_line,
    told,
    unknown,
    visible,
)
from ..quiet import LOGGER
from .processes import number

if TYPE_CHECKING:
    from rich.status import Status


EVERY = 30.0
"""Seconds between two lines of progress where stderr is no terminal, and before the first."""


class Interrupted(LnrewriteError):
    """Report a Ctrl-C."""

    exit_code = Exit.INTERRUPTED

    def __init__(self) -> None:
        super().__init__(Code.INTERRUPTED, "Ctrl-C", "the command was stopped, nothing was written", "start it again")


class Group(click.Group):
    """Run a command; turn every failure into one line on stderr, or with --json into one object on stdout."""

    running = False

    def main(self, args: Any = None, prog_name: str | None = None, *rest: Any, **extra: Any) -> Any:
        """Parse, run and exit with the code of the contract."""
        words = list(sys.argv[1:] if args is None else args)
        asked = words[: words.index("--")] if "--" in words else words  # what follows are names
        if self.running:
            why = "code of the model, the data or a plugin calls the command line of lnrewrite"
            raise LnrewriteError(Code.LN019, "the command", why, "remove that call from the code")
        self.running = True
        try:
            code = self._run(words, asked, prog_name, extra)
        finally:
            self.running = False
        sys.exit(code)

    def _run(self, words: list[str], asked: list[str], prog_name: str | None, extra: dict[str, Any]) -> int:
        """Run what `words` ask for, with the options `asked`; print a failure; return the exit code."""
        level = LOGGER.level
        LOGGER.setLevel(logging.DEBUG if _is_verbose(asked) else logging.INFO)
        LOGGER.addHandler(TERMINAL)
        try:
            code = super().main(words or ["--help"], prog_name or self.name, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            code = _fail(asked, _told(error))
        except LnrewriteError as error:
            code = _fail(asked, error)
            if isinstance(error, Untrusted) and _is_verbose(asked) and "--json" not in asked:
                click.echo("\n".join(f"  {name}" for name in error.runs), err=True)
        except BrokenPipeError:  # `lnrewrite passes | head -1`: nobody reads on
            sys.stdout = None
            code = Exit.FAILED
        except Exception as error:
            if _is_verbose(asked):
                traceback.print_exc()
            remedy = "please report this fault of lnrewrite with what -v prints"
            code = _fail(asked, LnrewriteError(Code.LN301, words[0] if words else "lnrewrite", told(error), remedy))
        finally:
            LOGGER.removeHandler(TERMINAL)
            LOGGER.setLevel(level)
        return code if isinstance(code, int) else Exit.DONE

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with the whole first line of its help: click cuts it at the edge."""
        known = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, (c.help or "").partition("\n\n")[0].replace("\n", " ")) for name, c in known.items() if c]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except Exception:
            raise
        except BaseException as error:
            raise _left(error) from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, or suggest the nearest."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            unknown(Code.LN001, "command", args[0], known)
        return super().resolve_command(ctx, args)


def _is_verbose(asked: list[str]) -> bool:
    return bool({"-v", "--verbose"} & set(asked))


def _told(error: click.ClickException) -> UsageError:
    """Give click's error the shape of ours, with the nearest option for one that does not exist."""
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "lnrewrite"
    what, remedy = error.format_message().rstrip("."), f"see {where} --help"
    if isinstance(error, click.NoSuchOption):
        known = [o for p in (error.ctx.command.params if error.ctx else []) for o in p.opts if o.startswith("--")]
        near = did_you_mean(error.option_name, known)
        remedy = near if near.startswith("did") else remedy
        what = f"unknown option {error.option_name}"
    return UsageError(Code.LN003, where, what, remedy)


def _left(error: BaseException) -> LnrewriteError:
    """Return an error for what foreign code raised that is not an Exception, SystemExit among it."""
    why = f"code of the model, the data or a plugin raised {told(error)}"
    return LnrewriteError(Code.LN019, "the command", why, "remove what raises it, or the call to exit, from that code")


def _fail(asked: list[str], error: LnrewriteError) -> int:
    """Print a failure where whoever asked looks for it; of several processes, the others say what the first may not."""
    if number():
        if not isinstance(error, UsageError | Refused):
            click.echo(f"process {number()}: error: {error}", err=True)
        return error.exit_code
    if "--json" in asked:
        try:
            click.echo(json.dumps({"error": error.to_dict()}))
            return error.exit_code
        except OSError:  # stdout is full: stderr is left
            sys.stdout = None
    click.echo(f"error: {error}", err=True)
    return error.exit_code


def show(text: str, end: str = "\n") -> None:
    """Print a result, or a piece of one; marks that stdout's encoding lacks become ASCII.

    Raises LnrewriteError LN025 where stdout takes no more.
    """
    from .tables import ASCII

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    try:
        click.echo("\n".join(map(visible, text.split("\n"))) + end, nl=False)
    except BrokenPipeError:
        raise
    except OSError as why:
        remedy = "make room, or send the output elsewhere"
        raise LnrewriteError(Code.LN025, "the output", f"it cannot be written: {told(why)}", remedy) from why


class Terminal(logging.Handler):
    """Show what is logged on stderr: warnings as lines; progress in the one line of a terminal, or now and then."""

    status: Status | None = None
    due = math.inf
    """When the next line of progress is due where there is no terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        from rich.text import Text

        text = one_line(record.getMessage())
        if record.levelno >= logging.WARNING:
            click.echo(text, err=True)
        elif record.levelno == logging.INFO and self.status:
            self.status.update(Text(text))
        elif record.levelno == logging.INFO and time.monotonic() >= self.due:
            click.echo(text, err=True)
            self.due = time.monotonic() + EVERY


TERMINAL = Terminal()


@contextlib.contextmanager
def working(quiet: bool, message: str, plain: bool = True) -> Iterator[None]:
    """Show on stderr what is going on, as it is logged: on a terminal at once, elsewhere where it is `plain`, slowly.

    What a model's own code prints goes to stderr too: stdout is for the result. Library warnings are left out.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if quiet or number() or not sys.stderr.isatty():
            TERMINAL.due = time.monotonic() + EVERY if plain and not quiet else math.inf
            stack.callback(setattr, TERMINAL, "due", math.inf)
            yield
            return
        from rich.console import Console
        from rich.text import Text

        TERMINAL.status = stack.enter_context(Console(stderr=True).status(Text(message)))
        stack.callback(setattr, TERMINAL, "status", None)
        yield
