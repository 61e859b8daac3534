"""The command line interface: one module per command, each with a function `command`."""

import sys

import typer

from adalog.cli import (
    bench,
    certify,
    cost,
    demo,
    detect,
    doctor,
    evaluate,
    export,
    inspect,
    methods,
    pack,
    pareto,
    quantize,
    report,
    sensitivity,
    vectors,
)
from adalog.cli.console import Commands, run
from adalog.cli.options import DebugOption

# In the order in which `adalog --help` lists them.
_COMMANDS = (
    *(demo, quantize, sensitivity, pareto, evaluate, detect, export, certify),
    *(inspect, report, methods, doctor, bench, pack, vectors, cost),
)

# Commands that torchrun may run as several processes.
SHARED = ("quantize", "evaluate", "sensitivity", "pareto")

app = typer.Typer(
    cls=Commands,
    help="Quantize vision transformers to 2 to 8 bits with adaptive logarithm quantizers.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _module in _COMMANDS:
    app.command(name=_module.__name__.rpartition(".")[2])(_module.command)


@app.callback()
def _before_the_command(debug: DebugOption = False) -> None:
    """Accept the options that precede the name of a command."""


def main() -> None:
    """Run the `adalog` command. The exit code is 0 for success, 1 for failure and 2 for bad input."""
    run(app, next((word for word in sys.argv[1:] if not word.startswith("-")), ""), SHARED)
