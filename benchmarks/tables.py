"""Write the tables of README and docs from the files in benchmarks/results.

    python benchmarks/tables.py [--check]

With --check nothing is written; the exit code is 1 if a table is out of date.
"""

from benchmarks import speed_tables, stage_tables
from benchmarks.publish import RESULTS, ROOT, measured

import json
import re
import sys
from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Annotated, Any

import typer

from adalog.methods import labelled
from adalog.study.markdown import markdown


def demo_table() -> str:
    """Top-1, agreement and size of the bundled model: the means over the seeds of demo.json."""
    result = json.loads((RESULTS / "demo.json").read_text())
    lines = [
        "| bits | quantizer after softmax and GELU | top-1 | agreement with fp32 | file |",
        "|---|---|---|---|---|",
    ]
    lines.append(f"| fp32 | | {100 * result['fp32']['top1']:.2f} % | | |")
    for row in result["rows"]:
        strong = "**" if row["method"] == "adalog" else ""
        cells = (row["bits"].upper(), labelled(row["method"]), mean_text(row["top1"]), mean_text(row["agreement"]))
        size = f"{row['bytes']['mean'] / 1e6:.2f} MB"
        lines.append("| " + " | ".join(f"{strong}{cell}{strong}" for cell in (*cells, size)) + " |")
    machine, seeds = result["machine"], result["seeds"]
    draws = f"Mean ± standard deviation over {len(seeds)} draws" if len(seeds) > 1 else f"One draw (seed {seeds[0]})"
    executors = dict.fromkeys(row["executor"] or "fake quantization" for run in result["runs"] for row in run["rows"])
    note = (
        f"{draws} of {result['calibration_images']} calibration images, on {result['images']:,} test images (one top-1 "
        f"has a standard error of about 0.7 points), run by {' and '.join(executors)}. "
        f"Measured with torch {machine['torch']}; figures: `benchmarks/results/demo.json`."
    )
    lines += ["", note]
    return "\n".join(lines)


def cost_table() -> str:
    """FixOPs and bytes of DeiT-T at the bits of cost.json, beside the paper's."""
    result = json.loads((RESULTS / "cost.json").read_text())
    columns = result["rows"]
    lines = ["| | " + " | ".join(row["bits"] for row in columns) + " |", "|---|" + "---|" * len(columns)]

    def line(name: str, values: list[float | None], form: str, unit: float) -> None:
        cells = ["" if value is None else format(value / unit, form) for value in values]
        lines.append("| " + " | ".join([name, *cells]) + " |")

    def fixops(role: str, found: list[dict[str, Any]]) -> list[float | None]:
        return [row["roles"][role]["fixops"] if role in row["roles"] else None for row in found]

    def count(role: str, found: list[dict[str, Any]]) -> list[float | None]:
        return [row["roles"][role]["count"] if role in row["roles"] else None for row in found]

    def totals(found: list[dict[str, Any]]) -> list[float]:
        """FixOPs of the products and of conversion to codes and back."""
        cells = zip([row["fixops"] for row in found], *(fixops(role, found) for role in conversions), strict=True)
        return [sum(value or 0 for value in each) for each in cells]

    conversions = ("quantize", "dequantize")
    printed = [row.get("as_printed", row) for row in columns]
    for role in ("linear", "conv", "qk", "av"):
        line(role, fixops(role, columns), ",.1f", 1e6)
    line("**products**", [row["fixops"] for row in columns], ",.1f", 1e6)
    for role in conversions:
        line(role, fixops(role, columns), ",.1f", 1e6)
    line("**products, quantize, dequantize**", totals(columns), ",.1f", 1e6)
    line("products, Eq. 10 as printed", [row["fixops"] for row in printed], ",.1f", 1e6)
    line("of them the mantissas' extra bit", [row["mantissa_fixops"] or None for row in printed], ",.1f", 1e6)
    line("products, quantize, dequantize, Eq. 10 as printed", totals(printed), ",.1f", 1e6)
    line("**the paper's Table 3**", [row["paper"] and row["paper"]["fixops"] for row in columns], ",.0f", 1e6)
    for role in ("layer_norm", "gelu", "softmax", "mul"):
        line(role, fixops(role, columns), ",.1f", 1e6)
    line("MACs of integers [millions]", [row["integer_macs"] for row in columns], ",.1f", 1e6)
    line("look-ups [millions]", count("look-up", columns), ",.1f", 1e6)
    line("shifts, Eq. 10 as printed [millions]", count("shift", printed), ",.1f", 1e6)
    for width in ("u8", "u16"):
        line(f"{width} tables", [row.get("tables", {}).get(width) for row in columns], ",.0f", 1)
    line("tables, in memory alone [bytes]", [row["table_bytes"] or None for row in columns], ",.0f", 1)
    files = [row["file_bytes"] for row in columns]
    for part in ("header", "codes", "scale", "zero_point", "float"):
        line(f"file: {part} [bytes]", [parts and parts[part] for parts in files], ",.0f", 1)
    line("**file [MB]**", [parts and sum(parts.values()) for parts in files], ".3f", 1e6)
    line("**the paper's Table 3 [MB]**", [row["paper"] and row["paper"]["size_bytes"] for row in columns], ".1f", 1e6)
    return "\n".join(lines)


