"""Format results as text and tables for the terminal; `console.say` prints them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from adalog import artifact
from adalog.ledger import float_lines
from adalog.study.cost import PRODUCT_ROLES, Cost
from adalog.study.evaluate import Score, Share


def numbers(*headings: str) -> list[Column]:
    """Return columns of numbers, which wrap instead of losing digits. Units such as "[ms]" are not markup of rich."""
    return [Column(escape(heading), justify="right", overflow="fold") for heading in headings]


def texts(*headings: str) -> list[Column]:
    """Return columns of texts, which wrap instead of losing letters."""
    return [Column(heading, overflow="fold") for heading in headings]


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def interval(share: Share | None) -> str:
    """Format a share with its 95 % interval, such as "90.4 % (89.0-91.6)"."""
    return "" if share is None else f"{100 * share.value:.1f} % ({100 * share.low:.1f}-{100 * share.high:.1f})"


def describe_score(name: str, score: Score, reference: str | None, full: Score | None) -> str:
    """Describe a score, one line per measure. reference: name of the full-precision model; full: its score."""
    lines = [f"{name}, {score.images:,} images"]
    for title, field in (("top-1", "top1"), ("top-5", "top5")):
        if getattr(score, field) is not None:
            reference_text = "" if full is None else f", full precision {interval(getattr(full, field))}"
            lines.append(f"{title} {interval(getattr(score, field))}{reference_text}")
    if score.agreement is not None:
        divergence = "" if score.kl is None else f", KL divergence {score.kl:.4g} nats"
        lines.append(f"agreement with full-precision {reference} {percent(score.agreement)}{divergence}")
    if score.p_value is not None:
        lines.append(
            f"images correct only in full precision {score.lost}, only quantized {score.gained}: "
            f"McNemar's p {score.p_value:.2g}"
        )
    return "\n".join(lines)


def census_table(facts: Mapping[str, Any]) -> Table:
    title = f"{escape(facts['model'])}: {facts['parameters']:,} parameters, images {facts['images']}"
    table = Table(*texts("site", "role", "left", "right", "weight"), title=title)
    for row in facts["sites"]:
        shape = "" if row["shape"] is None else " x ".join(map(str, row["shape"]))
        table.add_row(escape(row["site"]), row["role"], row["left"], row["right"], shape)
    return table


def census_lines(facts: Mapping[str, Any]) -> str:
    """Describe how many sites of each kind there are, which norms do not fold and why, and what stays in float."""
    counts = (
        f"linears {facts['linears']}, convolutions {facts['convs']}, Q K^T {facts['qk']}, A V {facts['av']}, "
        f"other products {len(facts['other_sites'])}; sites after a GELU {facts['post_gelu']}, "
        f"norms that fold {facts['pairs']}"
    )
    return "\n".join([counts, *float_lines(facts["refusals"], facts["float_ops"])])


def methods_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        *texts("method", "source", "choices"), title="Methods, with the choices that differ from the defaults"
    )
    for row in rows:
        choices = ", ".join(f"{name} = {_choice(value)}" for name, value in row["choices"].items())
        table.add_row(row["name"], escape(row["source"]), escape(choices))
    return table


def _choice(value: Any) -> str:
    """Format a choice as text; a search is its kind, followed by its own choices in brackets."""
    if isinstance(value, (list, tuple)):
        return " and ".join(map(_choice, value)) or "none"
    if not isinstance(value, dict):
        return str(value)
    inner = ", ".join(f"{name} = {_choice(item)}" for name, item in value.items() if name != "kind")
    return f"{value['kind']} ({inner})" if inner else str(value["kind"])


def parts_line(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {count:,}" for part, count in parts.items())


def bytes_table(content: bytes) -> Table:
    """Return a table of an artifact's bytes, with one row per tensor and one column per part."""
    parts = artifact.sizes(content)
    columns = [part for part in parts if part != "header"]
    table = Table(*texts("tensor"), *numbers(*columns, "all"), title="Bytes")
    for name, counts in artifact.tensor_sizes(content).items():
        cells = [f"{counts[part]:,}" if part in counts else "" for part in columns]
        table.add_row(escape(name), *cells, f"{sum(counts.values()):,}")
    table.add_section()
    table.add_row("header", *("" for _ in columns), f"{parts['header']:,}")
    table.add_row("all", *(f"{parts[part]:,}" for part in columns), f"{len(content):,}", style="bold")
    return table


