"""Read and check the JSON of other commands: sensitivity, evaluate and bench."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from adalog import artifact
from adalog.errors import DataError
from adalog.inputs.refusals import refusal
from adalog.quantized import QuantizedProgram
from adalog.quantizers import FLOAT_BITS
from adalog.report.sites import SiteFacts
from adalog.study import sensitivity
from adalog.study.cost import cost
from adalog.study.sensitivity import Measure

MEASURES: dict[Measure, str] = {"kl": "KL divergence [nats]", "relative squared error": "relative squared error"}
_MOST = 1e15  # upper limit of any number
_SHARE = {"value": float, "low": float, "high": float}
_JUDGED = {"agreement": float, "kl": float, "lost": int, "gained": int, "p_value": float}
_ROW = {"executor": str, "batch": int, "cpu_ms": float, "wall_ms": float, "images_per_second": float, "repeats": int}


@dataclass(frozen=True)
class Losses:
    """The losses by (site, operand) and bits, and the groups of sites that share one loss, by (site, operand)."""

    measure: Measure
    images: int
    losses: Mapping[tuple[str, str], Mapping[int, float]]
    groups: Mapping[tuple[str, str], tuple[str, ...]]

    def losses_of(self, site: SiteFacts) -> dict[str, float | None]:
        """Return the loss of each kind of operand at the site's bits: 0 in float, None if it was not measured."""
        losses: dict[str, float | None] = {}
        for operand in site.operands:  # both operands of Q K are of one kind and share one loss
            by_bits = self.losses.get((site.row.site, operand.kind), {})
            if operand.bits is not None:
                losses[operand.kind] = 0.0 if operand.bits == FLOAT_BITS else by_bits.get(operand.bits)
        return losses

    def loss_of(self, site: SiteFacts) -> float | None:
        """Return the sum over the site's operands, or None if one of them was not measured."""
        losses = self.losses_of(site).values()
        known = [loss for loss in losses if loss is not None]
        return sum(known) if losses and len(known) == len(losses) else None

    def total(self, sites: tuple[SiteFacts, ...]) -> float:
        """Return the sum over all measured operands; a loss that several sites share counts once."""
        totals = {}
        for site in sites:
            for kind, loss in self.losses_of(site).items():
                totals[self.groups.get((site.row.site, kind), (site.row.site,)), kind] = loss or 0.0
        return sum(totals.values())


def read_sensitivity(path: Path, quantized: QuantizedProgram) -> Losses:
    """Read the JSON of `adalog sensitivity`. Raises DataError for another form or another model."""
    measurement = sensitivity.read(path)
    sites = {unit.name: tuple(site.site for site in unit.sites) for unit in measurement.units}
    losses: dict[tuple[str, str], dict[int, float]] = {}
    groups: dict[tuple[str, str], tuple[str, ...]] = {}
    for row in measurement.rows:
        for name in sites[row.unit]:
            losses.setdefault((name, row.operand), {})[row.bits] = row.loss
            groups[name, row.operand] = sites[row.unit]
    counts = Counter[str]()  # a layer that is called several times has one row per call
    for product in cost(quantized.program, quantized.example).products:
        counts[product.name] += product.count
    measured_sites = [site for unit in measurement.units for site in unit.sites]
    common = [site for site in measured_sites if site.site in counts]
    unlike = [site for site in common or measured_sites if counts[site.site] != site.macs]
    if unlike:
        raise DataError(
            f"{path} belongs to another model, whose sites differ: {unlike[0].site} has {unlike[0].macs} MACs there, "
            f"but {counts[unlike[0].site]} here; run `adalog sensitivity` on this model"
        )
    try:
        measurement.check_choices(quantized.config)
    except DataError as cause:
        raise DataError(f"{path}: {cause}") from cause
    return Losses(measurement.measure, measurement.images, losses, groups)


def read_evaluation(path: Path, quantized: QuantizedProgram) -> dict[str, Any]:
    """Read the JSON of `adalog evaluate`. Raises DataError for another form or another artifact."""
    content = _read(path, "evaluate")
    with _only_json_of(path, "evaluate"):
        _fields(content, {"images": int, "sites": list})
        for score in (content, content.get("full_precision") or {"images": 0}):
            _fields(score, {"images": int})
            for name in ("top1", "top5"):
                if (share := score.get(name)) is not None:
                    _fields(share, _SHARE)
                    _check(all(-1e-9 <= share[key] <= 1 + 1e-9 for key in _SHARE), f'"{name}" is not a fraction')
            _optional(score, _JUDGED)
            if score.get("p_value") is not None:
                _fields(score, {"lost": int, "gained": int})
        _optional(content, {"file": str, "executor": str, "reference": str})
    if content["sites"] != artifact.describe(quantized)["sites"]:
        raise DataError(
            f"{path} belongs to another artifact, whose sites differ: run `adalog evaluate --json` on this one"
        )
    absent = dict.fromkeys(("executor", "reference", "top1", "top5", *_JUDGED))
    full = absent | (content.get("full_precision") or {})
    return absent | content | {"file": PurePath(content.get("file") or "").name, "full_precision": full}


def read_bench(path: Path, digest: str) -> dict[str, Any]:
    """Read the JSON of `adalog bench`. Raises DataError for another form or an artifact with another SHA-256."""
    content = _read(path, "bench")
    with _only_json_of(path, "bench"):
        _fields(content, {"file": str, "sha256": str, "threads": int, "rows": list, "absent": dict})
        _check(content["sha256"] == digest, "it belongs to another artifact")
        for row in content["rows"]:
            _fields(row, _ROW)
            _check(row["batch"] > 0, "a batch has no images")
    return content | {"file": PurePath(content["file"]).name}


def _read(path: Path, command: str) -> dict[str, Any]:
    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ValueError(f"{text} is not a JSON number")
        return float(text)

    with refusal(f"{path} cannot be read", f"make it with `adalog {command} --json`"):
        _check(path.is_file() or not path.exists(), "not a regular file")
        content = path.read_bytes()
    with _only_json_of(path, command):
        record = json.loads(content, parse_float=finite, parse_constant=finite)
        _check(isinstance(record, dict), "it is not an object")
    return record


def _only_json_of(path: Path, command: str) -> AbstractContextManager[None]:
    """Turn an error about the content of a file, raised while the context is open, into a DataError."""
    return refusal(f"{path} is not the JSON of `adalog {command}`", f"make it with `adalog {command} --json`")


def _fields(record: Any, kinds: Mapping[str, type]) -> None:
    """Raise ValueError unless an object has these fields with values of these types; an int counts as a float."""
    _check(isinstance(record, dict), "an entry is not an object")
    for name, kind in kinds.items():
        value = record.get(name)
        good = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        good = good and (not isinstance(value, (int, float)) or abs(value) < _MOST)
        _check(good, f'"{name}" is missing, of the wrong type or too large')


def _optional(record: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    _fields(record, {name: kind for name, kind in kinds.items() if record.get(name) is not None})


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
