"""The executor "native": compiled kernels (`native.cpp`) over memory that is laid out once for each batch size.

`abi` is the library's interface, `products` single sites on it; `recognise` finds the steps of a program, and `emit`
gives them memory and calls. docs/native.md describes the whole.
"""

from adalog.run.abi import Context
from adalog.runtime.native.emit import Plan
from adalog.runtime.native.products import encoder, encoder_key, product, takes

__all__ = ["Context", "Plan", "encoder", "encoder_key", "product", "takes"]
