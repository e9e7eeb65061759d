"""Read the numbers of a network off its picture and its graph; a config helps with those that no shape tells.

What a config says of heads, rotary angles and token ids is tried when cores are compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..ir import Linear, Placement, Side, Stream, Where
from .cores import feed
from .host import Misfit, Numbers
from .tables import Tables
from .views import View

IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def check_whole(view: View) -> None:
    """Raise Misfit where the picture does not hold the whole network."""
    stream, network = view.stream, view.program.network
    if network.refusals:
        raise Misfit(network.refusals[0].why)
    if network.elsewhere:
        raise Misfit("it has norms that are on no stream")
    if stream.taps:
        raise Misfit(f"its stream is also read by {stream.taps[0]}")
    if stream.opaque:
        raise Misfit(f"its stream begins with {stream.opaque}")
    for block in stream.blocks:
        if found := next(
            (b for b in block.barriers if b.at is not Side.READ or block.kind not in ("attention", "mlp")), None
        ):
            raise Misfit(f"{block.name} {found}")
        if block.kind not in ("attention", "mlp"):
            raise Misfit(f"{block.name} is {block.kind}, neither attention nor feed-forward")
        if block.added or block.scale != 1.0 or any(s.by != 1.0 for s in block.scales):
            raise Misfit(f"{block.name} adds its branch to a stream that is scaled or shifted on its way")
        if odd := next((s for s in block.sites if s.modulated or s.norm.over or s.norm.axis != -1), None):
            raise Misfit(f"the {odd.where} norm of {block.name} is {odd.modulated or 'no plain one'}")


def numbers_of(view: View, config: Any) -> Numbers:
    """Return the numbers of a network whose picture is whole. Raises Misfit where no host could have them."""
    stream = view.stream
    cores = [view.core(b) for b in stream.blocks]
    attention = [c for c in cores if c.block.kind == "attention"]
    forward = [c for c in cores if c.block.kind == "mlp"]
    if not attention or len(attention) != len(forward):
        raise Misfit(
            f"it has {len(attention)} attention and {len(forward)} feed-forward blocks, not one of each a layer"
        )
    tables = Tables.of(view)
    heads = int(config.num_attention_heads)
    size = attention[0].out // heads
    kv = (sum(attention[0].sizes) // size - heads) // 2
    if len({c.out for c in forward}) > 1 or any(sum(c.sizes) != (heads + 2 * kv) * size for c in attention):
        raise Misfit("its blocks are not all of one size, or of heads of one size")
    sites = [site for _, site in stream.sites()]
    eps = Counter(s.norm.eps for s in [s for s in sites if s.where is not Where.OUT] or sites).most_common(1)[0][0]
    windows = {c.windows for c in attention}
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" not in rope and (nested := [v for v in rope.values() if isinstance(v, dict)]):
        rope = nested[0]
    positions = view.program.shape(tables.positions.param)[0] - tables.first if tables.positions else 0
    placements = {b.placement for b in stream.blocks}
    vocab = view.program.shape(tables.tokens.param)[0]
    head = logits_of(view, vocab)
    return Numbers(
        width=stream.width,
        vocab=vocab,
        layers=len(attention),
        heads=heads,
        kv_heads=kv,
        head_size=size,
        inner=forward[0].out,
        positions=positions or int(config.max_position_embeddings),
        eps=eps,
        activation=feed(forward[0])[0],
        placement=placements.pop() if len(placements) == 1 else Placement.NONE,
        parallel=any(b.parallel_group is not None for b in stream.blocks),
        causal=head is not None,
        tied=head is not None and head.param == tables.tokens.param,
        qkv_bias=any(_biased(view, r) for c in attention for r in c.readers),
        out_bias=any(_biased(view, c.writer) for c in attention),
        mlp_bias=any(_biased(view, r) for c in forward for r in (*c.readers, c.writer)),
        types=view.program.shape(tables.types.param)[0] if tables.types else 0,
        window=next(iter(windows.pop()), None) if len(windows) == 1 else None,
        rope={k: v for k, v in rope.items() if v is not None},
        tokens={name: getattr(config, name, None) for name in IDS},
    )


def _biased(view: View, linear: Linear) -> bool:
    return linear.bias is not None and bool(view.tensor(linear.bias).any())


def head_of(stream: Stream) -> tuple[Linear, ...]:
    """Return the linear maps that read the last state."""
    last = stream.blocks[-1].at(Where.POST)
    site = stream.final or last
    return site.readers if site else stream.readers


def logits_of(view: View, vocab: int) -> Linear | None:
    """Return the map that gives logits of every token, None where the network ends before one."""
    out = view.program.graph[view.program.graph.outputs[0]]
    held = head_of(view.stream)
    whole = len(held) == 1 and view.program.shape(held[0].param)[1 - held[0].axis] == vocab
    return held[0] if whole and len(out.shape or ()) == 3 and (out.shape or ())[-1] == vocab else None
