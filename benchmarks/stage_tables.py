"""Tables of the stages after the search, and of widths within a budget."""

from benchmarks.publish import RESULTS, earlier, markdown_table, read, source
from experiments.markdown import markdown

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

STAGES = {
    "search": "the search of `adalog`",
    "correction": "correction",
    "end-to-end-alone": "training of the whole model: `adalog++`",
    "reconstruction": "reconstruction of blocks",
    "end-to-end": "blocks, then the whole model",
}
# By today's defaults, and by the column of the table.
CURRENT = {
    "DeiT-T": "reconstruct-deit_tiny",
    "TinyViT": "reconstruct-tiny_vit",
    "the bundled ViT": "reconstruct-bundled",
}
# DeiT-T at W4A4 by today's correction, which leaves out the images that the training holds out; one file per draw.
DRAWS = ("reconstruct-deit_tiny-unmixed", "reconstruct-deit_tiny-draw1", "reconstruct-deit_tiny-draw2")
# Trainings with and without mixed images, from one start. `Reconstruction` mixed images before commit 893f243.
MIXED = {
    "DeiT-T": tuple(f"reconstruct-deit_tiny-{kind}" for kind in ("unmixed", "mixed", "faster", "mixed-faster")),
    "TinyViT": ("reconstruct-tiny_vit-mixed",),
    "the bundled ViT": tuple(f"reconstruct-bundled-{kind}" for kind in ("unmixed", "mixed")),
}
# With half the steps of the training, and without mirror images.
SHORTER = {model: f"{name}-shorter" for model, name in CURRENT.items()}
# With a training of blocks after today's correction. DeiT-T and TinyViT took earlier rates for the whole model.
BLOCKS = {model: f"{name}-blocks" for model, name in CURRENT.items()}
# With widths within a budget.
BUDGETS = {"the bundled ViT": "budgets-demo", "DeiT-T": "budgets-deit_tiny", "TinyViT": "budgets-realbench"}
# By earlier defaults. TinyViT was measured in several runs: a second seed on another processor, other widths, and from
# 128 images.
TINY = (
    "reconstruct-realbench",
    "reconstruct-realbench-draw1",
    "reconstruct-realbench-1000",
    "reconstruct-realbench-128",
)


def earlier_results() -> dict[str, dict[str, Any]]:
    """Return the results by earlier defaults, by model; rows name the file that they come from."""
    first, second, wide, few = ({"file": name, **read(name)} for name in TINY)
    results = {"the bundled ViT": {"file": "reconstruct-demo", **read("reconstruct-demo")}, "TinyViT": first}
    for result in (*results.values(), second, wide, few):
        result["rows"] = [{"file": result["file"], **row} for row in result["rows"]]
    measured = {row["bits"] for row in first["rows"]}
    first["rows"] += [row for row in wide["rows"] if row["bits"] not in measured]
    first["rows"] += [row for row in few["rows"] if row["images"] == 128]
    first["rows"] += second["rows"]
    return results


def stages_table() -> str:
    """Return top-1, agreement and CPU seconds after each stage by today's defaults."""
    results = {model: read(name) for model, name in CURRENT.items()}
    others = [row for row in results["DeiT-T"]["rows"] if row["bits"] != "w4a4"]
    results["DeiT-T"]["rows"] = [row for name in DRAWS for row in read(name)["rows"]] + others
    table, judged = _stages(results, seconds=True)
    note = (
        f"Top-1; in brackets, the agreement with full precision and the CPU seconds of the stage. {judged}. Neither "
        "test images nor labels are fitted. When DeiT-T at W3A3 and TinyViT were measured, the correction before a "
        "training also fitted the images that the training held out, which made it likelier that a training was "
        "discarded. DeiT-T at W4A4 ran beside other work, which lengthened its seconds."
    )
    return f"{table}\n\n{note} {source(*CURRENT.values(), *DRAWS)}"


def steps_table() -> str:
    """Return what more steps and mirror images give to the training of the whole model."""
    lines = []
    for model in CURRENT:
        for mirrored, names in (("no", SHORTER), ("yes", CURRENT)):
            result = read(names[model])
            trained = [row for row in result["rows"] if row["stage"] == "end-to-end-alone"]
            for bits in dict.fromkeys(row["bits"] for row in trained):
                same = [row for row in trained if row["bits"] == bits]
                shares = [f"{100 * mean(row[name] for row in same):.1f} %" for name in ("top1", "agreement")]
                seconds = f"{mean(row['cpu_seconds'] for row in same):.0f}"
                steps = f"{result['iterations']['model']:,}"
                lines.append([model, bits.upper(), steps, mirrored, str(len(same)), *shares, seconds])
    lines.sort(key=lambda line: (list(CURRENT).index(line[0]), line[1]))
    heads = ["model", "bits", "steps", "mirror images", "seeds", "top-1", "agreement", "CPU s"]
    note = (
        "The seconds are those of the training alone. The correction before it also fitted the images that the "
        "training held out, except before the 1,600 steps of the bundled ViT."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source(*SHORTER.values(), *CURRENT.values())}"


