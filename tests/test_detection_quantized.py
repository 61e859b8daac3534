"""A detector quantized part by part, saved as one file, loaded, and run in integers."""

import json
import math
from dataclasses import replace

import pytest
import torch

from adalog import ArtifactError, CalibrationError, Config, QuantizedModel, Search, library
from adalog.calibration import calibration
from adalog.detection import quantized as whole
from adalog.detection.detector import Detector
from adalog.detection.sensitivity import sensitivities
from adalog.graph.rewrite import rewrite
from problems_detector import SETTINGS, make, pictures
from stored import serialise

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("captured_once")]  # a Swin of any size takes seconds to capture
EXECUTORS = ("reference", "torch", *(["native"] if library.levels() else []))
CONFIG = replace(Config.preset("w8a8"), images=3, search=Search(init=(8, 4), parents=4, rounds=1, steps=1))


def quantize(detector, given, config, **choices):
    (found,) = whole.quantize_detector(detector, given, [config], **choices)
    return found


def batches():
    return [SETTINGS.resizing.batch(pictures(2), (96, 96)), SETTINGS.resizing.batch(pictures()[2:], (96, 96))]


@pytest.fixture(scope="module")
def quantized(captured_once):
    return quantize(make(), batches(), CONFIG)


def assert_stored_whole(detector, file):
    """What is saved and loaded finds the same objects."""
    whole.save(detector, file)
    loaded = whole.load(file)
    for batch in (batches()[0], SETTINGS.resizing.batch(pictures(1), (96, 128))):
        for one, other in zip(detector(batch), loaded(batch), strict=True):
            assert torch.equal(one.boxes, other.boxes)
            assert torch.equal(one.masks, other.masks)
    return loaded


def test_every_part_is_quantized(quantized):
    floats = {name: part.float_sites() for name, part in quantized.parts.items()}
    assert floats == {"backbone": [], "neck": [], "rpn": [], "box": [], "mask": ["upsample"]}
    reason = "stays float: conv_transpose2d is neither a linear, a 2-D convolution nor a matrix product"
    assert quantized.parts["mask"].refusals == {"upsample.conv_transpose2d": reason}
    assert len(quantized.parts["rpn"].program.weights) == 3
    assert quantized.parts["backbone"].provenance["images"] == 3


def test_heads_calibrate_on_the_first_images_alone():
    """Whatever more of them the stages may fit."""
    detector, few, many = make(), batches()[:1], batches()
    config = replace(CONFIG, images=2)
    one, other = (quantize(detector, given, config, parts=("box",)) for given in (few, many))
    quantizers = [each.parts["box"].program.quantizers.items() for each in (one, other)]
    first, second = ({name: value.scale.tolist() for name, value in items} for items in quantizers)
    assert first == second
    assert one.parts["box"].provenance == other.parts["box"].provenance


def test_only_the_image_has_the_bits_of_images(quantized):
    low = quantize(make(), batches(), replace(Config.preset("w4a4"), images=3, search=CONFIG.search))
    bits = {name: {each.bits for each in part.program.quantizers.values()} for name, part in low.parts.items()}
    assert bits == {"backbone": {4, 8}, "neck": {4}, "rpn": {4}, "box": {4}, "mask": {4}}


def test_a_pin_applies_to_the_parts_that_have_its_sites():
    pinned = replace(CONFIG, pinned=(("lateral.0", "w4"), ("logits", 6)))
    parts = quantize(make(), batches(), pinned, parts=("neck", "box", "mask")).parts
    bits = {f"{name}.{row.site}": row.right[0] for name in ("neck", "box", "mask") for row in parts[name].ledger}
    assert (bits["neck.lateral.0"], bits["neck.lateral.1"], bits["box.linears.0"]) == ("4", "8", "8")
    assert bits["box.logits"] == bits["mask.logits"] == "6"
    with pytest.raises(ValueError, match=r"no site's name matches 'lateral\.0'"):
        quantize(make(), batches(), pinned, parts=("box",))
    with pytest.raises(ValueError, match=r"no site's name matches 'lateral\.0'"):
        sensitivities(make(), batches(), batches(), pinned, [4], parts=("box",))


