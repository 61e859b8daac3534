"""Measure the loss of the model's output with one operand alone quantized, at each width.

One kind of operand of a unit is quantized, everything else stays float, and the output is compared with the float one
on held-out images. The sum of these losses predicts the loss of a mix of widths, which a budget uses.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from adalog.calibration.calibration import Calibration, digest
from adalog.calibration.operands import OperandKind, operand_kinds, together
from adalog.calibration.partial import raw_bytes
from adalog.calibration.schedule import SERIAL, Resources
from adalog.calibration.values import Values
from adalog.config import Config
from adalog.errors import DataError
from adalog.finished import FinishedParts
from adalog.graph.operations import PRODUCTS
from adalog.graph.program import Program, refs_of
from adalog.graph.rewrite import Assigned, SiteGroup, rewrite
from adalog.graph.sites import find_source
from adalog.graph.tracing import size_in_bytes
from adalog.inputs.refusals import refusal
from adalog.quantizers import FLOAT_BITS, Assignment, QuantizedTensor, UniformQuantizer, bounds_to_uniform
from adalog.ranks import Codec, json_codec
from adalog.search.bounds import Search
from adalog.search.product import Product
from adalog.stored import is_whole
from adalog.study.cost import cost
from adalog.study.evaluate import divergence

WIDTHS = (2, 3, 4, 6, 8)  # default widths [bits]
JUDGED = 128  # default number of evaluation images
_BATCH = 32  # images per batch
_MOST = 2**53  # upper limit of any count
_WAY_OUT = "measure this model with `adalog sensitivity`"
Measure = Literal["kl", "relative squared error"]


@dataclass(frozen=True)
class UnitSite:
    """A site of a unit: MACs per image, values of its weight (0 for attention), and the kinds of its operands."""

    site: str
    macs: int
    weights: int
    left: OperandKind
    right: OperandKind


@dataclass(frozen=True)
class Unit:
    """Sites whose bits change together, since they share an activation or a folded norm."""

    sites: tuple[UnitSite, ...]

    @property
    def name(self) -> str:
        return self.sites[0].site

    @property
    def operands(self) -> tuple[OperandKind, ...]:
        """The kinds of operands that the sites have."""
        return tuple(dict.fromkeys(kind for site in self.sites for kind in (site.left, site.right)))


@dataclass(frozen=True)
class Row:
    """One kind of operand of a unit, quantized alone at some width.

    loss: loss of the model's output, by the measure. widths: per site of the unit, the bits of this operand's integers
    in the product (a logarithmic operand has a table of integers); 0 if the site does not have the operand.
    """

    unit: str
    operand: OperandKind
    bits: int
    loss: float
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Sensitivity:
    """The rows of a model, with the cost of its units.

    measure: "kl" is the mean over images of KL(float || quantized) [nats], for a classifier; "relative squared error"
    is for features or for several outputs, as the mean over the outputs.
    images: number of evaluation images. tensors: a digest of the full-precision model's tensors. choices: the settings
    that the rows depend on, as JSON (see `_choices`).
    """

    measure: Measure
    images: int
    units: tuple[Unit, ...]
    rows: tuple[Row, ...]
    tensors: str
    choices: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON; each row also names the sites of its unit."""
        names = {unit.name: [site.site for site in unit.sites] for unit in self.units}
        return {
            "measure": self.measure,
            "images": self.images,
            "tensors": self.tensors,
            "choices": dict(self.choices),
            "units": [[asdict(site) for site in unit.sites] for unit in self.units],
            "rows": [asdict(row) | {"sites": names[row.unit]} for row in self.rows],
        }

    @staticmethod
    def from_json(content: Any) -> "Sensitivity":
        """Return the sensitivity that `to_json` wrote as JSON. Raises DataError for anything else."""
        with refusal("this is not the JSON of `adalog sensitivity`", "make it with `adalog sensitivity`"):
            units = tuple(Unit(tuple(UnitSite(**site) for site in unit)) for unit in content["units"])
            rows = tuple(map(_row, content["rows"]))
            result = Sensitivity(
                content["measure"], content["images"], units, rows, content["tensors"], content["choices"]
            )
            for holds, what in _conditions(result):
                if not holds:
                    raise ValueError(what)
            return result

    def check(self, calibration: Calibration, config: Config) -> None:
        """Raise DataError for another model or config; bits, pins, stages and the number of images may differ."""
        own = _digest(calibration.program)
        if self.tensors != own:
            reason = f"whose tensors have the digest {self.tensors[:16]} instead of {own[:16]}"
            raise DataError(f"the sensitivity was measured on another model, {reason}: {_WAY_OUT}")
        self.check_choices(config)

    def check_choices(self, config: Config) -> None:
        """Raise DataError unless the rows are valid under this config, as `check` says."""
        own = _choices(config)
        key = next((name for name in (*own, *self.choices) if self.choices.get(name) != own.get(name)), None)
        if key is not None:
            name, first, second = (json.dumps(value)[:80] for value in (key, self.choices.get(key), own.get(key)))
            reason = f"in which {name} is {first} instead of {second}"
            raise DataError(f"the sensitivity was measured with another method, {reason}: {_WAY_OUT}")


