"""The story: sample the images, calibrate the model on them, and give back a quantized one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from adalog.calibration.calibration import MEMORY, Calibration, digest
from adalog.calibration.schedule import Progress
from adalog.choices import check_whole
from adalog.config import Config
from adalog.errors import CalibrationError
from adalog.graph.capture import Sizes, batched, take
from adalog.graph.submodule import as_function, check_shareable, exchange, of_first_call, record_calls
from adalog.inputs.images import draw_indices
from adalog.model import QuantizedModel
from adalog.ranks import ALONE, Ranks

Images = Tensor | tuple[Tensor, ...]  # one input, or several of as many images each


def quantize(
    model: nn.Module,
    images: Images,
    config: Config | None = None,
    *,
    within: nn.Module | None = None,
    partial: Path | None = None,
    seed: int = 0,
    jobs: int = 1,
    memory: int = MEMORY,
    sizes: Sizes = "fixed",
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> QuantizedModel:
    """Quantize a vision transformer after training, from a few unlabelled images.

    images: (N, 3, H, W), normalised as the model wants, N >= config.images_wanted, of which a sample drawn with `seed`
    serves: its first `config.images` calibrate, and stages that fit weights may see all of it; or a tuple of inputs,
    (N, ...) each. within: a model that holds this one and takes the images: this one is calibrated on what it is given
    there, in all its calls, and the quantized model takes its place, in which nothing else changes.
    jobs: sites searched at once. progress(done, total, name): called as sites and steps are done. partial: a file to
    which finished searches are added, from which an interrupted call goes on; remove it once the result is saved.
    memory: bytes on each rank, and sizes: as of `Calibration`. ranks: the processes that share out the searches, each
    of which makes this call (`Ranks.of_environment`); all get the same model. The model is not changed; one in half
    precision is quantized in float32.
    Raises CaptureError and CalibrationError, and ValueError where `within` does not hold the model, where a pattern of
    `pinned` matches no site, or where memory is too little.
    """
    config = config or Config.preset("w4a4")
    if not isinstance(config, Config):
        raise ValueError(f"config = {config!r} is no Config: give one like Config.preset('w4a4')")
    check_whole("jobs", jobs, 1)
    whole = batched(sample_images(images, config.images_wanted, seed))
    sample = take(whole, range(config.images))
    if within is None:
        calibration = Calibration(model, sample, unlabelled=whole, seed=seed, memory=memory, sizes=sizes)
        return calibration.quantize(config, progress, jobs=jobs, partial=partial, ranks=ranks)
    call, calls = record_calls(model, within, sample)
    more = record_calls(model, within, whole)[1] if _count(whole) > config.images else calls
    given, unlabelled = (tuple(value for inputs in each for value in inputs) for each in (calls, more))
    sizes = sizes if len(calls) == 1 else "free"
    part = as_function(model, call, len(calls))
    calibration = Calibration(part, given, unlabelled=unlabelled, seed=seed, memory=memory, sizes=sizes)
    if len(calls) > 1:
        check_shareable(model, calibration.sites)
    own = config.fitting(len(unlabelled[0])) if config.images_fitted else config  # calls and windows count as images
    result = calibration.quantize(own, progress, jobs=jobs, partial=partial, ranks=ranks)
    if len(calls) > 1:
        program, example = of_first_call(result.program, len(call.inputs)), result.example[: len(call.inputs)]
        result = QuantizedModel(replace(result.quantized, program=program, example=example))
    result.note(calibration=digest(sample), images=config.images)
    result.call = call
    exchange(model, within, result)
    return result


def _count(inputs: Sequence[object]) -> int:
    """How many images inputs have; what is no tensor is the same for all."""
    return next((len(value) for value in inputs if isinstance(value, Tensor)), 0)


def sample_images(images: Images, count: int, seed: int) -> Images:
    """`count` of the images, drawn without replacement from a generator of its own; the same ones of every input."""
    inputs = batched(images)
    found = _count(inputs)
    if found < count:
        raise CalibrationError(
            f"calibration takes {count} images, got {found}: give more, or set Config(images={found}), and "
            f"Config.fitting({found}) where stages fit images"
        )
    sample = take(inputs, draw_indices(found, count, seed))
    return sample[0] if isinstance(images, Tensor) else sample
