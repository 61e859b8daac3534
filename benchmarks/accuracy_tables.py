"""Tables of accuracy: TinyViT on real images, the bundled ViT, the paper's tables, the released code, the detector."""

from benchmarks.publish import earlier, later_files, markdown_table, measured, read, source
from benchmarks.records import p_value
from experiments.markdown import markdown
from experiments.paper import TABLES, find_published

from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from adalog.methods import label

KINDS = "`adalog`, `uniform`, `log2` and `log-sqrt2`"
FRONT_PAGE = ("adalog", "adalog-paper", "repq-vit", "ptq4vit")
# The paper's tables on DeiT-T, with their titles. Rows of the first two have published figures.
DEIT_T = {
    "tables-deit_tiny": "Methods, from 32 images",
    "tables-deit_tiny-ablations": "Quantizers and searches, from 32 images",
    "tables-deit_tiny-draws": "Methods at 4 bits, from three draws of 32 images",
    "tables-deit_tiny-few": "The released search, from 8 images",
    "tables-deit_tiny-few-w6a6": "The released search at 6 bits, from 8 images",
}


def front_page_claims() -> str:
    """Return one claim each of accuracy, size and speed, for the README."""
    real, cost, speed = (
        measured("realbench-deit_tiny"),
        read("cost"),
        read("runtime-deit_small_patch16_224-avx512vnni"),
    )
    groups, full = group_rows(real), real["fp32"]["top1"]
    four, six = (100 * mean(row["top1"] for row in groups[bits, "adalog"]) / full for bits in ("w4a4", "w6a6"))
    size = next(sum(row["file_bytes"].values()) for row in cost["rows"] if row["bits"] == "w4a4")
    errors = {row["name"]: row["logit_error"] for row in speed["rows"] if row["batch"] == 1}
    ours, other = "native/w8a8:uniform", "openvino-int8-bf16"
    if errors[ours] >= errors[other]:
        raise ValueError(f"{ours} is less exact than {other}: compare the speed of another pair")
    ratio = speed["ratios"][f"{ours}/b1"][other]
    return (
        f"- **Accurate**: DeiT-T keeps {six:.0f} % of its full-precision accuracy at 6 bits and {four:.0f} % at 4 bits "
        "(ImageNet photographs, no training).\n"
        f"- **Small**: DeiT-T at 4 bits is one file of {size / 1e6:.1f} MB.\n"
        f"- **Fast**: DeiT-S at 8 bits takes {ratio:.2f} of the CPU time of OpenVINO's int8, with a smaller error of "
        "the logits (uniform quantizers, one image, one AVX-512-VNNI thread, random weights)."
    )


def front_page_table() -> str:
    """Return top-1 of full precision and four methods on DeiT-T, and of AdaLog as published, for the README."""
    result = read("tables-deit_tiny")
    ((model, full),) = result["models"].items()
    rows = {(row["names"][0], row["bits"]): row["top1"]["mean"] for row in result["rows"]}
    widths = ("w6a6", "w4a4", "w3a3")

    def cells(name: str, exact: float, figures: Sequence[float]) -> list[str]:
        return [name, f"{100 * exact:.1f} %", *(f"{100 * top1:.1f} % ({100 * top1 / exact:.0f})" for top1 in figures)]

    lines = [cells(label(method), full["top1"], [rows[method, width] for width in widths]) for method in FRONT_PAGE]
    lines[0] = [f"**{cell}**" for cell in lines[0]]
    exact, *figures = (
        find_published("1", model, width, method)["top1"] / 100
        for width, method in (("fp32", "fp32"), *((width, "adalog") for width in widths))
    )
    lines.append(cells("AdaLog as published, on all of ImageNet's validation set", exact, figures))
    note = (
        f"Top-1 of DeiT-T on {full['images']:,} ImageNet photographs; in brackets, the percentage of full precision. "
        f"{result['calibration_images']} unlabelled images calibrate (one seed); nothing is trained. One standard "
        f"error is at most {50 / full['images'] ** 0.5:.1f} points. {source('tables-deit_tiny')}"
    )
    return f"{markdown_table(['method', 'full precision', *map(str.upper, widths)], lines)}\n\n{note}"


