"""Reconstruction by gradients: the codes, biases and scales of one block after another are trained.

A block is trained to put out what it does in the float network (BRECQ, Li et al., ICLR 2021) from the inputs that it
gets once all blocks before it are quantized and trained; of these inputs, and of the values that its quantizers see, a
share may stay as the float network has them, drawn anew in each step (QDrop, Wei et al., ICLR 2022).

A weight's codes are either the float ones rounded up or down (AdaRound, Nagel et al., ICML 2020) or latent values that
are rounded straight through. Scales, of weights with latent codes and of activations, are trained as in LSQ (Esser et
al., ICLR 2020), through their logarithm, so that they stay positive.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adalog.calibration.batches import Chunk
from adalog.calibration.block_errors import RENEWALS, BlockOutput, LowRankFisher, block_error, picked
from adalog.calibration.blocks import Blocks
from adalog.calibration.compensate import with_codes
from adalog.calibration.partial import Partial
from adalog.calibration.schedule import Progress
from adalog.choices import Reconstruction
from adalog.device import multiplies_bfloat16
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, refs_of
from adalog.graph.rewrite import Assigned, SiteGroup, absorbs_offset, rewritten
from adalog.graph.sites import find_blocks
from adalog.quantizers import Assignment, QuantizedTensor, Quantizer, UniformQuantizer, round_ste

# Every n-th image is held out of the training of a block and judges its states; with fewer images none is held out.
_HELD_OUT = 8
# How often a block's state is judged on the images held out.
_CHECKS = 8
# AdaRound's rectified sigmoid reaches beyond 0 and 1 by this much.
_STRETCH = 0.1
# Latent values begin at most this far from the middle of their codes' bins. Codes that a correction chose are often not
# the nearest to the float weight; at the edge of their bins the first steps would undo the correction.
_NEAR = 0.25
# The exponent of AdaRound's regulariser falls from the first to the second number after the first fifth of the steps.
_ANNEALING = (20.0, 2.0)
_WARM_UP = 0.2


def rectified_sigmoid(v: Tensor) -> Tensor:
    """AdaRound's h(V), from 0 to 1: a sigmoid stretched by 0.1 to either side and clipped (Eq. 23 there)."""
    return (v.sigmoid() * (1 + 2 * _STRETCH) - _STRETCH).clamp(0, 1)


def rounding_regulariser(h: Tensor, exponent: float) -> Tensor:
    """AdaRound's 1 - |2 h - 1|^exponent, which is 0 where h is 0 or 1 (Eq. 24 there)."""
    return 1 - (2 * h - 1).abs().pow(exponent)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear with its product in bfloat16, and those of its gradients."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    product = F.linear(x.bfloat16(), weight.bfloat16()).float()
    return product if bias is None else product + bias


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """A product of two values in bfloat16, and those of its gradients."""
    return left @ right if left.dtype != torch.float32 else (left.bfloat16() @ right.bfloat16()).float()


# Factors and products are rounded by 2**-9 at most, far less than by the bits that are trained; steps are small, and
# what they lead to is judged in float32.
_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
}


