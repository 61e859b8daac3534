"""`adalog bench`: how long an artifact takes."""

import hashlib
from pathlib import Path
from typing import Annotated

import torch
import typer

import adalog
from adalog import hub
from adalog.cli import views
from adalog.cli.console import check_outputs, emit_json, say, waiting
from adalog.cli.options import CheckpointOption, JsonOption, NoPretrainedOption, thread_count
from adalog.cli.targets import load_model, naming_file, source_of
from adalog.inputs import zoo
from adalog.runtime import EXECUTORS
from adalog.study import roof
from adalog.study.bench import FAKE, bench, executors_here
from adalog.study.trace import trace


def command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    executor: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join((FAKE, *EXECUTORS))}; may be repeated. Without it, all that are fast here."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Images per batch; may be repeated. Without it, 1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"Full-precision model to time as well: {zoo.KINDS}.")] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    threads: Annotated[int, typer.Option(min=0, help="Number of CPU threads per run; 0 means one per core.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds to spend on each executor and batch; five runs at least.")
    ] = 3,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Write the calls of 'native' on one thread, beside this processor's roofs, as JSON."
        ),
    ] = None,
    json_out: JsonOption = None,
) -> None:
    """Time an artifact by each executor, in turn, on random images: medians, bytes of weights, time to load."""
    check_outputs(json_out, trace_out, reads=(file, source_of(model), checkpoint))
    if model is None and (checkpoint is not None or no_pretrained):
        raise ValueError("--checkpoint and --no-pretrained are of a full-precision model: give --model")
    here, missing = executors_here()
    wanted = list(dict.fromkeys(executor)) if executor else here
    odd = [name for name in wanted if name not in (FAKE, *EXECUTORS)]
    if odd:
        raise ValueError(f"executor = {odd[0]!r} is none of {', '.join((FAKE, *EXECUTORS))}")
    quantized = adalog.load(file)  # refuses a file that is no artifact, before the full-precision model is loaded
    full = None if model is None else load_model(model, no_pretrained, checkpoint).module
    count = thread_count(threads)
    torch.set_num_threads(count)
    if trace_out is not None:
        with waiting(f"trace {file}"), naming_file(file):
            roofs = roof.measure()
            traces = [trace(quantized, each, roofs, seconds) for each in sorted(set(batch or [1]))]
        emit_json({"file": str(file), "roofs": roofs.json(), "traces": traces}, str(trace_out))
    with waiting(f"time {file}"), naming_file(file, "cannot be timed"):
        rows = bench(
            lambda: adalog.load(file), wanted, sorted(set(batch or [1])), threads=count, seconds=seconds, full=full
        )
    digest = hashlib.sha256(hub.locate(str(file)).read_bytes()).hexdigest()
    told = {"file": str(file), "sha256": digest, "threads": count, "rows": rows, "absent": {} if executor else missing}
    if json_out != "-":
        say(*views.times(told))
    emit_json(told, json_out)
