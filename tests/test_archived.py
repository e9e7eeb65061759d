"""What a .pt2 can hold is asked before any work is done, and what is written is read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.torch import archived
from lnrewrite.compat.torch import pytree

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    """Two tensors by name."""

    logits: Tensor
    state: Tensor


GIVEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a named tuple": Pair,
    "named tuples in a list in a dict": lambda a, b: {"all": [Pair(a, b), Pair(b, a)]},
    "what torch returns for a maximum": lambda a, b: (a.max(-1), b),
    "an ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "numbers and nothing": lambda a, b: {"a": a, "two": 2, "half": 0.5, "yes": True, "none": None},
}
REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a string in a dict": lambda a, b: {"a": a, "said": "x"},
    "a string in a named tuple": lambda a, b: (Pair(a, b), "x"),
}


class Giving(nn.Module):
    """A residual block that returns its results in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm, self.up, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        x = x + self.up(self.norm(x))
        return (GIVEN | REFUSED)[self.form](self.last(x), x)


def captured(form: str) -> lnr.Program:
    return lnr.capture(Giving(form).eval(), args=(X,))


@pytest.mark.parametrize("form", GIVEN)
def test_what_is_written_is_read_again(form: str, tmp_path: Path) -> None:
    """Named tuples failed after all the work was done."""
    program = captured(form)
    program.save(tmp_path / "a.pt2")
    want = program.module()(X)
    assert type(want) is type(Giving(form)(X))
    found = torch.export.load(tmp_path / "a.pt2").module()(X)
    assert len(found) == len(want)
    for one, two in zip(pytree.tree_leaves(found), pytree.tree_leaves(want), strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two
    assert lnr.load(str(tmp_path / "a.pt2")).network.streams


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_read_is_refused_before_the_work(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written, and nobody could load it."""
    monkeypatch.setattr("lnrewrite.api.Job.run", lambda *_, **__: pytest.fail("it began"))
    monkeypatch.setattr("lnrewrite.api.load_source", lambda _: captured(form))
    torch.save(torch.ones(2), tmp_path / "a.pt")
    with pytest.raises(lnr.LnrewriteError, match="'x'.*cannot read again") as caught:
        lnr.rewrite_file(tmp_path / "a.pt", "fold-affine", tmp_path / "a.pt2", trust_pickle=True)
    assert caught.value.code == "LN025" and not (tmp_path / "a.pt2").exists()
    with pytest.raises(lnr.LnrewriteError, match="LN025"):
        captured(form).save(tmp_path / "a.pt2")


def test_a_file_that_cannot_be_read_never_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cause: here the check before is left out."""
    monkeypatch.setattr("lnrewrite.models.program.check_archivable", lambda *_: None)
    (tmp_path / "a.pt2").write_bytes(b"old")
    with pytest.raises(lnr.LnrewriteError, match="cannot read what it wrote") as caught:
        captured("a string in a dict").save(tmp_path / "a.pt2")
    assert caught.value.code == "LN025" and (tmp_path / "a.pt2").read_bytes() == b"old"
    monkeypatch.setattr(archived, "LARGEST", 0)
    captured("a string in a dict").save(tmp_path / "a.pt2")  # what is large is not read


def test_inputs_of_a_class_that_torch_cannot_write_are_refused(tmp_path: Path) -> None:
    class Taking(Giving):
        def forward(self, pair: Pair) -> Any:
            return super().forward(pair.logits + pair.state)

    program = lnr.capture(Taking("an ordered dict").eval(), args=(Pair(X, X),))
    with pytest.raises(lnr.LnrewriteError, match="its inputs are of a class") as caught:
        program.save(tmp_path / "a.pt2")
    assert caught.value.code == "LN025"
