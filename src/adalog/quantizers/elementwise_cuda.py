"""Elementwise work of searches and corrections on a CUDA device, in one launch of a Triton kernel each.

PyTorch takes several launches instead, and writes a value for each candidate and element in between.
`elementwise.kernels` imports this module only for tensors on such a device, because Triton is optional. As in the
compiled library, nothing is contracted to fused multiply-adds, and numbers are rounded to whole ones with halves to
even, so that codes and errors are the same from the same numbers. Sums are added in another order.

No function waits for the device. All tensors have fewer than 2**31 elements.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = tl.constexpr(64)  # held in registers
_WIDTH = tl.constexpr(8)  # outputs per program: with few of them there are many programs, each of one warp
_WHOLE = tl.constexpr(1.5 * 2.0**52)  # added to a float64 of moderate size, it rounds to whole numbers, halves to even
_MODERATE = tl.constexpr(2.0**22)  # beyond all codes
_WHOLE_FLOAT, _MODERATE_FLOAT = tl.constexpr(1.5 * 2.0**23), tl.constexpr(2.0**20)  # the same for float32
_BLOCK = tl.constexpr(1024)  # elements that a program computes at a time
_FEW = tl.constexpr(256)  # the same for kernels with few elements, and the levels of all candidates in a program
_CANDIDATES = tl.constexpr(8)  # for which a program reads each value once


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
    """Launch a kernel on the device of its first argument."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **{"num_warps": 4, "enable_fp_fusion": False, **constants})


def launch_codes_in_turn(
    left: Tensor, form: Tensor, base: Tensor | None, scale: Tensor, zero_point: Tensor, top: int, *results: Tensor
) -> None:
    """Launch the kernel that fills the results `codes` and `moved`.

    left, base, codes: (G, n, O) with n <= 64, blocks of contiguous (G, K, O). form: (G, n, n), any strides. scale,
    zero_point: (G, 1, O), contiguous. moved: (G, n, O), contiguous. All are float64; `elementwise.codes_in_turn`
    describes the values.
    """
    groups, rows, outputs = left.shape
    numbers = (float(top), rows, outputs, left.stride(0), *form.stride())
    grid = (triton.cdiv(outputs, _WIDTH.value), groups)
    _launch(_codes_in_turn, grid, left, form, base, scale, zero_point, *results, *numbers, num_warps=1)


def uniform_errors(
    values: Tensor, scale: Tensor, zero_point: Tensor, top: int, sizes: Sequence[int], matrix: int, result: Tensor
) -> None:
    """Fill `result` with the errors that k uniform quantizers add to the values.

    values: float32, contiguous. scale, zero_point: float32, (k, own), contiguous. sizes: of the values before, in and
    after the dimensions that have parameters of their own. matrix: the number of elements of each matrix; all
    candidates of a matrix follow one another in `result`.
    """
    count, total = len(scale), values.numel()
    numbers = (float(top), count, total, *sizes[1:], matrix)
    _launch(_uniform_errors, _grid(total, count), values, scale, zero_point, result, *numbers)


def nearest_uniform(
    values: Tensor, scale: Tensor, zero_point: Tensor, top: int, sizes: Sequence[int], result: Tensor
) -> None:
    """Fill `result` with the values after quantization.

    values, result: float32, contiguous. scale, zero_point: float32, contiguous, one number for each of the dimensions
    that have parameters of their own. sizes: as in `uniform_errors`.
    """
    total = values.numel()
    _launch(_nearest_uniform, _grid(total), values, scale, zero_point, result, float(top), total, *sizes[1:])


def nearest_log(
    values: Tensor, offset: float, scale: Tensor, span: Sequence[float], places: Sequence[int], *tables: Tensor
) -> None:
    """Fill the last table with the nearest level of each value, for a logarithmic quantizer with one scale.

    The other arguments are those of `elementwise.nearest_log`. All tensors are float32 and contiguous.
    """
    total = values.numel()
    _launch(_nearest_log, _grid(total), values, scale, *tables, offset, *span, *places, total)


def table_errors(values: Tensor, bins: Tensor, tables: Tensor, matrix: int, result: Tensor) -> None:
    """Fill `result` with table[bins] - values for each row of the tables, (k, n).

    values, tables: float32, contiguous. bins: int32, contiguous, one per value. matrix: as in `uniform_errors`.
    """
    (count, width), total = tables.shape, values.numel()
    _launch(_table_errors, _grid(total, count), values, bins, tables, result, count, width, total, matrix)


