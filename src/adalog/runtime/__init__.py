"""Run the products of two quantized operands of a model in integers, and all its other operations in float."""

import difflib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from adalog.errors import ArtifactError, converting
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.graph.tracing import trace
from adalog.quantized import QuantizedProgram
from adalog.quantizers import Quantizer
from adalog.runtime import integer, native, reference
from adalog.runtime.reference import ENCODE, PRODUCT, IntegerSite

Executor = Literal["reference", "torch", "native"]
EXECUTORS = get_args(Executor)
_PLANS = 4  # `native` keeps plans for this many shapes of inputs


@dataclass(frozen=True)
class Trace:
    """The values, codes, accumulators and output of one site for some inputs.

    values: the values of the operands that are not stored, left before right. left, right: the codes of the operands,
    uint8; for a stored weight, its stored codes. accumulators: int64, one tensor per pair of parts. bias: the bias that
    was added, or None. output: the value that the site returns.
    """

    site: IntegerSite
    values: tuple[Tensor, ...]
    left: Tensor
    right: Tensor
    accumulators: tuple[Tensor, ...]
    bias: Tensor | None
    output: Tensor


class Compiled(nn.Module):
    """A quantized model that runs in integers and has the same inputs and outputs as the model.

    sites: the sites that run in integers, by name. All other operations run in float, as they do in the model.
    Only the executor "native" takes threads (None uses as many as torch), batch (a batch size to prepare for) and level
    (one of `library.LEVELS`; None uses the fastest that runs on this machine).
    Raises ArtifactError if the model cannot run in integers (see `reference.plan`), and ValueError for options that do
    not run on this machine.
    """

    def __init__(
        self,
        quantized: QuantizedProgram,
        executor: str,
        *,
        threads: int | None = None,
        batch: int | None = None,
        level: str | None = None,
    ):
        super().__init__()
        if executor not in EXECUTORS:
            raise ValueError(f"executor = {executor!r} is not one of {', '.join(EXECUTORS)}")
        if executor != "native" and (threads, batch, level) != (None, None, None):
            raise ValueError(f"only executor = 'native' takes threads, batch and level, not {executor!r}")
        if not quantized.example:
            raise ArtifactError("the model was made without images, so its input shapes are unknown: set its `example`")
        self.quantized, self.executor, self._context = quantized, executor, None
        if executor == "native":
            self._context = native.Context(torch.get_num_threads() if threads is None else threads, level)
        self._lock = threading.Lock()
        self.eval()
        self._prepare_plans()
        if batch is not None:
            self.prepare(batch)

    def _prepare_plans(self) -> None:
        makers: tuple[Any, Any, Any] = lambda site: "codes", reference.CodeEncoder, reference.CodeProduct
        if self.executor == "torch":
            makers = integer.DigitEncoder.key, integer.DigitEncoder, integer.product
        elif self._context is not None:
            makers = native.encoder_key, native.encoder, functools.partial(native.product, context=self._context)
        # An unusual program that runs in float may raise anything here.
        with converting(ArtifactError, "the program cannot run in integers: "):
            sites = reference.plan(self.quantized.program, self.quantized.example)
            self.sites = {site.name: site for site in sites}
            self._check_native()
            self._apart = compile_program(self.quantized.program, sites, *makers)
            self._fused = integer.fuse(*self._apart) if self.executor == "torch" else self._apart
        self._plans: dict[tuple[tuple[int, ...], ...], native.Plan] = {}

    def _check_native(self) -> None:
        tensors = [*self.quantized.example, *self.quantized.program.tensors.values()]
        unsupported = [
            value for value in tensors if value.device.type != "cpu" or value.dtype in (torch.float64, torch.float16)
        ]
        if self._context is not None and unsupported:
            raise ArtifactError(
                f"executor = 'native' runs in float32 on the CPU, but the model is in {unsupported[0].dtype} on "
                f"{unsupported[0].device}: convert or move it"
            )

    def prepare(self, batch: int, *shapes: Sequence[int]) -> native.Plan:
        """Return the plan with which "native" runs a batch of this size. Plans for the last few shapes are kept.

        shapes: the shape of one image of each input, (C, H, W), for a model that takes several sizes; by default the
        shapes of the calibration images. Raises ValueError for another executor, for a batch smaller than 1, and for
        shapes that the model does not take.
        """
        if self._context is None or batch < 1:
            raise ValueError(f"batch = {batch}: only 'native' prepares for a batch, and it needs at least 1 image")
        example = self.quantized.example
        image_shapes = list(shapes or [value.shape[1:] for value in example])
        if len(image_shapes) != len(example) or not all(isinstance(shape, Sequence) for shape in image_shapes):
            raise ValueError(f"shapes = {shapes}: give one (C, H, W) for each of the {len(example)} inputs")
        input_shapes = tuple((batch, *shape) for shape in image_shapes)
        with self._lock:
            if input_shapes not in self._plans:
                pairs = list(zip(input_shapes, example, strict=True))
                # Check without data first: a shape that the model refuses may be too large to allocate.
                self.quantized.check([torch.empty(shape, dtype=value.dtype, device="meta") for shape, value in pairs])
                inputs = [torch.zeros(shape, dtype=value.dtype) for shape, value in pairs]
                if len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                with torch.inference_mode(False), torch.no_grad():  # later calls write to this memory outside of it
                    values = trace(self.quantized.program, inputs)
                    self._plans[input_shapes] = native.Plan(*self._apart, self._context, inputs, values)
            return self._plans[input_shapes]

    @property
    def weight_bytes(self) -> int:
        """Number of bytes that one run reads from the weights of `sites`."""
        return sum(self._apart[1][site.node.name].nbytes for site in self.sites.values())

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Any:
        """Return the model's outputs for its positional inputs, without gradients. Raises what the model raises."""
        self._check(inputs)
        batches = {len(value) for value in inputs}
        if self._context is not None and len(batches) == 1 and batches != {0}:
            return self.prepare(batches.pop(), *(value.shape[1:] for value in inputs))(inputs)
        program, steps = self._fused
        return program.run(inputs, None, steps)

    def _check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError for inputs that the model does not take, or that contain NaN, which cannot be quantized."""
        self.quantized.check(inputs)
        if torch.compiler.is_compiling():  # the compiler has shapes but no values to check
            return
        for number, value in enumerate(inputs, 1):
            # A maximum is NaN if any value is, and takes less time than a test of each value.
            if isinstance(value, Tensor) and value.numel() and bool(value.max().isnan()):
                raise ValueError(f"input {number} contains NaN, which cannot be quantized")

    @torch.no_grad()
    def codes(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the codes of every operand that is multiplied in integers, uint8, by its quantizer's name."""
        self._check(inputs)
        program, steps = self._apart
        codes_of: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.op == ENCODE:
                codes = steps[node.name].quantizer.quantize(args[0])
                codes_of[node.name.rpartition("#")[0].rstrip("#")] = codes.to(torch.uint8)

        program.run(inputs, watch, steps)
        return codes_of

    def trace(self, name: str, *inputs: Tensor) -> Trace:
        """Return the trace of the site with this name for these inputs. Raises ValueError for an unknown site."""
        return self.traces([name], *inputs)[name]

    @torch.no_grad()
    def traces(self, names: Iterable[str], *inputs: Tensor) -> dict[str, Trace]:
        """Return the traces of the sites with these names, from one run. Raises ValueError for an unknown site."""
        sites = {}
        for name in names:
            if name not in self.sites:
                similar = ", ".join(difflib.get_close_matches(name, self.sites, 3, 0))
                known = f"the {len(self.sites)} sites that run in integers; the closest are {similar or 'none'}"
                raise ValueError(f"site = {name!r} is not one of {known} (`adalog inspect FILE` lists all sites)")
            sites[self.sites[name].node.name] = self.sites[name]
        self._check(inputs)
        program, steps = self._apart
        operands = {arg.name for node in program.nodes if node.name in sites for arg in node.args[:2] if arg}
        values: dict[str, Tensor] = {}
        traces: dict[str, Trace] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.name in operands:
                values[node.name] = args[0]
            elif site := sites.get(node.name):
                refs = [arg.name for arg in node.args[:2] if arg]
                codes = [steps[ref].quantizer.quantize(values[ref]).to(torch.uint8) for ref in refs]
                left, right = codes if site.weight is None else (codes[0], site.weight)
                sums = tuple(steps[node.name].accumulate(*args[:2]))
                observed = tuple(values[ref] for ref in refs)
                traces[site.name] = Trace(site, observed, left, right, sums, args[2], result)

        program.run(inputs, watch, steps)
        return traces

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Compiled":
        before = self.quantized
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            self.quantized = before.map_tensors(fn)
            self._prepare_plans()
        except Exception:
            self.quantized = before
            self._prepare_plans()
            raise
        return self


