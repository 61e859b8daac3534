"""Claims about accuracy, on the real bench and on the bundled model."""

import math
from collections.abc import Callable
from statistics import fmean, median, stdev
from typing import Any

import claims
from adalog.study.evaluate import mcnemar
from adalog.study.paper import published
from claims import MEASURED, NUMBERS, README, listed, mean, middle, order, printed, results, says, span, tenths
from claims_budgets import budgets

WIDTHS = ("w8a8", "w6a6", "w4a4", "w3a3")

# --- the real bench ---


def real() -> dict[tuple[str, str], dict[str, Any]]:
    """The rows by method and bits; of several draws in rows of their own the first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results("realbench")["rows"]:
        found.setdefault((row["method"], row["bits"]), row)
    return found


def lost(method: str, bits: str) -> float:
    """Points of top-1 below full precision."""
    return 100 * (mean(results("realbench")["fp32"]["top1"]) - mean(real()[method, bits]["top1"]))


def others(bits: str) -> list[str]:
    """The methods of other papers."""
    return [method for method, width in real() if width == bits and not method.startswith("adalog")]


def most_right(methods: list[str], bits: str) -> str:
    return f"{max(100 * mean(real()[method, bits]['top1']) for method in methods):.0f} %"


def worse(method: str, than: str, bits: str, where: Callable[[str], bool]) -> list[float]:
    """By how many dB each of these sites is worse."""
    one, other = (real()[name, bits]["sqnr"] for name in (method, than))
    return sorted(other[site] - one[site] for site in one if site in other and where(site))


def depthwise(site: str) -> bool:
    """A convolution whose input has one scale per channel."""
    return site.endswith(".conv") and " x " in real()["adalog", "w4a4"]["left"][site]


@says(MEASURED)
def depthwise_layers() -> str:
    count = sum(map(depthwise, real()["adalog", "w4a4"]["left"]))
    return f"The inputs of its {NUMBERS[count]} depthwise convolutions get one scale per channel."


@says(MEASURED)
def real_w8a8() -> str:
    p = {method: middle(row["mcnemar_p"]) for (method, bits), row in real().items() if bits == "w8a8"}
    equal = [method for method in p if p[method] >= 0.05]
    told = listed([f"`{method}`" for method in equal])
    values, rest = listed([f"{p[method]:.2g}" for method in equal]), max(p[name] for name in p if name not in equal)
    return (
        f"W8A8. {told} cannot be told from full precision (p {values}); every other method can (p at most "
        f"{claims.at_most(rest)})."
    )


@says(MEASURED)
def real_w6a6() -> str:
    best = min(others("w6a6"), key=lambda method: lost(method, "w6a6"))
    ours, paper, rival = (lost(method, "w6a6") for method in ("adalog", "adalog-paper", best))
    return (
        f"W6A6. `adalog` loses {ours:.0f} points and `adalog-paper` {paper:.0f}; the best method of another paper, "
        f"`{best}`, loses {rival:.0f}."
    )


@says(MEASURED)
def real_w4a4() -> str:
    ahead, p = (
        lost("adalog-paper", "w4a4") - lost("adalog", "w4a4"),
        middle(real()["adalog-paper", "w4a4"]["mcnemar_p_adalog"]),
    )
    rest = [*others("w4a4"), "adalog-released"]
    return (
        f"W4A4. `adalog` is {abs(ahead):.0f} points {'ahead of' if ahead > 0 else 'behind'} `adalog-paper` (p {p:.2g}) "
        f"and {lost('adalog', 'w4a4'):.0f} behind full precision; no other method has more than "
        f"{most_right(rest, 'w4a4')} right."
    )


@says(MEASURED)
def real_w3a3() -> str:
    return (
        f"W3A3. No method has more than {most_right([name for name, bits in real() if bits == 'w3a3'], 'w3a3')} right."
    )


@says(MEASURED)
def real_seconds() -> str:
    """Rows that took far longer than the same method at other bits, maybe with other code or beside other work."""
    seconds = {key: mean(row["seconds"]) for key, row in real().items() if "renewed" not in row}
    usual = {method: median(seconds[key] for key in seconds if key[0] == method) for method, _ in seconds}
    slow = [key for key in seconds if seconds[key] > 1.3 * usual[key[0]]]
    at = {bits: listed([f"`{method}`" for method, width in slow if width == bits]) for _, bits in slow}
    told = [f"of {methods} at {bits.upper()}" for bits, methods in at.items()]
    times = [seconds[key] / usual[key[0]] for key in slow]
    return (
        f"The seconds {listed(told)} are {min(times):.1f} to {max(times):.1f} times the median of their method's, and "
        "are not to be compared."
        if told
        else ""
    )


@says(MEASURED)
def real_released() -> str:
    ranges, count = {}, sum(map(depthwise, real()["adalog", "w4a4"]["left"]))
    for bits in ("w4a4", "w6a6", "w8a8"):
        found = worse("adalog-released", "adalog", bits, depthwise)
        order(found[0] > 0 and len(found) == count, bits, found)
        ranges[bits] = span(found[0], found[-1])
    apart = lost("adalog-released", "w8a8") - lost("adalog", "w8a8")
    return (
        f"`adalog-released` is {apart:.0f} points below `adalog` at W8A8. All {NUMBERS[count]} depthwise layers are "
        f"worse than ours: by {ranges['w4a4']} dB at W4A4, {ranges['w6a6']} at W6A6 and {ranges['w8a8']} at W8A8."
    )


@says(MEASURED)
def real_released_elsewhere() -> str:
    found = median(worse("adalog-released", "adalog", "w8a8", lambda site: not depthwise(site)))
    return f"At W8A8 the other sites are worse too, by {found:.1f} dB at the median:"


@says(MEASURED)
def real_apq_vit() -> str:
    order(all(lost("apq-vit", bits) - lost("ptq4vit", bits) > 5 for bits in ("w8a8", "w6a6")), "apq-vit", "ptq4vit")
    few = [mean(real()[method, bits]["top1"]) for method in ("apq-vit", "ptq4vit") for bits in ("w4a4", "w3a3")]
    order(max(few) < 0.01, few)
    return (
        "`apq-vit`, our reading of its paper, ends below `ptq4vit`, on which it builds, at W8A8 and W6A6; at fewer "
        "bits neither has 1 % right."
    )


@says(MEASURED)
def real_apq_vit_sites() -> str:
    split, uniform = (
        worse("apq-vit", than, "w6a6", lambda site: site.endswith(".av")) for than in ("ptq4vit", "minmax")
    )
    return (
        f"At W6A6 its products of softmax and V are {span(split[0], split[-1])} dB worse than with PTQ4ViT's split "
        f"codes, and within {math.ceil(max(map(abs, uniform)))} dB of `minmax`."
    )


@says(MEASURED)
def real_easyquant() -> str:
    eight, six = (worse("easyquant", "minmax", bits, lambda site: "local_conv" in site) for bits in ("w8a8", "w6a6"))
    return (
        f"Its {NUMBERS[len(eight)]} `local_conv` layers are {span(eight[0], eight[-1])} dB worse than with `minmax` at "
        f"W8A8, and {span(six[0], six[-1])} dB at W6A6."
    )


@says(MEASURED)
def real_evol_q() -> str:
    p, counts = {}, {}
    for bits in WIDTHS:
        one, other = (int(real()[method, bits]["right"], 16) for method in ("fq-vit", "evol-q"))
        counts[bits] = (one & ~other).bit_count(), (other & ~one).bit_count(), one.bit_count()
        p[bits] = mcnemar(*counts[bits][:2])
    order([bits for bits in WIDTHS if p[bits] < 0.05] == ["w4a4"], p)
    fewer, more, whole = counts["w4a4"]
    order(fewer == whole and more == 0, counts["w4a4"])
    return (
        "It cannot be told from `fq-vit` at W8A8, W6A6 and W3A3. At W4A4 it is worse: it loses all "
        f"{fewer} images that `fq-vit` gets right and gains none (p {p['w4a4']:.2g})."
    )


@says(README)
def real_readme() -> str:
    p, fp32 = middle(real()["adalog", "w8a8"]["mcnemar_p"]), 100 * mean(results("realbench")["fp32"]["top1"])
    order(p >= 0.05, p)
    best = min(others("w6a6"), key=lambda method: lost(method, "w6a6"))
    return (
        f"At W8A8 `adalog` cannot be told from full precision (p {p:.2g}), and at W6A6 it loses "
        f"{lost('adalog', 'w6a6'):.0f} points where the best method of another paper loses {lost(best, 'w6a6'):.0f}. "
        f"At W4A4 it loses {lost('adalog', 'w4a4'):.0f} of {fp32:.1f} points, and at W3A3 no method of this table has "
        f"more than {most_right([name for name, bits in real() if bits == 'w3a3'], 'w3a3')} right."
    )


# --- several draws on the real bench ---


def drawn(method: str, bits: str) -> list[dict[str, Any]]:
    rows = results("realbench-draws")["rows"]
    return [row for row in rows if (row["method"], row["bits"]) == (method, bits)]


def spread(method: str, bits: str) -> str:
    values = [100 * row["top1"] for row in drawn(method, bits)]
    order(len(values) == 3, values)
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"


@says(README)
def draws_readme() -> str:
    ours, repq, ptq = ([spread(name, bits) for bits in WIDTHS[:3]] for name in ("adalog", "repq-vit", "ptq4vit"))
    return (
        "The table is of one draw of images, measured with an earlier search. Over three draws with the present one "
        f"`adalog` has {listed(ours)} % at W8A8, W6A6 and W4A4, `repq-vit` {listed(repq)} %, and `ptq4vit` "
        f"{listed(ptq)} % (mean ± standard deviation)."
    )


@says(MEASURED)
def draws_measured() -> str:
    p = [max(row["mcnemar_p_adalog"] for row in drawn("repq-vit", bits)) for bits in WIDTHS[:3]]
    most = [claims.at_most(each) for each in p]
    for bits in WIDTHS[:3]:
        pairs = zip(drawn("adalog", bits), drawn("repq-vit", bits), strict=True)
        order(all(one["top1"] > other["top1"] and one["seed"] == other["seed"] for one, other in pairs), bits)
    moved = [stdev(100 * row["top1"] for row in drawn("adalog", bits)) for bits in WIDTHS[:3]]
    order(moved[2] == max(moved), moved)
    return (
        f"`repq-vit` is behind `adalog` in each of three draws at each width (p at most {most[0]} at W8A8, {most[1]} "
        f"at W6A6 and {most[2]} at W4A4). At W4A4 the draws of `adalog` differ most, by a standard deviation of "
        f"{moved[2]:.1f} points."
    )


@says(MEASURED)
def draws_released() -> str:
    widths = [bits for bits in WIDTHS[:3] if drawn("adalog-released", bits)]
    found = listed([spread("adalog-released", bits) for bits in widths])
    return f"`adalog-released` has {found} % at {listed([bits.upper() for bits in widths])}, on the same draws."


# --- the bundled model ---


@says(MEASURED)
def twins() -> str:
    rows = {(row["names"][0], row["bits"]): row for row in results("tables-demo-twins")["rows"]}
    apart = {
        (method, bits): top1(rows[f"{method}-released", bits]) - top1(rows[method, bits])
        for method in ("repq-vit", "ptq4vit")
        for bits in ("w6a6", "w4a4", "w3a3")
    }
    most = max(abs(value) for (_, bits), value in apart.items() if bits != "w3a3")
    repq, ptq = apart["repq-vit", "w3a3"], apart["ptq4vit", "w3a3"]
    order(repq > 0 > ptq, apart)
    behind = [rows[method, "w3a3"] for method, bits in rows if bits == "w3a3" and method != "adalog"]
    order(all(max(row["top1"]["values"]) < min(rows["adalog", "w3a3"]["top1"]["values"]) for row in behind), behind)
    p = max(value for row in behind for value in row["p_adalog"])
    return (
        f"At W3A3 `repq-vit-released` is {repq:.1f} points above `repq-vit`, and `ptq4vit-released` {-ptq:.1f} below "
        f"`ptq4vit`; at 6 and 4 bits they differ by {most:.1f} points at most. At W3A3 all four are behind `adalog` in "
        f"each draw (p at most {p:.1g})."
    )


def shown(table: str, bits: str, *names: str) -> dict[str, Any]:
    """A row of tables-demo.json by its first names; a search may be called ours."""
    rows = [row for row in results("tables-demo")["rows"] if row["table"] == table and row["bits"] == bits]
    found = [row for row in rows if tuple(name.removesuffix(", ours") for name in row["names"])[: len(names)] == names]
    assert len(found) == 1, (table, bits, names)
    return found[0]


def top1(row: dict[str, Any]) -> float:
    return 100 * mean(row["top1"])


def kept(row: dict[str, Any]) -> float:
    return 100 * mean(row["agreement"])


def below(row: dict[str, Any]) -> float:
    """Points of top-1 below full precision."""
    return 100 * results("tables-demo")["models"]["demo"]["top1"] - top1(row)


def p_adalog(row: dict[str, Any]) -> float:
    return middle(row["p_adalog"])


@says(MEASURED)
def demo_order() -> str:
    names = ("adalog", "repq-vit", "ptq4vit")
    models = [name for name, spec in published()["models"].items() if spec.startswith("timm:")]
    for model in models:
        values = [printed("1", "w4a4", model, name) for name in names]
        order(values == sorted(values, reverse=True), model, values)
    rows = [shown("1", "w4a4", name) for name in names]
    apart = max(map(top1, rows)) - min(map(top1, rows))
    share = mean(rows[0]["top1"])
    order(apart < 100 * math.sqrt(share * (1 - share) / results("tables-demo")["models"]["demo"]["images"]), apart)
    ahead = kept(rows[0]) - max(map(kept, rows[1:]))
    three = {name: top1(shown("1", "w3a3", name)) for name in names}
    ranked = sorted(three, key=lambda name: -three[name])
    return (
        f"The order adalog, repq-vit, ptq4vit. The paper has it on all {NUMBERS[len(models)]} models at W4/A4. Here "
        f"all three are within {apart:.1f} points in top-1, less than a standard error; adalog's agreement is at least "
        f"{ahead:.1f} points above that of the others. At W3/A3 the order is {', '.join(ranked)} "
        f"({listed([f'{three[name]:.1f}' for name in ranked])} %)."
    )


@says(MEASURED)
def demo_sides() -> str:
    found = {(row["method"], row["bits"]): 100 * mean(row["top1"]) for row in results("sides")["rows"]}
    whole, names = 100 * results("sides")["fp32"], ("repq-vit", "ptq4vit", "adalog")
    weights, activations = ([tenths(whole - found[name, bits]) for name in names] for bits in ("w3a32", "w32a3"))
    return (
        f"Each side loses by itself (`benchmarks/sides.py`): weights of 3 bits alone cost repq-vit {weights[0]} "
        f"points, ptq4vit {weights[1]} and adalog {weights[2]}; activations of 3 bits alone cost them "
        f"{listed(activations)}:"
    )


@says(MEASURED)
def demo_released() -> str:
    p = [p_adalog(shown("1", bits, "adalog-released")) for bits in ("w4a4", "w3a3", "w6a6")]
    order(min(p) >= 0.05, p)
    apart = lost("adalog-released", "w8a8") - lost("adalog", "w8a8")
    return (
        "adalog and adalog-released are level on this model. Neither W4/A4, W3/A3 nor W6/A6 tells them apart "
        f"(p {listed([f'{value:.2g}' for value in p])}). On TinyViT above they are {apart:.0f} points apart at W8A8."
    )


@says(MEASURED)
def demo_softmax() -> str:
    def frame(name: str, bits: str, kind: str) -> dict[str, Any]:
        return shown("A", bits, kind, name)

    three = below(frame("released", "w4a4s3", "log-sqrt2"))
    two = {kind: below(frame("released", "w4a4s2", kind)) for kind in ("log2", "log-sqrt2")}
    p = middle(frame("released", "w4a4s2", "adalog")["p_float"])
    order(p >= 0.05, p)
    ours = {kind: frame("ours", "w4a4s2", kind) for kind in ("adalog", "log2", "log-sqrt2", "uniform")}
    order(all(below(ours[kind]) < two[kind] / 2 for kind in two), two, {kind: below(ours[kind]) for kind in two})
    order(max(ours, key=lambda kind: kept(ours[kind])) == "adalog", {kind: kept(ours[kind]) for kind in ours})
    return (
        "With 3 and 2 bits after softmax (S3, S2), log-sqrt2 and then log2 lose accuracy and adalog does not. This "
        "holds with the released search (scale 1 after softmax, zero beyond the last code): at S3 log-sqrt2 is "
        f"{three:.0f} points below full precision; at S2 log2 is {two['log2']:.0f} and log-sqrt2 "
        f"{two['log-sqrt2']:.0f} points below, and adalog cannot be told from full precision (p {p:.2g}). Our search "
        "finds a scale for each of them and lets the last code mean zero. There, at S2, log2 loses "
        f"{below(ours['log2']):.1f} points and log-sqrt2 {below(ours['log-sqrt2']):.1f}, and adalog keeps the "
        "most agreement: a searched scale makes up for most of what a fixed base loses."
    )


@says(MEASURED)
def demo_search() -> str:
    rows = {name: shown("5", "w3a3", name) for name in ("alternating", "FPCS", "brute force")}
    told = [p_adalog(rows[name]) for name in ("alternating", "brute force")]
    order(
        min(told) >= 0.05 and max(rows, key=lambda name: top1(rows[name])) == "alternating",
        told,
        {name: top1(rows[name]) for name in rows},
    )
    order(len(rows["brute force"]["seeds"]) == 1, "draws of brute force")
    seconds = {name: mean(row["seconds"]) for name, row in rows.items()}
    variants = results("search-demo-ablation")["variants"]
    whole = variants["all rows in every step"]["seconds"] / variants["default"]["seconds"]
    behind = [
        printed("5", "w3a3", model, "FPCS") - printed("5", "w3a3", model, "alternating")
        for model in ("DeiT-T", "DeiT-S")
    ]
    return (
        "FPCS and alternating search cannot be told apart on this model. Alternating is nominally the best at W3/A3 "
        f"({top1(rows['alternating']):.2f} % against {top1(rows['FPCS']):.2f} % by FPCS, p {told[0]:.2g}); brute force "
        f"has {top1(rows['brute force']):.2f} %, of one draw (p {told[1]:.2g}). FPCS takes "
        f"{seconds['FPCS'] / seconds['alternating']:.1f} times the seconds of alternating, brute force "
        f"{seconds['brute force'] / seconds['alternating']:.0f} times. This FPCS samples the rows, which the other two "
        f"do not: at W4/A4 it takes {whole:.1f} times its own seconds with all rows in every step (`demo-ablation` "
        f"below). In the paper's Table 5 alternating is {behind[0]:.2f} and {behind[1]:.2f} points behind FPCS."
    )


@says(MEASURED)
def demo_gelu() -> str:
    rows = [row for row in results("tables-demo")["rows"] if row["table"] == "B"]
    p = [p_adalog(row) for row in rows if any(value is not None for value in row["p_adalog"])]
    order(min(p) >= 0.05, p)
    low, high = (f"{choose(map(kept, rows)):.0f}" for choose in (min, max))
    return (
        f"After GELU every quantizer keeps {low} to {high} % of the answers at 4 bits, and none can be told from "
        f"adalog (p at least {claims.at_least(min(p))})."
    )


@says(MEASURED)
def demo_readme() -> str:
    found = {bits: [row for row in results("demo")["rows"] if row["bits"] == bits] for bits in ("w6a6", "w4a4", "w3a3")}
    top, same = (
        {bits: 100 * (max(map(read, rows)) - min(map(read, rows))) for bits, rows in found.items()}
        for read in (lambda row: mean(row["top1"]), lambda row: mean(row["agreement"]))
    )
    order(max(top["w6a6"], top["w4a4"]) < 0.65, top)
    order(all(same[bits] > top[bits] for bits in ("w6a6", "w4a4", "w3a3")), top, same)
    ahead: dict[str, str] = {}
    for bits, rows in found.items():
        kept = {row["method"]: 100 * mean(row["agreement"]) for row in rows}
        best = max(kept, key=kept.__getitem__)
        order(best != "adalog", bits, kept)
        ahead[bits] = f"{best} by {kept[best] - kept['adalog']:.2f}"
    order([text.split()[0] for text in ahead.values()] == ["uniform", "uniform", "log2"], ahead)
    return (
        f"On this easy task top-1 differs by at most {tenths(top['w6a6'])} points at 6 bits and {tenths(top['w4a4'])} "
        "at 4, less than a standard error. Agreement with the full-precision model differs by more. On this one draw "
        f"another quantizer agrees more at every width: {ahead['w6a6']} points at 6 bits, {ahead['w4a4']} at 4, and "
        f"{ahead['w3a3']} at 3."
    )


@says(MEASURED)
def cost_of_four_bits() -> str:
    """By every file that has measured the search alone on all images, run by run."""
    full, stages, engines = (results(name) for name in ("demo", "reconstruct-demo", "runtime-demo"))
    top = [mean(row["top1"]) for row in full["rows"] if (row["bits"], row["method"]) == ("w4a4", "adalog")]
    top += [row["top1"] for row in stages["rows"] if (row["bits"], row["stage"]) == ("w4a4", "search")]
    top.append(engines["accuracy"]["native/w4a4"]["top1"])
    top += shown("1", "w4a4", "adalog")["top1"]["values"]
    top += [row["top1_uniform"] for row in budgets("demo")["demo"] if row["bits"] == "w4a4"]
    top += [row["top1"] for row in results("executors")["rows"] if run_as_chosen(row)]
    real_top = [real()["adalog", "w4a4"]["top1"]]
    real_top += [
        row["top1"]
        for name in ("", "-1000")
        for row in results(f"reconstruct-realbench{name}")["rows"]
        if (row["bits"], row["stage"]) == ("w4a4", "search")
    ]
    real_top += [row["top1_uniform"] for row in budgets("realbench")["realbench"] if row["bits"] == "w4a4"]
    draws = results("realbench-draws")["rows"]
    real_top += [row["top1"] for row in draws if (row["bits"], row["method"]) == ("w4a4", "adalog")]
    cost, real_cost = (
        sorted(100 * (whole - each) for each in found)
        for whole, found in ((stages["fp32"], top), (results("reconstruct-realbench")["fp32"], real_top))
    )
    return (
        f"What 4 bits cost depends on the model: {tenths(cost[0])} to {tenths(cost[-1])} points on the bundled one, by "
        f"draw, processor and executor, and {tenths(real_cost[0])} to {tenths(real_cost[-1])} on TinyViT."
    )


def run_as_chosen(row: dict[str, Any]) -> bool:
    """Whether a row of executors.json is of W4A4 on all images, with the tables that calibration chose."""
    return row["bits"] == "w4a4" and row["images"] == 2000 and " x " in row["table"]


@says(MEASURED)
def detector_order() -> str:
    """Ahead: 95 % of the resamplings of scenes are on one side of nothing."""
    found = results("detection-demo")["rows"]
    rows, six = (
        {row["method"]: row["below_adalog"] for row in found if row["bits"] == bits} for bits in ("w4a4", "w6a6")
    )
    apart = {
        kind: {name for name in six if not six[name][kind][0] <= 0 <= six[name][kind][2]} for kind in six["uniform"]
    }
    order(apart == {"box_ap": set(six) - {"adalog", "percentile", "uniform"}, "mask_ap": set()}, apart)
    behind = ("repq-vit", "ptq4vit", "fq-vit", "percentile", "minmax")
    order(all(rows[name][kind][0] > 0 for name in behind for kind in ("box_ap", "mask_ap")), rows)
    order(all(low < 0 < high for low, _, high in rows["uniform"].values()), rows["uniform"])
    names = listed([f"`{name}`" for name in behind])
    return (
        f"With all parts at W4A4, `adalog` is ahead of {names} by more than the choice of scenes explains, and level "
        "with `uniform`, which has the same search. At W6A6 the masks of no method can be told from those of `adalog`, "
        "and neither can the boxes of `percentile` and `uniform`."
    )
