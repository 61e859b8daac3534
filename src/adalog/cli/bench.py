"""`adalog bench`: time an artifact with each executor."""

import hashlib
from pathlib import Path
from typing import Annotated

import torch
import typer

import adalog
from adalog import hub
from adalog.cli import views
from adalog.cli.console import check_outputs, show, waiting
from adalog.cli.options import CheckpointOption, JsonOption, NoPretrainedOption, check_choice, thread_count
from adalog.cli.targets import load_model, naming_file, source_of
from adalog.inputs import zoo
from adalog.runtime import EXECUTORS
from adalog.study.bench import FAKE, bench, executors_here


def command(
    file: Annotated[Path, typer.Argument(help="Artifact to time, written by `adalog quantize`.")],
    executor: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Executor to time: {', '.join((FAKE, *EXECUTORS))} (fake: fake quantization in float). Repeat the "
            "option for several. Default: all that run on this machine, except reference."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of images per batch. Repeat the option for several sizes. Default: 1."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"Also time this full-precision model: {zoo.KINDS}.")] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    threads: Annotated[int, typer.Option(min=0, help="Number of CPU threads; 0 means one per core.")] = 1,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=3600, help="Seconds to spend on each executor and batch size. Each runs at least five times."
        ),
    ] = 3,
    json_out: JsonOption = None,
) -> None:
    """Time an artifact with each executor on random images.

    The table lists the median time per batch, the images per second, the size of the weights and the time to load.
    """
    check_outputs(json_out, reads=(file, source_of(model), checkpoint))
    if model is None and (checkpoint is not None or no_pretrained):
        raise ValueError("--checkpoint and --no-pretrained apply to the full-precision model: add --model")
    available, missing = executors_here()
    executors = list(dict.fromkeys(executor)) if executor else available
    for name in executors:
        check_choice("--executor", name, (FAKE, *EXECUTORS))
    adalog.load(file)  # refuses a wrong file before the full-precision model is loaded
    full = None if model is None else load_model(model, no_pretrained, checkpoint).module
    count = thread_count(threads)
    torch.set_num_threads(count)
    with waiting(f"timing {file}"), naming_file(file, "cannot be timed"):
        rows = bench(
            lambda: adalog.load(file), executors, sorted(set(batch or [1])), threads=count, seconds=seconds, full=full
        )
    digest = hashlib.sha256(hub.locate(str(file)).read_bytes()).hexdigest()
    facts = {"file": str(file), "sha256": digest, "threads": count, "rows": rows, "absent": {} if executor else missing}
    show(facts, json_out, *views.times(facts))