def values(output):
    return torch.cat([value.flatten() for value in ([output] if isinstance(output, torch.Tensor) else output)])


def distances(one, other):
    """How far apart what each part puts out is, given what `one` gives it: by name."""
    found, batch = {}, batches()[0]

    def both(name):
        def call(*tensors):
            wanted = one.parts[name](*tensors)
            found[name] = float((values(other.parts[name](*tensors)) - values(wanted)).norm() / values(wanted).norm())
            return wanted

        return call

    detections = Detector({name: both(name) for name in one.parts}, one.settings)(batch)
    assert all(len(each) for each in detections)
    assert len(found) == 5
    return found


@torch.no_grad()
def test_each_part_is_about_what_it_was(quantized):
    assert max(distances(make(), quantized).values()) < 0.1


def test_a_saved_detector_is_the_same(quantized, tmp_path):
    loaded = assert_stored_whole(quantized, tmp_path / "detector")
    assert whole.is_detector((tmp_path / "detector").read_bytes())
    assert loaded.settings == quantized.settings
    assert all(isinstance(part, QuantizedModel) for part in loaded.parts.values())
    assert whole.save(loaded, tmp_path / "again") == (tmp_path / "detector").stat().st_size
    assert (tmp_path / "again").read_bytes() == (tmp_path / "detector").read_bytes()


SIZES = [(96, 96), (128, 96), (112, 128)]


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
def test_programs_are_their_parts_at_every_size(size):
    parts, maps = make().parts, SETTINGS.resizing.batch(pictures(2), (96, 96)).images
    images = torch.nn.functional.interpolate(maps, size)
    for name in ("backbone", "neck", "rpn"):
        given, others = (value if isinstance(value, tuple) else (value,) for value in (maps, images))
        program = calibration.capture(parts[name], given, "free")
        wanted, found = parts[name](*others), program.run(others)
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            assert float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())
        maps, images = parts[name](*given), wanted


