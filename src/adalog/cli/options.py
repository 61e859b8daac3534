"""Options that several commands share, and what their texts mean."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from adalog import METHODS
from adalog.cli.console import job, quiet
from adalog.ranks import ALONE, Ranks
from adalog.study import sensitivity
from adalog.study.doctor import available_cores

JsonOption = Annotated[str | None, typer.Option("--json", help="Write the result as JSON to this file, or to '-'.")]
SeedOption = Annotated[
    int,
    typer.Option(min=0, max=2**63 - 1, help="Seed that chooses the calibration images; one seed gives one result."),
]
DrawOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed by which --images are drawn from those there are.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="Weights for the model: a safetensors file, or a state dict saved by torch.save.")
]
NoPretrainedOption = Annotated[bool, typer.Option("--no-pretrained", help="Use random weights and download nothing.")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="Number of CPU threads; 0 means one per core.")]
DeviceOption = Annotated[str, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, ...")]
MethodOption = Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")]
ImagesOption = Annotated[int, typer.Option(min=1, help="Number of calibration images.")]
JudgingDataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of images that calibrate and, apart from these, judge. demo has its own."),
]
PartsOption = Annotated[
    str | None,
    typer.Option(help="Parts of a detector to quantize, of backbone,neck,rpn,box,mask; all of them by default."),
]
JudgedOption = Annotated[int, typer.Option(min=1, help="Number of images that judge widths; none of them calibrates.")]
WIDTHS = ",".join(map(str, sensitivity.WIDTHS))  # what --widths is unless it is given
WidthsOption = Annotated[str, typer.Option(help="Bits at which each operand is tried.")]
SensitivityOption = Annotated[
    Path | None, typer.Option(help="What `adalog sensitivity` wrote of this model; measured if not given.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue a run that was stopped, from what OUT.partial holds.")
]
MemoryOption = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory for observed values and their search, such as 512MB; the model and the images come on top.",
    ),
]


@dataclass(frozen=True)
class Setup:
    """Which weights a command quantizes, and with what: threads (jobs), bytes of memory, a device, the job's ranks."""

    no_pretrained: bool
    checkpoint: Path | None
    seed: int
    jobs: int
    memory: int
    device: torch.device
    free_sizes: bool = False
    ranks: Ranks = ALONE

    @property
    def searches(self) -> int:
        """How many sites are searched at once: the memory of a GPU holds one."""
        return self.jobs if self.device.type == "cpu" else 1


def thread_count(threads: int) -> int:
    """The number of threads that an option asks for; 0 asks for a fair share of the cores that this process may use."""
    return threads or max(1, available_cores() // job().neighbours)


def find_device(name: str) -> torch.device:
    """The device with that name; "cuda" is one of its own for each rank. Raises ValueError if it is not there."""
    if name == "cuda" and job().neighbours > 1:
        name = f"cuda:{job().local}"
    try:
        with quiet():
            torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as cause:
        here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(f"device = {name!r} is not one of this machine: it has {', '.join(here)}") from cause


def read_pinned(text: str) -> tuple[str, int | str]:
    """The pattern and the bits of an option GLOB=BITS."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.isascii() or not bits.isalnum() or len(bits) > 20:
        raise ValueError(
            f"--pin {text!r} is not of the form GLOB=BITS, as in 'head=8', 'blocks.0.*=w4a8' or '*.qk=32' for float"
        )
    return pattern, int(bits) if bits.isdecimal() else bits


def read_size(text: str, option: str = "--memory") -> int:
    """The number of bytes that a size such as 2GiB, 1.5GB or 500000000 stands for."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:([kKMGT])(i?)B)?", text, re.ASCII)
    if found is None:
        raise ValueError(f"{option} {text!r} is no size: give one like 2GiB, 1.5GB or 500MB")
    number, letter, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(letter.upper()) + 1 if letter else 0))


def read_count(text: str, option: str) -> float:
    """The number that a count such as 40G, 1.5M or 500000 stands for."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([KMGT]?)", text, re.ASCII)
    if found is None:
        raise ValueError(f"{option} {text!r} is no number: give one like 40G, 1.5M or 500000")
    return float(found[1]) * 1000.0 ** (" KMGT".index(found[2] or " "))


def read_widths(text: str) -> list[int]:
    """The widths of an option such as 2,3,4,6,8."""
    if re.fullmatch(r"[2-8](,[2-8])*", text, re.ASCII) is None:
        raise ValueError(f"--widths {text!r} are not bits from 2 to 8 with commas between them, such as 2,3,4,6,8")
    return sorted({int(width) for width in text.split(",")})
