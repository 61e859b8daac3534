"""Measure the sensitivity of a detector, part by part."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from adalog.calibration.operands import check_pinned
from adalog.calibration.schedule import SERIAL, Resources
from adalog.config import Config
from adalog.detection.detector import KINDS, Detector, kind_of
from adalog.detection.images import Batch
from adalog.detection.quantized import check_parts, config_of, part_calibration, record, within
from adalog.device import default_memory
from adalog.study.sensitivity import WIDTHS, Sensitivity, sensitivity


@torch.no_grad()
def sensitivities(
    detector: Detector,
    calibrating: Sequence[Batch],
    judging: Sequence[Batch],
    config: Config,
    widths: Iterable[int] = WIDTHS,
    resources: Resources = SERIAL,
    *,
    parts: Collection[str] = KINDS,
    seed: int = 0,
    memory: int | None = None,
) -> dict[str, Sensitivity]:
    """Return the loss of each part's output if one operand alone is quantized, for every operand of every part.

    The loss is the relative squared error of the part's own outputs, on the inputs that the float detector gives it.
    judging: the evaluation images. The other arguments are those of `quantize_detector` and `sensitivity`. Raises
    ValueError for an unknown kind of part, or a pin that matches no site.
    """
    check_parts(parts)
    (inputs, _), (judged, _) = record(detector, calibrating), record(detector, judging)
    calibrations = {
        name: part_calibration(part, name, inputs[name], inputs[name], seed=seed, memory=memory)
        for name, part in detector.parts.items()
        if kind_of(name) in parts and isinstance(part, nn.Module)
    }
    check_pinned(config, [site for calibration in calibrations.values() for site in calibration.sites])
    return {
        name: sensitivity(
            calibration,
            config_of(name, config, calibration.sites),
            judged[name],
            widths,
            within(name, resources),
            measure="relative squared error",
            memory=(default_memory(inputs[name][0].device) if memory is None else memory) // 2,
        )
        for name, calibration in calibrations.items()
    }
