"""What is too much for the compiled kernels: values, memory and threads; and a forked child, which has no threads."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adalog import library
from adalog.run import abi
from adalog.runtime.native import products
from adalog.runtime.native.arena import Layout
from adalog.runtime.native.tables import Lookup

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")


@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("high", [15, 255])
def test_codes_far_beyond_their_range(level, high):
    """What is too large, or no number, has the last code, in whole vectors as in the rest of a row."""
    values = [0.4, 3.0, 254.6, 4e4, 32767.5, 65535.0, 65536.0, 1e9, math.inf, math.nan, -0.6, -4e4, -1e9, -math.inf]
    bias = torch.tensor(values).repeat(9)
    scale, codes = torch.zeros_like(bias), torch.zeros(1, len(bias), dtype=torch.uint8)
    top = torch.full((len(bias),), float(high))
    top_bytes, x = top.to(torch.uint8), torch.randn(1, len(bias))
    output = abi.Output(
        kind=abi.CODES,
        scale=scale.data_ptr(),
        bias=bias.data_ptr(),
        high=top.data_ptr(),
        top=top_bytes.data_ptr(),
        parameters=len(bias),
        **products.place(codes),
    )
    told = {"data": x.data_ptr(), "bytes": x.nbytes, "row": len(bias), "rows": 1, "columns": len(bias)}
    abi.Context(1, level).run("norm", abi.Norm(**told, epsilon=1e-6, out=output))
    assert torch.equal(codes[0].float(), bias.nan_to_num(high).round().clamp(0, high))


@pytest.mark.parametrize(("keys", "error"), [(2**23, MemoryError), (2**25, ValueError), (2**40 - 1, ValueError)])
def test_rows_that_lie_on_each_other_take_no_memory_without_end(keys, error):
    """A kernel copies what it packs, so that many keys in little memory would take much more of it."""
    codes, floats = torch.zeros(64, dtype=torch.uint8), torch.ones(16)
    zero = torch.zeros(1, dtype=torch.int32)
    side = {"data": codes.data_ptr(), "bytes": 64, "zero": zero.data_ptr(), "bits": 4, "top": 15}
    sizes = {"batches": 1, "heads": 1, "rows": 1, "terms": 16, "columns": keys}
    context = abi.Context(1)
    layout, few = Layout(context), torch.tensor([0, 1], dtype=torch.int32)
    result = torch.zeros(1, 16)
    told = {"scale": floats.data_ptr(), "bias": floats.data_ptr(), "parameters": 16}
    given = abi.Attention(
        scores=abi.Matrices(**sizes, left=abi.Side(**side), right=abi.Side(**side, transposed=1)),
        factor=floats.data_ptr(),
        steps=layout.lookup(Lookup(torch.tensor([-1.0]), few, 1)),
        columns=16,
        values=abi.Side(**side),
        out=abi.Output(kind=abi.FLOATS, **told, **products.place(result)),
    )
    with pytest.raises(error):
        context.run("attention", given)
    given.scores.columns = 100
    context.run("attention", given)


FORKED = """
import os, signal, sys
import numpy as np
from adalog.run import abi

x, ones, zeros = np.ones((200, 64), np.float32), np.ones(64, np.float32), np.zeros(64, np.float32)
out = np.zeros_like(x)
parameters = {"scale": ones.ctypes.data, "bias": ones.ctypes.data, "parameters": 64}
output = abi.Output(kind=abi.FLOATS, **parameters, data=out.ctypes.data, bytes=out.nbytes, row=64)
norm = abi.Norm(data=x.ctypes.data, bytes=x.nbytes, row=64, rows=200, columns=64, epsilon=1, out=output)
context = abi.Context(2)
context.run("norm", norm)
child = os.fork()
signal.alarm(60)  # what waits for ever ends, child and parent
out[:] = 0
context.run("norm", norm)
assert (out == 1).all()
del context
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

CROWDED = """
import resource
from adalog.run import abi

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    abi.Context(1024)
except ValueError as error:
    print(error)
abi.Context(2)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_runs_and_ends():
    """Its parent's threads are not there: it does all tasks itself, and waits for nobody as it ends."""
    subprocess.run([sys.executable, "-c", FORKED], check=True)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, to bound a process's memory")
def test_more_threads_than_a_machine_starts():
    command = [sys.executable, "-c", CROWDED]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told == "threads = 1024 are more than this machine can start: choose fewer\n"
