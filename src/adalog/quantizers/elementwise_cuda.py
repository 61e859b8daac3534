"""Choose codes in turn on a CUDA device, in one launch of a Triton kernel for a block of rows.

PyTorch takes about eight launches per row instead. `elementwise.codes_in_turn` imports this module only for tensors on
such a device, because Triton is optional. As in the compiled library, nothing is contracted to fused multiply-adds, so
that both choose the same codes from the same numbers.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # held in registers
_WIDTH = 8  # outputs per program: with few of them there are many programs, each of one warp
_WHOLE = 1.5 * 2.0**52  # added to a float64 of moderate size, it rounds to whole numbers, halves to even
_MODERATE = 2.0**22  # beyond all codes


def launch_codes_in_turn(
    left: Tensor,
    form: Tensor,
    base: Tensor | None,
    scale: Tensor,
    zero_point: Tensor,
    top: int,
    codes: Tensor,
    moved: Tensor,
) -> None:
    """Launch the kernel that fills `codes` and `moved`; it does not wait for the device.

    left, base, codes: (G, n, O) with n <= 64, blocks of contiguous (G, K, O). form: (G, n, n), any strides. scale,
    zero_point: (G, 1, O), contiguous. moved: (G, n, O), contiguous. All are float64; `elementwise.codes_in_turn`
    describes the values.
    """
    groups, rows, outputs = left.shape
    grid = (triton.cdiv(outputs, _WIDTH), groups)
    strides = (left.stride(0), *form.stride())
    tensors = (left, form, base, scale, zero_point, codes, moved)
    sizes = (_ROWS, _WIDTH, _WHOLE, _MODERATE)
    _codes_in_turn[grid](*tensors, float(top), rows, outputs, *strides, *sizes, num_warps=1, enable_fp_fusion=False)


# Sizes and strides are not specialised, so that one compiled kernel serves all weights.
@triton.jit(do_not_specialize=("top", "rows", "outputs", "stride", "form_group", "form_row", "form_column"))  # type: ignore[untyped-decorator]
def _codes_in_turn(  # type: ignore[no-untyped-def]
    left,
    form,
    base,
    scale,
    zero_point,
    codes,
    moved,
    top,
    rows,
    outputs,
    stride,
    form_group,
    form_row,
    form_column,
    most_rows: tl.constexpr,
    width: tl.constexpr,
    whole: tl.constexpr,
    moderate: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * width + tl.arange(0, width)
    inside = output < outputs
    row = tl.arange(0, most_rows)
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
        code = value / step
        code = tl.where(code < -moderate, -moderate, code)
        code = tl.where(code > moderate, moderate, code)
        code = (code + whole) - whole + zero
        code = tl.where(code < 0.0, 0.0, code)
        code = tl.where(code > top, top, code)
        level = (code - zero) * step
        if base is not None:
            change = level - now
        else:
            change = (value - level) / own
        tl.store(codes + at, code, mask=inside)
        tl.store(moved + (group * rows + number) * outputs + output, change, mask=inside)
        pull = pull - later[:, None] * change[None, :]
