"""Train the codes, biases and scales of one block after another, or of the whole model, by gradients.

A block is trained to output the same values as in the float network (BRECQ, Li et al., ICLR 2021). Its inputs are those
that it gets once all blocks before it are quantized and trained. In each step, a random share of these inputs is
replaced by the float network's values, and a random share of the values that its quantizers see is not quantized
(QDrop, Wei et al., ICLR 2022). The processes of one job share the images of each step. A single process on an
accelerator takes them at once and in few operations, and `replay` replays these as one graph.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adalog.calibration.block_errors import LOSSES, BlockOutput, Loss, pick
from adalog.calibration.compensate import ROUNDING
from adalog.calibration.judge import output_errors
from adalog.calibration.partial import Partial
from adalog.calibration.replay import Masks, Replay, random_mask
from adalog.calibration.schedule import SERIAL, Resources, assignment_codec, assignments_codec
from adalog.calibration.training import BatchedRounding, GroupInTraining, Side, confine
from adalog.calibration.values import Chunk, Values
from adalog.choices import Reconstruction
from adalog.device import multiplies_bfloat16, waits_for_launches
from adalog.graph.capture import take
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Program, refs_of
from adalog.graph.rewrite import Assigned, SiteGroup, rewrite
from adalog.graph.sites import Block, find_blocks, find_spans
from adalog.quantizers import Assignment, decibels
from adalog.ranks import ALONE, Ranks

# Every n-th image is held out of training to evaluate a block's states. If there are fewer than n images, none is.
_HELD_OUT = 8
# A step sums the gradients of shares of this many images, so that another rank can take the next share. An accelerator
# without other ranks takes all images at once, because the number of shares determines how long a step takes.
_SHARE = 4
_SHARE_OF_ACCELERATOR = 16
# How often a state is evaluated on the held-out images, and how often progress is reported. In few bits, the outputs of
# a whole model differ so much from state to state that the best of several states would mostly be the luckiest one.
_CHECKS = {"block": 8, "model": 1}
_REPORTS = 32
# The exponent of AdaRound's regulariser starts at the first number and falls to the second one, after a warm-up of
# this fraction of the steps.
_ANNEALING = (20.0, 2.0)
_WARM_UP = 0.2


Mask = Callable[[Tensor], Tensor]  # returns a random mask for values, in their shape and dtype


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear, with its product and the products of its gradients in bfloat16."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    product = F.linear(x.bfloat16(), weight.bfloat16()).float()
    return product if bias is None else product + bias


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two values, with the product and the products of its gradients in bfloat16."""
    return left @ right if left.dtype != torch.float32 else (left.bfloat16() @ right.bfloat16()).float()


# bfloat16 rounds factors and products by 2**-9 at most, far less than the trained bits do. Steps are small, and their
# result is evaluated in float32.
_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
}


