"""Provide scratch memory, and find out the memory layout of tensors."""

import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 16  # elements per piece of an elementwise step on a CPU, so that its temporaries stay in the cache


class _ThreadScratch(threading.local):
    """The scratch memory of one thread: the largest block so far for each name, type and device."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_scratch = _ThreadScratch()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory of this shape, valid until this thread asks for the same name again.

    New memory takes longer to get than to use, so each thread keeps its blocks until it ends. No value stays in them
    from one call of an executor to the next.
    """
    count, key = math.prod(shape), (name, dtype, device)
    block = _scratch.blocks.get(key)
    if block is None or block.numel() < count:
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
            block = _scratch.blocks[key] = torch.empty(count, dtype=dtype, device=device)
    return block[:count].view(shape)


def chunks(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split flat tensors of equal length in the same way: into pieces that fit in the cache on a CPU, else into one."""
    size = CHUNK if values[0].device.type == "cpu" else max(1, values[0].numel())
    return zip(*(value.split(size) for value in values), strict=True)


def is_channels_last(x: Tensor) -> bool:
    """Return True if an image (B, C, H, W) has its channels last in memory."""
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def is_transposed(x: Tensor) -> bool:
    """Return True if the columns of a matrix are contiguous and its rows are not, as for the keys of an attention."""
    return x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
