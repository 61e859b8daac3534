"""The tables of stages after the search, and of widths within a budget."""

from benchmarks.publish import RESULTS

import json
from statistics import mean
from typing import Any

from adalog import Reconstruction
from adalog.study.markdown import markdown


def stages_results() -> dict[str, dict[str, Any]]:
    """What was measured of the stages after the search, by the name of the model in the tables."""
    named = {"the bundled ViT": "reconstruct-demo", "TinyViT": "reconstruct-realbench"}
    found = {name: read(file) for name, file in named.items()}
    new = {row["bits"] for row in found["TinyViT"]["rows"]}
    found["TinyViT"]["rows"] += [row for row in read(WIDE)["rows"] if row["bits"] not in new]
    found["TinyViT"]["rows"] += [row for row in read(FEW)["rows"] if row["images"] == 128]
    found["TinyViT"]["rows"] += read(SECOND)["rows"]
    return found


# What was measured of TinyViT later, on another processor: one more draw.
SECOND = "reconstruct-realbench-draw1"
# What was measured of TinyViT before: at the other widths on two processors, and from 128 images, in 200 steps each.
WIDE, FEW = "reconstruct-realbench-1000", "reconstruct-realbench-128"


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def earlier_note() -> str:
    """Which rows of TinyViT are of which commits."""
    now, before = read("reconstruct-realbench"), read(FEW)
    searched = {row["bits"]: 100 * row["top1"] for row in before["rows"] if row["stage"] == "search"}
    return (
        "TinyViT's rows from 1,000 images at W4A4 and W3A3, and their searches, are of commit "
        f"{now['commit'][:7]}, and those of the second draw, on another processor, of commit "
        f"{read(SECOND)['commit'][:7]}. Its others were measured before, in 200 steps and with a tenth of the "
        "activations exact: those from 128 images at commit "
        f"{before['commit'][:7]}, where the search has {searched['w4a4']:.1f} % at W4A4 and {searched['w3a3']:.1f} % "
        "at W3A3, those at W8A8 and W6A6 at several commits and on two processors."
    )


def steps_note() -> str:
    """In how many steps blocks were trained."""
    steps = {result["iterations"] for result in stages_results().values()}
    assert len(steps) == 1, steps
    default = Reconstruction().iterations
    return f"In all other rows a reconstruction took {steps.pop()} steps; today's default is {default}."


STAGES = {"search": "`adalog`, the search alone", "correction": "`adalog+`, a correction after it"}
STAGES |= {"reconstruction": "reconstruction after that", "end-to-end": "`adalog++`, end to end after that"}


def stages_table() -> str:
    """Top-1 and agreement after each stage, the means over the seeds."""
    cells: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    notes, heads = [], []
    for model, result in stages_results().items():
        rows = result["rows"]
        widths = sorted({row["bits"] for row in rows}, reverse=True)
        heads += [(model, bits) for bits in widths]
        for bits, stage, images in dict.fromkeys((row["bits"], row["stage"], row["images"]) for row in rows):
            same = [row for row in rows if (row["bits"], row["stage"], row["images"]) == (bits, stage, images)]
            top, agreement = (100 * mean(row[name] for row in same) for name in ("top1", "agreement"))
            cells.setdefault((stage, images), {})[model, bits] = f"{top:.1f} % ({agreement:.1f})"
        draws = {bits: len({row["seed"] for row in rows if row["bits"] == bits}) for bits in widths}
        least, most = min(draws.values()), max(row["images"] for row in rows)
        more = [bits for bits in widths if draws[bits] > least]
        told = ["of one draw" if least == 1 else f"means of {least} draws"]
        told += [f"means of {draws[bits]} at {bits.upper()} from {most:,} images" for bits in more]
        notes.append(
            f"On {result['judged']:,} images {model} has {100 * result['fp32']:.2f} % in full precision; its figures "
            f"are {', '.join(told)}."
        )
    lines = ["| stages | images | " + " | ".join(f"{model}, {bits.upper()}" for model, bits in heads) + " |"]
    lines.append("|---" * (2 + len(heads)) + "|")
    for stage, images in sorted(cells, key=lambda key: (list(STAGES).index(key[0]), key[1])):
        found = [cells[stage, images].get(head, "") for head in heads]
        lines.append(f"| {STAGES[stage]} | {images:,} | {' | '.join(found)} |")
    note = (
        f"Top-1, and in brackets the agreement with full precision. {' '.join(notes)} {earlier_note()} "
        f"{steps_note()} "
        "Neither test images nor queries nor labels are fitted. On TinyViT the stages fit support images, unlabelled; "
        "the features and labels of the same images then tell the class of each query. The search always has 32 "
        "images. The bundled model has 1,024 images to be fitted, so draws of all of them differ in those of the "
        "search, in those held out and in the order."
    )
    return "\n".join([*lines, "", note])