def mixed_table() -> str:
    """Return what mixed images give to the training of the whole model, from one start."""
    lines = []
    for model, names in MIXED.items():
        results = [read(name) for name in names]
        starts = [row for row in results[0]["rows"] if row["stage"] == "correction"]
        rows = [("the start: correction", "", "", row) for row in starts]
        for result in results:
            training = result["training"]
            kinds = ("training", f"{training.get('mixed', 0):g}", f"{training['rate']:g}")
            rows += [(*kinds, row) for row in result["rows"] if row["stage"] == "end-to-end-alone"]
        for *kind, row in rows:
            shares = [f"{100 * row[name]:.1f} %" for name in ("top1", "agreement")]
            lines.append([model, row["bits"].upper(), *kind, *shares, f"{row['error']:.3f}"])
    heads = ["model", "bits", "stage", "mixed in the first step", "rate of codes", "top-1", "agreement", "error"]
    note = (
        "One draw of images, and 1,600 steps. The error is that by which a calibration judges its stages, on the "
        "images of the top-1: the KL divergence from full precision with the best factor of the logits, and for "
        "TinyViT the relative error of the features. A training of TinyViT without mixed images was measured from an "
        "earlier start only, in the table above."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source(*(name for names in MIXED.values() for name in names))}"


def blocks_table() -> str:
    """Return what a training of blocks gives between the correction and the training of the whole model."""
    table, _ = _stages({model: read(name) for model, name in BLOCKS.items()}, seconds=True)
    note = (
        "As above. Training of the whole model took 800 steps by today's rates on the bundled ViT, and 400 steps with "
        "a rate of 0.003 for scales on the other two. All trainings of this table kept the best of eight states, and "
        "went back if the model's output was further from full precision."
    )
    return f"{table}\n\n{note} {source(*BLOCKS.values())}"


def earlier_stages_table() -> str:
    """Return top-1 and agreement after each stage by earlier defaults, as means over seeds."""
    table, judged = _stages(earlier_results())
    note = (
        "Top-1, and in brackets the agreement with full precision and the number of seeds if there are several. Each "
        f"stage follows the one above it. {judged}. Rows of TinyViT at W8A8 and W6A6, and those from 128 images, took "
        "200 steps a block with a tenth of the activations exact; all other rows took 400 steps with half of them "
        "exact. No trained block was taken back. Training of the whole model used the squared error alone, and a "
        "correction counted all rows alike."
    )
    return f"{table}\n\n{note} {source('reconstruct-demo', *TINY)}"


def _stages(results: Mapping[str, Any], seconds: bool = False) -> tuple[str, str]:
    """Return a table with one row per stage and number of images, and a sentence about full precision."""
    cells: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    heads, notes = [], []
    for model, result in results.items():
        rows = result["rows"]
        heads += [(model, bits) for bits in sorted({row["bits"] for row in rows}, reverse=True)]
        notes.append(f"{model} has {100 * result['fp32']:.2f} % in full precision on {result['judged']:,} images")
        for bits, stage, images in dict.fromkeys((row["bits"], row["stage"], row["images"]) for row in rows):
            same = [row for row in rows if (row["bits"], row["stage"], row["images"]) == (bits, stage, images)]
            top, agreement = (100 * mean(row[name] for row in same) for name in ("top1", "agreement"))
            beside = [f"{agreement:.1f}"]
            beside += [f"{mean(row['cpu_seconds'] for row in same):.0f} s"] if seconds else []
            beside += [f"{len(same)} seeds"] if len(same) > 1 else []
            cells.setdefault((stage, images), {})[model, bits] = f"{top:.1f} % ({', '.join(beside)})"
    lines = [
        [STAGES[stage], f"{images:,}", *(cells[stage, images].get(head, "") for head in heads)]
        for stage, images in sorted(cells, key=lambda key: (list(STAGES).index(key[0]), key[1]))
    ]
    table = markdown_table(["stage", "images", *(f"{model}, {bits.upper()}" for model, bits in heads)], lines)
    text = "; ".join(notes)
    return table, text[0].upper() + text[1:]


def reconstruct_table() -> str:
    """Return each measurement of a stage after the search."""
    lines = []
    for model, result in earlier_results().items():
        for row in result["rows"]:
            cells = [model, row["bits"].upper(), row["stage"], str(row["images"]), str(row["seed"])]
            cells += [f"{100 * row['top1']:.2f} %", f"{100 * row['agreement']:.2f} %", f"{row['cpu_seconds']:.0f}"]
            lines.append([*cells, f"`{row['file']}`"])
    step = read("reconstruct-cost")
    note = (
        "CPU seconds are those of the stage, without the stages before it. One step that trains a block of DeiT-S "
        f"({step['bits'].upper()}, {step['images']} images) takes {step['cpu_seconds_of_a_step']['median']:.2f} CPU "
        f"seconds, {step['ratio']:.2f} of the float block's forward and backward in float32. "
        f"{source('reconstruct-cost')}"
    )
    heads = ["model", "bits", "stage", "images", "seed", "top-1", "agreement", "CPU s", "file"]
    return f"{markdown_table(heads, lines)}\n\n{note}"