def _digest(program: Program) -> str:
    """Return a digest of the tensors of a program, by name; it does not depend on their device."""
    content = hashlib.sha256()
    for name, value in sorted(program.tensors.items()):
        content.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        content.update(raw_bytes(value))
    return content.hexdigest()


def _choices(config: Config) -> dict[str, Any]:
    """Return the settings that rows depend on, as JSON; settings of the search have the prefix "search."."""
    content = json.loads(replace(config, pinned=(), stages=()).to_json())
    free = {"images", "pinned", "stages", *(f"{kind}_bits" for kind in get_args(OperandKind))}
    search = {f"search.{name}": value for name, value in content.pop("search").items()}
    return {name: value for name, value in content.items() if name not in free} | search


def _conditions(result: Sensitivity) -> Iterator[tuple[bool, str]]:
    """Yield each condition on the values of a model, with the message for the case that it does not hold."""
    units = {unit.name: unit for unit in result.units if unit.sites}
    sites = [site for unit in result.units for site in unit.sites]
    yield result.measure in get_args(Measure), f"the measure is not one of {', '.join(get_args(Measure))}"
    yield is_whole(result.images, 1, _MOST), "the number of images is not a positive whole number"
    has_digest = isinstance(result.tensors, str) and re.fullmatch("[0-9a-f]{64}", result.tensors)
    yield bool(has_digest), "the digest of the tensors is not 64 hexadecimal digits"
    yield isinstance(result.choices, dict), "the choices are not an object"
    yield bool(result.rows), "it has no rows"
    yield len(units) == len(result.units), "a unit has no sites, or two units have the same name"
    yield all(isinstance(site.site, str) for site in sites), "the name of a site is not text"
    counts = [count for site in sites for count in (site.macs, site.weights)]
    yield all(is_whole(count, 0, _MOST) for count in counts), "a count of a site is not a whole number"
    kinds = {kind for site in sites for kind in (site.left, site.right)}
    yield kinds <= set(get_args(OperandKind)), f"an operand is not one of {', '.join(get_args(OperandKind))}"
    for row in result.rows:
        yield row.unit in units and _is_row_of(row, units[row.unit]), f"a row of {row.unit} has invalid values"
    keys = {(row.unit, row.operand, row.bits) for row in result.rows}
    yield len(keys) == len(result.rows), "an operand has two losses at one width"


def _is_row_of(row: Row, unit: Unit) -> bool:
    """Return True if a unit can have this row; rounding noise may make a loss slightly negative."""
    good = row.operand in unit.operands and is_whole(row.bits, 2, 8) and -1e-3 <= row.loss <= _MOST
    return good and len(row.widths) == len(unit.sites) and all(is_whole(width, 0, FLOAT_BITS) for width in row.widths)