def reconstruct(
    program: Program,
    images: Sequence[Tensor],
    assigned: Assigned,
    choices: Reconstruction,
    resources: Resources = SERIAL,
    *,
    losses: Mapping[str, Loss] = LOSSES,
    seed: int = 0,
    memory: int | None = None,
    partial: Partial | None = None,
) -> list[tuple[SiteGroup, Assignment]]:
    """Return the assignments with trained codes, biases and scales.

    A group keeps its assignment if the block's output does not depend on it, or is not a floating-point tensor. It also
    does so if another output of the model within the block depends on it, as in a block with one of two heads, because
    the loss would not evaluate all of its effect.

    losses: the errors of a block's output, by name. memory: bytes for the values of both networks held at a time, as in
    `Values`. The following always comes on top, for the whole model with the scope "model": a block's inputs and
    outputs on all images, the weights of its errors, the training state of its weights, and the values that gradients
    need on four images, or on all images of a step on an accelerator. partial: the opened file of the resources; the
    first rank adds finished blocks. All ranks compute the values of both networks, and share the images of each step
    and evaluation.
    """
    current, device, ranks = list(assigned), images[0].device, resources.ranks
    share = None if memory is None else memory // 2
    if choices.scope == "block":
        blocks, stage, where = find_blocks(program), "reconstruction", "block"
    else:
        blocks, stage, where = find_spans(program), "tuning", "end to end, block"
    floats = Values(program, images, share, blocks)
    quantized = Values(rewrite(program, current), images, share, blocks, like=floats)
    held_out = _split(torch.arange(floats.count, device=device))[1]

    def error(assigned: Assigned) -> float:
        return sum(output_errors(program, floats, [rewrite(program, assigned)], held_out)[0].values())

    # The loss of a block that is the whole model has evaluated the model's outputs on the same images.
    compares = choices.robust and not (choices.scope == "model" and len(blocks) == 1)
    least: float | None = None  # the error of the current assignments, once it is known
    for number, block in enumerate(blocks):

        def report(step: int, number: int = number) -> None:
            steps = f", step {step} of {choices.iterations}" if step < choices.iterations else ""
            name = f"{where} {number + 1} of {len(blocks)}{steps}"
            resources.report(number * choices.iterations + step, len(blocks) * choices.iterations, name)

        names = {node.name for node in floats.operations(block).nodes} - _leading_elsewhere(program, block)
        members = [index for index, (group, _) in enumerate(current) if group.changes <= names]
        keys = [f"{stage} of {current[index][0].name}" for index in members]
        stored = {key: line for key in keys if partial is not None and (line := partial.get(key, device)) is not None}
        done = ranks.agree(keys, stored, assignment_codec(device))
        if len(done) < len(keys) and floats.is_float(block.value_out):
            groups = [current[index] for index in members]
            beside = [
                (group, assignment)
                for index, (group, assignment) in enumerate(current)
                if index not in members and not names.isdisjoint(group.nodes)
            ]
            block_in_training = BlockInTraining(
                program, floats, quantized, block, groups, choices, seed, ranks, beside, losses
            )
            trained = [assignment for _, assignment in block_in_training.train(report)]

            def select(trained: list[Assignment] = trained, members: Sequence[int] = members) -> list[Assignment]:
                """Return the trained assignments, or the current ones if the model's output is worse with them."""
                nonlocal least
                if not compares:
                    return trained
                after = list(current)
                for index, assignment in zip(members, trained, strict=True):
                    after[index] = (current[index][0], assignment)
                least = error(current) if least is None else least
                changed = error(after)
                if changed > least:
                    return [current[index][1] for index in members]
                least = changed
                return trained

            agreed = ranks.by_first(select, assignments_codec(device))
            done = dict(zip(keys, agreed, strict=True))
            if partial is not None and ranks.first:
                for key, assignment in done.items():
                    partial.add(key, assignment)
        for index, key in zip(members, keys, strict=True):
            current[index] = (current[index][0], done.get(key, current[index][1]))
        quantized.change(rewrite(program, current), block.value_in)
        report(choices.iterations)
    return current


