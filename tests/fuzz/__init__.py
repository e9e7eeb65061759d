"""Random residual nets, each built from a seed, and what every exact pass and preset makes of them.

    python -m tests.fuzz --seed 0 --n 2000 --jsonl out.jsonl   # judge nets, those in the file are not run again
    python -m tests.fuzz --show 17                             # the choices that net 17 is made of
    python -m tests.fuzz --shrink 17                           # the fewest choices that still give what 17 gives
    python -m tests.fuzz --compare old.jsonl new.jsonl         # edits of two versions on the same nets

A net is no case of a list: it is composed of choices (`choices.py`), each drawn by itself from the seed and its name,
so that one may be changed and the others stay. `norms.py`, `linears.py`, `branches.py`, `sums.py` hold what there is to
choose from, `nets.py` puts it together, `judging.py` says what became of it. To judge another version of lnrewrite, run
`python -m fuzz` in this folder's parent with that version on PYTHONPATH.
"""
