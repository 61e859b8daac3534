"""An emulated accelerator: tensors that say they are on another device, computed on the CPU, with every wait counted.

As on CUDA, tensors of different devices do not mix, but for CPU tensors without dimensions; the processor waits for the
device whenever it asks for values, or for a size that hangs on values.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("xpu", 0)  # a name that PyTorch knows, of a device that no machine of these tests has

_READS = {
    *("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "bincount", "_local_scalar_dense"),
    *("unique", "unique_consecutive", "_unique2", "unique_dim", "__repr__", "__str__", "__format__"),
}
_MOVES = {"to", "type_as", "cpu", "_to_copy"}


class Remote(Tensor):
    """A tensor on the emulated device; `held` is what it stands for, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Remote":
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )

    def __init__(self, held: Tensor):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} was reached past __torch_function__")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.split(".")[0]
        if func == Tensor.device.__get__:
            return DEVICE
        if name in _MOVES:
            return _moved(name, *args, **kwargs)
        if name == "copy_" and isinstance(args[0], Remote) != isinstance(args[1], Remote):
            _note("copy", f"copy_ between devices, {tuple(args[0].shape)}")
            _held(args[0]).copy_(_held(args[1]))
            return args[0]
        if name == "new_tensor":
            _note("copy", name)
        elif _reads(name, args, kwargs):
            _note("wait", name)
        _check(name, args, kwargs)
        if kwargs.get("device") is not None:
            away = not _is_remote(kwargs["device"])
            kwargs["device"] = "cpu"
            if away:
                return func(*tree_map(_held, args), **tree_map(_held, kwargs))
        given = {id(each.held): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Remote)}
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))

        def there(each: Any) -> Any:
            return given[id(each)] if id(each) in given else Remote(each) if isinstance(each, Tensor) else each

        return tree_map(there, out)


class _Placing(TorchFunctionMode):
    """Makes what is made on the emulated device, and moves what is moved to it, since PyTorch knows no such device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").split(".")[0]
        if any(isinstance(each, Remote) for each in tree_flatten((args, kwargs))[0]):
            return Remote.__torch_function__(func, types, args, kwargs)
        if name in _MOVES and any(_is_remote(each) for each in (*args[1:], *kwargs.values())):
            return _moved(name, *args, **kwargs)
        if _is_remote(kwargs.get("device")):
            if name in ("tensor", "as_tensor", "asarray"):
                _note("copy", name)
            return Remote(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def _is_remote(place: Any) -> bool:
    return isinstance(place, (str, torch.device)) and str(place).split(":")[0] == DEVICE.type


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Remote) else value


def _moved(name: str, value: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    place, dtype = kwargs.get("device"), kwargs.get("dtype")
    for each in (*rest, kwargs.get("other")):
        if isinstance(each, Tensor):
            place, dtype = each.device, each.dtype
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, (str, torch.device)):
            place = each
    was, held = isinstance(value, Remote), _held(value)
    now = False if name == "cpu" else was if place is None else _is_remote(place)
    result = held.to(dtype, copy=kwargs.get("copy", False) or name == "_to_copy" or now != was)
    if was and not now:
        _note("wait", f"{name} the CPU")
    elif now and not was:
        _note("copy", f"{name} the device, {tuple(held.shape)}")
    elif result is held:
        return value
    return Remote(result) if now else result


def _reads(name: str, args: Any, kwargs: Any) -> bool:
    if name in ("__getitem__", "__setitem__", "index", "index_put_", "index_put"):
        where = tree_flatten(args[1:2])[0]
        return any(isinstance(each, Tensor) and (each.dtype == torch.bool or each.ndim == 0) for each in where)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and any(isinstance(each, Tensor) for each in args[1:])
    if name == "where":
        return len(args) == 1
    return name in _READS


def _check(name: str, args: Any, kwargs: Any) -> None:
    """Indices and what values are taken for them may be on the CPU, from where they are copied."""
    for each in tree_flatten((args, kwargs))[0]:
        if isinstance(each, Tensor) and not isinstance(each, Remote) and each.ndim:
            if name not in ("__getitem__", "__setitem__"):
                raise RuntimeError(f"{name}: expected all tensors on the same device, got {DEVICE} and {each.device}")
            _note("copy", f"{name} by an index on the CPU")


class Counts(Counter[str]):
    """What happened: "wait", how often the processor waited for the device; "copy", how often it copied values there.

    told: the same by what was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: Counter[str] = Counter()


_open: list[Counts] = []


def _note(kind: str, what: str) -> None:
    for counts in _open:
        counts[kind] += 1
        counts.told[what] += 1


@contextmanager
def device() -> Iterator[Callable[[Tensor], Tensor]]:
    """Within it the emulated device exists; what is given puts a tensor there."""
    with _Placing():
        yield lambda value: value.to(DEVICE)


@contextmanager
def counted() -> Iterator[Counts]:
    """What happens within it."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)