@torch.no_grad()
def sensitivity(
    calibration: Calibration,
    config: Config,
    judged: Sequence[Tensor],
    widths: Iterable[int] = WIDTHS,
    resources: Resources = SERIAL,
    *,
    measure: Measure | None = None,
    memory: int = 1 << 30,
) -> Sensitivity:
    """Return the loss of every operand alone at every width, by the search of this config without its stages.

    Pinned sites are left out.
    judged: the model's inputs, (N, ...) each, of held-out images; on calibration images losses would look smaller.
    resources: the partial file holds rows; files next to it, with .2 to .8 after its name, hold the searches of that
    width. Progress counts searches and rows.
    measure: by default that of `measure_of`; "kl" needs logits. memory: bytes for the values that forwards start from.
    """
    widths = sorted(set(widths))
    if not widths or not all(is_whole(width, 2, 8) for width in widths):
        raise ValueError(f"widths = {widths} are not whole numbers from 2 to 8")
    judge = _ChangeEvaluator(calibration.program, judged, measure, memory)
    groups, units = _groups(calibration.groups, config), units_of(calibration, config, judged)
    ranks, lines = resources.ranks, None
    if resources.partial is not None:
        made_of = f"{calibration.fingerprint(replace(config, stages=()))} {judge.measure} {digest(judged)}"
        lines = FinishedParts(resources.partial, made_of, "rows", ranks.rank).alone()
    rows = {} if lines is None else {name: _row_of(lines, name, units) for name in lines.parts}
    operands = [(name, kind) for name, unit in units.items() for kind in unit.operands]
    rows = ranks.agree([_key(*operand, width) for operand in operands for width in widths], rows, _ROWS)
    searches = len(calibration.groups)
    total = len(widths) * (searches + len(operands))
    for step, width in enumerate(widths):
        before = step * (searches + len(operands))

        def report(count: int, what: str, width: int = width, before: int = before) -> None:
            resources.report(before + count, total, f"{what} at {width} bits" if what else "")

        missing = {key: operand for operand in operands if (key := _key(*operand, width)) not in rows}
        if not missing:
            continue
        choices = at_width(config, width)

        def report_search(done: int, all_: int, name: str, report: Callable[[int, str], None] = report) -> None:
            report(searches * done // all_, name)

        assigned = calibration.assign(choices, replace(resources.named(str(width)), progress=report_search))
        assignments = {group.name: assignment for group, assignment in assigned}
        alone = {
            key: _alone(calibration, groups[name], assignments, kind, choices) for key, (name, kind) in missing.items()
        }

        def keep_row(
            key: str, loss: float, own: bool, missing: Any = missing, of: Any = assignments, width: int = width
        ) -> None:
            name, kind = missing[key]
            rows[key] = Row(name, kind, width, loss, _widths(groups[name], of, kind))
            if lines is not None and own:
                lines.add(key, asdict(rows[key]))
            report(searches + sum(key in rows for key in missing), name)

        judge.losses({key: changes for key, changes in alone.items() if changes}, keep_row, resources)
    resources.report(total, total)
    keys = (_key(name, kind, width) for name, kind in operands for width in widths)
    contents = tuple(units.values()), tuple(rows[key] for key in keys if key in rows)
    return Sensitivity(judge.measure, judge.count, *contents, _digest(calibration.program), _choices(config))


def loss_terms(measure: Measure, expected: Tensor, output: Tensor) -> tuple[float, float]:
    """Return the numerator and the denominator of an output's loss on some images; both add up over images."""
    if measure == "kl":
        return divergence(expected, output) * len(output), float(len(output))
    error = expected.double() - output
    return float(error.square().sum()), float(expected.double().square().sum())


def loss_of(error: float, power: float) -> float:
    """Return the loss from the sums of both terms over all images."""
    return error / power if power else float(error > 0)


def measure_of(program: Program, shapes: Mapping[str, Any]) -> Measure:
    """Return "kl" for a model if a linear makes its only output, with several classes per image. shapes: all values."""
    outputs = list({*refs_of(program.output)})
    maker = program.makers.get(find_source(program, outputs[0]).node) if len(outputs) == 1 else None
    shape = tuple(shapes[outputs[0]].shape) if maker is not None and maker.op == PRODUCTS[0] else ()
    return "kl" if len(shape) == 2 and shape[1] > 1 else "relative squared error"


def units_of(calibration: Calibration, config: Config, images: Sequence[Tensor]) -> dict[str, Unit]:
    """Return the units of a model by name, without pinned ones; MACs are counted for images of the size of `images`."""
    macs = {row.name: row.count for row in cost(calibration.program, images).products}
    groups = _groups(calibration.groups, config)
    return {name: _unit(calibration.program, members, macs) for name, members in groups.items()}


def _groups(groups: Sequence[SiteGroup], config: Config) -> dict[str, list[SiteGroup]]:
    """Return the groups of each unit by its name, without units whose bits are pinned."""
    units: dict[tuple[str, ...], list[SiteGroup]] = {}
    for group in groups:
        if config.for_sites(together(group)) is config:
            units.setdefault(together(group), []).append(group)
    return {members[0].name: members for members in units.values()}


def _unit(program: Program, groups: Sequence[SiteGroup], macs: Mapping[str, int]) -> Unit:
    sites = []
    for site in (site for group in groups for site in group.sites):
        left, right = operand_kinds(site.role, site.left_source.kind)
        weights = program.tensors[site.right].numel() if right == "weight" else 0
        sites.append(UnitSite(site.name, sum(macs[call.name] for call in site.calls), weights, left, right))
    return Unit(tuple(sites))


def at_width(config: Config, width: int) -> Config:
    """Return the config with all operands at one width, except those that the method leaves float, without stages."""
    fields = [f"{kind}_bits" for kind in get_args(OperandKind)]
    widths: dict[str, Any] = {name: width for name in fields if getattr(config, name) != FLOAT_BITS}
    return replace(config, **widths, stages=())


def _alone(
    calibration: Calibration,
    groups: Sequence[SiteGroup],
    assignments: Mapping[str, Assignment],
    kind: OperandKind,
    choices: Config,
) -> Assigned:
    """Return the assignments of a unit with one kind of operand quantized; empty if the config leaves it float."""
    assigned = []
    for group in groups:
        assignment, (left, right) = assignments[group.name], _kinds(group)
        alone = replace(
            assignment,
            left=assignment.left if left == kind else None,
            right=assignment.right if right == kind else None,
            bias=None,
        )
        if right == "weight" and isinstance(choices.search, Search) and choices.search.refit:
            alone = _rescale(calibration.product(group, assignment, choices), alone)
        assigned.append((group, alone))
    return assigned if any(assignment.left or assignment.right for _, assignment in assigned) else []


def _rescale(product: Product, alone: Assignment) -> Assignment:
    """Return the assignment of one operand alone, with the weight's scales refitted to that case.

    A search fits the scales to the quantized activation, which hides some of its error. A weight alone gets scales that
    fit the exact activation; an activation alone is evaluated with an 8-bit weight that fits it.
    """
    if isinstance(alone.right, QuantizedTensor):
        return replace(alone, right=product.refit_scales(None, alone.right))
    if alone.left is None:
        return alone
    rows = product.right.values
    wide = UniformQuantizer(*bounds_to_uniform(rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True), 8), 8)
    return replace(alone, right=product.refit(alone.left, wide))


