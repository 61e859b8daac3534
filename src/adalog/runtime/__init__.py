"""Executors, which run a quantized model's products of two quantized operands in integers, and all else in float."""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from adalog.errors import AdalogError, ArtifactError, ProgramError, one_line
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.graph.tracing import trace
from adalog.quantized import QuantizedProgram
from adalog.quantizers import Quantizer
from adalog.runtime import integer, native, reference, regions
from adalog.runtime.reference import ENCODE, PRODUCT, IntegerSite

Executor = Literal["reference", "torch", "native"]
EXECUTORS = get_args(Executor)
_PLANS = 4  # `native` holds the memory of this many shapes of inputs


@dataclass(frozen=True)
class Trace:
    """The codes, accumulators and output of one site for some inputs.

    left, right: the codes of the operands, uint8; a stored weight has its own. accumulators: int64, one tensor per pair
    of parts. bias: what was added; None for nothing. output: the value with which the model goes on.
    """

    site: IntegerSite
    left: Tensor
    right: Tensor
    accumulators: tuple[Tensor, ...]
    bias: Tensor | None
    output: Tensor


class Compiled(nn.Module):
    """A quantized model that runs in integers, with the inputs and outputs of the model.

    sites: the sites that run in integers, by name; all other operations run in float, as they do in the model.
    threads, batch and level are for "native" alone. threads: how many it uses; None: as many as torch. batch: a batch
    size to prepare for. level: the kernels to use, one of `library.LEVELS`; None: the fastest that run here.
    Raises ArtifactError for a model that has no integers (`reference.plan`), and ValueError for choices that do not run
    here.
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
            raise ValueError(f"executor = {executor!r} is none of {', '.join(EXECUTORS)}")
        if executor != "native" and (threads, batch, level) != (None, None, None):
            raise ValueError(f"threads, batch and level are of the executor 'native', not of {executor!r}")
        if not quantized.example:
            raise ArtifactError("a model that was made without images has no inputs to tell: give it `example`")
        self.quantized = quantized
        self.executor = executor
        self._context = None
        if executor == "native":
            self._context = native.Context(torch.get_num_threads() if threads is None else threads, level)
        self._lock = threading.Lock()
        self._wanted = False
        self.eval()
        self._made()
        if batch is not None:
            self.prepare(batch)

    def compile(self) -> None:
        """Turn the operations between two products into one kernel each, by `torch.compile`.

        This serves the executor "torch" on a CPU with a C++ compiler, and changes nothing elsewhere. Compiling happens
        at the first inputs of each shape and takes a minute. The codes of the same values stay the same; float
        operations may differ in the last bit.
        """
        self._wanted = True
        self._made()

    def _made(self) -> None:
        try:
            self._plan()
        except AdalogError:
            raise
        except Exception as cause:  # a strange program that runs in float may raise anything here
            raise ArtifactError(f"the program has no integers: {one_line(cause)}") from cause

    def _plan(self) -> None:
        planned = reference.plan(self.quantized.program, self.quantized.example)
        self.sites = {site.name: site for site in planned}
        makers: tuple[Any, Any, Any] = reference.Encoder.key, reference.Encoder, reference.Product
        if self._context is not None:
            self._check_native()
            makers = native.encoder_key, native.encoder, functools.partial(native.product, context=self._context)
        elif self.executor == "torch":
            makers = integer.Encoder.key, integer.Encoder, integer.product
        self._apart = compiled(self.quantized.program, planned, *makers)
        self._fused = integer.fuse(*self._apart) if self.executor == "torch" else self._apart
        on_cpu = all(value.device.type == "cpu" for value in self.quantized.program.tensors.values())
        self._regions = regions.fuse(*self._apart) if self._wanted and self.executor == "torch" and on_cpu else None
        self._plans: dict[tuple[tuple[int, ...], ...], native.Plan] = {}

    def _check_native(self) -> None:
        given = [*self.quantized.example, *self.quantized.program.tensors.values()]
        odd = [value for value in given if value.device.type != "cpu" or value.dtype in (torch.float64, torch.float16)]
        if odd:
            raise ArtifactError(
                f"'native' runs in float32 on the CPU; the model is in {odd[0].dtype} on {odd[0].device}"
            )

    def prepare(self, batch: int, *shapes: Sequence[int]) -> native.Plan:
        """The calls by which "native" runs inputs of this batch size, made once and held for the last few shapes.

        shapes: of one image of each input, (C, H, W), where sizes are free; by default those of the calibration.
        Raises ValueError for another executor, for a batch of no image, and for shapes that the model does not take.
        """
        if self._context is None or batch < 1:
            raise ValueError(f"batch = {batch}: only 'native' prepares for a batch, of one image or more")
        example = self.quantized.example
        given = list(shapes or [value.shape[1:] for value in example])
        if len(given) != len(example) or not all(isinstance(shape, Sequence) for shape in given):
            raise ValueError(f"shapes = {shapes}: give one (C, H, W) for each of the {len(example)} inputs")
        wanted = tuple((batch, *shape) for shape in given)
        with self._lock:
            if wanted not in self._plans:
                both = list(zip(wanted, example, strict=True))
                # Without data first: what the model refuses may be too large to be made.
                self.quantized.check([torch.empty(shape, dtype=value.dtype, device="meta") for shape, value in both])
                inputs = [torch.zeros(shape, dtype=value.dtype) for shape, value in both]
                if len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                with torch.inference_mode(False), torch.no_grad():  # a later call may write into its memory outside
                    values = trace(self.quantized.program, inputs)
                    self._plans[wanted] = native.Plan(*self._apart, self._context, inputs, values)
            return self._plans[wanted]

    @property
    def weight_bytes(self) -> int:
        """The bytes that a run reads of the weights of `sites`."""
        return sum(self._apart[1][site.node.name].nbytes for site in self.sites.values())

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Any:
        """The model's outputs for its positional inputs, without gradients. Raises what the model raises."""
        self._check(inputs)
        batches = {len(value) for value in inputs}
        if self._context is not None and len(batches) == 1 and batches != {0}:
            return self.prepare(batches.pop(), *(value.shape[1:] for value in inputs))(inputs)
        if self._regions is not None:
            program, steps = self._regions
            try:
                return program.run(inputs, None, steps)
            except ProgramError:  # there is no compiler; any other failure comes again below
                self._regions = None
        program, steps = self._fused
        return program.run(inputs, None, steps)

    def _check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError for inputs that the model does not take, or that hold NaN, which has no code."""
        self.quantized.check(inputs)
        if torch.compiler.is_compiling():  # values are looked at by calls alone
            return
        for number, value in enumerate(inputs, 1):
            if isinstance(value, Tensor) and bool(value.isnan().any()):
                raise ValueError(f"input {number} holds NaN, which has no code")

    @torch.no_grad()
    def codes(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The codes of every operand that is multiplied in integers, by its quantizer's name: uint8."""
        self._check(inputs)
        program, steps = self._apart
        found: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.op == ENCODE:
                found[node.name.rpartition("#")[0].rstrip("#")] = (
                    steps[node.name].quantizer.quantize(args[0]).to(torch.uint8)
                )

        program.run(inputs, watch, steps)
        return found

    @torch.no_grad()
    def trace(self, name: str, *inputs: Tensor) -> Trace:
        """The trace of the site of this name for these inputs. Raises ValueError for an unknown site."""
        if name not in self.sites:
            raise ValueError(f"site = {name!r} is none of the {len(self.sites)} in integers: {', '.join(self.sites)}")
        self._check(inputs)
        site, (program, steps) = self.sites[name], self._apart
        made = {arg.name for node in program.nodes if node.name == site.node.name for arg in node.args[:2] if arg}
        codes: dict[str, Tensor] = {}
        found: list[Trace] = []

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.name in made:
                codes[node.name] = steps[node.name].quantizer.quantize(args[0]).to(torch.uint8)
            elif node.name == site.node.name:
                sums = steps[node.name].accumulate(*args[:2])
                right = codes[node.args[1].name] if site.weight is None else site.weight
                found.append(Trace(site, codes[node.args[0].name], right, tuple(sums), args[2], result))

        program.run(inputs, watch, steps)
        return found[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Compiled":
        before = self.quantized
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            self.quantized = before.map_tensors(fn)
            self._made()
        except Exception:
            self.quantized = before
            self._made()
            raise
        return self


def compiled(
    program: Program,
    planned: Sequence[IntegerSite],
    key: Callable[[IntegerSite], str],
    encoder: Callable[[Quantizer, IntegerSite], Any],
    product: Callable[[IntegerSite], Any],
) -> tuple[Program, dict[str, Any]]:
    """The program with the planned sites in integers, and the functions of their nodes, by name.

    A quantizer of several sites encodes once for all sites that have the same key. It also stays as it was if a float
    operation reads it. encoder, product: the classes by which an executor encodes an operand and multiplies at a site.
    """
    sites = {site.node.name: site for site in planned}
    fakes = {node.name: node for node in program.nodes if node.op == FAKE_QUANTIZE}
    steps: dict[str, Any] = {}
    nodes: list[Node] = []

    def encoded(arg: Ref, quantizer: Quantizer, site: IntegerSite) -> Ref:
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
        left = encoded(left, site.left, site)
        right = encoded(right, site.right, site) if site.weight is None else None
        bias = rest[0] if rest and site.weight is not None else None
        steps[node.name] = product(site)
        nodes.append(Node(node.name, PRODUCT, (left, right, bias), scope=node.scope))
    return replace(program, nodes=tuple(nodes)).pruned(), steps