def real_table() -> str:
    """Return top-1, agreement, tests and CPU seconds of every method on TinyViT."""
    result = measured("realbench")
    full = result["fp32"]
    heads = ["bits", "method", "top-1", "points lost", "agreement", "p, fp32", "p, adalog", "calibration [CPU s]"]
    interval = f"{100 * full['top1']:.1f} % ({100 * full['low']:.1f}-{100 * full['high']:.1f})"
    lines = [["fp32", "", interval, *[""] * 5]]
    for (bits, method), rows in group_rows(result).items():
        lost = 100 * (full["top1"] - mean(row["top1"] for row in rows))
        name = label(method) + " †" * any("renewed" in row for row in rows)
        test = f"{median(row['mcnemar_p'] for row in rows):.2g}"
        lines.append([bits.upper(), name, percent(rows, "top1"), f"{lost:.1f}", percent(rows, "agreement"), test])
        lines[-1] += [p_adalog(rows, result), f"{mean(row['cpu_seconds'] for row in rows):.0f}"]
    renewed = sorted({row["renewed"] for row in result["rows"] if "renewed" in row})
    note = (
        f"{result['queries']:,} queries; {result['calibration_images']} support images calibrate (seed "
        f"{result['seed']}). Agreement: the share of images with the float model's prediction. p: McNemar's exact test "
        "against full precision, and against adalog at the same bits. `easyquant` was measured before ties of its "
        f"cosine went to the least squared error. {source('realbench')}"
    )
    if renewed:
        note += (
            f" †: measured again later on {' and '.join(renewed)}; compare the seconds of these rows with one another "
            f"only. A row of `adalog+` starts from the search of `adalog`, whose seconds do not count again. At W4A4 "
            f"and W3A3 it fits mirror images too (`realbench-renewed-mirrored.json`). "
            f"{source(*later_files('realbench'))}"
        )
    return f"{markdown_table(heads, lines)}\n\n{note}"


def seeds_table() -> str:
    """Return means and standard deviations over several random calibration sets on TinyViT."""
    result = read("realbench-draws")
    heads = ["bits", "method", "seeds", "top-1", "agreement", "p, adalog", "calibration [CPU s]"]
    lines = []
    for (bits, method), rows in group_rows(result).items():
        cells = [bits.upper(), label(method), str(len(rows)), percent(rows, "top1"), percent(rows, "agreement")]
        lines.append([*cells, p_adalog(rows, result), f"{mean(row['cpu_seconds'] for row in rows):.0f}"])
    note = (
        f"Mean ± standard deviation over random sets of {result['calibration_images']} support images. Full precision "
        f"has {100 * result['fp32']['top1']:.1f} %. p: McNemar's test against adalog with the same seed, median over "
        f"seeds. {earlier()} {source('realbench-draws')}"
    )
    return f"{markdown_table(heads, lines)}\n\n{note}"


def classifier_table() -> str:
    """Return top-1, agreement and divergence on DeiT-T, a classifier with a class token."""
    result = measured("realbench-deit_tiny")
    full = result["fp32"]
    heads = ["bits", "method", "seeds", "top-1", "share of fp32", "agreement", "KL", "calibration [CPU s]"]
    lines = [
        ["fp32", "", "", f"{100 * full['top1']:.1f} % ({100 * full['low']:.1f}-{100 * full['high']:.1f})", *[""] * 4]
    ]
    for (bits, method), rows in group_rows(result).items():
        top1 = mean(row["top1"] for row in rows)
        name = label(method) + " †" * any("renewed" in row for row in rows)
        lines.append([bits.upper(), name, str(len(rows)), percent(rows, "top1")])
        lines[-1] += [f"{100 * top1 / full['top1']:.1f} %", percent(rows, "agreement")]
        lines[-1] += [f"{mean(row['kl'] for row in rows):.3f}", f"{mean(row['cpu_seconds'] for row in rows):.0f}"]
    note = (
        f"{result['queries']:,} queries; {result['calibration_images']} support images calibrate, and `adalog+` fits "
        "128. †: measured later; `adalog+` then fits their mirror images too. The seconds are those of the search and "
        "the correction; `adalog+` takes over the search of `adalog`, so its seconds are those of its correction. KL: "
        "divergence from the float model's predictions [nats]. "
        f"{source('realbench-deit_tiny', *later_files('realbench-deit_tiny'))}"
    )
    return f"{markdown_table(heads, lines)}\n\n{note}"