def drop_table() -> str:
    """Return what the share of exact activations in reconstruction gives on TinyViT."""
    files = {
        "half": "reconstruct-realbench",
        "half, falling to none": "reconstruct-realbench-falling",
        "a tenth": "reconstruct-realbench-tenth",
        "a tenth, end to end": "reconstruct-realbench-tenth-end-to-end",
    }
    lines = [
        [
            share,
            row["bits"].upper(),
            STAGES[row["stage"]],
            f"{100 * row['top1']:.1f} %",
            f"{100 * row['agreement']:.1f} %",
        ]
        for share, name in files.items()
        for row in read(name)["rows"]
        if row["stage"] in ("reconstruction", "end-to-end")
    ]
    heads = ["activations that stay exact", "bits", "stage", "top-1", "agreement"]
    return f"{markdown_table(heads, lines)}\n\nTinyViT, 1,000 images, seed 0. {source(*files.values())}"


def brecq_table() -> str:
    """Return BRECQ with logarithmic and with uniform quantizers on TinyViT."""
    lines = [
        [row["bits"].upper(), row["method"], f"{100 * row['top1']:.1f} %", f"{100 * row['agreement']:.1f} %"]
        for row in read("realbench-brecq")["rows"]
    ]
    note = f"TinyViT, 1,000 support images, seed 0. {source('realbench-brecq')}"
    return f"{markdown_table(['bits', 'method', 'top-1', 'agreement'], lines)}\n\n{note}"


def table_four() -> str:
    """Return the paper's Table 4 with reconstruction, without the rows of the released search."""
    return _format_table("4", "Measured without the rows of the released search.")


def table_d() -> str:
    """Return the stages after the search at two bits, all on as many images."""
    return _format_table("D", "Measured at W2A2, with a tenth of the values exact in the reconstruction of `adalog+`.")


def _format_table(name: str, how: str) -> str:
    """Format the JSON of `experiments.tables NAME --models demo --seeds 3`; empty if there is no such file."""
    file = f"tables-demo-{name}"
    if not (RESULTS / f"{file}.json").exists():
        return ""
    return f"{markdown(read(file), '## ').strip()}\n\n{how} {source(file)}"


def budgets_table() -> str:
    """Return models of one width compared with models whose widths are chosen at no more bytes and BOPs."""
    lines, notes = [], []
    for model, name in BUDGETS.items():
        result, key = read(name), name.partition("-")[2]
        rows = [{"method": "adalog", **row} for row in result[key]]
        for bits, method in dict.fromkeys((row["bits"], row["method"]) for row in rows):
            same = [row for row in rows if (row["bits"], row["method"]) == (bits, method)]
            # `adalog` with one width for all sets the limits of every method. A training with one width is in a file
            # of its own.
            if method == "adalog":
                lines.append([model, bits.upper(), f"`{method}`", "one for all", *_budget_cells(same, "uniform")])
            else:
                trained = [row for row in read(CURRENT[model])["rows"] if row["stage"] == "end-to-end-alone"]
                shares = _shares([row for row in trained if (row["bits"], row["seed"]) == (bits, 0)], "")
                lines.append([model, bits.upper(), f"`{method}`", "one for all", "", "", "", *shares])
            lines.append([model, bits.upper(), f"`{method}`", "**chosen**", *_budget_cells(same, "budget")])
        seeds = len({row["seed"] for row in rows})
        notes.append(
            f"{model[0].upper()}{model[1:]}: {'one seed' if seeds == 1 else f'means of {seeds} seeds'}, 32 images that "
            f"calibrate and {result['judged_by']} that choose; rank correlation of predicted and measured losses over "
            f"{len(result['mixes'])} random mixes of widths: {result['spearman'][key]:.2f}."
        )
    note = (
        f"The limits are the bytes and BOPs that `adalog` takes with one width for all. {' '.join(notes)} `adalog++` "
        "with one width for all is that of the [stages](stages.md), from the same seed. "
        f"{earlier(what='The bundled ViT was')}"
    )
    heads = ["model", "bits", "method", "widths", "file [MB]", "GBOPs", "KL [nats]", "agreement", "top-1"]
    return f"{markdown_table(heads, lines)}\n\n{note} {source(*BUDGETS.values())}"


def _budget_cells(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """Return the means of some rows for models of this kind: "uniform" or "budget"."""
    size, bops = (mean(row[f"{name}_{kind}"] for row in rows) for name in ("bytes", "bops"))
    loss = f"{mean(row[f'kl_{kind}'] for row in rows):.4f}" if f"kl_{kind}" in rows[0] else ""
    return [f"{size / 1e6:.2f}", f"{bops / 1e9:.2f}", loss, *_shares(rows, f"_{kind}")]


def _shares(rows: Sequence[Mapping[str, Any]], suffix: str) -> list[str]:
    """Return the mean agreement and top-1 of some rows."""
    return [f"{100 * mean(row[f'{name}{suffix}'] for row in rows):.1f} %" for name in ("agreement", "top1")]
