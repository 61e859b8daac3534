"""`adalog methods`: list the quantization methods."""

from adalog import METHODS, Config
from adalog.cli import views
from adalog.cli.console import check_outputs, show
from adalog.cli.options import JsonOption
from adalog.methods import label


def command(json_out: JsonOption = None) -> None:
    """List the quantization methods with their sources, and the choices of each that differ from the defaults."""
    check_outputs(json_out)
    defaults = Config.defaults()
    rows = [
        {"name": name, "label": method.label, "source": method.source, "choices": method.to_json(defaults)}
        for name, method in METHODS.items()
    ]
    show(rows, json_out, views.methods_table([{**row, "name": label(str(row["name"]))} for row in rows]))
