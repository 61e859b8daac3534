"""`python -m adalog` is the command `adalog`."""

from adalog.cli import main

main()
