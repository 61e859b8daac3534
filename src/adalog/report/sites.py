"""Collect the facts about each site of a file: both operands with their levels and values, and the site's cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.operands import operand_kinds
from adalog.errors import ArtifactError, converting
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node
from adalog.graph.sites import find_blocks, find_sites
from adalog.ledger import LedgerRow
from adalog.quantized import QuantizedProgram
from adalog.quantizers import FLOAT_BITS, LogQuantizer, QuantizedTensor, Quantizer
from adalog.study.cost import Cost, CostRow, cost, quantizers_of

BARS = 64
MOST_SCALES = 8  # scales whose levels are shown, one row each
_OCTAVES = 16  # longest span of a logarithmic axis


@dataclass(frozen=True)
class Axis:
    """An axis that places values from 0 to 1; `lift` is added to them before the logarithm, if it has one."""

    low: float
    high: float
    lift: float = 0.0
    logarithmic: bool = False

    @staticmethod
    def of(quantizer: Quantizer) -> "Axis":
        """Return an axis that reaches a little beyond the levels."""
        levels = quantizer.levels().double()
        if isinstance(quantizer, LogQuantizer):
            above = levels + quantizer.lift
            octaves = above[above > 0].log2()
            high = float(octaves.max()) + 0.5
            return Axis(max(float(octaves.min()) - 1, high - _OCTAVES), high, quantizer.lift, True)
        margin = 0.1 * float(levels[-1] - levels[0]) or 1.0
        return Axis(float(levels[0]) - margin, float(levels[-1]) + margin)

    def place(self, values: Tensor) -> Tensor:
        """Return the positions of the values; values beyond the axis lie at its ends."""
        if self.logarithmic:
            values = (values + self.lift).clamp(min=2.0**self.low).log2()
        return ((values - self.low) / (self.high - self.low)).clamp(0, 1)

    @property
    def ends(self) -> tuple[float, float]:
        return (2.0**self.low - self.lift, 2.0**self.high - self.lift) if self.logarithmic else (self.low, self.high)


@dataclass
class ValueHistogram:
    """The values of an operand on some images: counts per bar of its axis, and the least and the greatest value."""

    axis: Axis
    counts: Tensor = field(default_factory=lambda: torch.zeros(BARS, dtype=torch.int64))
    least: float = float("inf")
    greatest: float = float("-inf")

    def add(self, values: Tensor) -> None:
        places = self.axis.place(values.detach().float())
        self.counts += torch.histc(places, BARS, 0, 1).to(torch.int64)
        self.least, self.greatest = min(self.least, float(values.min())), max(self.greatest, float(values.max()))


@dataclass(frozen=True)
class OperandFacts:
    """One operand of a site.

    kind: "weight", "activation", "softmax" or "input". words: its quantizer, as in the ledger.
    bits: 32 in float; None if the file's program does not have the site. weight: its codes, if it is a stored weight.
    """

    kind: str
    words: str
    bits: int | None = None
    quantizer: Quantizer | None = None
    weight: QuantizedTensor | None = None
    histogram: ValueHistogram | None = None

    @property
    def code_counts(self) -> Tensor:
        """The count of each code of a weight; neighbouring codes are merged into at most `BARS` counts."""
        assert self.weight is not None
        counts = torch.bincount(self.weight.codes.flatten().int(), minlength=2**self.weight.bits)
        return counts if len(counts) <= BARS else counts.reshape(BARS, -1).sum(dim=1)

    @property
    def levels(self) -> list[Tensor]:
        """The levels for each of the first `MOST_SCALES` scales."""
        if self.quantizer is None:
            return []

        def levels_of(index: int, quantizer: Quantizer) -> Tensor:  # one parameter may serve all scales
            return quantizer.map(lambda value: value.reshape(-1)[index % value.numel()]).levels()

        return [levels_of(index, self.quantizer) for index in range(min(self.quantizer.scale.numel(), MOST_SCALES))]


@dataclass(frozen=True)
class SiteFacts:
    """A row of the ledger, with its block from 0, FixOPs per image, and bytes of codes, scales and zero points."""

    row: LedgerRow
    left: OperandFacts
    right: OperandFacts
    block: int = 0
    fixops: float = 0.0
    weight_bytes: int = 0

    @property
    def operands(self) -> tuple[OperandFacts, OperandFacts]:
        return self.left, self.right

    @property
    def bits(self) -> str:
        """The bits of the left and the right operand, such as "4 × 4"."""
        return " × ".join({None: "?", FLOAT_BITS: "float"}.get(side.bits, str(side.bits)) for side in self.operands)


@dataclass(frozen=True)
class ReportData:
    """A file with everything that a report shows. images: the number of images for the histograms of activations."""

    name: str
    content: bytes
    quantized: QuantizedProgram
    cost: Cost
    sites: tuple[SiteFacts, ...]
    images: int = 0

    @property
    def float_bytes(self) -> int:
        """The bytes of all tensors in their own types, without codes."""
        return sum(value.nbytes for value in self.quantized.program.tensors.values())


@torch.no_grad()
def examine(
    name: str,
    content: bytes,
    quantized: QuantizedProgram,
    images: Tensor | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReportData:
    """Collect everything that a report shows about an artifact.

    content: the bytes of the file. quantized: the program in it. progress: called with the number of images done.
    images: (N, C, H, W), to run the model on for the histograms of activations, or None.
    Raises ProgramError or ValueError if the program cannot run on the images, and ArtifactError for a program that
    `adalog quantize` would not make.
    """
    histograms = {} if images is None else _observe(quantized, images, progress)
    refusal = f"{name} holds a program that a report cannot show ("
    with converting(ArtifactError, refusal, "); make it with `adalog quantize`"):  # even one that runs may be malformed
        model_cost = cost(quantized.program, quantized.example)
        sites = _facts(quantized, model_cost, histograms)
    return ReportData(name, content, quantized, model_cost, sites, 0 if images is None else len(images))


def _facts(
    quantized: QuantizedProgram, model_cost: Cost, histograms: Mapping[str, ValueHistogram]
) -> tuple[SiteFacts, ...]:
    """Return the rows of the ledger with facts from the program. histograms: by the name of the quantizer."""
    program = quantized.program
    plain, _ = program.unquantize()
    blocks = {name: number for number, block in enumerate(find_blocks(plain)) for name in block.nodes}
    costs: dict[str, list[CostRow]] = {}
    for row in model_cost.products:
        costs.setdefault(row.name, []).append(row)
    quantizers = quantizers_of(program)
    nodes = {node.name: node for node in program.nodes}
    read_by = {node.name: node.args[1] for node in program.nodes if node.op == FAKE_QUANTIZE}
    sites = {_ledger_name(site.name): site for site in find_sites(plain)}

    def operand(kind: str, words: str, name: str) -> OperandFacts:
        quantizer = quantizers.get(name)
        bits = FLOAT_BITS if quantizer is None else quantizer.bits
        return OperandFacts(
            kind, words, bits, quantizer, program.weights.get(name), histograms.get(read_by.get(name, ""))
        )

    def facts(row: LedgerRow) -> SiteFacts:
        kinds, site = operand_kinds(row.role, row.source), sites.get(row.site)
        if site is None:  # the ledger of a file may name any site
            return SiteFacts(row, OperandFacts(kinds[0], row.left), OperandFacts(kinds[1], row.right))
        names = [ref.name for ref in nodes[site.node.name].args[:2]]
        left, right = (operand(*arguments) for arguments in zip(kinds, (row.left, row.right), names, strict=True))
        rows = [entry for call in site.calls for entry in costs.get(call.name, [])]
        fixops, weight_bytes = (sum(getattr(entry, name) for entry in rows) for name in ("fixops", "weight_bytes"))
        return SiteFacts(row, left, right, blocks[site.node.name], fixops, weight_bytes)

    return tuple(facts(row) for row in quantized.ledger)


def _ledger_name(name: str) -> str:
    """Return the ledger's name for a site of the rewritten program, in which a shared weight may have copies."""
    base, copied, _ = name.partition("#")
    return base.removesuffix(".weight") if copied else name


def _observe(
    quantized: QuantizedProgram, images: Tensor, progress: Callable[[int], None] | None
) -> dict[str, ValueHistogram]:
    """Return the values that each quantizer of the program reads, by its name."""
    program = quantized.program
    histograms = {name: ValueHistogram(Axis.of(quantizer)) for name, quantizer in program.quantizers.items()}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.op == FAKE_QUANTIZE:
            histograms[node.args[1]].add(args[0])

    quantized.check([images])
    for done, batch in enumerate(images.split(2)):
        program.run([batch], watch)
        if progress is not None:
            progress(min(2 * done + 2, len(images)))
    return histograms
