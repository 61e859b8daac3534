"""Run the executor "native": compiled kernels (`native.cpp`) in memory that is laid out once for each batch size.

`abi` declares the library's interface, and `products` runs single sites with it. `recognise` finds the steps of a
program, and `emit` gives them memory and calls. docs/reference/kernels.md describes the design.
"""

from adalog.runtime.native.abi import Context
from adalog.runtime.native.emit import Plan
from adalog.runtime.native.products import encoder, encoder_key, product, takes

__all__ = ["Context", "Plan", "encoder", "encoder_key", "product", "takes"]