def real_rows(result: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of realbench.json by bits and method, those of all draws together."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["bits"], row["method"]), []).append(row)
    return found


def share_text(rows: Sequence[dict[str, Any]], name: str) -> str:
    """A share in percent: its mean, and its standard deviation where there are several draws."""
    values = [100 * row[name] for row in rows]
    return f"{mean(values):.1f}{f' ± {stdev(values):.1f}' if len(values) > 1 else ''} %"


def draws_text(result: dict[str, Any]) -> str:
    """Which draws of calibration images realbench.json has."""
    seeds = result.get("seeds", [result["seed"]])
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"mean ± standard deviation over {len(seeds)} draws"


def real_table() -> str:
    """Top-1 of every method at every width on the real images of realbench.json, a row per method."""
    result = measured("realbench")
    fp32, found = result["fp32"], real_rows(result)
    bits, methods = (list(dict.fromkeys(key[index] for key in found)) for index in (0, 1))
    lines = [f"| method | {' | '.join(map(str.upper, bits))} |", "|---" * (1 + len(bits)) + "|"]
    for method in methods:
        strong = "**" if method == "adalog" else ""
        rows = (found.get((width, method)) for width in bits)
        cells = (labelled(method), *("" if each is None else share_text(each, "top1") for each in rows))
        lines.append("| " + " | ".join(f"{strong}{cell}{strong}" for cell in cells) + " |")
    renewed: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "renewed" in row:
            renewed.setdefault(row["method"], []).append(row["bits"].upper())
    again = " and ".join(f"those of `{method}` at {' and '.join(widths)}" for method, widths in renewed.items())
    again = f"; {again} are in `realbench-renewed.json`" if renewed else ""
    note = (
        f"Top-1 on {result['queries']:,} images; full precision has {100 * fp32['top1']:.1f} % (95 % interval "
        f"{100 * fp32['low']:.1f} to {100 * fp32['high']:.1f}). {result['calibration_images']} unlabelled images "
        f"calibrate ({draws_text(result)}), and nothing is trained. Figures: `benchmarks/results/realbench.json`"
        f"{again}. [Measured](docs/measured.md) has McNemar's tests, seconds and the worst sites."
    )
    return "\n".join([*lines, "", note])


def realbench_table() -> str:
    """Top-1 on the real images of realbench.json, and how much is lost to full precision."""
    result = measured("realbench")
    fp32 = result["fp32"]
    heads = "bits | method | top-1 | points lost | agreement with fp32 | p, fp32 | p, adalog | calibration [CPU s]"
    lines = [f"| {heads} |", "|---" * 8 + "|"]
    interval = f"{100 * fp32['top1']:.1f} % ({100 * fp32['low']:.1f}-{100 * fp32['high']:.1f})"
    lines.append(f"| fp32 | | {interval} | | | | | |")
    for (bits, method), rows in real_rows(result).items():
        lost = 100 * (fp32["top1"] - mean(row["top1"] for row in rows))
        beside = [row["mcnemar_p_adalog"] for row in rows if row["mcnemar_p_adalog"] is not None]
        name = labelled(method) + " †" * any("renewed" in row for row in rows)
        cells = (bits.upper(), name, share_text(rows, "top1"), f"{lost:.1f}")
        cells += (share_text(rows, "agreement"), f"{median(row['mcnemar_p'] for row in rows):.2g}")
        cells += (f"{median(beside):.2g}" if beside else "", f"{mean(row['seconds'] for row in rows):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    several = ", of several draws the median" if len(result.get("seeds", [])) > 1 else ""
    note = (
        f"{result['queries']:,} queries, {result['calibration_images']} support images for calibration, "
        f"{draws_text(result)}, torch {result['machine']['torch']}; p: McNemar's exact test beside full precision "
        f"and beside adalog at the same bits{several}; `easyquant` was measured before ties of its cosine went to the "
        "least squared error; figures: `benchmarks/results/realbench.json`."
    )
    renewed = sorted({row["renewed"] for row in result["rows"] if "renewed" in row})
    if renewed:
        note += (
            f" †: measured again later, on an {' and '.join(renewed)} (`realbench-renewed.json`), no p beside "
            "adalog; their seconds are not to be compared with the others."
        )
    return "\n".join([*lines, "", note])


def draws_table() -> str:
    """Several draws of calibration images on the real images, from realbench-draws.json: means and deviations."""
    result = json.loads((RESULTS / "realbench-draws.json").read_text())
    lines = [
        "| bits | method | draws | top-1 | agreement with fp32 | p, adalog | calibration [CPU s] |",
        "|---" * 7 + "|",
    ]
    for (bits, method), rows in real_rows(result).items():
        beside = [row["mcnemar_p_adalog"] for row in rows if row["mcnemar_p_adalog"] is not None]
        cells = (
            bits.upper(),
            labelled(method),
            str(len(rows)),
            share_text(rows, "top1"),
            share_text(rows, "agreement"),
        )
        cells += (f"{median(beside):.2g}" if beside else "", f"{mean(row['seconds'] for row in rows):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        f"Mean ± standard deviation over draws of {result['calibration_images']} of the support images; full precision "
        f"has {100 * result['fp32']['top1']:.1f} %. p: McNemar's test beside adalog of the same draw, the median. "
        f"Measured at commit {result['commit'][:7]} on an {result['machine']['processor']}, beside other work; "
        "figures: `benchmarks/results/realbench-draws.json`."
    )
    return "\n".join([*lines, "", note])


def realbench_sites_table() -> str:
    """The sites with the least SQNR under adalog, at each of the bits of realbench.json."""
    found = real_rows(measured("realbench"))
    lines = ["| bits | mean SQNR [dB] | the five sites with the least |", "|---|---|---|"]
    for row in (rows[0] for (_, method), rows in found.items() if method == "adalog"):  # of the first draw
        worst = sorted(row["sqnr"], key=row["sqnr"].__getitem__)[:5]
        told = ", ".join(f"{site} {row['sqnr'][site]:.1f} ({row['left'][site]})" for site in worst)
        lines.append(f"| {row['bits'].upper()} | {mean(row['sqnr'].values()):.1f} | {told} |")
    return "\n".join(lines)


def golden_table() -> str:
    """How close methods are to their released code, by file, and what `adalog` gains over that of AdaLog."""
    result = json.loads((RESULTS / "golden.json").read_text())
    lines = [
        "| setting | layers | largest ratio of errors | within 0.1 % | same q | same zero points of activations |",
        "|---" * 6 + "|",
    ]
    for name, row in result["files"].items():
        cells = (name, row["sites"], f"{row['max_mse_ratio']:.4f}", f"{100 * row['within_0.1_percent']:.0f} %")
        same = ("yes" if row[key] else "no" for key in ("q_equal", "activation_zero_points_equal"))
        lines.append("| " + " | ".join(str(cell) for cell in (*cells, *same)) + " |")
    lines += ["", "| bits | adalog / released, on the calibration images | on held-out noise |", "|---|---|---|"]
    for bits, gain in result["adalog_over_released"].items():
        lines.append(f"| {bits.upper()} | {gain['calibration']:.3f} | {gain['held_out']:.3f} |")
    return "\n".join(lines)


def folds_table() -> str:
    """The error with folded norms over that without, for all sites and for the head, from folds.json."""
    result = json.loads((RESULTS / "folds.json").read_text())
    lines = ["| bits | ranges | calibration images | held-out | the head's, held-out |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        for ranges, name in (("own", "a channel's own"), ("shared", "one in deviations")):
            cells = (f"{row[f'{ranges}_{images}']:.3f}" for images in ("calibration", "held_out"))
            head = f"{row['sites']['head'][ranges]['held_out']:.2f}"
            lines.append("| " + " | ".join([f"W{row['bits']}A{row['bits']}", name, *cells, head]) + " |")
    return "\n".join(lines)


def search_table() -> str:
    """Our search beside the direct one, what each did, and the calibration of a whole model, from each search-*.json.

    A file made before candidates were counted has fewer rows, and none in the second table.
    """
    speeds = ["| model | images | our search | speed-up | over direct, fused | loss, largest ratio | geometric mean |"]
    speeds = [f"{speeds[0]} held out | seconds, in float forwards |", "|---" * 9 + "|"]
    counts = ["| model | search | candidates per site | on a sample | candidates x rows | TFLOP | in bfloat16 |"]
    counts.append("|---" * 7 + "|")
    whole, parts, machines = [], [], []
    for path in sorted(RESULTS.glob("search-*.json")):
        result = json.loads(path.read_text())
        name = path.stem.removeprefix("search-")
        if "cpu_seconds" in result:
            memory = result["peak_rss_bytes"] / 2**30
            which = "the earlier" if name.endswith("-before") else "the present"
            whole.append(
                f"`{name}`: {which} search of the whole model takes {result['cpu_seconds']:.0f} CPU seconds and at "
                f"most {memory:.2f} GiB of resident memory."
            )
        elif "exponents" in result:
            powers = (f"{axis}^{power:.2f}" for axis, power in result["exponents"].items())
            whole.append(f"`{name}`: seconds grow as {', '.join(powers)}, where points are the candidates of a step.")
        elif "variants" in result:
            parts += [
                f"`{name}` changes the search: errors over those of the default, geometric means over all sites.",
                "",
            ]
            parts += ["| search | calibration images | held out | seconds |", "|---|---|---|---|"]
            for kind, row in result["variants"].items():
                parts.append(f"| {labelled(kind)} | {row['loss']:.4f} | {row['held_out']:.4f} | {row['seconds']:.0f} |")
        elif "speedup" in result:
            kinds = {
                "equals: six steps, three rounds, float32": result.get("equals"),
                "as it comes": result["default"],
                "float32 and unfused": result.get("unfused"),
                "six steps, three rounds": result,
            }
            rows = {kind: row for kind, row in kinds.items() if row is not None}
            for kind, row in rows.items():
                loss, over = row["loss_ratio"], row.get("speedup_over_fused")
                against = "" if over is None else f"**{over:.1f}**" if row["equal"] else f"{over:.1f}"
                cells = (name, str(result["images"]), kind, f"{row['speedup']:.1f}", against, f"{loss['max']:.4f}")
                cells += (f"{loss['geomean']:.4f}", f"{loss['held_out_geomean']:.4f}", f"{row['float_forwards']:.0f}")
                speeds.append("| " + " | ".join(cells) + " |")
            if "counts" in result:
                both = {
                    "direct": result["counts"]["direct"],
                    **{kind: row["counts"]["ours"] for kind, row in rows.items()},
                }
                for kind, did in both.items():
                    sampled = did["sampled"]["candidates"] / did["candidates"] if "sampled" in did else 0
                    cells = (name, kind, f"{did['candidates_per_site']['mean']:,.0f}", f"{100 * sampled:.0f} %")
                    cells += (f"{did['evaluations'] / 1e6:,.1f} M", f"{did['flops'] / 1e12:.2f}")
                    counts.append("| " + " | ".join((*cells, f"{100 * did.get('bfloat16_share', 0):.0f} %")) + " |")
                able = "with" if result["search"]["bfloat16"] else "without"
                machines.append(
                    f"`{name}` was measured on an {result['machine']['processor']} {able} instructions for bfloat16."
                )
    tables = ["\n".join(speeds), *(["\n".join(counts), *machines] if machines else [])]
    return "\n\n".join([*tables, *whole, *(["\n".join(parts)] if parts else [])])


def paper_tables() -> str:
    """The paper's tables with their heading, from tables-demo.json; empty if there is no such file.

    That file is the JSON of `adalog tables 1 2 3 4 5 A B --models demo --seeds 3`.
    """
    if not (RESULTS / "tables-demo.json").exists():
        return ""
    result = measured("tables-demo")
    renewed = sorted({row["renewed"] for row in result["rows"] if "renewed" in row})
    for row in result["rows"]:
        if "renewed" in row:
            row["names"] = [f"{row['names'][0]} †", *row["names"][1:]]
    text = (
        "## The paper's tables, on the bundled model\n\n"
        "By `adalog tables 1 2 3 4 5 A B --models demo --seeds 3`, with the same images and the same judge. The "
        "command has gained rows since: not here are those of `repq-vit-released` and `ptq4vit-released` "
        "([further below](#the-released-code-reproduced)), of `erq` and of reconstruction, those of the released "
        "search in Tables 2 to 5, and one of Table A. Size is that of the tensors, without the file's header. "
        "One top-1 on 2,000 images has a standard error of about 0.7 points; agreement with full precision tells "
        "quantizers apart sooner. Figures: `benchmarks/results/tables-demo.json`."
    )
    if renewed:
        text += (
            f" Rows with † were measured again later, on an {' and '.join(renewed)} "
            "(`tables-demo-renewed*.json`); their seconds compare with one another, and their p beside adalog is "
            "beside an adalog of their own run."
        )
    return f"{text}\n\n{markdown(result, '### ').strip()}"


def twins_table() -> str:
    """Our readings of rivals beside what their released codes compute, from tables-demo-twins.json.

    That file is the JSON of `adalog tables 1 --models demo --seeds 3`, of these methods alone.
    """
    result = json.loads((RESULTS / "tables-demo-twins.json").read_text())
    bits = sorted({row["bits"] for row in result["rows"]}, reverse=True)
    lines = [f"| method | {' | '.join(f'{width.upper()} | agreement' for width in bits)} |"]
    lines.append("|---" * (1 + 2 * len(bits)) + "|")
    rows = {(row["names"][0], row["bits"]): row for row in result["rows"]}
    for method in dict.fromkeys(name for name, _ in rows):
        cells = [mean_text(rows[method, width][name]) for width in bits for name in ("top1", "agreement")]
        lines.append(f"| {' | '.join([labelled(method), *cells])} |")
    draws = len(result["rows"][0]["top1"]["values"])
    note = (
        f"Top-1 and agreement on {result['models']['demo']['images']:,} images, means ± standard deviations over "
        f"{draws} draws, measured at commit {result['commit'][:7]} on an {result['machine']['processor']}. Figures: "
        "`benchmarks/results/tables-demo-twins.json`."
    )
    return "\n".join([*lines, "", note])


def sides_table() -> str:
    """Top-1 with weights, activations, and both at 3 bits, from sides.json."""
    result = json.loads((RESULTS / "sides.json").read_text())
    bits = list(dict.fromkeys(row["bits"] for row in result["rows"]))
    lines = [f"| method | {' | '.join(map(str.upper, bits))} |", "|---" * (1 + len(bits)) + "|"]
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        found = {row["bits"]: mean_text(row["top1"]) for row in result["rows"] if row["method"] == method}
        lines.append(f"| {labelled(method)} | {' | '.join(found.get(width, '') for width in bits)} |")
    return "\n".join(lines)


def detector_rows() -> tuple[dict[str, Any], dict[tuple[str, str], list[dict[str, Any]]]]:
    """detection-demo.json, and its rows of all draws by bits and method."""
    result = json.loads((RESULTS / "detection-demo.json").read_text())
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["bits"], row["method"]), []).append(row)
    return result, found


def detector_table() -> str:
    """AP of boxes and masks of the bundled detector by method, at each of the bits of detection-demo.json."""
    result, rows = detector_rows()
    bits = list(dict.fromkeys(width for width, _ in rows))
    methods = list(dict.fromkeys(method for _, method in rows))
    lines = [f"| method | {' | '.join(f'{width.upper()} boxes | {width.upper()} masks' for width in bits)} |"]
    lines.append("|---" * (1 + 2 * len(bits)) + "|")
    for method in methods:
        strong = "**" if method == "adalog" else ""
        cells = [labelled(method)]
        for width in bits:
            for name in ("box_ap", "mask_ap"):
                values = [100 * row[name] for row in rows[width, method]]
                cells.append(f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else ""))
        lines.append("| " + " | ".join(f"{strong}{cell}{strong}" for cell in cells) + " |")
    whole, draws = result["fp32"], len({row["seed"] for row in result["rows"]})
    size = rows["w4a4", "adalog"][0]["bytes"]
    lines += [
        "",
        f"AP [%] of boxes and masks on {result['images']} scenes; full precision has {100 * whole['box_ap']:.1f} and "
        f"{100 * whole['mask_ap']:.1f}. {result['calibration_images']} scenes calibrate"
        + (f", mean ± standard deviation over {draws} draws" if draws > 1 else " (seed 0)")
        + f". All parts are quantized; a file of W4A4 takes {size / 1e6:.2f} MB. Figures: "
        "`benchmarks/results/detection-demo.json`.",
    ]
    return "\n".join(lines)


