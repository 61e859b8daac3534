"""Tell how many elements and how much memory a search uses at once on a device, and how precise its products are."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, cast

import torch

# With fewer elements the overhead of each product dominates. With more, temporaries no longer fit in the cache.
_CPU_ELEMENTS = 1 << 20
# On an accelerator each call has a fixed cost, so a chunk is as large as memory allows, up to this number.
_ELEMENTS = 1 << 26
# Most memory that one element needs: an operand's own error holds eight float64 numbers for each of four levels.
_BYTES_OF_ELEMENT = 4 * 8 * 8
_MEMORY = 2 << 30  # bytes; used on a CPU, and if the device does not report its memory
# The most images that an accelerator runs together. More do not make it faster, because it is busy already.
_IMAGES = 256
# The values of a forward take at most this part of the memory. Fake quantization makes temporaries of the same size.
_PART_OF_VALUES = 8

# The threads inside of `full_float32`, and the settings that are valid again once the last of them leaves.
_lock, _inside = Lock(), list[bool]()
_chosen: list[tuple[Any, str, Any]] = []


def chunk_elements(device: torch.device) -> int:
    """Return the number of elements that all candidates scored at once may have together."""
    if device.type == "cpu":
        return _CPU_ELEMENTS
    return min(_ELEMENTS, max(_CPU_ELEMENTS, usable_memory(device) // 4 // _BYTES_OF_ELEMENT))


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products and convolutions of GPUs in float32; the caller's choice is valid again afterwards.

    By default PyTorch computes convolutions in TF32, whose error of 2**-11 moves values to other codes.
    """
    cudnn: Any = torch.backends.cudnn
    name, value = "allow_tf32", cast(Any, False)
    if hasattr(cudnn, "conv"):  # from PyTorch 2.9 on; it refuses to mix these names with the older ones
        cudnn, name, value = cudnn.conv, "fp32_precision", "ieee"
    with _lock:
        if not _inside:  # the first of several threads
            _chosen[:] = [(of, name, getattr(of, name)) for of in (cudnn, torch.backends.cuda.matmul)]
            for of, _, _ in _chosen:
                setattr(of, name, value)
        _inside.append(True)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                for of, _, chosen in _chosen:
                    setattr(of, name, chosen)


def full_float32_on(device: torch.device | None) -> AbstractContextManager[None]:
    """Return `full_float32` for an accelerator. Processors do not compute in TF32, so for them it does nothing.

    It does nothing while `torch.compile` traces, either: compiled code computes with the settings of its caller.
    """
    if device is None or device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return nullcontext()
    return full_float32()


def images_at_once(device: torch.device, bytes_of_image: int, least: int) -> int:
    """Return how many images to run together: `least` on a processor, and as many as memory allows elsewhere.

    bytes_of_image: the most bytes that the values of one image take at a time in a forward.
    """
    if not waits_for_launches(device):
        return least
    return max(1, min(_IMAGES, usable_memory(device) // (_PART_OF_VALUES * max(1, bytes_of_image))))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return True if the device has instructions for products in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # PyTorch before 2.12 cannot tell whether the processor has AVX-512-BF16.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("avx512_bf16"))


def default_memory(device: torch.device) -> int:
    """Return the bytes for operands and temporaries if the caller sets no limit: a quarter of a GPU, else 2 GiB."""
    if device.type != "cuda":
        return _MEMORY
    return max(_MEMORY, torch.cuda.mem_get_info(device)[1] // 4)


def waits_for_launches(device: torch.device) -> bool:
    """Return True if small operations cost their launch, as on accelerators, and not their values, as on CPUs."""
    return device.type != "cpu"


def usable_memory(device: torch.device) -> int:
    """Return the bytes that may be used: on CUDA the free memory and PyTorch's unused part, elsewhere 2 GiB."""
    if device.type != "cuda":
        return _MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
