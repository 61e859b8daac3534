"""The float operations without a kernel: what PyTorch computes."""

import numpy as np
import torch

from adalog.runtime.native import floats


def test_floats_are_what_torch_computes():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 5, 7, generator=generator)
    two = {f"aten.{name}.Tensor": getattr(torch, name) for name in ("add", "sub", "mul", "div")}
    cases = [*((op, (x, y), function(x, y)) for op, function in two.items())]
    cases += [
        ("aten.add.Tensor", (x, 0.1), x + 0.1),
        ("aten.sqrt.default", (x.abs(),), x.abs().double().sqrt().float()),
    ]
    cases += [("aten.maximum.default", (x, y), x.maximum(y)), ("aten.minimum.default", (x, 0.1), x.clamp(max=0.1))]
    cases += [("aten.cat.default", ((x, y), -2), torch.cat([x, y], -2)), (floats.COPY, (x,), x)]
    for op, args, wanted in cases:
        out = np.empty(wanted.shape, np.float32)
        given = [tuple(map(torch.Tensor.numpy, arg)) if isinstance(arg, tuple) else arg for arg in args]
        floats.FLOATS[op](out, *(arg.numpy() if isinstance(arg, torch.Tensor) else arg for arg in given))
        assert np.array_equal(out, wanted.numpy()), op
    for dims, keeps in (((1,), False), ((0, -1), True)):
        wanted = x.double().mean(dims, keeps)
        out = np.empty(wanted.shape, np.float32)
        floats.FLOATS["aten.mean.dim"](out, x.numpy(), dims, keeps)
        assert np.array_equal(out, wanted.float().numpy())
    for size in ((1, 1), (2, 3), (5, 7)):
        wanted = torch.nn.functional.adaptive_avg_pool2d(x, size)
        out = np.empty(wanted.shape, np.float32)
        floats.FLOATS["aten.adaptive_avg_pool2d.default"](out, x.numpy(), size)
        assert np.allclose(out, wanted.numpy(), rtol=1e-6, atol=1e-6)
    others = {"aten.mean.dim", "aten.adaptive_avg_pool2d.default"}
    assert floats.FLOATS.keys() == {*(op for op, *_ in cases), *others}
