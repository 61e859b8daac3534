"""The operands of a convolution's search are the patches that it reads, and no larger tensors are made on the way."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adalog import Calibration, Config
from adalog.calibration.operands import formats_of, with_rows
from adalog.graph.convolution import conv_geometry, patches
from adalog.quantizers.quantiles import coprime
from toys import Toy

CHANNELS, SIZE, COUNT = 16, 64, 4


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest storage that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def calibration(activation, memory=1 << 30, **geometry):
    """Return the calibration of a convolution after an activation."""
    layers = {"first": nn.Conv2d(3, CHANNELS, 1), "second": nn.Conv2d(CHANNELS, CHANNELS, 3, **geometry)}
    model = Toy(lambda m, x: m.second(activation(m.first(x))).mean((2, 3)), **layers)
    images = torch.randn(COUNT, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return Calibration(model.eval(), images, memory=memory)


CONFIG = replace(Config.preset("w4a4"), images=COUNT, stages=())


def second_of(calibration):
    """The group of the second convolution, and its product in the first format."""
    group = next(group for group in calibration.groups if group.name == "second")
    return group, calibration._product(group, CONFIG, None, formats_of(group.first, CONFIG)[0])


@pytest.mark.parametrize("activation", [torch.relu, nn.functional.gelu])
def test_the_search_of_a_depthwise_convolution_makes_no_tensor_of_all_patches(activation, monkeypatch):
    """The largest tensors are the sums of values and squares in `OwnError`; all patches of one image are twice as many.

    In a larger operand, the sums are of a sample.
    """
    monkeypatch.setattr("adalog.device._CPU_ELEMENTS", 1 << 14)  # the most elements of all candidates together
    elements = COUNT * CHANNELS * SIZE**2
    some = calibration(activation, elements * 16, padding=1, groups=CHANNELS)  # half of what all images need
    stride = some._observed.stride(some._requests["second"].names)
    some._shared.prepare(CONFIG)
    with Largest() as largest:
        searched = some.search(CONFIG, ["second"])
    assert stride > 1
    assert largest.elements <= 2.1 * elements / stride
    assert searched[0].assignment.sqnr > 10


@pytest.mark.parametrize("geometry", [{}, {"groups": 4}, {"stride": 2, "padding": (2, 1)}, {"groups": CHANNELS}])
def test_a_convolution_reads_every_nth_patch(geometry):
    """The patches and the mask of the padding, group by group, from those of all positions."""
    some = calibration(nn.functional.gelu, **{"padding": 1} | geometry)
    group, product = second_of(some)
    stride, padding, dilation, groups = conv_geometry(group.first.node)
    x = some.operand(group.first.left)
    rows = some._shared.rows(group, some._requests["second"].names, CONFIG)
    for values, found in ((x, product.left.values), (torch.ones_like(x), product.left.mask)):
        images = []
        for index, image in enumerate(values.unflatten(1, (groups, -1))):
            every = patches(image, (3, 3), stride, padding, dilation)
            step = coprime(9 // stride[0] ** 2, every.shape[1])
            images.append(every[:, index % step :: step])
        expected = torch.cat(images, 1) if groups > 1 else torch.cat(images, 1)[0]
        assert torch.equal(found, expected if rows is None else expected[..., rows, :])


def test_rows_are_taken_of_the_mask_too():
    left = second_of(calibration(nn.functional.gelu, padding=1, groups=CHANNELS))[1].left
    rows = torch.tensor([0, 0, 3, 7])
    taken = with_rows(left, rows)
    assert torch.equal(taken.values, left.values[:, rows])
    assert torch.equal(taken.mask, left.mask[:, rows])
