"""The executor `torch`: the integers of `reference`, bit for bit, at speed and on any device.

Linears and ungrouped convolutions multiply signed bytes with `torch._int_mm`. An integer that does not fit in a byte is
cut into digits of base 256; what has to be subtracted to make the digits signed comes back as one constant per output
channel. Products of many small matrices (attention, grouped convolutions) multiply whole numbers in float32 where no
sum reaches 2**24, else in float64.
"""

from adalog.runtime.integer.encode import Encoder
from adalog.runtime.integer.fused import fuse
from adalog.runtime.integer.products import product

__all__ = ["Encoder", "fuse", "product"]
