"""`adalog doctor`: report what runs on this machine."""

from adalog.cli import views
from adalog.cli.console import check_outputs, emit_json, say
from adalog.cli.options import JsonOption
from adalog.study.doctor import examine


def command(json_out: JsonOption = None) -> None:
    """Report the installed versions, the executors and kernels that run on this machine, and why others do not."""
    check_outputs(json_out)
    facts = examine()
    if json_out != "-":
        say(*views.health(facts))
    emit_json(facts, json_out)
