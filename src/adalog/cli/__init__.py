"""The command line interface: one module per command, each with a function `command`."""

import sys
from collections.abc import Callable

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

# `adalog --help` lists the commands in this order.
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.command,
    "quantize": quantize.command,
    "sensitivity": sensitivity.command,
    "pareto": pareto.command,
    "evaluate": evaluate.command,
    "detect": detect.command,
    "export": export.command,
    "certify": certify.command,
    "inspect": inspect.command,
    "report": report.command,
    "methods": methods.command,
    "doctor": doctor.command,
    "bench": bench.command,
    "pack": pack.command,
    "vectors": vectors.command,
    "cost": cost.command,
}

# Commands that torchrun may run as several processes.
SHARED = ("quantize", "evaluate", "sensitivity", "pareto")

app = typer.Typer(
    cls=Commands,
    help="Quantize vision transformers to 2 to 8 bits with adaptive logarithm quantizers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _name, _command in COMMANDS.items():
    app.command(name=_name)(_command)


@app.callback()
def _before_the_command(debug: DebugOption = False) -> None:
    """Accept the options that precede the name of a command."""


def main() -> None:
    """Run the `adalog` command. The exit code is 0 for success, 1 for failure and 2 for bad input."""
    run(app, next((word for word in sys.argv[1:] if not word.startswith("-")), ""), SHARED)
