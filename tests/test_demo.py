"""What the demo compares; `test_cli.py` runs it."""

import subprocess
import sys

from adalog.cli import demo
from adalog.study.levels import LEVEL_METHODS


def test_it_compares_what_is_worth_it_at_each_width():
    """By default; with methods that are named, all of them at every width."""
    plans = demo._plan("w6a6,w4a4,w3a3", None)
    assert [(config.bits, name) for name, config in plans[-2:]] == [("w3a3", "adalog"), ("w3a3", "adalog+")]
    assert {name for name, config in plans if config.bits == "w4a4"} == set(LEVEL_METHODS)
    assert {name for name, config in plans if config.bits == "w6a6"} == set(demo.METHODS)
    compared = demo._configs_of_figure(plans)
    assert list(compared) == list(LEVEL_METHODS)
    assert {config.bits for config in compared.values()} == {"w4a4"}


def test_what_is_made_by_a_correction_has_a_file_of_its_own():
    chosen = demo._plan("w4a4,w2a2", "adalog+")
    assert [demo._file_name(*plan) for plan in chosen] == ["demo-w4a4+.safetensors", "demo-w2a2+.safetensors"]
    assert list(demo._configs_of_figure(chosen)) == ["adalog+"]


def test_the_bundled_model_is_an_attribute_of_the_package():
    """In a process where nothing has imported it before."""
    subprocess.run([sys.executable, "-c", "import adalog; adalog.demo.load_model"], check=True)