TABLES = (
    ("README.md", "stages table", stage_tables.stages_table),
    ("README.md", "real table", real_table),
    ("docs/measured.md", "demo table", demo_table),
    ("docs/measured.md", "detector table", detector_table),
    ("README.md", "speed table", speed_tables.speed_table),
    ("docs/measured.md", "accuracy table", speed_tables.accuracy_table),
    ("docs/cost.md", "cost table", cost_table),
    ("docs/export.md", "export table", speed_tables.export_table),
    ("docs/measured.md", "executors table", speed_tables.executors_table),
    ("docs/measured.md", "realbench table", realbench_table),
    ("docs/measured.md", "realbench sites table", realbench_sites_table),
    ("docs/measured.md", "draws table", draws_table),
    ("docs/measured.md", "paper tables", paper_tables),
    ("docs/measured.md", "twins table", twins_table),
    ("docs/measured.md", "sides table", sides_table),
    ("docs/measured.md", "golden table", golden_table),
    ("docs/measured.md", "search table", search_table),
    ("docs/measured.md", "folds table", folds_table),
    ("docs/measured.md", "reconstruct table", stage_tables.reconstruct_table),
    ("docs/measured.md", "table four", stage_tables.table_four),
    ("docs/measured.md", "table D", stage_tables.table_d),
    ("docs/measured.md", "runtime table", speed_tables.runtime_table),
    ("docs/measured.md", "budgets table", stage_tables.budgets_table),
    ("docs/native.md", "limits table", speed_tables.limits_table),
    ("docs/native.md", "load table", speed_tables.load_table),
)


def mean_text(value: dict[str, float]) -> str:
    """A mean and its standard deviation in percent."""
    deviation = f" ± {100 * value['std']:.2f}" if value["std"] else ""
    return f"{100 * value['mean']:.2f}{deviation} %"


def main(check: Annotated[bool, typer.Option("--check")] = False) -> None:
    stale = False
    for place, name, table in TABLES:
        text = (ROOT / place).read_text()
        block = f"<!-- {name} -->\n{table()}\n<!-- end -->"
        fresh = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
        stale |= fresh != text
        if not check:
            (ROOT / place).write_text(fresh)
    sys.exit(check and stale)


if __name__ == "__main__":
    typer.run(main)
