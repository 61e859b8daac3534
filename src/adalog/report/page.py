"""Render the HTML page of a report from templates, as one file that loads nothing from a network."""

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from math import isfinite
from typing import Any

from markupsafe import Markup

from adalog import artifact
from adalog.choices import Reconstruction
from adalog.config import Config
from adalog.inputs.images import Preprocessing
from adalog.inputs.zoo import DEMO_PREPROCESSING
from adalog.ledger import float_lines
from adalog.methods import METHODS
from adalog.quantizers import FLOAT_BITS
from adalog.report import charts
from adalog.report.charts import Band, shade, short
from adalog.report.measured import MEASURES, Losses
from adalog.report.sites import ReportData, SiteFacts

# Headings of the tables of sites, by the key in the page's JSON.
_COLUMNS = {
    "number": "#",
    "site": "Site",
    "role": "Role",
    "source": "After",
    "bits": "Bits",
    "left": "Left operand",
    "right": "Right operand",
    "sqnr": "SQNR [dB]",
    "loss": "Loss",
    "fixops": "FixOPs [10⁶]",
    "bytes": "Bytes",
}
_COMPARED = {
    "number": "#",
    "site": "Site",
    "role": "Role",
    "bits": "Bits of A",
    "bits_b": "Bits of B",
    "sqnr": "SQNR of A [dB]",
    "sqnr_b": "SQNR of B [dB]",
    "sqnr_more": "B − A [dB]",
    "loss": "Loss of A",
    "loss_b": "Loss of B",
    "bytes": "Bytes of A",
    "bytes_b": "Bytes of B",
    "bytes_more": "B − A [bytes]",
}
# Formats of the columns of numbers; those of B and of differences have a suffix.
_FORMS = {"number": "d", "sqnr": ".1f", "fixops": ",.2f", "bytes": ",d", "loss": ".3g"}


def report(
    subject: ReportData,
    *,
    sensitivity: Losses | None = None,
    evaluation: dict[str, Any] | None = None,
    bench: dict[str, Any] | None = None,
) -> bytes:
    """Return the page of one artifact, as UTF-8; the same input gives the same bytes."""
    rows = _rows(subject, sensitivity)
    bands = [[Band.sqnr(row["sqnr"])] for row in rows]
    if sensitivity is not None:
        total = sensitivity.total(subject.sites)
        bands = [[*row_bands, Band.loss(row["loss"], total)] for row_bands, row in zip(bands, rows, strict=True)]
    shares = [
        (title, score["top1"])
        for title, score in (("this file", evaluation), ("full precision", (evaluation or {}).get("full_precision")))
        if score and score.get("top1")
    ]
    return _render(
        "report.html",
        title=subject.name,
        files=[_facts_of(subject, sensitivity, rows)],
        picture=charts.model_picture(subject.sites, bands, subject.name, "site-"),
        headings=_COLUMNS,
        rows=rows,
        details=[
            {"row": row, "operands": [_operand(side, site, sensitivity) for side in ("left", "right")]}
            for row, site in zip(rows, subject.sites, strict=True)
        ],
        images=subject.images,
        evaluation=evaluation,
        intervals=charts.interval_picture(shares) if shares else None,
        bench=bench,
        slowest=max((row["wall_ms"] / row["batch"] for row in (bench or {"rows": []})["rows"]), default=0),
        sensitivity=sensitivity,
    )


def comparison(first: ReportData, second: ReportData, *, sensitivity: Losses | None = None) -> bytes:
    """Return the page that compares two artifacts, as UTF-8; the same input gives the same bytes."""
    subjects = (first, second)
    rows_of = [_rows(subject, sensitivity) for subject in subjects]
    by_name: list[dict[str, dict[str, Any]]] = [{row["site"]: row for row in rows} for rows in rows_of]
    sites = {site.row.site: site for subject in (second, first) for site in subject.sites}
    names = list(dict.fromkeys([*by_name[0], *by_name[1]]))
    rows = [_compare(number, *(by_site.get(name, {}) for by_site in by_name)) for number, name in enumerate(names)]
    bands = [[Band.sqnr(row["sqnr"], "SQNR of A"), Band.sqnr(row["sqnr_b"], "SQNR of B")] for row in rows]
    facts = [_facts_of(subject, sensitivity, rows) for subject, rows in zip(subjects, rows_of, strict=True)]
    configs = [facts_of_file["config"] for facts_of_file in facts]
    choices = {key: [config.get(key, "–") for config in configs] for key in dict.fromkeys([*configs[0], *configs[1]])}
    return _render(
        "compare.html",
        title=f"{first.name} and {second.name}",
        files=facts,
        picture=charts.model_picture([sites[name] for name in names], bands, "both files", "row-"),
        headings=_COMPARED,
        rows=rows,
        choices={key: values for key, values in choices.items() if values[0] != values[1]},
        sensitivity=sensitivity,
    )


