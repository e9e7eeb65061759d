"""Measure what converting demo:tinygpt costs, fitted against naive, in nats per byte of held-out text.

    python examples/tinygpt_drift.py                      # all of the held-out text: some four minutes
    python examples/tinygpt_drift.py --limit 16000 --blocks 0-1

Fitted: `place{to=...}` with the branches' weights fitted on the shipped training text; constants: with
`fit=constants`. Naive: the same norms inserted and removed with unit gains, no bias and nothing that compensates. All
are compared with the model as trained.
"""

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite import demo
from lnrewrite.ir.select import select

PLACEMENTS = ("post", "peri", "output", "none")


class Naive(nn.Module):
    """Run the demo model with the norms of selected sublayers moved by hand: two sublayers in each layer.

    A norm is put in as x -> (x - mean) / sqrt(var + eps); one that is taken out is dropped with its gain and bias. As
    in `place`, post gets an embedding norm, and the model's own final norm serves as the last sublayer's trunk norm.
    """

    def __init__(self, model: nn.Module, to: str, chosen: set[str]) -> None:
        super().__init__()
        self.model, self.to = model, to
        names = [f"blocks.{i}.{part}" for i in range(len(model.blocks)) for part in ("attn", "mlp")]
        self.moved = [name in chosen for name in names]

    def forward(self, input_ids: Tensor) -> Tensor:
        model, to = self.model, self.to
        x = model.tok(input_ids) + model.pos(torch.arange(input_ids.shape[1]))
        parts = [part for b in model.blocks for part in ((b.norm1, b.attn), (b.norm2, b.mlp))]
        if to == "post" and self.moved[0]:
            x = bare(x)
        for index, ((norm, branch), moved) in enumerate(zip(parts, self.moved, strict=True)):
            added = branch(norm(x) if to == "peri" or not moved else x)
            x = x + (bare(added) if moved and to in ("peri", "output") else added)
            if moved and to == "post" and index + 1 < len(parts):
                x = bare(x)
        return model.head(model.norm(x))


def bare(x: Tensor) -> Tensor:
    """Normalise the last axis with unit gain and no bias."""
    return F.layer_norm(x, x.shape[-1:])


@click.command(context_settings={"show_default": True})
@click.option("--limit", type=int, help="Bytes of held-out text to measure on.  [default: all of it]")
@click.option("--blocks", help="Which blocks to convert: 0-5, last:2, attention, mlp.  [default: all]")
@click.option("--batches", default=8, help="Calibration batches of 8 windows of 128 bytes; an eighth is held out.")
@click.option("--seed", default=0, help="Seed that draws the calibration windows.")
@click.option("--threads", default=1, help="CPU threads.")
def main(limit: int | None, blocks: str | None, batches: int, seed: int, threads: int) -> None:
    """Print the loss of demo:tinygpt and its change per placement."""
    torch.set_num_threads(threads)
    model, text = demo.load("tinygpt"), demo.heldout_text()
    data = demo.calibration(batches=batches, seed=seed)
    program = lnr.capture(model, kwargs=data[0])
    chosen = set(select(program.network, blocks))
    before = demo.loss(model, text, limit=limit)
    click.echo(
        f"as trained: {before:.4f} nats per byte; {len(chosen)} of {len(program.network.blocks)} blocks converted"
    )
    click.echo(f"{'to':<8}{'fitted':>12}{'constants':>12}{'naive':>12}")
    for to in PLACEMENTS:
        options = f"to={to}" + (f" blocks={blocks}" if blocks else "")
        pipelines = [lnr.Pipeline.parse(f"place{{{options}{fit}}}") for fit in ("", " fit=constants")]
        modules = [*(p.run(program, data).program.module() for p in pipelines), Naive(model, to, chosen)]
        changes = [demo.loss(module, text, limit=limit) - before for module in modules]
        click.echo(f"{to:<8}" + "".join(f"{change:>+12.4f}" for change in changes))


if __name__ == "__main__":
    main()
