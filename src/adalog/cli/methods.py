"""`adalog methods`: list the quantization methods."""

from adalog import METHODS, Config
from adalog.cli import views
from adalog.cli.console import check_outputs, emit_json, say
from adalog.cli.options import JsonOption
from adalog.methods import label


def command(json_out: JsonOption = None) -> None:
    """List the quantization methods with their sources, and the choices of each that differ from the defaults."""
    check_outputs(json_out)
    rows = [
        {
            "name": name,
            "label": method.label,
            "source": method.source,
            "choices": method.to_json(Config.defaults()),
        }
        for name, method in METHODS.items()
    ]
    if json_out != "-":
        say(views.methods_table([{**row, "name": label(str(row["name"]))} for row in rows]))
    emit_json(rows, json_out)
