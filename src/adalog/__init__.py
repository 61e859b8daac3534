"""Post-training quantization of vision transformers to 2 to 8 bits with adaptive logarithm quantizers.

The package imports each exported name when it is first used, so `import adalog.run` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adalog.version import __version__ as __version__

if TYPE_CHECKING:
    from adalog._quantize import quantize
    from adalog.baselines import BlockRefinement, Evolution, RangeSearch, ReleasedSearch, ScaleSearch
    from adalog.calibration.calibration import Calibration
    from adalog.calibration.schedule import Resources
    from adalog.choices import Correction, Reconstruction
    from adalog.config import Config
    from adalog.errors import AdalogError, ArtifactError, CalibrationError, CaptureError, DataError, ProgramError
    from adalog.inputs import demo
    from adalog.inputs.images import Preprocessing
    from adalog.methods import METHODS
    from adalog.model import QuantizedModel, load
    from adalog.search.bounds import Search

# The exported names of each module.
_NAMES = {
    "_quantize": "quantize",
    "baselines": "BlockRefinement Evolution RangeSearch ReleasedSearch ScaleSearch",
    "calibration.calibration": "Calibration",
    "calibration.schedule": "Resources",
    "choices": "Correction Reconstruction",
    "config": "Config",
    "errors": "AdalogError ArtifactError CalibrationError CaptureError DataError ProgramError",
    "inputs": "demo",
    "inputs.images": "Preprocessing",
    "methods": "METHODS",
    "model": "QuantizedModel load",
    "search.bounds": "Search",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "METHODS",
    "AdalogError",
    "ArtifactError",
    "BlockRefinement",
    "Calibration",
    "CalibrationError",
    "CaptureError",
    "Config",
    "Correction",
    "DataError",
    "Evolution",
    "Preprocessing",
    "ProgramError",
    "QuantizedModel",
    "RangeSearch",
    "Reconstruction",
    "ReleasedSearch",
    "Resources",
    "ScaleSearch",
    "Search",
    "demo",
    "load",
    "quantize",
]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'adalog' has no attribute {name!r}")
    module = import_module(f"adalog.{_MODULE_OF[name]}")
    value = getattr(module, name) if hasattr(module, name) else import_module(f"{module.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the exported names too, even if they are not imported yet."""
    return sorted({*globals(), *__all__})
