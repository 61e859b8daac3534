"""The abilities of a device: how much a search computes on it at a time, in which dtype, and in how much memory."""

from functools import cache
from typing import Any

import torch

# With fewer elements the work around each product takes longer than the product (half of a search on two threads at
# 2**17); with more, temporaries leave the cache.
_CPU_ELEMENTS = 1 << 20
# An accelerator has no such cache, and each call has a fixed cost: a chunk is as large as memory allows, up to this.
_ELEMENTS = 1 << 26
# The most memory per element, taken by an operand's own error: eight float64 numbers for each of four levels.
_BYTES_OF_ELEMENT = 4 * 8 * 8
_MEMORY = 2 << 30  # bytes, for a device that does not say how much it has


def chunk_elements(device: torch.device) -> int:
    """How many elements the candidates that are scored at once may have together."""
    if device.type == "cpu":
        return _CPU_ELEMENTS
    return min(_ELEMENTS, max(_CPU_ELEMENTS, usable_memory(device) // 4 // _BYTES_OF_ELEMENT))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products run in bfloat16 on this device, because it has instructions for them."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _processor_multiplies_bfloat16()


@cache
def _processor_multiplies_bfloat16() -> bool:
    """Whether this processor has AVX-512-BF16; PyTorch before 2.12 does not say, so the answer is no there."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16"))


def usable_memory(device: torch.device) -> int:
    """How many bytes may be used: on CUDA those that are free or that PyTorch holds unused, elsewhere 2 GiB."""
    if device.type != "cuda":
        return _MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
