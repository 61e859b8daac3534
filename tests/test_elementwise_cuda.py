"""The Triton kernel, run by Triton's interpreter on the CPU: its codes are those of PyTorch, row by row."""

import os
import subprocess
import sys

import pytest
import torch

from adalog.quantizers import elementwise
from test_elementwise import block, chosen, row_by_row

pytest.importorskip("triton")

# Triton reads the variable TRITON_INTERPRET when it is imported, so that another process has to run the kernel.
SCRIPT = """
import sys
import torch
from adalog.quantizers.elementwise_cuda import launch_codes_in_turn

problems, results = torch.load(sys.argv[1]), []
for left, form, base, parameters, bits, rows in problems:
    span = slice(*rows)
    blocks = left[:, span], form[:, span, span], None if base is None else base[:, span]
    codes, moved = torch.full_like(left, -1), torch.empty_like(left[:, span]).contiguous()
    launch_codes_in_turn(*blocks, *parameters, 2**bits - 1, codes[:, span], moved)
    results.append((codes, moved))
torch.save(results, sys.argv[2])
"""


def test_codes_in_turn_are_those_of_pytorch(tmp_path):
    shapes = [(1, 64, 5), (3, 7, 1), (2, 20, 17), (1, 1, 1)]
    problems = [block(*shape, swept, 0) for shape in shapes for swept in (False, True)]
    torch.save([(*given, (rows.start, rows.stop)) for *given, rows in problems], tmp_path / "problems")
    command = [sys.executable, "-c", SCRIPT, tmp_path / "problems", tmp_path / "results"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for problem, results in zip(problems, torch.load(tmp_path / "results"), strict=True):
        assert all(map(torch.equal, results, chosen(problem, row_by_row)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_no_kernel():
    assert elementwise._launch_codes_in_turn.__wrapped__() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 200), (3, 7, 1), (2, 20, 17)])
def test_codes_in_turn_on_a_device_are_those_of_pytorch(shape, swept):
    left, form, base, parameters, bits, rows = problem = block(*shape, swept, 0)
    there = left.cuda(), form.cuda(), None if base is None else base.cuda(), [value.cuda() for value in parameters]
    results = chosen((*there, bits, rows), elementwise.codes_in_turn)
    assert all(map(torch.equal, (result.cpu() for result in results), chosen(problem, row_by_row)))
