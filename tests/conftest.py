"""What several test modules share: one thread, a tiny model, a search that takes no time, how hypothesis draws."""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings

from adalog import Calibration, Config, Search, library
from adalog.baselines import ScaleSearch
from adalog.calibration import calibration as calibration_module
from adalog.calibration.partial import fingerprint
from adalog.graph.capture import capture
from adalog.inputs.demo.model import DemoViT
from stored import serialise

# Exports make millions of objects that live on, so that Python's default collects garbage for a fifth of the time.
gc.set_threshold(100_000, 50, 100)

# Property tests draw the same examples everywhere, and a busy machine fails none of them.
settings.register_profile(
    "steady", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def reloaded():
    """Load the compiled library again when the test first uses it, and once more after the test."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


_CAPTURES = {}


@pytest.fixture(scope="module")
def captured_once():
    """Capture the same model once: for images of any size that takes seconds."""

    def remembered(model, example, sizes="fixed"):
        # A program takes any number of images.
        key = fingerprint((repr(model), [value.shape[1:] for value in example], sizes), model.state_dict().items())
        if key not in _CAPTURES:
            _CAPTURES[key] = capture(model, example, sizes)
        return _CAPTURES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_module, "capture", remembered)
        yield


@pytest.fixture(scope="session")
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def pool():
    """More images, for stages that fit some and are judged by others."""
    return torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def tiny():
    """The bundled architecture with two blocks and random weights."""
    torch.manual_seed(0)
    return DemoViT(width=32, depth=2, heads=2).eval()


@pytest.fixture(scope="session")
def tiniest():
    """The same with one block."""
    torch.manual_seed(0)
    return DemoViT(width=16, depth=1, heads=2).eval()


@pytest.fixture(scope="session")
def fast():
    """Choices whose search is short, without stages; the quantizers it finds are still sane."""
    return Config(images=4, search=Search(rounds=1, steps=1, compare_uniform=False), stages=())


@pytest.fixture(scope="session")
def calibration(tiny, images):
    return Calibration(tiny, images)


@pytest.fixture(scope="session")
def quantized(calibration, fast):
    return calibration.quantize(fast)


@pytest.fixture(scope="session")
def content(quantized):
    return serialise(quantized)


@pytest.fixture(scope="session")
def twin(calibration, fast):
    return calibration.quantize(replace(fast, post_gelu="twin"))


@pytest.fixture(scope="session")
def twin_content(twin):
    """With quantizers of every kind."""
    return serialise(twin)


@pytest.fixture(scope="session")
def split(calibration):
    search = ScaleSearch(metric="squared", candidates=6, rounds=1)
    return calibration.quantize(replace(Config.preset("w4a4", "ptq4vit"), images=4, search=search))


@pytest.fixture(scope="session")
def searched(calibration):
    return calibration.search(Config(3, 3, 3, images=4, search=Search(steps=2)), ["blocks.0.mlp.fc2"])[0]


@pytest.fixture(scope="session")
def drawn(searched):
    from experiments import landscape  # draws with matplotlib, which few modules need

    return landscape.landscapes(searched, Search(steps=2), size=6)
