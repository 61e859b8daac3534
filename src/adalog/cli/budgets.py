"""Shared steps of the commands that choose bits: calibrate a model and measure the sensitivity of its operands."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.progress import Progress
from torch import Tensor

from adalog import Calibration, Config, DataError, QuantizedModel
from adalog._quantize import sample_images
from adalog.calibration.operands import OperandKind
from adalog.cli.console import note, progress_bar, quiet
from adalog.cli.options import Setup, read_count, read_size
from adalog.cli.targets import find_judging, load_model
from adalog.graph.tracing import trace
from adalog.inputs import zoo
from adalog.inputs.images import ImageSet
from adalog.quantizers import FLOAT_BITS
from adalog.study import sensitivity
from adalog.study.budget import Budget, quantize_within
from adalog.study.cost import BOPS_PER_FIXOP
from adalog.study.sensitivity import Measure, Sensitivity


@dataclass(frozen=True)
class CalibratedModel:
    """A model with its calibration, and held-out normalised images to evaluate it on."""

    loaded: zoo.LoadedModel
    calibration: Calibration
    judged: Tensor

    @property
    def notes(self) -> dict[str, Any]:
        """Fields to add to the provenance of the artifacts."""
        return {"preprocessing": self.loaded.rgb_preprocessing.to_json()}


def subject(spec: str, data: Path | None, config: Config, judged: int, setup: Setup) -> CalibratedModel:
    """Load a model, calibrate it on the images that `adalog quantize` would use, and add `judged` held-out images."""
    if not zoo.is_model(spec):
        raise DataError(f"unknown model {spec!r}: give {zoo.KINDS}")
    sets = find_judging(spec, data, config.images_needed, judged, setup.seed)
    loaded = load_model(spec, setup.no_pretrained, setup.checkpoint)
    images, judging = (
        (part.load(loaded.rgb_preprocessing, jobs=setup.jobs) if isinstance(part, ImageSet) else part).to(setup.device)
        for part in sets
    )
    # `adalog quantize` samples the images of a folder again after loading them. This repeats its order.
    sampled = sample_images(images, config.images_needed, setup.seed) if isinstance(sets[0], ImageSet) else images
    assert isinstance(sampled, Tensor)
    calibration = Calibration(
        loaded.module.to(setup.device),
        sampled[: config.images],
        unlabelled=sampled,
        seed=setup.seed,
        memory=setup.memory,
        sizes="free" if setup.free_sizes else "fixed",
    )
    return CalibratedModel(loaded, calibration, judging)


def read_budget(budget: str | None, bops: str | None, fixops: str | None, max_kl: float | None) -> Budget | None:
    """Return the budget that the options set, or None if they set no limit."""
    if bops is not None and fixops is not None:
        raise ValueError(
            "--target-bops and --target-fixops set the same limit: give only one of them (1 FixOP = 64 BOPs)"
        )
    limit = None if bops is None else read_count(bops, "--target-bops")
    limit = limit if fixops is None else BOPS_PER_FIXOP * read_count(fixops, "--target-fixops")
    if budget is None and limit is None and max_kl is None:
        return None
    return Budget(None if budget is None else read_size(budget, "--budget"), limit, max_kl)


def measure(
    model: CalibratedModel, config: Config, widths: Sequence[int], progress: Progress, setup: Setup, partial: Path
) -> Sensitivity:
    """Measure the sensitivity of each operand of the model at each width."""
    resources = setup.resources(partial, progress, "measuring sensitivity", "measuring")
    images, memory = [model.judged], setup.memory // 2
    return sensitivity.sensitivity(model.calibration, config, images, widths, resources, memory=memory)


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
    """Quantize the model within a budget; return it with its plan as JSON.

    known: a file written by `adalog sensitivity`; None to measure the sensitivity first.
    """
    losses = None if known is None else sensitivity.read(known)
    if losses is not None and budget.loss is not None:
        _check_kl(losses.measure)
    calibrated = subject(spec, data, config, judged if losses is None else 0, setup)
    if losses is None and budget.loss is not None:
        program = calibrated.calibration.program
        _check_kl(sensitivity.measure_of(program, trace(program, calibrated.calibration.images)))
    partial.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, quiet():
        if losses is None:
            own_widths = {getattr(config, f"{kind}_bits") for kind in get_args(OperandKind)} - {FLOAT_BITS}
            alone = partial.with_name(f"{partial.name}.alone")
            losses = measure(calibrated, config, sorted({*sensitivity.WIDTHS, *own_widths}), progress, setup, alone)
        resources = setup.resources(partial, progress, "calibrating", config.bits)
        model = quantize_within(calibrated.calibration, config, losses, budget, resources, notes=calibrated.notes)
    loss = model.plan.totals.loss
    note(
        f"bits chosen on {losses.images} images: {model.bytes:,} bytes, {model.bops:,} BOPs per image, "
        f"predicted {'KL divergence' if losses.measure == 'kl' else losses.measure} {loss:.4g}"
    )
    widths_of = {name: dict(bits) for name, bits in model.plan.widths.items()}
    return model.model.cpu(), {"bytes": model.bytes, "bops": model.bops, "foretold": loss, "widths": widths_of}


def _check_kl(measure: Measure) -> None:
    if measure != "kl":
        raise DataError("--max-kl needs a model that outputs logits: use --budget or --target-bops for this model")
