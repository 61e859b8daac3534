"""`adalog cost`: count the operations that one image takes, and the bytes of the stored tensors."""

from collections.abc import Sequence
from typing import Annotated

import typer
from torch import Tensor

import adalog
from adalog.cli import views
from adalog.cli.console import check_outputs, show, waiting
from adalog.cli.options import CheckpointOption, JsonOption, NoPretrainedOption
from adalog.cli.targets import load_model, refuse_weights, source_of
from adalog.inputs import zoo
from adalog.study.cost import cost


def command(
    target: Annotated[
        str, typer.Argument(help=f"Artifact written by `adalog quantize`, or full-precision model: {zoo.KINDS}.")
    ],
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    json_out: JsonOption = None,
) -> None:
    """Count the multiplications, FixOPs and BOPs that one image takes, and the bytes of the stored tensors.

    A BOP is a product of two bits.
    A FixOP is a product of two 8-bit numbers, which counts as 64 BOPs.
    """
    check_outputs(json_out, reads=(source_of(target), checkpoint))
    if zoo.is_model(target):
        loaded = load_model(target, no_pretrained, checkpoint)
        with waiting(f"capturing {target}"):
            program, images = zoo.capture_loaded(loaded)
        inputs: Sequence[Tensor] = [images]
    else:
        refuse_weights(target, no_pretrained, checkpoint)
        quantized = adalog.load(target)
        program, inputs = quantized.program, quantized.example
    result, shapes = cost(program, inputs), [list(value.shape[1:]) for value in inputs]
    record = {"target": target, "inputs": shapes, **result.to_json()}
    title = f"{target}, inputs {' and '.join(map(str, shapes))}"
    show(record, json_out, views.cost_table(title, result), views.cost_lines(result))