class _Rounding:
    """A weight's codes as something to train: latent values in units of codes.

    They begin in the bins of the codes that the weight has, as near to the float weight as these allow; those that are
    rounded straight through begin away from the edges of the bins.
    """

    def __init__(self, stored: QuantizedTensor, weight: Tensor, choices: Reconstruction):
        quantizer, codes = stored.quantizer, stored.codes.to(weight.dtype)
        self._top = quantizer.code_count - 1
        self._quantizer = quantizer
        # Codes are whole steps of the scale apart, so a constant leads from a code to its integer.
        place = weight.reshape(codes.shape) / quantizer.scale + (codes - quantizer.integer(stored.codes))
        self._up_or_down = choices.weights == "adaround"
        inside = 0.5 - 2**-10 if self._up_or_down else _NEAR
        place = torch.minimum(torch.maximum(place, codes - inside), codes + inside).clamp(0, self._top)
        if self._up_or_down:
            self._floor = place.floor().clamp(max=self._top - 1)
            share = ((place - self._floor).clamp(0.01, 0.99) + _STRETCH) / (1 + 2 * _STRETCH)
            self.latent = torch.logit(share).requires_grad_()
            self.log_scale = None
        else:
            self.latent = place.clone().requires_grad_()
            self.log_scale = torch.zeros_like(quantizer.scale).requires_grad_()

    def soft(self) -> QuantizedTensor:
        """The weight to train with: its codes are not whole numbers where they are rounded up or down."""
        if self.log_scale is None:
            return QuantizedTensor(self._floor + rectified_sigmoid(self.latent), self._quantizer)
        return QuantizedTensor(round_ste(self.latent), self._scaled())

    @torch.no_grad()
    def hard(self) -> QuantizedTensor:
        """The weight as it is stored."""
        if self.log_scale is None:
            return QuantizedTensor((self._floor + (self.latent > 0)).to(torch.uint8), self._quantizer)
        return QuantizedTensor(self.latent.round().to(torch.uint8), self._scaled())

    def _scaled(self) -> Quantizer:
        assert self.log_scale is not None
        return self._quantizer.scaled(self.log_scale.exp())

    def regulariser(self, exponent: float) -> Tensor:
        """The mean of AdaRound's regulariser over the values."""
        return rounding_regulariser(rectified_sigmoid(self.latent), exponent).mean()

    @torch.no_grad()
    def confine(self) -> None:
        """Keep latent codes among the codes, since no gradient brings back those that leave."""
        if self.log_scale is not None:
            self.latent.clamp_(0, self._top)


class _Levels:
    """The scale of an activation's quantizer, and the zero point of a uniform one, as something to train."""

    def __init__(self, quantizer: Quantizer):
        self._quantizer = quantizer
        self.log_scale = torch.zeros_like(quantizer.scale).requires_grad_()
        self.moved = (
            torch.zeros_like(quantizer.scale).requires_grad_() if isinstance(quantizer, UniformQuantizer) else None
        )

    def soft(self) -> Quantizer:
        found = replace(self._quantizer, scale=self._quantizer.scale * self.log_scale.exp())  # type: ignore[type-var]
        if self.moved is None or not isinstance(found, UniformQuantizer):
            return found
        return replace(found, zero_point=round_ste(found.zero_point + self.moved).clamp(0, 2**found.bits - 1))

    @torch.no_grad()
    def hard(self) -> Quantizer:
        return self.soft()