def engines_table() -> str:
    """Return what quantizers with one scale per tensor cost at W8A8 on DeiT-T and TinyViT."""
    names, lines = {"engines-deit_tiny": "DeiT-T", "engines-tiny_vit": "TinyViT"}, []
    for name, model in names.items():
        result = read(name)
        lines.append([model, "fp32", f"{100 * result['fp32']['top1']:.1f} %", "", ""])
        for row in result["rows"]:
            p = row["mcnemar_p_adalog"]
            lines.append([model, f"`{row['method']}`", f"{100 * row['top1']:.1f} %", f"{100 * row['agreement']:.1f} %"])
            lines[-1] += ["" if p is None else f"{p:.2f}" if p >= 0.01 else f"{p:.0e}"]
    note = (
        f"W8A8, {result['queries']:,} queries, {result['calibration_images']} images calibrate, one seed. `uniform` "
        "has scales per head and per group, `uniform-tensor` has one per tensor, and `symmetric` also has zero points "
        f"of zero. p: McNemar's, compared with `adalog`. {source(*names)}"
    )
    return f"{markdown_table(['model', 'method', 'top-1', 'agreement', 'p'], lines)}\n\n{note}"


def worst_sites_table() -> str:
    """Return the sites with the lowest SQNR under `adalog` on TinyViT, for each width."""
    lines = []
    for row in (rows[0] for (_, method), rows in group_rows(measured("realbench")).items() if method == "adalog"):
        worst = sorted(row["sqnr"], key=row["sqnr"].__getitem__)[:5]
        sites = ", ".join(f"{site} {row['sqnr'][site]:.1f} ({row['left'][site]})" for site in worst)
        lines.append([row["bits"].upper(), f"{mean(row['sqnr'].values()):.1f}", sites])
    heads = ["bits", "mean SQNR [dB]", "five sites with the lowest SQNR [dB]"]
    return f"{markdown_table(heads, lines)}\n\n{source('realbench', *later_files('realbench'))}"


def demo_table() -> str:
    """Return top-1, agreement and file size of the bundled ViT."""
    result = read("demo")
    lines = [["fp32", "", f"{100 * result['fp32']['top1']:.2f} %", "", ""]]
    for row in result["rows"]:
        cells = [row["bits"].upper(), label(row["method"]), mean_text(row["top1"]), mean_text(row["agreement"])]
        cells.append(f"{row['bytes']['mean'] / 1e6:.2f} MB")
        lines.append([f"**{cell}**" for cell in cells] if row["method"] == "adalog" else cells)
    seeds = result["seeds"]
    averaged = f"Mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"Seed {seeds[0]}"
    executors = dict.fromkeys(row["executor"] or "fake quantization" for run in result["runs"] for row in run["rows"])
    note = (
        f"{averaged}; {result['calibration_images']} images calibrate, {result['images']:,} test images evaluate, run "
        f"by {' and '.join(executors)}. The standard error of one top-1 is about 0.7 points. "
        f"{earlier(KINDS)} {source('demo')}"
    )
    heads = ["bits", "quantizer after softmax and GELU", "top-1", "agreement", "file"]
    return f"{markdown_table(heads, lines)}\n\n{note}"


def paper_tables() -> str:
    """Return the paper's tables on the bundled ViT, by `experiments.tables 1 2 3 4 5 A B --models demo --seeds 3`."""
    result = measured("tables-demo")
    renewed = sorted({row["renewed"] for row in result["rows"] if "renewed" in row})
    for row in result["rows"]:
        if "renewed" in row:
            row["names"] = [f"{row['names'][0]} †", *row["names"][1:]]
    note = (
        "Size is that of the tensors, without the file's header. The command has gained rows since these tables were "
        f"measured. {earlier(KINDS, 'All of these tables were')} {source('tables-demo')}"
    )
    if renewed:
        note += (
            f" †: measured again later on {' and '.join(renewed)} (`tables-demo-renewed*.json`); compare the seconds "
            "of these rows with one another only; their p against adalog is against an adalog of their own run."
        )
    return f"{_format(result, '## ')}\n\n{note}"