def _compare(number: int, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Join the rows of a site in both files into one row of the page's JSON; a missing row is empty."""
    row = {**(a or b), "number": number + 1}
    for key in ("bits", "sqnr", "loss", "bytes"):
        row[key], row[f"{key}_b"] = a.get(key), b.get(key)
    for key in ("sqnr", "bytes"):
        pair = row[key], row[f"{key}_b"]
        row[f"{key}_more"] = None if None in pair else pair[1] - pair[0]
    keys = [[row.get(key) for key in ("left", "right", "bits")] for row in (a, b)]
    return row | {"differs": keys[0] != keys[1]}


def _rows(subject: ReportData, sensitivity: Losses | None) -> list[dict[str, Any]]:
    """Return the sites as rows of the page's JSON."""
    return [
        {
            "number": number + 1,
            **asdict(site.row),
            "sqnr": site.row.sqnr if isfinite(site.row.sqnr) else None,
            "bits": site.bits,
            "loss": None if sensitivity is None else sensitivity.loss_of(site),
            "fixops": round(site.fixops / 1e6, 6),
            "bytes": site.weight_bytes,
        }
        for number, site in enumerate(subject.sites)
    ]


def _facts_of(subject: ReportData, sensitivity: Losses | None, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values about a file that both pages show."""
    quantized, described = subject.quantized, artifact.describe(subject.quantized)
    with_sqnr = [row for row in rows if row["sqnr"] is not None]
    in_float = subject.cost.macs * FLOAT_BITS**2 / 64
    refused = [(name, *why.partition(": ")[::2]) for name, why in quantized.refusals.items()]
    refused += [
        (site.row.site, "stays float", _why_float(site))
        for site in subject.sites
        if FLOAT_BITS in (site.left.bits, site.right.bits) and site.row.site not in quantized.refusals
    ]
    return {
        "name": subject.name,
        "bits": quantized.config.bits + (", mixed" if quantized.config.pinned else ""),
        "method": _method(quantized.config),
        "bytes": len(subject.content),
        "float_bytes": subject.float_bytes,
        "parts": artifact.sizes(subject.content),
        "cost": subject.cost,
        "fixops_share": subject.cost.fixops / in_float if in_float else 0.0,
        "sites": len(rows),
        "float_sites": len(quantized.float_sites()),
        "worst": min(with_sqnr, key=lambda row: row["sqnr"], default=None),
        "loss": None if sensitivity is None else sensitivity.total(subject.sites),
        "refused": refused,
        "operations": float_lines({}, quantized.program.float_operations())[-1],
        "config": described["config"],
        "provenance": described["provenance"],
        "version": artifact.read_header(subject.content, subject.name)["version"],
        "inputs": described["inputs"],
        "command": _command(subject),
    }


def _why_float(site: SiteFacts) -> str:
    """Return the reason why an operand stays float, if the file's refusals do not give one."""
    sides = [side for side, operand in zip(("left", "right"), site.operands, strict=True) if operand.bits == FLOAT_BITS]
    return f"the settings give its {' and '.join(sides)} operand {FLOAT_BITS} bits"


def _operand(side: str, site: SiteFacts, sensitivity: Losses | None) -> dict[str, Any]:
    """Return the facts and the picture of the left or the right operand."""
    operand, facts = getattr(site, side), []
    if operand.quantizer is not None:
        low, high = operand.quantizer.bounds()
        scales = operand.quantizer.scale.numel()
        facts.append(f"range {short(float(low.min()))} to {short(float(high.max()))}")
        facts.append(f"{operand.quantizer.code_count} codes, {scales} scale{'s' * (scales > 1)}")
    if operand.histogram is not None:
        facts.append(f"values seen {short(operand.histogram.least)} to {short(operand.histogram.greatest)}")
    losses = {} if sensitivity is None else sensitivity.losses.get((site.row.site, operand.kind), {})
    group = () if sensitivity is None else sensitivity.groups.get((site.row.site, operand.kind), ())
    return {
        "side": side.capitalize(),
        "kind": operand.kind,
        "words": operand.words,
        "bits": operand.bits,
        "facts": facts,
        "picture": charts.operand_picture(operand, f"{site.row.site}, {side}"),
        "losses": [(bits, short(loss)) for bits, loss in sorted(losses.items())],
        "shared": [name for name in group if name != site.row.site],
    }


def _method(config: Config) -> str | None:
    """Return the method whose settings these are, apart from pinned bits and options of the stages."""
    for changed in (False, True):  # exactly as published, or with other numbers of fitted images and of steps
        for name in METHODS:
            preset = replace(Config.preset(config.bits, name), images=config.images, pinned=config.pinned)
            if changed and preset.images_fitted and config.images_fitted:
                preset = preset.with_fitted_images(config.images_fitted)
            if changed and _training(preset) and (training := _training(config)):
                preset = preset.with_training(**training)
            if preset == config:
                return name
    return None


def _is_of_demo(preprocessing: Any) -> bool:
    """Return True if a recorded preprocessing is that of the bundled model."""
    try:
        return Preprocessing.from_json(preprocessing) == DEMO_PREPROCESSING
    except ValueError:
        return False


def _training(config: Config) -> dict[str, int]:
    """Return the number of steps and the batch of the last training; nothing if no stage trains."""
    trainings = [stage for stage in config.stages if isinstance(stage, Reconstruction)]
    return {"iterations": trainings[-1].iterations, "batch": trainings[-1].batch} if trainings else {}


def _command(subject: ReportData) -> str | None:
    """Return the command that made the file, as far as the file records it; None if no method has its settings."""
    config, provenance = subject.quantized.config, subject.quantized.provenance
    method = _method(config)
    if method is None:
        return None
    bundled = _is_of_demo(provenance.get("preprocessing"))
    words = ["adalog", "quantize", *(["demo"] if bundled else ["MODEL", "--data", "IMAGES"])]
    words += ["--bits", config.bits, "--method", method, "--images", str(config.images)]
    preset = Config.preset(config.bits, method)
    if config.images_fitted != preset.images_fitted:
        words += ["--reconstruct-images", str(config.images_fitted)]
    own, options = _training(preset), {"iterations": "--reconstruct-steps", "batch": "--reconstruct-batch"}
    for key, value in _training(config).items():
        words += [options[key], str(value)] if value != own[key] else []
    words += ["--seed", str(provenance["seed"])] if "seed" in provenance else []
    for pattern, bits in config.pinned:
        words += ["--pin", f"{pattern}={bits}"]
    words += ["--free-sizes"] if subject.quantized.program.free else []
    return shlex.join([*words, "-o", subject.name])


def _render(template: str, headings: Mapping[str, str], sensitivity: Losses | None, **values: Any) -> bytes:
    """Return a page with its own style and script; its policy forbids other scripts and any download."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder = files("adalog.report")
    style, script = (Markup((folder / f"page.{kind}").read_text("utf-8")) for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("adalog.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "cell": _cell_text, "shade": shade, "json": _json}
    environment.globals |= {"SQNR_STEPS": charts.SQNR_STEPS, "SHARE_STEPS": charts.SHARE_STEPS, "MEASURES": MEASURES}
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    shown = [key for key in headings if sensitivity is not None or not key.startswith("loss")]
    columns = [(key, headings[key], _form_of(key) is not None) for key in shown]
    values |= {"columns": columns, "sensitivity": sensitivity, "style": style, "script": script, "policy": policy}
    page = environment.get_template(template).render(**values)
    return page.encode("utf-8", "backslashreplace")


def _json(value: Any, indent: int | None = None) -> str:
    """Format a value for reading: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)


def _cell_text(row: dict[str, Any], key: str) -> str:
    """Format a cell of the table."""
    value = row[key]
    if not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    form = _form_of(key) or ""
    return format(value, f"+{form}" if value and key.endswith("_more") else form)


def _form_of(key: str) -> str | None:
    return _FORMS.get(key.removesuffix("_b").removesuffix("_more"))
