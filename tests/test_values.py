"""The values of a program: as in one forward, within three limits of memory, block by block, and with gradients."""

import collections
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import zoo
from adalog import Calibration, Config
from adalog.baselines import BlockRefinement, Evolution, ScaleSearch, blockwise, evolution
from adalog.calibration.values import Values, held_bytes
from adalog.graph.capture import capture
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Ref
from adalog.graph.sites import find_blocks
from adalog.graph.stretches import cut
from adalog.graph.tracing import sizes, trace
from adalog.quantizers import UniformQuantizer
from test_observe import Held, computed
from toys import Toy, all_values

IMAGES = torch.randn(33, 3, 32, 32, generator=torch.Generator().manual_seed(5))
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("timm_swin", "timm_pvt", "hf_vit")]
NAMES = ["demo", *SLOW]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def size_of_all(program, blocks=None):
    """Bytes that the inputs of all blocks take, or those of some."""
    values = all_values(program, [IMAGES])
    return sum(values[block.value_in].numel() * 4 for block in blocks or find_blocks(program))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_by_itself_is_that_part_of_the_model(name):
    """Also in models whose blocks read sizes from before them; and the rest of the model may follow."""
    _, program = zoo.captured(name)
    found = find_blocks(program)
    assert len(found) > 2
    values = Values(program, [zoo.IMAGES], blocks=found)
    seen = all_values(program, [zoo.IMAGES])
    fixed = sizes(trace(program, [zoo.IMAGES]))
    with torch.no_grad():
        for block in found:
            given = values.images | values.of([block.value_in])
            alone = cut(program, given, Ref(block.value_out), fixed)
            assert torch.equal(alone.run(list(given.values())), seen[block.value_out])
            outside = {node.name for node in alone.nodes} - set(block.nodes)
            assert len(outside) < 40
            (output,) = program.output.values() if isinstance(program.output, dict) else [program.output]
            rest = cut(program, [block.value_in], output, fixed)
            assert rest.run(list(given.values())).equal(seen[output.name])
            if block.value_in not in program.inputs:
                given[program.inputs[0]] = torch.zeros_like(zoo.IMAGES)
                assert alone.run(list(given.values())).equal(seen[block.value_out])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.2, 0.6, 3])
def test_inputs_within_a_memory_are_those_of_all_images_at_once(name, share):
    """In any order, and whether the input of a block is held or not."""
    _, program = zoo.captured(name)
    expected, found = all_values(program, [IMAGES]), find_blocks(program)
    values = Values(program, [IMAGES], int(size_of_all(program) * share), found)
    assert values.batch < len(IMAGES) or share > 1
    numbers = range(len(found))
    for number in itertools.chain(numbers, reversed(numbers)):
        value, out = found[number].value_in, found[number].value_out
        close(values.of([value])[value], expected[value])
        batches = list(values.batches([out], value))
        assert (len(batches) > 1) is (values.batch < len(IMAGES))
        count = 0
        for batch in batches:
            assert batch.keys() == {*program.inputs, value, out}
            images = batch[program.inputs[0]]
            assert torch.equal(images, IMAGES[count : count + len(images)])
            each = len(expected[out]) // len(IMAGES)
            close(batch[out], expected[out][count * each : (count + len(images)) * each])
            count += len(images)
        assert count == len(IMAGES)


@pytest.mark.parametrize("share", [4, 0.7, 0.3])
def test_values_at_three_limits_of_memory(share):
    """All starts are held, or one at a time, or only a part of it: the values stay."""
    _, program = zoo.captured("demo")
    images = torch.cat([IMAGES] * 3)
    expected, found = all_values(program, [images]), find_blocks(program)
    memory = 3 * int(size_of_all(program) * share)
    sizes_of_starts = [4 * expected[block.value_in].numel() for block in found[1:]]
    assert (max(sizes_of_starts) <= held_bytes(memory)) is (share > 0.5)
    values = Values(program, [images], memory, found)
    with Held(images, *program.tensors.values()) as held:
        for block in found:
            collections.deque(values.batches([block.value_out], block.value_in), maxlen=0)
    assert held.peak <= memory
    for block in found:
        outputs = [batch[block.value_out] for batch in values.batches([block.value_out], block.value_in)]
        close(torch.cat(outputs), expected[block.value_out])
        close(values.of([block.value_in])[block.value_in], expected[block.value_in])