def published_table() -> str:
    """Return each row that was measured on DeiT-T beside the figure that the paper has for it."""
    lines, names = [], list(DEIT_T)[:2]
    for name in names:
        result = read(name)
        ((model, full),) = result["models"].items()
        (exact,) = find_published("1", model, "fp32", "fp32").values()
        for row in result["rows"]:
            top1, published = 100 * row["top1"]["mean"], _published(model, row)
            cells = [row["table"], row["bits"].upper(), ", ".join(row["names"]).replace(", ours", "")]
            cells.append(f"{top1:.1f} % ({top1 / full['top1']:.0f})")
            lines.append([*cells, "" if published is None else f"{published:.1f} % ({100 * published / exact:.0f})"])
    note = (
        f"Top-1, and in brackets the percentage of full precision, which is {100 * full['top1']:.1f} % on these "
        f"{full['images']:,} photographs and {exact:.1f} % in the paper. A row of Tables 2, 5, A and B stands beside "
        "the paper's figure for the same quantizers and search, and a method beside the paper's method that it "
        f"follows. One standard error of a measured row is at most {50 / full['images'] ** 0.5:.1f} points. "
        f"{source(*names)}"
    )
    return f"{markdown_table(['table', 'bits', 'row', 'measured', 'published'], lines)}\n\n{note}"


def _published(model: str, row: Mapping[str, Any]) -> float | None:
    """Return the published top-1 [%] of the row with the released code that a measured row corresponds to, or None."""
    others = [other for other in TABLES[row["table"]].rows if other.config.bits == row["bits"] and other.method]
    methods = {other.names[:1]: other.method for other in others} | {other.names: other.method for other in others}
    cells = tuple(cell.replace("ours", "released") for cell in row["names"])
    # Searches of Table 5 differ in the numbers of candidates, so their first cells have to suffice.
    twins = (tuple(row["names"]), cells, (f"{cells[0].removesuffix('-paper')}-released",), cells[:1])
    method = next((methods[twin] for twin in twins if twin in methods), None)
    return None if method is None else find_published(row["table"], model, row["bits"], method).get("top1")


def classifier_paper_tables() -> str:
    """Return the paper's tables on DeiT-T, and the released search beside `adalog` from few images."""
    parts = [f"### {title}\n\n{_format(read(name), '#### ')} {source(name)}" for name, title in DEIT_T.items()]
    return "\n\n".join(parts)


def _format(result: dict[str, Any], heading: str) -> str:
    """Return the paper's tables of a result, with today's notes if a table has today's columns."""
    for name, table in result["tables"].items():
        if table["columns"] == list(TABLES[name].columns):
            table["note"] = TABLES[name].note
    return markdown(result, heading).strip()


def released_table() -> str:
    """Return our readings of baselines compared with what their released code computes, on the bundled ViT."""
    result = read("tables-demo-twins")
    bits = sorted({row["bits"] for row in result["rows"]}, reverse=True)
    rows = {(row["names"][0], row["bits"]): row for row in result["rows"]}
    lines = [
        [label(method), *(mean_text(rows[method, width][name]) for width in bits for name in ("top1", "agreement"))]
        for method in dict.fromkeys(name for name, _ in rows)
    ]
    seeds = len(result["rows"][0]["top1"]["values"])
    note = (
        f"Top-1 and agreement on {result['models']['demo']['images']:,} images, mean ± standard deviation over {seeds} "
        f"seeds. {earlier()} {source('tables-demo-twins')}"
    )
    heads = ["method", *(f"{width.upper()} {name}" for width in bits for name in ("top-1", "agreement"))]
    return f"{markdown_table(heads, lines)}\n\n{note}"


