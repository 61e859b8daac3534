"""Tables of what the search costs, of folded norms, and of a model's cost."""

from benchmarks.publish import RESULTS, markdown_table, read, source

from typing import Any

from adalog.methods import label

WAYS = {
    "equals": "equals: six steps, three rounds, float32",
    "default": "default",
    "unfused": "float32 and unfused",
    "six": "six steps, three rounds",
}


def speed_up_table() -> str:
    """Return our search compared with the direct one: speed-ups and ratios of losses."""
    heads = ["model", "images", "our search", "speed-up", "speed-up over direct, fused", "largest loss ratio"]
    heads += ["geometric mean", "geometric mean, held-out", "seconds, in float forwards"]
    lines = []
    for name, result in compared_results().items():
        for way, row in ways_of(result).items():
            loss, over = row["loss_ratio"], row.get("speedup_over_fused")
            against = "" if over is None else f"**{over:.1f}**" if row["equal"] else f"{over:.1f}"
            cells = [f"`{name}`", str(result["images"]), WAYS[way], f"{row['speedup']:.1f}", against]
            cells += [f"{loss['max']:.4f}", f"{loss['geomean']:.4f}", f"{loss['held_out_geomean']:.4f}"]
            lines.append([*cells, f"{row['float_forwards']:.0f}"])
    note = (
        "Ratios of CPU seconds on one thread within one run. The direct search gives the released code's outputs and "
        'makes a whole product for each candidate in float32; "fused" adds the library\'s compiled kernels around '
        "each product. *equals* has the same steps, rounds, precision and kernels as the fused direct search, so the "
        "bold ratio compares methods alone. *default* is what `adalog` does. *float32 and unfused* is the default "
        "without bfloat16 and compiled kernels. Loss ratio: our loss over that of the direct search."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source(*(f'search-{name}' for name in compared_results()))}"


def counts_table() -> str:
    """Return how many candidates and operations each search took."""
    heads = [
        "model",
        "search",
        "candidates per site",
        "scored on a sample",
        "candidates x rows",
        "TFLOP",
        "in bfloat16",
    ]
    lines = []
    for name, result in compared_results().items():
        if "counts" not in result:
            continue
        counts = {"direct": result["counts"]["direct"]}
        counts |= {WAYS[way]: row["counts"]["ours"] for way, row in ways_of(result).items()}
        for way, count in counts.items():
            sampled = count["sampled"]["candidates"] / count["candidates"] if "sampled" in count else 0
            cells = [f"`{name}`", way, f"{count['candidates_per_site']['mean']:,.0f}", f"{100 * sampled:.0f} %"]
            cells += [f"{count['evaluations'] / 1e6:,.1f} M", f"{count['flops'] / 1e12:.2f}"]
            lines.append([*cells, f"{100 * count.get('bfloat16_share', 0):.0f} %"])
    note = (
        "A candidate counts when its error on the site's output is computed. One for a weight sets the parameters of "
        "all its rows and counts once. Rows are the tokens of all images; a weight scored by a Gram matrix counts with "
        "all rows. TFLOP are of all matrix products of our search, and of the candidates' products alone for the "
        "direct search."
    )
    return f"{markdown_table(heads, lines)}\n\n{note}"


def whole_models_table() -> str:
    """Return CPU seconds and memory of the search of whole models."""
    lines = []
    for path in sorted(RESULTS.glob("search-*-full*.json")):
        result = read(path.stem)
        which = "an earlier search" if path.stem.endswith("-before") else "the search"
        memory = f"{result['peak_rss_bytes'] / 2**30:.2f}"
        lines.append([f"`{path.stem.removeprefix('search-')}`", which, f"{result['cpu_seconds']:.0f}", memory])
        lines[-1].append(source(path.stem))
    heads = ["model", "", "CPU seconds", "peak resident memory [GiB]", "source"]
    growth = read("search-scaling")["exponents"]
    powers = ", ".join(f"{axis}^{power:.2f}" for axis, power in growth.items())
    note = (
        "W4A4 from 32 images of noise, random weights, one thread. Measured on one block, seconds grow as "
        f"{powers}, with points the candidates of a step. {source('search-scaling')}"
    )
    return f"{markdown_table(heads, lines)}\n\n{note}"


def large_table() -> str:
    """Return the cost of the search of large images, and what its limit of rows loses."""
    result, lines = read("large"), []
    for row in result["rows"]:
        peak = max(row[part]["peak_rss_bytes"] for part in ("capture", "search")) / 2**30
        cost = [f"{row[part]['seconds']:.0f}" for part in ("capture", "search")]
        for limit in row["limits"]:
            chosen = limit["rows"] == result["default_rows"]
            cells = [f"{row['case']}, {row['images']} images", f"{limit['rows']:,}"]
            cells += [f"{limit[name]:.3f}" for name in ("mean_loss_db", "max_loss_db")]
            lines.append([*cells, f"{limit['seconds']:.0f}", *([*cost, f"{peak:.2f}"] if chosen else ["", "", ""])])
    compared = len(result["rows"][0]["all_rows"])
    others = " and ".join(f"{rows:,} ({name})" for name, rows in result["most_rows"].items())
    note = (
        f"W6A6 of `{result['model']}`, one thread, no stages. Losses of SQNR compare quantizers from a limited number "
        f"of rows with those from all rows, on all rows of the {compared} sites with the most rows. All sites are "
        "searched with the default limit and the default memory. The largest operands of other models have, on 32 "
        f"images, {others} rows. {source('large')}"
    )
    heads = ["model", "rows", "mean loss [dB]", "largest loss [dB]", "seconds of these sites"]
    heads += ["seconds of capture", "seconds of all sites", "peak resident memory [GiB]"]
    return f"{markdown_table(heads, lines)}\n\n{note}"


