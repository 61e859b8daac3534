"""Quantize a model: sample the images, calibrate the model on them, and return the quantized model.

The module is private so that the name `adalog.quantize` is the function.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import DataLoader

from adalog.calibration.calibration import Calibration, check_settings, digest
from adalog.calibration.schedule import Progress, Resources
from adalog.config import Config, check_config
from adalog.errors import CalibrationError, RankError
from adalog.graph.capture import Sizes, as_batch, take
from adalog.graph.modules import float_module
from adalog.graph.submodule import as_function, check_shareable, exchange, of_first_call, record_calls
from adalog.inputs.given import Images, as_inputs
from adalog.inputs.images import draw_indices
from adalog.model import QuantizedModel
from adalog.ranks import ALONE, Ranks


def quantize(
    model: nn.Module,
    images: "Images | Sequence[Tensor] | DataLoader[Tensor]",
    config: Config | None = None,
    *,
    within: nn.Module | None = None,
    partial: Path | None = None,
    seed: int = 0,
    jobs: int = 1,
    memory: int | None = None,
    sizes: Sizes = "fixed",
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> QuantizedModel:
    """Quantize a trained vision transformer, calibrated on a few unlabelled images.

    The model is not changed. A model in half precision is quantized in float32.

    Args:
        model: The model to quantize, in evaluation mode.
        images: Images (N, 3, H, W), normalised as the model expects; or a tuple of the model's inputs, (N, ...) each.
            N is at least `config.images_needed`. A random subset of that size is used: the first `config.images` of
            it calibrate, and stages that fit weights may use all of it. A list of images (3, H, W) is stacked, a list
            of batches is joined, and a DataLoader of tensors is read until there are enough images.
        config: The bits, quantizers and search. Default: `Config.preset("w4a4")`.
        within: A model that contains `model` and takes the images. Then `model` is calibrated on the inputs that it
            gets there, in all its calls, and the quantized model takes its place in `within`. `within` is called as
            `within(images)`; wrap a model that takes something else, such as a list of dicts.
        partial: A file that records finished searches, so that an interrupted call can continue. Remove it once the
            result is saved.
        seed: Seed of the random subset and of all random choices of the search.
        jobs: Number of sites that are searched at once, in threads. The result does not depend on it.
        memory: Bytes for operands and temporaries, on each rank, in addition to the model, the images and results.
            Default: 2 GiB, or a quarter of the memory of the GPU that holds the images.
        sizes: "fixed", or "free" to let the quantized model take images of other heights and widths.
        progress: Called as `progress(done, total, name)` whenever a site or step is done. A site with many values
            counts several times, so that `done / total` is about the share of the time.
        ranks: The processes that share the searches (`adalog.ranks.Ranks.of_environment()`). Each of them makes the
            same call, and all get the same model. Default: this process alone.

    Returns:
        The quantized model.

    Raises:
        CaptureError: If the model cannot be exported, or uses an operation that adalog does not support.
        CalibrationError: If there are too few images, if they or the values inside the model are not finite, or if
            `within` does not call the model with arguments that have one meaning for any number of images.
        ValueError: If `images` is none of these, if `within` does not contain the model, if a pattern of
            `config.pinned` matches no site, if the seed or the memory is not a whole number, or if the memory is too
            small.

    Warns:
        UserWarning: If all images hold one value, or if a convolution reads pixel values from 0 to 255 as they are.

    Examples:
        >>> model, images = adalog.demo.load_model(), adalog.demo.calibration_images()
        >>> qmodel = adalog.quantize(model, images, adalog.Config.preset("w4a4"))
        >>> size = qmodel.save("vit.w4a4.safetensors")  # bytes
    """
    config = config or Config.preset("w4a4")
    check_config(config)
    check_settings(seed, memory)
    resources = Resources(jobs, partial, progress, ranks)
    inputs = as_inputs(images, model if within is None else within, config.images_needed)
    tensors = as_batch(sample_images(inputs, config.images_needed, seed))
    sample = take(tensors, range(config.images))
    _check_alike(tensors, ranks)
    if within is None:
        calibration = Calibration(model, sample, unlabelled=tensors, seed=seed, memory=memory, sizes=sizes)
        return with_error(calibration.quantize(config, resources), calibration)
    call, calls = record_calls(model, within, sample)
    more = record_calls(model, within, tensors)[1] if _count(tensors) > config.images else calls
    batches, unlabelled = (tuple(value for inputs in calls_of for value in inputs) for calls_of in (calls, more))
    sizes = sizes if len(calls) == 1 else "free"
    part = as_function(float_module(model), call, len(calls))
    calibration = Calibration(part, batches, unlabelled=unlabelled, seed=seed, memory=memory, sizes=sizes)
    if len(calls) > 1:
        check_shareable(model, calibration.sites)
    # Each call, or each window of a call, counts as an image here.
    own = config.with_fitted_images(len(unlabelled[0])) if config.images_fitted else config
    result = with_error(calibration.quantize(own, resources), calibration)
    if len(calls) > 1:
        program, example = of_first_call(result.program, len(call.inputs)), result.example[: len(call.inputs)]
        result = QuantizedModel(replace(result.quantized, program=program, example=example))
    result.note(calibration=digest(sample), images=config.images)
    result.call = call
    exchange(model, within, result)
    return result


def with_error(result: QuantizedModel, calibration: Calibration) -> QuantizedModel:
    """Note the errors of the model's outputs in the provenance, with three digits; None if one is not finite."""
    errors = calibration.output_error(result.program).items()
    result.note(output_error={kind: float(f"{error:.3g}") if math.isfinite(error) else None for kind, error in errors})
    return result


def _check_alike(images: Sequence[object], ranks: Ranks) -> None:
    """Raise RankError if another process has other images, for example from a loader that shuffles them."""
    if ranks.world == 1:
        return
    own = digest([value for value in images if isinstance(value, Tensor)])
    if ranks.by_first(lambda: own) != own:
        raise RankError(
            f"process {ranks.rank} has other calibration images than process 0: give all processes the same images, in "
            "the same order"
        )


def _count(inputs: Sequence[object]) -> int:
    """Return the number of images in the inputs. Inputs that are not tensors are shared by all images."""
    return next((len(value) for value in inputs if isinstance(value, Tensor)), 0)


def sample_images(images: Images, count: int, seed: int) -> Images:
    """Return a random subset of `count` images, without replacement; the same images of every input.

    The subset depends on the seed and the number of images only, not on the state of global generators.
    """
    inputs = as_batch(images)
    available = _count(inputs)
    if available < count:
        raise CalibrationError(
            f"calibration takes {count} images, got {available}: give more, or set Config(images={available}), and use "
            f"Config.with_fitted_images({available}) if stages fit images"
        )
    sample = take(inputs, draw_indices(available, count, seed))
    return sample[0] if isinstance(images, Tensor) else sample
