"""`adalog inspect`: list the sites of an artifact or a model."""

from pathlib import Path
from typing import Annotated

import typer

from adalog import artifact
from adalog.cli import views
from adalog.cli.console import check_outputs, emit_json, show, waiting
from adalog.cli.options import CheckpointOption, JsonOption, NoPretrainedOption
from adalog.cli.targets import load_model, refuse_weights, source_of
from adalog.inputs import zoo


def command(
    target: Annotated[
        str, typer.Argument(help=f"Artifact written by `adalog quantize`, or full-precision model: {zoo.KINDS}.")
    ],
    by_bytes: Annotated[
        bool, typer.Option("--bytes", help="List the bytes of each tensor of an artifact instead of its sites.")
    ] = False,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    json_out: JsonOption = None,
) -> None:
    """List the sites of an artifact with their bits, or the sites of a model that can be quantized.

    A site is one multiplication: a linear layer, a convolution or an attention product.
    """
    check_outputs(json_out, reads=(source_of(target), checkpoint))
    if zoo.is_model(target):
        if by_bytes:
            raise ValueError(f"--bytes needs an artifact, and {target} is a model: quantize it first")
        loaded = load_model(target, no_pretrained, checkpoint)
        with waiting(f"capturing {target}"):
            facts = zoo.inspect(loaded)
        show(facts, json_out, views.census_table(facts), views.census_lines(facts))
        return
    refuse_weights(target, no_pretrained, checkpoint)
    content = artifact.read(Path(target))
    facts = artifact.inspect(content, target)
    if by_bytes:
        facts |= {"tensors": artifact.tensor_sizes(content)}
    if json_out == "-":
        emit_json(facts, json_out)
        return
    table = views.bytes_table(content) if by_bytes else artifact.deserialise(content, target).summary()
    sums = f"{views.parts_line(artifact.sizes(content))}; {len(content):,} bytes in total"
    show(facts, json_out, table, sums)