def sums(product: Tensor, base: Tensor, error: Tensor | None, sizes: Sequence[int], matrix: int, count: int) -> Tensor:
    """Return the sums of (product + base)**2, or of (product + 2 base) error, for k candidates: float32, (k, own).

    product, error: float32 or bfloat16, both the same, contiguous; all candidates of a matrix follow one another. base:
    float32, contiguous. sizes, matrix: as in `uniform_errors`, but of the base.
    """
    before, own, after = sizes
    block = _BLOCK.value if after > _FEW.value else _FEW.value
    chunk = min(4 * _BLOCK.value, triton.cdiv(after, block) * block)  # elements that a program adds up
    parts = triton.cdiv(after, chunk)
    result = torch.empty(count, own, before * parts, dtype=torch.float32, device=base.device)
    numbers = (count, before, own, after, matrix, parts, chunk)
    _launch(_sums, (result.numel(),), product, base, error, result, *numbers, block=block)
    return result.sum(2) if before * parts > 1 else result[..., 0]


def own_errors(ordered: Tensor, sums: Tensor, squares: Tensor, levels: Tensor, thresholds: Tensor) -> Tensor:
    """Return the squared errors (K, G) of quantizers of sorted samples.

    ordered: (G, T), ascending in each row. sums, squares: (G, T + 1), the sums of the first values, and of their
    squares. levels, thresholds: (K, G, L) and (K, G, L - 1), ascending. All are float64 and contiguous.
    """
    (count, groups, size), length = levels.shape, ordered.shape[1]
    padded = triton.next_power_of_2(size)
    together = max(1, _FEW.value // padded)
    result = torch.empty(count, groups, dtype=torch.float64, device=levels.device)
    tensors = (ordered, sums, squares, levels, thresholds, result)
    numbers = (count * groups, groups, length, size, length.bit_length())
    grid = (triton.cdiv(count * groups, together),)
    _launch(_own_errors, grid, *tensors, *numbers, together=together, padded=padded)
    return result


def uniform_of_bounds(lower: Tensor, upper: Tensor, top: int, least: float) -> tuple[Tensor, Tensor]:
    """Return (scale, zero_point) of the uniform quantizers that span [lower, upper], as `bounds_to_uniform` does.

    lower, upper: float32, (k, n), with stride 1 in the last dimension. least: the least scale.
    """
    scale, zero_point = (torch.empty(lower.shape, dtype=lower.dtype, device=lower.device) for _ in range(2))
    numbers = (float(top), least, lower.numel(), lower.shape[1], lower.stride(0), upper.stride(0))
    _launch(_uniform_of_bounds, (triton.cdiv(lower.numel(), _FEW.value),), lower, upper, scale, zero_point, *numbers)
    return scale, zero_point


def _grid(total: int, candidates: int = 1) -> tuple[int, int]:
    """Return the numbers of programs for this many values and candidates."""
    return triton.cdiv(total, _BLOCK.value), triton.cdiv(candidates, _CANDIDATES.value)


# Limits numbers, and passes NaN on.
@triton.jit
def _limited(number, least, most):
    number = tl.where(number < least, least, number)
    return tl.where(number > most, most, number)


# Rounds to whole numbers, halves to even. The sum with `whole` has no room for a fraction.
@triton.jit
def _rounded(number, whole: tl.constexpr):
    return (number + whole) - whole


# Sizes and strides are not specialised, so that one compiled kernel serves all weights.
@triton.jit(do_not_specialize=("top", "rows", "outputs", "stride", "form_group", "form_row", "form_column"))
def _codes_in_turn(
    left, form, base, scale, zero_point, codes, moved, top, rows, outputs, stride, form_group, form_row, form_column
):
    group = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)
    inside = output < outputs
    row = tl.arange(0, _ROWS)
    step = tl.load(scale + group * outputs + output, mask=inside, other=1.0)
    zero = tl.load(zero_point + group * outputs + output, mask=inside, other=0.0)
    held = (row[:, None] < rows) & inside[None, :]
    pull = tl.load(left + group * stride + row[:, None] * outputs + output[None, :], mask=held, other=0.0)
    for number in range(rows):
        factors = form + group * form_group + number * form_row
        own = tl.load(factors + number * form_column)
        later = tl.load(factors + row * form_column, mask=(row > number) & (row < rows), other=0.0)
        value = tl.sum(tl.where(row[:, None] == number, pull, 0.0), axis=0)
        at = group * stride + number * outputs + output
        if base is not None:
            now = tl.load(base + at, mask=inside, other=0.0)
            value = now + value / own
        code = _rounded(_limited(value / step, -_MODERATE, _MODERATE), _WHOLE) + zero
        code = _limited(code, 0.0, top)
        level = (code - zero) * step
        if base is not None:
            change = level - now
        else:
            change = (value - level) / own
        tl.store(codes + at, code, mask=inside)
        tl.store(moved + (group * rows + number) * outputs + output, change, mask=inside)
        pull = pull - later[:, None] * change[None, :]


