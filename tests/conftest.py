"""What several test modules share: one thread, a tiny model, a search that takes no time, how hypothesis draws."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from adalog import Calibration, Config, Search
from adalog.inputs.demo.model import DemoViT

# Property tests draw the same examples everywhere, and a busy machine fails none of them.
settings.register_profile(
    "steady", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


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
    """Choices whose search is short; the quantizers it finds are still sane."""
    return Config(images=4, search=Search(rounds=1, steps=1))


@pytest.fixture(scope="session")
def calibration(tiny, images):
    return Calibration(tiny, images)


@pytest.fixture(scope="session")
def quantized(calibration, fast):
    return calibration.quantize(fast)