@pytest.mark.parametrize(("name", "share"), [("demo", 0.7), pytest.param("timm_swin", 0.9, marks=pytest.mark.slow)])
def test_blocks_in_order_cost_one_forward_and_no_more_memory_than_given(name, share, monkeypatch):
    _, program = zoo.captured(name)
    images = torch.cat([IMAGES] * 3)
    found = find_blocks(program)
    memory = 3 * int(size_of_all(program) * share)
    values = Values(program, [images], memory, found)
    counts = computed(monkeypatch)
    with Held(images, *program.tensors.values()) as held:
        for block in found:
            values.of([block.value_in])
    assert held.peak <= memory
    batches = -(-len(images) // values.batch)
    assert len(counts[found[-1].value_in]) <= batches + 3  # it is tried on two images first


@pytest.mark.parametrize("name", ["demo", pytest.param("timm_swin", marks=pytest.mark.slow)])
def test_the_first_images_are_held_where_not_all_fit(name, monkeypatch):
    """Reading the first images of each block, however often, costs one forward of those that fit."""
    _, program = zoo.captured(name)
    images = torch.cat([IMAGES] * 3)
    found, expected = find_blocks(program), all_values(program, [images])
    bytes_of = {block.value_in: 3 * size_of_all(program, [block]) for block in found[1:]}
    limit = 0.3 * max(bytes_of.values())
    values = Values(program, [images], int(limit * 8 / 3), found)
    run, compute = [], Values.compute

    def counting(self, given, names, *rest):
        run.extend((self.count_of(given), name) for name in names)
        return compute(self, given, names, *rest)

    for block in found:
        with monkeypatch.context() as patch, Held(images, *program.tensors.values()) as held:
            patch.setattr(Values, "compute", counting)
            for _ in range(3):
                seen = next(iter(values.batches((), block.value_in)))[block.value_in]
        assert held.peak <= limit * 8 / 3, block.value_in
        close(seen, expected[block.value_in][: len(seen)])
        close(
            torch.cat([each[block.value_in] for each in values.batches((), block.value_in)]), expected[block.value_in]
        )
    for value_in, size in bytes_of.items():
        made = sum(count for count, value in run if value == value_in)
        assert made <= min(1, limit / size) * len(images) + 4, value_in  # it is tried on two images, together and alone


def quantized_after(program, value, quantizer):
    """The program with a fake-quantize node behind a value."""
    end = [node.name for node in program.nodes].index(value) + 1
    quantized = Node("quantized", FAKE_QUANTIZE, (Ref(value), "quantizer"))
    readers = (node.rename({value: "quantized"}) for node in program.nodes[end:])
    return replace(program, nodes=(*program.nodes[:end], quantized, *readers), quantizers={"quantizer": quantizer})


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.6])
def test_a_program_may_change_block_by_block(share):
    _, program = zoo.captured("demo")
    found = find_blocks(program)
    memory = None if share is None else int(size_of_all(program) * share)
    inside = next(node.name for node in program.nodes if node.name in found[1].nodes and "linear" in node.op)
    changed = quantized_after(program, inside, UniformQuantizer(torch.tensor(0.3), torch.tensor(4.0), 3))
    before, after = all_values(program, [IMAGES]), all_values(changed, [IMAGES])
    values = Values(program, [IMAGES], memory, found)
    first, second = (block.value_in for block in found[1:3])
    values.of([first])
    close(values.of([second])[second], before[second])
    values.of([first])
    values.change(changed, first)
    close(values.of([first])[first], before[first])
    close(values.of([second])[second], after[second])
    assert not torch.allclose(after[second], before[second])
    close(Values(changed, [IMAGES], memory, found).of([second])[second], after[second])


