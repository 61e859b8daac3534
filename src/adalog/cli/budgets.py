"""What the commands that choose widths share: a calibrated model, and what each of its operands costs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.progress import Progress
from torch import Tensor

from adalog import Calibration, Config, DataError, QuantizedModel
from adalog.calibration.operands import OperandKind
from adalog.cli.console import note, progress_bar, quiet, site_progress
from adalog.cli.options import Setup, read_count, read_size
from adalog.cli.targets import find_judging, load_model
from adalog.graph.tracing import trace
from adalog.inputs import zoo
from adalog.inputs.images import ImageSet
from adalog.quantize import sample_images
from adalog.quantizers import FLOAT_BITS
from adalog.study import sensitivity
from adalog.study.budget import Budget, Chosen, quantize_within
from adalog.study.cost import BOPS_PER_FIXOP
from adalog.study.sensitivity import Measure, Sensitivity


@dataclass(frozen=True)
class Subject:
    """A model with its calibration, and normalised images that judge and did not calibrate."""

    loaded: zoo.LoadedModel
    calibration: Calibration
    judged: Tensor

    @property
    def notes(self) -> dict[str, Any]:
        """What the provenance of its artifacts says besides."""
        return {"preprocessing": dataclasses.asdict(self.loaded.prepared)}


def subject(spec: str, data: Path | None, config: Config, judged: int, setup: Setup) -> Subject:
    """The model of that name, calibrated on the images that `adalog quantize` would take, with others that judge."""
    if not zoo.is_model(spec):
        raise DataError(f"model {spec!r} is none of {zoo.KINDS}")
    given = find_judging(spec, data, config.images_wanted, judged, setup.seed)
    loaded = load_model(spec, setup.no_pretrained, setup.checkpoint)
    drawn, judging = (
        (each.load(loaded.prepared, jobs=setup.jobs) if isinstance(each, ImageSet) else each).to(setup.device)
        for each in given
    )
    # Images of a folder are put in the order in which `adalog quantize` draws them from those that it has read.
    whole = sample_images(drawn, config.images_wanted, setup.seed) if isinstance(given[0], ImageSet) else drawn
    assert isinstance(whole, Tensor)
    calibration = Calibration(
        loaded.module.to(setup.device),
        whole[: config.images],
        unlabelled=whole,
        seed=setup.seed,
        memory=setup.memory,
        sizes="free" if setup.free_sizes else "fixed",
    )
    return Subject(loaded, calibration, judging)


def read_budget(budget: str | None, bops: str | None, fixops: str | None, max_kl: float | None) -> Budget | None:
    """The budget that the options name; None where they name none."""
    if bops is not None and fixops is not None:
        raise ValueError("--target-bops and --target-fixops are one limit: give one of them (a FixOP is 64 BOPs)")
    limit = None if bops is None else read_count(bops, "--target-bops")
    limit = limit if fixops is None else BOPS_PER_FIXOP * read_count(fixops, "--target-fixops")
    if budget is None and limit is None and max_kl is None:
        return None
    return Budget(None if budget is None else read_size(budget, "--budget"), limit, max_kl)


def measured(
    about: Subject, config: Config, widths: Sequence[int], progress: Progress, setup: Setup, partial: Path
) -> Sensitivity:
    """What each operand of the model costs at each width."""
    watch = site_progress(progress, progress.add_task("sensitivity", total=1), "alone:")
    return sensitivity.sensitivity(
        about.calibration,
        config,
        [about.judged],
        widths,
        jobs=setup.searches,
        memory=setup.memory // 2,
        partial=partial,
        progress=watch,
        ranks=setup.ranks,
    )


def quantize(
    spec: str,
    data: Path | None,
    config: Config,
    budget: Budget,
    judged: int,
    known: Path | None,
    setup: Setup,
    partial: Path,
) -> tuple[QuantizedModel, dict[str, Any]]:
    """The model of that name within a budget, and its plan as JSON. known: a file of what its operands cost."""
    found = None if known is None else sensitivity.read(known)
    if found is not None and budget.loss is not None:
        _check_kl(found.measure)
    about = subject(spec, data, config, judged if found is None else 0, setup)
    if found is None and budget.loss is not None:
        program = about.calibration.program
        _check_kl(sensitivity.measure_of(program, trace(program, about.calibration.images)))
    partial.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, quiet():
        if found is None:
            given = {getattr(config, f"{kind}_bits") for kind in get_args(OperandKind)} - {FLOAT_BITS}
            alone = partial.with_name(f"{partial.name}.alone")
            found = measured(about, config, sorted({*sensitivity.WIDTHS, *given}), progress, setup, alone)
        watch = site_progress(progress, progress.add_task("calibrate", total=1), config.bits)
        chosen = quantize_within(
            about.calibration,
            config,
            found,
            budget,
            notes=about.notes,
            jobs=setup.searches,
            partial=partial,
            progress=watch,
            ranks=setup.ranks,
        )
    note(told_of(chosen, found))
    widths_of = {name: dict(bits) for name, bits in chosen.plan.widths.items()}
    plan = {"bytes": chosen.bytes, "bops": chosen.bops, "foretold": chosen.plan.totals.loss, "widths": widths_of}
    return chosen.model.cpu(), plan


def _check_kl(measure: Measure) -> None:
    if measure != "kl":
        raise DataError("--max-kl is of a classifier, and the model has no logits: give --budget or --target-bops")


def told_of(chosen: Chosen, found: Sensitivity) -> str:
    """A line about a plan."""
    loss = "KL divergence" if found.measure == "kl" else found.measure
    return (
        f"widths chosen by {found.images} images: {chosen.bytes:,} bytes, {chosen.bops:,} BOPs an image; the {loss} is "
        f"foretold as {chosen.plan.totals.loss:.4g}"
    )
