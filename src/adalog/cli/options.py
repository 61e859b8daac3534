"""Options that several commands share, and functions that parse them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from adalog import METHODS
from adalog.calibration.schedule import Resources
from adalog.cli.console import Session, job, quiet, site_progress
from adalog.device import default_memory
from adalog.ranks import Ranks
from adalog.runtime import EXECUTORS
from adalog.study import sensitivity
from adalog.study.doctor import available_cores


def _set_debug(context: typer.Context, debug: bool) -> bool:
    context.ensure_object(Session).debug = debug
    return debug


DebugOption = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.", callback=_set_debug)]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write the result as JSON to this file; - means standard output.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed that selects the calibration images.")]
DrawOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed that selects which images are used.")
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(help="Weights to load into the model: a safetensors file, or a state dict saved by torch.save."),
]
NoPretrainedOption = Annotated[bool, typer.Option("--no-pretrained", help="Use random weights; download nothing.")]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        help=f"Run in integers with this executor: {', '.join(EXECUTORS)}. Default: fake quantization, which rounds "
        "operands to their levels and multiplies them in float."
    ),
]
ThreadsOption = Annotated[int, typer.Option(min=0, help="Number of CPU threads; 0 means one per core.")]
DeviceOption = Annotated[str, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, ...")]
MethodOption = Annotated[str, typer.Option(help=f"Quantization method: {', '.join(METHODS)}.")]
ImagesOption = Annotated[int, typer.Option(min=1, help="Number of calibration images.")]
JudgingDataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder of images: some to calibrate on, others to measure losses on. Default for the model demo: its own "
        "images.",
    ),
]
PartsOption = Annotated[
    str | None,
    typer.Option(help="Parts of a detector to quantize, comma-separated: backbone,neck,rpn,box,mask. Default: all."),
]
JudgedOption = Annotated[
    int, typer.Option(min=1, help="Number of images to measure losses on, in addition to the calibration images.")
]
WIDTHS = ",".join(map(str, sensitivity.WIDTHS))  # the default of --widths
WidthsOption = Annotated[str, typer.Option(help="Bits to try for each operand, from 2 to 8, comma-separated.")]
SensitivityOption = Annotated[
    Path | None, typer.Option(help="File that `adalog sensitivity` wrote for this model. Default: measure it now.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run from its file OUT.partial.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory limit for observed values and their search, such as 512MB. The model and the images need more. "
        "[default: 2GiB, or a quarter of the GPU's memory]",
    ),
]


@dataclass(frozen=True)
class Setup:
    """Settings of a run: weights, seed, number of threads (jobs), memory limit [bytes], device and ranks."""

    no_pretrained: bool
    checkpoint: Path | None
    seed: int
    jobs: int
    memory: int
    device: torch.device
    free_sizes: bool
    ranks: Ranks

    @property
    def searches(self) -> int:
        """Number of sites to search at a time; one on a GPU, to limit its memory."""
        return self.jobs if self.device.type == "cpu" else 1

    def resources(self, partial: Path, progress: Progress, task: str, name: str) -> Resources:
        """Return the resources of the run, which report on a new bar: first the task, then the name and each site."""
        watch = site_progress(progress, progress.add_task(task, total=1), name)
        return Resources(self.searches, partial, watch, self.ranks)


def read_setup(
    no_pretrained: bool,
    checkpoint: Path | None,
    device: str,
    seed: int,
    threads: int,
    memory: str | None,
    free_sizes: bool = False,
) -> Setup:
    """Parse the options of a run, in the order in which commands list them."""
    jobs, place = thread_count(threads), find_device(device)
    size = default_memory(place) if memory is None else read_size(memory)
    return Setup(no_pretrained, checkpoint, seed, jobs, size, place, free_sizes, job())


def check_choice(option: str, name: str, choices: Collection[str]) -> None:
    """Raise ValueError if an option names none of the choices."""
    if name not in choices:
        raise ValueError(f"{option} {name!r} is not one of {', '.join(choices)}")


def thread_count(threads: int) -> int:
    """Return the number of threads to use; 0 means an equal share of the available cores for each process."""
    return threads or max(1, available_cores() // job().neighbours)


def find_device(name: str) -> torch.device:
    """Return the device of that name; "cuda" is a different GPU for each rank. Raises ValueError if it is missing."""
    if name == "cuda" and job().neighbours > 1:
        name = f"cuda:{job().local}"
    try:
        with quiet():
            torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as cause:
        names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(
            f"--device {name!r} is not available on this machine: choose from {', '.join(names)}"
        ) from cause


def read_pinned(text: str) -> tuple[str, int | str]:
    """Parse a --pin option GLOB=BITS; return the pattern and the bits."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.isascii() or not bits.isalnum() or len(bits) > 20:
        raise ValueError(
            f"--pin {text!r} is not of the form GLOB=BITS, as in 'head=8', 'blocks.0.*=w4a8' or '*.qk=32' for float"
        )
    return pattern, int(bits) if bits.isdecimal() else bits


def read_size(text: str, option: str = "--memory") -> int:
    """Parse a size such as 2GiB, 1.5GB or 500000000; return the number of bytes."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:([kKMGT])(i?)B)?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{option} {text!r} is not a size: give one like 2GiB, 1.5GB or 500MB")
    number, letter, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(letter.upper()) + 1 if letter else 0))


def read_count(text: str, option: str) -> float:
    """Parse a count such as 40G, 1.5M or 500000; return the number."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([KMGT]?)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{option} {text!r} is not a number: give one like 40G, 1.5M or 500000")
    return float(match[1]) * 1000.0 ** (" KMGT".index(match[2] or " "))


def read_widths(text: str) -> list[int]:
    """Parse a --widths option such as 2,3,4,6,8; return the sorted bits."""
    if re.fullmatch(r"[2-8](,[2-8])*", text, re.ASCII) is None:
        raise ValueError(f"--widths {text!r} is not a list of bits from 2 to 8: give one like 2,3,4,6,8")
    return sorted({int(width) for width in text.split(",")})