def reconstruct_table() -> str:
    """What the stages after the search give back, row by row."""
    lines = ["| model | bits | stage | images | seed | top-1 | agreement | CPU s |", "|---" * 8 + "|"]
    notes = []
    for model, result in stages_results().items():
        for row in result["rows"]:
            cells = (model, row["bits"].upper(), row["stage"], str(row["images"]), str(row["seed"]))
            cells += (f"{100 * row['top1']:.2f} %", f"{100 * row['agreement']:.2f} %", f"{row['cpu_seconds']:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
        notes.append(f"{model} has {100 * result['fp32']:.2f} % in full precision, on {result['judged']:,} images")
    told = "; ".join(notes)
    support = ", for TinyViT from the 1,000 support images" if "TinyViT" in told else ""
    note = (
        f"{told[0].upper()}{told[1:]}. Images are drawn from 1,024 unlabelled ones{support}; a correction follows the "
        "search of the same seed, a reconstruction the correction with as many images, and training end to end the "
        f"reconstruction; the seconds of each come on top. {earlier_note()} {steps_note()}"
    )
    return "\n".join([*lines, "", note])


def table_four() -> str:
    """The paper's Table 4 with reconstruction, without the rows of the released search."""
    return _measured("4", "beside other work, without the rows of the released search, which is slow")


def table_d() -> str:
    """What stages after the search give at two bits, all on as many images."""
    return _measured(
        "D",
        "beside other work, at W2A2 alone, when a tenth of the values stayed exact in the reconstruction of `adalog+`, "
        "and before there was a row `adalog++`",
    )


def _measured(name: str, how: str) -> str:
    """A table of `adalog tables NAME --models demo --seeds 3`, whose JSON, with the commit that made it, is kept.

    Empty if it is not there.
    """
    file = RESULTS / f"tables-demo-{name}.json"
    if not file.exists():
        return ""
    result = json.loads(file.read_text())
    note = f"Measured at commit {result['commit'][:7]}, {how}. Figures: `benchmarks/results/{file.name}`."
    return f"{markdown(result, '### ').strip()}\n\n{note}"


def budgets_table() -> str:
    """Models of one width for all beside models whose widths are chosen at no more bytes and BOPs."""
    lines = ["| model | bits | widths | file [MB] | GBOPs | KL [nats] | agreement | top-1 |", "|---" * 8 + "|"]
    notes = []
    for model, file in (("the bundled ViT", "budgets-demo"), ("TinyViT", "budgets-realbench")):
        result = json.loads((RESULTS / f"{file}.json").read_text())
        rows = result[file.partition("-")[2]]
        for bits in dict.fromkeys(row["bits"] for row in rows):
            same = [row for row in rows if row["bits"] == bits]
            for kind, words in (("uniform", "one for all"), ("budget", "**chosen**")):
                size, bops = (mean(row[f"{name}_{kind}"] for row in same) for name in ("bytes", "bops"))
                loss = f"{mean(row[f'kl_{kind}'] for row in same):.4f}" if f"kl_{kind}" in same[0] else ""
                shares = [
                    f"{100 * mean(row[f'{name}_{kind}'] for row in same):.1f} %" for name in ("agreement", "top1")
                ]
                cells = [model, bits.upper(), words, f"{size / 1e6:.2f}", f"{bops / 1e9:.2f}", loss, *shares]
                lines.append("| " + " | ".join(cells) + " |")
        draws, spearman = len({row["seed"] for row in rows}), result["spearman"][file.partition("-")[2]]
        drawn = ", both of the support images that then judge, without labels" if model == "TinyViT" else ""
        notes.append(
            f"{model[0].upper()}{model[1:]}: {'one draw' if draws == 1 else f'means of {draws} draws'} of 32 images "
            f"that calibrate and {result['judged_by']} that choose{drawn}; the foretold and the measured losses of "
            f"{len(result['mixes'])} random mixes of the first draw have Spearman's correlation {spearman:.2f}."
        )
    return "\n".join(
        [
            *lines,
            "",
            " ".join([*notes, "Figures: `benchmarks/results/budgets-demo.json` and `budgets-realbench.json`."]),
        ]
    )
