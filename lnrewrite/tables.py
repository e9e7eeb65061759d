"""Draw what `inspect` sees as a placement map that a person reads at a glance, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

WIDTH = 100
BRANCH = {"attention": "attn", "mlp": "mlp", "moe": "moe", "ssm": "ssm", "conv": "conv", "other": "f"}


def placement_map(found: dict[str, Any], every: bool = False) -> str:
    """Return the map of an `inspect` object: a row per block, alike runs of layers folded unless `every`."""
    lines = [f"{found['format']}: {found['placement']}"]
    for stream in found["streams"]:
        lines += ["", f"stream {stream['name']}, width {stream['width']}, {len(stream['blocks'])} blocks"]
        if stream["embedding_norm"]:
            lines.append(f"      embedding norm: {_norm(stream['embedding_norm'])}")
        lines += list(_rows(stream["blocks"], every))
        if stream["final_norm"]:
            lines.append(f"      final norm: {_norm(stream['final_norm'])}")
    norms = found["norms"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in norms["kinds"].items())
    lines += ["", f"{norms['total']} norms ({kinds or 'none'}), {norms['on_stream']} of them on a stream"]
    if any(b["placement"] for s in found["streams"] for b in s["blocks"]):
        lines.append("o a norm; x the trunk; in: before the branch, out: after it, post: on the trunk after the sum")
    lines += [f"note: {note}" for note in found.get("notes", ())]
    lines += [f"{r['code']} {r['site']}: {r['why']}; {r['remedy']}" for r in found["refusals"]]
    return "\n".join(line[:WIDTH] if not line.startswith(("LN", "note")) else line for line in lines)


def _norm(norm: dict[str, Any]) -> str:
    affine = "".join(f" {word}" for word, key in (("gain", "gamma"), ("bias", "beta")) if norm[key])
    return f"{norm['kind']} eps={norm['eps']:g}{affine}"


def drawing(block: dict[str, Any]) -> str:
    """Draw one block: `x -o- attn -o- + -o-`, a circle where a norm is."""
    held = {n["where"] for n in block["norms"]}
    before, after, trunk = ("o" if where in held else "-" for where in ("in", "out", "post"))
    return f"x -{before}- {BRANCH.get(block['kind'], block['kind'])[:4]:^4} -{after}- + -{trunk}-"


def _rows(blocks: list[dict[str, Any]], every: bool) -> Iterator[str]:
    numbered = list(enumerate(blocks))
    for count, run in _folded(numbered, every):
        for index, block in run:
            edge = [n for n in block["norms"] if n["where"] != "inner"]
            kinds = " ".join(dict.fromkeys(f"{n['kind']} {n['eps']:g}" for n in edge)) or "no norm"
            notes = [f"sum {block['parallel_group']}"] if block["parallel_group"] is not None else []
            notes += [f"skip x{block['scale']:g}"] if block["scale"] != 1 else []
            notes += [f"x{count} alike"] if count > 1 and block is run[0][1] else []
            name = block["name"] if len(block["name"]) <= 38 else "..." + block["name"][-35:]
            yield f"{index:4}  {drawing(block)}  {block['placement']:<7} {name:<38} {kinds} {' '.join(notes)}".rstrip()


def _folded(numbered: list[tuple[int, Any]], every: bool) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
    """Yield (how often, blocks): runs of the same one or two block shapes are shown once."""
    keys = [
        (drawing(b), tuple((n["kind"], n["eps"]) for n in b["norms"]), b["scale"], bool(b["parallel_group"]))
        for _, b in numbered
    ]
    if every or len(numbered) <= 24:
        yield 1, numbered
        return
    pairs = [numbered[i : i + 2] for i in range(0, len(numbered), 2)]
    for _, same in groupby(pairs, key=lambda pair: tuple(keys[i] for i, _ in pair)):
        run = list(same)
        yield len(run), run[0]


def report_of_verify(found: dict[str, Any]) -> str:
    """Return the comparison of two models in words."""
    shapes = ", ".join(str(s) for s in found["shapes_tried"])
    return (
        f"{found['verdict']}: max |a - b| = {found['max_abs']:.3g}, relative {found['max_rel']:.3g}, "
        f"cosine {found['cosine']:.9g}\nin {found['dtype']}, on inputs of shape {shapes}"
    )
