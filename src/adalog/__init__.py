"""adalog: post-training quantization of vision transformers to 2 to 8 bits with adaptive logarithm quantizers."""

from adalog.calibration.calibration import Calibration
from adalog.choices import (
    BlockRefinement,
    Correction,
    Evolution,
    RangeSearch,
    Reconstruction,
    ReleasedSearch,
    ScaleSearch,
    Search,
)
from adalog.config import Config
from adalog.errors import AdalogError, ArtifactError, CalibrationError, CaptureError, DataError, ProgramError
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing
from adalog.methods import METHODS
from adalog.model import QuantizedModel, load
from adalog.quantize import quantize
from adalog.version import __version__ as __version__

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
    "ScaleSearch",
    "Search",
    "demo",
    "load",
    "quantize",
]
