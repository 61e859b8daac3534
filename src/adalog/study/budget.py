"""Choose the bits of each operand so that the model meets a budget of bytes, operations or loss.

The loss of a mix of widths is predicted by the sum of the losses that its operands have alone (`sensitivity`). The
widths with the least cost within the limits are found by greedy steps, followed by exchanges until none helps.
"""

import glob
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from adalog import artifact
from adalog.calibration.calibration import Calibration
from adalog.calibration.operands import OperandKind
from adalog.calibration.schedule import SERIAL, Resources
from adalog.config import Config
from adalog.errors import DataError
from adalog.model import QuantizedModel
from adalog.quantizers import FLOAT_BITS
from adalog.study.cost import cost
from adalog.study.sensitivity import WIDTHS, Sensitivity, Unit, units_of

_TRIES = 8  # plans to make at most; each knows the file's bytes besides the codes better
_HEADER_PER_SITE = 700  # bytes of the program per site, roughly
_TINY = 1e-12
_EXCHANGES = 500  # exchanges to make at most
_Option = tuple[Mapping[OperandKind, int], "Totals"]  # bits for the operands of one unit, and their cost


@dataclass(frozen=True)
class Budget:
    """Limits of the file's size [bytes], of the products of one image [BOPs], and of the loss; None means no limit.

    Raises ValueError if no limit is given, or if one is not positive and finite.
    """

    bytes: int | None = None
    bops: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        limits = {"bytes": self.bytes, "BOPs": self.bops, "loss": self.loss}
        if all(limit is None for limit in limits.values()):
            raise ValueError("a budget needs a limit of bytes, BOPs or loss")
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"the limit of {name} is {limit}: give a positive, finite number")


@dataclass(frozen=True)
class Totals:
    """Cost of a choice of widths: bytes of the weights' codes, BOPs of one image's products, and the sum of losses."""

    bytes: float
    bops: float
    loss: float = 0.0


@dataclass(frozen=True)
class BitAllocation:
    """Bits for each kind of operand by the name of the unit, and their total cost."""

    widths: Mapping[str, Mapping[OperandKind, int]]
    totals: Totals

    def pins(self, units: Sequence[Unit], config: Config) -> tuple[tuple[str, str], ...]:
        """Return (pattern, bits) for `Config.pinned`: all bits of each unit that differs from the config."""
        pins = []
        for unit in units:
            own = {
                kind: int(getattr(config, f"{kind}_bits")) for kind in get_args(OperandKind) if kind in unit.operands
            }
            bits = {**own, **self.widths[unit.name]}
            if bits != own:
                pins.append((glob.escape(unit.name), "".join(f"{kind[0]}{width}" for kind, width in bits.items())))
        return tuple(pins)


@dataclass(frozen=True)
class BudgetedModel:
    """A model within a budget: its plan, and the bytes and BOPs counted on the model itself."""

    model: QuantizedModel
    plan: BitAllocation
    bytes: int
    bops: int


def quantize_within(
    calibration: Calibration,
    config: Config,
    measurement: Sensitivity,
    budget: Budget,
    resources: Resources = SERIAL,
    *,
    notes: Mapping[str, Any] | None = None,
) -> BudgetedModel:
    """Return the model with the least predicted loss within a budget, calibrated as a whole with the chosen widths.

    Sites that the config pins and operands that it leaves float do not change. The bytes and BOPs of the model are
    counted; if one exceeds the budget, a new plan with less to spend is made. Without a limit of operations or loss,
    narrower activations would save nothing, so they keep the widths of the config.
    resources: each plan has a partial file. notes: further entries of the provenance, besides the budget.
    Raises DataError if no widths meet the budget, or if the sensitivity belongs to another model.
    """
    measurement = _free(calibration, config, measurement)
    fixed: dict[OperandKind, int] = {}
    if budget.bops is None and budget.loss is None:
        fixed = {"activation": config.activation_bits, "softmax": config.softmax_bits, "input": config.input_bits}
    maker = _Maker(calibration, config, measurement, budget, notes or {}, resources)
    extra = Totals(0.0, 0.0)  # what the stages add to the cost
    for _ in range(_TRIES):
        chosen = _without_stages(maker, budget, fixed, extra)
        if not config.stages:
            return chosen
        staged = maker.make(chosen.plan, config)
        if _within(staged, budget):
            return staged
        extra = Totals(max(extra.bytes, staged.bytes - chosen.bytes), max(extra.bops, staged.bops - chosen.bops))
    raise DataError("after the stages, no choice of widths was within the budget: increase it a little")


