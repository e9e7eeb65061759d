"""Run the command line: `python -m lnrewrite.cli`."""

from . import main

main()