def ablation_table() -> str:
    """Return what each part of the search contributes on the bundled ViT."""
    result = read("search-demo-ablation")
    lines = [
        [label(kind), f"{row['loss']:.4f}", f"{row['held_out']:.4f}", f"{row['seconds']:.0f}"]
        for kind, row in result["variants"].items()
    ]
    note = f"Errors over those of the default, geometric means over all sites. {source('search-demo-ablation')}"
    return f"{markdown_table(['search', 'calibration images', 'held-out', 'seconds'], lines)}\n\n{note}"


def compared_results() -> dict[str, dict[str, Any]]:
    """Return the results that compare our search with the direct one, by model."""
    results = {path.stem.removeprefix("search-"): read(path.stem) for path in sorted(RESULTS.glob("search-*.json"))}
    return {name: result for name, result in results.items() if "speedup" in result}


def ways_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the ways of running our search that a result has; a file made before a way existed lacks it."""
    parts = {"equals": result.get("equals"), "default": result["default"], "unfused": result.get("unfused")}
    return {way: part for way, part in {**parts, "six": result}.items() if part is not None}


def folds_table() -> str:
    """Return the error with folded norms over that without, for all sites and for the head."""
    lines = []
    for row in read("folds")["rows"]:
        for ranges, name in (("own", "each channel's own"), ("shared", "one range in standard deviations")):
            cells = [f"{row[f'{ranges}_{images}']:.3f}" for images in ("calibration", "held_out")]
            head = f"{row['sites']['head'][ranges]['held_out']:.2f}"
            lines.append([f"W{row['bits']}A{row['bits']}", name, *cells, head])
    note = (
        "Squared error of the linears after a folded norm over their error without a fold: geometric mean over all "
        f"norms of the bundled ViT but the head's. {source('folds')}"
    )
    heads = ["bits", "ranges", "calibration images", "held-out images", "the head, held-out"]
    return f"{markdown_table(heads, lines)}\n\n{note}"


def cost_table() -> str:
    """Return FixOPs and bytes of DeiT-T, with the paper's Table 3."""
    result = read("cost")
    columns = result["rows"]
    printed = [row.get("as_printed", row) for row in columns]
    conversions = ("quantize", "dequantize")
    lines: list[list[str]] = []

    def add(name: str, values: list[float | None], form: str, unit: float) -> None:
        lines.append([name, *("" if value is None else format(value / unit, form) for value in values)])

    def role(name: str, rows: list[dict[str, Any]], field: str = "fixops") -> list[float | None]:
        return [row["roles"][name][field] if name in row["roles"] else None for row in rows]

    def totals(rows: list[dict[str, Any]]) -> list[float | None]:
        """Sum the FixOPs of products and of conversions to codes and back."""
        parts = zip([row["fixops"] for row in rows], *(role(name, rows) for name in conversions), strict=True)
        return [sum(value or 0 for value in part) for part in parts]

    for name in ("linear", "conv", "qk", "av"):
        add(name, role(name, columns), ",.1f", 1e6)
    add("**products**", [row["fixops"] for row in columns], ",.1f", 1e6)
    for name in conversions:
        add(name, role(name, columns), ",.1f", 1e6)
    add("**products, quantize, dequantize**", totals(columns), ",.1f", 1e6)
    add("products, Eq. 10 as printed", [row["fixops"] for row in printed], ",.1f", 1e6)
    add("the mantissas' extra bit in these", [row["mantissa_fixops"] or None for row in printed], ",.1f", 1e6)
    add("products, quantize, dequantize, Eq. 10 as printed", totals(printed), ",.1f", 1e6)
    add("**the paper's Table 3**", [row["paper"] and row["paper"]["fixops"] for row in columns], ",.0f", 1e6)
    for name in ("layer_norm", "gelu", "softmax", "mul"):
        add(name, role(name, columns), ",.1f", 1e6)
    add("integer MACs [millions]", [row["integer_macs"] for row in columns], ",.1f", 1e6)
    add("look-ups [millions]", role("look-up", columns, "count"), ",.1f", 1e6)
    add("shifts, Eq. 10 as printed [millions]", role("shift", printed, "count"), ",.1f", 1e6)
    for width in ("u8", "u16"):
        add(f"{width} tables", [row.get("tables", {}).get(width) for row in columns], ",.0f", 1)
    add("tables, in memory only [bytes]", [row["table_bytes"] or None for row in columns], ",.0f", 1)
    files = [row["file_bytes"] for row in columns]
    for part in ("header", "codes", "scale", "zero_point", "float"):
        add(f"file: {part} [bytes]", [parts and parts[part] for parts in files], ",.0f", 1)
    add("**file [MB]**", [parts and sum(parts.values()) for parts in files], ".3f", 1e6)
    add("**the paper's Table 3 [MB]**", [row["paper"] and row["paper"]["size_bytes"] for row in columns], ".1f", 1e6)
    note = (
        "DeiT-T on 224 x 224, random weights, images of noise. Millions of FixOPs unless a row says otherwise; 1 MB is "
        f"10⁶ bytes. [Cost](../reference/cost.md) defines what counts. {source('cost')}"
    )
    return f"{markdown_table(['', *(row['bits'].upper() for row in columns)], lines)}\n\n{note}"