@torch.no_grad()
@pytest.mark.skipif(not library.levels(), reason="installed without a compiler")
@pytest.mark.parametrize("size", SIZES)
def test_native_is_the_reference_at_every_size(quantized, size):
    images = SETTINGS.resizing.batch(pictures(2), size).images
    part = quantized.parts["backbone"]
    for one, other in zip(part.compile("native")(images), part.compile("reference")(images), strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01  # a code may be rounded the other way


@torch.no_grad()
@pytest.mark.parametrize("executor", EXECUTORS)
def test_it_runs_in_integers(executor, quantized):
    found = distances(quantized, whole.compile_parts(quantized, executor))
    assert max(found.values()) < 0.02  # a code may be rounded the other way


def test_chosen_parts_alone_are_quantized(tmp_path):
    found = quantize(make(), batches(), CONFIG, parts=["backbone", "rpn"])
    assert [name for name, part in found.parts.items() if part.program.weights] == ["backbone", "rpn"]
    assert found.parts["box"].refusals["logits"] == "stays float: its part was not chosen"
    assert_stored_whole(found, tmp_path / "detector")
    for wrong in ([], ["backbone", "tail"]):
        with pytest.raises(ValueError, match="choose from backbone, neck, rpn, box, mask"):
            quantize(make(), batches(), CONFIG, parts=wrong)


def test_each_operand_is_judged_by_its_part():
    """Against whole runs of each part, of which one operand alone is quantized, in float64."""
    detector, config, judging = make(), Config.preset("w4a4", "minmax"), [SETTINGS.resizing.batch(pictures(5)[3:])]
    found = sensitivities(detector, batches(), judging, config, [4], parts=("rpn", "box"))
    assert list(found) == ["rpn", "box"]
    (inputs, _), (judged, _) = whole.record(detector, batches()), whole.record(detector, judging)
    for name, part in found.items():
        assert part.measure == "relative squared error"
        calibration = whole.part_calibration(
            detector.parts[name], name, inputs[name], inputs[name], seed=0, memory=1 << 30
        )
        assigned = calibration.assign(whole.config_of(name, config, calibration.sites))
        row = next(row for row in part.rows if row.operand == "weight")
        (alone,) = ([(group, replace(each, left=None))] for group, each in assigned if group.name == row.unit)
        with torch.no_grad():
            expected = calibration.program.run(judged[name])
            output = rewrite(calibration.program, alone).run(judged[name])
        pairs = [[value.double() for value in each] for each in zip(expected, output, strict=True)]
        errors = [((one - other).square().sum() / one.square().sum()).item() for one, other in pairs]
        assert row.loss == pytest.approx(sum(errors) / len(errors), rel=1e-3)


def test_heads_are_calibrated_where_nothing_is_found():
    detector = Detector(make().parts, replace(SETTINGS, score=0.999))
    found = quantize(detector, batches(), replace(Config.preset("w8a8", "minmax"), images=3))
    assert found.parts["mask"].program.weights
    assert found.settings.score == 0.999
    blind = make()
    blind.parts["rpn"].scores.bias.data[:] = math.nan
    with pytest.raises(CalibrationError, match="finds no region in these images, so box has no inputs"):
        quantize(blind, batches(), CONFIG)


def test_a_cascade(tmp_path):
    found = quantize(make(3), batches(), CONFIG)
    assert list(found.parts)[3:] == ["box_0", "box_1", "box_2", "mask_0", "mask_1", "mask_2"]
    assert_stored_whole(found, tmp_path / "detector")


@pytest.fixture
def stored(quantized, tmp_path):
    """The path of a saved detector."""
    whole.save(quantized, tmp_path / "detector")
    return tmp_path / "detector"


def changed(content, change):
    """The file with its JSON changed in place."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    told = json.loads(header["__metadata__"][whole.KEY])
    change(told)
    header["__metadata__"][whole.KEY] = json.dumps(told)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told["settings"].update(score=math.inf), "Infinity is not a number of JSON"),
        (lambda told: told["settings"].update(stages=2), "stages = 2 is not a valid setting"),
        (lambda told: told["settings"].update(stages=3), "needs the parts backbone, neck, rpn, box_0"),
        (lambda told: told["settings"].update(proposals=10**9), "proposals = 1000000000 is not a valid setting"),
        (lambda told: told["settings"].update(names=[]), "names of a detector's classes"),
        (lambda told: told["settings"]["resizing"].update(divisor=0), "divisor = 0"),
        (lambda told: told["settings"]["resizing"].update(std=[0, 1, 1]), "positive std"),
        (lambda told: told["settings"].pop("mask"), "the settings of a detector must be"),
        (lambda told: told["parts"].pop(), "its parts do not match its header"),
        (lambda told: told.update(format=99), "its format is not 1"),
        (lambda told: told["settings"].update(names=["a\x1b[2J", *told["settings"]["names"][1:]]), "do not print"),
        (lambda told: told["settings"].update(names=["x" * 2**23]), "more than 8388608"),
    ],
)
def test_files_that_are_no_detector(stored, change, words):
    stored.write_bytes(changed(stored.read_bytes(), change))
    with pytest.raises(ArtifactError, match=words):
        whole.load(stored)


def test_a_setting_that_is_there_twice(stored):
    content = stored.read_bytes()
    twice = content.replace(b'\\"format\\":1', b'\\"format\\":1,\\"format\\":1', 1)
    length = int.from_bytes(content[:8], "little") + len(twice) - len(content)
    stored.write_bytes(length.to_bytes(8, "little") + twice[8:])
    with pytest.raises(ArtifactError, match="a JSON object has a key twice"):
        whole.load(stored)


def test_damaged_files(quantized, stored):
    content, good = serialise(quantized.parts["box"]), stored.read_bytes()
    for damaged in (good[:-20], good[:100], b"", b"x" * 64, content):
        stored.write_bytes(damaged)
        with pytest.raises(ArtifactError, match="is damaged, or not a detector"):
            whole.load(stored)
    assert not whole.is_detector(content)
