"""Measure the time of each call of the executor "native", and compare it with the least that the roofs allow.

    python benchmarks/trace.py FILE [--batch 1 8] [--seconds 3] [--json F]

FILE is an artifact. The script traces it at each batch size, on one thread, and prints one JSON object or saves it as
F: the "roofs" of this processor (see `roof.py`), and one of the "traces" per batch size (see `trace`).
"""

from benchmarks.roof import Roofs, measure

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adalog import AdalogError, load
from adalog.files import write_whole
from adalog.graph.convolution import output_sizes
from adalog.model import QuantizedModel
from adalog.runtime.native import abi
from adalog.runtime.native.arena import PlanCall
from adalog.runtime.native.products import ByteProduct
from adalog.study.bench import on_one_thread

_LEAST = 5  # the least number of runs


@dataclass(frozen=True)
class Work:
    """The least work of a call.

    shape: the sizes that determine it, named in `SHAPES`.
    products: products of two bytes.
    narrow: those of them whose sums of two products fit in 16 bits, whatever the bytes.
    exps: values of a softmax.
    erfs: values of an activation function; kernels compute them without erf.
    bytes: of the operands and results.
    weights: bytes of a stored weight.
    """

    shape: tuple[int, ...]
    products: int = 0
    narrow: int = 0
    exps: int = 0
    erfs: int = 0
    bytes: int = 0
    weights: int = 0


# The sizes of a call, by its kernel. For other operations they are the sizes of the result.
SHAPES = {
    "linear": ("rows", "terms", "columns"),
    "product": ("batches", "heads", "rows", "terms", "columns"),
    "attention": ("batches", "heads", "rows", "terms", "keys", "columns"),
    "norm": ("rows", "columns"),
    "encode": ("rows", "columns"),
    "patches": ("images", "channels", "height", "width"),
    "depthwise": ("images", "channels", "height", "width", "places"),
}


def work_of(call: PlanCall, weights: Mapping[int, ByteProduct]) -> Work:
    """Return the work of a call.

    weights: the products with stored weights, by the address of the weight.
    """
    of: Any = call.arguments
    if isinstance(of, abi.Linear):
        product = weights[of.weights]
        assert product.weights is not None
        bits, _, top = product.weights.choices
        terms, columns, planes = product.site.terms, product.columns, 2 if of.more else 1
        entries, moved = of.rows * columns, planes * of.rows * terms
        erfs = entries if of.out.kind == abi.STEPS or of.out.activation else 0
        size = moved + entries * _bytes_of(of.out)
        if of.out.residual:  # a residual that all images share is read once
            size -= max(0, 4 * entries - of.out.residual_bytes)
        products = moved * columns
        return Work((of.rows, terms, columns), products, products * fits(top, bits), 0, erfs, size, product.nbytes)
    if isinstance(of, abi.Matrices):
        shape, moved, right = _matrices(of)
        size = moved + right + of.batches * of.heads * of.rows * of.columns * _bytes_of(of.out)
        products = moved * of.columns
        return Work(shape, products, products * fits(of.left.top, of.right.bits), bytes=size)
    if isinstance(of, abi.Attention):
        (batches, heads, rows, terms, keys), queries, right = _matrices(of.scores)
        exps, values = batches * heads * rows * keys, batches * heads * keys * of.columns
        first, second = exps * terms, exps * of.columns * of.steps.planes
        narrow = first * fits(of.scores.left.top, of.scores.right.bits) + second * fits(of.steps.top, of.values.bits)
        size = queries + right + values + batches * heads * rows * of.columns * _bytes_of(of.out)
        return Work((batches, heads, rows, terms, keys, of.columns), first + second, narrow, exps, 0, size)
    if isinstance(of, (abi.Norm, abi.Encode)):
        rows = _kept(of.out, of.rows)
        entries = rows * of.columns
        return Work(
            (rows, of.columns), erfs=entries if of.out.activation else 0, bytes=entries * (4 + _bytes_of(of.out))
        )
    if isinstance(of, abi.Patches):
        return Work((of.images, of.channels, of.height, of.width), bytes=of.bytes + of.out_bytes)
    if isinstance(of, abi.Depthwise):
        windows: Any = (tuple(getattr(of, name)) for name in ("kernel", "stride", "padding", "dilation"))
        places = of.kernel[0] * of.kernel[1]
        entries = of.images * of.channels * math.prod(output_sizes((of.height, of.width), *windows))
        size = of.images * of.channels * of.height * of.width + entries * _bytes_of(of.out)
        erfs = entries if of.out.kind == abi.STEPS or of.out.activation else 0
        shape = of.images, of.channels, of.height, of.width, places
        return Work(shape, entries * places, 0, 0, erfs, size, 2 * of.factor_count)
    if of is None:  # a call of torch, whose results are unknown here
        return Work(())
    out, args = of
    tensors = [each for arg in (out, *args) for each in (arg if isinstance(arg, (tuple, list)) else [arg])]
    return Work(tuple(out.shape), bytes=sum(each.nbytes for each in tensors if isinstance(each, Tensor)))


