"""Format the result of `classifiers.run` as Markdown."""

from benchmarks.publish import markdown_table
from experiments.paper import bits_name, find_published

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from adalog.config import Config
from adalog.methods import label


def markdown(result: Mapping[str, Any], heading: str = "## ") -> str:
    """Return a Markdown table for each table and model.

    result: the return value of `classifiers.run`.
    """
    paragraphs = []
    for name, table in result["tables"].items():
        paragraphs.append(f"{heading}Table {name}: {table['title']}")
        rows = [row for row in result["rows"] if row["table"] == name]
        for model, whole in result["models"].items():
            found = [row for row in rows if row["model"] == model]
            if found:
                beside = find_published(name, model, "fp32", "fp32", 0)
                paragraphs += [f"{model}:", _markdown_table(table, {**whole, "published": beside}, found)]
        compared = any(row["published"] for row in rows)
        paragraphs += [text for text in (table["note"], compared and table["published_note"]) if text]
    seeds = 1 + max((seed for row in result["rows"] for seed in row["seeds"]), default=0)
    draws = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    judged = ", ".join(f"{model} on {whole['images']:,} images" for model, whole in result["models"].items())
    machine = result["machine"]
    paragraphs.append(
        f"{draws}, with {result['calibration_images']} calibration images; evaluated: {judged}. p is the p-value of "
        "McNemar's exact test against the full-precision model, and against adalog at the same bits; with several "
        "seeds, the median. CPU s is the CPU time of the search and the stages; a shared search counts in every row. "
        f"Run by {' and '.join(result['executors'])}. adalog "
        f"{machine['adalog']}, torch {machine['torch']}, {machine['processor']}."
    )
    return "\n\n".join([*paragraphs, *unfinished(result)]) + "\n"


def unfinished(result: Mapping[str, Any]) -> list[str]:
    """Return a note on measurements that are still missing; an empty list if the result is complete."""
    if result["finished"] == result["of"]:
        return []
    return [f"Unfinished: {result['finished']} of {result['of']} measurements."]


def _markdown_table(table: Mapping[str, Any], whole: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the full-precision model and the rows as a table.

    Empty columns, such as columns without published figures, are left out.
    """
    names, draws = table["columns"], max(len(row["seeds"]) for row in rows)
    lines = [{"bits": "W32/A32", names[0]: "full precision", **_figures(whole, table["cost"])}]
    for row in rows:
        beside = [value for value in row["p_adalog"] if value is not None]
        line = {"bits": bits_name(Config.preset(row["bits"])), **dict(zip(names, row["names"], strict=True))}
        if "method" in line:
            line["method"] = label(line["method"])
        line |= _figures(row, table["cost"])
        if len(row["seeds"]) < draws:
            line["top-1 [%]"] += f" ({len(row['seeds'])} of {draws} seeds)"
        line["agreement [%]"] = percent(row["agreement"])
        line["p, float"] = f"{median(row['p_float']):.2g}"
        line["p, adalog"] = f"{median(beside):.2g}" if beside else ""
        line["CPU s"] = f"{row['seconds']['mean']:.0f}"
        if "gpu_minutes" in row["published"]:
            line["published GPU min"] = f"{row['published']['gpu_minutes']:g}"
        lines.append(line)
    columns = list(dict.fromkeys(("bits", *names, *(column for line in lines for column in line))))
    columns = [column for column in columns if any(line.get(column) for line in lines)]
    return markdown_table(columns, ([line.get(column, "") for column in columns] for line in lines))


def _figures(told: Mapping[str, Any], with_cost: bool) -> dict[str, str]:
    """Return the measured and the published cells of a row, or of the full-precision model."""
    others = told["published"]
    cells = {"top-1 [%]": percent(told["top1"]), "published [%]": f"{others['top1']:.2f}" if "top1" in others else ""}
    if with_cost:
        for title, field, other, unit, form in _COSTS:
            value = told[field] if isinstance(told[field], (int, float)) else told[field]["mean"]
            cells[title] = format(value / 1e6, form)
            cells[f"published {title}"] = format(others[other] / unit, form) if other in others else ""
    return cells


_COSTS = (("FixOPs [M]", "fixops", "fixops", 1e6, ",.0f"), ("size [MB]", "bytes", "megabytes", 1, ".2f"))


def percent(value: float | Mapping[str, Any] | None, digits: int = 2) -> str:
    """Format a share, or the mean and the deviation of several; None is empty."""
    if value is None:
        return ""
    if isinstance(value, (int, float)):
        return f"{100 * value:.{digits}f}"
    deviation = f" ± {100 * value['std']:.{digits}f}" if len(value["values"]) > 1 else ""
    return f"{100 * value['mean']:.{digits}f}{deviation}"