@dataclass(frozen=True)
class _Maker:
    """Quantizes the model by a plan, and counts its bytes and BOPs."""

    calibration: Calibration
    config: Config
    measurement: Sensitivity
    budget: Budget
    notes: Mapping[str, Any]
    resources: Resources

    def make(self, plan: BitAllocation, config: Config) -> BudgetedModel:
        """Quantize by a plan under this config, with or without its stages."""
        pins = plan.pins(self.measurement.units, config)
        name = hashlib.sha256(repr((pins, config.stages)).encode()).hexdigest()[:8]
        choices = replace(config, pinned=(*config.pinned, *pins))
        model = self.calibration.quantize(choices, self.resources.named(name))
        record = {"limits": asdict(self.budget), "foretold": plan.totals.loss}
        model.note(
            **self.notes, budget={**record, "measure": self.measurement.measure, "judged": self.measurement.images}
        )
        return BudgetedModel(model, plan, *budget_of(model))


def budget_of(model: QuantizedModel) -> tuple[int, int]:
    """Return how much of a budget a model takes: the bytes of its file, and the BOPs of one image's products."""
    return len(artifact.encode(model.quantized)), cost(model.program, model.example).bops


def _without_stages(maker: _Maker, budget: Budget, fixed: Mapping[OperandKind, int], extra: Totals) -> BudgetedModel:
    """Return the model with the least predicted loss within a budget, if its stages will add `extra` to the cost."""
    plain, overhead, best = replace(maker.config, stages=()), None, None
    for _ in range(_TRIES):
        besides = overhead or Totals(_bytes_besides_codes(maker.calibration), 0.0)
        total = Totals(besides.bytes + extra.bytes, besides.bops + extra.bops)
        try:
            plan = choose(maker.measurement, budget, fixed, total)
        except DataError:
            if overhead is not None:
                break
            plan = _narrowest(maker.measurement, fixed)  # the cost besides the units is only an estimate yet
        if best is not None and plan.widths == best.plan.widths:
            break
        model = maker.make(plan, plain)
        room = Budget(
            None if budget.bytes is None else max(1, int(budget.bytes - extra.bytes)),
            None if budget.bops is None else max(1.0, budget.bops - extra.bops),
            budget.loss,
        )
        fits = _within(model, room) and plan.totals.loss <= (budget.loss or math.inf)
        if fits and (best is None or plan.totals.loss < best.plan.totals.loss):
            best = model
        if fits and overhead is not None:
            break
        excess = Totals(model.bytes - plan.totals.bytes, model.bops - plan.totals.bops)
        former = overhead or excess
        overhead = Totals(max(former.bytes, excess.bytes), max(former.bops, excess.bops))
    if best is None:
        assert overhead is not None
        choose(maker.measurement, budget, fixed, Totals(overhead.bytes + extra.bytes, overhead.bops + extra.bops))
        raise DataError("no choice of widths was within the budget: increase it a little")
    return best


def _within(model: BudgetedModel, budget: Budget) -> bool:
    return model.bytes <= (budget.bytes or math.inf) and model.bops <= (budget.bops or math.inf)