def fits(top: int, bits: int) -> bool:
    """Return True if the sum of two products of a byte up to `top` and a code of this many bits fits in 16 bits."""
    return 2 * max(1, top) * (2**bits - 1 if bits < 8 else 128) < 2**15


def _matrices(of: Any) -> tuple[tuple[int, ...], int, int]:
    """Return (batches, heads, rows, terms, columns) of a product, and the bytes of each operand."""
    shape = tuple(getattr(of, name) for name in SHAPES["product"])
    batches, heads, rows, terms, columns = shape
    planes = 2 if of.left.more else 1
    return shape, batches * heads * rows * terms * planes, batches * heads * terms * columns


def _kept(out: abi.Output, rows: int) -> int:
    """Return the number of rows that are written; a norm skips rows that nobody reads."""
    if not out.place:
        return rows
    return sum(place >= 0 for place in (ctypes.c_int32 * rows).from_address(out.place))


def _bytes_of(out: abi.Output) -> int:
    """Return the bytes written per entry of a result, plus the bytes of the value that it is added to."""
    size = 4 if out.kind in (abi.SUMS, abi.FLOATS) else 2 if out.more else 1
    return size + (4 if out.residual else 0)


def least(work: Work, roofs: Roofs, weights: int) -> dict[str, float]:
    """Return the seconds that each part of a call's work takes at the roofs, and the least for the call ("limit").

    Reading overlaps with computing, so a call takes at least the longer of the two.
    weights: bytes of all weights of the model, which determine the cache or memory that they are read from.
    """
    found = {
        "products": (work.products - work.narrow) / roofs.dots + work.narrow / roofs.narrow,
        "values": work.exps / roofs.exps + work.erfs / roofs.erfs,
        "traffic": work.bytes / roofs.read(work.bytes) + work.weights / roofs.read(weights),
    }
    return {**found, "limit": max(found["products"] + found["values"], found["traffic"])}


@torch.no_grad()
def trace(model: QuantizedModel, batch: int, roofs: Roofs, seconds: float = 2.0) -> dict[str, Any]:
    """Return the calls for a batch on one thread, with the time [us] and the share of the roof of each, as JSON.

    A time is the CPU time of the thread, on random images, as the least of all runs in the given seconds. "over_limit"
    is the time of a whole run divided by the sum of its calls' limits. Raises as `QuantizedModel.compile` does.
    """
    compiled = model.compile("native", threads=1, batch=batch, level=roofs.level)
    plan, inputs = compiled.prepare(batch), model.quantized.noise(batch)
    times: list[list[float]] = []
    whole: list[float] = []

    def run() -> None:
        stop = time.perf_counter() + seconds
        while len(times) < _LEAST or time.perf_counter() < stop:
            start = time.thread_time()
            plan(inputs)
            whole.append(time.thread_time() - start)
            times.append(plan.times(inputs))

    on_one_thread(run)()
    products = (each for each in plan.functions.values() if isinstance(each, ByteProduct))
    stored = {each.weights.pointer: each for each in products if each.weights is not None}
    rows, totals = [], dict.fromkeys(("products", "values", "traffic", "limit"), 0.0)
    for call, taken in zip(plan.calls, zip(*times, strict=True), strict=True):
        work = work_of(call, stored)
        parts = least(work, roofs, compiled.weight_bytes)
        totals = {name: totals[name] + parts[name] for name in totals}
        rows.append(
            {
                "step": call.step,
                "operation": call.operation,
                **vars(work),
                "microseconds": 1e6 * min(taken),
                "roof_microseconds": 1e6 * parts["limit"],
                "share": parts["limit"] / min(taken),
            }
        )
    told = {f"{name}_ms": 1e3 * value for name, value in totals.items()}
    calls, best = sum(row["microseconds"] for row in rows), min(whole)
    return {
        "batch": batch,
        "runs": len(times),
        "ms": 1e3 * best,
        "calls_ms": calls / 1e3,
        **told,
        "over_limit": best / totals["limit"],
        "shapes": SHAPES,
        "rows": rows,
    }


def by_operation(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the total time of the calls of each operation in a trace, the longest first."""
    sums: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        each = sums.setdefault(row["operation"], {"calls": 0, "ms": 0.0, "limit_ms": 0.0})
        each["calls"] += 1
        each["ms"] += row["microseconds"] / 1e3
        each["limit_ms"] += row["roof_microseconds"] / 1e3
    return dict(sorted(sums.items(), key=lambda item: -item[1]["ms"]))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="artifact, written by `adalog quantize`")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="numbers of images per batch")
    parser.add_argument("--seconds", type=float, default=3, help="seconds to spend on each batch size; at least 5 runs")
    parser.add_argument("--json", type=Path, help="file to write instead of standard output")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    try:
        model, roofs = load(asked.file), measure()
        traces = [trace(model, batch, roofs, asked.seconds) for batch in sorted(set(asked.batch))]
    except (AdalogError, ValueError) as cause:
        sys.exit(f"{asked.file} cannot be traced: {cause}")
    text = json.dumps({"file": str(asked.file), "roofs": roofs.json(), "traces": traces}, indent=1) + "\n"
    if asked.json is None:
        print(text, end="")
    else:
        write_whole(asked.json, text.encode())


if __name__ == "__main__":
    main()
