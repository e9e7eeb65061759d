"""Errors keep what they say wherever they go."""

from __future__ import annotations

import pickle

import pytest

from lnrewrite.errors import Code, LnrewriteError, Refusal, Refused, UsageError
from lnrewrite.healing.training import Stopped


@pytest.mark.parametrize(
    "error",
    [
        LnrewriteError(Code.LN403, "model.onnx", "its outputs are off", "export it in float32"),
        UsageError(Code.LN003, "lr=-1", "a rate is positive", "give one"),
        Refused([Refusal(Code.LN310, "blocks.0", "shared", "untie it"), Refusal(Code.LN312, "blocks.1", "gated", "")]),
        Stopped("global", 7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_whole_from_another_process(error: LnrewriteError) -> None:
    """A pool of processes reports what a worker raised; an error that cannot be read again breaks the pool."""
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), found.__dict__, found.exit_code) == (str(error), error.__dict__, error.exit_code)
