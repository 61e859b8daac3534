"""Run the stages that change the result of the search, one after another, in the order of `Config.stages`."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adalog.calibration.compensate import correct
from adalog.calibration.partial import Partial
from adalog.calibration.reconstruct import reconstruct, without_held_out
from adalog.calibration.schedule import Resources, assignments_codec
from adalog.calibration.shared import ProductFields
from adalog.choices import Correction, Fitting, Reconstruction
from adalog.config import LOSSES, Config, Stage
from adalog.errors import CalibrationError
from adalog.graph.capture import take
from adalog.graph.rewrite import Assigned, SiteGroup
from adalog.quantizers import Assignment

Judge = Callable[[SiteGroup, Assignment], Assignment]  # measures the SQNR of an assignment


def check_images(config: Config, unlabelled: Sequence[Tensor]) -> None:
    """Raise CalibrationError if there are fewer images than the stages fit."""
    expected, count = config.images_fitted, len(unlabelled[0])
    if count < expected:
        raise CalibrationError(
            f"the stages fit {expected} images, got {count}: give more, or fit fewer with "
            f"Config.with_fitted_images({count})"
        )


def with_mirror_images(images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return images (N, C, H, W) with their mirror images, left and right exchanged; other inputs stay as they are.

    Stages hold out every fourth or every eighth image. An image and its mirror image have the same number modulo 8, so
    they are held out together. Up to 7 of the last images have no mirror image for this reason.
    """
    if len(images) > 1 or images[0].ndim != 4 or not images[0].is_floating_point():
        return images
    paired, rest = images[0].tensor_split([len(images[0]) // 8 * 8])
    return [torch.cat([paired, paired.flip(-1), rest])]


def run_stages(
    stages: Sequence[Stage],
    unlabelled: Sequence[Tensor],
    assigned: Assigned,
    shared: ProductFields,
    judge: Judge,
    resources: Resources,
    partial: Partial | None,
) -> list[tuple[SiteGroup, Assignment]]:
    """Return the assignments after all of these stages.

    A stage before a robust training does not fit the images that the training holds out. The outputs on these images
    would then be better than on others, and the training would seem to make them worse.

    unlabelled: the images that stages may fit. partial: the opened file of the resources, for stages that fit images.
    Ranks share the steps of a reconstruction. The first rank runs all other stages for all ranks, because each of their
    steps starts from the results of the steps before it, and adding up sums over parts of the images would change their
    last bits.
    """
    program, images, seed, memory = shared.program, shared.images, shared.seed, shared.memory

    def run_stage(number: int, before: Assigned) -> list[Assignment]:
        stage = stages[number]
        if not isinstance(stage, Fitting):
            refined = stage.refine(program, images, before, shared.squared_gradients, seed, memory)
            pairs = zip(before, refined, strict=True)
            return [old if new is old else judge(group, new) for (group, old), (_, new) in pairs]
        fitted = images if stage.images is None else take(unlabelled, range(stage.images))
        if any(isinstance(later, Reconstruction) and later.robust for later in stages[number + 1 :]):
            fitted = without_held_out(fitted)
        if stage.mirrored:
            fitted = with_mirror_images(fitted)
        if isinstance(stage, Correction):
            alike = [value.shape[1:] for value in fitted] == [value.shape[1:] for value in images]
            weights = shared.row_weights(stage.importance) if alike else None  # positions are those of one size
            after = correct(
                program, fitted, before, stage, weights, memory=memory, partial=partial, progress=resources.report
            )
        else:
            after = reconstruct(
                program, fitted, before, stage, resources, losses=LOSSES, seed=seed, memory=memory, partial=partial
            )
        return [assignment for _, assignment in after]

    current, coded = list(assigned), assignments_codec(images[0].device)
    for number, stage in enumerate(stages):
        run = functools.partial(run_stage, number, current)
        results = run() if isinstance(stage, Reconstruction) else resources.ranks.by_first(run, coded)
        current = [(group, assignment) for (group, _), assignment in zip(assigned, results, strict=True)]
    return current
