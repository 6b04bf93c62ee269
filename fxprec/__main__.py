"""``python -m fxprec``: the command line."""

from fxprec.cli import main

main()
