"""What a device can do: how much a search computes on it at a time, in which type, and in how much memory."""

from functools import cache
from typing import Any

import torch

# Fewer elements, and what surrounds each product takes longer than the product (half of a search on two threads at
# 2**17); more, and temporaries leave the cache.
_CPU_ELEMENTS = 1 << 20
# An accelerator has no such cache, and each call costs the same whatever its size: what memory allows, up to this.
_ELEMENTS = 1 << 26
# What there is for each element where most is: eight float64 of an operand's own error for each of four levels.
_BYTES_OF_ELEMENT = 4 * 8 * 8
_MEMORY = 2 << 30  # bytes, where the device does not tell


def chunk_elements(device: torch.device) -> int:
    """How many elements a chunk of candidates may have that are scored at once."""
    if device.type == "cpu":
        return _CPU_ELEMENTS
    return min(_ELEMENTS, max(_CPU_ELEMENTS, usable_memory(device) // 4 // _BYTES_OF_ELEMENT))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products run in bfloat16 there, because the device has instructions for them."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _processor_multiplies_bfloat16()


@cache
def _processor_multiplies_bfloat16() -> bool:
    """Unknown to PyTorch before 2.12, and so not used there."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16"))


def usable_memory(device: torch.device) -> int:
    """How many bytes may be used: on CUDA those free now and those that PyTorch holds unused, elsewhere 2 GiB."""
    if device.type != "cuda":
        return _MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
