"""What the package asks of a device, and on an emulated one: that it neither mixes devices nor waits for them."""

import operator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu

import emulated
from adalog import Calibration, Correction, Search, device, load
from adalog.calibration import calibration
from adalog.calibration.values import BATCH, Values
from adalog.graph.capture import capture
from adalog.quantizers import LogFormat, QuantizedTensor, UniformFormat
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.study.evaluate import batch_on, predict
from strategies import R, normal

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """A graphics card with 10 GiB free, of which PyTorch holds 2 GiB and uses 1."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (9 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


_CONV, _MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul
_NEW = hasattr(_CONV, "conv")
_CONV = _CONV.conv if _NEW else _CONV
_NAME, FAST, FULL = ("fp32_precision", "tf32", "ieee") if _NEW else ("allow_tf32", True, False)


def precision():
    """The settings of convolutions and products at this moment."""
    return getattr(_CONV, _NAME), getattr(_MATMUL, _NAME)


@pytest.fixture
def tf32():
    """A caller who chose TF32 for both."""
    before = precision()
    for of in (_CONV, _MATMUL):
        setattr(of, _NAME, FAST)
    yield
    for of, chosen in zip((_CONV, _MATMUL), before, strict=True):
        setattr(of, _NAME, chosen)


def test_convolutions_and_products_are_not_in_tf32_and_the_callers_choice_comes_back(tf32):
    """Whatever the caller chose, and whatever is raised inside."""
    with suppress(ZeroDivisionError), device.full_float32():
        assert precision() == (FULL, FULL)
        raise ZeroDivisionError
    assert precision() == (FAST, FAST)


def test_settings_change_on_accelerators_only(tf32):
    for place, expected in ((None, FAST), (CPU, FAST), (torch.device("meta"), FAST), (CUDA, FULL)):
        with device.full_float32_on(place):
            assert precision() == (expected, expected)


ENTRIES = ("even_out_values", "run_searches", "run_stages", "output_errors", "rewrite")


def test_calibration_never_computes_in_tf32(tf32, tiniest, images, fast, monkeypatch):
    """Neither in searches, stages and judges, nor in the evening out of values."""
    found = {}

    def recorded(name, function):
        def called(*args, **kwargs):
            found.setdefault(name, set()).add(precision())
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr(calibration, "full_float32_on", lambda _: device.full_float32())  # as on an accelerator
    for name in ENTRIES:
        monkeypatch.setattr(calibration, name, recorded(name, getattr(calibration, name)))
    methods = {"search_product": Search, "output_power": Product}
    for name, of in methods.items():
        monkeypatch.setattr(of, name, recorded(name, getattr(of, name)))
    made = Calibration(tiniest, images)
    config = replace(fast, stages=(Correction(images=4),))
    made.output_error(made.quantize(config).program)
    made.evaluate(next(made.iter_search(fast)), fast)
    assert found == {name: {(FULL, FULL)} for name in (*ENTRIES, *methods)}
    assert precision() == (FAST, FAST)


def test_a_quantized_model_never_computes_in_tf32(tf32, tiniest, images, fast, monkeypatch):
    """Neither by fake quantization, nor in the products of whole numbers that stand for integers."""
    model = Calibration(tiniest, images).quantize(fast)
    ways = [model, model.compile("torch"), model.compile("reference")]
    model(images)  # the sizes are checked once, without data
    found = []

    def stopped(*_):
        """Note the precision when the first operation gets its arguments."""
        found.append(precision())
        raise torch.OutOfMemoryError

    monkeypatch.setattr("adalog.graph.program.evaluate", stopped)
    with emulated.device() as put:
        for run in ways:
            with pytest.raises(torch.OutOfMemoryError):
                run(put(images))
    assert found == [(FULL, FULL)] * 3
    assert precision() == (FAST, FAST)


def test_no_network_is_evaluated_in_tf32(tf32):
    """The float network neither, whose layers are not adalog's."""
    found = []

    def network(images):
        found.append((precision(), len(images)))
        return images.flatten(1)[:, :2]

    images = torch.ones(50, 3, 2, 2)
    with emulated.device() as put:
        here, there = predict(network, images), predict(network, put(images))
    assert torch.equal(here, there)
    assert found == [((each, each), count) for each in (FAST, FULL) for count in (20, 20, 10)]


def test_quantized_networks_are_evaluated_on_as_many_images_as_memory_holds(tiniest, images, fast):
    model = Calibration(tiniest, images).quantize(fast)
    assert batch_on(None, [model]) == batch_on("cpu", [model]) == batch_on(emulated.DEVICE, [tiniest]) == 20
    assert batch_on(emulated.DEVICE, [model, tiniest]) == batch_on(emulated.DEVICE, [model.compile("torch")]) == 256


def test_images_run_together_as_far_as_memory_goes(cuda):
    assert device.images_at_once(CPU, 1 << 30, 20) == 20
    for bytes_of_image, count in ((1, 256), (1 << 24, 80), (1 << 40, 1)):  # an eighth of 10 GiB holds 80
        assert device.images_at_once(CUDA, bytes_of_image, 20) == count


