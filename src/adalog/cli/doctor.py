"""`adalog doctor`: report what runs on this machine."""

from adalog.cli import views
from adalog.cli.console import check_outputs, show
from adalog.cli.options import JsonOption
from adalog.study.doctor import examine


def command(json_out: JsonOption = None) -> None:
    """Report the installed versions, the executors and kernels that run on this machine, and why others do not."""
    check_outputs(json_out)
    facts = examine()
    show(facts, json_out, *views.health(facts))