def golden_table() -> str:
    """Return how close methods are to outputs of their released code, and what `adalog` gains over AdaLog's."""
    result = read("golden")
    heads = ["setting", "layers", "largest ratio of errors", "within 0.1 %", "same q"]
    lines = []
    for name, row in result["files"].items():
        cells = [name, str(row["sites"]), f"{row['max_mse_ratio']:.4f}", f"{100 * row['within_0.1_percent']:.0f} %"]
        lines.append(cells + ["yes" if row[key] else "no" for key in ("q_equal", "activation_zero_points_equal")])
    gains = [
        [bits.upper(), f"{gain['calibration']:.3f}", f"{gain['held_out']:.3f}"]
        for bits, gain in result["adalog_over_released"].items()
    ]
    note = (
        "The ratio is a layer's squared error over that of the released code, on a random ViT of two blocks with eight "
        f"images. The second table has the search of `adalog`, without its correction. {source('golden')}"
    )
    ratios = markdown_table([*heads, "same zero points of activations"], lines)
    gained = markdown_table(["bits", "adalog / released, calibration images", "held-out noise"], gains)
    return f"{ratios}\n\n{gained}\n\n{note}"


def sides_table() -> str:
    """Return top-1 with weights, activations, and both at 3 bits on the bundled ViT."""
    result = read("sides")
    bits = list(dict.fromkeys(row["bits"] for row in result["rows"]))
    lines = []
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        tops = {row["bits"]: mean_text(row["top1"]) for row in result["rows"] if row["method"] == method}
        lines.append([label(method), *(tops.get(width, "") for width in bits)])
    return f"{markdown_table(['method', *map(str.upper, bits)], lines)}\n\n{earlier()} {source('sides')}"


def detector_table() -> str:
    """Return the average precision of boxes and masks of the bundled detector, by method."""
    result = read("detection-demo")
    rows = group_rows(result)
    bits = list(dict.fromkeys(width for width, _ in rows))
    lines = []
    for method in dict.fromkeys(method for _, method in rows):
        cells = [label(method)]
        for width in bits:
            for name in ("box_ap", "mask_ap"):
                values = [100 * row[name] for row in rows[width, method]]
                cells.append(f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else ""))
        lines.append([f"**{cell}**" for cell in cells] if method == "adalog" else cells)
    seeds = len({row["seed"] for row in result["rows"]})
    note = (
        f"AP [%] on {result['images']} scenes; full precision has {100 * result['fp32']['box_ap']:.1f} for boxes and "
        f"{100 * result['fp32']['mask_ap']:.1f} for masks. {result['calibration_images']} scenes calibrate "
        f"({'seed 0' if seeds == 1 else f'mean ± standard deviation over {seeds} seeds'}). All parts are quantized; a "
        f"file at W4A4 takes {rows['w4a4', 'adalog'][0]['bytes'] / 1e6:.2f} MB. "
        f"{earlier('`adalog` and `uniform`')} {source('detection-demo')}"
    )
    cost = read("detector-cost")
    note += (
        f" Mask R-CNN with Swin-T and random weights, {cost['images']} images of {cost['size'][0]} x "
        f"{cost['size'][1]}: the search takes {cost['cpu_seconds']:.0f} CPU seconds and {cost['peak_gib']:.1f} GiB, "
        f"the file {cost['bytes'] / 1e6:.1f} MB. {source('detector-cost')}"
    )
    heads = ["method", *(f"{width.upper()} {kind}" for width in bits for kind in ("boxes", "masks"))]
    return f"{markdown_table(heads, lines)}\n\n{note}"


def group_rows(result: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group the rows of a result by bits and method; the rows of all seeds come together."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["bits"], row["method"]), []).append(row)
    return groups


def percent(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Format a share in percent: its mean over rows, with the standard deviation if there are several."""
    values = [100 * row[name] for row in rows]
    return f"{mean(values):.1f}{f' ± {stdev(values):.1f}' if len(values) > 1 else ''} %"


def p_adalog(rows: Sequence[dict[str, Any]], result: dict[str, Any]) -> str:
    """Format the median p-value of McNemar's test against `adalog` with the same bits and seed; empty for `adalog`."""

    def draw(row: dict[str, Any]) -> tuple[str, int]:
        return row["bits"], row.get("seed", result["seed"])

    own = {draw(row): row for row in result["rows"] if row["method"] == "adalog"}
    values = [p_value(row, own[draw(row)]) for row in rows if row["method"] != "adalog"]
    return f"{median(values):.2g}" if values else ""


def mean_text(value: dict[str, float]) -> str:
    """Format a mean and its standard deviation in percent."""
    deviation = f" ± {100 * value['std']:.2f}" if value["std"] else ""
    return f"{100 * value['mean']:.2f}{deviation} %"