def test_blocks_run_more_images_together_on_an_accelerator(tiniest, images):
    program, many = capture(tiniest, (images,)), images[:1].expand(70, -1, -1, -1)
    assert Values(program, [many]).batch == BATCH
    with emulated.device() as put:
        there = Values(program.map_tensors(put), [put(many)])
        assert there.batch == 70
        assert Values(program.map_tensors(put), [put(many)], like=there).batch == 70


def test_devices_compute_as_much_as_their_memory_allows(cuda, monkeypatch):
    assert (device.usable_memory(CPU), device.chunk_elements(CPU)) == (2 << 30, 1 << 20)
    assert device.usable_memory(CUDA) == 10 << 30
    assert device.chunk_elements(CUDA) == 10 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 << 30, 80 << 30))
    assert device.chunk_elements(CUDA) == 1 << 26
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 16 << 30))
    assert device.usable_memory(CUDA) == 1 << 30
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 30)
    assert device.chunk_elements(CUDA) == 1 << 20  # never fewer than on a processor


def test_the_default_memory_is_a_quarter_of_a_graphics_card(monkeypatch):
    assert device.default_memory(CPU) == 2 << 30
    for total, expected in ((80 << 30, 20 << 30), (4 << 30, 2 << 30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, total=total: (0, total))
        assert device.default_memory(CUDA) == expected


@pytest.mark.parametrize(("generation", "able"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_graphics_cards_multiply_bfloat16_from_one_generation_on(monkeypatch, generation, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: generation)
    assert device.multiplies_bfloat16(CUDA) is able


def test_a_processor_multiplies_bfloat16_where_pytorch_says_so(monkeypatch):
    for told in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda told=told: {"avx512_bf16": told}, raising=False)
        assert device.multiplies_bfloat16(CPU) is told
    assert not device.multiplies_bfloat16(emulated.DEVICE)


@pytest.mark.parametrize(
    "read",
    [
        float, int, bool, operator.index, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu,
        torch.Tensor.nonzero, torch.Tensor.unique, lambda x: x.to("cpu"), lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
    ],
)  # fmt: skip
def test_reading_values_waits(read):
    with emulated.device() as put, emulated.counted() as counts:
        x = put(torch.ones((), dtype=torch.int64))
        assert (counts["wait"], counts["copy"]) == (0, 1)
        read(x)
    assert (counts["wait"], counts["copy"]) == (1, 1)


def test_devices_do_not_mix():
    with emulated.device() as put, emulated.counted() as counts:
        x = put(torch.arange(3.0))
        for mixed in (lambda: x + torch.ones(3), lambda: torch.ones(3) + x, lambda: torch.stack([x, torch.ones(3)])):
            with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
                mixed()
        assert (x + torch.tensor(1.0)).device == emulated.DEVICE  # without dimensions they do, as on CUDA
        made = torch.arange(3, device=x.device) * torch.ones_like(x) @ x.new_zeros(3)
    assert made.device == emulated.DEVICE
    assert (counts["wait"], counts["copy"]) == (0, 1)


def test_what_is_computed_is_what_the_processor_computes():
    values = normal(4, 5)
    with emulated.device() as put:
        x = put(values)
        view = x[1:3, None]
        view.add_(1)
        assert x.add_(1) is x
        found = torch.cat([x.softmax(-1), x.mT.sort(0).values.mT]).cpu()
    values[1:3] += 1
    values += 1
    assert torch.equal(found, torch.cat([values.softmax(-1), values.mT.sort(0).values.mT]))


def after_gelu():
    form = LogFormat(4, r=R, offset=0.1699712)
    x, weight = normal(256, 48, seed=1).float(), normal(24, 48, seed=2).float()
    return Operand(gelu(x * 2), form), Operand(weight, UniformFormat(4, own_dims=(0,)))


def after_softmax():
    scores, value = normal(4, 2, 17, 17, seed=1).float(), normal(4, 2, 8, 17, seed=2).float()
    return Operand((scores * 3).softmax(-1), LogFormat(4, r=R)), Operand(value, UniformFormat(4, own_dims=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize("problem", [after_softmax, after_gelu])
def test_a_search_hardly_waits(problem):
    left, right = problem()
    here = Search().search_product(Product("linear", left, right))
    with emulated.device() as put:
        left, right = (replace(operand, values=put(operand.values)) for operand in (left, right))
        with emulated.counted() as counts:
            there = Search().search_product(Product("linear", left, right))
        weight = there.right.quantizer if isinstance(there.right, QuantizedTensor) else there.right
        assert there.left.scale.device == weight.scale.device == emulated.DEVICE
    assert there.sqnr == pytest.approx(here.sqnr, abs=0.01)  # [dB]; sums are in another order than the library's
    assert counts["wait"] <= 100
    assert counts["copy"] <= 100


def test_a_warm_model_neither_waits_nor_copies(tiniest, images, fast, tmp_path):
    Calibration(tiniest, images).quantize(fast).save(tmp_path / "model")
    model = load(tmp_path / "model")
    here = model(images)
    with emulated.device() as put, torch.no_grad():
        model._apply(put)
        given = put(images)
        model(given)
        with emulated.counted() as counts:
            there = model(given)
        assert torch.equal(there.cpu(), here)
    assert counts == {}, counts.told
