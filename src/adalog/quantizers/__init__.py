"""Quantizers, which map real values to codes and back; search, inference and export use the same formulas."""

from adalog.quantizers.assignment import Assignment, Fold, QuantizedTensor, decibels
from adalog.quantizers.formats import Errors, Format, LargestLevelFormat
from adalog.quantizers.log_format import LogFormat
from adalog.quantizers.logarithmic import (
    Beyond,
    Bins,
    LogQuantizer,
    Rounding,
    integer_levels,
    log_dequantize,
    log_levels,
    log_quantize,
    log_tables,
    log_thresholds,
    most_headroom,
    table_step,
)
from adalog.quantizers.quantizer import FLOAT_BITS, MAX_BITS, MIN_BITS, Quantizer, at_least_float32, round_ste
from adalog.quantizers.uniform import (
    UniformFormat,
    UniformQuantizer,
    bounds_to_uniform,
    symmetric_scale,
    symmetric_zero_point,
    uniform_dequantize,
    uniform_fake_quantize,
    uniform_quantize,
)

__all__ = [
    "FLOAT_BITS",
    "MAX_BITS",
    "MIN_BITS",
    "Assignment",
    "Beyond",
    "Bins",
    "Errors",
    "Fold",
    "Format",
    "LargestLevelFormat",
    "LogFormat",
    "LogQuantizer",
    "QuantizedTensor",
    "Quantizer",
    "Rounding",
    "UniformFormat",
    "UniformQuantizer",
    "at_least_float32",
    "bounds_to_uniform",
    "decibels",
    "integer_levels",
    "log_dequantize",
    "log_levels",
    "log_quantize",
    "log_tables",
    "log_thresholds",
    "most_headroom",
    "round_ste",
    "symmetric_scale",
    "symmetric_zero_point",
    "table_step",
    "uniform_dequantize",
    "uniform_fake_quantize",
    "uniform_quantize",
]