def _widths(groups: Sequence[SiteGroup], assignments: Mapping[str, Assignment], kind: OperandKind) -> tuple[int, ...]:
    """Return the bits of this operand's integers in the product of each site; 0 for a site without the operand."""
    widths = []
    for group in groups:
        (left, right), assignment = _kinds(group), assignments[group.name]
        side = assignment.left if left == kind else assignment.right if right == kind else None
        quantizer = side.quantizer if isinstance(side, QuantizedTensor) else side
        widths += [0 if quantizer is None else quantizer.multiplied_bits] * len(group.sites)
    return tuple(widths)


def _kinds(group: SiteGroup) -> tuple[OperandKind, OperandKind]:
    return operand_kinds(group.first.role, group.first.left_source.kind)


def _key(name: str, kind: str, width: int) -> str:
    return f"{name} {kind} {width}"


def _row(content: Mapping[str, Any]) -> Row:
    return Row(content["unit"], content["operand"], content["bits"], float(content["loss"]), tuple(content["widths"]))


def _row_of(lines: FinishedParts, name: str, units: Mapping[str, Unit]) -> Row:
    with lines.refusing():
        content = lines.parts[name]
        row = _row(content)
        if _key(row.unit, row.operand, row.bits) != name or not _is_row_of(row, units[row.unit]):
            raise ValueError(f"the row {name!r} has invalid values")
        return row


