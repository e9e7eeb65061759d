"""Judge what passes make of a net: in float64, at two sizes, each output within 1e-9 of its largest number."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

from torch import Tensor

import lnrewrite as lnr
from zoo import float64, floats

from .nets import Net, build, inputs

PIPELINES = {
    **{name: str(lnr.Pipeline.preset(name)) for name in ("exact", "inference", "quantize", "fp16")},
    "to RMSNorm": "layernorm-to-rmsnorm",
    "rescale": "rescale-stream{by=0.5}",
    "rotate": "fold-affine{final=true},rotate-stream",
    "compress": "fold-affine{final=true},layernorm-to-rmsnorm,crmsnorm-to-rmsnorm{back=true}",
    "compress back": "fold-affine{final=true},crmsnorm-to-rmsnorm{back=true},crmsnorm-to-rmsnorm",
    "scales": "absorb-scales",
    "batch norm": "fold-batchnorm",
    "constants": "propagate-constants",
    "embedding": "untie,fold-embedding-norm,merge-norms",
    "sizes": "place{to=pre keep-sizes}",
    "layers": "scale-norms",
}
"""Every exact pass alone, or behind what it needs, and every preset."""
RIGHT = 1e-9
SIZES = (2, 6), (3, 7), (3, 6)
"""Batch and length: the example, another, and another batch only."""
Outputs = list[list[Tensor]]


def judge(seed: int, fixed: Mapping[str, str] | None = None, only: str | None = None) -> dict[str, Any]:
    """Return the row of a net: what it is, what was wrong with its capture, and the verdict of each pipeline."""
    started = time.process_time()
    row: dict[str, Any] = {"seed": seed, "runs": {}}
    try:
        net, choices = build(seed, dict(fixed or {}))
        with float64():
            given = [inputs(net, *size) for size in SIZES]
            wanted = [floats(net(*args)) for args in given]
        assert all(t.isfinite().all() for outputs in wanted for t in outputs), "it is not finite"
        row["choices"] = choices.strange()
    except Exception as error:  # of the fuzzer
        return row | {"capture": f"invalid net: {_said(error)}"}
    try:
        with float64():
            program = lnr.capture(net, given[0])
    except lnr.LnrewriteError as error:
        return row | {"capture": error.code, "why": str(error), "seconds": time.process_time() - started}
    except Exception as error:
        return row | {"capture": f"crash: {_said(error)}", "seconds": time.process_time() - started}
    kept = _taken(program, net)
    given, wanted = ([values[i] for i in kept] for values in (given, wanted))
    row |= {"capture": _captured(program, given, wanted), "sizes": len(kept), "picture": _contradicted(program)}
    for name, text in PIPELINES.items() if row["capture"] == "right" else ():
        if only in (None, name):
            row["runs"][name] = _ran(program, text, given, wanted)
    return row | {"seconds": round(time.process_time() - started, 2)}


def _taken(program: Any, net: Net) -> list[int]:
    """Return which of the sizes a program says that it takes."""
    free = program.dynamic_axes()["main"]
    if 0 not in free:
        return [0]
    return [0, 1] if (2 if net.source == "pixels" else 1) in free else [0, 2]


def _captured(program: Any, given: Sequence[Any], wanted: Outputs) -> str:
    """Return whether a captured program computes what the net does."""
    try:
        error = _away(program, given, wanted)
    except Exception as fault:
        return f"crash: {_said(fault)}"
    return "right" if error <= RIGHT else f"wrong: {error:.1e} away"


def _contradicted(program: Any) -> list[str]:
    """Return what a program's picture says and a trial contradicts; nothing for versions that do not try."""
    try:
        refusals = getattr(program, "certified", program.network).refusals
    except Exception as fault:
        return [f"crash: {_said(fault)}"]
    return [str(r) for r in refusals if "LN208" in str(r)]


def _ran(program: Any, text: str, given: Sequence[Any], wanted: Outputs) -> dict[str, Any]:
    """Run a pipeline and return its verdict: right, wrong, crash, or the code of what was raised."""
    try:
        result = lnr.Pipeline.parse(text).run(program, partial=True)
    except lnr.LnrewriteError as error:
        if error.code in ("LN301", "LN404"):
            return {"verdict": "crash", "why": str(error)}
        return {"verdict": "refused", "edits": 0, "codes": {error.code: 1}}
    except Exception as error:
        return {"verdict": "crash", "why": _said(error)}
    report = result.report
    run: dict[str, Any] = {
        "edits": report.edits,
        "steps": {step.text: step.edits for step in report.steps if step.edits},
    }
    refusals = iter(report.refusals)
    told = [(step.text, next(refusals)) for step in report.steps for _ in range(step.refused)]
    run["codes"] = dict(Counter(r.code for _, r in told))
    run["caught"] = [f"{text} {r.site}: {r.why}" for text, r in told if r.code == "LN404"]
    try:
        error = _away(result.program, given, wanted)
    except Exception as fault:
        return run | {"verdict": "crash", "why": f"the result does not run: {_said(fault)}"}
    return run | ({"verdict": "right"} if error <= RIGHT else {"verdict": "wrong", "why": f"{error:.1e} away"})


def _away(program: Any, given: Sequence[Any], wanted: Outputs) -> float:
    """Return how far a program's outputs are from what is wanted, relative to each output's largest number."""
    worst = 0.0
    with float64(), redirect_stderr(StringIO()):  # torch prints the code of a graph that fails
        for args, outputs in zip(given, wanted, strict=True):
            found = floats(program.module()(*args))
            for a, b in zip(outputs, found, strict=True):
                assert a.shape == b.shape, f"an output is {tuple(b.shape)}, not {tuple(a.shape)}"
                error = ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() if a.numel() else 0.0
                worst = max(worst, error if error == error else float("inf"))
    return worst


def _said(error: Exception) -> str:
    """Return what an error says, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def trouble(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what is wrong with a net's row: the pipeline, wrong, crash, caught or contradicted, and why.

    Caught is an edit that the proof refuses, contradicted a claim of the picture that its certification refuses:
    both are faults, and neither gives a wrong number.
    """
    found = []
    if row["capture"].startswith(("invalid", "crash", "wrong")):
        found.append(("capture", row["capture"].partition(":")[0], row["capture"]))
    for why in row.get("picture", ()):
        found.append(("picture", "crash" if why.startswith("crash") else "contradicted", why))
    for name, run in row["runs"].items():
        if run["verdict"] in ("wrong", "crash"):
            found.append((name, run["verdict"], run["why"]))
        found += [(name, "caught", why) for why in run.get("caught", ())]
    return found