@triton.jit(do_not_specialize=("top", "count", "total", "own", "after", "matrix"))
def _uniform_errors(values, scale, zero_point, result, top, count, total, own, after, matrix):
    place = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = place < total
    value = tl.load(values + place, mask=inside, other=0.0)
    group = (place // after) % own
    at = (place // matrix) * (count * matrix) + place % matrix
    first = tl.program_id(1) * _CANDIDATES
    for number in range(_CANDIDATES):
        candidate = first + number
        taken = inside & (candidate < count)
        step = tl.load(scale + candidate * own + group, mask=taken, other=1.0)
        low = -tl.load(zero_point + candidate * own + group, mask=taken, other=0.0)
        high = low + top
        steps = _rounded(_limited(tl.div_rn(value, step), -_MODERATE_FLOAT, _MODERATE_FLOAT), _WHOLE_FLOAT)
        error = _limited(steps, low, high) * step - value
        tl.store(result + at + candidate * matrix, error.to(result.dtype.element_ty), mask=taken)


@triton.jit(do_not_specialize=("top", "total", "own", "after"))
def _nearest_uniform(values, scale, zero_point, result, top, total, own, after):
    place = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = place < total
    value = tl.load(values + place, mask=inside, other=0.0)
    group = (place // after) % own
    step = tl.load(scale + group, mask=inside, other=1.0)
    zero = tl.load(zero_point + group, mask=inside, other=0.0)
    code = _rounded(_limited(tl.div_rn(value, step), -_MODERATE_FLOAT, _MODERATE_FLOAT), _WHOLE_FLOAT) + zero
    code = _limited(code, 0.0, top)
    tl.store(result + place, (code - zero) * step, mask=inside)


@triton.jit(do_not_specialize=("offset", "lowest", "highest", "drop", "first", "total"))
def _nearest_log(values, scale, ends, levels, result, offset, lowest, highest, drop, first, total):
    place = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = place < total
    value = tl.load(values + place, mask=inside, other=0.0) + offset
    ratio = tl.div_rn(value, tl.zeros((_BLOCK,), dtype=tl.float32) + tl.load(scale))
    ratio = tl.where(ratio >= lowest, ratio, lowest)  # also for NaN
    ratio = tl.where(ratio > highest, highest, ratio)
    number = (ratio.to(tl.int32, bitcast=True) >> drop) - first
    end = tl.load(ends + number, mask=inside, other=0.0)
    # Of each bin, the first of two levels is for the values above its threshold.
    level = tl.load(levels + 2 * number + tl.where(end < ratio, 0, 1), mask=inside, other=0.0)
    tl.store(result + place, level, mask=inside)


@triton.jit(do_not_specialize=("count", "width", "total", "matrix"))
def _table_errors(values, bins, tables, result, count, width, total, matrix):
    place = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = place < total
    value = tl.load(values + place, mask=inside, other=0.0)
    number_of_bin = tl.load(bins + place, mask=inside, other=0)
    at = (place // matrix) * (count * matrix) + place % matrix
    first = tl.program_id(1) * _CANDIDATES
    for number in range(_CANDIDATES):
        candidate = first + number
        taken = inside & (candidate < count)
        level = tl.load(tables + candidate * width + number_of_bin, mask=taken, other=0.0)
        tl.store(result + at + candidate * matrix, (level - value).to(result.dtype.element_ty), mask=taken)


@triton.jit(do_not_specialize=("count", "before", "own", "after", "matrix", "parts", "chunk"))
def _sums(product, base, error, result, count, before, own, after, matrix, parts, chunk, block: tl.constexpr):
    program = tl.program_id(0)
    first = (program % parts) * chunk
    rest = program // parts
    lead = rest % before
    group = (rest // before) % own
    candidate = rest // before // own
    start = (lead * own + group) * after
    total = tl.zeros((block,), dtype=tl.float32)
    for offset in range(0, chunk, block):
        inner = first + offset + tl.arange(0, block)
        inside = inner < after
        place = start + inner
        at = (place // matrix) * (count * matrix) + candidate * matrix + place % matrix
        value = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
        shared = tl.load(base + place, mask=inside, other=0.0)
        if error is not None:
            total += (value + 2.0 * shared) * tl.load(error + at, mask=inside, other=0.0).to(tl.float32)
        else:
            value = value + shared
            total += value * value
    tl.store(result + program, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=("total", "groups", "length", "size", "halvings"))
def _own_errors(
    ordered,
    sums,
    squares,
    levels,
    thresholds,
    result,
    total,
    groups,
    length,
    size,
    halvings,
    together: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0) * together + tl.arange(0, together)
    number = tl.arange(0, padded)[None, :]
    inside = (row < total)[:, None] & (number < size)
    group = (row % groups)[:, None]
    level = tl.load(levels + row[:, None] * size + number, mask=inside, other=0.0)
    cuts = thresholds + row[:, None] * (size - 1) + number
    above = inside & (number < size - 1)
    below = inside & (number > 0)
    upper = tl.load(cuts, mask=above, other=0.0)
    lower = tl.load(cuts - 1, mask=below, other=0.0)
    # The numbers of values below both cuts of each level, each by a binary search between two places.
    begin = tl.zeros((together, padded), dtype=tl.int32)
    begin_most = tl.where(below, length, 0)
    end = tl.where(above, 0, length)
    end_most = begin + length
    for _ in range(halvings):
        open_begin = begin < begin_most
        middle = (begin + begin_most) // 2
        value = tl.load(ordered + group * length + middle, mask=open_begin, other=0.0)
        passed = open_begin & (value < lower)
        begin = tl.where(passed, middle + 1, begin)
        begin_most = tl.where(open_begin & (value >= lower), middle, begin_most)
        open_end = end < end_most
        middle = (end + end_most) // 2
        value = tl.load(ordered + group * length + middle, mask=open_end, other=0.0)
        passed = open_end & (value < upper)
        end = tl.where(passed, middle + 1, end)
        end_most = tl.where(open_end & (value >= upper), middle, end_most)
    ends = group * (length + 1) + end
    begins = group * (length + 1) + begin
    sum_between = tl.load(sums + ends, mask=inside, other=0.0) - tl.load(sums + begins, mask=inside, other=0.0)
    error = tl.load(squares + ends, mask=inside, other=0.0) - tl.load(squares + begins, mask=inside, other=0.0)
    error = error - 2.0 * level * sum_between + level * level * (end - begin).to(tl.float64)
    error = tl.where(inside, error, 0.0)
    tl.store(result + row, tl.sum(error, axis=1), mask=row < total)


@triton.jit(do_not_specialize=("top", "least", "total", "groups", "lower_stride", "upper_stride"))
def _uniform_of_bounds(lower, upper, scale, zero_point, top, least, total, groups, lower_stride, upper_stride):
    place = tl.program_id(0) * _FEW + tl.arange(0, _FEW)
    inside = place < total
    row = place // groups
    column = place % groups
    low = tl.load(lower + row * lower_stride + column, mask=inside, other=0.0)
    high = tl.load(upper + row * upper_stride + column, mask=inside, other=0.0)
    low = tl.where(low > 0.0, 0.0, low)
    high = tl.where(high < 0.0, 0.0, high)
    tops = tl.zeros((_FEW,), dtype=tl.float32) + top
    step = tl.div_rn(high - low, tops)
    step = tl.where(step < least, least, step)
    zero = _limited(_rounded(tl.div_rn(-low, step), _WHOLE_FLOAT), 0.0, top)
    tl.store(scale + place, step, mask=inside)
    tl.store(zero_point + place, zero, mask=inside)
