"""Scratch memory, and how tensors lie in memory."""

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 16  # elements that elementwise steps treat at once on a CPU, so that their temporaries stay in the cache


class _Scratch(threading.local):
    """The scratch memory of one thread: the largest block asked for so far under each name, type and device."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_scratch = _Scratch()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory of this shape, valid until this thread asks for the same name again.

    Fresh memory costs more than what is done with it, so each thread keeps its blocks until it ends. No value stays in
    them from one call of an executor to the next.
    """
    count = 1
    for side in shape:
        count *= side
    key = (name, dtype, device)
    block = _scratch.blocks.get(key)
    if block is None or block.numel() < count:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            block = _scratch.blocks[key] = torch.empty(count, dtype=dtype, device=device)
    return block[:count].view(shape)


def chunks(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of equal length, cut alike: on a CPU into pieces that stay in the cache, elsewhere not at all."""
    size = CHUNK if values[0].device.type == "cpu" else max(1, values[0].numel())
    return zip(*(value.split(size) for value in values), strict=True)


def is_channels_last(x: Tensor) -> bool:
    """Whether an image (B, C, H, W) lies in memory with its channels last."""
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def is_transposed(x: Tensor) -> bool:
    """Whether the columns of a matrix, and not its rows, lie in one piece: as the keys of an attention do."""
    return x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
