"""Make `from benchmarks...` work in a script that is run by its path, as in `python benchmarks/search.py`.

Python puts the folder of such a script first on the import path. `import benchmarks` then finds this module, not the
package. This module replaces that entry of the path with the folder above it, and loads the package under its own name.
Otherwise `search`, `demo` or `tables` would be top-level modules too, and could hide other packages. `python -m
benchmarks.search` and the tests find the package directly and never load this module.
"""

import importlib
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(_FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER)]
del sys.modules[__name__]
importlib.import_module(__name__)