def health(facts: Mapping[str, Any]) -> list[str | Table]:
    """Format the result of `doctor.examine`: versions, the machine, and the kernels."""
    packages = {name: version for name, version in facts["packages"].items() if version is not None}
    missing = [name for name in facts["packages"] if name not in packages]
    features = "unknown on this system" if facts["features"] is None else " ".join(facts["features"]) or "none"
    native = facts["native"]
    lines = [
        f"python {facts['python']}, {', '.join(f'{name} {version}' for name, version in packages.items())}",
        f"not installed: {', '.join(missing) or 'nothing'}",
        f"{facts['system']}, {facts['processor']}, {facts['cores']} cores; features for kernels: {features}",
        f"executors: {', '.join(facts['executors'])}",
    ]
    if native["held"] is not None:
        lines.append(f"ADALOG_LEVEL limits the kernels to {native['held']}")
    if native["level"] is None:
        return ["\n".join([*lines, f"native is not available: {native['why']}"])]
    title = f"native: {escape(native['library'])}, interface {native['interface']['library']}"
    table = Table("kernels", "run here", title=title)
    for name, runs in native["kernels"].items():
        suffix = ", used by default" if name == native["level"] else ""
        table.add_row(name, f"yes{suffix}" if runs else "no: the processor or the system does not support them")
    return ["\n".join(lines), table]


def times(facts: Mapping[str, Any]) -> list[str | Table]:
    """Format the times of `adalog bench`, one row per batch size and executor, then the missing executors and why."""
    columns = numbers("batch", "CPU [ms]", "wall [ms]", "images/s", "runs", "weights [MB]", "load [s]")
    title = f"{escape(facts['file'])}, threads: {facts['threads']}; median times"
    table = Table("executor", *columns, title=title)
    for row in facts["rows"]:
        cells = (row["batch"], f"{row['cpu_ms']:.2f}", f"{row['wall_ms']:.2f}")
        loading = "" if row["load_seconds"] is None else f"{row['load_seconds']:.2f}"
        rest = (f"{row['images_per_second']:.1f}", row["repeats"], f"{row['weight_bytes'] / 1e6:.2f}", loading)
        table.add_row(row["executor"], *map(str, (*cells, *rest)))
    return [table, *(f"{name} is not available: {why}" for name, why in facts["absent"].items())]


def cost_table(title: str, result: Cost) -> Table:
    """Return a table of costs with one row per role."""
    table = Table(*texts("role"), *numbers("count", "FixOPs", "BOPs", "weight\nbytes"), title=escape(title))
    for role, row in result.by_role().items():
        cells = (f"{row.count:,}", f"{row.fixops:,.0f}", f"{row.bops:,}", f"{row.weight_bytes:,}")
        table.add_row(role, *cells, style="" if role in PRODUCT_ROLES else "dim")
    return table


def cost_lines(result: Cost) -> str:
    """Format the total costs of a model, one line per kind."""
    lines = [
        f"products: {result.macs:,} MACs, {result.fixops:,.0f} FixOPs, {result.bops:,} BOPs",
        f"in integers: {result.integer_macs:,} MACs ({percent(result.integer_macs / max(result.macs, 1))})",
        f"everything else: {result.elementwise_fixops:,.0f} FixOPs",
        f"bytes of the tensors: {parts_line(result.size_bytes)}; {sum(result.size_bytes.values()):,} in total",
    ]
    if result.table_bytes:
        lines.append(f"tables, computed when the model is loaded: {result.table_bytes:,} bytes")
    if result.float_operations:
        operations = ", ".join(f"{name} x {count}" for name, count in result.float_operations.items())
        lines.append(f"in float, besides products: {operations}")
    return "\n".join(lines)
