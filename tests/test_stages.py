"""Stages: the images that they fit, and that what they made is stored."""

from dataclasses import replace

import pytest
import torch

import adalog
from adalog import Calibration, Correction, Reconstruction
from adalog.calibration import compensate, reconstruct, stages
from adalog.calibration.partial import assignment_json
from adalog.calibration.stages import with_mirror_images
from stored import deserialise, serialise

pytestmark = pytest.mark.usefixtures("captured_once")


def test_mirror_images_follow_their_images():
    images = torch.arange(8 * 3 * 2 * 4, dtype=torch.float32).view(8, 3, 2, 4)
    (both,) = with_mirror_images([images])
    assert torch.equal(both[:8], images)
    assert torch.equal(both[8:], torch.stack([images[..., 3 - column] for column in range(4)], dim=3))


@pytest.mark.parametrize("count", [1, 7, 8, 12, 16, 23])
@pytest.mark.parametrize("period", [compensate._HELD_OUT, reconstruct._HELD_OUT])
def test_an_image_and_its_mirror_image_are_held_out_together(count, period):
    """Every fourth or every eighth image is held out; no mirror image of one may be fitted."""
    images = torch.arange(1.0, 1 + 2 * count).view(count, 1, 1, 2)
    (both,) = with_mirror_images([images])
    held_out = {tuple(sorted(image.flatten().tolist())) for image in both[period - 1 :: period]}
    fitted = {
        tuple(sorted(image.flatten().tolist())) for number, image in enumerate(both) if number % period != period - 1
    }
    assert not held_out & fitted
    assert len(both) == count + count // 8 * 8


def test_inputs_other_than_one_batch_of_images_have_no_mirror_images():
    images, others = torch.rand(8, 3, 4, 4), torch.rand(8, 5)
    for inputs in ([images, others], [others], [torch.zeros(8, 3, 4, 4, dtype=torch.uint8)]):
        assert with_mirror_images(inputs) is inputs


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Correction(24, robust=False), Reconstruction(24, iterations=4, batch=8)])
def test_a_stage_is_stored_and_runs_in_integers(tiniest, pool, fast, stage):
    config = replace(fast, weight_bits=2, activation_bits=4, images=8, stages=(stage,))
    model, plain = (adalog.quantize(tiniest, pool, each) for each in (config, replace(config, stages=())))
    assert model.provenance["fitted_images"] == 24
    content = serialise(model)
    assert abs(len(content) - len(serialise(plain))) < 512  # what tells of the stage
    assert serialise(adalog.quantize(tiniest, pool, config)) == content
    stored = deserialise(content)
    assert stored.config == config
    with torch.no_grad():
        assert torch.equal(stored(pool[:4]), model(pool[:4]))
        integers = stored.compile("torch")(pool[:4])
    assert float((integers - model(pool[:4])).norm() / integers.norm()) < 0.05


@pytest.mark.parametrize(
    "stage",
    [
        Correction(images=16, robust=False),
        Reconstruction(images=16, iterations=3, rate=0.01, scale_rate=0.01, scope="model"),
    ],
    ids=["correction", "reconstruction"],
)
def test_fitting_mirror_images_is_fitting_images_that_include_them(tiniest, pool, fast, stage):
    images, calibrating = pool[8:24], pool[:8]
    calibration = Calibration(tiniest, calibrating, unlabelled=images)
    by_hand = Calibration(tiniest, calibrating, unlabelled=torch.cat([images, images.flip(3)]))

    def results(calibration, stage):
        config = replace(fast, weight_bits=3, activation_bits=3, stages=(stage,))
        return [assignment_json(assignment) for _, assignment in calibration.assign(config)]

    mirrored = results(calibration, replace(stage, mirrored=True))
    assert mirrored == results(by_hand, replace(stage, images=32))
    assert mirrored != results(calibration, stage)


@pytest.mark.parametrize(("robust", "left_out"), [(True, {8, 16}), (False, set())])
def test_a_correction_leaves_out_what_the_training_holds_out(tiniest, pool, fast, monkeypatch, robust, left_out):
    """Images are recognised by a number in their first value."""
    images, fitted = pool[:16].clone(), dict[str, set[int]]()
    images[:, 0, 0, 0] = torch.arange(1.0, 17)

    def record(name):
        def run(program, images, assigned, *others, **more):
            fitted[name] = {int(number) for number in images[0][:, 0, 0, 0]}
            return list(assigned)

        return run

    for name in ("correct", "reconstruct"):
        monkeypatch.setattr(stages, name, record(name))
    training = Reconstruction(images=16, scope="model", robust=robust)
    config = replace(fast, stages=(Correction(images=16), training))
    Calibration(tiniest, images[:8], unlabelled=images).assign(config)
    every = set(range(1, 17))
    assert fitted == {"correct": every - left_out, "reconstruct": every}
    Calibration(tiniest, images[:8], unlabelled=images).assign(replace(config, stages=(Correction(images=16),)))
    assert fitted["correct"] == every
