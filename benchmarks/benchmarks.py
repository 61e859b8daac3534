"""Stands in for the package `benchmarks` while a script is run by its path, as in `python benchmarks/search.py`.

Python then puts this folder, not the one above it, first on the import path, so `from benchmarks...`, with which every
script begins, finds this module. It puts the folder above in that place, where `search`, `demo` or `tables` are not
top-level names that could hide other packages, and loads the real package under its own name. `python -m
benchmarks.search` and the tests find the package at once and never come here.
"""

import importlib
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(_FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER)]
del sys.modules[__name__]
importlib.import_module(__name__)
