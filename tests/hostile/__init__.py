"""A hostile set: files, folders and options made to run code, to read or write elsewhere, to hang or to fill memory.

`python -m tests.hostile` runs each case through the real command line in a process that is watched by an audit hook,
and prints what was not clean. `--mutants N --seed S` runs N files that were changed at random instead.
"""