_ROWS: Codec[Row] = json_codec(asdict, lambda _, content: _row(content))


class _ChangeEvaluator:
    """Evaluates changed models, starting from the float model's values on the evaluation images."""

    def __init__(self, program: Program, judged: Sequence[Tensor], measure: Measure | None, memory: int):
        self.program, self._memory = program, memory
        self._values = Values(program, judged)
        self.count, self._shapes = self._values.count, self._values.shapes
        self.measure = measure or measure_of(program, self._shapes)
        self._outputs = list(filter(self._values.is_float, dict.fromkeys(refs_of(program.output))))
        if not self._outputs:
            raise DataError("the model has no float output to measure a loss of: give a model that returns logits")
        shapes = [tuple(self._shapes[name].shape) for name in self._outputs]
        if self.measure == "kl" and (len(shapes) != 1 or len(shapes[0]) != 2):
            raise ValueError(f"the KL divergence needs logits (images, classes), but the outputs are {shapes}")
        self._original = {id(node) for node in program.nodes}

    def losses(
        self, changed: Mapping[str, Assigned], finished: Callable[[str, float, bool], None], resources: Resources
    ) -> None:
        """Compute the loss of the model with each of these assignments alone; call `finished` as `Ranks.share` does.

        Values that several of them start from are computed once, for as many of them as fit in memory.
        """
        waiting: dict[str, tuple[Program, list[str]]] = {}
        held: dict[str, int] = {}
        for key, assigned in changed.items():
            program = rewrite(self.program, assigned)
            starts = self._starts(program)
            more = {name: size_in_bytes(self._shapes[name]) for name in starts}
            if waiting and sum((held | more).values()) > self._memory:
                self._judge(waiting, held, finished, resources)
                waiting, held = {}, {}
            waiting[key] = program, starts
            held |= more
        self._judge(waiting, held, finished, resources)

    def _starts(self, program: Program) -> list[str]:
        """Return the values that operations from the first changed one on read, except sizes, inputs and tensors."""
        first = next(index for index, node in enumerate(program.nodes) if id(node) not in self._original)
        return [
            name for name, life in program.lives().items() if first in life and not isinstance(self._shapes[name], int)
        ]

    def _judge(
        self,
        waiting: Mapping[str, tuple[Program, list[str]]],
        held: Iterable[str],
        finished: Callable[[str, float, bool], None],
        resources: Resources,
    ) -> None:
        if not waiting:
            return
        names = {*held, *self._outputs}
        batches = self._values.split(self._values.images, _BATCH)
        batches_of_values = [batch | self._values.compute(batch, names) for batch in batches]

        @torch.no_grad()  # the setting holds for one thread
        def loss(key: str) -> float:
            program, starts = waiting[key]
            names = (*self._values.images, *starts)
            error, power = [0.0] * len(self._outputs), [0.0] * len(self._outputs)
            for values in batches_of_values:
                starts_hat = self._values.compute({name: values[name] for name in names}, self._outputs, program)
                for index, name in enumerate(self._outputs):
                    more = loss_terms(self.measure, values[name], starts_hat[name])
                    error[index] += more[0]
                    power[index] += more[1]
            mean = sum(map(loss_of, error, power)) / len(error)
            if not math.isfinite(mean):
                raise DataError(f"{key} bits: the loss is {mean}: check whether images have infinite outputs")
            return mean

        resources.ranks.share(list(waiting), loss, threads=resources.jobs, finished=finished)


def read(path: Path) -> Sensitivity:
    """Read a file of `adalog sensitivity`. Raises DataError if it cannot be read or holds something else."""
    with refusal(f"{path} cannot be read", "make it with `adalog sensitivity`"):
        content = path.read_bytes()
    with refusal(f"{path} is not the JSON of `adalog sensitivity`", "make it with `adalog sensitivity`"):
        record = json.loads(content)
    try:
        return Sensitivity.from_json(record)
    except DataError as cause:
        raise DataError(f"{path}: {cause}") from cause
