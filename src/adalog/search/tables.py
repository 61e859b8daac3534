"""Give logarithmic quantizers integer tables, whose bases and scales are searched for the error of the output."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from adalog.choices import Tables
from adalog.device import waits_for_launches
from adalog.quantizers import Assignment, Errors, LogFormat, LogQuantizer, QuantizedTensor, Quantizer, most_headroom
from adalog.quantizers.log_format import nearest_levels
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product

_RISE = 1.03  # the factor by which an integer table of 8 bits may raise the output's error
# Bases and scales of an integer table are tried at these multiples of the base and scale for float levels.
_FACTORS = (0.7, 0.8, 0.87, 0.94, 1.06, 1.13, 1.25, 1.4)

# Maps a quantizer for each product of a stack to the errors of the outputs.
Judge = Callable[[tuple[LogQuantizer, ...]], list[float]]


def with_table(product: Product, assignment: Assignment, tables: Tables) -> Assignment:
    """Return the assignment of one product with an integer table, as in `with_tables`."""
    return with_tables([product], [assignment], tables)[0]


def with_tables(products: Sequence[Product], assignments: Sequence[Assignment], tables: Tables) -> list[Assignment]:
    """Return the assignments with integer tables for their logarithmic codes, if they have any.

    With tables = "calibrated", a table entry has 8 bits if the output's error is at most `_RISE` times the error with
    float levels, else 16 bits. The base, scale and headroom are searched for the table. A quantizer with 2**bits + 1
    values stays as it is.

    products, assignments: their operands have the same shapes and formats. Raises ValueError if mantissas do not fit in
    the width that `tables` asks for.
    """
    quantizers = [
        assignment.left
        for assignment in assignments
        if isinstance(assignment.left, LogQuantizer) and assignment.left.beyond != "zero"
    ]
    if tables == "float" or len(quantizers) < len(assignments):
        return list(assignments)
    form = quantizers[0]
    fits = most_headroom(form.bits, 8, table=form.table) >= 0
    if tables == "u8" and not fits:
        raise ValueError(f"tables = 'u8': mantissas of {form.bits + 1} bits do not fit in 8 bits: choose 'u16'")

    whole = _error(products, assignments)
    sample = whole.sample(1)

    @cache
    def error(quantizers: tuple[LogQuantizer, ...]) -> list[float]:
        return _losses(whole, [quantizers])[0]

    def rough(candidates: Sequence[tuple[LogQuantizer, ...]]) -> list[list[float]]:
        return _losses(sample, candidates)

    left, seconds = products[0].left, [assignment.right for assignment in assignments]
    best: list[LogQuantizer | None] = [None] * len(assignments)
    if fits and tables != "u16":
        narrow = _with_tables(left, quantizers, seconds, 8, rough, error)
        flags = [True] * len(assignments)
        if tables == "calibrated":
            errors = zip(error(tuple(narrow)), error(tuple(quantizers)), strict=True)
            flags = [after <= _RISE * before for after, before in errors]
        best = [quantizer if keep else None for quantizer, keep in zip(narrow, flags, strict=True)]
    if None in best:
        wide = _with_tables(left, quantizers, seconds, 16, rough, error)
        best = [narrow_one or wide_one for narrow_one, wide_one in zip(best, wide, strict=True)]
    return [
        product.assign(quantizer, assignment.right)
        for product, quantizer, assignment in zip(products, best, assignments, strict=True)
    ]


def _error(products: Sequence[Product], assignments: Sequence[Assignment]) -> ProductError:
    """Return the errors of the products as functions of the left quantizers, stacked if there are several."""
    rights = [product.right.values for product in products]
    hats = [
        product.right.fake_quantize(assignment.right) for product, assignment in zip(products, assignments, strict=True)
    ]
    first = products[0].left
    if len(products) == 1:
        return ProductError.of(first.values, rights[0].mT, hats[0].mT, mask=first.mask)
    left = torch.stack([product.left.values for product in products])
    return ProductError.of(left, torch.stack(rights).mT, torch.stack(hats).mT, (0,), stacked=True)


def _losses(error: ProductError, candidates: Sequence[tuple[LogQuantizer, ...]]) -> list[list[float]]:
    """Return the errors of the outputs, for each of the candidates and each product of a stack."""

    def errors(values: Tensor) -> Errors:
        def add(numbers: Tensor, dtype: torch.dtype) -> Tensor:
            quantizers = [candidates[number] for number in numbers.tolist()]
            if not (error.stacked or waits_for_launches(values.device)):
                return torch.stack([first.fake_quantize(values).sub_(values).to(dtype) for (first,) in quantizers])
            return _nearest(values, quantizers).sub_(values).to(dtype)

        return add

    size = len(candidates) if waits_for_launches(error.left.device) else 1  # the cache of a CPU holds one
    losses = [error.loss_by(errors)(numbers) for numbers in torch.arange(len(candidates)).split(size)]
    by_product: list[list[float]] = torch.cat(losses).view(len(candidates), -1).tolist()
    return by_product


def _nearest(values: Tensor, candidates: Sequence[tuple[LogQuantizer, ...]]) -> Tensor:
    """Return the values of a product or stack quantized by each candidate, in few operations: (K, *values.shape)."""
    count, stack = len(candidates), len(candidates[0])
    steps = [quantizer.steps() for group in candidates for quantizer in group]
    levels, cuts = (torch.stack(table).to(values.device) for table in zip(*steps, strict=True))
    scales = torch.stack([quantizer.scale.reshape(1) for group in candidates for quantizer in group]).double()
    offset = candidates[0][0].offset
    levels, cuts = ((table * scales - offset).to(values.dtype) for table in (levels, cuts))
    rows = values.reshape(1, stack, -1).expand(count, -1, -1).reshape(count * stack, -1)
    return nearest_levels(rows, levels, cuts).view(count, *values.shape)


def _with_tables(
    left: Operand,
    quantizers: Sequence[LogQuantizer],
    seconds: Sequence[Quantizer | QuantizedTensor | None],
    width: int,
    rough: Callable[[Sequence[tuple[LogQuantizer, ...]]], list[list[float]]],
    error: Judge,
) -> list[LogQuantizer]:
    """Return the quantizers of a stack of products with tables of this width.

    The headroom, base and scale are searched one after the other by the rough error. The accumulators fit in 32 bits if
    they can. A quantizer keeps its base and scale unless others have a smaller exact error.

    left: the left operand of any of the products. seconds: how the right operands are quantized.
    """
    most = most_headroom(quantizers[0].bits, width, table=quantizers[0].table)

    def narrow(second: Quantizer | QuantizedTensor | None) -> list[int]:
        largest = left.values.shape[-1] * (1 if second is None else 2**second.bits - 1)
        return [headroom for headroom in range(most + 1) if largest << (width - most + headroom) <= 2**31] or [0]

    def best_of(candidates: Sequence[Sequence[LogQuantizer]]) -> list[LogQuantizer]:
        """Return the best candidate of each product; the first one wins ties."""
        count = max(map(len, candidates))
        padded = [[*group, *[group[0]] * (count - len(group))] for group in candidates]
        losses = rough(list(zip(*padded, strict=True)))
        places = [min(range(len(group)), key=lambda row: losses[row][stack]) for stack, group in enumerate(candidates)]
        return [group[place] for group, place in zip(candidates, places, strict=True)]

    start = best = best_of(
        [
            [replace(quantizer, width=width, headroom=headroom) for headroom in narrow(second)]
            for quantizer, second in zip(quantizers, seconds, strict=True)
        ]
    )
    if isinstance(left.format, LogFormat) and not left.format.q:
        best = best_of([[log, *(replace(log, q=q) for q in _bases_near(log.q, left.format))] for log in best])
    best = best_of([[log, *(replace(log, scale=log.scale * factor) for factor in _FACTORS)] for log in best])
    if all(after is before for after, before in zip(best, start, strict=True)):
        return start
    errors = zip(error(tuple(best)), error(tuple(start)), strict=True)
    improved = [after < before for after, before in errors]
    return [after if is_better else before for after, before, is_better in zip(best, start, improved, strict=True)]


def _bases_near(q: int, form: LogFormat) -> list[int]:
    near = {round(q * factor) for factor in _FACTORS} | {q + step for step in (-2, -1, 1, 2)}
    return sorted({min(max(base, form.q_min), form.q_max) for base in near})