def _free(calibration: Calibration, config: Config, measurement: Sensitivity) -> Sensitivity:
    """Keep the widths that can be chosen under this config: units without pins, and operands that are quantized."""
    units, known = units_of(calibration, config, calibration.images), {unit.name: unit for unit in measurement.units}
    if not units:
        raise DataError("all sites are pinned, so no width is left to choose: remove the budget or some pins")
    changes = [name for name, unit in units.items() if known.get(name) != unit]
    if changes:
        raise DataError(
            f"the sensitivity was measured on another model, whose {changes[0]} differs: measure this model"
        )
    measurement.check(calibration, config)
    rows = (row for row in measurement.rows if row.unit in units)
    rows_left = tuple(row for row in rows if getattr(config, f"{row.operand}_bits") != FLOAT_BITS)
    return replace(measurement, units=tuple(units.values()), rows=rows_left)


def _bytes_besides_codes(calibration: Calibration) -> float:
    """Estimate the bytes of a file besides the codes of weights: other tensors, scales, and the program itself."""
    tensors = calibration.program.tensors
    weights = {site.right for site in calibration.sites}
    others = sum(value.nbytes for name, value in tensors.items() if name not in weights)
    scales = sum(5 * len(tensors[name]) for name in weights if name in tensors)
    return others + scales + _HEADER_PER_SITE * len(calibration.sites)


def _narrowest(measurement: Sensitivity, fixed: Mapping[OperandKind, int]) -> BitAllocation:
    """Return the plan with the fewest bytes and, among plans of equal size, the fewest BOPs."""
    options = (_options(measurement, unit, fixed) for unit in measurement.units)
    return _plan(
        measurement, [min(choices, key=lambda option: (option[1].bytes, option[1].bops)) for choices in options]
    )


# --- the choice ------------------------------------------------------------------------------------------------------


def choose(
    measurement: Sensitivity,
    budget: Budget,
    fixed: Mapping[OperandKind, int] | None = None,
    overhead: Totals | None = None,
) -> BitAllocation:
    """Return the widths with the least predicted loss within a budget; with a limit of loss, the cheapest widths.

    The cheapest widths have the least sum of bytes and BOPs, each relative to the cost of the widest operands.
    fixed: the width of each kind of operand that is not to be chosen.
    overhead: the cost of the model besides the units; it counts towards the limits.
    Raises DataError if no widths meet the budget.
    """
    overhead = overhead or Totals(0.0, 0.0)
    options = [_options(measurement, unit, fixed or {}) for unit in measurement.units]
    table = [np.array([[cost.loss, cost.bytes, cost.bops] for _, cost in choices]) for choices in options]
    most, besides = sum(costs.max(axis=0) for costs in table), [overhead.loss, overhead.bytes, overhead.bops]
    limits = np.array([limit or math.inf for limit in (budget.loss, budget.bytes, budget.bops)]) - besides
    aims = np.array([1.0, 0.0, 0.0] if budget.loss is None else [0.0, *(1 / max(value, 1.0) for value in most[1:])])
    choice = _solve(table, aims, limits)
    if choice is None:
        least = sum(costs.min(axis=0) for costs in table) + besides
        texts = zip(("a loss of {:.4g}", "{:,.0f} bytes", "{:,.0f} BOPs"), least, limits, strict=True)
        names = [text.format(low) for text, low, limit in texts if limit < math.inf]
        widths = sorted({row.bits for row in measurement.rows})
        smaller = ", or measure smaller widths" if widths[0] > min(WIDTHS) else ""
        raise DataError(
            f"no choice of widths meets the budget; each limit alone can be as low as {', '.join(names)} with the "
            f"measured widths, {', '.join(map(str, widths))} bits: choose larger limits{smaller}"
        )
    return _plan(measurement, [choices[index] for choices, index in zip(options, choice, strict=True)])


def _plan(measurement: Sensitivity, picked: Sequence[_Option]) -> BitAllocation:
    size, bops, loss = (sum(getattr(cost, name) for _, cost in picked) for name in ("bytes", "bops", "loss"))
    widths = {unit.name: bits for unit, (bits, _) in zip(measurement.units, picked, strict=True)}
    return BitAllocation(widths, Totals(size, bops, loss))