def test_images_that_mix_go_at_once():
    layers = {"first": nn.Linear(32, 32), "second": nn.Linear(32, 32)}

    def mixing(m, x):
        y = m.first(x[:, 0])
        y = y - y.mean(0)
        y = y + (y @ y.transpose(-1, -2)).softmax(-1) @ y
        return y + m.second(y)

    program = capture(Toy(mixing, **layers).eval(), IMAGES)
    expected, found = all_values(program, [IMAGES]), find_blocks(program)
    assert len(found) > 1
    values = Values(program, [IMAGES], size_of_all(program) // 2, found)
    assert values.batch < len(IMAGES)
    for block in found:
        assert torch.equal(values.of([block.value_in])[block.value_in], expected[block.value_in])


@pytest.mark.slow
def test_gradients_go_through_a_block():
    """Those of its weights and its input are what they are in the whole model."""
    _, program = zoo.captured("timm_vit")
    found = find_blocks(program)
    values = Values(program, [IMAGES], size_of_all(program) // 2, found)
    inside = [name for node in program.nodes if node.name in found[2].nodes for name in node.refs()]
    weight = next(name for name in inside if name.endswith(".weight"))
    leaf = program.tensors[weight].clone().requires_grad_()
    start, end = found[2].value_in, found[2].value_out
    (batch, *_) = values.batches((), start)
    given = {name: value.clone().requires_grad_() for name, value in batch.items()}
    learning = replace(program, tensors={**program.tensors, weight: leaf})
    out = values.compute(given, [end], learning)[end]
    gradients = torch.autograd.grad(out.square().sum(), [leaf, given[start]])
    images, seen = IMAGES[: len(given[program.inputs[0]])].clone().requires_grad_(), {}
    learning.run([images], lambda node, args, result: seen.update({node.name: result}))
    expected = torch.autograd.grad(seen[end].square().sum(), [leaf, seen[start]])
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "choices"),
    [
        ("fq-vit", {"stages": (Evolution(passes=1, cycles=2),)}),
        (
            "apq-vit",
            {
                "stages": (BlockRefinement(candidates=3, probes=2, eliminated=0.5),),
                "search": ScaleSearch(candidates=4, rounds=1, probes=2),
            },
        ),
    ],
)
def test_refinement_within_a_memory_finds_scales_as_good(preset, choices):
    """Losses differ in rounding only, so all first steps are alike; where two are equal, another may win."""
    calibration = Calibration(zoo.captured("timm_vit")[0], zoo.IMAGES)
    config = replace(Config.preset("w3a4", preset), images=4, **choices)
    assigned = calibration.assign(replace(config, stages=()))
    gradients = {block.value_out: torch.ones(()) for block in find_blocks(calibration.program)}
    given = calibration.program, calibration.images, assigned, lambda probes: gradients, 0
    every, some = (config.stages[0].refine(*given, memory) for memory in (1 << 40, 100_000))
    alike = 0
    for (_, one), (_, other), (_, start) in zip(every, some, assigned, strict=True):
        pairs = ((one.left, other.left), (one.right, other.right))
        alike += all(a is b is None or torch.equal(a.scale, b.scale) for a, b in pairs)
        assert start.sqnr == other.sqnr
    assert alike > 0.7 * len(assigned)
    assert any(one is not start for (_, one), (_, start) in zip(some, assigned, strict=True))


@pytest.mark.parametrize("stage", [BlockRefinement(probes=1, candidates=2), Evolution(passes=1, cycles=1)])
def test_stages_keep_to_the_memory(tiniest, images, monkeypatch, stage):
    found = []

    class Watched(Values):
        def __init__(self, program, given, memory, blocks):
            found.append(memory)
            super().__init__(program, given, memory, blocks)

    for module in (blockwise, evolution):
        monkeypatch.setattr(module, "Values", Watched)
    config = replace(Config.preset("w4a4", "minmax"), images=4, stages=(stage,))
    Calibration(tiniest, images[:4], memory=1 << 26).quantize(config)
    assert set(found) == {1 << 25}
