"""Run the executor `torch`: it computes the integers of `reference`, bit for bit, faster and on any device.

Linears and ungrouped convolutions multiply signed bytes with `torch._int_mm`. An integer that does not fit in a byte is
split into digits of base 256. A constant per output channel corrects for the number that is subtracted to make the
digits signed. Products of many small matrices (attention, grouped convolutions) multiply whole numbers in float32 if no
sum reaches 2**24, and otherwise in float64.
"""

from adalog.runtime.integer.encode import DigitEncoder
from adalog.runtime.integer.fused import fuse
from adalog.runtime.integer.products import product

__all__ = ["DigitEncoder", "fuse", "product"]
