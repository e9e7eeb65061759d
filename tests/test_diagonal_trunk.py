"""Factors per channel on the trunk, and stored norms behind sums: the trunk is carried in another basis."""

from __future__ import annotations

import pytest

from lnrewrite.ir import DropScale, Kind, Number, ScaleWriter
from lnrewrite.ir.text import parse
from lnrewrite.pipeline import registry
from lnrewrite.testing.reference import apply, invent
from test_exact_passes import each
from zoo.streams import assert_same, context

STORED = """
stream toy width=6
  source @wte.weight:1(table)
  block a mlp post
    post   batch(eps=0.1 gamma=@g beta=@b mean=@m variance=@v)
    scale  skip *@s vector
    reads  @u.weight:1
    writes @d.weight:0
  block b mlp post
    post   {last}
    scale  skip *@t vector
    reads  @w.weight:1
    writes @e.weight:0+@e.bias
  final  rms(eps=0.1 gamma=@f) -> @head.weight:1
"""
LAST = {"norm": "layer(eps=0.1 gamma=@h beta=@k)", "stored": "batch(eps=0.1 gamma=@h mean=@n variance=@o)"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("last", LAST)
def test_the_trunk_has_no_factor_and_no_stored_norm_left(last: str, seed: int) -> None:
    machine = invent(parse(STORED.format(last=LAST[last])).streams[0], seed)
    proposal = registry.find("absorb-scales")().propose(machine.stream, context(machine))
    after = apply(machine, proposal)
    assert_same(machine, after)
    assert not [s for _, s in after.stream.sites() if s.norm.kind is Kind.BATCH]
    assert not [s for b in after.stream.blocks for s in b.scales]
    wrong = each(lambda o: None if isinstance(o, ScaleWriter) and o.scale != Number(1.0) else o)(proposal)
    with pytest.raises(AssertionError):
        assert_same(machine, apply(machine, wrong))
    assert any(isinstance(o, DropScale) for e in proposal.edits for o in e.operations)
