"""The way to a stock architecture: a checkpoint folder in, converted or as it is, and a folder of a host out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .api import capture_opened
from .data.calibration import reader_of
from .errors import Code, LnrewriteError, UsageError
from .files.output import check_folder
from .hosts.known import HOSTS, hosts_named
from .hosts.writing import Blanks, Fit, Rehosted, fitting, write
from .loading.identify import identify
from .loading.open import open_module
from .loading.source import Format, OpenOptions, Source
from .models.program import Program
from .pipeline.driver import Pipeline
from .pipeline.job import Job
from .pipeline.protocols import Batch
from .pipeline.report import Report
from .pipeline.spec import placing
from .quiet import LOGGER


def rehost(
    folder: str | os.PathLike[str],
    host: str,
    output: str | os.PathLike[str],
    *,
    to: str | None = None,
    calibrate: str | Iterable[Batch] | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    seed: int = 0,
) -> Rehosted:
    """Write a transformers folder as a stock architecture that computes the same, and prove it by loading it.

    host: a model type of `lnrewrite.hosts.known`, or `auto` for the first that fits. to: convert to this placement
    before (on `calibrate`, DATA or batches). The result needs neither lnrewrite nor remote code: its outputs are within
    1e-6 (relative, in float64) of the network's, or nothing is written. Raises UsageError LN003 for a host that is
    none, LnrewriteError LN315 with the one thing that keeps the network out, LN316, and as `load` does.
    """
    source = identify(folder, OpenOptions(None, False, trust_remote_code, None, "cpu", seed))
    job = None if to is None else Job(Pipeline.parse(placing(to, plain_skips=to == "pre")), seed=seed)
    return rehost_source(source, job, host, output, calibrate=calibrate, force=force)[0]


def rehost_source(
    source: Source,
    job: Job | None,
    host: str,
    output: str | os.PathLike[str],
    *,
    calibrate: str | Iterable[Batch] | None,
    force: bool,
) -> tuple[Rehosted, Report | None]:
    """Do a job, if any, on what `identify` found, and write the result as a host; see `rehost`."""
    hosts = hosts_named(host)
    check_folder(output, source.file if source.path else Path(os.devnull), force)
    program, config = _with_config(source)
    report = None
    if job is not None:
        read, data = reader_of(calibrate, job.seed)
        job = replace(job, read=read, data=data)
        result = job.run(program, job.batches(program))
        job.check(source.name, result.report)
        program, report = result.program, replace(result.report, output=os.fspath(output))
    return write(program, config, source.file, hosts, output, force=force), report


def _with_config(source: Source) -> tuple[Program, object]:
    """Capture a transformers folder's network; return its config too. Raises UsageError LN003 for another MODEL."""
    if source.format is not Format.TRANSFORMERS:
        why = f"{source.name} is not a transformers folder"
        raise UsageError(Code.LN003, "hosts", why, "give a folder with a config.json and weights")
    opened = open_module(source)
    return _plain(capture_opened(source, opened)), getattr(opened.module, "config", None)


def _plain(program: Program) -> Program:
    """Return a network whose factors beside the stream are in its weights, as far as that is exact; most have none."""
    if not any(b.scale != 1 or b.scales for s in program.network.streams for b in s.blocks):
        return program
    return Pipeline.parse("absorb-scales").run(program, None, partial=True).program


def hosts_of(source: Source) -> tuple[Program, list[str]]:
    """Return a folder's network and the hosts that could hold it as it stands. Raises as `fits_of`."""
    program, config = _with_config(source)
    rows = fitting(program, config, program.network.placement, HOSTS.values(), Blanks())
    return program, [row.host for row in rows if row.fits]


def fits_of(source: Source) -> tuple[Program, list[Fit]]:
    """Return a folder's network and, for it and for each placement that it can be converted to, which hosts fit.

    Conversions are made here with constants, on inputs that are made up: they have the structure of the fitted ones.
    Raises as `load`, UsageError LN003 for what is not a transformers folder.
    """
    program, config = _with_config(source)
    blanks, rows = Blanks(), list[Fit]()
    for to in dict.fromkeys((program.network.placement, "pre", "post", "peri", "output", "none")):
        held = program
        if to != program.network.placement:
            LOGGER.info(f"converting to {to}")
            try:
                text = placing(to, fit="constants", plain_skips=to == "pre")
                held = Pipeline.parse(text).run(program, None).program
            except LnrewriteError as error:
                rows += [Fit(name, to, False, error.why) for name in HOSTS]
                continue
        rows += fitting(held, config, to, HOSTS.values(), blanks)
    return program, rows