def _options(measurement: Sensitivity, unit: Unit, fixed: Mapping[OperandKind, int]) -> list[_Option]:
    """Return all combinations of widths of a unit's operands."""
    rows = {(row.operand, row.bits): row for row in measurement.rows if row.unit == unit.name}
    kinds = [kind for kind in unit.operands if any(operand == kind for operand, _ in rows)]
    widths = [[bits for operand, bits in rows if operand == kind and bits == fixed.get(kind, bits)] for kind in kinds]
    for kind, widths_of_kind in zip(kinds, widths, strict=True):
        if not widths_of_kind:
            raise DataError(
                f"the loss of {unit.name} with {kind} at {fixed[kind]} bits is missing: measure that width too"
            )
    options: list[_Option] = []
    for combination in itertools.product(*widths):
        bits = dict(zip(kinds, combination, strict=True))
        by_kind = {kind: rows[kind, width] for kind, width in bits.items()}
        size = sum(math.ceil(site.weights * bits.get("weight", FLOAT_BITS) / 8) for site in unit.sites)
        bops = 0
        for index, site in enumerate(unit.sites):
            left, right = (by_kind[kind].widths[index] if kind in by_kind else 0 for kind in (site.left, site.right))
            bops += site.macs * (left or FLOAT_BITS) * (right or FLOAT_BITS)
        options.append((bits, Totals(size, bops, sum(row.loss for row in by_kind.values()))))
    return options


def _solve(table: Sequence[np.ndarray], aims: np.ndarray, limits: np.ndarray) -> list[int] | None:
    """Return one option per unit, with the least sum of costs weighted by `aims`; None if none meets the limits.

    Start from the least sum without limits. Until the limits are met, take the step that costs least per relief, the
    fraction of each excess that it removes. If that fails, start again from the options that take the least of all
    limits. Then exchange options, alone and in pairs, as long as that helps.
    table: the costs of all options, (options, 3) per unit. Its columns, aims and limits are loss, bytes and BOPs.
    """
    choice = _descend(table, aims, aims, limits)
    return _descend(table, 1 / np.maximum(limits, _TINY), aims, limits) if choice is None else choice


def _descend(table: Sequence[np.ndarray], start: np.ndarray, aims: np.ndarray, limits: np.ndarray) -> list[int] | None:
    """Search as `_solve` does, starting from the least sum of costs weighted by `start`."""
    unit = np.repeat(range(len(table)), [len(costs) for costs in table])
    costs, first = np.concatenate(table), np.cumsum([0, *map(len, table)])[:-1]
    worth = costs @ aims
    choice = first + np.array([np.lexsort((costs.sum(axis=1), costs @ start))[0] for costs in table])

    def deltas() -> tuple[np.ndarray, np.ndarray]:
        return worth - worth[choice][unit], costs - costs[choice][unit]

    while True:
        total = costs[choice].sum(axis=0)
        excess = np.maximum(total - limits, 0.0)
        if not excess.any():
            break
        price, change = deltas()
        over = excess > 0
        relief = (np.minimum(-change[:, over], excess[over]) / excess[over]).sum(axis=1)
        allowed = (relief > _TINY) & (change[:, ~over] <= (limits - total)[~over] + _TINY).all(axis=1)
        if not allowed.any():
            return None
        best = int(np.where(allowed, price / np.where(allowed, relief, 1.0), math.inf).argmin())
        choice[unit[best]] = best
    for _ in range(_EXCHANGES):  # of the options of one or two units at a time, until none lowers the cost
        price, change = deltas()
        slack = limits - costs[choice].sum(axis=0)
        alone = np.where((change <= slack).all(axis=1), price, math.inf)
        changed, gain = [int(alone.argmin())], float(alone.min())
        for index in np.nonzero(price < -_TINY)[0]:
            fits = (change + change[index] <= slack).all(axis=1) & (unit != unit[index])
            prices = np.where(fits, price + price[index], math.inf)
            if prices.min() < gain:
                changed, gain = [int(index), int(prices.argmin())], float(prices.min())
        if gain >= -_TINY * max(1.0, abs(float(price.max()))):
            break
        for option in changed:
            choice[unit[option]] = option
    return [int(index - offset) for index, offset in zip(choice, first, strict=True)]