class _Group:
    """A group of sites, with the parts of its assignment that are trained."""

    def __init__(
        self, group: SiteGroup, start: Assignment, program: Program, quantized: Program, choices: Reconstruction
    ):
        """quantized: the program rewritten, which holds the biases that the sites have in it."""
        self.group, self._start = group, start
        self._left = _Levels(start.left) if choices.scales and start.left is not None else None
        self._right: _Levels | _Rounding | None = None
        self._bias: Tensor | None = None
        self._now: Tensor | None = None
        right = start.right
        if right is None:
            return
        if group.first.role in ("qk", "av"):
            assert isinstance(right, Quantizer)
            self._right = _Levels(right) if choices.scales else None
            return
        weight = torch.cat([program.tensors[site.right].flatten(1) for site in group.sites])
        if start.fold is not None:
            weight = start.fold.weight(weight)
        stored = with_codes(right, weight)
        self._right = _Rounding(stored, weight, choices)
        if choices.biases or start.bias is not None:
            nodes = {node.name: node for node in quantized.nodes}
            self._now = torch.cat([_bias_of(nodes[site.node.name], quantized) for site in group.sites])
            self._offset = start.left.absorbed()[0] if start.left is not None and absorbs_offset(group.first) else 0.0
            self._sums = stored.dequantize().reshape(weight.shape).sum(1)
        if choices.biases:
            self._unit = weight.square().sum(1).sqrt()
            self._bias = torch.zeros_like(self._unit).requires_grad_()

    def trained(self) -> dict[str, list[Tensor]]:
        """The tensors to train, by the kind that decides their learning rate."""
        found: dict[str, list[Tensor]] = {"codes": [], "scales": [], "biases": []}
        for side in (self._left, self._right):
            if isinstance(side, _Rounding):
                found["codes"].append(side.latent)
                found["scales"] += [] if side.log_scale is None else [side.log_scale]
            elif side is not None:
                found["scales"].append(side.log_scale)
                found["codes"] += [] if side.moved is None else [side.moved]
        found["biases"] += [] if self._bias is None else [self._bias]
        return found

    def soft(self) -> Assignment:
        """The assignment to train with."""
        return self._with(lambda side: side.soft())

    @torch.no_grad()
    def hard(self) -> Assignment:
        """The assignment as it is stored."""
        return self._with(lambda side: side.hard())

    def _with(self, made: Callable[[Any], Any]) -> Assignment:
        left = self._start.left if self._left is None else made(self._left)
        right = self._start.right if self._right is None else made(self._right)
        found = replace(self._start, left=left, right=right)
        if self._now is None:
            return found
        bias = self._now if self._bias is None else self._now + self._bias * self._unit
        if self._offset:  # the bias follows the weight that meets the lifted input, as in Eq. 15
            assert isinstance(right, QuantizedTensor)
            bias = bias - self._offset * (right.dequantize().reshape(len(bias), -1).sum(1) - self._sums)
        return replace(found, bias=bias)

    def regulariser(self, exponent: float) -> Tensor | float:
        return self._right.regulariser(exponent) if isinstance(self._right, _Rounding) else 0.0

    def confine(self) -> None:
        if isinstance(self._right, _Rounding):
            self._right.confine()


def _bias_of(node: Node, program: Program) -> Tensor:
    """The bias of a linear or convolution: (O,), zeros where it has none."""
    bias = node.args[2] if len(node.args) > 2 else None
    weight = program.tensors[node.args[1].name]
    return weight.new_zeros(len(weight)) if bias is None else program.tensors[bias.name]


def reconstructed(
    program: Program,
    images: Sequence[Tensor],
    assigned: Assigned,
    choices: Reconstruction,
    *,
    seed: int = 0,
    memory: int | None = None,
    partial: Partial | None = None,
    progress: Progress | None = None,
) -> list[tuple[SiteGroup, Assignment]]:
    """The assignments with codes, biases and scales that were trained, block by block.

    memory: bytes for the values of both networks that are held at a time, as for `Blocks`; a block's inputs and outputs
    on all images, and the weights of its errors, are held whatever it says. partial: finished blocks are read from it,
    and written to it. Groups that the block's output does not depend on, such as those of a second head, stay as they
    are, and so does all of a block whose output is no tensor of floats.
    """
    current, device = list(assigned), images[0].device
    share = None if memory is None else memory // 2
    blocks = find_blocks(program)
    floats = Blocks(program, images, blocks, share)
    quantized = Blocks(rewritten(program, current), images, blocks, share, like=floats)
    for number, block in enumerate(blocks):
        names = {node.name for node in floats.nodes(number).nodes}
        members = [index for index, (group, _) in enumerate(current) if _read_by(group) <= names]
        keys = [f"reconstruction of {current[index][0].name}" for index in members]
        done = {key: found for key in keys if partial is not None and (found := partial.get(key, device)) is not None}
        if len(done) < len(keys) and floats.is_float(block.value_out):
            here = [current[index] for index in members]
            trained = _Block(program, floats, quantized, number, here, choices, seed).trained()
            done = {key: assignment for key, (_, assignment) in zip(keys, trained, strict=True)}
            if partial is not None:
                for key, assignment in done.items():
                    partial.add(key, assignment)
        for index, key in zip(members, keys, strict=True):
            current[index] = (current[index][0], done.get(key, current[index][1]))
        quantized.change(number, rewritten(program, current))
        if progress is not None:
            progress(number + 1, len(blocks), f"block {number + 1} of {len(blocks)} reconstructed")
    return current