def without_held_out(images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the images that a training on these images does not hold out, for a stage before it to fit."""
    return take(images, _split(torch.arange(len(images[0])))[0])


def _split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Split images into those that are trained on and those that are held out; few images are in both."""
    is_held_out = numbers % _HELD_OUT == _HELD_OUT - 1
    return (numbers[~is_held_out], numbers[is_held_out]) if bool(is_held_out.any()) else (numbers, numbers)


def _leading_elsewhere(program: Program, block: Block) -> set[str]:
    """Return a block's operations that lead to a model output in the block other than the block's own output."""
    leading = {*refs_of(program.output)} - {block.value_out}
    inside = {*block.nodes}
    for node in reversed(program.nodes):
        if node.name in leading & inside:
            leading |= set(node.refs())
    return leading & inside


class BlockInTraining:
    """One block during its training.

    beside: groups in the block that are not trained, such as a layer that several blocks share.
    """

    def __init__(
        self,
        program: Program,
        floats: Values,
        quantized: Values,
        block: Block,
        assigned: Assigned,
        choices: Reconstruction,
        seed: int,
        ranks: Ranks = ALONE,
        beside: Assigned = (),
        losses: Mapping[str, Loss] = LOSSES,
    ):
        self._values, self._in, self._out = floats, block.value_in, block.value_out
        self._choices, self._ranks = choices, ranks
        self._nodes, self._assigned, self._beside = floats.operations(block), list(assigned), list(beside)
        if beside:  # rewriting these groups reads tensors of their operations in other blocks
            self._nodes = replace(self._nodes, tensors=program.tensors)
        rewritten = self._rewrite(self._assigned)
        self._groups = [
            GroupInTraining(group, assignment, program, rewritten, choices) for group, assignment in assigned
        ]
        # If images cannot be separated, every step and evaluation takes all of them. The float network is tested first.
        self._apart = apart = floats.separable([self._out], self._in)
        self._exact, self._inputs = (values.images | values.of([self._in]) for values in (floats, quantized))
        self._targets = floats.of([self._out], self._exact)
        device = self._targets[self._out].device
        self._generator = torch.Generator(device).manual_seed(seed + 1000 * floats.starts.index(self._in))
        numbers = torch.arange(floats.count, device=device)
        self._trained_on, self._held_out = _split(numbers) if apart else (numbers, numbers)
        self._batch = min(choices.batch, len(self._trained_on)) if apart else floats.count
        self._at_once = ranks.world == 1 and waits_for_launches(device)
        self._replay: Replay | None = None
        # Each share of a step has its own random numbers, whichever rank takes the share.
        share_seeds = torch.randint(
            2**31, (len(self._shares(numbers[: self._batch])),), generator=self._generator, device=device
        )
        self._generators = [torch.Generator(device).manual_seed(share_seed) for share_seed in share_seeds.tolist()]
        chunk = floats.images | self._targets
        outputs = tuple(dict.fromkeys(refs_of(program.output)))
        self._error = losses[choices.loss](
            BlockOutput(floats, self._out, chunk, outputs, apart, self._trained_on, self._held_out, seed)
        )
        if self._error.renewals:
            self._error.renew(self._runner(self._assigned))

    def train(self, report: Callable[[int], None] | None = None) -> list[tuple[SiteGroup, Assignment]]:
        """Train the block, and return the best assignments on the held-out images, the initial ones included.

        report: called with the number of finished steps, several times before the last one.
        """
        best, least = list(self._assigned), self._held_out_loss(self._assigned)
        unit = max(least, torch.finfo(torch.float32).tiny)
        last = self._choices.iterations
        check, renewal = max(1, last // _CHECKS[self._choices.scope]), -(-last // max(1, self._error.renewals))
        for step in self.steps(unit) if 0 < least < math.inf else ():  # an error of zero cannot fall
            if report is not None and step % max(1, last // _REPORTS) == 0 and step < last:
                report(step)
            if step % check and step % renewal and step < last:
                continue
            state = [(group.group, group.hard()) for group in self._groups]
            if step % check == 0 or step == last:
                error = self._held_out_loss(state)
                if error < least:
                    best, least = state, error
            if step % renewal == 0 and step < last:
                self._error.renew(self._runner(state))
                least = self._held_out_loss(best)
                if self._replay is not None:
                    self._replay.forget()
        return self._with_sqnr(best)

    def steps(self, unit: float) -> Iterator[int]:
        """Yield the number of each step, from 1 on, after training by it. unit: a divisor of the error."""
        choices = self._choices
        by_kind = [group.parameters() for group in self._groups]
        rates = {"codes": choices.rate, "scales": choices.scale_rate, "biases": choices.scale_rate}
        parameters = [
            {"params": values, "lr": rate}
            for kind, rate in rates.items()
            if (values := [value for kinds in by_kind for value in kinds[kind]])
        ]
        if not parameters:
            return
        if self._at_once:
            replay = self._replay = self._recordable_step(parameters, unit)
            for step in range(1, choices.iterations + 1):
                replay.run()
                yield step
            self._replay = None  # it holds this block, and the memory of its graph
            return
        optimizer = torch.optim.Adam(parameters, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, choices.iterations)
        for step, numbers in enumerate(self._draws(), 1):
            optimizer.zero_grad()
            with torch.enable_grad():
                self._descend(numbers, unit, step / choices.iterations)
            optimizer.step()
            schedule.step()
            confine(self._sides)
            yield step

    def _recordable_step(self, parameters: list[dict[str, Any]], unit: float) -> Replay:
        """Return a step that takes all its images at once, and can be recorded.

        Everything that differs from step to step is in tables on the device, with one row per step. parameters: the
        parameter groups of the optimizer, with their first learning rates. unit: as in `steps`.
        """
        draws = torch.stack(list(self._draws()))
        device, last = draws.device, self._choices.iterations
        table = torch.tensor(
            [
                [*(group["lr"] * _rate(step / last) for group in parameters), *_weighted((step + 1) / last)]
                for step in range(last)
            ],
            dtype=torch.float32,
            device=device,
        )
        row, now = torch.zeros(1, dtype=torch.int64, device=device), table[0].clone()
        *rates, exponent, weight = now.unbind()
        optimizer = torch.optim.Adam(
            [{**group, "lr": rate} for group, rate in zip(parameters, rates, strict=True)], fused=True
        )
        trained = [value for group in parameters for value in group["params"]]
        masks = Masks(self._choices.drop, self._generators[0])
        rounding = BatchedRounding(self._groups)

        def step() -> None:
            numbers = draws.index_select(0, row)[0]
            now.copy_(table.index_select(0, row)[0])
            row.add_(1)
            masks.renew()
            with torch.enable_grad():
                h = rounding.round()
                program = self._rewrite([(group.group, group.soft(rounding.by_weight(h))) for group in self._groups])
                loss = self._loss(program, numbers, self._choices.drop, masks.take) / unit
                if h is not None:
                    loss = loss + weight * rounding.regulariser(h, exponent)
                if not loss.requires_grad:  # for example if the block ends in a comparison
                    loss = loss + 0 * trained[0].sum()
            gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
            for value, gradient in zip(trained, gradients, strict=True):
                # The optimizer takes a gradient with the strides of its value only.
                same = gradient.stride() == value.stride()
                value.grad = gradient if same else torch.empty_like(value).copy_(gradient)
            optimizer.step()
            confine(self._sides)

        return Replay(step, masks, optimizer)

    @property
    def _sides(self) -> list[Side]:
        return [side for group in self._groups for side in group.sides]

    def _rewrite(self, assigned: Assigned) -> Program:
        """Return the block's program with all its groups quantized. assigned: the trained groups."""
        return rewrite(self._nodes, [*self._beside, *assigned])

    def _descend(self, numbers: Tensor, unit: float, done: float) -> None:
        """Add the gradients of one step, from each share of its images and from the regulariser.

        Each share has gradients with respect to the values of the rewritten program. Their sum is propagated to the
        parameters that these values are made of. unit: as in `steps`. done: the fraction of finished steps.
        """
        program = self._rewrite([(group.group, group.soft()) for group in self._groups])
        sources, leaves = list[Tensor](), list[Tensor]()

        def leaf(value: Tensor) -> Tensor:
            if not value.requires_grad:
                return value
            sources.append(value)
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        tensors = {name: leaf(value) for name, value in program.tensors.items()}
        quantizers = {name: quantizer.map(leaf) for name, quantizer in program.quantizers.items()}
        free, shares = replace(program, tensors=tensors, quantizers=quantizers), self._shares(numbers)

        def gradient(share: int) -> Tensor:
            images, drop = shares[share], self._choices.drop
            loss = self._loss(free, images, drop, lambda values: random_mask(values, drop, self._generators[share]))
            loss = loss * (len(images) / len(numbers) / unit)
            if not loss.requires_grad:  # for example if the block ends in a comparison
                return torch.zeros_like(like)
            gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
            return torch.cat([values.flatten() for values in gradients])

        like = torch.cat([value.detach().flatten() for value in leaves])
        parts = self._ranks.sum_in_order(len(shares), gradient, like).split([value.numel() for value in leaves])
        torch.autograd.backward(
            sources, [part.view(value.shape).to(value.dtype) for part, value in zip(parts, sources, strict=True)]
        )
        regulariser = self._regulariser(done)
        if isinstance(regulariser, Tensor):
            regulariser.backward()

    def _shares(self, numbers: Tensor) -> Sequence[Tensor]:
        """Split the images of a step into shares that do not depend on the number of ranks, if there are several."""
        if self._at_once or not self._apart:
            return [numbers]
        return numbers.split(_SHARE_OF_ACCELERATOR if waits_for_launches(numbers.device) else _SHARE)

    @torch.no_grad()
    def _with_sqnr(self, assigned: Assigned) -> list[tuple[SiteGroup, Assignment]]:
        """Return the assignments with the SQNR of their outputs in the quantized network on the held-out images.

        The signal of a weight's outputs is taken about the mean of each channel, as in `compensate`.
        """
        program = self._rewrite(assigned)
        sites = [site for group, _ in assigned for call in group.calls for site in call]
        names = [site.node.name for site in sites]
        # Per site: the noise, the signal and the number of rows. A weight adds the sums of its output channels.
        sizes = [3 + (0 if site.role in ("qk", "av") else len(self._nodes.tensors[site.right])) for site in sites]
        batches = self._held_out.split(self._batch)

        def parts(number: int) -> Tensor:
            chunks = (pick(self._values, chunk, batches[number]) for chunk in (self._exact, self._inputs))
            exact, quantized = (
                self._values.compute(chunk, names, operations)
                for chunk, operations in zip(chunks, (self._nodes, program), strict=True)
            )
            columns = []
            for site, size in zip(sites, sizes, strict=True):
                y, error = (value.double() for value in (exact[site.node.name], quantized[site.node.name]))
                error = error - y
                rows = (y.movedim(-3, -1) if site.role == "conv" else y).flatten(0, -2)
                alone = torch.stack([error.square().sum(), y.square().sum(), y.new_tensor(len(rows))])
                columns.append(torch.cat([alone, rows.sum(0) if size > 3 else alone[:0]]).cpu())
            return torch.cat(columns)

        sums = self._ranks.sum_in_order(len(batches), parts, torch.zeros(sum(sizes), dtype=torch.float64)).split(sizes)
        of_name = dict(zip(names, sums, strict=True))
        measured = []
        for group, assignment in assigned:
            power = noise = 0.0
            for total in (of_name[name] for name in group.nodes):
                noise += float(total[0])
                spread = total[1] - total[3:].square().sum() / total[2]
                power += float(spread if spread > ROUNDING * total[1] else total[1])  # equal rows have no spread
            measured.append((group, replace(assignment, sqnr=decibels(power, noise))))
        return measured

    def _draws(self) -> Iterator[Tensor]:
        """Yield the image indices of each step: all images in random order, then again in a new order."""
        left = self._trained_on[:0]
        for _ in range(self._choices.iterations):
            if len(left) < self._batch:
                order = torch.randperm(len(self._trained_on), generator=self._generator, device=left.device)
                left = torch.cat([left, self._trained_on[order]])
            yield left[: self._batch].sort().values if self._batch == len(self._trained_on) else left[: self._batch]
            left = left[self._batch :]

    def _regulariser(self, done: float) -> Tensor | float:
        """Return AdaRound's regulariser over all weights of the block. done: the fraction of finished steps."""
        if self._choices.weights != "adaround" or done < _WARM_UP:
            return 0.0
        return sum((group.regulariser(_exponent(done)) for group in self._groups), 0.0)

    @torch.no_grad()
    def _held_out_loss(self, assigned: Assigned) -> float:
        """Return the mean loss on the held-out images, with every activation quantized."""
        program, batches = self._rewrite(assigned), self._held_out.split(self._batch)

        def loss(number: int) -> Tensor:
            return self._loss(program, batches[number]).double().cpu() * len(batches[number])

        like = torch.zeros((), dtype=torch.float64)
        return float(self._ranks.sum_in_order(len(batches), loss, like)) / len(self._held_out)

    def _loss(self, program: Program, numbers: Tensor, drop: float | None = None, mask: Mask | None = None) -> Tensor:
        """Return the mean error of the block's output. drop, mask: as in `_run`, and for the inputs that are exact."""
        inputs, targets = (pick(self._values, chunk, numbers) for chunk in (self._inputs, self._targets))
        name = self._in
        if drop and mask is not None and inputs[name].is_floating_point():
            exact = pick(self._values, {name: self._exact[name]}, numbers)
            inputs[name] = inputs[name].lerp(exact[name], mask(inputs[name]))
        return self._error(self._run(program, inputs, drop, mask) - targets[self._out], numbers)

    def _run(self, program: Program, inputs: Chunk, drop: float | None = None, mask: Mask | None = None) -> Tensor:
        """Return the block's output from a rewritten program and the block's inputs.

        drop: in a training step, the share of activations that is not quantized, which `mask` chooses; products are
        then in bfloat16 if the device supports it. None evaluates the block in float32.
        """

        def quantized(x: Tensor, name: str) -> Tensor:
            return program.quantizers[name].fake_quantize(x, mask(x) if drop and mask is not None else None)

        steps: dict[str, Callable[..., Tensor]] = {}
        if drop is not None:
            steps = {node.name: quantized for node in program.nodes if node.op == FAKE_QUANTIZE}
            if multiplies_bfloat16(self._targets[self._out].device):
                steps |= {node.name: _PRODUCTS[node.op] for node in program.nodes if node.op in _PRODUCTS}
        return self._values.compute(inputs, [self._out], program, steps=steps)[self._out]

    def _runner(self, assigned: Assigned) -> Callable[[Tensor], Tensor]:
        """Return a function that maps image indices to the block's output, quantized like this."""
        program = self._rewrite(assigned)
        return lambda numbers: self._run(program, pick(self._values, self._inputs, numbers))


def _exponent(done: float) -> float:
    """Return the exponent of AdaRound's regulariser. done: the fraction of finished steps, at least the warm-up."""
    first, last = _ANNEALING
    return last + (first - last) * _rate((done - _WARM_UP) / (1 - _WARM_UP))


def _rate(done: float) -> float:
    """Return the fraction of the first learning rate. done: the fraction of finished steps."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _weighted(done: float) -> tuple[float, float]:
    """Return the exponent of AdaRound's regulariser and its weight, which is 0 in the warm-up."""
    return (_ANNEALING[0], 0.0) if done < _WARM_UP else (_exponent(done), 1.0)
