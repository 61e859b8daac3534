"""adalog: post-training quantization of vision transformers to 2 to 8 bits with adaptive logarithm quantizers."""

__version__ = "0.1.0"

from adalog.artifact import load
from adalog.config import METHODS, Config, Search
from adalog.errors import AdalogError, ArtifactError, CalibrationError, CaptureError, DataError, ProgramError
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing
from adalog.model import QuantizedModel
from adalog.quantize import Calibration, quantize

__all__ = [
    "METHODS",
    "AdalogError",
    "ArtifactError",
    "Calibration",
    "CalibrationError",
    "CaptureError",
    "Config",
    "DataError",
    "Preprocessing",
    "ProgramError",
    "QuantizedModel",
    "Search",
    "demo",
    "load",
    "quantize",
]
