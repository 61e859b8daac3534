"""Run the command `adalog` by `python -m adalog`."""

from adalog.cli import main

main()