def compile_program(
    program: Program,
    planned: Sequence[IntegerSite],
    key: Callable[[IntegerSite], str],
    encoder: Callable[[Quantizer, IntegerSite], Any],
    product: Callable[[IntegerSite], Any],
) -> tuple[Program, dict[str, Any]]:
    """Return the program with the planned sites in integers, and the functions of its new nodes by name.

    Sites with the same `key` that share a quantizer also share one encoded operand. A quantizer also stays in the
    program if a float operation reads it. encoder, product: create the executor's encoders and products.
    """
    sites = {site.node.name: site for site in planned}
    fakes = {node.name: node for node in program.nodes if node.op == FAKE_QUANTIZE}
    steps: dict[str, Any] = {}
    nodes: list[Node] = []

    def encode(arg: Ref, quantizer: Quantizer, site: IntegerSite) -> Ref:
        fake = fakes[arg.name]
        name = f"{fake.name}#{key(site)}"
        if name not in steps:
            steps[name] = encoder(quantizer, site)
            nodes.append(Node(name, ENCODE, fake.args[:1], scope=fake.scope))
        return Ref(name)

    for node in program.nodes:
        site = sites.get(node.name)
        if site is None:
            nodes.append(node)
            continue
        left, right, *rest = node.args
        left = encode(left, site.left, site)
        right = encode(right, site.right, site) if site.weight is None else None
        bias = rest[0] if rest and site.weight is not None else None
        steps[node.name] = product(site)
        nodes.append(Node(node.name, PRODUCT, (left, right, bias), scope=node.scope))
    return replace(program, nodes=tuple(nodes)).prune(), steps
