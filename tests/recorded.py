"""What a step asks of an accelerator, and a stand-in for CUDA graphs: operations recorded once and run again by rote.

A step that runs without data, on the device "meta", takes the paths of an accelerator. It fails if it asks for a value,
and its operations tell whether tensors of the processor take part.

On the CPU, operations also run while they are recorded, so the first replay does nothing. A step that a graph could not
repeat either fails while it is recorded or gives other values than the step itself: numbers from the processor stay as
they were, and so does what Python does besides the operations.
"""

import copy
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Like views, these compute nothing.
_FREE = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided"}
# These wait for values, or copy numbers from the processor, or ask what PyTorch cannot record.
_WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "_unique2", "lift_fresh"}


class Operations(TorchDispatchMode):
    """Counts the operations that compute, those that wait, and the tensors on each type of device."""

    def __init__(self):
        super().__init__()
        self.computing, self.waiting, self.devices = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _WAITS:
            self.waiting[name] += 1
        elif not (func.is_view or name in _FREE):
            self.computing[name] += 1
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        self.devices.update(each.device.type for each in tensors)
        return out


class Recorded(TorchDispatchMode):
    """The operations of a step, in place of a CUDA graph."""

    def __init__(self):
        super().__init__()
        self._calls, self._replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in _WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        self._replays += 1
        if self._replays == 1:
            return
        with torch.no_grad():
            for func, args, kwargs, out in self._calls:
                again = func(*args, **kwargs)
                for before, now in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
                        before.copy_(now)


def record(step, generator):
    """Record a step as `adalog.calibration.replay.record` does on an NVIDIA GPU."""
    recorded = Recorded()
    with recorded:
        step()
    return recorded


def like_an_accelerator(patch, *, graphs=True):
    """Let training on the CPU take the paths of an accelerator, with or without graphs."""
    from adalog.calibration import reconstruct, replay
    from adalog.quantizers import elementwise, quantizer

    for module in (reconstruct, quantizer):
        patch.setattr(module, "waits_for_launches", lambda device: True)
    patch.setattr(quantizer, "_slices", lambda values, parameters: [[value] for value in values])
    patch.setattr(elementwise, "_functions", dict)  # no compiled library
    patch.setattr(replay, "has_graphs", lambda device: graphs)
    patch.setattr(replay, "record", record)


class NoOptimizer:
    """An optimizer that does nothing: PyTorch has none without data."""

    def __init__(self, parameters, fused):
        self.param_groups = parameters

    def step(self):
        for value in (value for group in self.param_groups for value in group["params"]):
            assert value.grad.shape == value.shape


def without_data(block, patch):
    """Copy a block in training to the device "meta"."""
    from adalog.calibration.replay import Masks, random_mask
    from adalog.ranks import Ranks

    draws = [numbers.to("meta") for numbers in block._draws()]

    def moved(value, memo):
        memo[id(value)] = made = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta", requires_grad=value.requires_grad
        )
        return made

    for kind in (torch.Tensor, torch.nn.Parameter):
        patch.setitem(copy._deepcopy_dispatch, kind, moved)
    for kind in (Ranks, torch.Generator):
        patch.setitem(copy._deepcopy_dispatch, kind, lambda value, memo: value)
    block = copy.deepcopy(block)
    block._draws, block._at_once = lambda: iter(draws), True
    patch.setattr(torch.optim, "Adam", NoOptimizer)
    patch.setattr(
        Masks, "_draw", lambda self, count: random_mask(torch.empty(count, device="meta"), self._drop, self.generator)
    )
    return block