def _read_by(group: SiteGroup) -> set[str]:
    """The operations that a group's assignment changes."""
    return {*group.nodes} | ({group.pair.norm.name} if group.pair is not None else set())


class _Block:
    """One block while it is trained."""

    def __init__(
        self,
        program: Program,
        floats: Blocks,
        quantized: Blocks,
        number: int,
        assigned: Assigned,
        choices: Reconstruction,
        seed: int,
    ):
        self._blocks, self._number, self._choices = floats, number, choices
        self._nodes, self._assigned = floats.nodes(number), list(assigned)
        whole = rewritten(self._nodes, self._assigned)
        self._groups = [_Group(group, found, program, whole, choices) for group, found in assigned]
        block = floats.blocks[number]
        # Where images cannot be told apart, all of them make a step, and judge it. The float network says so first.
        apart = floats.keeps_apart(number, [block.value_out])
        self._exact, self._out = floats.inputs(number), block.value_out
        self._given = quantized.inputs(number)
        self._wanted = floats.run(self._exact, [self._out])
        device = self._wanted[self._out].device
        self._generator = torch.Generator(device).manual_seed(seed + 1000 * number)
        self._apart = apart
        numbers = torch.arange(floats.count, device=device)
        held = numbers % _HELD_OUT == _HELD_OUT - 1
        self._fitted, self._judging = numbers, numbers
        if apart and bool(held.any()):
            self._fitted, self._judging = numbers[~held], numbers[held]
        self._batch = min(choices.batch, len(self._fitted)) if apart else floats.count
        chunk = {name: self._exact[name] for name in floats.images} | self._wanted
        behind = BlockOutput(floats, self._out, chunk, tuple(dict.fromkeys(refs_of(program.output))), apart)
        self._error = block_error(choices.loss, behind, self._fitted, seed)
        self._renew(self._assigned)

    def trained(self) -> list[tuple[SiteGroup, Assignment]]:
        """The best assignments on the images held out, those at the start among them."""
        choices = self._choices
        kinds = [each.trained() for each in self._groups]
        rates = {"codes": choices.rate, "scales": choices.scale_rate, "biases": choices.scale_rate}
        parameters = [
            {"params": found, "lr": rate}
            for kind, rate in rates.items()
            if (found := [value for each in kinds for value in each[kind]])
        ]
        best, least = list(self._assigned), self._judged(self._assigned)
        unit = max(least, torch.finfo(torch.float32).tiny)
        if not parameters or not math.isfinite(least):
            return self._measured(best)
        optimizer = torch.optim.Adam(parameters, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, choices.iterations)
        check, renewal = max(1, choices.iterations // _CHECKS), -(-choices.iterations // RENEWALS)
        for step, numbers in enumerate(self._draws(), 1):
            if step > 1 and step % renewal == 1 and self._renew([(each.group, each.hard()) for each in self._groups]):
                least = self._judged(best)
            with torch.enable_grad():
                loss = self._loss([(each.group, each.soft()) for each in self._groups], numbers, self._choices.drop)
                loss = loss / unit + self._regulariser(step / choices.iterations)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
            for each in self._groups:
                each.confine()
            if step % check == 0 or step == choices.iterations:
                tried = [(each.group, each.hard()) for each in self._groups]
                error = self._judged(tried)
                if error < least:
                    best, least = tried, error
        return self._measured(best)

    @torch.no_grad()
    def _measured(self, assigned: Assigned) -> list[tuple[SiteGroup, Assignment]]:
        """The assignments with their outputs' SQNR about the mean, in the quantized network, on the images held out."""
        program = rewritten(self._nodes, assigned)
        names = [name for group, _ in assigned for name in group.nodes]
        sums = {name: torch.zeros(4, dtype=torch.float64) for name in names}
        for numbers in self._judging.split(self._batch):
            chunks = (picked(self._blocks, chunk, numbers) for chunk in (self._exact, self._given))
            exact, given = (
                self._blocks.values(chunk, names, each)
                for chunk, each in zip(chunks, (self._nodes, program), strict=True)
            )
            for name in names:
                y, error = exact[name].double(), (given[name] - exact[name]).double()
                parts = (error.square().sum(), y.square().sum(), y.sum(), torch.tensor(y.numel()))
                sums[name] += torch.stack([part.double().cpu() for part in parts])
        found = []
        for group, assignment in assigned:
            noise, square, total, count = torch.stack([sums[name] for name in group.nodes]).sum(0).tolist()
            power = square - total * total / count
            sqnr = 10 * math.log10(power / noise) if noise > 0 and power > 0 else math.inf
            found.append((group, replace(assignment, sqnr=sqnr)))
        return found

    def _draws(self) -> Iterator[Tensor]:
        """The numbers of the images of each step: all images in random order, then again."""
        left = self._fitted[:0]
        for _ in range(self._choices.iterations):
            if len(left) < self._batch:
                order = torch.randperm(len(self._fitted), generator=self._generator, device=left.device)
                left = torch.cat([left, self._fitted[order]])
            yield left[: self._batch].sort().values if self._batch == len(self._fitted) else left[: self._batch]
            left = left[self._batch :]

    def _regulariser(self, done: float) -> Tensor | float:
        """AdaRound's, over all weights of the block. done: the share of the steps."""
        if self._choices.weights != "adaround" or done < _WARM_UP:
            return 0.0
        first, last = _ANNEALING
        exponent = last + (first - last) * 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))
        return sum((each.regulariser(exponent) for each in self._groups), 0.0)

    @torch.no_grad()
    def _judged(self, assigned: Assigned) -> float:
        """The mean loss on the images held out, all of them quantized."""
        found = 0.0
        for numbers in self._judging.split(self._batch):
            found += float(self._loss(assigned, numbers)) * len(numbers)
        return found / len(self._judging)

    def _loss(self, assigned: Assigned, numbers: Tensor, drop: float | None = None) -> Tensor:
        """The mean error of the block's output on some images. drop: as of `_run`."""
        given, wanted = (picked(self._blocks, chunk, numbers) for chunk in (self._given, self._wanted))
        name = self._blocks.blocks[self._number].value_in
        if drop and given[name].is_floating_point():
            exact = picked(self._blocks, {name: self._exact[name]}, numbers)
            given[name] = given[name].lerp(exact[name], self._kept(given[name], drop))
        difference = self._run(assigned, given, drop) - wanted[self._out]
        return self._error(difference, numbers)

    def _run(self, assigned: Assigned, given: Chunk, drop: float | None = None) -> Tensor:
        """The block's output, quantized, for what it is given.

        drop: the share of activations that stays exact in a step of the training, whose products are in bfloat16 where
        the device has them; None where the block is judged, in float32.
        """
        program, steps = rewritten(self._nodes, assigned), dict[str, Callable[..., Tensor]]()

        def quantized(x: Tensor, name: str) -> Tensor:
            return program.quantizers[name].fake_quantize(x, self._kept(x, drop) if drop else None)

        if drop is not None:
            products = _PRODUCTS if multiplies_bfloat16(self._wanted[self._out].device) else {}
            instead = {FAKE_QUANTIZE: quantized, **products}
            steps = {node.name: instead[node.op] for node in program.nodes if node.op in instead}
        return self._blocks.values(given, [self._out], program, steps)[self._out]

    def _renew(self, assigned: Assigned) -> bool:
        """Take the error's next gradients where the block is now, if it has any; whether it has."""
        if not isinstance(self._error, LowRankFisher):
            return False
        self._error.renew(lambda numbers: self._run(assigned, picked(self._blocks, self._given, numbers)))
        return True

    def _kept(self, values: Tensor, drop: float) -> Tensor:
        """1 for a share of the values, each drawn by itself, and 0 for the others, in their shape and dtype.

        16 random bits decide over each, so the share is `drop` to within 2^-16.
        """
        words = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
        draws = words.random_(-(2**63), None, generator=self._generator).view(torch.int16)[: values.numel()]
        kept = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        return torch.le(draws.view(values.shape), math.ceil(drop * 2**16) - 2**15 - 1, out=kept)
