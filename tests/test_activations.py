"""Every row of the table of activation functions is known to whatever reads the table."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adalog import Config
from adalog.calibration.operands import formats_of
from adalog.graph.activations import ACTIVATIONS, BY_OPERATION
from adalog.graph.capture import capture
from adalog.graph.operations import OPERATIONS, resolve
from adalog.graph.program import Node, Ref
from adalog.graph.sites import find_sites
from adalog.quantizers import LogFormat
from adalog.runtime.integer.fused import _in_place
from adalog.runtime.native import abi
from adalog.runtime.native.recognise import _POINTWISE, _kind_of
from adalog.study.cost import cost
from adalog.study.drawing import title_of
from toys import IMAGES, Toy

X = torch.linspace(-6, 6, 97)


def function_of(name):
    if name == "quick_gelu":
        return lambda x: x * torch.sigmoid(1.702 * x)
    return resolve(ACTIVATIONS[name].op)


@pytest.fixture(scope="module", params=ACTIVATIONS)
def row(request):
    return ACTIVATIONS[request.param]


def test_a_linear_after_it_is_a_site_with_its_name_and_its_formats(row):
    function = function_of(row.name)
    program = capture(Toy(lambda m, x: m.fc(function(x)), fc=nn.Linear(32, 4)).eval(), IMAGES)
    (site,) = find_sites(program)
    assert site.left_source.kind == row.name
    logarithmic = [isinstance(form, LogFormat) for form in formats_of(site, Config())]
    assert any(logarithmic) == row.power_law
    assert all(logarithmic) == (row.power_law and row.is_gelu and not Config().search.compare_uniform)


@pytest.mark.parametrize("op", BY_OPERATION)
def test_each_operation_may_be_in_a_program_and_runs_in_place(op):
    assert op in OPERATIONS
    assert op in _POINTWISE
    x = X.clone()
    assert _in_place(Node("y", op, (Ref("x"),), {}))(x) is x
    assert torch.equal(x, resolve(op)(X))


def test_multiplications_count_for_each_element(row):
    function = function_of(row.name)
    program = capture(Toy(lambda m, x: function(x)).eval(), IMAGES)
    counted = sum(line.count for line in cost(program, (IMAGES[:1],)).rows)
    expected = row.multiplications if row.op else 2  # the operations that build quick GELU: two products
    assert counted == expected * IMAGES[0].numel()


def test_titles_are_written_for_pictures(row):
    assert title_of(row.name) == row.title


def test_kernels_are_those_of_the_interface():
    names = {name for row in ACTIVATIONS.values() for name in row.kernels.values()}
    assert names == {*abi.ACTIVATIONS} - {""}


def test_arguments_choose_the_kernel():
    def kernel(op, *args, **kwargs):
        return _kind_of(Node("y", f"aten.{op}.default", (Ref("x"), *args), kwargs))

    found = [kernel("gelu"), kernel("gelu", approximate="tanh"), kernel("gelu", approximate="none")]
    assert found == ["gelu", "gelu_tanh", "gelu"]
    assert [kernel("relu"), kernel("elu", 0.5), kernel("exp")] == ["relu", "", ""]
    assert torch.allclose(resolve("aten.gelu.default")(X, approximate="tanh"), F.gelu(X, approximate="tanh"))
